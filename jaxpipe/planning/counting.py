"""Counts what a model's layers compute, move and keep, from the traces that a pipeline runs.

Nothing is compiled, and no device of the cluster is needed: a pipeline of one stage is traced on as
many simulated devices as share a layer, at one number of rows. Its prime divides no dimension of
the model, so a dimension that it divides grows with the rows; others that grow, such as a number of
places that is rounded up, are found by tracing the forward of a layer at fewer rows.

Matmuls, convolutions, attention, gathers and the like are kernels of their own, which read their
operands and write their results. What is element by element is fused: only what such a kernel, a
reduction or the program's caller reads is written, by a kernel that reads the parts of values that
it is made from. One kernel writes several such results of equal shape if they read the same value.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import or_
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxpipe.planning.sizes import (
    Kernel,
    LayerSizes,
    Linear,
    ModelSizes,
    Pass,
    SizedCollective,
    Sizes,
    Variant,
)
from jaxpipe.planning.without_devices import attention_of_gpus
from jaxpipe.runtime import tracing
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Atom, Eqn, Eqns, Vars
from jaxpipe.runtime.layers.kinds import LayerKind, Layers
from jaxpipe.runtime.layers.losses import differentiated
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layers.quantized import BLOCK_MATMUL
from jaxpipe.runtime.layers.split import REMAT_POLICIES, Split, rematerialized
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.memory import tree_bytes
from jaxpipe.runtime.mesh import make_mesh
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.microbatches import StepMicrobatches
from jaxpipe.runtime.tick.prepare import layers_of
from jaxpipe.runtime.trees import combine, form_of, shapes_of
from jaxpipe.runtime.types import Activation, Batch, Key, Leaves, Shapes, States
from jaxpipe.schedule import catalog

EXPERT = "expert"
"""The axis of data shards that split experts."""
_PRIMES = 251, 257, 263, 269, 271, 277, 281, 283, 293
_TIMES = 4
"""Rows of a microbatch that is traced, in primes."""
_ROWS = 2, 4
"""Rows at which a trace is counted; more than one, so that nothing would be simplified away."""

_RENAMES = {
    *("reshape", "squeeze", "expand_dims", "convert_element_type", "copy", "bitcast"),
    *("stop_gradient", "reduce_precision"),
}
_CUTS = {"slice", "split", "dynamic_slice"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"}
_FREE = {"optimization_barrier", "iota", "broadcast_in_dim", "axis_index", "create_token"}
_HEAVY = {
    *("dot_general", "conv_general_dilated", "ragged_dot_general", "gather", "scatter"),
    *("scatter-add", "scatter_add", "sort", "top_k", "cumsum", "dynamic_update_slice"),
    *("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper", "while", "scan"),
    *("cond", "custom_call", "pure_callback", "reduce_window_sum", "select_and_scatter_add"),
}
_COLLECTIVES: Mapping[str, Callable[[int], float]] = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax"), lambda group: 2 * (group - 1) / group),
    **dict.fromkeys(("reduce_scatter", "psum_scatter"), lambda group: (group - 1) / group),
    "all_gather": lambda group: group - 1,
    "all_to_all": lambda group: (group - 1) / group,
    "ppermute": lambda group: 1,
}
"""How many times its operands a device sends within a group, by primitive."""
_ATTENTION_MATMULS = {
    **dict.fromkeys(("dot_product_attention_fwd_wrapper", "jaxpipe.attention"), 2),
    **dict.fromkeys(("dot_product_attention_bwd_wrapper", "jaxpipe.attention_gradients"), 5),
}
"""Matmuls of fused attention (Dao et al. 2022, algorithms 1 and 4), by name; the composites also
state their FLOPs."""


def sizes(
    pipe: Pipeline,
    batch: Callable[[int], Batch],
    rng: Key = None,
    *,
    compute_bytes: int,
    document_share: float = 1.0,
    remats: Sequence[str],
) -> dict[str, Sizes]:
    """Counts a model on the devices that share its layers, for each policy of rematerialization.

    Args:
      pipe: of one stage, and one data shard or those of an expert axis; its microbatches do not
        matter. With the policy "none", layers are traced once for all policies.
      batch: the shapes of a batch with so many rows.
      rng: as for `Pipeline.value_and_grad`, or its shape.
      compute_bytes: of a weight where layers read it.
      document_share: how long the document of a token is on average, as a share of a row; tokens
        see no others. Attention has at most this share of the FLOPs of a causal sequence.
      remats: the policies, in place of the pipeline's.
    """
    experts = pipe.mesh.shape.get(EXPERT, 1)
    if pipe.axes.num_shards(pipe.mesh) != experts or pipe.schedule.num_stages != 1:
        raise ValueError("a model is counted on one stage and one data shard")
    times = pipe.schedule.num_microbatches * experts
    shapes = [leaf.shape for leaf in jax.tree.leaves((pipe.placed_params, batch(1)))]
    prime = next(p for p in _PRIMES if all(n % p for shape in shapes for n in shape))
    batch, given = batch(_TIMES * prime * times), (compute_bytes, document_share)
    few, many = _counted(pipe, batch, rng, remats, prime, *given)
    return jax.tree.map(_line, few, many, is_leaf=lambda value: isinstance(value, Linear))


def model_sizes(
    model: Model,
    params: Shapes,
    batch: Batch,
    optimizer: optax.GradientTransformation,
    *,
    states: States = None,
    rng: Key = None,
    compute_dtype: DTypeLike | None = None,
    name: str = "model",
    tokens_per_row: int = 1,
) -> ModelSizes:
    """Counts a model for ``jaxpipe plan --sizes``, which then plans on stages and data shards.

    Args:
      model, params, states: as for `jaxpipe.Pipeline`; they may be shapes.
      batch: a batch of the size of a step, or its shapes.
      rng: a key, if the model draws random numbers.
      compute_dtype: as for `jaxpipe.Pipeline`.
      name: what the plans call it.
      tokens_per_row: by which the printed time and cost are divided.

    Example:
      >>> sizes = model_sizes(model, params, batch, optax.adam(1e-3))  # doctest: +SKIP
      >>> Path("sizes.json").write_text(sizes.to_json())  # doctest: +SKIP
    """
    params, batch, states, rng = shapes_of((params, batch, states, rng))
    leaves, rows = jax.tree.leaves(params), jax.tree.leaves(batch)
    with attention_of_gpus(compute_capability="8.0"):
        pipe = Pipeline(
            *(model.in_pairs(), params),
            schedule=catalog.build("1f1b", stages=1, microbatches=1),
            mesh=make_mesh(stage=1, devices=jax.devices()[:1]),
            states=states,
            compute_dtype=compute_dtype,
            remat="none",
        )

        def of_rows(count: int) -> Batch:
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), batch
            )

        itemsize = max(leaf.dtype.itemsize for leaf in leaves)
        compute_bytes = itemsize if compute_dtype is None else jnp.dtype(compute_dtype).itemsize
        found = sizes(pipe, of_rows, rng, compute_bytes=compute_bytes, remats=tuple(REMAT_POLICIES))
    layers, kind_of = pipe.layout.layers, next(iter(found.values())).kind_of
    firsts = [layers.shape_of(kind_of.index(kind)) for kind in {*kind_of}]
    return ModelSizes(
        name=name,
        tokens_per_row=tokens_per_row,
        parameter_bytes=itemsize,
        compute_bytes=compute_bytes,
        moments=num_moments(optimizer, params),
        batch_rows=rows[0].shape[0],
        row_bytes=sum(tree_bytes(leaf) for leaf in rows) // rows[0].shape[0],
        variants={Variant(1, 1, remat): of_remat for remat, of_remat in found.items()},
        update_flops=update_flops(optimizer, firsts),
    )


def num_moments(optimizer: optax.GradientTransformation, params: Shapes) -> int:
    """Counts the numbers that an optimizer keeps for each parameter: two for Adam."""
    state = jax.eval_shape(optimizer.init, params)
    kept, own = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state, params))
    return round(kept / own)


def update_flops(
    optimizer: optax.GradientTransformation, layers: Iterable[Shapes]
) -> tuple[float, ...]:
    """Counts the FLOPs of an optimizer's matmuls in the update of a layer, by equation: of the
    layer with the most, if they differ."""

    def of_layer(layer: Shapes) -> tuple[float, ...]:
        params = {"layers": (layer,)}
        state = jax.eval_shape(optimizer.init, params)
        traced = jaxprs.flatten(jax.make_jaxpr(optimizer.update)(params, state, params))
        return tuple(filter(None, map(_flops, traced.jaxpr.eqns)))

    return max(map(of_layer, {form_of(layer): layer for layer in layers}.values()), key=sum)


def _line(few: object, many: Linear) -> object:
    """Makes the line through the counts at two numbers of rows; the rest is the same at both."""
    if not isinstance(few, Linear):
        return few
    slope = (many.fixed - few.fixed) / (_ROWS[1] - _ROWS[0])
    return Linear(few.fixed - slope * _ROWS[0], slope)


class Rows(NamedTuple):
    """Rows for which a trace with ``_TIMES`` times a prime of them is counted.

    Args:
      others: dimensions that grow, but are not divided by the prime, and each with fewest rows.
    """

    prime: int
    rows: int
    others: Mapping[int, int] = MappingProxyType({})

    def elements(self, shape: Sequence[int]) -> float:
        """Counts the elements of a traced array if there were so many rows."""
        whole, least = _TIMES * self.prime, _ROWS[0]
        few = (self.others.get(n, n) if n % self.prime else n * least / whole for n in shape)
        more = self.rows - least, whole - least
        return math.prod(k + (n - k) * more[0] / more[1] for n, k in zip(shape, few, strict=True))

    def tree_bytes(self, shapes: Shapes) -> float:
        leaves = jax.tree.leaves(shapes)
        return sum(self.elements(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _number(value: float) -> Linear:
    """Makes the line of a count whose growth is not known yet."""
    return Linear(float(value), 0.0)


def _others(kind: LayerKind, prime: int) -> Iterator[tuple[int, int]]:
    """Yields the dimensions that grow in the forward of a layer, but that the prime does not
    divide, and each with fewest rows."""
    fewest = Rows(prime, _ROWS[0])

    def fewer(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct([round(fewest.elements([n])) for n in leaf.shape], leaf.dtype)

    arguments = kind.args, jax.tree.map(fewer, kind.args)
    traces = [jaxprs.flatten(jax.make_jaxpr(kind.function)(*args)).eqns for args in arguments]
    ranks = [[[v.aval.ndim for v in eqn.outvars] for eqn in eqns] for eqns in traces]
    if ranks[0] != ranks[1]:
        few, many = _ROWS[0], _TIMES * prime
        raise ValueError(
            f"Layer {kind.example} runs other equations for {few} rows than for {many}, so that "
            "its sizes cannot be extended to others: let them not depend on the number of rows."
        )
    for eqns in zip(*traces, strict=True):
        for variables in zip(*(eqn.outvars for eqn in eqns), strict=True):
            pairs = zip(*(v.aval.shape for v in variables), strict=True)
            yield from ((n, few) for n, few in pairs if few < n and n % prime)


def _counted(
    pipe: Pipeline,
    batch: Batch,
    rng: Key,
    remats: Sequence[str],
    prime: int,
    compute_bytes: int,
    document_share: float,
) -> list[dict[str, Sizes]]:
    """Counts a model for each of ``_ROWS``, by policy."""
    axes = dict(pipe.mesh.shape)

    def read(fixed: Fixed, batch: StepMicrobatches) -> list[dict[str, Sizes]]:
        setup, layouts = fixed.setup, fixed.setup.layouts
        trained, *frozen = (jax.tree.map(Leaf.struct, one.outer) for one in layouts)
        outer = combine(trained, *frozen) if frozen else trained
        split = dict(jax.tree.leaves_with_path(pipe.model.stage_split))
        elements = {path: leaf.size for path, leaf in jax.tree.leaves_with_path(outer)}
        head = _head(fixed, batch, trained, frozen)
        context = jax.eval_shape(lambda: fixed.context(batch, 0, 0))

        def layers_under(remat: str) -> Layers:
            options = dataclasses.replace(setup.options, remat=remat)
            if options == setup.options:
                return fixed.layers
            layers = fixed.layers
            if setup.options.remat == "none" and not setup.quantizes:
                cut = (rematerialized(k.split, remat, early=setup.early) for k in layers.kinds)
                pairs = zip(layers.kinds, cut, strict=True)
                kinds = [dataclasses.replace(kind, split=s) for kind, s in pairs if s is not None]
                if len(kinds) == len(layers.kinds):
                    return dataclasses.replace(layers, kinds=tuple(kinds))
            return layers_of(dataclasses.replace(setup, options=options), outer, *context)

        def counted(layers: Layers, rows: Rows) -> Sizes:
            of_head = head(axes, rows)
            return Sizes(
                layers=tuple(
                    _layer(
                        *(kind, [one.layers.canonical_of(kind.example) for one in layouts], axes),
                        *(rows, compute_bytes, document_share),
                    )
                    for kind in layers.kinds
                ),
                kind_of=layers.kind_of,
                message=_number(max(map(rows.tree_bytes, layers.activations))),
                merged=_number(rows.tree_bytes(layers.merged)),
                outer_parameters=sum(elements.values()),
                outer_split=sum(size for path, size in elements.items() if path in split),
                outer_frozen=sum(leaf.size for leaf in jax.tree.leaves(frozen)),
                head=of_head.work,
                head_live=_number(of_head.live),
            )

        others = dict(pair for kind in fixed.layers.kinds for pair in _others(kind, prime))
        layers = {remat: layers_under(remat) for remat in remats}
        numbers = (Rows(prime, rows, others) for rows in _ROWS)
        return [{remat: counted(layers[remat], rows) for remat in remats} for rows in numbers]

    return tracing.in_trace(pipe, batch, rng, read)


def _head(
    fixed: Fixed,
    batch: StepMicrobatches,
    outer: Shapes,
    frozen: Sequence[Shapes],
) -> Callable[[Mapping[str, int], Rows], Counted]:
    """Traces the head; returns what counts it."""
    x = fixed.layers.merged

    def head(outer: Shapes, x: Activation, frozen: Sequence[Shapes]) -> tuple[jax.Array, Shapes]:
        def loss(outer: Shapes, x: Activation) -> jax.Array:
            whole = combine(outer, *frozen) if frozen else outer
            return differentiated(fixed.head(whole, x, *fixed.head_context(batch, 0)))

        value, vjp = jax.vjp(loss, outer, x)
        return value, vjp(jax.numpy.ones_like(value))

    program = jaxprs.flatten(jax.make_jaxpr(head)(outer, x, frozen)).jaxpr
    first, count_x = len(jax.tree.leaves(outer)), len(jax.tree.leaves(x))
    arrived = program.invars[first : first + count_x]  # from the last stage
    return lambda axes, rows: count(program.eqns, program.outvars, axes, rows, slots=arrived)


def _layer(
    kind: LayerKind,
    own: Sequence[Leaves],
    axes: Mapping[str, int],
    rows: Rows,
    compute_bytes: int,
    document_share: float,
) -> LayerSizes:
    split, leaves, frozen = kind.split, jax.tree.leaves(own), jax.tree.leaves(own[1:])
    (f, b, w), live = _passes(split, axes, rows, compute_bytes, document_share)
    read = split.traced.known[: split.traced.params.num_leaves]
    quantized = [v.aval for v in read if _itemsize(v) == 1]
    return LayerSizes(
        f=f.work,
        b=b.work,
        w=w.work,
        parameters=sum(math.prod(leaf.shape) for leaf in leaves),
        until_b=_number(rows.tree_bytes(split.until_b)),
        until_w=_number(rows.tree_bytes(split.until_w)),
        crossing=_number(rows.tree_bytes(split.crossing)),
        live=_number(max(live, f.live, b.live, w.live)),
        shapes=tuple(leaf.shape for leaf in leaves if EXPERT not in leaf.apart),
        expert_shapes=tuple(leaf.shape for leaf in leaves if EXPERT in leaf.apart),
        quantized=sum(math.prod(weight.shape) for weight in quantized),
        carry=_number(0 if kind.carry is None else rows.tree_bytes(kind.carry.shapes)),
        frozen=sum(math.prod(leaf.shape) for leaf in frozen),
        rounded=sum(math.prod(leaf.shape) for leaf in frozen if leaf.dtype.itemsize == 1),
    )


def _passes(
    split: Split,
    axes: Mapping[str, int],
    rows: Rows,
    compute_bytes: int,
    document_share: float,
) -> tuple[list[Counted], float]:
    """Counts F, B and W of a layer, and the most bytes at once of both backwards as one."""
    traced = split.traced
    kept = [*split.kept_until_b, *split.kept_until_w]
    own = traced.known[: traced.params.num_leaves]
    weights = {v: min(compute_bytes, _itemsize(v)) for v in own}
    returned = [*traced.outputs, *kept]
    crosses = set(split.crosses)
    carry, carry_gradient = set(traced.carry), set(traced.carry_gradient)
    # What the backward reads of the forward: residuals and buffers from slots, or weights.
    in_slots = {*kept, *traced.buffers}
    from_slots = carry_gradient.union(v for v in traced.residuals if v in in_slots)
    of_weights = {
        v: min(compute_bytes, _itemsize(v)) for v in traced.residuals if v not in in_slots
    }
    dx, dparams = traced.dx, [v for v in traced.dparams if jaxprs.is_var(v)]
    programs: list[tuple[Eqns, Sequence[Atom], Vars, Mapping[Atom, int]]] = [
        (jaxprs.needed(traced.forward, returned), returned, carry.union(kept), weights),
        (split.b, [*dx, *split.crosses], from_slots | crosses, of_weights),
        ([*split.again, *split.w], dparams, from_slots | crosses, of_weights),
    ]
    whole = _Program([*split.b, *split.w], [*dx, *dparams], of_weights, rows)
    counted = [
        count(
            *(eqns, outputs, axes, rows),
            slots=slots,
            crosses=crosses,
            stored=dparams,
            weights=own,
            document_share=document_share,
        )
        for eqns, outputs, slots, own in programs
    ]
    return counted, whole.live_bytes(from_slots, dparams)


# Kernels of traced equations.


class Counted(NamedTuple):
    """Work of equations for one number of rows, and the most bytes that exist at once of what is
    cut out of slots and what kernels make."""

    work: Pass
    live: float


def count(
    eqns: Eqns,
    outputs: Iterable[Atom],
    axes: Mapping[str, int],
    rows: Rows,
    *,
    slots: Collection[Atom] = (),
    crosses: Collection[Atom] = (),
    stored: Collection[Atom] = (),
    weights: Mapping[Atom, int] = MappingProxyType({}),
    document_share: float = 1.0,
) -> Counted:
    """Counts flat equations.

    Args:
      slots: variables that are read from slots, or, among the outputs, written to them.
      crosses: those of them that go from B to W.
      stored: outputs that are added to what lies elsewhere, such as gradients.
      weights: variables that are weights, with the bytes of an element of the copy that is read.
    """
    program = _Program(eqns, outputs, weights, rows)
    kept = {program.origin(v) for v in program.outputs if v in slots}
    crossed = set(map(program.origin, crosses))
    kernels = program.fusions()
    collectives: list[SizedCollective] = []
    values = crossing = 0.0
    for eqn in eqns:
        if eqn.primitive.name in _COLLECTIVES:
            collectives += _collective(eqn, axes, rows)
        elif id(eqn) not in program.fused:
            read, written = list(map(program.origin, _inputs(eqn))), eqn.outvars
            moved = sum(map(program.bytes, [*read, *written]))
            if eqn.primitive.name == "dynamic_update_slice":  # in place
                moved = 2 * program.bytes(eqn.invars[1])
            flops = _flops(eqn, rows.elements)
            name = str(eqn.params.get("name", eqn.primitive.name))
            if attends := name in _ATTENTION_MATMULS:
                queries, keys = (v.aval.shape for v in eqn.invars[:2])
                causal = _ATTENTION_MATMULS[name] * rows.elements(queries) * keys[1]
                flops = flops if document_share == 1 else min(flops, document_share * causal)
            narrow = all(_itemsize(v) == 1 for v in eqn.invars)
            matmul = "mxfp8" if name == BLOCK_MATMUL else "fp8" if narrow else "matmul"
            kind = "attention" if attends else matmul if flops else "other"
            kernels.append(Kernel(_number(flops), _number(moved), kind))
            # A kernel that is not fused reads a copy that is cut out of the slot, and its results
            # are copied into one.
            copies = {v for v in read if v in slots} | kept.intersection(written)
            values += 2 * sum(map(program.bytes, copies - crossed))
            crossing += 2 * sum(map(program.bytes, copies & crossed))
    work = Pass(tuple(kernels), _number(values), tuple(collectives), _number(crossing))
    return Counted(work, program.live_bytes(slots, stored))


class _Program:
    """Variables that exist in memory, and what each is made from."""

    def __init__(
        self, eqns: Eqns, outputs: Iterable[Atom], weights: Mapping[Atom, int], rows: Rows
    ) -> None:
        self.eqns, self.outputs = eqns, [v for v in outputs if jaxprs.is_var(v)]
        self.rows = rows
        self.maker = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.weights, self.casts = weights, dict[tuple[Atom, object], Atom]()
        self.fused = {id(eqn) for eqn in eqns if _fuses(eqn)}
        wanted = list(self.outputs)
        for eqn in eqns:
            if id(eqn) not in self.fused:
                wanted += _inputs(eqn)
            if eqn.primitive.name in _REDUCTIONS and _inputs(eqn):
                wanted += eqn.outvars
        makers = ((v, self.maker.get(v)) for v in map(self.origin, wanted))
        self.materialised = {
            v
            for v, eqn in makers
            if eqn is not None and id(eqn) in self.fused and eqn.primitive.name not in _FREE
        }

    def origin(self, v: Atom) -> Atom:
        """Finds the variable that this one renames; for a weight in another dtype, the weight."""
        while (eqn := self.maker.get(v)) is not None:
            name = eqn.primitive.name
            if name not in _RENAMES or not jaxprs.is_var(eqn.invars[0]):
                return v
            source = eqn.invars[0]
            if name == "convert_element_type" and self.origin(source) not in self.weights:
                # Equal casts are one.
                return self.casts.setdefault((self.origin(source), v.aval.dtype), v)
            v = source
        return v

    def bytes(self, v: Atom, cut: Atom | None = None) -> float:
        """Counts the bytes of a variable, or of a part of it as large as another one."""
        shape = v.aval.shape if cut is None else cut.aval.shape
        return self.rows.elements(shape) * self.weights.get(v, _itemsize(v))

    def fusions(self) -> list[Kernel]:
        """Makes the kernels that write what is element by element: no FLOPs of matmuls, and their
        bytes. Results of one shape share a kernel if they read the same value of this shape, and
        none is made from another."""
        bits = {v: 1 << n for n, v in enumerate(self.materialised)}
        made_from, groups = dict[Atom, int](), list[tuple[list[Atom], dict[Atom, float]]]()
        for eqn in self.eqns:
            before = functools.reduce(or_, (made_from.get(v, 0) for v in _inputs(eqn)), 0)
            for v in eqn.outvars:
                made_from[v] = before | bits.get(v, 0)
                if v not in bits:
                    continue
                read, shape = dict(self.reads[v]), v.aval.shape
                alike = {w for w in read if w.aval.shape == shape}
                for group, already in groups:
                    together = alike.intersection(already) and shape == group[0].aval.shape
                    if together and not any(before & bits[w] for w in group):
                        group.append(v)
                        already |= read
                        break
                else:
                    groups.append(([v], read))
        sizes = (sum(map(self.bytes, group)) + sum(read.values()) for group, read in groups)
        return [Kernel(_number(0.0), _number(size)) for size in sizes]

    @functools.cached_property
    def reads(self) -> dict[Atom, dict[Atom, float]]:
        """The `_in_memory` of each variable that is written element by element."""
        made = ((v, eqn) for eqn in self.eqns for v in eqn.outvars if v in self.materialised)
        return {v: self._in_memory(eqn, v) for v, eqn in made}

    def _in_memory(self, kernel: Eqn, result: Atom | None = None) -> dict[Atom, float]:
        """Counts the bytes in memory that an equation, or one of its results, is computed from,
        through what is fused into it, by variable: where parts are cut out, only these."""
        read, seen = dict[Atom, float](), set[tuple[Atom, Atom | None]]()
        cut = result if kernel.primitive.name in _CUTS else None
        operands = [(v, cut) for v in _inputs(kernel)]
        while operands:
            v, cut = operands.pop()
            v = self.origin(v)
            if (v, cut) in seen:
                continue
            seen.add((v, cut))
            eqn = self.maker.get(v)
            if eqn is None or id(eqn) not in self.fused or v in self.materialised:
                read[v] = min(self.bytes(v), read.get(v, 0.0) + self.bytes(v, cut))
            else:
                cut = v if eqn.primitive.name in _CUTS else cut
                operands += [(w, cut) for w in _inputs(eqn)]
        return read

    def live_bytes(self, slots: Collection[Atom], stored: Collection[Atom]) -> float:
        """The most bytes at once of what is cut out of slots and what kernels make, in their order.

        A value exists until it is last read, or to the end if it is returned, but for those that
        are ``stored`` elsewhere.
        """
        kernels: list[tuple[list[Atom], Vars]] = []
        for eqn in self.eqns:
            if id(eqn) not in self.fused:
                kernels.append((eqn.outvars, {*self._in_memory(eqn)}))
                continue
            made = [v for v in eqn.outvars if v in self.materialised]
            kernels += [([v], {*self.reads[v]}) for v in made]
        read = set[Atom]().union(*(read for _, read in kernels))
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


def _fuses(eqn: Eqn) -> bool:
    name = eqn.primitive.name
    return not (name in _HEAVY or name in _COLLECTIVES or jaxprs.multiplies(eqn))


def _inputs(eqn: Eqn) -> list[Atom]:
    return [v for v in eqn.invars if jaxprs.is_var(v)]


def _itemsize(v: Atom) -> int:
    dtype = v.aval.dtype
    return getattr(dtype, "itemsize", 8)  # a key has none on some versions of jax


def _flops(eqn: Eqn, elements: Callable[[Sequence[int]], float] = math.prod) -> float:
    """Multiplications and additions of a matmul, a convolution or an attention."""
    if (stated := jaxprs.stated_flops(eqn.primitive, eqn.params)) is not None:
        shapes = [v.aval.shape for v in (*_inputs(eqn), *eqn.outvars) if v.aval.size]
        return stated * min(elements(shape) / math.prod(shape) for shape in shapes)
    name, out = eqn.primitive.name, elements(eqn.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * out * elements([shape[dim] for dim in contracted])
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        features = kernel[numbers.rhs_spec[0]]
        return 2.0 * out * elements(kernel) / features
    if name in _ATTENTION_MATMULS:
        query, key = (v.aval.shape for v in eqn.invars[:2])
        causal = "CAUSAL" in str(eqn.params.get("mask_type", ""))
        whole = 2.0 * _ATTENTION_MATMULS[name] * elements(query) * key[1]
        return whole / 2 if causal else whole
    if name == "scan":
        inner = eqn.params["jaxpr"].jaxpr.eqns
        return elements([eqn.params["length"]]) * sum(_flops(one, elements) for one in inner)
    if name == "cond":
        branches = (branch.jaxpr.eqns for branch in eqn.params["branches"])
        return max(sum(_flops(one, elements) for one in branch) for branch in branches)
    return 0.0


def _collective(eqn: Eqn, axes: Mapping[str, int], rows: Rows) -> list[SizedCollective]:
    """Counts what a device sends of its operands; nothing over axes of one device."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = names if isinstance(names, tuple) else (names,)
    group = math.prod(axes.get(str(name), 1) for name in names)
    if group == 1:
        return []
    own = sum(rows.elements(v.aval.shape) * _itemsize(v) for v in _inputs(eqn))
    kind = eqn.primitive.name
    return [
        SizedCollective("+".join(map(str, names)), kind, _number(_COLLECTIVES[kind](group) * own))
    ]
