"""A device as it was measured, in place of its data sheet; JSON.

`jaxpipe.planning.measuring` times programs on devices. What they attain of the device's peaks, and
how much longer layers take than kernels that attain as much, make a `Device` for ``jaxpipe plan``
and ``compare``: a model that was measured takes the measured time, and what was not measured, such
as other rows or a layer's part on another number of devices, is scaled alike.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpipe.files import read_json
from jaxpipe.planning.devices import DEVICES, Device, Efficiency, Passes
from jaxpipe.schedule.problems import Problem, refuse

PASSES = tuple(field.name for field in dataclasses.fields(Passes))


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What simple programs attain on all devices at once.

    Args:
      flops: a large matmul in the dtype of the layers, per second.
      bandwidth: an array that is read and written, bytes per second.
      message: a long array between two devices of a host, bytes per second.
      collective: gathering and reducing a long array, bytes per second that a device sends.
      latency: seconds of a short message.
    """

    flops: float
    bandwidth: float
    message: float
    collective: float
    latency: float

    @property
    def link(self) -> float:
        """What messages and collectives both attain."""
        return min(self.message, self.collective)


@dataclasses.dataclass(frozen=True)
class Timed:
    """One program of the model that was timed.

    Args:
      name: one of `PASSES`.
      remat: policy of rematerialization.
      rows: of the microbatch; 0 for an update.
      count: layers that are like it.
      seconds: measured.
      expected: seconds of its kernels at the measured peaks.
    """

    name: str
    remat: str
    rows: int
    count: int
    seconds: float
    expected: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A device as it was measured, and what that comes from."""

    device: Device
    peaks: Peaks
    timed: tuple[Timed, ...]

    def to_json(self) -> str:
        """The text of a file for ``--device``."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def known(kind: str) -> Device | None:
    """The device of the table that jax means, by its ``device_kind``.

    Example:
      >>> known("NVIDIA H100 80GB HBM3").name
      'h100'
    """
    found = [device for name, device in DEVICES.items() if name in kind.lower()]
    return found[0] if found else None


def calibrate(
    kind: str, peaks: Peaks, timed: Sequence[Timed], *, memory_bytes: float | None, source: str
) -> Calibration:
    """The device that takes, for all that was timed of a pass together, what was measured.

    Args:
      kind: jax's name of the devices.
      peaks: attained by simple programs.
      timed: programs of the model, at least one of each pass.
      memory_bytes: of a device; None where jax does not know it.
      source: what was measured, in words.
    """
    named = known(kind)
    device = DEVICES["cpu"] if named is None else named
    if named is None or named.name == "cpu":
        # No data sheet: what is attained is the peak.
        device = dataclasses.replace(
            device,
            flops=peaks.flops,
            bandwidth=peaks.bandwidth,
            within_host=peaks.link,
            pcie=peaks.link,
            memory_bytes=memory_bytes or device.memory_bytes,
        )
    attained = Efficiency(
        peaks.flops / device.flops,
        peaks.bandwidth / device.bandwidth,
        peaks.link / device.within_host,
    )
    factors = {name: _factor([one for one in timed if one.name == name]) for name in PASSES}
    device = dataclasses.replace(
        device,
        efficiency=attained,
        passes=Passes(**factors),
        latency=peaks.latency,
        source=source,
    )
    return Calibration(device, peaks, tuple(timed))


def _factor(timed: Sequence[Timed]) -> float:
    measured, expected = (
        sum(one.count * getattr(one, name) for one in timed) for name in ("seconds", "expected")
    )
    return measured / expected


def find(device: str) -> str | Device:
    """The device that a file holds; the text itself if it is no file's name.

    Args:
      device: a name, or the path of a .json file.

    Raises:
      ArgumentError: the file holds nothing of the kind.
      OSError: it cannot be read.
    """
    if not device.endswith(".json"):
        return device
    try:
        found = _device(read_json(Path(device))["device"])
    except (KeyError, TypeError, ValueError) as error:
        rule = f"holds no measured device ({type(error).__name__}: {error})"
        note = "jaxpipe measure --config FILE --out FILE writes them."
        refuse([Problem("device", device, rule, tuple(DEVICES), note=note)])
        raise AssertionError from error  # refused
    return found


def _device(data: dict[str, Any]) -> Device:
    efficiency, passes = Efficiency(**data["efficiency"]), Passes(**data["passes"])
    device = Device(**data | {"efficiency": efficiency, "passes": passes})
    numbers = [value for value in dataclasses.asdict(device).values() if isinstance(value, float)]
    numbers += [*dataclasses.astuple(efficiency), *dataclasses.astuple(passes)]
    if not all(value >= 0 for value in numbers) or min(device.flops, device.bandwidth) <= 0:
        raise ValueError("a number is below 0")
    return device
