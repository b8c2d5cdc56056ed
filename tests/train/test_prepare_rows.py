"""Rows of Parquet and JSON Lines: all become documents, however they are grouped."""

import io
import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from rich.console import Console

from train.data import text
from train.prepare import rows
from train.prepare.text import PrepareOptions, prepare

TEXTS = [f"def function_{n}():\n    return {n} ** {n % 7}\n" for n in range(300)]


@pytest.fixture
def corpus(tmp_path):
    """300 texts: 200 in two Parquet files, one of them in a folder, and 100 lines of JSON."""
    folder = tmp_path / "corpus"
    (folder / "part").mkdir(parents=True)
    for name, some in (("a.parquet", TEXTS[:100]), ("part/b.parquet", TEXTS[200:])):
        table = pyarrow.table({"number": list(range(len(some))), "code": some})
        parquet.write_table(table, folder / name, row_group_size=17)
    lines = [json.dumps({"code": code}) for code in [*TEXTS[100:200], ""]]
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def run(options):
    report = io.StringIO()
    prepare(options, console=Console(file=report, width=200))
    return report.getvalue()


def documents_of(folder, name):
    tokenizer, end = text.load_tokenizer(folder), text.end_of_text(folder)
    tokens = np.asarray(text.read_tokens(folder / name)[:])
    pieces = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    return [tokenizer.decode(piece[:-1].tolist()) for piece in pieces if len(piece)]


@pytest.mark.parametrize("group_bytes", [10**6, 1000], ids=["one group", "many groups"])
def test_every_row_becomes_a_document(corpus, tmp_path, monkeypatch, group_bytes):
    monkeypatch.setattr(rows, "GROUP_BYTES", group_bytes)
    options = PrepareOptions(
        out=tmp_path / "out", rows=corpus, column="code", vocab_size=400, heldout_fraction=0.2
    )
    report = run(options)
    assert "rows left out (empty): 1" in report
    train, heldout = (documents_of(options.out, name) for name in text.ROLE_FILES)
    assert sorted(train + heldout) == sorted(TEXTS)
    assert 30 <= len(heldout) <= 90
    assert train == sorted(train, key=TEXTS.index)  # the files in the order of their names
    meta = text.read_meta(options.out)
    assert (meta.train.documents, meta.heldout.documents) == (len(train), len(heldout))
    assert meta.train.bytes + meta.heldout.bytes == sum(map(len, TEXTS))
    assert "already prepared" in run(options)


def test_a_limit_leaves_rows_out_and_says_so(corpus, tmp_path):
    options = PrepareOptions(
        out=tmp_path / "out", rows=corpus / "a.parquet", column="code", max_megabytes=0.002
    )
    assert "rows left out (over --max-megabytes)" in run(options)
    assert sum(meta.bytes for meta in sizes(options.out)) <= 2000


def sizes(folder):
    meta = text.read_meta(folder)
    return meta.train, meta.heldout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n', "b.jsonl cannot be read: .*no field 'code'"),
        (b'{"code": 3}\n', "b.jsonl cannot be read: row 1 holds no text, but 3"),
        (b'{"code": "a"\n', "b.jsonl cannot be read: Expecting"),
    ],
    ids=["no such field", "a number", "cut short"],
)
def test_rows_without_texts_are_named(corpus, tmp_path, content, words):
    (corpus / "b.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        run(PrepareOptions(out=tmp_path / "out", rows=corpus, column="code"))
    assert not (tmp_path / "out").exists()


def test_a_missing_column_and_a_damaged_file_are_named(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"no column 'text', but number, code"):
        run(PrepareOptions(out=tmp_path / "out", rows=corpus))
    (corpus / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a.parquet cannot be read"):
        run(PrepareOptions(out=tmp_path / "out", rows=corpus, column="code"))
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        run(PrepareOptions(out=tmp_path / "out", rows=tmp_path / "nothing"))
