"""Costs of layers, of embedding and of head: operations, or seconds."""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layers import jaxprs, losses
from jaxpipe.runtime.layers.kinds import LayerKind
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tracing import traced_layers
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import Activation, Batch, Key, Shapes, Tree
from jaxpipe.schedule.simulate import Costs

_GROUPS, _QUEUED = 5, 4
"""A program is timed in groups of runs that wait for the device together, as they do in a step; the
fastest group counts, since whatever disturbs only adds."""


def layer_costs(
    pipe: Pipeline,
    batch: Batch,
    rng: Key = None,
    *,
    measure: bool = False,
    together: bool = False,
) -> list[Costs]:
    """Costs of F, B and W of every layer for one microbatch on one data shard, without messages.

    If sequences are cut, costs are those of a slice that attends to the whole sequence.

    Layers of one kind are traced, or timed, once. By default costs are the floating-point
    operations that XLA counts before it optimizes, including the recomputation of ``remat``. If
    devices along model axes share a layer, operations are those of one device's part, and a time is
    that of all devices together.

    Args:
      pipe: any pipeline of the model; it is not run, and its partition does not matter.
      batch: a batch, or its shapes.
      rng: as for `Pipeline.value_and_grad`.
      measure: compile every part, run it on the first device, and return seconds.
      together: run it on all devices of the pipeline at once, with the same values, since all are
        busy in a step; simulated devices share the machine's cores.
    """
    layers, context = traced_layers(pipe, batch, rng)
    cost = functools.partial(_cost, pipe, measure=measure, together=together)
    by_kind = [
        Costs(*(cost(part, *args) for part, args in map(parts.__getitem__, "fbw")))
        for parts in (_parts(pipe, kind, layers.activations, context) for kind in layers.kinds)
    ]
    return [by_kind[number] for number in layers.kind_of]


def end_costs(
    pipe: Pipeline, batch: Batch, rng: Key = None, *, measure: bool = False
) -> tuple[float, float]:
    """Costs of embedding and head for one microbatch, each with its gradient, as in `layer_costs`.

    Without ``Model.stage_split``, the stages of the first and the last layer compute them. Add them
    to the costs of these layers for `jaxpipe.schedule.partition`.

    Args:
      pipe: pipeline of a model without ``stage_split``; all arguments as for `layer_costs`.
    """
    layers, (rows, key) = traced_layers(pipe, batch, rng)
    outers = [
        jax.tree.map(Leaf.struct, layout.local.outer)
        for layout in (pipe.layout, pipe.frozen)
        if layout is not None
    ]
    outer, model = functools.reduce(combine, outers), pipe.model

    def embed(outer: Shapes, dx: Activation, rows: Batch, key: Key) -> Tree:
        value, vjp = jax.vjp(lambda outer: model.embed(outer, rows, key), outer)
        return value, vjp(dx)

    def head(outer: Shapes, y: Activation, rows: Batch, key: Key) -> Tree:
        def loss(outer: Shapes, y: Activation) -> jax.Array:
            return losses.differentiated(model.head_loss(outer, y, rows, key))

        return jax.value_and_grad(loss, (0, 1))(outer, y)

    cost = functools.partial(_cost, pipe, measure=measure)
    given = rows, key
    return cost(embed, outer, layers.embedded, *given), cost(head, outer, layers.merged, *given)


def _parts(
    pipe: Pipeline, kind: LayerKind, activations: Sequence[Activation], context: Shapes
) -> dict[str, tuple[Callable[..., Tree], tuple[Shapes, ...]]]:
    """Makes F, B and W of a kind of layer, each with the shapes of its arguments."""
    split, params, states = kind.split, kind.split.params, pipe.state_layout
    state = None if states is None else states.shape_of(kind.example)
    x, dy, until_w = activations[kind.x], activations[kind.y], list(split.until_w)
    if kind.carry is not None:
        x, dy = (x, kind.carry.shapes), (dy, kind.carry.shapes)
        until_w += kind.carry.buffers
        context = *context, jax.ShapeDtypeStruct((), jnp.int32)

    def forward(params: Shapes, x: Activation, state: Shapes, *context: Shapes) -> Tree:
        return split.forward(params, x, *context, state=state)

    return {
        "f": (forward, (params, x, state, *context)),
        "b": (split.backward_input, (params, list(split.until_b), until_w, dy, *context)),
        "w": (split.backward_weights, (params, until_w, list(split.crossing), *context)),
    }


def _cost(
    pipe: Pipeline, part: Callable[..., Tree], *args: Shapes, measure: bool, together: bool = False
) -> float:
    """Measures the seconds of a function, or counts its operations."""
    if together or pipe.model.uses_axes:
        # What names axes runs on all devices, each with values like these.
        part = pipe.shard_map(part, P(), P())
    if measure:
        return run_seconds(jax.jit(part, keep_unused=True), *args)
    return _flops(part, args)


def _flops(part: Callable[..., Tree], args: Sequence[Shapes]) -> float:
    program = jax.jit(part).trace(*args)
    flops = _flops_of_xla(program)
    for eqn in jaxprs.with_stated_flops(program.jaxpr.jaxpr):
        # XLA counts one turn of a loop.
        alone = jax.jit(lambda *args, eqn=eqn: jaxprs.bind(eqn, args))
        counted = _flops_of_xla(alone.trace(*jaxprs.shapes_of_variables(eqn.invars)))
        flops += (jaxprs.stated_flops(eqn.primitive, eqn.params) or 0.0) - counted
    return max(flops, 1.0)  # a layer without parameters has no W


def _flops_of_xla(program: jax.stages.Traced) -> float:
    analysis = program.lower().cost_analysis()
    assert analysis is not None  # every backend of jax has one
    return analysis.get("flops", 0.0)


def run_seconds(program: jax.stages.Wrapped, *args: Shapes) -> float:
    """Measures the seconds of a run of a jitted function, which must keep arguments that it does
    not read, on zeros of these shapes."""
    compiled = program.lower(*args).compile()
    given, _ = compiled.input_shardings
    arrays = jax.tree.map(_zeros, args)
    arrays = jax.tree.map(jax.device_put, arrays, given)
    jax.block_until_ready(compiled(*arrays))
    best = float("inf")
    for _ in range(_GROUPS):
        began = time.perf_counter()
        for _ in range(_QUEUED):
            last = compiled(*arrays)
        jax.block_until_ready(last)
        best = min(best, time.perf_counter() - began)
    return best / _QUEUED


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(leaf.shape, leaf.dtype)
