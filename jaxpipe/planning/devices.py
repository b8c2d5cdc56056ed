"""Devices and links: what they attain, how much memory they have, and what they cost.

Peaks are those of data sheets; `Device.efficiency` says which share of each the model assumes. For
H100s the shares are those of `benchmarks/roofline.py`; the other devices take the same ones, as
nothing was measured. Prices are assumptions, of the order of public list prices on demand, per
device and hour; they decide only the column of costs.
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
class Device:
    """One kind of device.

    Args:
      name: by which users choose it.
      flops: peak of dense 16-bit matmuls, per second.
      memory_bytes: of one device.
      bandwidth: of its memory, bytes per second.
      within_host: link between devices of a host, bytes per second and direction.
      per_host: devices of a host.
      dollars_per_hour: of one device; an assumption.
      source: where the peaks stand.
      efficiency: shares of the peaks.
      clock: by which its stages wait for each other, "neighbor" or "lock-step".
    """

    name: str
    flops: float
    memory_bytes: float
    bandwidth: float
    within_host: float
    per_host: int
    dollars_per_hour: float
    source: str
    efficiency: Efficiency = Efficiency()
    clock: str = "neighbor"


LAUNCH_SECONDS = 3e-6
"""Between two kernels of one stream: assumed, as in benchmarks/roofline.py."""

USABLE_MEMORY = 0.92
"""Of a device's memory: the rest is the CUDA context, the library's workspaces and fragments of the
allocator. Assumed; jax itself takes 0.75 unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."""

DEVICES = {
    device.name: device
    for device in (
        Device("v100", 125e12, 32e9, 0.9e12, 150e9, 8, 2.5, "V100 SXM2 32 GB data sheet"),
        Device("a100", 312e12, 80e9, 2.039e12, 300e9, 8, 3.5, "A100 SXM 80 GB data sheet"),
        Device("h100", 989e12, 80e9, 3.35e12, 450e9, 8, 6.0, "H100 SXM data sheet"),
        Device("h200", 989e12, 141e9, 4.8e12, 450e9, 8, 7.0, "H200 SXM data sheet"),
        Device("b200", 2250e12, 180e9, 8.0e12, 900e9, 8, 10.0, "DGX B200 data sheet, an eighth"),
        Device(
            "cpu",
            5e10,
            4e9,
            1e10,
            1e10,
            8,
            0.05,
            "assumed: a core, as jax simulates devices",
            clock="lock-step",
        ),
    )
}

LINKS = {
    "nvlink": None,  # as fast as the device's own
    "pcie": 32e9,  # PCI Express 4.0 x16, bytes per second and direction
    "ib": 1e9 / 8,  # InfiniBand, per Gb/s of a device's port
    "eth": 1e9 / 8,  # Ethernet, likewise
}
"""Bytes per second of a link, or of one of its Gb/s; None for what the device's data sheet says."""

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
    def dollars_per_second(self) -> float:
        """Of all devices together."""
        return self.count * self.device.dollars_per_hour / 3600

    def link(self, span: int) -> float:
        """Bytes per second of a group of devices that lie in so many in a row of the mesh."""
        return self.within if span <= self.per_host else self.across


def cluster(
    device: str, devices: int, *, link: str = "nvlink:8,ib:400", memory: float | None = None
) -> Cluster:
    """Devices and links by name.

    Args:
      device: a name in `DEVICES`.
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
    if device not in DEVICES:
        near = difflib.get_close_matches(device, DEVICES, n=1, cutoff=0.3) or list(DEVICES)
        rule = f"is not a known device; choose one of {', '.join(DEVICES)}"
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
    kind = DEVICES[device]
    within = (LINKS[inner] or kind.within_host) * kind.efficiency.link
    share = _PORT_EFFICIENCY if outer == "ib" else _ETHERNET_EFFICIENCY
    across = (LINKS[outer] or 0.0) * gbits * share
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
