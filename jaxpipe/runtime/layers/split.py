"""Derives F, B and W from any layer function.

``layer(params, x, *context) -> y`` is traced through `jax.vjp` together with its backward, as one
program, and flattened (``jit`` and ``checkpoint`` equations inlined). What the output and the
residuals need is the forward, the rest is the backward. Then these are cut:

- residuals that do not depend on x (parameters, casts of them, and what depends on the context
  only, such as dropout masks) are recomputed where they are used; the others are saved, once each;
- what B alone reads is made again where arithmetic makes it of others that are kept;
- B is what dx needs, W is what dparams needs beside it, and values of B that W reads *cross*;
- values that F gathers over devices only for B are kept in parts, and B gathers them again;
- values that B gathers over devices cross in parts, and W gathers them again;
- sums and products that make fewer bytes cross belong to B (the gradient of a norm's scale, the
  input of a matmul);
- leaves of x that depend on nothing that is trained, as in front of a frozen encoder, have no
  gradient: dx has zeros for them, and what only they need is neither run nor saved;
- buffers of a sequence that slices append to (`jaxpipe.Appended`) are saved by nobody: B and W read
  them where they lie, and what later slices have appended has no influence.

The cotangent of a layer's own loss (`WithLoss`) is the same for every microbatch: a constant of the
backward.

Weights are therefore never residuals, which is what lets a backward use newer weights than its
forward.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TypeAlias

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import Primitive

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Atom, Env, Eqns, Vars
from jaxpipe.runtime.layers.losses import (
    WithLoss,
    cotangent_of_layer,
    without_metric_gradients,
)
from jaxpipe.runtime.layers.quantized import quantize_matmuls
from jaxpipe.runtime.trees import combine, divide
from jaxpipe.runtime.types import Activation, Gradients, LayerParams, Shapes, States, Tree

Values: TypeAlias = list[jax.Array]

Policy: TypeAlias = Callable[..., bool]
"""A policy of `jax.checkpoint`: whether a primitive's results are kept."""
_COMMUNICATES = ("psum", "reduce_scatter", "all_to_all")
"""Primitives that would communicate again if they were repeated, and whose results are no larger
than their operands."""

_CONTROL_FLOW = ("scan", "while", "cond")

_FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"
"""cuDNN's kernel in `jax.nn.dot_product_attention`; its result is as large as one operand."""


def _dots(primitive: Primitive, *args: Tree, **params: Tree) -> bool:
    """Keeps the outputs of weight matmuls, or their sum where devices sum them up, of fused
    attention, and the values that devices exchange. Composites that state their FLOPs are kept as
    well."""
    kept = *_COMMUNICATES, _FUSED_ATTENTION
    if primitive.name in kept or jaxprs.stated_flops(primitive, params) is not None:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


REMAT_POLICIES: dict[str, Policy | None] = {
    "none": None,
    "dots": _dots,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Rematerialization by name: keep every residual; keep the outputs of weight matmuls and of fused
attention, and recompute the rest; keep only the layer's input and recompute the layer."""


def chosen_remat(remat: str, platform: str) -> str:
    """The policy that a name stands for on a platform: see `jaxpipe.Pipeline`."""
    if remat != "auto":
        return remat
    return "dots" if platform == "gpu" else "none"


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Equations of a layer's forward and backward, the latter in values of the former.

    Args:
      known: inputs that F, B and W all have: parameters and context.
      own: the other inputs of the forward: x, then the state.
      outputs: y, its loss, the new state.
      residuals: the forward's values that the backward takes.
      dy: the cotangent of y.
      dx, dparams: what the backward returns.
      params, trained, x, y: structures of the parameters, of those that have gradients, of x, and
        of y with its loss and the new state.
      loss: shapes of the layer's own loss and metrics, or None.
      appended: for the last leaves of x and y, whether slices append to them.
      flows: for every leaf of x, whether it has a gradient.
      collectives: those of both.
    """

    forward: Eqns
    backward: Eqns
    consts: Env
    known: list[Atom]
    own: list[Atom]
    outputs: list[Atom]
    residuals: list[Atom]
    dy: list[Atom]
    dx: list[Atom]
    dparams: list[Atom]
    params: Tree
    trained: Tree
    x: Tree
    y: Tree
    loss: Shapes
    appended: tuple[bool, ...]
    flows: tuple[bool, ...]
    collectives: list[jaxprs.Collective]

    @property
    def carry(self) -> list[Atom]:
        """The values that a slice hands to the next, each before F and after it."""
        count = len(self.appended)
        before = self.own[: len(self.dx)][len(self.dx) - count :]
        after = self.outputs[: len(self.dy)][len(self.dy) - count :]
        return [v for pair in zip(before, after, strict=True) for v in pair]

    @property
    def carry_gradient(self) -> list[Atom]:
        """Their cotangents, before the backward and after it."""
        count = len(self.appended)
        return [*self.dy[len(self.dy) - count :], *self.dx[len(self.dx) - count :]]

    @cached_property
    def buffers(self) -> list[Atom]:
        """The values of each buffer that slices append to, before F and after it."""
        return [v for n, v in enumerate(self.carry) if self.appended[n // 2]]


def _traced_once(method: Callable[..., Tree]) -> cached_property[Callable[..., Tree]]:
    """Makes of a method a function that is traced once for equal shapes, and lowered once, however
    many layers of a program call it."""
    return cached_property(lambda split: jax.jit(partial(method, split)))


@dataclasses.dataclass(frozen=True)
class Split:
    """F, B and W of one layer.

    Args:
      b, w: equations of B, and of W alone.
      again: equations of B that W repeats: they gather over devices what crosses in parts.
      kept_until_b: the forward's values that only B reads.
      kept_until_w: the forward's values that W reads (B may read them, too).
      crosses: values that B computes and W reads.
      reads_state: whether y or a residual depends on the state; False if only the new state does.
    """

    traced: _Traced
    b: Eqns
    w: Eqns
    again: Eqns
    kept_until_b: list[Atom]
    kept_until_w: list[Atom]
    crosses: list[Atom]
    reads_state: bool

    @property
    def params(self) -> Shapes:
        """Shapes of the parameters that F, B and W take."""
        tree = self.traced.params
        shapes = jaxprs.shapes_of_variables(self.traced.known[: tree.num_leaves])
        return jax.tree.unflatten(tree, shapes)

    @property
    def reads(self) -> list[bool]:
        """Whether the layer reads each leaf of what F, B and W take as parameters, and of the
        context."""
        eqns = jaxprs.needed(self.traced.forward, self.traced.outputs)
        read = jaxprs.reads(eqns, self.traced.outputs)
        return [var in read for var in self.traced.known]

    @property
    def reads_of_context(self) -> list[int]:
        """Numbers of the context's leaves that the layer reads."""
        context = self.reads[self.traced.params.num_leaves :]
        return [n for n, is_read in enumerate(context) if is_read]

    @property
    def hands_back(self) -> bool:
        """Whether the backward does nothing: the layer trains no parameter, and what has a gradient
        passes it unchanged."""
        dx, dy = self.traced.dx, self.traced.dy
        if self.traced.dparams or jaxprs.shapes_of_variables(dx) != jaxprs.shapes_of_variables(dy):
            return False
        return all(v is w for v, w, f in zip(dx, dy, self.traced.flows, strict=True) if f)

    @property
    def until_b(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the residuals that only B reads."""
        return jaxprs.shapes_of_variables(self.kept_until_b)

    @property
    def until_w(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the residuals that W reads."""
        return jaxprs.shapes_of_variables(self.kept_until_w)

    @property
    def crossing(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the values that go from B to W."""
        return jaxprs.shapes_of_variables(self.crosses)

    @_traced_once
    def forward(
        self, params: LayerParams, x: Activation, *context: Tree, state: States = None
    ) -> tuple[Activation, Values, Values]:
        """Runs F: returns what the layer returns, and the residuals until B and until W."""
        traced, kept = self.traced, [*self.kept_until_b, *self.kept_until_w]
        env = self._known(params, context)
        env |= dict(zip(traced.own, jax.tree.leaves((x, state)), strict=True))
        eqns = jaxprs.needed(traced.forward, [*traced.outputs, *kept], calls=True)
        env = jaxprs.run_eqns(eqns, env)
        y = jax.tree.unflatten(traced.y, jaxprs.values(traced.outputs, env))
        return y, [env[v] for v in self.kept_until_b], [env[v] for v in self.kept_until_w]

    @_traced_once
    def backward_input(
        self, params: LayerParams, until_b: Values, until_w: Values, dy: Activation, *context: Tree
    ) -> tuple[Activation, Values]:
        """Runs B: returns dx, and the values that cross to W.

        In a backward, ``until_w`` also has the buffers that slices append to, as they are now."""
        given = self._known(params, context) | self._kept(until_w) | self._of_b(until_b, dy)
        env = self._run(self.b, self.traced.dx, given)
        return self._dx(env), [env[v] for v in self.crosses]

    @_traced_once
    def backward_weights(
        self, params: LayerParams, until_w: Values, crossing: Values, *context: Tree
    ) -> Gradients:
        """Runs W: returns dparams."""
        given = self._known(params, context) | self._kept(until_w)
        given |= dict(zip(self.crosses, crossing, strict=True))
        return self._dparams(self._run([*self.again, *self.w], self.traced.dparams, given))

    @_traced_once
    def backward_fused(
        self, params: LayerParams, until_b: Values, until_w: Values, dy: Activation, *context: Tree
    ) -> tuple[Activation, Gradients]:
        """Runs B and W at once: returns dx and dparams."""
        given = self._known(params, context) | self._kept(until_w) | self._of_b(until_b, dy)
        results = [*self.traced.dx, *self.traced.dparams]
        env = self._run([*self.b, *self.w], results, given)
        return self._dx(env), self._dparams(env)

    def _known(self, params: LayerParams, context: Tree) -> Env:
        known = zip(self.traced.known, jax.tree.leaves((params, context)), strict=True)
        return self.traced.consts | dict(known)

    def _kept(self, until_w: Values) -> Env:
        """Values of the forward that W is given; a buffer is the same before F and after it."""
        count = len(self.kept_until_w)
        buffers = [value for value in until_w[count:] for _ in range(2)]
        kept = [*self.kept_until_w, *self.traced.buffers]
        return dict(zip(kept, [*until_w[:count], *buffers], strict=True))

    def _of_b(self, until_b: Values, dy: Activation) -> Env:
        """Values that only B is given."""
        values = [*until_b, *jax.tree.leaves(dy)]
        return dict(zip([*self.kept_until_b, *self.traced.dy], values, strict=True))

    def _run(self, eqns: Eqns, results: list[Atom], given: Env) -> Env:
        """Runs equations of the backward, after those of the forward that they need again."""
        read = jaxprs.reads(eqns, results)
        again = jaxprs.needed(self.traced.forward, read, given)
        return jaxprs.run_eqns([*again, *eqns], given)

    def _dx(self, env: Env) -> Activation:
        return jax.tree.unflatten(self.traced.x, jaxprs.values(self.traced.dx, env))

    def _dparams(self, env: Env) -> Gradients:
        return jax.tree.unflatten(self.traced.trained, jaxprs.values(self.traced.dparams, env))


def split_layer(
    layer: Callable[..., Tree],
    params: LayerParams,
    x: Activation,
    *context: Tree,
    frozen: LayerParams = None,
    state: States = None,
    quantized: Sequence[str | None] = (),
    fp8_recipe: str = "tensorwise",
    remat: str = "none",
    loss_scale: float = 1.0,
    appended: tuple[bool, ...] = (),
    flows: tuple[bool, ...] | None = None,
    early: bool = True,
) -> Split:
    """Cuts a layer's derivative into F, B and W.

    Args:
      layer: ``layer(params, x, *context) -> y``, or with a state ``layer(params, x, *context,
        state) -> (y, state)``; y may be `WithLoss`.
      params: one layer's parameters, arrays or shapes.
      x: the layer's input, a tree of arrays or shapes; y may be another tree.
      *context: what F, B and W all read and what is not differentiated (the microbatch's rows, a
        key): trees of arrays or shapes, or None.
      frozen: the parameters of which no gradient is taken, with None in place of the others; they
        may be integers. None if all are trained.
      state: what the layer reads and renews in F, such as running statistics; None if it has none.
      quantized: names of parameters whose matmuls run in 8-bit floats, None for others.
      fp8_recipe: how they are scaled. With "tensorwise", F, B and W take a pair, the parameters
        with these in E4M3, and the list of their scales; with "mxfp8", the parameters as they are.
      remat: a name in `REMAT_POLICIES`; a layer that uses `jax.checkpoint` itself composes with it.
      loss_scale: the cotangent of the layer's own loss, if it has one.
      appended: for the last leaves of x and of y, whether each is a buffer that slices of a
        sequence append to; B and W are given these as they are then.
      flows: for every leaf of x, whether it has a gradient; None if all have.
      early: whether B also runs equations of W where fewer bytes then cross, and of F where fewer
        are then kept.

    Example:
      >>> import jax.numpy as jnp
      >>> split = split_layer(lambda w, x: jnp.tanh(x @ w), jnp.ones((4, 4)), jnp.ones((2, 4)))
      >>> [leaf.shape for leaf in split.crossing]  # the gradient at the matmul's output
      [(2, 4)]
    """
    if frozen is None:
        frozen = jax.tree.map(lambda _: None, params)
    flows = flows or (True,) * len(jax.tree.leaves(x))
    given = params, frozen, x, context, state, flows
    policy = REMAT_POLICIES[remat]
    traced, outputs, dy = _differentiate(layer, *given, policy=policy, loss_scale=loss_scale)
    program, structure = jaxprs.flatten(traced), jax.tree.structure(params)
    trained = divide(params, frozen)[0]
    num_params, num_trained, num_known, num_x, num_outputs, num_dy = (
        len(jax.tree.leaves(tree)) for tree in (params, trained, (params, context), x, outputs, dy)
    )
    if chosen := list(filter(None, quantized)):
        numbers = jax.tree.unflatten(structure, range(num_params))
        program = quantize_matmuls(
            program,
            [*quantized, *[None] * (num_params - len(quantized))],
            jax.tree.leaves(divide(numbers, frozen)[0]),
            num_outputs=num_outputs,
            num_x=num_x,
            num_dy=num_dy,
            recipe=fp8_recipe,
        )
        if fp8_recipe == "tensorwise":
            structure, num_known = jax.tree.structure((params, chosen)), num_known + len(chosen)
    inputs, results = program.jaxpr.invars, program.jaxpr.outvars
    own, gradients = len(inputs) - num_dy, len(results) - num_x - num_trained
    forward, backward = jaxprs.divided(program.jaxpr.eqns, results[:gradients], set(inputs[own:]))
    backward = jaxprs.narrowed(backward, results[gradients:])
    y = outputs if state is None else outputs[0]
    return _cut(
        _Traced(
            forward=forward,
            backward=backward,
            consts=jaxprs.consts(program),
            known=inputs[:num_known],
            own=inputs[num_known:own],
            outputs=results[:num_outputs],
            residuals=list(dict.fromkeys(filter(jaxprs.is_var, results[num_outputs:gradients]))),
            dy=inputs[own:],
            dx=results[gradients : gradients + num_x],
            dparams=results[gradients + num_x :],
            params=structure,
            trained=jax.tree.structure(trained),
            x=jax.tree.structure(x),
            y=jax.tree.structure(outputs),
            loss=y.loss if isinstance(y, WithLoss) else None,
            appended=appended,
            flows=flows,
            collectives=list(jaxprs.collectives(traced.jaxpr)),
        ),
        early=early,
    )


def _differentiate(
    layer: Callable[..., Tree],
    params: LayerParams,
    frozen: LayerParams,
    x: Activation,
    context: Tree,
    state: States,
    flows: tuple[bool, ...],
    *,
    policy: Policy | None,
    loss_scale: float,
) -> tuple[core.ClosedJaxpr, Shapes, Shapes]:
    """Traces a layer's forward and backward as one program.

    Returns:
      The program, from (params, context, x, state, dy) to (what the layer returns, residuals, dx,
      dparams); and the shapes of what the layer returns, and of dy.
    """

    def forward(params: LayerParams, context: Tree, x: Activation, state: States) -> Tree:
        trained, fixed = divide(params, frozen)

        def of_trained_and_x(trained: LayerParams, x: Activation) -> tuple[Activation, States]:
            args = combine(trained, fixed), x, *context
            y, new_state = (layer(*args), None) if state is None else layer(*args, state)
            return without_metric_gradients(y), new_state

        if policy is not None:
            of_trained_and_x = jax.checkpoint(of_trained_and_x, policy=policy)

        def of_what_flows(trained: LayerParams, x: Activation) -> tuple[Activation, States]:
            leaves, tree = jax.tree.flatten(x)
            kept = [w if f else lax.stop_gradient(w) for w, f in zip(leaves, flows, strict=True)]
            return of_trained_and_x(trained, jax.tree.unflatten(tree, kept))

        y, vjp, new_state = jax.vjp(of_what_flows, trained, x, has_aux=True)
        return (y if state is None else (y, new_state)), vjp

    args = params, context, x, state
    outputs = jax.eval_shape(layer, params, x, *context, *([] if state is None else [state]))
    y = outputs if state is None else outputs[0]
    dy, loss = (y.x, y.loss) if isinstance(y, WithLoss) else (y, None)

    def program(*args: Tree) -> Tree:
        *given, dy = args
        returned, vjp = forward(*given)
        if loss is not None:
            dy = WithLoss(dy, cotangent_of_layer(loss, loss_scale))
        dparams, dx = vjp(dy)
        return returned, jax.tree.leaves(vjp), dx, dparams

    return jax.make_jaxpr(program)(*args, dy), outputs, dy


def _cut(traced: _Traced, *, early: bool) -> Split:
    """Partitions the equations into F, B, W and names what is kept between them."""
    forward, backward = traced.forward, traced.backward
    from_x = jaxprs.reachable(forward, set(traced.own), traced.buffers)
    b = jaxprs.needed(backward, traced.dx)
    in_b = {id(eqn) for eqn in b}
    # W repeats what B makes of parameters and context alone (casts, masks) rather than keep it.
    kept_inputs = from_x.intersection(traced.residuals)
    from_kept = jaxprs.reachable(backward, kept_inputs | set(traced.dy))
    needed = jaxprs.needed(backward, traced.dparams)
    w = [eqn for eqn in needed if id(eqn) not in in_b or from_kept.isdisjoint(eqn.outvars)]
    made = {v for eqn in b for v in eqn.outvars} | set(traced.dy)
    operands = jaxprs.reads(w, traced.dparams)
    if early:
        in_b |= _early(w, traced.dparams, made & from_kept, kept_inputs)
    b = [eqn for eqn in backward if id(eqn) in in_b]
    w = [eqn for eqn in needed if id(eqn) not in in_b or from_kept.isdisjoint(eqn.outvars)]
    read_by_b, read_by_w = jaxprs.reads(b, traced.dx), jaxprs.reads(w, traced.dparams)
    made_by_b = {v for eqn in b for v in eqn.outvars} | set(traced.dy)
    crossing = read_by_w & from_kept & made_by_b
    again = [eqn for eqn in b if jaxprs.gathers(eqn) and not crossing.isdisjoint(eqn.outvars)]
    read_by_w |= jaxprs.reads(again, ())
    read_by_w -= {v for eqn in again for v in eqn.outvars}

    def saved(read: Vars) -> list[Atom]:
        """Lists the residuals that must be kept, in a fixed order."""
        return [v for v in traced.residuals if v in read and v in from_x]

    until_w = saved(read_by_w)
    until_b = [v for v in saved(read_by_b) if v not in until_w]
    until_b = [w for v in until_b for w in jaxprs.gathered_parts(forward, v, from_x)]
    until_b = [v for v in dict.fromkeys(until_b) if v not in until_w]
    if early:
        # What W would read stays, so that both kinds of backward keep equally much.
        given = {*traced.consts, *traced.known, *until_b, *until_w}
        remade = jaxprs.remade(forward, set(until_b) - operands, given)
        until_b = [v for v in until_b if v not in remade]
    order = [*traced.dy, *(v for eqn in backward for v in eqn.outvars)]
    crosses = [v for v in order if v in read_by_w & made_by_b & from_kept]
    state = traced.own[traced.x.num_leaves :]
    from_state = jaxprs.reachable(forward, set(state))
    passed_on = [*traced.outputs[: len(traced.outputs) - len(state)], *until_b, *until_w]
    reads_state = any(jaxprs.is_var(v) and v in from_state for v in passed_on)
    return Split(traced, b, w, again, until_b, until_w, crosses, reads_state)


def rematerialized(split: Split, remat: str, *, early: bool) -> Split | None:
    """Cuts a layer under another policy without tracing it again.

    The backward then makes values of the forward again, up to those that the policy keeps.

    Args:
      split: of a layer with the policy "none" and no matmuls in 8 bits.
      remat, early: as for `split_layer`.

    Returns:
      What `split_layer` returns with this policy; None if the layer has loops or branches, which
      return other values under another policy.
    """
    traced, policy = split.traced, REMAT_POLICIES[remat]
    if policy is None:
        return split
    if any(eqn.primitive.name in _CONTROL_FLOW for eqn in traced.forward):
        return None
    kept = {
        v
        for eqn in traced.forward
        if policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
        for v in eqn.outvars
    }
    again = jaxprs.needed(traced.forward, traced.residuals, kept)
    gradients = [*traced.dx, *traced.dparams]
    backward, gradients = jaxprs.copied(again, traced.backward, gradients)
    backward = jaxprs.narrowed(backward, gradients)
    read = jaxprs.reads(backward, gradients)
    given = [*traced.consts, *traced.known, *traced.own]
    made = (v for eqn in traced.forward for v in eqn.outvars)
    used = jaxprs.reads(jaxprs.needed(traced.forward, traced.outputs), ())
    return _cut(
        dataclasses.replace(
            traced,
            forward=jaxprs.rounded(traced.forward, kept & read & used),
            backward=backward,
            residuals=[v for v in (*given, *made) if v in read],
            dx=gradients[: len(traced.dx)],
            dparams=gradients[len(traced.dx) :],
        ),
        early=early,
    )


def _early(w: Eqns, dparams: list[Atom], made: Vars, kept: Vars) -> set[int]:
    """Chooses equations of W, by id, that B should run because W then has less to read.

    Matmuls stay in W. Values that cross are written and read, values kept since F are only read.

    Args:
      made: values that B computes from those that are kept.
      kept: values of the forward that are kept.
    """

    def moved_bytes(early: set[int]) -> int:
        read = jaxprs.reads([eqn for eqn in w if id(eqn) not in early], dparams)
        crosses = made.union(*(eqn.outvars for eqn in w if id(eqn) in early))
        return 2 * jaxprs.bytes_of(read & crosses) + jaxprs.bytes_of(read & kept)

    chains = [jaxprs.needed(w, eqn.outvars) for eqn in w]
    cheap = [set(map(id, chain)) for chain in chains if not any(map(jaxprs.multiplies, chain))]
    early: set[int] = set()
    best, before = moved_bytes(early), None
    # Repeated, since moving a chain may only pay once no other chain reads its value in W.
    while best != before:
        before = best
        for chain in cheap:
            longer = early | chain
            if longer != early and (moved := moved_bytes(longer)) < best:
                early, best = longer, moved
    return early
