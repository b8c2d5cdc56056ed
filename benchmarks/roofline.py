"""How long a compiled GPU program takes if every kernel and transfer runs at the roofline.

A kernel takes the longer of its FLOPs at the peak and its bytes at the bandwidth, and a launch. A
transfer takes its bytes over its link; what is exposed is what remains of it when its end is waited
for. Kernels run one after another, transfers of one device too. A message leaves a host over the
port of its GPU; a group with k GPUs on each of several hosts uses k ports of each. Not modelled:
caches, kernels that slow down beside a transfer, and how well a kernel is tuned.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence

import numpy as np

from benchmarks.hlo import HloProgram, Instruction, is_around
from benchmarks.kernels import Shape, Use, is_kernel, kernel
from jaxpipe.planning.without_devices import GPUS_PER_HOST

Spent = Counter[Hashable]
"""Seconds by `Use`, or by what a `Roofline` tells apart further."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """What one device or link attains, in units per second."""

    name: str
    value: float
    source: str


PEAKS = {
    "flops": Peak("bfloat16 matmuls", 800e12, "989 TFLOP/s dense (H100 SXM data sheet), 81% of it"),
    "attention": Peak("attention", 480e12, "60% of what matmuls attain: assumed"),
    "memory": Peak("memory", 3.0e12, "3.35 TB/s HBM3 (H100 SXM data sheet), 90% of it"),
    "nvlink": Peak("NVLink, each way", 360e9, "450 GB/s each way (H100 data sheet), 80% of it"),
    "network": Peak("between hosts", 45e9, "one 400 Gb/s port per GPU (DGX H100), 90% of it"),
}
LAUNCH = Peak("launch of a kernel", 3e-6, "between two kernels of one stream: assumed")
WAIT = Peak("host wait", 10e-6, "a copy of one flag to the host and the launch after it: assumed")

_STARTS = {"collective-permute", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
_SLICES = '"name":"dynamic_slice_fusion"'
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SHARE = re.compile(r'/kind\d+_(\d+)of(\d+)/while"')
_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")

Trips = Callable[[Instruction], float]
"""How often a loop runs."""


def known_trips(loop: Instruction) -> float:
    """The trips that the program's text gives; once if it gives none, or for layers of one kind
    among others as often as a layer is of it."""
    if found := _TRIPS.search(loop.text):
        return int(found[1])
    share = _SHARE.search(loop.text)
    return int(share[1]) / int(share[2]) if share else 1


def total(spent: Spent) -> float:
    return sum(spent.values())


def scaled(spent: Spent, times: float) -> Spent:
    return Counter({use: times * seconds for use, seconds in spent.items()})


class Roofline:
    """The modelled time of a program's computations.

    Args:
      program: the compiled program.
      weights: as for `benchmarks.kernels.kernel`.
      hosts: of each device, in the order of the program's numbers, which is that of the mesh; None
        for devices in the order of their hosts.
      device: whose time it is, by the program's number.

    Attributes:
      launch, wait: seconds of a launch and of a host wait.
      overlaps: whether anything runs beside a transfer.
    """

    launch, wait = LAUNCH.value, WAIT.value
    overlaps = True

    def __init__(
        self,
        program: HloProgram,
        weights: Collection[Shape],
        hosts: Sequence[int] | None = None,
        device: int = 0,
    ) -> None:
        self.program = program
        self.weights = weights
        self.hosts = hosts
        self.device = device
        self._bodies: dict[str, Spent] = {}
        self._kernels: dict[str, Spent] = {}
        self._asks_host: dict[str, bool] = {}

    def body(self, computation: str) -> Spent:
        """The time of a computation whose loops run as often as the program's text says."""
        if computation not in self._bodies:
            self._bodies[computation] = self.run(computation, known_trips)
        return self._bodies[computation]

    def run(
        self,
        computation: str,
        trips: Trips,
        branch: int | None = None,
        *,
        until: int | None = None,
    ) -> Spent:
        """The time of a computation whose loops run as often as ``trips`` says.

        Its conditionals take the branch of this number, or by default the longest. It ends before
        instruction ``until``, if that is a number.

        Loops inside those run as often as the text says, but for those around loops of several
        cells, which run as often as these.
        """
        spent: Spent = Counter()
        link_free = 0.0
        ends: dict[str, float] = {}
        uses: dict[str, Hashable] = {}
        for row in self.program.computations[computation][:until]:
            opcode = row.opcode.removesuffix("-start").removesuffix("-done")
            if row.opcode == "while":
                spent += self._loop(row, trips)
            elif row.opcode == "conditional":
                spent += self._branch(row, branch)
            elif row.opcode == "call":
                spent += self.body(row.calls["to_apply"])
            elif row.opcode.endswith("-done") and opcode in _STARTS:
                start = row.operands[0]
                spent[uses[start]] += max(0.0, ends[start] - total(spent))
            elif opcode in _STARTS:
                spent[Use.LAUNCHES] += self.launch
                begin = max(link_free, total(spent))
                link_free = ends[row.name] = begin + self._transfer_seconds(computation, row)
                uses[row.name] = use = self.use_of(row)
                if opcode == row.opcode or not self.overlaps:
                    spent[use] += max(0.0, link_free - total(spent))
            elif is_kernel(row):
                spent += self._kernel(computation, row)
        return spent

    def use_of(self, transfer: Instruction) -> Hashable:
        """The use that counts what is exposed of a transfer."""
        return Use.TRANSFERS

    def _loop(self, loop: Instruction, trips_of: Trips) -> Spent:
        body = loop.calls["body"]
        if is_around(loop):
            trips = sum(map(trips_of, self.program.loops(body)))
            spent = scaled(self.run(body, trips_of), trips > 0)
        else:
            trips = trips_of(loop)
            spent = scaled(self.body(body), trips)
        spent[Use.LAUNCHES] += self.launch * (trips + 1)
        if self._asks(loop):
            spent[Use.WAITS] += self.wait * (trips + 1)
        return spent

    def _branch(self, choice: Instruction, number: int | None) -> Spent:
        """A branch of messages; the host asks the device which to run."""
        branches = list(map(self.body, choice.calls.values()))
        spent = max(branches, key=total) if number is None else branches[number]
        return spent + Counter({Use.LAUNCHES: self.launch, Use.WAITS: self.wait})

    def _asks(self, loop: Instruction) -> bool:
        """Whether the host asks the device if the loop goes on: where its trips are unknown, and it
        is in no CUDA graph, since it communicates, or matmuls read slices where they lie."""
        if loop.name not in self._asks_host:
            inside = self.program.reached(loop.calls["body"], into_loops=True)
            stays = any(
                row.opcode.removesuffix("-start") in _STARTS or _SLICES in row.text
                for row in inside
            )
            self._asks_host[loop.name] = stays and not _TRIPS.search(loop.text)
        return self._asks_host[loop.name]

    def _kernel(self, computation: str, row: Instruction) -> Spent:
        if row.name not in self._kernels:  # names are unique in a program
            one = kernel(self.program, computation, row, self.weights)
            peak = PEAKS["attention" if one.use is Use.ATTENTION else "flops"].value
            seconds = max(one.flops / peak, one.bytes / PEAKS["memory"].value)
            self._kernels[row.name] = Counter({one.use: seconds, Use.LAUNCHES: self.launch})
        return self._kernels[row.name]

    def links(self) -> tuple[float, ...]:
        """Seconds per byte of every transfer of the program: what differs between devices."""
        rows = (row for rows in self.program.computations.values() for row in rows)
        starts = (row for row in rows if row.opcode.removesuffix("-start") in _STARTS)
        return tuple(map(self._per_byte, starts))

    def transfers(self, computation: str) -> float:
        """The seconds of a computation's own collectives, exposed or not."""
        rows = self.program.computations[computation]
        started = (row for row in rows if row.opcode.removesuffix("-start") in _STARTS)
        return sum(self._transfer_seconds(computation, row) for row in started)

    def _transfer_seconds(self, computation: str, row: Instruction) -> float:
        return self._per_byte(row) * sum(
            sum(one.bytes) for one in self.program.operands(computation, row)
        )

    def _per_byte(self, row: Instruction) -> float:
        """Seconds for every byte that the device puts into a transfer; none if it takes no part."""
        own = [group for group in device_groups(row.text) if self.device in group]
        if not own:
            return 0.0
        size = len(own[0])
        others = {
            "collective-permute": 1.0,
            "all-gather": size - 1,
            "all-reduce": 2 * (size - 1) / size,
            "reduce-scatter": (size - 1) / size,
            "all-to-all": (size - 1) / size,
        }[row.opcode.removesuffix("-start")]
        return others / min(map(self._bandwidth, own))

    def _bandwidth(self, group: Sequence[int]) -> float:
        """What a device of the group sends per second: a ring enters a host over every port."""
        members = Counter(map(self._host, group))
        ports = min(members.values()) if len(members) > 1 else math.inf
        return min(PEAKS["nvlink"].value, ports * PEAKS["network"].value)

    def _host(self, device: int) -> int:
        return device // GPUS_PER_HOST if self.hosts is None else self.hosts[device]


def device_groups(text: str) -> list[list[int]]:
    """The devices that a collective connects: its groups, or its pairs of sender and receiver.

    Example:
      >>> device_groups("replica_groups=[2,4]<=[4,2]T(1,0)")
      [[0, 2, 4, 6], [1, 3, 5, 7]]
      >>> device_groups("replica_groups=mesh['data'=2,'stage'=4] {'data'}")
      [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    if found := _MESH.search(text):
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        inside = [number for number, name in enumerate(axes) if f"'{name}'" in found[2]]
        devices = np.arange(math.prod(axes.values())).reshape(list(axes.values()))
        moved = np.moveaxis(devices, inside, range(-len(inside), 0))
        return moved.reshape(-1, math.prod(list(axes.values())[n] for n in inside)).tolist()
    if found := _GROUPS.search(text) or _PAIRS.search(text):
        return [
            [int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", found[1])
        ]
    found = _IOTA.search(text)
    assert found is not None, text[:300]
    dims = [int(n) for n in found[3].split(",")]
    devices = np.arange(math.prod(dims)).reshape(dims)
    if found[4]:
        devices = devices.transpose([int(n) for n in found[4].split(",")])
    return devices.reshape(int(found[1]), int(found[2])).tolist()
