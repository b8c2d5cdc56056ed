"""Trains a model through a pipeline: ``python train/train.py --config configs/gpt-tiny.yaml``.

Ends with 0 when it is done or was asked to stop, 1 when the loss is not finite, 2 when the input or
the disk is at fault, 70 after any other error, 75 when another process is missing and all can be
started again, 79 when the others go on without a lost process and need this one no longer, 130 when
it was interrupted before training.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # Started by path, Python looks for modules beside this file; `train`, `models` are a level up.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from train.command_line import Invocation
    from train.errors import ConfigError
    from train.watch.goodput import Goodput

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DISK = _FULL | {errno.EACCES, errno.EPERM, errno.EROFS}

_FAILED = 70
"""The exit status after an unexplained error: EX_SOFTWARE of sysexits.h. Python's own status, 1, is
that of a loss that is not finite."""

_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str]) -> int:
    """Runs the command line.

    Returns:
      The exit status.
    """
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        # Training itself saves before it stops.
        print("error: interrupted while no training step ran; nothing was saved", file=sys.stderr)
        return _INTERRUPTED
    except SystemExit as end:
        # A module of the user's may call `sys.exit("why")`, whose status Python would make 1.
        if end.code != 1 and not isinstance(end.code, str):
            raise
        traceback.print_exc()
        return _FAILED
    except Exception:
        traceback.print_exc()
        return _FAILED


def _main(arguments: Sequence[str]) -> int:
    from train.watch.goodput import Goodput

    goodput = Goodput()
    from train import command_line, errors
    from train.runs import run_folder

    try:
        invocation = command_line.parse(arguments)
    except errors.ConfigError as error:
        return _refuse(error)
    try:
        _run(invocation, goodput)
    except errors.ConfigError as error:
        return _refuse(error)
    except errors.RestartError as error:
        print(f"error: {error}", file=sys.stderr)
        return errors.RESTART
    except errors.NonFiniteLossError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    # The checkpoint's writer has errors of its own for those of the disk; others are bugs.
    except Exception as error:
        cause = _disk_error(error)
        if cause is None:
            raise
        # The checkpoint's writer never awaits the files that it had not begun.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        # TensorBoard's file cannot be flushed any more, and so not closed.
        warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)
        return _refuse(errors.ConfigError([run_folder.unwritable(invocation.config, cause)]))
    return 0


def _run(invocation: Invocation, goodput: Goodput) -> None:
    from jaxpipe import gpu_flags
    from train import checks, errors, pipeline_section
    from train.processes import distributed
    from train.processes.watchdog import Watchdog
    from train.recover import survivors

    group = None
    if (survivor := survivors.inherited()) is not None:
        group = survivor.regroup()
        invocation = dataclasses.replace(invocation, config=group.config, resume=True)
    config, out_of_range = checks.in_range(invocation.config)
    chooses = config.pipeline.schedule == pipeline_section.PLAN
    if chooses:  # until there are devices, any schedule will do to check the rest
        config = pipeline_section.without_choice(config)
    broken = [*invocation.failures, *out_of_range]
    processes, failures = None, list(broken)
    try:
        processes = distributed.find_processes(config)
    except errors.ConfigError as error:
        failures += checks.without(error.failures, broken)
    # With several processes, the first looks at the run folder once it can tell the others.
    writes = not (invocation.dry_run or invocation.evaluate)
    writes = writes and (processes is None or processes.count == 1)
    resume = invocation.resume and not invocation.evaluate
    wrong = checks.check(config, resume=resume, writes=writes, reads=not invocation.dry_run)
    failures += checks.without(wrong, broken)
    # Processes that cannot start would only wait for each other.
    if processes is None or (failures and processes.count > 1):
        raise errors.ConfigError(failures)
    distributed.simulate_devices(config, processes)
    without = {"all": (), "no-command-buffers": [gpu_flags.COMMAND_BUFFERS], "off": gpu_flags.FLAGS}
    if unknown := gpu_flags.apply(without=without[config.pipeline.gpu_flags]):
        print(f"warning: this XLA does not know {', '.join(unknown)}", file=sys.stderr)
    patience = config.distributed.patience_seconds
    distributed.start(processes, run=config.run_dir, patience_seconds=patience)
    with Watchdog(patience) as watchdog, watchdog.explained():
        if group is not None:
            watchdog.survivor = group.survivor

        import jax

        _keep_programs()
        _quieten_checkpoints()
        _show_library_log(is_writer=jax.process_index() == 0)
        devices = checks.device_failures(
            config, num_devices=jax.device_count(), platform=jax.default_backend()
        )
        failures += checks.without(devices, broken)
        if failures:
            raise errors.ConfigError(failures)

        from train import dry_run, evaluation, loop, plan

        if chooses:
            config, why = plan.choose(config)
            if jax.process_index() == 0:
                print(why, flush=True)
        if invocation.dry_run:
            dry_run.run(config)
        elif invocation.evaluate:
            evaluation.run(config)
        else:
            loop.run(config, watchdog, goodput, resume=resume, group=group)


def _keep_programs() -> None:
    # A restarted run finds its program compiled. Not on CPUs: `jaxpipe.make_mesh` says why.
    import jax

    config: Any = jax.config  # its stubs name no settings
    if config.jax_compilation_cache_dir is None and jax.default_backend() != "cpu":
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        config.update("jax_compilation_cache_dir", str(caches / "jaxpipe" / "programs"))


def _quieten_checkpoints() -> None:
    # Orbax warns about what is meant here, arrays restored with other shardings than saved, and
    # logs a traceback for every thread of a failed write besides raising the error.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        # Tensorstore prints an error for every write that was under way when the first one failed.
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = hook


def _show_library_log(*, is_writer: bool) -> None:
    # Messages of the library belong to the run's account; errors alone go to stderr.
    log = logging.getLogger("jaxpipe")
    log.addHandler(logging.StreamHandler(sys.stdout) if is_writer else logging.NullHandler())
    log.propagate = False


def _disk_error(error: Exception) -> OSError | None:
    """Finds the error of the operating system or of a store, if one of these is at fault."""
    from train.object_store import StoreError

    if isinstance(error, OSError):
        return error if isinstance(error, StoreError) or error.errno in _DISK else None
    # The checkpoint's writer has exceptions of its own.
    for number in _DISK:
        if f": {os.strerror(number)}" in str(error):
            return OSError(number, os.strerror(number))
    return None


def _refuse(error: ConfigError) -> int:
    messages = [failure.message for failure in error.failures]
    print("\n".join(f"error: {message}" for message in messages), file=sys.stderr)
    return 2


class _Lasting(io.FileIO):
    """A stream that can be written to even when its reader has gone, or its disk is full."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in _FULL | {errno.EPIPE, errno.EIO}:
                raise
            return len(content)


def lasting(stream: Any) -> Any:
    """Returns a stream that outlives its reader: neither a closed pipe or terminal nor a log on a
    full disk may end a run."""
    if stream is None:  # the launcher has closed it
        return None
    raw = _Lasting(stream.fileno(), "wb", closefd=False)
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


if __name__ == "__main__":
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
    status = main(sys.argv[1:])
    from train.errors import RESTART

    if status == RESTART:
        # At an orderly end jax would wait for the others.
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
