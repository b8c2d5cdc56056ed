"""What a run finds in its folder, its records and its terminal, whoever has left it there."""

import errno
import io
import json
import os
import shutil

import jax
import pytest
from rich.console import Console

from train import checks, command_line, errors, train
from train.runs import run_folder
from train.runs.run_lock import LOCK_FILE
from train.watch.metrics import say, truncate


def _messages(config, **options):
    return [failure.message for failure in checks.check(config, **options)]


FOLDERS = run_folder.CHECKPOINTS, run_folder.TENSORBOARD
MISPLACED = {
    "a file": lambda path: path.touch(),
    "a folder": lambda path: path.mkdir(),
    "something else, such as a broken link": lambda path: path.symlink_to("nowhere"),
    "something else": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", [*run_folder.FILES, LOCK_FILE, "sample.txt", "translations.tsv"])
def test_what_is_there_needs_resume_and_is_what_it_should_be(make, tmp_path, name):
    run, wanted = tmp_path / "run", "a folder" if name in FOLDERS else "a file"
    for kind in MISPLACED.keys() - {wanted}:
        run.mkdir()
        MISPLACED[kind](run / name)
        for resume in (True, False):
            (message,) = _messages(make(), resume=resume)
            assert f"{run / name} must be {wanted}, and is {kind}" in message
        shutil.rmtree(run)
    run.mkdir()
    MISPLACED[wanted](run / name)
    if name != LOCK_FILE:
        (message,) = _messages(make())
        assert f"run_dir={run} already holds a run ({name})" in message
        assert "Continue it with --resume, or name another --run-dir." in message
    assert _messages(make(), resume=True) == []
    assert _messages(make(), writes=False) == []
    assert os.listdir(run) == [name]


def test_a_run_folder_that_cannot_be_written(make, tmp_path):
    (tmp_path / "file").touch()
    (message,) = _messages(make({"run_dir": str(tmp_path / "file" / "run")}))
    assert f"run_dir={tmp_path}/file/run cannot be written: Not a directory" in message
    assert "name another --run-dir" in message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_disk_is_noticed_by_trying(make, tmp_path, monkeypatch, number):
    def refuse(file):
        assert os.listdir(tmp_path / "run") == []  # a killed process leaves nothing
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder.os, "fsync", refuse)
    (message,) = _messages(make())
    assert f"cannot be written: {os.strerror(number)}. Free some space" in message
    assert not (tmp_path / "run").exists()


# Records.


@pytest.mark.parametrize(
    "text",
    [
        *("null", "[]", "[" * 10**5, '{"saved": "3"}', '{"saved": [1]}', '{"saved": 1.5}'),
        '{"failed_step": "9", "failed_config": {}}',
        '{"failed_step": 9, "failed_config": 3}',
        '{"failed_step": 9, "failed_config": {"mesh": 3}}',
        '{"failed_step": 9, "failed_config": {}, "failed_because": {}}',
    ],
)
def test_progress_that_no_run_has_written_says_nothing(make, tmp_path, text):
    (tmp_path / run_folder.PROGRESS_FILE).write_text(text)
    config = make({"run_dir": str(tmp_path)})
    assert list(run_folder.lost_checkpoints(config)) == []
    assert list(run_folder.would_fail_again(config, step=3)) == []
    run_folder.note_saved(tmp_path, 7)
    assert run_folder.read_progress(tmp_path).saved == 7


def test_metrics_are_cut_at_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    truncate(path, last_step=3)
    assert not path.exists()
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 6)]
    path.write_text("".join(lines) + '{"step": 2, "lo')
    truncate(path, last_step=3)
    assert path.read_text() == "".join(lines[:3])
    truncate(path, last_step=0)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "damage",
    [b"[" * 10**5, b"\xff\xfe", b"\0\0\0\0", b"null", b"3", b"[1]", b"{}", b'{"step": "2"}', b""],
)
def test_what_is_no_record_ends_no_resume(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1}\n', b'{"step": 3}\n']
    path.write_bytes(lines[0] + damage + b"\n" + lines[1])
    truncate(path, last_step=3)
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize(
    ("backend", "configured", "kept_in"),
    [("gpu", None, "cache/jaxpipe/programs"), ("gpu", "mine", "mine"), ("cpu", None, None)],
)
def test_compiled_programs_are_kept_on_gpus(tmp_path, monkeypatch, backend, configured, kept_in):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    option = "jax_compilation_cache_dir"
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update(option, configured and str(tmp_path / configured))
        train._keep_programs()
        assert jax.config.jax_compilation_cache_dir == (kept_in and str(tmp_path / kept_in))
    finally:
        jax.config.update(option, before)


# The terminal.


def test_nothing_that_is_said_commands_the_terminal():
    file = io.StringIO()
    say(Console(file=file), "in use by \x1b]0;title\x07\nnode")
    error = errors.ConfigError([errors.Failure("\x1b[2Jx")])
    assert [one.message for one in error.failures] == [str(error)] == [r"\x1b[2Jx"]
    assert file.getvalue() == "in use by \\x1b]0;title\\x07\nnode\n"


@pytest.mark.parametrize(
    ("error", "status", "last"),
    [
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("a bug"), 70, "RuntimeError: a bug\n"),
        (SystemExit("a module"), 70, "SystemExit: a module\n"),
        (SystemExit(1), 70, "SystemExit: 1\n"),
    ],
)
def test_ctrl_c_is_one_line_and_a_bug_a_traceback(monkeypatch, capsys, error, status, last):
    def fail(arguments):
        raise error

    monkeypatch.setattr(command_line, "parse", fail)
    assert train.main([]) == status
    said = capsys.readouterr().err
    assert said.endswith(last)
    assert (said.count("\n") == 1) == (last == "")


@pytest.mark.parametrize("pair", [os.pipe, os.openpty])
@pytest.mark.parametrize("buffering", [-1, 1])
def test_a_reader_that_goes_away_ends_nothing(pair, buffering):
    reader, writer = pair()
    with open(writer, "w", buffering=buffering) as file, train.lasting(file) as stream:
        print("first", file=stream, flush=True)
        assert os.read(reader, 5) == b"first"
        os.close(reader)
        for text in ("second", "third" * 10_000):
            print(text, file=stream, flush=True)


@pytest.mark.parametrize("buffering", [-1, 1])
def test_a_log_on_a_full_disk_ends_nothing(buffering):
    with open("/dev/full", "w", buffering=buffering) as file, train.lasting(file) as stream:
        print("text" * 10_000, file=stream, flush=True)
