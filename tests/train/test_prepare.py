"""Preparing text: deterministic, whole or absent, nothing lost silently, with any tokenizer."""

import dataclasses
import errno
import io
import itertools
import json
import os
import signal
from pathlib import Path

import pyarrow
import pytest
from byte_tokenizer import byte_tokenizer
from command import finish, start
from pyarrow import parquet
from rich.console import Console

from train.data import rows
from train.data import text as texts
from train.data.text import load_tokenizer, read_meta, read_tokens
from train.prepare import folders
from train.prepare import text as prepare_module
from train.prepare.__main__ import main
from train.prepare.text import (
    Document,
    PrepareOptions,
    collect_documents,
    prepare,
    split_documents,
)


@pytest.fixture
def text(tmp_path):
    """A folder of 40 small documents, one of them with the end-of-text mark written out."""
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    for index in range(40):
        name = f"deep/{index}.md" if index % 2 else f"{index}.txt"
        body = f"Document {index} says </s>: the pipeline är full — {index * index}.\n" * 3
        (folder / name).write_text(body + "<|endoftext|>" * (index == 3), encoding="utf-8")
    return folder


@pytest.fixture
def options(tmp_path, text):
    return PrepareOptions(out=tmp_path / "out", text=text, vocab_size=300, heldout_fraction=0.2)


@pytest.fixture
def with_tokenizer(tmp_path, options):
    """Text for a tokenizer as that of a Llama: every text begins with <s>, and </s> ends a text."""
    made, folder = byte_tokenizer(begins=True), tmp_path / "tokenizer"
    made.enable_truncation(5)
    made.enable_padding(length=200)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "model_max_length": 5}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return PrepareOptions(out=options.out, text=options.text, tokenizer=folder)


def _run(options, **changes):
    """Prepares and returns what was reported."""
    report = io.StringIO()
    console = Console(file=report, width=200)
    prepare(dataclasses.replace(options, **changes), console=console)
    return report.getvalue()


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _documents(folder, name):
    """The texts of the documents in a token file."""
    tokenizer, end = load_tokenizer(folder), texts.end_of_text(folder)
    tokens = read_tokens(folder / name)[:].tolist()
    assert tokens[-1] == end
    grouped = itertools.groupby(tokens, lambda token: token == end)
    return [tokenizer.decode(list(part)) for is_end, part in grouped if not is_end]


def test_tokens_decode_to_the_documents(options, text):
    meta = prepare(options)
    assert meta == read_meta(options.out)
    assert sorted(path.name for path in options.out.iterdir()) == sorted(prepare_module._FILES)
    decoded = []
    for name, size in (("train", meta.train), ("heldout", meta.heldout)):
        tokens = read_tokens(options.out / f"{name}.tokens")[:]
        assert len(tokens) == size.tokens
        assert max(tokens) < meta.vocab_size
        parts = _documents(options.out, f"{name}.tokens")
        assert len(parts) == size.documents > 1
        assert sum(len(part.encode()) for part in parts) == size.bytes
        decoded += parts
    written = [path.read_text(encoding="utf-8") for path in text.rglob("*.*")]
    assert sorted(decoded) == sorted(written)


def test_tokenizer_learns_nothing_from_heldout_text(options, text):
    meta = prepare(options)
    _, heldout = split_documents(collect_documents(options)[0], heldout_fraction=0.2)
    (text / heldout[0].name).write_text("qzqzqz " * 1000)
    assert "already prepared" in _run(options)
    assert read_meta(options.out) == meta
    _run(options, force=True)
    again = read_meta(options.out)
    assert again.tokenizer_sha256 == meta.tokenizer_sha256
    assert again.documents_sha256 != meta.documents_sha256


def test_other_settings_need_force(options):
    prepare(options)
    with pytest.raises(ValueError, match=r"vocab_size is 300 there and 280 here.*--force"):
        _run(options, vocab_size=280)
    assert read_meta(options.out).vocab_size == 300
    (options.out / "train.tokens").unlink()  # no more is damaged data of other settings replaced
    with pytest.raises(ValueError, match=r"text is .* there and 'stdlib' here"):
        _run(options, text=None)
    assert "not whole and is prepared again" in _run(options)
    _run(options, vocab_size=280, force=True)
    assert read_meta(options.out).vocab_size == 280
    assert [path.name for path in options.out.parent.glob(".out*")] == []


def test_a_file_is_never_replaced(options):
    options.out.write_text("ten years")
    for force in (False, True):
        with pytest.raises(ValueError, match="is a file"):
            _run(options, force=force)
    assert options.out.read_text() == "ten years"


def test_a_full_disk_leaves_the_old_data_and_exits_with_2(options, monkeypatch, capsys):
    prepare(options)
    old = _content(options.out)

    def fail(path, tokens, **options):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(prepare_module, "write_tokens", fail)
    arguments = ["--out", str(options.out), "--text", str(options.text), "--force"]
    assert main(arguments) == 2
    assert "cannot write: No space left on device" in capsys.readouterr().err
    assert _content(options.out) == old
    assert [path.name for path in options.out.parent.glob(".out*")] == []


def test_a_killed_run_leaves_no_half_data(options):
    """Nothing carries the final name, and the next run clears up."""
    code = """
import os, signal, sys
from train.prepare import __main__, text
def die(path, tokens, **options):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
text.write_tokens = die
__main__.main(sys.argv[1:])
"""
    arguments = "--out", options.out, "--text", options.text, "--vocab-size", 300
    finish(start("python", "-c", code, *arguments), -signal.SIGKILL)
    assert not options.out.exists()
    assert len(list(options.out.parent.glob(".out*"))) == 1
    prepare(options)
    assert read_meta(options.out).vocab_size == 300
    assert list(options.out.parent.glob(".out*")) == []


def test_a_running_neighbor_is_not_disturbed(options):
    with folders.appearing(options.out) as folder:
        # Same name, another process: its lock is held, so its folder stays.
        neighbor = folder.rename(folder.with_name(".out.partial-neighbor"))
        prepare(options)
        assert neighbor.is_dir()
        neighbor.rename(folder)


# Documents.


def test_files_left_out_are_counted(options, text):
    (text / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (text / "zeros.txt").write_bytes(b"a\0b")
    (text / "empty.txt").write_text("")
    (text / ".hidden").write_text("secret")
    (text / "large.txt").write_text("x" * 200_000)
    documents, skipped = collect_documents(dataclasses.replace(options, max_megabytes=0.1))
    numbers = sorted(int(Path(document.name).stem) for document in documents)
    assert numbers == list(range(40))
    assert skipped == {"not UTF-8 text": 2, "empty": 1, "over --max-megabytes": 1}
    report = _run(options, max_megabytes=0.1)
    assert "files left out (over --max-megabytes): 1" in report


def test_a_limit_keeps_an_even_sample_in_name_order(options):
    everything, _ = collect_documents(options)
    half = sum(len(document.text.encode()) for document in everything) / 2e6
    some, skipped = collect_documents(dataclasses.replace(options, max_megabytes=half))
    names = [document.name for document in some]
    assert names == sorted(names)
    assert len(names) + skipped["over --max-megabytes"] == 40
    assert 10 < len(names) < 30
    assert names != [document.name for document in everything][: len(names)]


def test_prepared_data_inside_the_text_folder_is_not_text(options, text):
    inside = dataclasses.replace(options, out=text / "data")
    before = prepare(inside)
    (text / "data" / "meta.json").unlink()
    assert "not whole and is prepared again" in _run(inside)
    assert read_meta(inside.out).documents_sha256 == before.documents_sha256


def test_a_document_keeps_its_side_when_others_come():
    documents = [Document(str(index), "text") for index in range(400)]
    _, some = split_documents(documents[:300], heldout_fraction=0.1)
    train, heldout = split_documents(documents, heldout_fraction=0.1)
    assert {document.name for document in some} <= {document.name for document in heldout}
    assert sorted([*train, *heldout], key=lambda d: int(d.name)) == documents
    assert 15 < len(heldout) < 80
    for fraction in (1e-9, 1 - 1e-9):  # both sides get a document
        sides = split_documents(documents[:3], heldout_fraction=fraction)
        assert sorted(len(side) for side in sides) == [1, 2]


@pytest.mark.parametrize(
    "text", ["".join(f"line {n}\n" for n in range(50)), "no line end here", "ab"]
)
def test_a_single_document_is_cut_in_two(text):
    (first,), (second,) = split_documents([Document("a", text)], heldout_fraction=0.2)
    assert first.text + second.text == text
    assert first.text
    assert second.text
    assert first.text.endswith("\n") == ("\n" in text)
    with pytest.raises(ValueError, match="too short to split"):
        split_documents([Document("a", "x")], heldout_fraction=0.2)


def test_folder_without_text_is_refused(options, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"no text files found \(the folder holds no files\)"):
        _run(options, text=empty)
    (empty / "picture").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=r"no text files found \(1 left out: not UTF-8 text\)"):
        _run(options, text=empty)
    assert not options.out.exists()


def test_all_wrong_options_are_named_at_once(options, tmp_path, capsys):
    arguments = ["--out", str(options.out), "--text", str(tmp_path / "nowhere")]
    arguments += ["--vocab-size", "256", "--heldout-fraction", "1", "--max-megabytes", "0"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    for part in (
        "--vocab-size=256 is too small",
        "Nearest valid: 257",
        "--heldout-fraction=1 must lie between 0 and 1",
        "--max-megabytes=0 must be positive",
        "nowhere does not exist",
    ):
        assert part in error
    assert not options.out.exists()


def test_stdlib_is_the_default_text():
    documents, _ = collect_documents(PrepareOptions(out=Path("unused")))
    names = [document.name for document in documents]
    assert "dataclasses.py" in names
    assert all(name.endswith(".py") for name in names)
    skipped = prepare_module._STDLIB_SKIPPED
    folders = itertools.chain.from_iterable(name.split("/")[:-1] for name in names)
    assert not set(folders) & skipped


# A tokenizer that exists already.


def test_documents_begin_and_end_as_the_tokenizer_says(with_tokenizer):
    """Nothing is cut at the length of the model, and an end written in a text is ordinary text."""
    meta, out = prepare(with_tokenizer), with_tokenizer.out
    assert meta == read_meta(out)
    assert meta.end_of_text == "</s>"
    assert meta.token_ids == {"bos": 1, "eos": 2, "pad": None}
    assert meta.vocab_size == 259
    tokens = read_tokens(out / "train.tokens")[:].tolist()
    assert tokens.count(1) == tokens.count(2) == meta.train.documents
    ends = [n for n, token in enumerate(tokens) if token == 2]
    assert ends[-1] == len(tokens) - 1
    assert all(tokens[end + 1] == 1 for end in ends[:-1])
    assert len(tokens) == meta.train.bytes + 2 * meta.train.documents
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (with_tokenizer.tokenizer / name).read_bytes()
    # Another tokenizer in its place is noticed.
    file = with_tokenizer.tokenizer / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": None}))
    with pytest.raises(ValueError, match="prepared with other settings"):
        prepare(with_tokenizer)


def test_the_tokenizer_of_prepared_text_is_used_again(options, tmp_path):
    first, second = options.out, tmp_path / "second"
    meta = prepare(options)
    again = prepare(dataclasses.replace(options, out=second, tokenizer=first, vocab_size=None))
    assert again.tokenizer_sha256 == meta.tokenizer_sha256
    assert (second / "train.tokens").read_bytes() == (first / "train.tokens").read_bytes()
    assert texts.token_ids(first) == texts.token_ids(second) == {"bos": 0, "eos": 0, "pad": None}
    assert load_tokenizer(second).get_vocab() == load_tokenizer(first).get_vocab()


def test_the_ids_of_the_model_beside_it_come_first(with_tokenizer):
    """As long as the model stops where its documents end."""
    for ids, kept in (([2, 7], [2, 7]), (7, 2)):
        fields = {"bos_token_id": 3, "eos_token_id": ids, "pad_token_id": 0}
        (with_tokenizer.tokenizer / "config.json").write_text(json.dumps(fields))
        meta = prepare(dataclasses.replace(with_tokenizer, force=True))
        assert meta.token_ids == {"bos": 3, "eos": kept, "pad": 0}
        assert meta.end_of_text == "</s>"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "holds no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer that can be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "{}", "does not say which token ends a text"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "and has '<end>'"),
        ("--vocab-size", "300", "--vocab-size=300 has no effect with --tokenizer="),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(with_tokenizer, capsys, name, content, message):
    paths = {"--out": with_tokenizer.out, "--text": with_tokenizer.text}
    given = paths | {"--tokenizer": with_tokenizer.tokenizer}
    if name.startswith("--"):
        given[name] = content
    elif content is None:
        (with_tokenizer.tokenizer / name).unlink()
    else:
        (with_tokenizer.tokenizer / name).write_text(content)
    assert main([str(word) for pair in given.items() for word in pair]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not with_tokenizer.out.exists()


# Rows of Parquet and JSON Lines.

ROWS = [f"def function_{n}():\n    return {n} ** {n % 7}\n" for n in range(300)]


@pytest.fixture
def corpus(tmp_path):
    """300 texts: 200 in two Parquet files, one of them in a folder, and 100 lines of JSON."""
    folder = tmp_path / "corpus"
    (folder / "part").mkdir(parents=True)
    for name, some in (("a.parquet", ROWS[:100]), ("part/b.parquet", ROWS[200:])):
        table = pyarrow.table({"number": list(range(len(some))), "code": some})
        parquet.write_table(table, folder / name, row_group_size=17)
    lines = [json.dumps({"code": code}) for code in [*ROWS[100:200], ""]] + [""]
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n")
    return PrepareOptions(out=tmp_path / "out", rows=folder, column="code", vocab_size=400)


@pytest.mark.parametrize("group_bytes", [10**6, 1000], ids=["one group", "many groups"])
def test_every_row_becomes_a_document(corpus, monkeypatch, group_bytes):
    monkeypatch.setattr(rows, "GROUP_BYTES", group_bytes)
    options = dataclasses.replace(corpus, heldout_fraction=0.2)
    assert "rows left out (empty): 1" in _run(options)
    meta = read_meta(options.out)
    train, heldout = (_documents(options.out, name) for name in texts.ROLE_FILES)
    assert sorted(train + heldout) == sorted(ROWS)
    assert 30 <= len(heldout) <= 90
    assert train == sorted(train, key=ROWS.index)  # the files in the order of their names
    assert (meta.train.documents, meta.heldout.documents) == (len(train), len(heldout))
    assert meta.train.bytes + meta.heldout.bytes == sum(map(len, ROWS))
    assert "already prepared" in _run(options)


def test_a_limit_leaves_rows_out_and_says_so(corpus):
    few = {"rows": corpus.rows / "a.parquet", "max_megabytes": 0.002}
    assert "rows left out (over --max-megabytes, as all after a.parquet row 54): 1" in _run(
        corpus, **few
    )
    meta = read_meta(corpus.out)
    assert meta.train.bytes + meta.heldout.bytes <= 2000


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("b.jsonl", b'{"text": "a"}\n', "b.jsonl cannot be read: .*no field 'code'"),
        ("b.jsonl", b'{"code": 3}\n', "b.jsonl cannot be read: row 1 holds no text, but 3"),
        ("b.jsonl", b'{"code": "a"\n', "b.jsonl cannot be read: Expecting"),
        ("a.parquet", b"PAR1", "a.parquet cannot be read"),
    ],
    ids=["no such field", "a number", "cut short", "damaged"],
)
def test_rows_without_texts_are_named(corpus, name, content, words):
    with pytest.raises(ValueError, match=r"no column 'text', but number, code"):
        _run(corpus, column="text")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        _run(corpus, rows=corpus.rows / "nothing")
    (corpus.rows / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        _run(corpus)
    assert not corpus.out.exists()
