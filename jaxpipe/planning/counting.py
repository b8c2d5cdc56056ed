"""Counts what a model's layers compute, move and keep, from the traces that a pipeline runs.

Nothing is compiled, and no device of the cluster is needed: a pipeline of one stage on as many
simulated devices as share a layer is traced at two numbers of rows, between which everything grows
in a line: at which layers have the same kernels, for what W computes again may depend on sizes.

Matmuls, convolutions, attention, gathers and the like are kernels of their own, which read their
operands and write their results. What is element by element is fused: only what such a kernel, a
reduction or the program's caller reads is written, by one kernel that reads what it is made from.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from jaxpipe.planning.sizes import Collective, Kernel, LayerSizes, Linear, Pass, Sizes
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.kinds import LayerKind
from jaxpipe.runtime.layers.losses import differentiated
from jaxpipe.runtime.layers.split import Split
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.measure import traced
from jaxpipe.runtime.measure.memory import tree_bytes
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import StepMicrobatches
from jaxpipe.runtime.types import Batch, Key, Leaves, Shapes

EXPERT = "expert"
"""The axis of data shards that split experts."""
_ROWS = 2, 4, 8, 16, 32
"""Rows of a microbatch that are traced; more than one, so that nothing is simplified away."""

_Line = Callable[[float, float], Linear]
"""Makes the line through the counts at the two numbers of rows."""

_RENAMES = {"reshape", "squeeze", "expand_dims", "convert_element_type", "copy", "bitcast"}
_FUSED_MOVES = {"transpose", "slice", "concatenate", "pad", "rev", "split", "dynamic_slice"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_precision_sum"}
_FREE = {"optimization_barrier", "iota", "broadcast_in_dim", "axis_index", "create_token"}
_HEAVY = {
    *("dot_general", "conv_general_dilated", "ragged_dot_general", "gather", "scatter"),
    *("scatter-add", "scatter_add", "sort", "top_k", "cumsum", "dynamic_update_slice"),
    *("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper", "while", "scan"),
    *("cond", "custom_call", "pure_callback", "reduce_window_sum", "select_and_scatter_add"),
}
_COLLECTIVES = {
    "psum": "sum",
    "psum_invariant": "sum",
    "pmax": "sum",
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "psum_scatter": "scatter",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}
_ATTENTION_MATMULS = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 5,
}
"""Dao et al. 2022, algorithms 1 and 4."""


def sizes(
    pipe: Pipeline, batch: Callable[[int], Batch], rng: Key = None, *, compute_bytes: int
) -> Sizes:
    """Counts a model on the devices that share its layers.

    Args:
      pipe: of one stage, and one data shard or those of an expert axis; its microbatches do not
        matter.
      batch: the shapes of a batch with so many rows.
      rng: as for `Pipeline.value_and_grad`, or its shape.
      compute_bytes: of a weight where layers read it.

    Raises:
      ValueError: the pipeline has several stages or data shards.
    """
    experts = pipe.mesh.shape.get(EXPERT, 1)
    if pipe.axes.num_shards(pipe.mesh) != experts or pipe.schedule.num_stages != 1:
        raise ValueError("a model is counted on one stage and one data shard")
    times = pipe.schedule.num_microbatches * experts
    traces = (_Trace(pipe, batch(rows * times), rng, compute_bytes) for rows in _ROWS)
    for rows, (few, many) in zip(
        itertools.pairwise(_ROWS), itertools.pairwise(traces), strict=True
    ):
        if few.kernels == many.kernels:
            return _sizes(few, many, functools.partial(_line, rows))
    raise ValueError(f"layers have other kernels at each of {_ROWS} rows")


def _sizes(few: _Trace, many: _Trace, line: _Line) -> Sizes:
    return Sizes(
        layers=tuple(_layer(*both, line) for both in zip(few.layers, many.layers, strict=True)),
        kind_of=few.kind_of,
        message=line(few.message, many.message),
        outer_parameters=few.outer_parameters,
        outer_split=few.outer_split,
        head=_pass(few.head, many.head, line),
        head_live=line(few.head.live, many.head.live),
    )


class _CountedLayer:
    """One kind of layer for one number of rows."""

    def __init__(self, kind: LayerKind, axes: dict[str, int], own: Leaves, size: int) -> None:
        self.passes, leaves = _passes(kind.split, axes, size), jax.tree.leaves(own)
        self.parameters = sum(math.prod(leaf.shape) for leaf in leaves)
        self.shapes = tuple(leaf.shape for leaf in leaves if EXPERT not in leaf.apart)
        self.expert_shapes = tuple(leaf.shape for leaf in leaves if EXPERT in leaf.apart)
        kept = kind.split.until_b, kind.split.until_w, kind.split.crossing
        self.kept = [tree_bytes(list(one)) for one in kept]
        self.live = max(counted.live for counted in self.passes)


class _Trace:
    """A model for one number of rows."""

    def __init__(self, pipe: Pipeline, batch: Batch, rng: Key, compute_bytes: int) -> None:
        self.pipe, self.size = pipe, compute_bytes
        self.axes = dict(pipe.mesh.shape)
        traced.within(pipe, batch, rng, self._read)

    @property
    def kernels(self) -> list[int]:
        """How many every pass has."""
        return [len(counted.kernels) for layer in self.layers for counted in layer.passes]

    def _read(self, fixed: Fixed, batch: StepMicrobatches) -> None:
        layers, own = fixed.layers, fixed.params
        self.kind_of = layers.kind_of
        self.message = max(map(tree_bytes, layers.activations))
        self.layers = [
            _CountedLayer(kind, self.axes, own.canonical_of(kind.example), self.size)
            for kind in layers.kinds
        ]
        outer = jax.tree.map(Leaf.struct, fixed.setup.layout.outer)
        split = dict(jax.tree.leaves_with_path(self.pipe.model.stage_split))
        sizes = {path: leaf.size for path, leaf in jax.tree.leaves_with_path(outer)}
        self.outer_parameters = sum(sizes.values())
        self.outer_split = sum(size for path, size in sizes.items() if path in split)
        self.head = self._head(fixed, batch, outer)

    def _head(self, fixed: Fixed, batch: StepMicrobatches, outer: Shapes) -> Counted:
        x = fixed.layers.activations[fixed.layers.last]

        def head(outer: Shapes, x: Any) -> Any:
            def loss(outer: Shapes, x: Any) -> jax.Array:
                return differentiated(fixed.head(batch, outer, x, 0))

            value, vjp = jax.vjp(loss, outer, x)
            return value, vjp(jax.numpy.ones_like(value))

        program = jaxprs.flatten(jax.make_jaxpr(head)(outer, x)).jaxpr
        arrived = program.invars[len(jax.tree.leaves(outer)) :]  # from the last stage
        return count(program.eqns, program.outvars, slots=arrived, axis_sizes=self.axes)


def _passes(split: Split, axes: dict[str, int], size: int) -> list[Counted]:
    """F, B and W of a layer, and both backwards as one."""
    forward, backward = split.traced.forward.jaxpr, split.traced.backward.jaxpr
    kept = [*split.kept_until_b, *split.kept_until_w]
    weights = forward.invars[: split.traced.params.num_leaves]
    returned = [*split.traced.outputs, *kept]
    source = split.traced.source
    # What the backward reads of the forward: residuals from slots, or weights.
    from_slots = {v for v in source if source[v] in kept}
    of_weights = {v for v in source if jaxprs.is_var(source[v]) and source[v] not in kept}

    def counted(eqns: Sequence[Any], outputs: Sequence[Any], slots: set[Any], own: Any) -> Counted:
        given = {"axis_sizes": axes, "parameters": own, "parameter_bytes": float(size)}
        return count(eqns, outputs, slots=slots, stored=dparams, **given)

    f_eqns = jaxprs.needed(forward.eqns, returned)
    crosses = set(split.crosses)
    dx, dparams = backward.outvars[: split.traced.num_x], backward.outvars[split.traced.num_x :]
    dparams = [v for v in dparams if jaxprs.is_var(v)]
    return [
        counted(f_eqns, returned, set(kept), weights),
        counted(split.b, [*dx, *split.crosses], from_slots | crosses, of_weights),
        counted([*split.again, *split.w], dparams, from_slots | crosses, of_weights),
        counted([*split.b, *split.w], [*dx, *dparams], from_slots, of_weights),
    ]


def _layer(few: _CountedLayer, many: _CountedLayer, line: _Line) -> LayerSizes:
    f, b, w = (_pass(*both, line) for both in zip(few.passes[:3], many.passes[:3], strict=True))
    until_b, until_w, crossing = map(line, few.kept, many.kept)
    live = line(few.live, many.live)
    shapes = few.shapes, few.expert_shapes
    return LayerSizes(f, b, w, few.parameters, until_b, until_w, crossing, live, *shapes)


def _pass(few: Counted, many: Counted, line: _Line) -> Pass:
    kernels = tuple(
        Kernel(*map(line, *both)) for both in zip(few.kernels, many.kernels, strict=True)
    )
    collectives = tuple(
        Collective(axis, kind, line(sent, sent_by_many))
        for (axis, kind, sent), (*_, sent_by_many) in zip(
            few.collectives, many.collectives, strict=True
        )
    )
    return Pass(kernels, line(few.values, many.values), collectives)


def _line(rows: tuple[int, int], few: float, many: float) -> Linear:
    slope = (many - few) / (rows[1] - rows[0])
    return Linear(few - slope * rows[0], slope)


# Kernels of traced equations.


@dataclasses.dataclass(frozen=True)
class Counted:
    """Work of equations, for one number of rows.

    Args:
      kernels: (FLOPs, bytes) of each, in order.
      values: bytes copied into slots and out of them.
      collectives: (axis, kind, bytes that a device sends).
      live: the most bytes that exist at once of what is cut out of slots and what kernels make.
    """

    kernels: list[tuple[float, float]]
    values: float
    collectives: list[tuple[str, str, float]]
    live: float


def count(
    eqns: Sequence[Any],
    outputs: Iterable[Any],
    *,
    slots: Collection[Any] = (),
    stored: Collection[Any] = (),
    axis_sizes: dict[str, int],
    parameters: Collection[Any] = (),
    parameter_bytes: float | None = None,
) -> Counted:
    """Counts flat equations.

    Args:
      eqns: with calls inlined, in order.
      outputs: variables that are returned.
      slots: variables that are read from slots, or, among the outputs, written to them.
      stored: outputs that are added to what lies elsewhere, such as gradients.
      axis_sizes: of the mesh.
      parameters: variables that are weights.
      parameter_bytes: of one of their elements, where the program reads a copy in another dtype.
    """
    program = _Program(eqns, outputs, parameters, parameter_bytes)
    kernels: list[tuple[float, float]] = []
    collectives: list[tuple[str, str, float]] = []
    copied = 0.0
    for eqn in eqns:
        if eqn.primitive.name in _COLLECTIVES:
            collectives += _collective(eqn, axis_sizes)
        elif _fuses(eqn):
            kernels += [program.fusion(v) for v in eqn.outvars if v in program.materialised]
        else:
            read, written = list(map(program.origin, _inputs(eqn))), eqn.outvars
            kernels.append((_flops(eqn), sum(map(program.bytes, [*read, *written]))))
            # A kernel that is not fused reads a copy that is cut out of the slot, and its results
            # are copied into one.
            copies = {v for v in read if v in slots}
            copies |= {v for v in written if program.kept_as(v, slots)}
            copied += 2 * sum(map(program.bytes, copies))
    return Counted(kernels, copied, collectives, program.live_bytes(slots, stored))


class _Program:
    """Variables that exist in memory, and what each is made from."""

    def __init__(
        self,
        eqns: Sequence[Any],
        outputs: Iterable[Any],
        parameters: Collection[Any],
        parameter_bytes: float | None,
    ) -> None:
        self.eqns, self.outputs = eqns, [v for v in outputs if jaxprs.is_var(v)]
        self.maker = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.parameters, self.parameter_bytes = set(parameters), parameter_bytes
        self.casts: dict[tuple[Any, Any], Any] = {}
        wanted = list(self.outputs)
        for eqn in eqns:
            if not _fuses(eqn):
                wanted += _inputs(eqn)
            if eqn.primitive.name in _REDUCTIONS:
                wanted += eqn.outvars
        makers = ((v, self.maker.get(v)) for v in map(self.origin, wanted))
        self.materialised = {
            v
            for v, eqn in makers
            if eqn is not None and _fuses(eqn) and eqn.primitive.name not in _FREE
        }

    def origin(self, v: Any) -> Any:
        """The variable that another one only renames; for a weight in another dtype, the weight."""
        while (eqn := self.maker.get(v)) is not None:
            name = eqn.primitive.name
            if name not in _RENAMES or not jaxprs.is_var(eqn.invars[0]):
                return v
            source = eqn.invars[0]
            if name == "convert_element_type" and self.origin(source) not in self.parameters:
                # Equal casts are one.
                return self.casts.setdefault((self.origin(source), v.aval.dtype), v)
            v = source
        return v

    def kept_as(self, v: Any, slots: Collection[Any]) -> bool:
        """Whether a variable is an output that goes to a slot, perhaps by another name."""
        return any(self.origin(out) is v for out in self.outputs if out in slots)

    def bytes(self, v: Any) -> float:
        size = math.prod(v.aval.shape)
        if v in self.parameters and self.parameter_bytes is not None:
            return size * self.parameter_bytes
        return size * _itemsize(v)

    def fusion(self, v: Any) -> tuple[float, float]:
        """The kernel that writes a variable: no FLOPs of matmuls, and its bytes."""
        return 0.0, self.bytes(v) + sum(map(self.bytes, self._in_memory(self.maker[v])))

    def _in_memory(self, kernel: Any) -> set[Any]:
        """Variables in memory that an equation is computed from, through what is fused into it."""
        read, seen, operands = set[Any](), set[int](), _inputs(kernel)
        while operands:
            v = self.origin(operands.pop())
            eqn = self.maker.get(v)
            if eqn is None or not _fuses(eqn) or v in self.materialised:
                read.add(v)
            elif id(eqn) not in seen:
                seen.add(id(eqn))
                operands += _inputs(eqn)
        return read

    def live_bytes(self, slots: Collection[Any], stored: Collection[Any]) -> float:
        """The most bytes at once of what is cut out of slots and what kernels make, in their order.

        A value exists until it is last read, or to the end if it is returned, but for those that
        are ``stored`` elsewhere.
        """
        kernels: list[tuple[list[Any], set[Any]]] = []
        for eqn in self.eqns:
            if not _fuses(eqn):
                kernels.append((eqn.outvars, self._in_memory(eqn)))
                continue
            made = [v for v in eqn.outvars if v in self.materialised]
            kernels += [([v], self._in_memory(eqn)) for v in made]
        read = set[Any]().union(*(read for _, read in kernels))
        elsewhere = {self.origin(v) for v in (*stored, *slots)} - read
        sizes = {v: self.bytes(v) for made, _ in kernels for v in made if v not in elsewhere}
        last = {v: n for n, (made, read) in enumerate(kernels) for v in (*made, *read)}
        last |= {self.origin(v): len(kernels) for v in self.outputs if v not in {*stored, *slots}}
        cut = {v: self.bytes(v) for v in slots if v in last and v not in self.maker}
        sizes |= cut
        live = most = sum(cut.values())
        for n, (made, read) in enumerate(kernels):
            live += sum(sizes.get(v, 0.0) for v in made)
            most = max(most, live)
            live -= sum(sizes.get(v, 0.0) for v in {*made, *read} if last[v] == n)
        return most


def _fuses(eqn: Any) -> bool:
    name = eqn.primitive.name
    return not (name in _HEAVY or name in _COLLECTIVES or jaxprs.multiplies(eqn))


def _inputs(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if jaxprs.is_var(v)]


def _itemsize(v: Any) -> int:
    dtype = v.aval.dtype
    return getattr(dtype, "itemsize", 8)  # a key has none on some versions of jax


def _flops(eqn: Any) -> float:
    """Multiplications and additions of a matmul, a convolution or an attention."""
    name, out = eqn.primitive.name, math.prod(eqn.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * out * math.prod(shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        features = kernel[numbers.rhs_spec[0]]
        return 2.0 * out * math.prod(kernel) / features
    if name in _ATTENTION_MATMULS:
        query, key = (v.aval.shape for v in eqn.invars[:2])
        causal = "CAUSAL" in str(eqn.params.get("mask_type", ""))
        whole = 2.0 * _ATTENTION_MATMULS[name] * math.prod(query) * key[1]
        return whole / 2 if causal else whole
    if name == "scan":
        inner = eqn.params["jaxpr"].jaxpr.eqns
        return eqn.params["length"] * sum(map(_flops, inner))
    if name == "cond":
        return max(sum(map(_flops, one.jaxpr.eqns)) for one in eqn.params["branches"])
    return 0.0


def _collective(eqn: Any, sizes: dict[str, int]) -> list[tuple[str, str, float]]:
    """One entry per axis of more than one device: what a device sends of its operands."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = names if isinstance(names, tuple) else (names,)
    group = math.prod(sizes.get(str(name), 1) for name in names)
    if group == 1:
        return []
    kind = _COLLECTIVES[eqn.primitive.name]
    own = sum(math.prod(v.aval.shape) * _itemsize(v) for v in _inputs(eqn))
    times = {
        "sum": 2 * (group - 1) / group,
        "gather": group - 1,
        "scatter": (group - 1) / group,
        "all-to-all": (group - 1) / group,
        "permute": 1,
    }[kind]
    return [("+".join(map(str, names)), kind, own * times)]
