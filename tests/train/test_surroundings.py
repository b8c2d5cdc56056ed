"""What a run finds around it: its folder, processes, devices and records of earlier parts."""

import errno
import io
import json
import os
import shutil

import jax
import pytest
from rich.console import Console

from train import checks, command_line, distributed, errors, run_folder, train
from train.metrics import say, truncate
from train.run_lock import LOCK_FILE


def _messages(config, **options):
    return [failure.message for failure in checks.check(config, **options)]


FOLDERS = run_folder.CHECKPOINTS, run_folder.TENSORBOARD
MISPLACED = {
    "a file": lambda path: path.touch(),
    "a folder": lambda path: path.mkdir(),
    "something else, such as a broken link": lambda path: path.symlink_to("nowhere"),
    "something else": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", [*run_folder.FILES, LOCK_FILE, "sample.txt"])
def test_what_stands_in_the_place_of_a_file_or_folder_is_said(make, tmp_path, name):
    run, wanted = tmp_path / "run", "a folder" if name in FOLDERS else "a file"
    for kind in MISPLACED.keys() - {wanted}:
        run.mkdir()
        MISPLACED[kind](run / name)
        for resume in (True, False):
            (failure,) = checks.check(make(), resume=resume)
            assert f"{run / name} must be {wanted}, and is {kind}" in failure.message
        shutil.rmtree(run)


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
    config = make().model_copy(update={"run_dir": str(tmp_path)})
    assert run_folder.lost_checkpoints(config) == []
    assert run_folder.would_fail_again(config, step=3) == []
    run_folder.note_saved(tmp_path, 7)
    assert run_folder.read_progress(tmp_path).saved == 7


def test_nothing_that_is_said_commands_the_terminal():
    file = io.StringIO()
    say(Console(file=file), "in use by \x1b]0;title\x07\nnode")
    error = errors.ConfigError([errors.Failure("\x1b[2Jx")])
    assert [one.message for one in error.failures] == [str(error)] == [r"\x1b[2Jx"]
    assert file.getvalue() == "in use by \\x1b]0;title\\x07\nnode\n"


def test_a_launchers_variable_that_is_no_number_is_named(make):
    variables = {"SLURM_STEP_NUM_TASKS": "2x", "SLURM_PROCID": "0"}
    with pytest.raises(errors.ConfigError, match="variable SLURM_STEP_NUM_TASKS='2x' must be a nu"):
        distributed.find_processes(make(), variables)


def test_ctrl_c_before_training_ends_in_one_line(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "parse", interrupt)
    assert train.main([]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_that_nothing_explains_has_a_status_of_its_own(monkeypatch, capsys):
    def fail(arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(command_line, "parse", fail)
    assert train.main([]) == 70
    assert capsys.readouterr().err.endswith("RuntimeError: a bug\n")


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


@pytest.mark.parametrize("name", [*run_folder.FILES, "sample.txt", "translations.tsv"])
def test_an_existing_run_needs_resume(make, tmp_path, name):
    run = tmp_path / "run"
    run.mkdir()
    path = run / name
    path.mkdir() if name in (run_folder.CHECKPOINTS, run_folder.TENSORBOARD) else path.touch()
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


def test_more_stages_than_devices(make):
    (failure,) = checks.device_failures(
        make({"mesh.stage": 4, "mesh.data": 4}), num_devices=8, platform="gpu"
    )
    assert "mesh.stage=4 x mesh.data=4 needs 16 devices, but there are 8 (gpu)." in failure.message
    assert "Nearest valid: mesh.stage=2 or mesh.data=2." in failure.message
    (failure,) = checks.device_failures(
        make({"mesh.stage": 4, "mesh.data": 4}), num_devices=1, platform="cpu"
    )
    assert "out of XLA_FLAGS, and they are simulated." in failure.message
    (failure,) = checks.device_failures(
        make({"mesh.stage": 2, "mesh.data": 2, "mesh.context": 2, "mesh.tensor": 2}),
        num_devices=8,
        platform="gpu",
    )
    message = (
        "mesh.stage=2 x mesh.data=2 x mesh.context=2 x mesh.tensor=2 needs 16 devices, but there "
        "are 8 (gpu)."
    )
    assert message in failure.message
    assert not checks.device_failures(make(), num_devices=4, platform="cpu")


def test_processes_from_flags_and_launchers(make):
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    flags = make(
        {
            "distributed.coordinator": "localhost:1",
            "distributed.num_processes": 2,
            "distributed.process_id": 0,
        }
    )
    find = distributed.find_processes
    assert find(make(), {}) == distributed.Processes(1, 0)
    assert find(make(), slurm) == distributed.Processes(2, 1)
    assert find(make(), mpi) == distributed.Processes(4, 3)
    assert find(flags, mpi) == distributed.Processes(2, 0, "localhost:1")
    # The batch script of a job is one process; only a step's variables count.
    assert find(make(), {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).count == 1


def test_a_coordinator_alone_does_not_say_how_many(make):
    with pytest.raises(errors.ConfigError, match=r"num_processes \(now None\).*launcher"):
        distributed.find_processes(make({"distributed.coordinator": "localhost:1"}), {})


def test_devices_are_shared_evenly(make):
    slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}
    with pytest.raises(errors.ConfigError, match=r"4 devices cannot .* Nearest valid: 3 or 6"):
        distributed.find_processes(make(), slurm)


def test_more_devices_than_processes_may_have_are_refused_before_jax_starts(make):
    config = make({"mesh.stage": 4, "mesh.data": 1000})
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    with pytest.raises(errors.ConfigError) as error:
        distributed.find_processes(config, slurm)
    assert str(error.value) == (
        "mesh.stage=4 x mesh.data=1000 = 4000 devices are more than 512 for each of "
        "distributed.num_processes=4. Nearest valid: mesh.stage=2 or mesh.data=512."
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1000"}
    assert distributed.find_processes(config, slurm | flags).count == 4


def test_a_launcher_without_an_address(monkeypatch):
    import jax

    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(errors.ConfigError, match=r"--distributed\.coordinator HOST:PORT"):
        distributed.start(distributed.Processes(2, 0), patience_seconds=60)


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
    ("backend", "variables", "configured", "kept_in"),
    [
        ("gpu", {}, None, "cache/jaxpipe/programs"),
        ("gpu", {}, "mine", "mine"),
        ("gpu", {"JAXPIPE_NO_CACHE": "1"}, None, None),
        ("cpu", {}, None, None),
    ],
)
def test_compiled_programs_are_kept_on_gpus(
    tmp_path, monkeypatch, backend, variables, configured, kept_in
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.delenv("JAXPIPE_NO_CACHE", raising=False)
    for name, value in {"XDG_CACHE_HOME": str(tmp_path / "cache"), **variables}.items():
        monkeypatch.setenv(name, value)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", configured and str(tmp_path / configured))
        train._keep_programs()
        assert jax.config.jax_compilation_cache_dir == (kept_in and str(tmp_path / kept_in))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
