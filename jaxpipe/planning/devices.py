"""Devices and links: what they attain, how much memory they have, and what they cost.

Peaks are NVIDIA's: of dense 16-bit matmuls (data sheets of Hopper and Blackwell print twice that,
for sparse ones, and twice each for 8-bit floats), and half of what they call the bandwidth of
NVLink, which counts both directions.
Looked up in November 2026, in NVIDIA's documents or in pages that quote them, named below:

======  =========================================================================================
v100    125 TFLOP/s, 0.9 TB/s, 6 NVLinks of 25 GB/s each way, PCIe 3.0: Volta white paper (SXM2)
a100    312 TFLOP/s, 2.039 TB/s, 300 GB/s each way, PCIe 4.0: A100 80 GB data sheet
        (nvidia-1758950), as glennklockwood.com/garden/processors/A100 quotes it
h100    989 TFLOP/s, 3.35 TB/s, 18 NVLinks of 25 GB/s each way, PCIe 5.0: H100 SXM data sheet
h200    an H100 with 141 GB at 4.8 TB/s: H200 SXM data sheet, and NVIDIA's system descriptions in
        github.com/mlcommons/inference_results_v4.1 (900 GB/s both ways, PCIe 5.0)
b200    2250 TFLOP/s at 1000 W, 900 GB/s each way: glennklockwood.com/garden/processors/B200;
        180 GB and 8 TB/s are an eighth of a DGX B200. Devices say 7.67 TB/s of themselves
        (github.com/pytorch/ao/pull/4002)
======  =========================================================================================

`Device.efficiency` says which share of each the model assumes. For H100s the shares are those of
`benchmarks/roofline.py`; the other devices take the same ones, as nothing was measured. Prices are
assumptions, per device and hour, of the order of what large providers list on demand; smaller ones
ask half (aimultiple.com/gpu-index, May 2026: a median of $2.95 for an H100). They decide only the
column of costs.

`jaxpipe.planning.measuring` times simple programs on devices; what these attain of the peaks makes
a `Device` in place of a data sheet's.
"""

import dataclasses
import difflib
import math
import re
from pathlib import Path
from typing import Any

from jaxpipe.files import read_json
from jaxpipe.schedule.problems import Problem, refuse


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that programs attain.

    Args:
      flops: of matmuls, large ones.
      memory: of the memory's bandwidth.
      link: of the links within a host.
      attention: fused attention's share of what matmuls attain.
      loads: share of a matmul's bytes that its FLOPs do not hide, so that small ones attain less.
    """

    flops: float = 0.81
    memory: float = 0.90
    link: float = 0.80
    attention: float = 1.0
    loads: float = 0.0


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of device.

    Args:
      name: by which users choose it.
      flops: peak of dense 16-bit matmuls, per second.
      bandwidth: bandwidth of its memory, bytes per second.
      within_host: NVLink between devices of a host, bytes per second and direction.
      pcie: PCI Express of a device, x16, likewise.
      dollars_per_hour: price of one device; an assumption.
      latency: seconds of a message or a collective, however small.
      fp8: rate of matmuls of 8-bit floats, as a multiple of that of 16 bits; 1 where the
        device has none.
    """

    name: str
    flops: float
    memory_bytes: float
    bandwidth: float
    within_host: float
    pcie: float
    dollars_per_hour: float
    source: str
    efficiency: Efficiency = Efficiency()
    latency: float = 0.0
    fp8: float = 1.0


LAUNCH_SECONDS = 3e-6
"""Between two kernels of one stream: assumed, as in benchmarks/roofline.py."""

USABLE_MEMORY = 0.92
"""Share of a device's memory beside the CUDA context, the library's workspaces and fragments of the
allocator. Assumed; jax itself takes 0.75 unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."""

DEVICES = {
    device.name: device
    for device in (
        Device("v100", 125e12, 32e9, 0.9e12, 150e9, 16e9, 2.5, "V100 SXM2 32 GB data sheet"),
        Device("a100", 312e12, 80e9, 2.039e12, 300e9, 32e9, 3.5, "A100 SXM 80 GB data sheet"),
        Device("h100", 989e12, 80e9, 3.35e12, 450e9, 64e9, 6.0, "H100 SXM data sheet", fp8=2.0),
        Device("h200", 989e12, 141e9, 4.8e12, 450e9, 64e9, 7.0, "H200 SXM data sheet", fp8=2.0),
        Device(
            "b200", 2250e12, 180e9, 8.0e12, 900e9, 64e9, 10.0, "DGX B200 data sheet, 1/8", fp8=2.0
        ),
        Device("cpu", 5e10, 4e9, 1e10, 1e10, 1e10, 0.05, "assumed: a core"),
    )
}

_LINK = re.compile(r"(nvlink|pcie):([1-9]\d{0,5}),(ib|eth):([1-9]\d{0,5}(?:\.\d+)?)")
_GBIT = 1e9 / 8
"""Bytes per second of a Gb/s of a port, of InfiniBand or Ethernet."""
_PORT_EFFICIENCY = 0.90
"""Share of a network port, as in benchmarks/roofline.py."""
_ETHERNET_EFFICIENCY = 0.70
"""Share of Ethernet, whose protocol takes more: assumed."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices in hosts, with what they attain.

    Args:
      within: bytes per second and direction between two devices of a host.
      across: likewise of one device's port between hosts.
      memory_bytes: memory of a device that a plan may use.
      exposed: share of the collectives within layers that nothing hides; less than 1 in systems
        that run them beside matmuls.
    """

    device: Device
    count: int
    per_host: int
    within: float
    across: float
    memory_bytes: float
    exposed: float = 1.0

    @property
    def flops(self) -> float:
        """FLOPs per second that matmuls attain."""
        return self.device.flops * self.device.efficiency.flops

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the memory that kernels attain."""
        return self.device.bandwidth * self.device.efficiency.memory

    @property
    def bus(self) -> float:
        """Bytes per second and direction between a device and its host."""
        return self.device.pcie * self.device.efficiency.link

    @property
    def has_host_memory(self) -> bool:
        """Whether what lies on the host leaves a device's memory."""
        return self.device.name != "cpu"

    @property
    def dollars_per_second(self) -> float:
        """Price of all devices together."""
        return self.count * self.device.dollars_per_hour / 3600

    def link(self, span: int) -> float:
        """Bytes per second of a group of devices that lie in so many in a row of the mesh."""
        return self.within if span <= self.per_host else self.across


def cluster(
    device: str | Device,
    devices: int,
    *,
    link: str = "nvlink:8,ib:400",
    memory: float | None = None,
) -> Cluster:
    """Makes a cluster from names of its devices and links.

    Args:
      device: a name in `DEVICES`, or one that was measured.
      devices: how many.
      link: "nvlink:8,ib:400" for hosts of 8 devices with NVLink and a port of 400 Gb/s for each;
        "pcie:N" in place of NVLink, "eth:GBITS" in place of InfiniBand.
      memory: bytes of a device that a plan may take; None for `USABLE_MEMORY` of what it has.

    Raises:
      ArgumentError: an unknown device or link, or a number out of range.

    Example:
      >>> made = cluster("h100", 64)
      >>> made.per_host, f"{made.within / 1e9:.0f}", f"{made.across / 1e9:.0f}"
      (8, '360', '45')
    """
    problems = []
    if isinstance(device, str) and device not in DEVICES:
        near = difflib.get_close_matches(device, DEVICES, n=1, cutoff=0.3) or list(DEVICES)
        rule = f"is not a known device; choose one of {', '.join(DEVICES)}, or a file.json"
        problems.append(Problem("device", device, rule, near))
    if devices < 1:
        problems.append(Problem("devices", devices, "must be at least 1", (1,)))
    if memory is not None and not 0 < memory < math.inf:
        problems.append(Problem("memory", memory, "must be bytes of a device, above 0", (80e9,)))
    parts = _LINK.fullmatch(link)
    if parts is None:
        rule = "must be WITHIN:DEVICES_PER_HOST,ACROSS:GBITS, with nvlink or pcie, and ib or eth"
        problems.append(Problem("link", link, rule, ("nvlink:8,ib:400",)))
    refuse(problems)
    assert parts is not None
    inner, per_host, outer, gbits = parts.groups()
    kind = DEVICES[device] if isinstance(device, str) else device
    link_peak = kind.within_host if inner == "nvlink" else kind.pcie
    within = link_peak * kind.efficiency.link
    share = _PORT_EFFICIENCY if outer == "ib" else _ETHERNET_EFFICIENCY
    across = _GBIT * float(gbits) * share
    limit = USABLE_MEMORY * kind.memory_bytes if memory is None else memory
    return Cluster(kind, devices, min(int(per_host), devices), within, across, limit)


# Measured devices.


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Rates that simple programs attain on all devices at once.

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
        """Bytes per second that messages and collectives both attain."""
        return min(self.message, self.collective)


def known(kind: str) -> Device | None:
    """Finds the device of the table that jax means, by its ``device_kind``."""
    matches = (device for name, device in DEVICES.items() if name in kind.lower())
    return next(matches, None)


def measured(kind: str, peaks: Peaks, *, memory_bytes: float | None, source: str) -> Device:
    """Makes the device that attains what was measured.

    Args:
      kind: jax's name of the devices.
      memory_bytes: memory of a device; None where jax does not know it.
      source: where this was measured, in words.
    """
    device = known(kind) or DEVICES["cpu"]
    if device.name == "cpu":
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
    return dataclasses.replace(device, efficiency=attained, latency=peaks.latency, source=source)


def find(device: str) -> str | Device:
    """Reads the device that a file holds; returns the text itself if it is no file's name."""
    if not device.endswith(".json"):
        return device
    try:
        return _device(read_json(Path(device))["device"])
    except (KeyError, TypeError, ValueError) as error:
        rule = f"holds no measured device ({type(error).__name__}: {error})"
        note = "jaxpipe measure --out FILE writes them."
        refuse([Problem("device", device, rule, tuple(DEVICES), note=note)])
        raise AssertionError from error  # refused


def _device(data: dict[str, Any]) -> Device:
    efficiency = Efficiency(**data["efficiency"])
    device = Device(**data | {"efficiency": efficiency})
    numbers = [*dataclasses.asdict(device).values(), *dataclasses.astuple(efficiency)]
    if any(number < 0 for number in numbers if isinstance(number, (int, float))):
        raise ValueError("a number is below 0")
    if min(device.flops, device.bandwidth) <= 0:
        raise ValueError("a rate is 0")
    return device
