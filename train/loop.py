"""A training run: lock its folder, begin or resume, train, evaluate, save, and report a score."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxpipe import Checkpoints
from jaxpipe.asynchronous import steady_text
from jaxpipe.checkpoint import Fetch, Found
from jaxpipe.files import write_whole
from jaxpipe.schedule import draw
from jaxpipe.testing import find_nan
from train import adapters, choice, evaluation, initial, pipeline_section, plot, publish
from train.choice import Choice
from train.config import Config
from train.data import stream
from train.errors import CannotContinueError, ConfigError, Failure, NonFiniteLossError, named_values
from train.modes import Mode, Modes, layout_of
from train.processes import distributed
from train.processes.watchdog import Watchdog, stages_by_process
from train.recover import survivors
from train.recover.survivors import Group, Survivor
from train.runs import checkpoint, run_folder
from train.runs.mirror import mirrored
from train.runs.run_lock import Lock
from train.step import Setup
from train.stop import StopRequest
from train.watch import noise
from train.watch.goodput import CHECKPOINT, COMPILE, EVALUATION, SECONDS, STEP, Goodput
from train.watch.metrics import Clock, Metrics, announced, line, recorded, say, shown
from train.watch.profile import STAGE_SECONDS, Profile, check_processes, slowest, write_timeline

# A new checkpoint is written before an old one is removed.
_CHECKPOINTS_AT_ONCE = 2

_MOST_AGAIN = 200
"""Steps that are run again at most to find what was not finite."""


def take_folder(lock: Lock, config: Config, *, resume: bool, former: str | None = None) -> str:
    """Locks the run folder before anything in it is read or written; returns the lock's token.

    ``former`` is the token of the lock of processes that go on without others.
    """
    if failures := list(run_folder.misplaced(config)):
        raise ConfigError(failures)
    try:
        lock.acquire(former)
    except OSError as error:
        raise ConfigError([run_folder.unwritable(config, error)]) from error
    # A run that ended since the check has left its files.
    if failures := list(run_folder.failures(config, resume=resume)):
        raise ConfigError(failures)
    return lock.owner.token


def recorded_choice(path: Path, config: Config, console: Console) -> Choice | None:
    """Returns what the run chose before, unless the settings that decide it have changed."""
    try:
        recorded = choice.read_choice(path, config)
    except (OSError, ValueError) as error:
        say(console, f"{path} cannot be used, and the schedule is chosen anew: {error}")
        return None
    if recorded is not None:
        say(console, f"schedule and partition as recorded in {path}")
    return recorded


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a run.

    Args:
      step: optimizer steps already done.
      changes: settings that differ from the checkpoint's.
      in_flight: whether the checkpoint holds a pipeline that was not drained.
      ended: whether the run had done all its steps.
      from_memory: whether copies in memory have the state, in place of a checkpoint.
    """

    step: int = 0
    changes: tuple[str, ...] = ()
    in_flight: bool = False
    ended: bool = False
    from_memory: bool = False


def find_start(
    setup: Setup, modes: Modes, checkpoints: Checkpoints, *, resume: bool, data_sha256: str
) -> Start:
    """Finds the checkpoint to continue; writes nothing.

    Raises:
      ConfigError: it cannot be continued, or the disk is too small.
    """
    config = setup.config
    failures = list(_disk_failures(config, modes))
    start = Start()
    step = checkpoints.latest if resume else None
    if step is not None:
        saved = checkpoint.description(checkpoints, step)
        failures += checkpoint.other_model(saved, config, data_sha256=data_sha256)
        layout = saved.get(checkpoint.IN_FLIGHT)
        if layout is not None:
            now = layout_of(setup)
            failures += checkpoint.other_layout(layout, now, step=step)
        ended = step == saved["config"]["train"]["steps"]
        start = Start(step, tuple(checkpoint.changes(saved, config)), layout is not None, ended)
    elif resume:
        failures += checkpoint.none_whole(checkpoints.found, config)
        failures = failures or list(run_folder.lost_checkpoints(config))
    if resume:
        failures += run_folder.would_fail_again(config, step=start.step)
    if start.step > config.train.steps:
        failures.append(
            config.failure(
                f"$train.steps is less than the {start.step} steps that $run_dir has done. Nearest "
                f"valid: {start.step}."
            )
        )
    if failures:
        raise ConfigError(failures)
    return start


def start_from_memory(group: Group, checkpoints: Checkpoints) -> Start | None:
    """Starts from the copies of a group, and reads no checkpoint; None if one is newer."""
    newest = distributed.from_first(lambda: max(checkpoints.steps, default=None))
    if newest is not None and newest > group.step:
        return None
    checkpoints.found = Found(newest, ())  # these processes have written it themselves
    return Start(group.step, from_memory=True)


def _disk_failures(config: Config, modes: Modes) -> Iterator[Failure]:
    saved = [modes.after(step).saved_shapes for step in (0, config.train.steps)]
    needed = _CHECKPOINTS_AT_ONCE * max(
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) for tree in saved
    )
    folder = config.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        yield config.failure(
            f"$run_dir has {free / 1e6:.1f} MB free, but {_CHECKPOINTS_AT_ONCE} checkpoints need "
            f"{needed / 1e6:.1f} MB. Free some space or name another --run-dir."
        )


def prepare_folder(setup: Setup) -> None:
    """Writes the resolved configuration, the schedule that was chosen, and its picture."""
    config = setup.config
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    choice.write_choice(folder / run_folder.CHOICE_FILE, config, setup.choice)
    if pipeline_section.is_asynchronous(config):
        text = steady_text(pipeline_section.steady_state(config))
        (folder / run_folder.STEADY_STATE_FILE).write_text(text, encoding="utf-8")
    else:
        picture = draw.figure(setup.timeline)
        (folder / run_folder.SCHEDULE_FILE).write_text(picture, encoding="utf-8")
    write_whole(folder / run_folder.CONFIG_FILE, config.to_yaml().encode())


def headline(setup: Setup) -> str:
    config, device = setup.config, setup.mesh.devices.flat[0]
    replicas = f" in {config.mesh.replica} replicas" if config.mesh.replica > 1 else ""
    shared = "".join(f" x {n} {name} devices" for name, n in config.mesh.model_axes().items())
    expert = f" ({config.mesh.expert} share experts)" if config.mesh.expert > 1 else ""
    trained = ""
    if (patterns := pipeline_section.trainable(config)) is not None:
        trained = f", of which {adapters.num_trained(patterns, setup.shapes):,} are trained,"
    return (
        f"{setup.task.num_parameters():,} parameters{trained} on {config.mesh.stage} stages x "
        f"{config.mesh.data} data shards{replicas}{expert}{shared} ({device.device_kind}, "
        f"{jax.process_count()} processes); "
        f"schedule {config.pipeline.schedule}, {config.pipeline.microbatches} microbatches, "
        f"remat {setup.pipe.options.remat}, ZeRO-{setup.pipe.options.zero}"
    )


def run(
    config: Config,
    watchdog: Watchdog,
    goodput: Goodput,
    *,
    resume: bool,
    group: Group | None = None,
) -> float | None:
    """Trains as configured, or continues a run.

    Args:
      config: a checked configuration; jax already has the devices.
      goodput: the clock of this process, since its start.
      resume: continue from the newest whole checkpoint in the run folder, if there is any.
      group: the processes that are left of this run, if some were lost; they continue from the
        copies in their memory, unless a checkpoint is newer.

    Returns:
      The score that the task gives the trained model; None if the task has no score, or if the run
      was stopped.

    Raises:
      ConfigError: another run is using the folder, the checkpoint is of another model, none is
        whole, or the disk is too small.
      NonFiniteLossError: a loss or gradient norm is not finite.
    """
    console = Console(quiet=jax.process_index() != 0)
    show = functools.partial(say, console)
    lock = run_folder.lock(config, say=show)
    former = None if group is None else group.survivor.membership.lock
    try:
        try:
            token = distributed.from_first(
                lambda: take_folder(lock, config, resume=resume, former=former)
            )
        except ConfigError as error:
            if group is None:
                raise
            raise CannotContinueError(str(error)) from error  # others have gone on, or all again
        with mirrored(config, lock, say=show) as fetch:
            given = config, console, watchdog, goodput
            return _run(*given, resume=resume, fetch=fetch, group=group, lock=token)
    finally:
        lock.release()


def _run(
    config: Config,
    console: Console,
    watchdog: Watchdog,
    goodput: Goodput,
    *,
    resume: bool,
    fetch: Fetch | None,
    group: Group | None,
    lock: str,
) -> float | None:
    is_writer = jax.process_index() == 0
    folder = config.folder
    recorded = None
    if resume:
        recorded = recorded_choice(folder / run_folder.CHOICE_FILE, config, console)
    setup = Setup(config, recorded)
    digest = setup.task.data_digest()
    modes = Modes(setup)
    checkpoints = Checkpoints(
        folder / run_folder.CHECKPOINTS,
        keep=config.train.keep,
        keep_every=config.train.keep_every,
        fetch=fetch,
    )
    begin = None if group is None else start_from_memory(group, checkpoints)
    if begin is None:
        begin = find_start(setup, modes, checkpoints, resume=resume, data_sha256=digest)
    say(console, headline(setup))
    if group is not None:
        say(console, f"going on {group.without}")
    if begin.from_memory:
        say(console, f"continuing {config.run_dir} at step {begin.step}, from copies in memory")
    elif resume:
        for note in checkpoints.found.notes():
            say(console, note)
        say(console, f"resuming {config.run_dir} at step {begin.step}")
        for change in begin.changes:
            say(console, f"changed since: {change}")
    if is_writer:
        prepare_folder(setup)
    describe = checkpoint.describe(config, data_sha256=digest)
    trainer = None
    try:
        last, ended = begin.step, begin.ended
        with (
            checkpoints,
            Metrics(config, goodput, last_step=last, ended=ended, is_writer=is_writer) as metrics,
        ):
            trainer = Trainer(setup, modes, checkpoints, metrics, console, describe, watchdog)
            with watchdog.explained(), contextlib.closing(trainer.stream):
                trainer.begin(begin, group, lock)
                is_done = trainer.train()
                say(console, str(goodput))
                score = trainer.finish() if is_done else None
    except NonFiniteLossError as error:
        if is_writer:
            run_folder.note_failure(folder, error, describe["config"])
        raise
    # In a folder that is gone, orbax, tensorstore and TensorBoard raise many kinds of errors.
    except Exception:
        if trainer is not None:
            trainer.check_folder()
        raise
    trainer.check_folder()
    if is_writer:
        trainer.note_saved()
    return score


class Trainer:
    """The loop and what it needs."""

    def __init__(
        self,
        setup: Setup,
        modes: Modes,
        checkpoints: Checkpoints,
        metrics: Metrics,
        console: Console,
        describe: dict[str, Any],
        watchdog: Watchdog,
    ) -> None:
        check_processes(setup.config)
        self.watchdog = watchdog
        watchdog.stages = stages_by_process(setup.mesh)
        self.setup, self.modes, self.config = setup, modes, setup.config
        self.checkpoints, self.metrics = checkpoints, metrics
        self.goodput = metrics.goodput
        self.console, self.describe = console, describe
        self.files = run_folder.WrittenFiles(self.config) if jax.process_index() == 0 else None
        self.stop = StopRequest()
        self.examples, self.heldout = setup.task.load()
        self.domains = setup.task.load_domains()
        size, sharding = self.config.train.batch_size, setup.pipe.batch_sharding
        (shard_size,) = sharding.shard_shape((size,))
        self.stream = stream.batches(
            self.examples,
            batch_size=size,
            seed=self.config.train.seed,
            rows=distributed.local_rows(sharding, size),
            parts=(size // shard_size, self.config.pipeline.microbatches),
        )
        self.step, self.skipped, self.saved_at = 0, 0, time.monotonic()
        self.start_of_data = self.stream.get_state()
        self.evaluated: dict[str, Any] = {}
        self.unread: tuple[int, Any] | None = None
        self.publisher = publish.Publisher(setup)
        self.noise = noise.Gauge(setup, self.config.folder / run_folder.METRICS_FILE)
        self.survivor: Survivor | None = None
        self.mode: Mode
        self.carried: Any
        self.compiled: Any

    def begin(self, start: Start, group: Group | None, lock: str) -> None:
        """Compiles, and makes the state that the first step starts from: initial, or restored."""
        self.survivor = self.watchdog.survivor = survivors.joined(self.config, group, lock)
        self._begin(start, group)
        if group is not None:
            self._copy()  # before those end whose copies were read
            group.release()

    def _begin(self, start: Start, group: Group | None) -> None:
        self.step = start.step
        if start.step == 0:
            self._enter(lambda mode: mode.begin(initial.state(self.setup, self.console), 0))
            return
        kept = self.modes.asynchronous if start.in_flight else self.modes.synchronous
        with self.goodput.on(CHECKPOINT):
            if group is not None and start.from_memory:
                saved, position = group.restore(kept.saved_shapes), group.data
            else:
                saved, position = checkpoint.restore(
                    self.checkpoints, start.step, kept.saved_shapes
                )
        with checkpoint.readable(start.step):
            stream.continue_at(self.stream, position)
        carried = kept.from_saved(saved, start.step)
        if start.in_flight:
            self._enter(lambda _: carried)
        else:
            self._enter(lambda mode: mode.begin(carried, start.step))

    def _copy(self) -> None:
        """Copies the state to the memory of the hosts, if another process can need it."""
        if self.survivor is not None:
            jax.block_until_ready(self.carried)  # as a part of the step
            with self.goodput.on(CHECKPOINT):
                self.survivor.take(self.step, self.mode.to_saved(self.carried), self._position)

    def _position(self) -> Any:
        return distributed.furthest(self.stream.get_state())

    def _enter(self, begin: Callable[[Mode], Any]) -> None:
        """Continues in the mode that follows this step."""
        self.watchdog.at("compiling")
        with self.goodput.on(COMPILE), announced(self.console, "the training step"):
            self.mode = self.modes.after(self.step)
            self.compiled = self.mode.compile()
            self.noise.compile()
        self.carried = begin(self.mode)

    def _switch(self) -> None:
        """Changes the mode after this step: the end of T3's warm-up."""
        state, _ = self.mode.settle(self.carried)
        say(self.console, f"from step {self.step + 1} on {self.config.pipeline.schedule}")
        self._enter(lambda mode: mode.begin(state, self.step))

    def _end(self) -> dict[str, Any]:
        """Finishes the batches in flight, so that the last checkpoint fits any layout."""
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
        copy_every = self.config.distributed.copy_every
        self.goodput.enter(STEP)
        clock = Clock()
        with self._bar() as bar, Profile(self.config) as profile:
            task = bar.add_task("train", total=last, completed=self.step)
            while self.step < last:
                if self.mode is not self.modes.after(self.step):
                    self._record_unread()
                    self._switch()
                    clock = Clock()
                given = self._global(next(self.stream)), self.setup.rng(self.step)
                measured = self._stages(*given)
                if measured:
                    clock = Clock()
                profile.before(self.step + 1, self.carried)
                measured |= self.noise.before(self.step + 1, self.carried, *given)
                with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
                    self.carried, values = self.compiled(self.carried, *given)
                values |= measured
                self.step += 1
                clock.steps += 1
                profile.after(self.step, self.carried)
                self._publish(values)
                # Values are read a step late, so that the devices always have work.
                self._record_unread()
                stopping = self.stop.after(self.step)
                is_last = self.step == last or stopping
                # What follows the last step saves it.
                copies = copy_every and self.step % copy_every == 0 and not is_last
                is_due = config.eval_every > 0 and self.step % config.eval_every == 0
                evaluates = is_due or self.step == last
                logs = self.step % config.log_every == 0 or self.step == 1 or is_last or evaluates
                saves = self.step % config.checkpoint_every == 0 or is_last
                saves = saves or (logs and self._is_time_to_save())
                if not (saves or logs):
                    self.unread = self.step, values
                    if copies:  # none without the record of its step
                        self._record_unread()
                        self._copy()
                    bar.update(task, completed=self.step)
                    continue
                numbers = self._read(self.step, values)
                speed = clock.stop(self.setup, self.mode.bubble(self.step))
                if self.step == last:
                    numbers |= self._end()
                self.evaluated = self._heldout(config.eval_batches) if evaluates else {}
                times = {"goodput": self.goodput.share, SECONDS: self.goodput.seconds()}
                record = numbers | self.evaluated | {"speed": speed} | times
                self.metrics.write(self.step, record)
                self.check_folder()
                self.checkpoints.check()
                if logs:
                    text = line(self.step, last, record, self.setup.task.unit, self.noise.scale)
                    say(bar.console, text)
                if copies:
                    self._copy()
                if saves:
                    self.save(num_batches=1 if stopping else config.eval_batches)
                bar.update(task, completed=self.step)
                clock = Clock()
                if stopping and self.step < last:
                    self.publisher.wait()
                    say(
                        bar.console,
                        f"asked to stop: saved step {self.step}; continue with --resume",
                    )
                    return False
        return True

    def _publish(self, values: Any) -> None:
        """Begins to publish the weights, if they are due."""
        every = self.config.publish.every
        if self.config.publish.path is not None and self.step % every == 0:
            is_known = self.mode.loss_step(self.step) is not None
            seen = [values.get(name) for name in ("loss", "grad_norm")] if is_known else None
            self.publisher.begin(self.step, self.mode.settle(self.carried)[0], seen)

    def _stages(self, batch: Any, rng: jax.Array | None) -> dict[str, Any]:
        """Measures the time of each stage before the step that the configuration names."""
        if self.step + 1 != self.config.train.timeline_at:
            return {}
        with self.goodput.on(COMPILE), announced(self.console, "the step's timeline"):
            seconds = write_timeline(self.setup, self.carried, batch, rng)
        say(self.console, slowest(self.setup, seconds))
        return {STAGE_SECONDS: seconds}

    def finish(self) -> float | None:
        """Reports how good the model is, and returns its score."""
        self.publisher.wait()
        evaluated = self.evaluated or self._heldout(self.config.train.eval_batches)
        # Every process takes part in gathering the weights; the first one alone reports and writes.
        params, layers = self._weights()
        if jax.process_index() != 0:
            return None
        task = self.setup.task
        if evaluated:
            baseline = task.baseline(self.examples, self.heldout)
            metrics = "".join(f", {text}" for text in shown(evaluated.get("eval_metrics")))
            loss = f"{evaluated['eval_loss']:.4f} {task.loss_unit}".rstrip()
            beside = "" if baseline is None else f"; {baseline}"
            say(self.console, f"held-out loss {loss}{metrics}{beside}")
            for line in evaluation.of_domains(evaluated.get("eval_domains", {})):
                say(self.console, line)
        plot.write(self.config.folder)
        text, score = task.report(params, layers, self.heldout)
        if text:
            say(self.console, text)
        return score

    def _weights(self) -> Any:
        """Gathers parameters and states of layers, in canonical order, on the host."""
        state, _ = self.mode.settle(self.carried)
        weights = self.setup.to_canonical_weights(state)
        return multihost_utils.process_allgather(weights, tiled=True)

    def save(self, *, num_batches: int) -> None:
        """Starts to save this step, if its weights give a finite loss.

        The loss of a step is that of the weights before it, so the new weights are evaluated, if
        evaluation is not off, which also tells which checkpoint is the best. A checkpoint saved in
        haste, on request, may take fewer batches than an evaluation, and is then never the best.
        """
        evaluated = self.evaluated or self._heldout(num_batches)
        self.watchdog.at(f"saving step {self.step}")
        is_whole = bool(self.evaluated) or num_batches == self.config.train.eval_batches
        with self.goodput.on(CHECKPOINT):
            checkpoint.save(
                self.checkpoints,
                self.step,
                self.mode.to_saved(self.carried),
                data=self._position(),
                run=self.describe | {checkpoint.IN_FLIGHT: self.mode.layout()},
                eval_loss=evaluated.get("eval_loss") if is_whole else None,
            )
        self.saved_at = time.monotonic()
        if self.config.sample.at_checkpoints:
            self._sample()
        if jax.process_index() == 0 and (whole := self.checkpoints.steps):
            run_folder.note_saved(self.config.folder, max(whole))

    def _sample(self) -> None:
        """Writes a sample beside the checkpoint."""
        with self.goodput.on(EVALUATION):
            params, layers = self._weights()
            if jax.process_index() != 0:
                return
            text, _ = self.setup.task.report(params, layers, self.heldout)
        folder = self.config.folder / run_folder.SAMPLES
        folder.mkdir(exist_ok=True)
        (folder / f"step_{self.step}.txt").write_text(f"{text}\n", encoding="utf-8")

    def check_folder(self) -> None:
        """Raises ConfigError if the run folder that this process writes is gone."""
        if self.files is not None:
            self.files.check()

    def note_saved(self) -> None:
        """Records that the last checkpoint is whole; raises ConfigError if it is gone."""
        folder = self.config.folder
        if self.step not in self.checkpoints.steps:
            path = folder / run_folder.CHECKPOINTS / str(self.step)
            raise ConfigError([run_folder.removed(self.config, path)])
        run_folder.note_saved(folder, self.step)

    def _global(self, batch: stream.Batch) -> Any:
        sharding, size = self.setup.pipe.batch_sharding, self.config.train.batch_size
        return distributed.global_batch(batch, sharding, size)

    def _heldout(self, num_batches: int) -> dict[str, Any]:
        """Evaluates held-out batches; returns their means of loss and metrics, as recorded.

        Nothing if evaluation is off.
        """
        if self.config.train.eval_every == 0:
            return {}
        self.watchdog.at(f"evaluating step {self.step}")
        with self.goodput.on(COMPILE):
            _ = self.setup.evaluate  # the first time
        with self.goodput.on(EVALUATION):
            state, _ = self.mode.settle(self.carried)
            means = evaluation.means(self.setup, state, self.heldout, num_batches)
        self._check_finite(self.step, {"held-out loss": float(means["loss"])})
        found = {f"eval_{name}": recorded(value) for name, value in means.items()}
        if self.domains:
            with self.goodput.on(EVALUATION):
                found["eval_domains"] = evaluation.domain_losses(
                    self.setup, state, self.domains, num_batches
                )
        return found

    def _record_unread(self) -> None:
        if self.unread is not None:
            step, values = self.unread
            self.unread = None
            self.metrics.write(step, self._read(step, values))

    def _read(self, step: int, values: Any) -> dict[str, Any]:
        """Returns a step's values by name; no loss while an asynchronous pipeline fills."""
        rate = float(self.setup.learning_rate(step - 1))
        numbers: dict[str, Any] = {"loss": None, "grad_norm": None, "learning_rate": rate}
        if self.mode.loss_step(step) is not None:
            numbers |= {name: float(values[name]) for name in numbers if name in values}
            numbers["metrics"] = recorded(values["metrics"]) if "metrics" in values else None
        numbers |= self.mode.metrics(step, values)
        seen = {"loss": numbers["loss"], "gradient norm": numbers["grad_norm"]}
        self.skipped = self.skipped + 1 if values.get("skipped", False) else 0
        if 0 < self.skipped <= self.config.optimizer.max_skipped:
            say(self.console, f"step {step} was skipped: {named_values(seen)}")
            self.watchdog.done(step)
            return recorded(numbers) | {"skipped": self.skipped}
        # The loss lags behind: diverging weights show in the correction first.
        seen["correction"] = sum(numbers["correction"]) if "correction" in numbers else None
        known = {name: value for name, value in seen.items() if value is not None}
        self._check_finite(step, known, finds_cause=self.mode is self.modes.synchronous)
        self.watchdog.done(step)
        numbers |= {STAGE_SECONDS: values.get(STAGE_SECONDS)}
        return numbers | self.noise.after(values)

    def _check_finite(
        self, step: int, values: dict[str, float], *, finds_cause: bool = False
    ) -> None:
        if self.skipped or not all(map(math.isfinite, values.values())):
            self.checkpoints.wait()
            kept, skipped = self.checkpoints.latest, max(self.skipped - 1, 0)
            cause = self._cause(step, kept or 0) if finds_cause else ""
            raise NonFiniteLossError(
                step=step, values=values, kept=kept, skipped=skipped, cause=cause
            )

    def _cause(self, step: int, kept: int) -> str:
        """Runs the steps since the last checkpoint again, and says what made this one not finite.

        The state before the step is gone: it was donated.
        """
        if step - kept > _MOST_AGAIN:
            return ""
        self.carried = None  # its memory is needed
        self.watchdog.at(f"finding what step {step} made")
        say(self.console, f"step {step} is not finite: running steps {kept + 1} to {step} again")
        mode, position = self.modes.synchronous, self.start_of_data
        if kept:
            saved, position = checkpoint.restore(self.checkpoints, kept, mode.saved_shapes)
            state = mode.from_saved(saved, kept)
        else:
            state = mode.begin(initial.state(self.setup, self.console), 0)
        stream.continue_at(self.stream, position)
        for before in range(kept, step):
            given = self._global(next(self.stream)), self.setup.rng(before)
            if before < step - 1:
                state, _ = self.compiled(state, *given)
        found = find_nan(self.setup.pipe, state.params, *given, states=state.layers)
        return "" if found is None else str(found)

    def _is_time_to_save(self) -> bool:
        """Says whether the last checkpoint is old; process 0 decides, as clocks differ."""
        minutes = self.config.train.checkpoint_minutes
        if minutes is None:
            return False
        elapsed = time.monotonic() - self.saved_at
        return bool(distributed.from_first(lambda: elapsed >= 60 * minutes))

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            # Without a terminal, only the printed lines are the log.
            disable=not self.console.is_terminal,
        )
