"""The speed of a run, as printed and as recorded."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from typing import Any

import jax

from train.step import Setup

# Dense 16-bit peak per device, FLOP/s: NVIDIA's data sheets (A100, H100 SXM and PCIe, H200, B200)
# and Google's Cloud TPU pages; keys are the start of jax's device_kind.
_PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def peak_flops(device_kind: str, dtype: str | None) -> float | None:
    """Looks up the device's dense peak in FLOP/s; None if it is not known.

    Args:
      device_kind: as jax names it.
      dtype: compute dtype; only "bfloat16" has a peak in the table.

    Example:
      >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
      989000000000000.0
    """
    if dtype != "bfloat16":
        return None
    matching = [name for name in _PEAK_FLOPS if device_kind.startswith(name)]
    return _PEAK_FLOPS[max(matching, key=len)] if matching else None


def memory_bytes() -> int:
    """Returns the peak memory of the first local device, or of this process if that is unknown."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"])
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of the steps since the last line.

    Args:
      step_seconds: mean time of a step; evaluating and saving are not counted.
      units_per_second: tokens or images per second, over all devices.
      unit: name of the unit, such as "tokens".
      mfu: share of the devices' peak; None where that or the model's operations are not known.
      memory_bytes: peak memory of the first device, or of this process if that is unknown.
    """

    step_seconds: float
    units_per_second: float
    unit: str
    mfu: float | None
    memory_bytes: int

    def recorded(self) -> dict[str, Any]:
        """Returns the entry ``speed`` of a record in metrics.jsonl."""
        values = {
            "step_seconds": self.step_seconds,
            f"{self.unit}_per_second": self.units_per_second,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
        }
        return {name: value for name, value in values.items() if value is not None}


class Clock:
    """Counts steps and time since it was made; evaluating and saving are not timed."""

    def __init__(self) -> None:
        self.steps = 0
        self._began = time.perf_counter()

    def stop(self, setup: Setup) -> Speed:
        """Returns the speed of the steps counted; there is at least one."""
        seconds = (time.perf_counter() - self._began) / max(self.steps, 1)
        task, devices = setup.task, setup.mesh.devices
        rows = setup.config.train.batch_size / seconds
        peak, flops = peak_flops(devices.flat[0].device_kind, task.dtype), task.flops_per_row()
        mfu = None if peak is None or flops is None else rows * flops / (peak * devices.size)
        return Speed(seconds, rows * task.units_per_row, task.unit, mfu, memory_bytes())
