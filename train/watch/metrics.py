"""Output of numbers: metrics.jsonl, TensorBoard, Weights & Biases, Prometheus, printed lines."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
import prometheus_client
from rich.console import Console

from jaxpipe.errors import printable
from jaxpipe.files import write_whole
from jaxpipe.planning import devices
from train.config import Config
from train.runs import run_folder
from train.step import Setup
from train.watch.goodput import SECONDS, UNIX_TIME, Goodput

_FLUSH_SECONDS = 10
"""Time after which TensorBoard sees new numbers."""
# Dense 16-bit peaks, FLOP/s, of devices that are not in jaxpipe/planning/devices.csv: NVIDIA's data
# sheet and Google's Cloud TPU pages; keys are the start of jax's device_kind.
_PEAK_FLOPS = {
    "NVIDIA H100 PCIe": 756e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def line(
    step: int, num_steps: int, record: Mapping[str, Any], unit: str, noise_scale: float | None
) -> str:
    """Writes the printed line of a logged step.

    Args:
      num_steps: optimizer steps of the whole run.
      record: the values of the step by name; loss and norm of the gradient are None while an
        asynchronous pipeline fills.
      unit: unit of the task, such as "tokens".
      noise_scale: of the gradient, in this unit; None if it is not known.
    """
    loss, norm, speed = record["loss"], record["grad_norm"], record["speed"]
    parts = [
        f"step {step:>{len(str(num_steps))}}/{num_steps}",
        "loss -" if loss is None else f"loss {loss:.4f}",
        *shown(record.get("metrics")),
        "grad norm -" if norm is None else f"grad norm {norm:.3f}",
        f"lr {record['learning_rate']:.2e}",
        f"{speed[f'{unit}_per_second']:,.0f} {unit}/s",
    ]
    if "mfu" in speed:
        parts.append(f"MFU {speed['mfu']:.1%}")
    parts += [f"bubble {speed['bubble']:.1%}", f"memory {speed['memory_bytes'] / 1e9:.2f} GB"]
    if noise_scale is not None:
        parts.append(f"noise scale {noise_scale:,.0f} {unit}")
    if "eval_loss" in record:
        parts += [f"held-out {record['eval_loss']:.4f}", *shown(record.get("eval_metrics"))]
    return "  ".join(parts)


def recorded(value: Any) -> Any:
    """Returns a value of a step as metrics.jsonl holds it: lists for arrays, None for no number.

    Example:
      >>> recorded({"accuracy": jax.numpy.float32(0.5), "by_class": np.array([1.0, np.nan])})
      {'accuracy': 0.5, 'by_class': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {name: recorded(part) for name, part in value.items()}
    value = np.asarray(value).tolist() if hasattr(value, "dtype") else value
    if isinstance(value, list):
        return [recorded(part) for part in value]
    return value if math.isfinite(value) else None


def shown(metrics: Mapping[str, Any] | None) -> list[str]:
    """Returns the metrics that fit on a line: each a name with one number.

    Example:
      >>> shown({"accuracy": 0.53125, "tokens": 512, "by_class": [0.5, 0.25]})
      ['accuracy 0.5312', 'tokens 512']
    """
    return [
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in (metrics or {}).items()
        if isinstance(value, (int, float))
    ]


def say(console: Console, text: str, *, wraps: bool = False) -> None:
    """Prints lines, broken at the console's width only if asked; nothing in them is markup."""
    console.print(printable(text), soft_wrap=not wraps, markup=False, highlight=False)


@contextlib.contextmanager
def announced(console: Console, what: str) -> Iterator[None]:
    """Says that something is being compiled, and then how long it took."""
    say(console, f"compiling {what} ...")
    began = time.perf_counter()
    yield
    say(console, f"compiled in {time.perf_counter() - began:.1f} s")


def truncate(path: Path, *, last_step: int) -> None:
    """Keeps only the records up to a step, so that a resumed run writes no step twice.

    Lines that are not records are removed as well: a killed process may have left half a line.
    """
    if path.exists():
        kept = [line for line, record in records(path) if record["step"] <= last_step]
        write_whole(path, b"".join(kept))


def records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields the records in metrics.jsonl, each with its line; none if there is no file."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line + b"\n", record


class _Board:
    """TensorBoard's file, written by this thread.

    tensorboardX's `SummaryWriter` has its own thread. When the disk is full, that thread dies and
    leaves its caller waiting forever.

    Args:
      folder: made if missing.
      first_step: TensorBoard hides what an earlier run wrote at this step or later.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        self._add(first_step, session_log=SessionLog(status=SessionLog.START))
        self._flushed = time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._add(step, summary=self._scalar(name, value))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))


class _Gauges:
    """The newest numbers of a run in Prometheus' text format, in a file that is replaced whole.

    A file asks for no port and no thread, any number of runs on a host have one each, and it stays
    when the run ends. The textfile collector of Prometheus' node exporter reads it.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, prometheus_client.Gauge] = {}

    def set(self, values: Mapping[str, float]) -> None:
        """Sets numbers by name; those of other names stay."""
        for name, value in values.items():
            name = "jaxpipe_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            if name not in self._gauges:
                self._gauges[name] = prometheus_client.Gauge(
                    name, "As in metrics.jsonl.", ["run"], registry=self._registry
                )
            self._gauges[name].labels(self._run).set(value)

    def write(self) -> None:
        prometheus_client.write_to_textfile(str(self._path), self._registry)


class Metrics:
    """Writes every step's numbers; does nothing on any process but the first.

    Use as a context manager.

    Args:
      config: names the run folder, and the wandb project if any.
      goodput: the clock of the run, which continues that of the records.
      last_step: the step to continue from; later records are removed.
      ended: whether the run had done all its steps before.
      is_writer: whether this process writes.
    """

    def __init__(
        self, config: Config, goodput: Goodput, *, last_step: int, ended: bool, is_writer: bool
    ) -> None:
        self.goodput = goodput
        self._open = contextlib.ExitStack()
        self._file: TextIO | None = None
        self._board: _Board | None = None
        self._gauges: _Gauges | None = None
        self._wandb: Any = None
        if not is_writer:
            return
        folder = config.folder
        path = folder / run_folder.METRICS_FILE
        earlier = (record for _, record in records(path))
        goodput.resume(earlier, step=last_step, ended=ended)
        truncate(path, last_step=last_step)
        # Buffered by line, so that every step a killed run has printed is on disk.
        self._file = self._open.enter_context(path.open("a", encoding="utf-8", buffering=1))
        self._board = _Board(folder / run_folder.TENSORBOARD, first_step=last_step + 1)
        self._open.callback(self._board.close)
        name = folder.resolve().name
        self._gauges = _Gauges(folder / run_folder.GAUGES_FILE, name)
        if config.wandb.project is not None:
            wandb = importlib.import_module("wandb")
            self._wandb = wandb.init(
                project=config.wandb.project,
                dir=str(folder),
                config=config.to_record(),
                id=name,
                resume="allow",
            )
            self._open.callback(self._wandb.finish)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one step.

        Args:
          step: optimizer steps done.
          values: values by name; None is left out, and each number of a list or of a mapping is a
            curve of its own. Values with the run's clock are those of a printed line.
        """
        if self._file is None or self._board is None or self._gauges is None:
            return
        present = {name: value for name, value in values.items() if value is not None}
        curves = dict(_curves(present))
        times = {"step": step, UNIX_TIME: time.time()}
        self._file.write(json.dumps(times | present, allow_nan=False) + "\n")
        self._board.write(step, curves)
        self._gauges.set(times | curves)
        if SECONDS in present:
            self._gauges.write()
        if self._wandb is not None:
            self._wandb.log(curves, step=step)


def _curves(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(n): part for n, part in enumerate(value)}
        if isinstance(value, dict):
            yield from ((f"{name}/{part}", number) for part, number in _curves(value))
        elif value is not None:
            yield name, value


def peak_flops(device_kind: str, dtype: str | None) -> float | None:
    """Looks up the device's dense peak in FLOP/s; None if it is not known.

    Args:
      device_kind: as jax names it.
      dtype: compute dtype; only "bfloat16" has a peak.

    Example:
      >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
      989000000000000.0
    """
    if dtype != "bfloat16":
        return None
    matching = [name for name in _PEAK_FLOPS if device_kind.startswith(name)]
    if matching:
        return _PEAK_FLOPS[max(matching, key=len)]
    device = devices.known(device_kind)
    return None if device is None or device.name == "cpu" else device.flops


def memory_bytes() -> int:
    """Returns the peak memory of the first local device, or of this process if that is unknown."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"])
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Clock:
    """Counts steps and time since it was made; evaluating and saving are not timed."""

    def __init__(self) -> None:
        self.steps = 0
        self._began = time.perf_counter()

    def stop(self, setup: Setup, bubble: float) -> dict[str, float]:
        """Makes the entry ``speed`` of a record, given at least one step.

        Args:
          bubble: predicted share of idle time.

        Returns:
          Mean seconds of a step; tokens or other units per second, over all devices; the share of
          the devices' peak ("mfu"), if that and the model's operations are known; `memory_bytes`.
        """
        seconds = (time.perf_counter() - self._began) / max(self.steps, 1)
        task, used = setup.task, setup.mesh.devices
        rows = setup.config.train.batch_size / seconds
        peak, flops = peak_flops(used.flat[0].device_kind, task.dtype), task.flops_per_row()
        return {
            "step_seconds": seconds,
            f"{task.unit}_per_second": rows * task.units_per_row,
            **({"mfu": rows * flops / (peak * used.size)} if peak and flops else {}),
            "memory_bytes": memory_bytes(),
            "bubble": bubble,
        }
