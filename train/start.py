"""The start of a run: locks and fills its folder, and finds the checkpoint to continue."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import jax
from rich.console import Console

from jaxpipe import Checkpoints
from jaxpipe.asynchronous import steady_text
from jaxpipe.schedule import draw
from train import checkpoint, choice, configured, progress, run_folder
from train.choice import Choice
from train.config import Config
from train.errors import ConfigError, Failure
from train.metrics import say
from train.modes import Modes, layout_of
from train.run_lock import RunLock
from train.step import Setup

# A new checkpoint is written before an old one is removed.
_CHECKPOINTS_AT_ONCE = 2


def take_folder(lock: RunLock, config: Config, *, resume: bool) -> None:
    """Locks the run folder before anything in it is read or written."""
    if failures := list(run_folder.misplaced(config)):
        raise ConfigError(failures)
    try:
        lock.acquire()
    except OSError as error:
        raise ConfigError([run_folder.unwritable(config, error)]) from error
    # A run that ended since the check has left its files.
    if failures := list(run_folder.failures(config, resume=resume)):
        raise ConfigError(failures)


def recorded_choice(path: Path, config: Config, console: Console) -> Choice | None:
    """Returns what the run chose before, unless the settings that decide it have changed."""
    try:
        recorded = choice.read(path, config)
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
    """

    step: int = 0
    changes: tuple[str, ...] = ()
    in_flight: bool = False


def find(
    setup: Setup, modes: Modes, checkpoints: Checkpoints, *, resume: bool, data_sha256: str
) -> Start:
    """Finds the checkpoint to continue; writes nothing.

    Raises:
      ConfigError: it cannot be continued, or the disk is too small.
    """
    config = setup.config
    failures = _disk_failures(config, modes)
    start = Start()
    step = checkpoints.latest if resume else None
    if step is not None:
        saved = checkpoint.description(checkpoints, step)
        failures += checkpoint.other_model(saved, config, data_sha256=data_sha256)
        layout = saved.get(checkpoint.IN_FLIGHT)
        if layout is not None:
            now = layout_of(setup)
            failures += checkpoint.other_layout(layout, now, step=step)
        start = Start(step, tuple(checkpoint.changes(saved, config)), layout is not None)
    elif resume:
        failures += checkpoint.none_whole(checkpoints.found, run_dir=config.run_dir)
        failures += progress.lost(Path(config.run_dir)) if not failures else []
    if resume:
        failures += progress.would_fail_again(Path(config.run_dir), config, step=start.step)
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
    """Writes the resolved configuration, the schedule that was chosen, and its picture."""
    config = setup.config
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    choice.write(folder / run_folder.CHOICE_FILE, config, setup.choice)
    if configured.is_asynchronous(config):
        text = steady_text(configured.steady_state(config))
        (folder / run_folder.STEADY_STATE_FILE).write_text(text, encoding="utf-8")
    else:
        draw.save(draw.figure(setup.timeline), folder / run_folder.SCHEDULE_FILE)
    partial = folder / f"{run_folder.CONFIG_FILE}.partial"
    partial.write_text(config.to_yaml(), encoding="utf-8")
    os.replace(partial, folder / run_folder.CONFIG_FILE)


def headline(setup: Setup) -> str:
    config, device = setup.config, setup.mesh.devices.flat[0]
    replicas = f" in {config.mesh.replica} replicas" if config.mesh.replica > 1 else ""
    shared = "".join(f" x {n} {name} devices" for name, n in config.mesh.model_axes().items())
    expert = f" ({config.mesh.expert} share experts)" if config.mesh.expert > 1 else ""
    return (
        f"{setup.task.num_parameters():,} parameters on {config.mesh.stage} stages x "
        f"{config.mesh.data} data shards{replicas}{expert}{shared} ({device.device_kind}, "
        f"{jax.process_count()} processes); "
        f"schedule {config.pipeline.schedule}, {config.pipeline.microbatches} microbatches, "
        f"remat {setup.pipe.remat}, ZeRO-{config.pipeline.zero}"
    )
