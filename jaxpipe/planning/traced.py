"""Counts what a model's layers compute, move and keep, from the traces that a pipeline runs.

Nothing is compiled, and no device of the cluster is needed: a pipeline of one stage on as many
simulated devices as share a layer is traced at two numbers of rows, between which everything grows
in a line: at which layers have the same kernels, for what W computes again may depend on sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpipe.planning.kernels import Counted, count
from jaxpipe.planning.sizes import Collective, Kernel, LayerSizes, Linear, Pass, Sizes
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.kinds import LayerKind
from jaxpipe.runtime.layers.losses import differentiated
from jaxpipe.runtime.layers.split import Split
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
"""The line through what was counted at the two numbers of rows."""


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
        head_working_set=line(few.head.live, many.head.live),
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
        lives = [(one.live, one.stacked_live) for one in self.passes]
        self.live = [
            most
            for f, b, w, fused in zip(*lives, strict=True)
            for most in (max(f, b, w), max(f, fused))
        ]


class _Trace:
    """A model for one number of rows."""

    def __init__(self, pipe: Pipeline, batch: Batch, rng: Key, compute_bytes: int) -> None:
        self.pipe, self.size = pipe, compute_bytes
        self.axes = dict(pipe.mesh.shape)
        traced.within(pipe, batch, rng, self._read)

    @property
    def kernels(self) -> list[int]:
        """How many every pass has."""
        return [len(one.kernels) for layer in self.layers for one in layer.passes]

    def _read(self, fixed: Fixed, batch: StepMicrobatches) -> None:
        layers, own = fixed.layers, fixed.params
        self.kind_of = layers.kind_of
        self.message = max(map(tree_bytes, layers.activations))
        self.layers = [
            _CountedLayer(kind, self.axes, own.canonical_of(kind.example), self.size)
            for kind in layers.kinds
        ]
        outer = fixed.setup.layout.outer
        leaves = jax.tree.leaves(outer, is_leaf=lambda leaf: hasattr(leaf, "struct"))
        shapes = [leaf.struct() for leaf in leaves]
        self.outer_parameters = sum(shape.size for shape in shapes)
        split = self.pipe.model.stage_split
        held = jax.tree.map(lambda leaf: leaf.struct(), outer, is_leaf=_is_leaf)
        self.outer_split = _split_elements(held, split)
        self.head = self._head(fixed, batch, held)

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
    split, fused, stacked, stacked_fused = map(line, few.live, many.live)
    kept = until_b, until_w, crossing, split, fused, stacked, stacked_fused
    return LayerSizes(f, b, w, few.parameters, *kept, few.shapes, few.expert_shapes)


def _pass(few: Counted, many: Counted, line: _Line) -> Pass:
    kernels = tuple(
        Kernel(line(one[0], other[0]), line(one[1], other[1]))
        for one, other in zip(few.kernels, many.kernels, strict=True)
    )
    collectives = tuple(
        Collective(axis, kind, line(sent, other[2]))
        for (axis, kind, sent), other in zip(few.collectives, many.collectives, strict=True)
    )
    return Pass(kernels, line(few.values, many.values), collectives)


def _line(rows: tuple[int, int], few: float, many: float) -> Linear:
    slope = (many - few) / (rows[1] - rows[0])
    return Linear(few - slope * rows[0], slope)


def _is_leaf(leaf: Any) -> bool:
    return hasattr(leaf, "struct")


def _split_elements(outer: Shapes, split: Any) -> int:
    """Elements of the parameters that stages split."""
    dims = dict(jax.tree.leaves_with_path(split))
    return sum(leaf.size for path, leaf in jax.tree.leaves_with_path(outer) if path in dims)
