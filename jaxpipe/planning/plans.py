"""Plans: how a model is spread over devices, what its devices and links then have to do, the tick
tables that they run, and which plans there are.

A schedule's steady state repeats every ``p`` microbatches. A long step is therefore not lowered
whole: two shorter ones that are ``p`` microbatches apart give the line on which its time and its
slots lie. The plans that are shown at the end are lowered as they are, unless they are very long.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

from jaxpipe.planning.devices import Cluster
from jaxpipe.planning.sizes import LayerSizes, ModelSizes, Sizes, Variant
from jaxpipe.runtime.defaults import Room, Size, numbered, room, weights
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule import catalog
from jaxpipe.schedule.lowering.lower import Lowering
from jaxpipe.schedule.lowering.table import TickTable
from jaxpipe.schedule.lowering.transfers import MoveOptions, dividing_shares
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.placement import Placement, looped
from jaxpipe.schedule.simulate import Costs

MASTER_BYTES = 4
"""Bytes of an element of a gradient sum or of the optimizer's state: float32."""
MOST_ROWS = 64
"""Most rows of a microbatch on one data shard."""
MOST_STAGES = 64


class Searched(NamedTuple):
    """A schedule that is searched.

    Args:
      chunks: per stage.
      in_flight: chunk activations that p stages of v chunks keep at least; None for all.
      crossing: those of them that wait for W, when B is done, at least.
      overlaps: whether F runs beside backwards; then it is searched where layers communicate.
    """

    chunks: tuple[int, ...]
    in_flight: Callable[[int, int], float] | None
    crossing: Callable[[int], int] = lambda p: 1
    overlaps: bool = False


SCHEDULES: Mapping[str, Searched] = {
    "1f1b-fused": Searched((1,), lambda p, v: p),
    "1f1b": Searched((1,), lambda p, v: p),
    "eager-1f1b-fused": Searched((1,), lambda p, v: 2 * p - 1),
    "zb-h1": Searched((1,), lambda p, v: p, lambda p: p),
    "zb-h2": Searched((1,), lambda p, v: 2 * p - 1, lambda p: 2 * p - 1),
    "zb-v": Searched((2,), lambda p, v: 2 * p, lambda p: 2 * p),
    "v-half": Searched((2,), lambda p, v: p + 1, lambda p: 2),
    "v-min": Searched((2,), lambda p, v: 2 * p / 3 + 1, lambda p: 2),
    "dualpipe-v": Searched((2,), lambda p, v: 2 * p + 1, lambda p: p),
    "dualpipe-v-published": Searched((2,), lambda p, v: 2 * p + 1, lambda p: p, overlaps=True),
    "interleaved-overlapped-fused": Searched((1, 2, 4), lambda p, v: (v + 1) * p, overlaps=True),
    "interleaved-fused": Searched((2, 4, 8), lambda p, v: (v + 1) * p - 1),
    "interleaved": Searched((2, 4), lambda p, v: (v + 1) * p - 1),
    "breadth-first-fused": Searched((2, 4, 8, 16, 32, 64), None),
    "breadth-first": Searched((2, 4), None),
}
"""The others of the registry equal one of these at these costs, or are searched for a memory limit,
which takes minutes."""

_WITHOUT_STAGES = {
    "1f1b-fused": (1,),
    "interleaved-fused": (2, 4, 8, 16, 32),
    "breadth-first-fused": (2, 4, 8, 16, 32, 64),
}
"""Schedules of one stage, and their chunks: all weights at once, those of a chunk gathered for
every microbatch as in FSDP, or for all microbatches."""


class Offload(NamedTuple):
    """Arrays in the memory of the host: the optimizer's state between steps; residuals of F."""

    state: bool = False
    residuals: bool = False

    def __str__(self) -> str:
        return " and ".join(name for name in self._fields if getattr(self, name)) or "nothing"


NOTHING = Offload()

_PERIODS = 3
"""Microbatches, in stages, after which a schedule is in its steady state."""
_FEWEST = 8
_MOST_PASSES = 4096
"""Most forward passes of a program with an order of its own that is lowered as it is."""
_DIGITS = 2
"""Digits of relative costs, and of layers that take as long as a head, that tell programs apart."""


class Plan(NamedTuple):
    """A mesh, a schedule and the options of a pipeline.

    Args:
      stage, data, context, tensor: devices along the mesh's axes.
      replica: groups of data shards that hold the same parts.
      rows: rows of a microbatch on one data shard.
      remat: policy of rematerialization.
      zero: level.
      weight_slots: chunks of gathered weights, or of gradient sums, at once.
      expert: data shards, next to each other, that have some of a layer's experts each.
      ends: whether the stages of the first and the last layer compute embedding and head, or all.
      slices: slices into which the sequences of a microbatch are cut.
    """

    stage: int
    data: int
    context: int
    tensor: int
    replica: int
    schedule: str
    chunks: int
    microbatches: int
    rows: int
    remat: str
    zero: Zero
    weight_slots: int
    weights: str
    on_host: Offload = NOTHING
    expert: int = 1
    ends: bool = False
    slices: int = 1

    @property
    def overlaps(self) -> bool:
        """Whether the schedule runs F beside the backward of another microbatch."""
        searched = SCHEDULES.get(self.schedule)
        return searched is not None and searched.overlaps

    def in_flight(self, schedule: str) -> float:
        """Bounds the chunk activations, or slices of them, that a schedule keeps, from below."""
        least, passes = SCHEDULES[schedule].in_flight, self.passes
        if least is None:
            return passes * self.chunks
        of_full = least(self.stage, self.chunks)
        return min(passes * self.chunks, passes + (self.chunks - 1) * self.stage, of_full)

    def crossing(self, schedule: str) -> int:
        """Bounds likewise those of them that wait for W."""
        if schedule.endswith("-fused"):
            return 0
        return SCHEDULES[schedule].crossing(self.stage) if self.passes >= 2 * self.stage else 1

    @property
    def sharing(self) -> int:
        """Devices that share a layer."""
        return self.context * self.tensor

    @property
    def num_chunks(self) -> int:
        return self.stage * self.chunks

    @property
    def passes(self) -> int:
        """Number of forward passes of a chunk in a step."""
        return self.microbatches * self.slices

    @property
    def batch_rows(self) -> int:
        """Rows of a step on all devices."""
        return self.microbatches * self.rows * self.data

    @property
    def parts(self) -> int:
        """Number of parts into which ZeRO splits what it shards."""
        return self.data // self.replica * self.context

    def level(self, asked: int) -> Zero:
        """The level of ZeRO that runs on this mesh where another may be asked for."""
        return Zero(asked).over(self.parts)


class Links(NamedTuple):
    """Bytes per second between devices that share a layer, along the axes of a mesh, the outermost
    first."""

    expert: float
    context: float
    tensor: float

    def along(self, axes: str) -> float:
        """Bytes per second of a collective over axes, joined by "+": that of the outermost."""
        return next(
            link for name, link in zip(self._fields, self, strict=True) if name in axes.split("+")
        )


@dataclasses.dataclass(eq=False)  # frozen ones take three times as long to make
class PlacedPlan:
    """A plan of a model on a cluster: what one device holds, and over which links it talks."""

    plan: Plan
    model: ModelSizes
    cluster: Cluster

    @cached_property
    def variant(self) -> Variant:
        """The choices that decide the sizes of the model's layers."""
        plan = self.plan
        return Variant(plan.context, plan.tensor, plan.remat, plan.expert, plan.slices)

    @cached_property
    def sizes(self) -> Sizes:
        return self.model.variants[self.variant]

    @cached_property
    def layers_per_chunk(self) -> int:
        """Layers of the largest chunk, which decides the room of all."""
        placement = looped(self.plan.stage, num_chunks=self.plan.chunks)
        return max(layer_counts(self.model.num_layers, self.head_layers, placement))

    @cached_property
    def head_layers(self) -> float:
        """Counts the layers with the FLOPs of the head, if the last stage computes it beside fewer
        layers; else 0."""
        if not self.plan.ends:
            return 0.0
        return _head_layers(self.model, self.variant, self.plan.rows)

    @cached_property
    def layer_parameters(self) -> float:
        """Parameters of a layer on a device: the mean, if layers differ."""
        return self.model.mean(self.variant, "parameters").fixed

    @cached_property
    def layer_part(self) -> float:
        """The part of a layer that ZeRO leaves a device: of experts, which are split already, a
        larger one."""
        expert_parameters = self.model.mean(self.variant, "expert_parameters").fixed
        split_already = (self.plan.expert - 1) * expert_parameters
        return (self.layer_parameters + split_already) / self.plan.parts

    @cached_property
    def read_bytes(self) -> float:
        """Bytes of an element of a layer's weights where it reads them: the mean."""
        wide, quantized = self.model.compute_bytes, self.model.mean(self.variant, "quantized").fixed
        return wide - (wide - 1) * quantized / self.layer_parameters if quantized else wide

    @cached_property
    def kept_bytes(self) -> float:
        """Bytes of an element of a layer's weights where they are kept: the mean."""
        rounded = self.model.mean(self.variant, "rounded").fixed / self.layer_parameters
        return self.model.parameter_bytes - (self.model.parameter_bytes - 1) * rounded

    @cached_property
    def trained(self) -> float:
        """Share of a layer's parameters that is trained."""
        return 1 - self.model.mean(self.variant, "frozen").fixed / self.layer_parameters

    @cached_property
    def outer_trained(self) -> float:
        """Share of embedding and head that is trained."""
        return 1 - self.sizes.outer_frozen / max(self.sizes.outer_parameters, 1)

    @cached_property
    def stage_parameters(self) -> float:
        """Parameters of the layers of a stage on a device, not sharded over data."""
        return self.plan.chunks * self._room(self.plan.chunks) * self.layer_parameters

    @cached_property
    def slot_parameters(self) -> float:
        """Parameters of a slot for a chunk's layers on a device, whole: unrolled, the mean of all,
        since a chunk always lies in the same one."""
        together = min(self.plan.weight_slots, self.plan.chunks)
        apart = together if self.plan.weights == "unrolled" else 1
        return self._room(apart) * self.layer_parameters

    @cached_property
    def stage_part(self) -> float:
        """The part of the layers of a stage that ZeRO leaves a device."""
        return self.plan.chunks * self._room(self.plan.chunks) * self.layer_part

    def _room(self, slots: int) -> float:
        """The room of a chunk on all stages, if so many have room of their own, in mean layers."""
        if len(self.sizes.layers) == 1:
            return self.layers_per_chunk
        plan = self.plan
        found = _room(self.model, self.variant, plan.stage, plan.chunks, slots)
        most = found.unrolled if plan.weights == "unrolled" else found.packed
        layers = slots * math.ceil(self.model.num_layers / plan.num_chunks)
        return self.layers_per_chunk * most / (layers * self.layer_parameters)

    @cached_property
    def outer_parameters(self) -> float:
        """Parameters of embedding and head on a device during a step, not sharded over data."""
        split = 0 if self.plan.ends else self.sizes.outer_split
        return self.sizes.outer_parameters - split + split / self.plan.stage

    @cached_property
    def outer_kept(self) -> float:
        """Parameters of embedding and head that a device keeps between steps."""
        return self.outer_parameters / (self.plan.stage if self.plan.ends else 1)

    @cached_property
    def outer_share(self) -> float:
        """The share of embedding and head that a device computes."""
        whole = self.sizes.outer_parameters
        return self.outer_parameters / whole if whole else 1.0

    @cached_property
    def shares(self) -> int:
        """The most shares in which a layer may move over data; those that differ move whole."""
        if len(self.sizes.layers) > 1:
            return 1
        layer, parts = self.sizes.layers[0], self.plan.parts
        arrays = [(shape, parts) for shape in layer.shapes]
        arrays += [(shape, parts // self.plan.expert) for shape in layer.expert_shapes]
        # Data shards split the first dimension that they divide.
        lengths = (next((n // k for n in shape if n and n % k == 0), 0) for shape, k in arrays)
        sizes = (MASTER_BYTES * math.prod(shape) for shape, _ in arrays)
        return dividing_shares(list(zip(sizes, lengths, strict=True)))

    @cached_property
    def own_parameters(self) -> tuple[float, float]:
        """Parameters of layers, and of embedding and head, whose optimizer state a device has."""
        if self.plan.zero.shards_state:
            return self.stage_part, self.outer_kept / self.plan.parts
        return self.stage_parameters, self.outer_kept

    @cached_property
    def updated_parameters(self) -> float:
        """Parameters that a device updates: its parts with ZeRO, of those that are trained."""
        layers, outer = self.own_parameters
        return self.trained * layers + self.outer_trained * outer

    @cached_property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer's state of a device, in float32, wherever it lies."""
        return MASTER_BYTES * self.model.moments * self.updated_parameters

    def mean(self, name: str) -> float:
        """Bytes of `LayerSizes` for the plan's rows: the mean, if layers differ."""
        return self.model.mean(self.variant, name).at(self.plan.rows)

    # Links, in the order in which `jaxpipe.make_mesh` lays devices out.

    @cached_property
    def _near(self) -> int:
        """Devices of one stage and replica."""
        return self.plan.parts * self.plan.tensor

    @cached_property
    def _data_inside(self) -> bool:
        """Whether the data shards of a stage share a host."""
        hosts = self.cluster.count // self.cluster.per_host
        return hosts > 1 and self.cluster.per_host % self._near == 0

    @cached_property
    def sharing_links(self) -> Links:
        """Bytes per second between the devices that share a layer, by axis."""
        plan, link = self.plan, self.cluster.link
        return Links(link(plan.expert * plan.sharing), link(plan.sharing), link(plan.tensor))

    @cached_property
    def stage_link(self) -> float:
        """Bytes per second of the slowest hop between stages."""
        inner = self._near if self._data_inside else self.plan.sharing
        return self.cluster.link(inner * self.plan.stage)

    @cached_property
    def _data_span(self) -> int:
        """Devices in a row of the mesh among which the parts that ZeRO makes lie."""
        return self._near * (1 if self._data_inside else self.plan.stage)

    @cached_property
    def data_link(self) -> float:
        """Bytes per second between the parts that ZeRO makes."""
        return self.cluster.link(self._data_span)

    @cached_property
    def data_hosts(self) -> int:
        """Hosts among which these parts lie."""
        return min(self.plan.parts, -(-self._data_span // self.cluster.per_host))

    @cached_property
    def replica_link(self) -> float:
        """Bytes per second between the replicas of a part."""
        return self.cluster.link(self._near * self.plan.stage * self.plan.replica)


@lru_cache(maxsize=1024)
def _head_layers(model: ModelSizes, variant: Variant, rows: int) -> float:
    sizes = model.variants[variant]
    of_head = sizes.head.flops(rows) * model.num_layers
    return round(of_head / sizes.layer_flops(rows), _DIGITS)


@lru_cache(maxsize=2048)
def layer_counts(layers: int, head_layers: float, placement: Placement) -> tuple[int, ...]:
    """Splits equal layers into chunks; the last layer stands for so many more, as the head does."""
    return partition([1.0] * (layers - 1) + [1.0 + head_layers], placement)


# Tick tables of plans, each lowered once for all plans that share it.


class Program(NamedTuple):
    """The choices that decide a tick table.

    Args:
      stages, chunks, microbatches: its shape.
      costs: costs of a chunk, relative, for which orders are made; None for the published order.
      weight_slots, own_slots, shares, sums_in_slots, together: how the pipeline lowers it; no
        shares where chunks move as a whole.
      head_layers: how many layers the last stage's head stands for in the partition.
    """

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    layers: int
    costs: Costs | None
    weight_slots: int = 1
    own_slots: bool = False
    shares: int = 0
    sums_in_slots: bool = False
    together: bool = False
    head_layers: float = 0.0
    slices: int = 1

    def without_transfers(self) -> Program:
        """The program of the same order in which nothing moves over data."""
        return self._replace(
            weight_slots=self.chunks, own_slots=False, shares=0, sums_in_slots=False
        )

    def shorter(self) -> tuple[tuple[Program, float], ...]:
        """Programs and weights whose sum has this one's time and slots; itself, if it is short."""
        p, k = self.stages, self.slices
        most = max(-(-_PERIODS * p // k), _FEWEST)
        passes = p * self.chunks * self.microbatches * k
        shown = self.costs is not None and passes <= _MOST_PASSES
        if shown or self.microbatches <= most + p:
            return ((self, 1.0),)
        longer = most + self.microbatches % p
        periods = (self.microbatches - longer) / p
        two = (self._replace(microbatches=m) for m in (longer, longer - p))
        return tuple(zip(two, (1 + periods, -periods), strict=True))


def grown(program: Program, of: Callable[[Program], float]) -> float:
    """Extends a number of a program that grows in a line with its microbatches."""
    return sum(weight * of(short) for short, weight in program.shorter())


def lowering_of(program: Program) -> Lowering:
    """Lowers a program without its transfers over data, once for all programs with its order."""
    return _lowering_of(program.without_transfers())


@lru_cache(maxsize=512)
def _lowering_of(p: Program) -> Lowering:
    order = _build(
        p.schedule,
        stages=p.stages,
        microbatches=p.microbatches,
        chunks=p.chunks,
        slices=p.slices if p.slices > 1 else None,
        costs=p.costs,
    )
    counts = layer_counts(p.layers, p.head_layers, order.placement)
    return Lowering(order, counts, together=p.together)


_build = lru_cache(maxsize=512)(catalog.build)


@lru_cache(maxsize=2048)
def table_of(program: Program) -> TickTable:
    """Lowers a program, as `jaxpipe.Pipeline` does."""
    lowered = lowering_of(program)
    pieces = max(lowered.layer_counts) if program.shares else 0
    return lowered.table(
        weight_slots=program.weight_slots,
        gradient_slots=None if program.sums_in_slots else lowered.schedule.num_chunks,
        moving=MoveOptions(
            program.own_slots, pieces, max(1, program.shares), within=program.own_slots
        ),
    )


def relative(costs: Costs) -> Costs:
    """Rounds costs to multiples of F in few digits, so that similar plans share a table."""
    b, w, message = (
        float(f"{value / costs.f:.{_DIGITS}g}") for value in (costs.b, costs.w, costs.message)
    )
    attention = round(costs.attention, _DIGITS)
    return Costs(1.0, b, w, message, attention=attention, rendezvous=costs.rendezvous)


# The plans that there are.


Family: TypeAlias = Sequence[PlacedPlan]
"""Plans that differ in the schedule, what lies on the host, the ZeRO level, weight slots and who
computes the ends alone: of each schedule with less on the host before more, then more slots before
fewer. Either all overlap F with backwards, or none."""


def leanest(family: Family) -> Family:
    """Selects the plans among which the one that takes the least memory is, whatever the schedule,
    for who computes the ends: of the two highest ZeRO levels, if there is a state to shard."""
    highest = max(one.plan.zero for one in family) if family[0].model.moments else 1
    levels = [one for one in family if one.plan.zero >= highest - 1]
    levels.sort(key=lambda one: (one.plan.on_host, -one.plan.weight_slots))
    return list({(one.plan.zero, one.plan.ends): one for one in levels}.values())


def on_host(model: ModelSizes, cluster: Cluster) -> Sequence[Offload]:
    """Lists what may lie on the host: first the state, which moves once per step."""
    if not (model.may_offload and cluster.has_host_memory):
        return [NOTHING]
    return NOTHING, Offload(state=True), Offload(state=True, residuals=True)


def who_computes_ends(model: ModelSizes, variant: Variant, stages: int) -> tuple[bool, ...]:
    """Lists what `Plan.ends` may be: one stage has no ends, and only a model whose vocabulary is
    split lets all stages compute it."""
    several = stages > 1
    split = model.variants[variant].outer_split > 0
    return (False, True) if several and split else (several,)


def layout_of(model: ModelSizes, variant: Variant, stages: int, chunks: int) -> str:
    """Finds the layout of weights that runs on GPUs by default."""
    if len(model.variants[variant].layers) > 1 and model.quantizes:
        return "unrolled"
    return weights(
        platform="gpu",
        in_excess=_room(model, variant, stages, chunks, chunks).in_excess,
        num_layers=model.num_layers,
        num_stages=stages,
    )


def depths(devices: int, num_layers: int) -> list[int]:
    """Lists how many stages so many groups of devices, which share a layer each, may make."""
    most = min(num_layers, MOST_STAGES, devices)
    return [stages for stages in range(1, most + 1) if devices % stages == 0]


def expert_groups(counted: Iterable[int], data: int, inside: int) -> set[int]:
    """Selects over how many data shards experts may be split: one, as many as can be, or as many as
    can be ``inside`` a host. What lies between takes both their memory and their exchanges."""
    possible = [count for count in counted if data % count == 0]
    most = (max((n for n in possible if n <= limit), default=1) for limit in (inside, data))
    return {1, *most}


def families(
    model: ModelSizes,
    cluster: Cluster,
    batches: Sequence[int],
    excluded: Counter[str],
    *,
    on_host: Sequence[Offload] = (NOTHING,),
) -> Iterator[Family]:
    """Yields all plans with these ``on_host``; counts in ``excluded`` those that cannot exist."""
    meshes = sorted({(*variant.mesh, variant.slices) for variant in model.variants})
    remats = sorted({variant.remat for variant in model.variants})
    for context, tensor, expert, slices in meshes:
        if cluster.count % (context * tensor) or tensor > cluster.per_host:
            continue
        per_layer = cluster.count // (context * tensor)
        inside = cluster.per_host // (context * tensor)
        counted = [mesh[2] for mesh in meshes if (*mesh[:2], mesh[3]) == (context, tensor, slices)]
        for stage in depths(per_layer, model.num_layers):
            if stage == 1 < slices:
                continue  # nothing waits for the first slice
            data = per_layer // stage
            if data % expert or expert not in expert_groups(counted, data, inside):
                continue
            powers = [2**n for n in range(MOST_ROWS.bit_length())]
            for batch, rows in itertools.product(batches, powers):
                if batch % (rows * data):
                    excluded["rows"] += 1
                    continue
                microbatches = batch // (rows * data)
                shape = stage, data, context, tensor, expert, slices, microbatches, rows
                for remat in remats:
                    yield from _families(model, cluster, shape, remat, on_host, excluded)


@functools.cache
def _room(model: ModelSizes, variant: Variant, stages: int, chunks: int, slots: int) -> Room:
    """The room of layers in equal chunks, which share so many slots; places share arrays of one
    shape."""
    sizes = model.variants[variant]
    placement = looped(stages, num_chunks=chunks)
    counts = layer_counts(model.num_layers, 0.0, placement)
    ends = itertools.accumulate(counts)
    of_chunks = [sizes.kind_of[end - count : end] for end, count in zip(ends, counts, strict=True)]
    at_once = [
        [of_chunks[n] for n in numbers[first : first + slots]]
        for numbers in placement.virtual_stages
        for first in range(0, chunks, slots)
    ]
    return room(at_once, list(map(_arrays, sizes.layers)))


def _arrays(layer: LayerSizes) -> Mapping[Any, Size]:
    """A layer's arrays by shape, in elements; those that an expert axis splits are apart."""
    groups = {"": layer.shapes, "experts": layer.expert_shapes}
    return numbered(
        ((group, shape), Size(group, math.prod(shape)))
        for group, shapes in groups.items()
        for shape in shapes
    )


@functools.cache
def _sliceable() -> set[str]:
    """Names of schedules that can cut the sequences of a microbatch into slices."""
    return {entry.name for entry in catalog.entries() if "num_slices" in entry.defaults}


def _families(
    model: ModelSizes,
    cluster: Cluster,
    shape: tuple[int, ...],
    remat: str,
    on_host: Sequence[Offload],
    excluded: Counter[str],
) -> Iterator[Family]:
    """Yields schedules and replicas of one mesh, microbatch and policy, with their options."""
    stage, data, context, tensor, expert, slices, microbatches, rows = shape
    near = max(1, cluster.per_host // (context * tensor))
    replicated = data > near > 1 and data % near == near % expert == 0
    replicas = (1, data // near) if replicated else (1,)
    variant = Variant(context, tensor, remat, expert, slices)
    ends = who_computes_ends(model, variant, stage)
    allowed: dict[tuple[int, bool], list[str]] = {}
    for name, searched in SCHEDULES.items():
        if stage == 1 and name not in _WITHOUT_STAGES:
            continue
        if slices > 1 and name not in _sliceable():
            continue
        if searched.overlaps and context * tensor * expert == 1:
            continue
        for chunks in searched.chunks if stage > 1 else _WITHOUT_STAGES[name]:
            if chunks > 1 and stage * data * context == 1:
                continue  # chunks of one stage are for what moves over data
            if stage * chunks > model.num_layers:
                excluded["layers"] += 1
                continue
            allowed.setdefault((chunks, searched.overlaps), []).append(name)
    for ((chunks, _), names), replica in itertools.product(allowed.items(), replicas):
        levels = [Zero.NOTHING] if data * context == 1 else list(Zero)
        zeros = levels if replica == 1 else levels[1:]
        layout = layout_of(model, variant, stage, chunks)
        yield [
            PlacedPlan(
                Plan(
                    *(stage, data, context, tensor, replica, name, chunks, microbatches, rows),
                    *(remat, zero, slots, layout, host, expert, at_ends, slices),
                ),
                model,
                cluster,
            )
            for name, host, zero in itertools.product(names, on_host, zeros)
            for slots in ((2, 1) if zero.shards_gradients and chunks > 1 else (1,))
            for at_ends in ends
        ]
