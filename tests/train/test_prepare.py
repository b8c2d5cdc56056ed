"""Preparing text: deterministic, whole or absent, and nothing lost silently."""

import dataclasses
import errno
import hashlib
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

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
        body = f"Document {index} says: the pipeline är full — {index * index}.\n" * 3
        (folder / name).write_text(body + "<|endoftext|>" * (index == 3), encoding="utf-8")
    return folder


@pytest.fixture
def options(tmp_path, text):
    return PrepareOptions(out=tmp_path / "out", text=text, vocab_size=300, heldout_fraction=0.2)


def _run(options):
    """Prepares and returns what was reported."""
    report = io.StringIO()
    prepare(options, console=Console(file=report))
    return report.getvalue()


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tokens_decode_to_the_documents(options, text):
    meta = prepare(options)
    assert meta == read_meta(options.out)
    assert sorted(path.name for path in options.out.iterdir()) == sorted(prepare_module._FILES)
    tokenizer = load_tokenizer(options.out)
    end = tokenizer.token_to_id("<|endoftext|>")
    decoded = []
    for name, size in (("train", meta.train), ("heldout", meta.heldout)):
        tokens = read_tokens(options.out / f"{name}.tokens")[:]
        assert len(tokens) == size.tokens
        assert int(tokens.max()) < meta.vocab_size
        (ends,) = np.nonzero(tokens == end)
        assert len(ends) == size.documents
        assert ends[-1] == len(tokens) - 1
        parts = [
            tokenizer.decode(tokens[start:stop].tolist())
            for start, stop in zip([0, *ends[:-1] + 1], ends, strict=True)
        ]
        assert sum(len(part.encode()) for part in parts) == size.bytes
        decoded += parts
    written = [path.read_text(encoding="utf-8") for path in text.rglob("*.*")]
    assert sorted(decoded) == sorted(written)
    assert meta.heldout.documents > 1


def test_tokenizer_learns_nothing_from_heldout_text(options, text):
    meta = prepare(options)
    _, heldout = split_documents(collect_documents(options)[0], heldout_fraction=0.2)
    (text / heldout[0].name).write_text("qzqzqz " * 1000)
    again = prepare(dataclasses.replace(options, force=True))
    assert again.tokenizer_sha256 == meta.tokenizer_sha256
    assert again.documents_sha256 != meta.documents_sha256


def test_complete_data_is_left_alone(options, text):
    prepare(options)
    before = {path: path.stat().st_mtime_ns for path in options.out.iterdir()}
    assert "already prepared" in _run(options)
    (text / "0.txt").write_text("changed")
    report = _run(options)
    assert "The documents have changed since; --force prepares them again." in report
    assert before == {path: path.stat().st_mtime_ns for path in options.out.iterdir()}


def test_other_settings_need_force(options):
    prepare(options)
    other = dataclasses.replace(options, vocab_size=280)
    with pytest.raises(ValueError, match=r"vocab_size is 300 there and 280 here.*--force"):
        prepare(other)
    assert read_meta(options.out).vocab_size == 300
    prepare(dataclasses.replace(other, force=True))
    assert read_meta(options.out).vocab_size == 280
    assert [path.name for path in options.out.parent.glob(".out*")] == []


@pytest.mark.parametrize("name", ["train.tokens", "meta.json", "tokenizer.json"])
def test_damaged_data_is_prepared_again(options, name):
    prepare(options)
    whole = _content(options.out)
    path = options.out / name
    path.write_bytes(path.read_bytes()[:-5])
    assert "not whole and is prepared again" in _run(options)
    assert _content(options.out) == whole


def test_damaged_data_of_other_settings_is_not_replaced(options):
    prepare(options)
    (options.out / "train.tokens").unlink()
    with pytest.raises(ValueError, match=r"text is .* there and 'stdlib' here"):
        prepare(dataclasses.replace(options, text=None))


@pytest.mark.parametrize("force", [False, True])
def test_other_peoples_files_are_never_replaced(options, force):
    options.out.mkdir()
    (options.out / "thesis.tex").write_text("ten years")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex\)"):
        prepare(dataclasses.replace(options, force=force))
    assert (options.out / "thesis.tex").read_text() == "ten years"
    with pytest.raises(ValueError, match="is a file"):
        prepare(dataclasses.replace(options, out=options.out / "thesis.tex", force=force))


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
    # Killed while it writes: nothing carries the final name, and the next run clears up.
    code = """
import os, signal, sys
from pathlib import Path
from train.prepare import __main__, text
def die(path, tokens, **options):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
text.write_tokens = die
__main__.main(sys.argv[1:])
"""
    arguments = ["--out", str(options.out), "--text", str(options.text), "--vocab-size", "300"]
    root = Path(prepare_module.__file__).parents[2]
    child = subprocess.run([sys.executable, "-c", code, *arguments], cwd=root, check=False)
    assert child.returncode == -9
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


def test_files_left_out_are_counted(options, text):
    (text / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (text / "zeros.txt").write_bytes(b"a\0b")
    (text / "empty.txt").write_text("")
    (text / ".hidden").write_text("secret")
    (text / "large.txt").write_text("x" * 200_000)
    documents, skipped = collect_documents(dataclasses.replace(options, max_megabytes=0.1))
    names = {document.name for document in documents}
    assert len(names) == 40
    assert not names & {"binary.txt", "zeros.txt", "empty.txt", ".hidden", "large.txt"}
    assert skipped == {"not UTF-8 text": 2, "empty": 1, "over --max-megabytes": 1}
    report = _run(dataclasses.replace(options, max_megabytes=0.1))
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
    prepare(inside)
    assert "The documents have changed" not in _run(inside)


def test_a_document_keeps_its_side_when_others_come():
    documents = [Document(str(index), "text") for index in range(400)]
    _, some = split_documents(documents[:300], heldout_fraction=0.1)
    train, heldout = split_documents(documents, heldout_fraction=0.1)
    assert {document.name for document in some} <= {document.name for document in heldout}
    assert sorted([*train, *heldout], key=lambda d: int(d.name)) == documents
    assert 15 < len(heldout) < 80


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_both_sides_get_a_document(fraction):
    documents = [Document(name, "text") for name in "abc"]
    sides = split_documents(documents, heldout_fraction=fraction)
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


def test_a_single_character_cannot_be_split():
    with pytest.raises(ValueError, match="too short to split"):
        split_documents([Document("a", "x")], heldout_fraction=0.2)


def test_folder_without_text_is_refused(options, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"no text files found \(the folder holds no files\)"):
        prepare(dataclasses.replace(options, text=empty))
    (empty / "picture").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=r"no text files found \(1 left out: not UTF-8 text\)"):
        prepare(dataclasses.replace(options, text=empty))
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


def test_changed_tokenizer_is_noticed(options):
    prepare(options)
    path = options.out / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    with pytest.raises(ValueError, match=f"not the tokenizer .*found {digest}"):
        load_tokenizer(options.out)


def test_stdlib_is_the_default_text():
    documents, _ = collect_documents(PrepareOptions(out=Path("unused")))
    names = [document.name for document in documents]
    assert "dataclasses.py" in names
    assert all(name.endswith(".py") for name in names)
    skipped = prepare_module._STDLIB_SKIPPED
    folders = itertools.chain.from_iterable(name.split("/")[:-1] for name in names)
    assert not set(folders) & skipped
