"""A training run: prepare its folder, train, evaluate, save, and write a sample at the end."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxpipe.schedule.show import draw, pipemare_draw
from jaxpipe.schedule.simulate import simulate
from train import checkpoint, choice, configured, distributed, recovery, run_folder
from train.checkpoint import Checkpoints
from train.choice import Choice
from train.config import Config
from train.data import stream
from train.errors import ConfigError, Failure, NonFiniteLossError
from train.metrics import Line, Metrics, memory_bytes, peak_flops
from train.modes import Mode, Modes, layout_of
from train.run_lock import RunLock
from train.step import Setup
from train.stop import StopRequest

# A new checkpoint is written before an old one goes.
_CHECKPOINTS_AT_ONCE = 2


def run(config: Config, *, resume: bool) -> float | None:
    """Trains as configured, or continues a run.

    Args:
      config: a checked configuration; jax already has the devices.
      resume: continue from the newest whole checkpoint in the run folder, if there is any.

    Returns:
      The trained model's score, as its task has one; None without, or if the run was stopped.

    Raises:
      ConfigError: another run is using the folder, the checkpoint is of another model, none is
        whole, or the disk is too small.
      NonFiniteLossError: a loss or gradient norm is not finite.
    """
    console = Console(quiet=jax.process_index() != 0)
    lock = RunLock(Path(config.run_dir), say=lambda text: _say(console, text))
    try:
        distributed.from_first(lambda: _take_folder(lock, config, resume=resume))
        return _run(config, console, resume=resume)
    finally:
        lock.release()


def _take_folder(lock: RunLock, config: Config, *, resume: bool) -> None:
    """Locks the run folder before anything in it is read or written."""
    try:
        lock.acquire()
    except OSError as error:
        raise ConfigError([run_folder.unwritable(config, error)]) from error
    # A run that ended in between has left its files.
    if failures := list(run_folder.failures(config, resume=resume)):
        raise ConfigError(failures)


def _run(config: Config, console: Console, *, resume: bool) -> float | None:
    is_writer = jax.process_index() == 0
    folder = Path(config.run_dir)
    recorded = _recorded(folder / run_folder.CHOICE_FILE, config, console) if resume else None
    setup = Setup(config, recorded)
    digest = setup.task.data_digest()
    modes = Modes(setup)
    checkpoints = Checkpoints(folder / run_folder.CHECKPOINTS, keep=config.train.keep)
    start = _check_start(setup, modes, checkpoints, resume=resume, data_sha256=digest)
    _say(console, _headline(setup))
    if resume:
        for note in checkpoints.found.notes():
            _say(console, note)
        _say(console, f"resuming {folder} at step {start.step}")
        for change in start.changes:
            _say(console, f"changed since: {change}")
    if is_writer:
        prepare_folder(setup)
    describe = checkpoint.describe(config, data_sha256=digest)
    with (
        checkpoints,
        Metrics(config, last_step=start.step, is_writer=is_writer) as metrics,
    ):
        trainer = Trainer(setup, modes, checkpoints, metrics, console, describe)
        trainer.begin(start)
        return trainer.finish() if trainer.train() else None


def _recorded(path: Path, config: Config, console: Console) -> Choice | None:
    """What the run has chosen before, if that is still what is asked for."""
    try:
        found = choice.read(path, config)
    except (OSError, ValueError) as error:
        _say(console, f"{path} cannot be used, and the schedule is chosen anew: {error}")
        return None
    if found is not None:
        _say(console, f"schedule and partition as recorded in {path}")
    return found


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins.

    Args:
      step: optimizer steps already done.
      changes: settings that differ from the checkpoint's.
      in_flight: the checkpoint is of a pipeline that was not drained.
    """

    step: int = 0
    changes: tuple[str, ...] = ()
    in_flight: bool = False


def _check_start(
    setup: Setup, modes: Modes, checkpoints: Checkpoints, *, resume: bool, data_sha256: str
) -> Start:
    """Finds the checkpoint to continue; writes nothing."""
    config = setup.config
    failures = _disk_failures(config, modes)
    start = Start()
    step = checkpoints.latest if resume else None
    if step is not None:
        saved = checkpoints.read_run(step)
        failures += checkpoint.other_model(saved, config, data_sha256=data_sha256)
        layout = saved.get(checkpoint.IN_FLIGHT)
        if layout is not None:
            now = layout_of(setup)
            failures += checkpoint.other_layout(layout, now, step=step)
        start = Start(step, tuple(checkpoint.changes(saved, config)), layout is not None)
    elif resume:
        failures += recovery.none_whole(checkpoints.found, run_dir=config.run_dir)
    if start.step > config.train.steps:
        failures.append(
            Failure(
                f"train.steps={config.train.steps} is less than the {start.step} steps that "
                f"run_dir={config.run_dir} has done. Nearest valid: {start.step}.",
                ("train.steps",),
            )
        )
    if failures:
        raise ConfigError(failures)
    return start


def _disk_failures(config: Config, modes: Modes) -> list[Failure]:
    saved = [modes.after(step).saved_shapes for step in (0, config.train.steps)]
    needed = _CHECKPOINTS_AT_ONCE * max(
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) for tree in saved
    )
    folder = Path(config.run_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free >= needed:
        return []
    return [
        Failure(
            f"run_dir={config.run_dir} has {free / 1e6:.1f} MB free, but {_CHECKPOINTS_AT_ONCE} "
            f"checkpoints need {needed / 1e6:.1f} MB. Free some space or name another --run-dir.",
            ("run_dir",),
        )
    ]


def prepare_folder(setup: Setup) -> None:
    """Writes the resolved configuration, and the schedule that was chosen with its picture."""
    config = setup.config
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    choice.write(folder / run_folder.CHOICE_FILE, config, setup.choice)
    if configured.is_asynchronous(config):
        text = pipemare_draw.text(configured.steady_state(config))
        (folder / run_folder.STEADY_STATE_FILE).write_text(text, encoding="utf-8")
    else:
        timeline = simulate(setup.schedule, setup.chunk_costs)
        draw.save(draw.figure(timeline), folder / run_folder.SCHEDULE_FILE)
    partial = folder / f"{run_folder.CONFIG_FILE}.partial"
    partial.write_text(config.to_yaml(), encoding="utf-8")
    os.replace(partial, folder / run_folder.CONFIG_FILE)


class Trainer:
    """The loop and what it needs.

    Args:
      setup: what to run.
      modes: the modes of the run.
      checkpoints: where to save.
      metrics: where numbers go.
      console: where lines go; quiet on all processes but the first.
      describe: what a checkpoint says about the run.
    """

    def __init__(
        self,
        setup: Setup,
        modes: Modes,
        checkpoints: Checkpoints,
        metrics: Metrics,
        console: Console,
        describe: dict[str, Any],
    ) -> None:
        self.setup, self.modes, self.config = setup, modes, setup.config
        self.checkpoints, self.metrics = checkpoints, metrics
        self.console, self.describe = console, describe
        self.stop = StopRequest()
        self.examples, self.heldout = setup.task.load()
        self.rows = distributed.local_rows(setup.pipe.batch_sharding, self.config.train.batch_size)
        self.stream = stream.batches(
            self.examples,
            batch_size=self.config.train.batch_size,
            seed=self.config.train.seed,
            rows=self.rows,
        )
        self.step = 0
        self.eval_loss: float | None = None
        self.mode: Mode
        self.carried: Any
        self.compiled: Any

    def begin(self, start: Start) -> None:
        """Compiles, and makes what the first step is given: initial, or restored."""
        self.step = start.step
        if start.step == 0:
            self._enter(lambda mode: mode.begin(self.setup.init(), 0))
            return
        kept = self.modes.asynchronous if start.in_flight else self.modes.synchronous
        saved, position = self.checkpoints.restore(start.step, kept.saved_shapes)
        self.stream.set_state(position)
        carried = kept.from_saved(saved, start.step)
        if start.in_flight:
            self._enter(lambda _: carried)
        else:
            self._enter(lambda mode: mode.begin(carried, start.step))

    def _enter(self, begin: Callable[[Mode], Any]) -> None:
        """Continues in the mode that follows this step."""
        began = time.perf_counter()
        self.mode = self.modes.after(self.step)
        self.compiled = self.mode.compile()
        _say(self.console, f"compiled in {time.perf_counter() - began:.1f} s")
        self.carried = begin(self.mode)

    def _switch(self) -> None:
        """T3: the steps after this one are of the other mode."""
        state, _ = self.mode.settle(self.carried)
        _say(self.console, f"from step {self.step + 1} on {self.config.pipeline.schedule}")
        self._enter(lambda mode: mode.begin(state, self.step))

    def _end(self) -> dict[str, Any]:
        """Trains what is in flight, so that the last checkpoint fits any layout."""
        state, losses = self.mode.settle(self.carried)
        entered = self.step - self.mode.first
        late = [float(loss) for loss in losses[max(len(losses) - entered, 0) :]]
        self._check_finite(self.step, {f"loss {n} of the drain": x for n, x in enumerate(late)})
        self.mode = self.modes.synchronous
        self.carried = state
        return {"drained_losses": late or None}

    def train(self) -> bool:
        """Runs the remaining steps; returns False if it was asked to stop before the last."""
        config, last = self.config.train, self.config.train.steps
        unread: tuple[int, Any] | None = None
        clock = _Clock()
        with self._bar() as bar:
            task = bar.add_task("train", total=last, completed=self.step)
            while self.step < last:
                if self.mode is not self.modes.after(self.step):
                    if unread is not None:
                        self._record(*unread)
                        unread = None
                    self._switch()
                    clock = _Clock()
                self.carried, values = self.compiled(
                    self.carried, self._global(next(self.stream)), self.setup.rng(self.step)
                )
                self.step += 1
                clock.steps += 1
                if unread is not None:
                    # Reading one step late leaves the devices something to do.
                    self._record(*unread)
                    unread = None
                stopping = self.stop.after(self.step)
                is_last = self.step == last or stopping
                evaluates = self.step % config.eval_every == 0 or self.step == last
                saves = self.step % config.checkpoint_every == 0 or is_last
                logs = self.step % config.log_every == 0 or self.step == 1 or is_last or evaluates
                if not (saves or logs):
                    unread = (self.step, values)
                    bar.update(task, completed=self.step)
                    continue
                numbers = self._read(self.step, values)
                bubble = self.mode.bubble(self.step)
                seconds = clock.stop()
                if self.step == last:
                    numbers |= self._end()
                self.eval_loss = self.evaluate() if evaluates else None
                self._write(self.step, numbers | {"eval_loss": self.eval_loss})
                self.checkpoints.check()
                if logs:
                    line = self._line(numbers, bubble, seconds / max(clock.steps, 1))
                    _say(bar.console, str(line))
                if saves:
                    self.save()
                bar.update(task, completed=self.step)
                clock = _Clock()
                if stopping and self.step < last:
                    _say(bar.console, f"asked to stop: saved step {self.step}; go on with --resume")
                    return False
        return True

    def finish(self) -> float | None:
        """Says how good the model is, and lets it write; returns its score."""
        eval_loss = self.evaluate() if self.eval_loss is None else self.eval_loss
        # Every process takes part in gathering the weights; the first one says and writes.
        state, _ = self.mode.settle(self.carried)
        state = self.setup.to_canonical(dataclasses.replace(state, optimizer=None))
        state = multihost_utils.process_allgather(state, tiled=True)
        if jax.process_index() != 0:
            return None
        task = self.setup.task
        baseline = task.baseline(self.examples, self.heldout)
        _say(self.console, f"held-out loss {eval_loss:.4f} nats; {baseline}")
        text, score = task.report(state.params, state.layers, self.heldout)
        _say(self.console, text)
        return score

    def evaluate(self) -> float:
        """Mean loss over the held-out batches, by the same pipeline, forward only."""
        return self._heldout_loss(self.config.train.eval_batches)

    def save(self) -> None:
        """Starts to save this step, if its weights are good.

        The loss of a step is that of the weights before it, so one held-out batch is tried where
        nothing was evaluated.
        """
        if self.eval_loss is None:
            self._heldout_loss(1)
        self.checkpoints.save(
            self.step,
            self.mode.to_saved(self.carried),
            data=self.stream.get_state(),
            run=self.describe | {checkpoint.IN_FLIGHT: self.mode.layout()},
            eval_loss=self.eval_loss,
        )

    def _global(self, batch: stream.Batch) -> Any:
        return distributed.global_batch(
            batch, self.setup.pipe.batch_sharding, self.rows, self.config.train.batch_size
        )

    def _heldout_loss(self, num_batches: int) -> float:
        batches = stream.heldout_batches(
            self.heldout,
            batch_size=self.config.train.batch_size,
            num_batches=num_batches,
            rows=self.rows,
        )
        state, _ = self.mode.settle(self.carried)
        losses = [self.setup.eval_loss(state, self._global(batch)) for batch in batches]
        loss = float(np.mean([float(loss) for loss in losses]))
        self._check_finite(self.step, {"held-out loss": loss})
        return loss

    def _record(self, step: int, values: Any) -> None:
        self._write(step, self._read(step, values))

    def _read(self, step: int, values: Any) -> dict[str, Any]:
        """What a step has told, by name; no loss while a pipeline that never drains fills."""
        numbers: dict[str, Any] = {"loss": None, "grad_norm": None}
        if self.mode.loss_step(step) is not None:
            numbers = {name: float(values[name]) for name in numbers}
        numbers |= self.mode.metrics(step, values)
        seen = {"loss": numbers["loss"], "gradient norm": numbers["grad_norm"]}
        # The loss lags behind: weights that have left all bounds show here first.
        seen["correction"] = sum(numbers["correction"]) if "correction" in numbers else None
        self._check_finite(step, {name: value for name, value in seen.items() if value is not None})
        return numbers

    def _check_finite(self, step: int, values: dict[str, float]) -> None:
        if not all(map(math.isfinite, values.values())):
            self.checkpoints.wait()
            raise NonFiniteLossError(step=step, values=values, kept=self.checkpoints.latest)

    def _write(self, step: int, numbers: dict[str, Any]) -> None:
        self.metrics.write(step, numbers | {"learning_rate": self._learning_rate(step)})

    def _learning_rate(self, step: int) -> float:
        return float(self.setup.learning_rate(step - 1))

    def _line(self, numbers: dict[str, Any], bubble: float, seconds_per_step: float) -> Line:
        task, devices = self.setup.task, self.setup.mesh.devices
        rows = self.config.train.batch_size / seconds_per_step
        peak = peak_flops(devices.flat[0].device_kind, task.shape.dtype)
        flops = task.flops_per_row()
        return Line(
            step=self.step,
            num_steps=self.config.train.steps,
            loss=numbers["loss"],
            grad_norm=numbers["grad_norm"],
            learning_rate=self._learning_rate(self.step),
            units_per_second=rows * task.units_per_row,
            unit=task.unit,
            utilisation=(
                None if peak is None or flops is None else rows * flops / (peak * devices.size)
            ),
            bubble=bubble,
            memory_bytes=memory_bytes(),
            eval_loss=self.eval_loss,
        )

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            # Without a terminal the lines alone are the log.
            disable=not self.console.is_terminal,
        )


class _Clock:
    """Counts the steps since it was made, and the time, without evaluation and saving."""

    def __init__(self) -> None:
        self.steps = 0
        self._began = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._began


def _headline(setup: Setup) -> str:
    config, device = setup.config, setup.mesh.devices.flat[0]
    return (
        f"{setup.task.num_parameters():,} parameters on {config.mesh.stage} stages x "
        f"{config.mesh.data} data shards ({device.device_kind}, {jax.process_count()} processes); "
        f"schedule {config.pipeline.schedule}, {config.pipeline.microbatches} microbatches, "
        f"remat {config.pipeline.remat}, ZeRO-{config.pipeline.zero}"
    )


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
