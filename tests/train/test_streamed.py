"""Texts that are read and tokenized as a run trains: all of them, shuffled, and resumed exactly."""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from train import tasks
from train.data import stream, text
from train.data.folder import META_FILE
from train.data.packing import Packed
from train.data.rows import find_shards
from train.data.streamed import Streamed
from train.errors import ConfigError
from train.prepare.text import PrepareOptions, prepare

TEXTS = [f"def function_{n}():\n    return {n} ** {n % 7}\n" for n in range(600)]
DATA_SET = """
import pathlib
FILES = [str(path) for path in pathlib.Path(__file__).parent.glob("rows/*.parquet")]
def texts():
    import datasets
    data = datasets.load_dataset("parquet", data_files=FILES, split="train", streaming=True)
    return data.reshard().rename_column("code", "text")
def nothing():
    return [1]
"""


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    """Texts as row groups, as lines and as a data set; the first third is prepared."""
    top = tmp_path_factory.mktemp("streamed")
    (top / "rows").mkdir()
    for name, some in (("a", TEXTS[:400]), ("b", TEXTS[400:])):
        table = pyarrow.table({"number": list(range(len(some))), "code": some})
        parquet.write_table(table, top / "rows" / f"{name}.parquet", row_group_size=40)
    lines = [json.dumps({"code": code}) for code in ("", *TEXTS)]
    (top / "lines.jsonl").write_text("\n".join(lines))
    (top / "my_texts.py").write_text(DATA_SET)
    limit = sum(map(len, TEXTS[:200])) / 1e6
    options = {"column": "code", "vocab_size": 400, "max_megabytes": limit}
    prepare(PrepareOptions(out=top / "data", rows=top / "rows", **options))
    meta = json.loads((shutil.copytree(top / "data", top / "chats") / META_FILE).read_text())
    (top / "chats" / META_FILE).write_text(json.dumps(meta | {"conversations": True}))
    return top


@pytest.fixture(autouse=True)
def path(top, monkeypatch):
    monkeypatch.syspath_prepend(top)
    monkeypatch.chdir(top)
    monkeypatch.setenv("HF_HOME", str(top / "cache"))


def _shards(source):
    return find_shards(source, "text" if ":" in source else "code", option="data.rows")


def _windows(tokens):
    return text.Windows(tokens, 8)


def _streamed(top, source="rows", rows=_windows):
    return Streamed(_shards(source), top / "data", sequence_length=8, rows=rows)


def _take(batches, count):
    return [batch["tokens"] for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("rows", 15),
        ("lines.jsonl", 1),
        pytest.param("my_texts:texts", 15, marks=pytest.mark.slow),
    ],
)
def test_every_text_but_those_held_out_comes_once_an_epoch(top, source, count):
    windows = []

    def rows(tokens):
        windows.append(tokens)
        return _windows(tokens)

    data = _streamed(top, source, rows)
    assert len(data.shards) == count
    batches = data.batches(batch_size=1, seed=4, rows=np.array([0]))
    given = []
    while sum(map(len, windows)) < 26_000:
        given += next(batches)["tokens"].tolist()
    batches.close()
    # Windows overlap by one token.
    tokens = np.concatenate([windows[0], *(window[1:] for window in windows[1:])])
    tokenizer, end = text.load_tokenizer(top / "data"), text.end_of_text(top / "data")
    ends = np.flatnonzero(tokens == end)
    pieces = [p[p != end] for p in np.split(tokens, ends + 1)[:-1]]
    read = [tokenizer.decode(piece.tolist()) for piece in pieces]
    heldout = text.read_tokens(top / "data" / text.HELDOUT_FILE)[:]
    kept_out = {t for t in TEXTS if t in tokenizer.decode(heldout.tolist())}
    assert 3 <= len(kept_out) <= 30
    train = set(TEXTS) - kept_out
    first, second = read[: len(train)], read[len(train) : 2 * len(train)]
    assert set(first) == set(second) == train
    # Shards come in an order of their own; so do the rows of a window.
    assert (first == sorted(first, key=TEXTS.index)) == (first == second) == (count == 1)
    in_order = _windows(windows[0]).read(np.arange(16), np.zeros((16, 3)))["tokens"].tolist()
    assert given[:16] != in_order
    assert sorted(given[:16]) == sorted(in_order)


PACK = {"windows": _windows, "packed": lambda tokens: Packed(tokens, 8, end_of_text=0)}


@pytest.mark.parametrize(
    ("batch_size", "kind"),
    [(6, "windows"), (40, "packed")],
    ids=["a shard per row", "rows share shards"],
)
def test_a_resume_is_exact_also_on_other_processes(top, batch_size, kind):
    data = _streamed(top, rows=PACK[kind])
    options = {"batch_size": batch_size, "seed": 5}
    unbroken = stream.batches(data, **options)
    before = _take(unbroken, 21)  # in the second window
    state = json.loads(json.dumps(unbroken.get_state()))
    expected = _take(unbroken, 60)
    assert not np.array_equal(before, expected[:21])
    half = batch_size // 2
    for part in (slice(None), slice(0, half), slice(half, None)):
        resumed = stream.batches(data, **options, rows=np.arange(batch_size)[part])
        stream.continue_at(resumed, state)
        np.testing.assert_array_equal(_take(resumed, 60), [batch[part] for batch in expected])
        resumed.close()
    other = stream.batches(data, batch_size=batch_size, seed=6)
    stream.continue_at(other, state)
    assert not np.array_equal(_take(other, 60), expected)
    unbroken.close()
    other.close()


def test_processes_read_disjoint_shards(top):
    """And those of a later, smaller batch still read all of them."""
    data = _streamed(top)
    reads = []

    def recording(number, shard):
        return dataclasses.replace(shard, read=lambda row: reads.append(number) or shard.read(row))

    data.shards = [recording(number, shard) for number, shard in enumerate(data.shards)]
    seen = []
    for rows in (range(4), range(4, 8)):
        batches = stream.batches(data, batch_size=8, seed=1, rows=rows)
        _take(batches, 20)
        state = batches.get_state()
        batches.close()
        seen.append(set(reads))
        reads.clear()
    assert not seen[0] & seen[1]
    assert len(seen[0]) >= 4 <= len(seen[1])
    fewer = stream.batches(data, batch_size=3, seed=1)
    stream.continue_at(fewer, state | {"readers": [[0, 0, 0, 0]] * len(state["readers"])})
    _take(fewer, 60)
    fewer.close()
    assert seen[0] | seen[1] <= set(reads)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": "nothing"}, "data.rows=nothing is neither a file nor a folder with rows in "),
        ({"rows": "rows"}, "data.rows=rows: a.parquet cannot be read: it has no column 'text', "),
        ({"rows": "lines.jsonl"}, "lines.jsonl cannot be read: a line has no field 'text'"),
        ({"rows": "no_module:texts"}, "cannot be imported and called: No module named 'no_module"),
        ({"rows": "my_texts:nothing"}, "returned a list, and not a datasets.IterableDataset"),
        ({"rows": "lines.jsonl", "mix": {"data": 2.0}}, "Nearest valid: data.mix={}, and a "),
        ({"rows": "lines.jsonl", "path": "chats"}, "data.path=chats holds conversations, "),
    ],
    ids=lambda value: str(value.get("rows")) if isinstance(value, dict) else "",
)
def test_what_cannot_be_streamed_is_refused(make, fields, message):
    config = make({"data.path": "data", "model.sequence_length": 8, "model.vocab_size": 400})
    config = config.model_copy(update={"data": config.data.model_copy(update=fields)})
    found = [f.message for f in tasks.make(config).data_failures() if "data.rows" in f.fields]
    assert any(message in text for text in found), found
    bert = make({"task": "bert", "model.vocab_size": 400, "data.rows": "rows"})
    assert [f.fields for f in tasks.make(bert).unread_options()] == [("data.rows", "task")]


def test_rows_that_break_during_a_run_are_named(top, tmp_path):
    file = shutil.copy(top / "lines.jsonl", tmp_path)
    data = _streamed(top, file)
    with open(file, "a") as lines:
        lines.write("\n{")
    with pytest.raises(ConfigError, match=r"data\.rows=.*lines.jsonl cannot be read: Expecting"):
        _take(stream.batches(data, batch_size=2, seed=0), 2000)
