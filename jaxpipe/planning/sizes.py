"""Sizes of a model, as a file of JSON: all that a plan knows of what it computes, moves, keeps.

All numbers are of one device, and grow linearly with the rows of a microbatch (`Linear`).
`jaxpipe.planning.counting` counts them for every number of devices that share a layer and every
policy of rematerialization; nothing here is a formula of a model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpipe.schedule.problems import Problem, refuse


class Linear(NamedTuple):
    """A number that grows with the rows of a microbatch."""

    fixed: float
    per_row: float

    def at(self, rows: float) -> float:
        return self.fixed + self.per_row * rows


class Kernel(NamedTuple):
    """One kernel: its FLOPs in matmuls, and the bytes it reads and writes.

    Args:
      kind: "matmul", "fp8" if its operands have 8 bits, "mxfp8" if blocks of them also have scales,
        "attention" if it is fused, or "other".
    """

    flops: Linear
    bytes: Linear
    kind: str = "other"


class SizedCollective(NamedTuple):
    """A collective over a model axis within a layer: jax's primitive, and the bytes that a device
    sends."""

    axis: str
    kind: str
    sent: Linear


class Pass(NamedTuple):
    """F, B or W of a layer, or a phase of embedding and head.

    Args:
      values: bytes that are copied into slots and out of them, beside the kernels, unless the
        program knows the slots.
      collectives: in order; none of them overlaps computation within the layer.
      crossing: bytes that are copied likewise of what goes from B to W.
    """

    kernels: tuple[Kernel, ...]
    values: Linear
    collectives: tuple[SizedCollective, ...]
    crossing: Linear = Linear(0.0, 0.0)

    def flops(self, rows: int) -> float:
        return sum(kernel.flops.at(rows) for kernel in self.kernels)


class LayerSizes(NamedTuple):
    """One kind of layer on one device.

    Args:
      parameters: elements that the device has.
      until_b, until_w, crossing: bytes that are kept from F to B, from F to W, and from B to W.
      live: bytes that exist at once while a pass runs, beside what is kept.
      shapes: of its parameters, as the device has them without shards over data.
      expert_shapes: likewise of the parameters that the devices of an expert axis split.
      quantized: elements of the parameters that layers read in 8 bits.
      carry: bytes that the layer hands from slice to slice of a sequence.
      frozen: elements of the parameters that are not trained.
      rounded: elements among these that are kept in 8 bits.
    """

    f: Pass
    b: Pass
    w: Pass
    parameters: int
    until_b: Linear
    until_w: Linear
    crossing: Linear
    live: Linear
    shapes: tuple[tuple[int, ...], ...]
    expert_shapes: tuple[tuple[int, ...], ...] = ()
    quantized: int = 0
    carry: Linear = Linear(0.0, 0.0)
    frozen: int = 0
    rounded: int = 0

    @property
    def passes(self) -> tuple[Pass, Pass, Pass]:
        return self.f, self.b, self.w

    @property
    def expert_parameters(self) -> int:
        """Elements that the devices of an expert axis split."""
        return sum(map(math.prod, self.expert_shapes))


class Variant(NamedTuple):
    """The choices that decide how a layer is computed.

    Args:
      context, tensor: devices that share it.
      remat: policy of rematerialization.
      expert: data shards that have some of its experts each.
      slices: slices of a sequence, which it computes one by one.
    """

    context: int
    tensor: int
    remat: str
    expert: int = 1
    slices: int = 1

    @property
    def mesh(self) -> tuple[int, int, int]:
        """Devices along each axis."""
        return self.context, self.tensor, self.expert


class Sizes(NamedTuple):
    """A model on so many devices of a layer, with one policy of rematerialization.

    What is computed, moved and kept is that of an average slice, if sequences are cut.

    Args:
      layers, kind_of: the kinds of layers, and the number of its kind for every layer.
      message: bytes of an activation between stages.
      merged: bytes of what embedding and head exchange where all stages compute them together.
      outer_parameters: elements of embedding and head on a device, without stages.
      outer_split: number of these elements that stages split among themselves.
      head: the loss, its gradient, and that of the head, for one microbatch, on one stage.
      head_live: bytes that exist at once while it runs.
      outer_frozen: elements of embedding and head that are not trained.
    """

    layers: tuple[LayerSizes, ...]
    kind_of: tuple[int, ...]
    message: Linear
    merged: Linear
    outer_parameters: int
    outer_split: int
    head: Pass
    head_live: Linear
    outer_frozen: int = 0

    def layer_flops(self, rows: int) -> float:
        """FLOPs of the matmuls of all layers, for one microbatch or its average slice."""
        return sum(
            self.kind_of.count(kind) * layer_pass.flops(rows)
            for kind, layer in enumerate(self.layers)
            for layer_pass in layer.passes
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSizes:
    """A model, for all numbers of devices that share a layer and policies that were traced.

    Args:
      name: such as its configuration's file.
      compute_bytes: bytes of one parameter where layers read it, unless it is quantized; the same
        if it is not cast.
      moments: numbers that the optimizer keeps for every parameter.
      batch_rows: rows of the configuration's batch.
      variants: sizes by what decides how layers are computed.
      may_offload: whether the optimizer's state may lie on the host.
      in_pieces: whether layers on tensor devices run in pieces of the sequence, which hide
        collectives; they are counted whole.
      update_flops: FLOPs of matmuls of the optimizer's update of a whole layer, such as Muon's, by
        matrix; of the layer with the most, if layers differ.
      document_share: how long the document of a token is on average, as a share of a row; tokens
        see no others. So much of attention takes longer for later slices of a sequence.
    """

    name: str
    tokens_per_row: int
    parameter_bytes: int
    compute_bytes: int
    moments: int
    batch_rows: int
    row_bytes: int
    variants: Mapping[Variant, Sizes]
    may_offload: bool = True
    document_share: float = 1.0
    in_pieces: bool = False
    update_flops: tuple[float, ...] = ()

    @property
    def kind_of(self) -> tuple[int, ...]:
        """The number of its kind for every layer."""
        return next(iter(self.variants.values())).kind_of

    @functools.cached_property
    def quantizes(self) -> bool:
        """Whether layers read some weights in 8 bits."""
        return any(layer.quantized for sizes in self.variants.values() for layer in sizes.layers)

    @functools.cached_property
    def multiplies_blocks(self) -> bool:
        """Whether matmuls have a scale for each block of their operands."""
        layers = [layer for sizes in self.variants.values() for layer in sizes.layers]
        kernels = (kernel for layer in layers for one in layer.passes for kernel in one.kernels)
        return any(kernel.kind == "mxfp8" for kernel in kernels)

    @property
    def num_layers(self) -> int:
        return len(self.kind_of)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; devices of a context each hold what one device does."""
        variant, sizes = min(self.variants.items(), key=lambda item: item[0].mesh)
        layers = [sizes.layers[kind] for kind in sizes.kind_of]
        of_layers = sum(
            layer.parameters + (variant.expert - 1) * layer.expert_parameters for layer in layers
        )
        return variant.tensor * (of_layers + sizes.outer_parameters)

    def mean(self, variant: Variant, name: str) -> Linear:
        """A number of `LayerSizes`: the mean, if layers differ."""
        return _mean(self, variant, name)

    def to_json(self) -> str:
        """The text of a file for ``jaxpipe plan --sizes``."""
        variants = [
            variant._asdict() | {"sizes": sizes} for variant, sizes in self.variants.items()
        ]
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(fields | {"variants": variants}) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str) -> ModelSizes:
        """Reads what `to_json` wrote."""
        try:
            data = json.loads(text)
            variants = {
                Variant(*(item[name] for name in Variant._fields)): _read(Sizes, item["sizes"])
                for item in data.pop("variants")
            }
            return cls(**data | {"update_flops": tuple(data["update_flops"])}, variants=variants)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            rule = f"holds no sizes of a model as this version writes them ({error!r})"
            note = "Write it again: jaxpipe plan --config FILE --write-sizes FILE."
            refuse([Problem("sizes", source, rule, note=note)])
            raise AssertionError from error  # refused


@functools.lru_cache(maxsize=1024)
def _mean(model: ModelSizes, variant: Variant, name: str) -> Linear:
    """Computes `ModelSizes.mean`, for which searches ask thousands of times."""
    sizes = model.variants[variant]
    numbers = [getattr(sizes.layers[kind], name) for kind in sizes.kind_of]
    lines = [number if isinstance(number, Linear) else Linear(number, 0.0) for number in numbers]
    fixed, per_row = (sum(values) / len(lines) for values in zip(*lines, strict=True))
    return Linear(fixed, per_row)


def _read(kind: Any, data: Any) -> Any:
    """Rebuilds a value of a type from JSON, which has lists in place of named tuples."""
    if hasattr(kind, "_fields"):
        types = typing.get_type_hints(kind).values()
        return kind(*(_read(*field) for field in zip(types, data, strict=True)))
    if typing.get_origin(kind) is tuple:
        return tuple(_read(typing.get_args(kind)[0], item) for item in data)
    return data
