"""Runs commands as users do: train.py on a tiny model and text, or on a toy where any model does.

`start` starts a process, which can be killed; `Trainer.run` calls train.py's command in this one,
where imports are done and runs of equal configurations share their compiled step.
"""

import contextlib
import copy
import dataclasses
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import limits
import numpy as np

TOP = Path(__file__).resolve().parents[2]
LOOPBACK = ["127.0.0.1", "::1"] if socket.has_dualstack_ipv6() else ["127.0.0.1"]
NUM_STEPS = 10
CHECKPOINT_EVERY = 3

_GPT = """\
model: {vocab_size: 300, sequence_length: 8, num_layers: 4, width: 16, num_heads: 2}
pipeline: {schedule: 1f1b, microbatches: 2, zero: 3}
sample: {num_tokens: 4, prompt: "the "}
"""
_TOY = """\
task: toy_family:Toy
model: {num_layers: 4, width: 2}
pipeline: {schedule: 1f1b, microbatches: 2, zero: 3, vocabulary: split}  # nothing is to be chosen
"""
_CONFIG = f"""\
mesh: {{stage: 2, data: 2}}
optimizer: {{warmup_steps: 2, peak_lr: 1.0e-2}}
train:
  steps: {NUM_STEPS}
  batch_size: 8
  log_every: 2
  eval_every: 5
  eval_batches: 1
  checkpoint_every: {CHECKPOINT_EVERY}
"""
_WORDS = ("the", "pipeline", "stage", "waits", "for", "a", "microbatch", "and", "sends", "it")


@dataclasses.dataclass(frozen=True)
class Finished:
    """The exit status of a command, and what it printed."""

    status: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"status {self.status}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@dataclasses.dataclass(frozen=True)
class Trainer:
    """train.py with the configuration of a name in a folder."""

    folder: Path
    name: str = "tiny.yaml"

    @property
    def config(self) -> Path:
        return self.folder / self.name

    def start(self, *options: object) -> subprocess.Popen[str]:
        """Starts the command with the configuration here as a process."""
        script = TOP / "train" / "train.py"
        return start("python", script, "--config", self.config, *options, folder=self.folder)

    @contextlib.contextmanager
    def processes(self, count: int, *options: object) -> Iterator[list[subprocess.Popen[str]]]:
        """Starts the processes of one distributed run; none is left afterwards."""
        address = f"--distributed.coordinator={free_address()}"
        options = address, f"--distributed.num-processes={count}", *options
        processes = [self.start(*options, f"--distributed.process-id={n}") for n in range(count)]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                with process:
                    process.communicate()

    def run(self, *options: object, status: int = 0) -> Finished:
        """Runs the command with the configuration here, in this process, to a status.

        Its streams, signals and variables are its own. What it sets to quieten a failed write
        stays, because errors of one may still come when it has returned.
        """
        from train import loop, train

        out, err = io.StringIO(), io.StringIO()
        log = logging.getLogger("jaxpipe")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.dict(os.environ),
            mock.patch.object(loop, "Setup", shared_setup),
            mock.patch.multiple(log, handlers=[], propagate=log.propagate),
        ):
            ended = train.main(list(map(str, ("--config", self.config, *options))))
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        finished = Finished(ended, out.getvalue(), err.getvalue())
        assert ended == status, str(finished)
        return finished


def start(*command: object, folder: Path = TOP, **variables: str) -> subprocess.Popen[str]:
    """Starts a command that the caller waits for, or kills.

    Its programs are compiled as here, to the same bits; launchers and simulated devices are not the
    user's.
    """
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "OMPI_"))}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{TOP}:{TOP / 'tests' / 'train'}",  # where toy_family is
        "PYTHONWARNINGS": "error",
        "XLA_FLAGS": " ".join(flags),
    }
    return subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=environment | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str], status: int | None = 0) -> Finished:
    """Waits for a command, which must end with a status unless that is None; kills a hang."""
    with process:  # leaves no pipe open, whose warning would fail another test
        try:
            out, err = process.communicate(timeout=limits.hang())
        finally:
            process.kill()
    finished = Finished(process.returncode, out, err)
    assert status in (None, finished.status), str(finished)
    return finished


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of a language in a page of documentation."""
    text = (TOP / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def shell(folder: Path, lines: str, status: int = 0) -> Finished:
    """Runs lines of bash in a folder that has the trainer, as a clone has."""
    if not (folder / "train").exists():
        (folder / "train").symlink_to(TOP / "train")
    return finish(start("bash", "-ec", lines, folder=folder), status)


def free_address() -> str:
    """Returns an address of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


_SETUPS: dict[tuple[Any, ...], Any] = {}
_OF_COMPILED = {"train.steps", "train.batch_size", "train.seed"}


def shared_setup(config: Any, choice: Any = None) -> Any:
    """Makes a `Setup` that has the programs of an earlier one whose steps are the same, as those of
    a resumed run are, which takes what was chosen from the record."""
    from train.step import Setup

    others = {"run_dir", "data.path", "data.rows"}
    others |= {path for path in config.flat() if path.startswith("train.")} - _OF_COMPILED
    fields = [(path, str(value)) for path, value in config.flat().items() if path not in others]
    key = (*fields, choice and str(choice.to_json()))
    if key not in _SETUPS:
        setup = Setup(config, choice)
        _ = setup.train_step, setup.evaluate  # are jitted once, when first read
        _SETUPS[key] = _SETUPS[*fields, str(setup.choice.to_json())] = setup
    shared = copy.copy(_SETUPS[key])
    shared.config = config
    shared.task = shared._task(shared.choice.vocabulary)
    return shared


def make_trainer(folder: Path) -> Trainer:
    """Writes the configurations and prepares the text; several workers may share a folder."""
    from train.prepare.text import PrepareOptions, prepare

    folder.mkdir(parents=True, exist_ok=True)
    random_ = random.Random(0)
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for number in range(30):
        lines = [" ".join(random_.choices(_WORDS, k=8)) for _ in range(8)]
        _write(text / f"{number}.txt", "\n".join(lines))
    data = folder / "data"
    prepare(PrepareOptions(out=data, text=text, vocab_size=300, heldout_fraction=0.2))
    _write(folder / "tiny.yaml", f"data: {{path: {data}}}\n{_GPT}{_CONFIG}")
    _write(folder / "toy.yaml", f"{_TOY}{_CONFIG}")
    return Trainer(folder)


def _write(path: Path, text: str) -> None:
    # A reader in another worker must not see half a file.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def kill_when(
    process: subprocess.Popen[str],
    ready: Callable[[], bool],
    *,
    number: int,
    delay_seconds: float = 0.0,
) -> bool:
    """Sends a signal once something holds, or a little later; returns whether it came in time."""
    until = time.monotonic() + limits.hang()
    while process.poll() is None and time.monotonic() < until:
        if ready():
            time.sleep(delay_seconds)
            process.send_signal(number)
            return True
        time.sleep(0.0005)
    return False


def steps(run: Path) -> list[dict[str, float]]:
    """The records of a run without its times; each step must be there once, in order."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    times = {"speed", "goodput", "seconds", "unix_time"}
    records = [{n: v for n, v in json.loads(line).items() if n not in times} for line in lines]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return records


def num_lines(run: Path) -> int:
    """Steps that a running command has written so far."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def saved(run: Path) -> list[int]:
    """Steps whose checkpoints are whole."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def weights(run: Path, step: int) -> list[tuple[str, Any]]:
    """Every array of a checkpoint, weights and optimizer, in canonical order."""
    import orbax.checkpoint as ocp

    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    path = (run / "checkpoints" / str(step) / "state").resolve()
    with ocp.StandardCheckpointer() as reader:
        # Whatever devices saved it, one reads it.
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
            reader.metadata(path).item_metadata.tree,
        )
        tree = reader.restore(path, shapes)
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), jax.device_get(leaf)) for path, leaf in found]


def back_to(run: Path, step: int) -> None:
    """Makes a run look as if it was killed after a checkpoint."""
    for name in saved(run):
        if name > step:
            shutil.rmtree(run / "checkpoints" / str(name))


def flip_a_bit(checkpoint: Path) -> Path:
    """Damages the largest file that holds numbers; returns its path in the checkpoint."""
    largest = max(checkpoint.rglob("state/**/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return largest.relative_to(checkpoint)


def assert_same_run(run: Path, unbroken: Path) -> None:
    """The same losses and the same last checkpoint, to the bit."""
    assert steps(run) == steps(unbroken)
    assert_same_weights(run, unbroken)


def assert_same_weights(run: Path, unbroken: Path) -> None:
    """The same last checkpoint, to the bit."""
    for (name, one), (other, two) in zip(
        *(weights(r, NUM_STEPS) for r in (run, unbroken)), strict=True
    ):
        assert name == other
        np.testing.assert_array_equal(one, two, err_msg=name, strict=True)
