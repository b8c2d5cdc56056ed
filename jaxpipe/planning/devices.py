"""Devices and links: what they attain, how much memory they have, and what they cost.

Peaks are NVIDIA's: of dense 16-bit matmuls (data sheets of Hopper and Blackwell print twice that,
for sparse ones), and half of what they call the bandwidth of NVLink, which counts both directions.
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
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence

from jaxpipe.schedule.problems import Problem, refuse


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Which share of a peak programs attain: of matmuls, of memory, and of links within a host."""

    flops: float = 0.81
    memory: float = 0.90
    link: float = 0.80


@dataclasses.dataclass(frozen=True)
class Passes:
    """Seconds of a layer's F, B and W and of its optimizer, as multiples of what kernels take that
    attain those shares. Measured (`jaxpipe.planning.calibration`); 1 where nothing was."""

    f: float = 1.0
    b: float = 1.0
    w: float = 1.0
    update: float = 1.0


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of device.

    Args:
      name: by which users choose it.
      flops: peak of dense 16-bit matmuls, per second.
      memory_bytes: of one device.
      bandwidth: of its memory, bytes per second.
      within_host: NVLink between devices of a host, bytes per second and direction.
      pcie: PCI Express of a device, x16, likewise.
      dollars_per_hour: of one device; an assumption.
      source: where the peaks stand.
      efficiency: shares of the peaks.
      passes: what layers take beyond that.
      latency: seconds of a message or a collective, however small.
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
    passes: Passes = Passes()
    latency: float = 0.0


LAUNCH_SECONDS = 3e-6
"""Between two kernels of one stream: assumed, as in benchmarks/roofline.py."""

USABLE_MEMORY = 0.92
"""Of a device's memory: the rest is the CUDA context, the library's workspaces and fragments of the
allocator. Assumed; jax itself takes 0.75 unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."""

DEVICES = {
    device.name: device
    for device in (
        Device("v100", 125e12, 32e9, 0.9e12, 150e9, 16e9, 2.5, "V100 SXM2 32 GB data sheet"),
        Device("a100", 312e12, 80e9, 2.039e12, 300e9, 32e9, 3.5, "A100 SXM 80 GB data sheet"),
        Device("h100", 989e12, 80e9, 3.35e12, 450e9, 64e9, 6.0, "H100 SXM data sheet"),
        Device("h200", 989e12, 141e9, 4.8e12, 450e9, 64e9, 7.0, "H200 SXM data sheet"),
        Device("b200", 2250e12, 180e9, 8.0e12, 900e9, 64e9, 10.0, "DGX B200 data sheet, 1/8"),
        Device("cpu", 5e10, 4e9, 1e10, 1e10, 1e10, 0.05, "assumed: a core"),
    )
}

_GBIT = 1e9 / 8
"""Bytes per second of a Gb/s of a port, of InfiniBand or Ethernet."""
_PORT_EFFICIENCY = 0.90
"""Of a network port, as in benchmarks/roofline.py."""
_ETHERNET_EFFICIENCY = 0.70
"""Of Ethernet, whose protocol takes more: assumed."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices in hosts, with what they attain.

    Args:
      device: what each of them is.
      count: how many there are.
      per_host: how many share a host.
      within: bytes per second and direction between two devices of a host.
      across: of one device's port between hosts.
      memory_bytes: of a device, that a plan may use.
    """

    device: Device
    count: int
    per_host: int
    within: float
    across: float
    memory_bytes: float

    @property
    def flops(self) -> float:
        """What matmuls attain, per second."""
        return self.device.flops * self.device.efficiency.flops

    @property
    def bandwidth(self) -> float:
        """What kernels attain of the memory, bytes per second."""
        return self.device.bandwidth * self.device.efficiency.memory

    @property
    def bus(self) -> float:
        """Between a device and its host, bytes per second and direction."""
        return self.device.pcie * self.device.efficiency.link

    @property
    def has_host_memory(self) -> bool:
        """Whether what lies on the host leaves a device's memory."""
        return self.device.name != "cpu"

    @property
    def dollars_per_second(self) -> float:
        """Of all devices together."""
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
    """Devices and links by name.

    Args:
      device: a name in `DEVICES`, or one that was measured.
      devices: how many.
      link: "nvlink:8,ib:400" for hosts of 8 devices with NVLink and a port of 400 Gb/s for each;
        "pcie:N" in place of NVLink, "eth:GBITS" in place of InfiniBand.
      memory: bytes of a device that a plan may take; None for `USABLE_MEMORY` of what it has.

    Raises:
      ArgumentError: an unknown device or link, or a number out of range.

    Example:
      >>> found = cluster("h100", 64)
      >>> found.per_host, f"{found.within / 1e9:.0f}", f"{found.across / 1e9:.0f}"
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
    parts = _links(link)
    if parts is None:
        rule = "must be WITHIN:DEVICES_PER_HOST,ACROSS:GBITS, with nvlink or pcie, and ib or eth"
        problems.append(Problem("link", link, rule, ("nvlink:8,ib:400",)))
    refuse(problems)
    assert parts is not None
    (inner, per_host), (outer, gbits) = parts
    kind = DEVICES[device] if isinstance(device, str) else device
    link_peak = kind.within_host if inner == "nvlink" else kind.pcie
    within = link_peak * kind.efficiency.link
    share = _PORT_EFFICIENCY if outer == "ib" else _ETHERNET_EFFICIENCY
    across = _GBIT * gbits * share
    limit = USABLE_MEMORY * kind.memory_bytes if memory is None else memory
    return Cluster(kind, devices, min(int(per_host), devices), within, across, limit)


def _links(text: str) -> Sequence[tuple[str, float]] | None:
    """The link within hosts and that between them, each with its number; None if it is neither."""
    found = []
    for part, kinds in zip(text.split(","), (("nvlink", "pcie"), ("ib", "eth")), strict=False):
        name, _, number = part.partition(":")
        try:
            value = float(number)
        except ValueError:
            return None
        whole = kinds[0] != "nvlink" or value == int(value)
        if name not in kinds or not 1 <= value < math.inf or not whole:
            return None
        found.append((name, value))
    return found if len(found) == 2 and text.count(",") == 1 else None
