"""A plan: how a model is spread over devices, and what its links and devices then have to do."""

from __future__ import annotations

import dataclasses
import functools
import math
from functools import cached_property
from typing import NamedTuple

from jaxpipe.planning.devices import Cluster
from jaxpipe.planning.sizes import ModelSizes, Sizes, Variant
from jaxpipe.schedule.lowering.transfers import dividing_shares

MASTER_BYTES = 4
"""Of a gradient sum and of a moment of the optimizer: float32."""
UNROLLED_LAYERS = 8
"""Layers per stage up to which one array per layer is worth compiling (docs/benchmarks.md)."""


class OnHost(NamedTuple):
    """What lies in the memory of the host: the optimizer's state between steps; what F keeps."""

    state: bool = False
    residuals: bool = False

    def __str__(self) -> str:
        return " and ".join(name for name in self._fields if getattr(self, name)) or "nothing"


NOTHING = OnHost()
_DIGITS = 2
"""Decimals of the number of layers that take as long as a head."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One choice of everything.

    Args:
      stage, data, context, tensor: devices along the mesh's axes.
      replica: groups of data shards that hold the same parts.
      schedule: its name.
      chunks: of a stage.
      microbatches: of a step.
      rows: of a microbatch on one data shard.
      remat: policy.
      zero: level.
      weight_slots: chunks of gathered weights, or of gradient sums, at once.
      weights: "stacked" or "unrolled".
      on_host: what lies in the memory of the host.
      expert: data shards, next to each other, that have some of a layer's experts each.
      ends: whether the stages of the first and the last layer compute embedding and head, or all.
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
    zero: int
    weight_slots: int
    weights: str
    on_host: OnHost = NOTHING
    expert: int = 1
    ends: bool = False

    @property
    def sharing(self) -> int:
        """Devices that share a layer."""
        return self.context * self.tensor

    @property
    def num_chunks(self) -> int:
        """Of the model."""
        return self.stage * self.chunks

    @property
    def batch_rows(self) -> int:
        """Rows of a step on all devices."""
        return self.microbatches * self.rows * self.data

    @property
    def parts(self) -> int:
        """Into how many parts ZeRO splits what it shards."""
        return self.data // self.replica


class Links(NamedTuple):
    """Bytes per second between devices that share a layer, along the axes of a mesh, the outermost
    first."""

    expert: float
    context: float
    tensor: float

    def along(self, axes: str) -> float:
        """Of a collective over axes, joined by "+": that of the outermost."""
        return next(
            link for name, link in zip(self._fields, self, strict=True) if name in axes.split("+")
        )


@dataclasses.dataclass(frozen=True)
class Placed:
    """A plan of a model on a cluster: what one device holds, and over which links it talks."""

    plan: Plan
    model: ModelSizes
    cluster: Cluster

    @property
    def variant(self) -> Variant:
        """What decides the sizes of the model's layers."""
        return Variant(self.plan.context, self.plan.tensor, self.plan.remat, self.plan.expert)

    @cached_property
    def sizes(self) -> Sizes:
        return self.model.variants[self.variant]

    @cached_property
    def layers_per_chunk(self) -> int:
        """Of the largest chunk, which decides the room of all."""
        return math.ceil((self.model.num_layers + self.head_layers) / self.plan.num_chunks)

    @cached_property
    def head_layers(self) -> float:
        """How many layers have the FLOPs of the head, if the last stage computes it; else 0."""
        if not self.plan.ends:
            return 0.0
        rows, sizes = self.plan.rows, self.sizes
        layers = (sizes.layers[kind] for kind in sizes.kind_of)
        flops = sum(one.flops(rows) for layer in layers for one in (layer.f, layer.b, layer.w))
        return round(sizes.head.flops(rows) * self.model.num_layers / flops, _DIGITS)

    @cached_property
    def layer_parameters(self) -> float:
        """Of a layer on a device: the mean, if layers differ."""
        return self.model.mean(self.variant, "parameters").fixed

    @cached_property
    def expert_parameters(self) -> float:
        """Those of a layer on a device that expert devices split: the mean, if layers differ."""
        return self.model.mean(self.variant, "expert_parameters").fixed

    @cached_property
    def layer_part(self) -> float:
        """Of a layer on a device, where data shards split it: experts, as far as they are split
        already, into fewer parts."""
        more = (self.plan.expert - 1) * self.expert_parameters
        return (self.layer_parameters + more) / self.plan.parts

    @cached_property
    def stage_parameters(self) -> float:
        """Of the layers of a stage on a device, not sharded over data."""
        return self.plan.chunks * self.layers_per_chunk * self.layer_parameters

    @cached_property
    def stage_part(self) -> float:
        """Of the layers of a stage on a device, where data shards split them."""
        return self.plan.chunks * self.layers_per_chunk * self.layer_part

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
    def shares(self) -> int:
        """The most shares in which a layer may move over data; those that differ move whole."""
        if len(self.sizes.layers) > 1:
            return 1
        layer, parts = self.sizes.layers[0], self.plan.parts
        return _shares(layer.shapes, parts, layer.expert_shapes, parts // self.plan.expert)

    @cached_property
    def reordered_parameters(self) -> float:
        """Those of a layer on a device that a reduction over data puts in another order first: of
        arrays that data shards do not split in their first dimension; the mean, if layers differ.
        """
        parts, sizes = self.plan.parts, self.sizes
        found = [
            _reordered(layer.shapes, parts)
            + _reordered(layer.expert_shapes, parts // self.plan.expert)
            for layer in sizes.layers
        ]
        return sum(found[kind] for kind in sizes.kind_of) / len(sizes.kind_of)

    @cached_property
    def sum_sized_parameters(self) -> float:
        """Of a device's parts of a layer, those in arrays of the shape of one of its gradient sums;
        the mean, if layers differ."""
        parts, sizes = self.plan.parts, self.sizes
        found = []
        for layer in sizes.layers:
            whole = {*layer.shapes, *layer.expert_shapes}
            cut = [_part(shape, parts) for shape in layer.shapes]
            cut += [_part(shape, parts // self.plan.expert) for shape in layer.expert_shapes]
            found.append(sum(math.prod(shape) for shape in cut if shape in whole))
        return sum(found[kind] for kind in sizes.kind_of) / len(sizes.kind_of)

    @cached_property
    def held_parameters(self) -> float:
        """Of all that a device updates: parts with ZeRO."""
        if self.plan.zero:
            return self.stage_part + self.outer_kept / self.plan.parts
        return self.stage_parameters + self.outer_kept

    @cached_property
    def optimizer_bytes(self) -> float:
        """Of the optimizer's state of a device, in float32, wherever it lies."""
        return MASTER_BYTES * self.model.moments * self.held_parameters

    def mean(self, name: str) -> float:
        """Bytes of `LayerSizes` of the plan's rows: the mean, if layers differ."""
        return self.model.mean(self.variant, name).at(self.plan.rows)

    # Links, in the order in which `jaxpipe.make_mesh` lays devices out.

    @cached_property
    def _near(self) -> int:
        """Devices of one stage and replica."""
        return self.plan.parts * self.plan.sharing

    @cached_property
    def _data_inside(self) -> bool:
        """Whether the data shards of a stage share a host."""
        hosts = self.cluster.count // self.cluster.per_host
        return hosts > 1 and self.cluster.per_host % self._near == 0

    @cached_property
    def sharing_links(self) -> Links:
        """Between the devices that share a layer, by axis."""
        plan, link = self.plan, self.cluster.link
        return Links(link(plan.expert * plan.sharing), link(plan.sharing), link(plan.tensor))

    @cached_property
    def stage_link(self) -> float:
        """Of the slowest hop between stages."""
        inner = self._near if self._data_inside else self.plan.sharing
        return self.cluster.link(inner * self.plan.stage)

    @cached_property
    def data_link(self) -> float:
        """Between the parts that ZeRO makes."""
        own = self.plan.sharing * (1 if self._data_inside else self.plan.stage)
        return self.cluster.link(own * self.plan.parts)

    @cached_property
    def replica_link(self) -> float:
        """Between the replicas of a part."""
        return self.cluster.link(self._near * self.plan.stage * self.plan.replica)


_Shapes = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=1024)
def _shares(shapes: _Shapes, parts: int, of_experts: _Shapes, parts_of_experts: int) -> int:
    """Data shards split the first dimension that divides."""
    arrays = [(shape, parts) for shape in shapes]
    arrays += [(shape, parts_of_experts) for shape in of_experts]
    found = []
    for shape, among in arrays:
        split = next((n // among for n in shape if n and n % among == 0), 0)
        found.append((MASTER_BYTES * math.prod(shape), split))
    return dividing_shares(found)


def _part(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """What a data shard has of an array: a part of the first dimension that divides."""
    for dim, n in enumerate(shape):
        if n and n % parts == 0:
            return (*shape[:dim], n // parts, *shape[dim + 1 :])
    return shape


def _reordered(shapes: _Shapes, parts: int) -> int:
    """Elements of arrays of which so many data shards split another dimension than the first."""
    return sum(
        math.prod(shape)
        for shape in shapes
        if shape and shape[0] % parts and any(n % parts == 0 for n in shape)
    )


def divisors(number: int) -> list[int]:
    """Those of a number, in order.

    Example:
      >>> divisors(12)
      [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
