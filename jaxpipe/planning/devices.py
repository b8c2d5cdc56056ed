"""Devices and links: what they attain, how much memory they have, and what they cost.

``devices.csv`` has a row per device: peak TFLOP/s of dense 16-bit matmuls (data sheets of Hopper
and Blackwell print twice that, for sparse ones), memory in GB and TB/s, GB/s each way of its links
within a host (half of what NVIDIA calls the bandwidth of NVLink) and of PCI Express, and the
TFLOP/s of one large matmul alone in 16, 8 and 4 bits. Looked up in November 2026:

- Peaks are those of the makers' data sheets, of which glennklockwood.com/garden/processors (A100,
  B200), github.com/mlcommons/inference_results_v4.1 (H200) and github.com/stas00/ml-engineering
  (the others) quote them; links of GB200, GB300, MI300X, MI355X and TPU v7x are recalled.
- Matmuls are the fastest that github.com/stas00/ml-engineering measured (MAMF). A GB300 is assumed
  to attain a GB200's, 4-bit matmuls the share of 8-bit ones, a TPU a GB200's share; a V100's is
  assumed.
- Latencies are assumed, of the order of short messages of NCCL.
- Prices are assumptions, per device and hour, of the order of what large providers list on demand;
  smaller ones ask half (aimultiple.com/gpu-index, May 2026: a median of $2.95 for an H100). They
  decide only the column of costs.

What a step attains of these is `SUSTAINED` and `STRAGGLING`, fitted by `make published`; shares of
memory and links are those of `benchmarks/roofline.py`, for H100s.

`jaxpipe.planning.measured_peaks` times simple programs on devices; what these attain of the peaks
makes a `Device` in place of a data sheet's.
"""

import csv
import dataclasses
import difflib
import math
import re
from pathlib import Path
from typing import Any

from jaxpipe.files import read_json
from jaxpipe.schedule.problems import Problem, refuse

SUSTAINED = 0.939
"""Share of the rate of matmuls alone that steps of training attain, whose kernels run for so long
that power and heat bound them."""
STRAGGLING = 0.0061
"""Share of a step by which all devices wait longer for the slowest, for each doubling beyond 8."""


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that programs attain.

    Args:
      flops: of large matmuls that run alone.
      memory: of the memory's bandwidth.
      link: of the links within a host.
      attention: fused attention's share of what matmuls attain.
      loads: share of a matmul's bytes that its FLOPs do not hide, so that small ones attain less.
      sustained: share of ``flops`` that is left in steps of training.
    """

    flops: float = 0.80
    memory: float = 0.90
    link: float = 0.80
    attention: float = 0.75
    loads: float = 1.0
    sustained: float = SUSTAINED


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
      fp8, fp4: what matmuls of 8- and 4-bit floats attain, as multiples of what those of 16 bits
        do; 1 where the device has none.
      domain: devices that its fastest links join.
      gbits: of its port to others, Gb/s.
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
    fp4: float = 1.0
    domain: int = 8
    gbits: float = 400.0

    @property
    def multiplies_blocks(self) -> bool:
        """Whether it has matmuls with a scale for each block: devices with 4-bit floats do."""
        return self.fp4 > 1 or self.name == "cpu"


LAUNCH_SECONDS = 3e-6
"""Between two kernels of one stream: assumed, as in benchmarks/roofline.py."""

USABLE_MEMORY = 0.92
"""Share of a device's memory beside the CUDA context, the library's workspaces and fragments of the
allocator. Assumed; jax itself takes 0.75 unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."""


def _table() -> dict[str, Device]:
    """Reads ``devices.csv``."""
    with (Path(__file__).parent / "devices.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["name"]: _of_row(row) for row in rows}


def _of_row(row: dict[str, str]) -> Device:
    name, source = row.pop("name"), row.pop("source")
    given = {column: float(text) for column, text in row.items() if text}
    alone = given["matmul"]
    return Device(
        name,
        flops=1e12 * given["tflops"],
        memory_bytes=1e9 * given["gigabytes"],
        bandwidth=1e12 * given["terabytes_per_second"],
        within_host=1e9 * given["within_host"],
        pcie=1e9 * given["pcie"],
        dollars_per_hour=given["dollars_per_hour"],
        source=source,
        efficiency=Efficiency(flops=alone / given["tflops"]),
        latency=1e-6 * given["latency_us"],
        fp8=given.get("matmul8", alone) / alone,
        fp4=given.get("matmul4", alone) / alone,
        domain=int(given["domain"]),
        gbits=given["gbits"],
    )


DEVICES = _table()

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
        """FLOPs per second that matmuls attain in steps of training."""
        attained = self.device.efficiency
        return self.device.flops * attained.flops * attained.sustained

    @property
    def straggling(self) -> float:
        """Share of a step by which its devices wait for the slowest of them."""
        return STRAGGLING * math.log2(max(1.0, self.count / 8))

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
    link: str | None = None,
    memory: float | None = None,
) -> Cluster:
    """Makes a cluster from names of its devices and links.

    Args:
      device: a name in `DEVICES`, or one that was measured.
      devices: how many.
      link: "nvlink:8,ib:400" for hosts of 8 devices with NVLink and a port of 400 Gb/s for each;
        "pcie:N" in place of NVLink, "eth:GBITS" in place of InfiniBand. None for the domains and
        ports of the device.
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
    kind = DEVICES.get(device, DEVICES["cpu"]) if isinstance(device, str) else device
    link = f"nvlink:{kind.domain},ib:{kind.gbits:g}" if link is None else link
    parts = _LINK.fullmatch(link)
    if parts is None:
        rule = "must be WITHIN:DEVICES_PER_HOST,ACROSS:GBITS, with nvlink or pcie, and ib or eth"
        problems.append(Problem("link", link, rule, ("nvlink:8,ib:400",)))
    refuse(problems)
    assert parts is not None
    inner, per_host, outer, gbits = parts.groups()
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
    matches = [device for name, device in DEVICES.items() if name in kind.lower()]
    return max(matches, key=lambda device: len(device.name), default=None)  # gb200, not b200


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
