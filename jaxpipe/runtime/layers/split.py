"""Derives F, B and W from any layer function.

``layer(params, x, *context) -> y`` is traced once through `jax.vjp`, which gives two programs: the
forward (output and residuals) and the backward (residuals and cotangent to dx and dparams). Both
are flattened (``jit`` and ``checkpoint`` equations inlined), then cut:

- residuals that do not depend on x (parameters, casts of them, and what depends on the context
  only, such as dropout masks) are recomputed where they are used; the others are saved, once each;
- B is what dx needs, W is what dparams needs beside it, and values of B that W reads *cross*;
- values that F gathers over devices only for B are kept in parts, and B gathers them again;
- values that B gathers over devices cross in parts, and W gathers them again;
- sums and products that make fewer bytes cross belong to B (the gradient of a norm's scale, the
  input of a matmul);
- buffers of a sequence that slices append to (`jaxpipe.Appended`) are saved by nobody: B and W read
  them where they lie, and what later slices have appended has no influence.

The cotangent of a layer's own loss (`WithLoss`) is the same for every microbatch: a constant of the
backward.

Weights are therefore never residuals, which is what lets a backward use newer weights than its
forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import jax
from jax.extend import core

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Atom, Env, Vars
from jaxpipe.runtime.layers.losses import (
    WithLoss,
    cotangent_of_layer,
    without_metric_gradients,
)
from jaxpipe.runtime.layers.quantized import quantize_matmuls
from jaxpipe.runtime.layers.remat import REMAT_POLICIES, Policy, unknown_remat
from jaxpipe.runtime.trees import combine, divide
from jaxpipe.runtime.types import Activation, Gradients, LayerParams, Shapes, States, Tree
from jaxpipe.schedule.problems import refuse

Values: TypeAlias = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Flat forward and backward programs, and how their inputs and outputs are laid out.

    The forward maps the leaves of (params, context, x, state) to those of (y, loss, state,
    residuals),
    the backward those of (residuals, dy) to those of (dx, dparams).
    """

    forward: core.ClosedJaxpr
    backward: core.ClosedJaxpr
    num_known: int  # leaves of params and context, which F, B and W all have
    num_x: int
    params: Tree
    trained: Tree  # the parameters of which gradients are taken
    x: Tree
    y: Tree  # with the layer's loss and the new state, if there are any
    loss: Shapes  # of the layer's own loss and metrics, or None
    appended: tuple[bool, ...]  # of the last leaves of x and y, whether slices append to them
    collectives: tuple[jaxprs.Collective, ...]

    @cached_property
    def known(self) -> list[Atom]:
        """The inputs of the forward that are parameters and context."""
        return self.forward.jaxpr.invars[: self.num_known]

    @cached_property
    def own(self) -> list[Atom]:
        """The other inputs of the forward: x, then the state."""
        return self.forward.jaxpr.invars[self.num_known :]

    @cached_property
    def outputs(self) -> list[Atom]:
        """The outputs of the forward that are no residuals: y, its loss, the new state."""
        return self.forward.jaxpr.outvars[: self.y.num_leaves]

    @cached_property
    def source(self) -> dict[Atom, Atom]:
        """The forward's value behind each residual that the backward takes."""
        residuals = self.forward.jaxpr.outvars[self.y.num_leaves :]
        return dict(zip(self.backward.jaxpr.invars, residuals, strict=False))

    @cached_property
    def carry(self) -> list[Atom]:
        """The values that a slice hands to the next, each before F and after it."""
        count = len(self.appended)
        before = self.own[: self.num_x][self.num_x - count :]
        after = self.outputs[: len(self.dy)][len(self.dy) - count :]
        return [v for pair in zip(before, after, strict=True) for v in pair]

    @cached_property
    def carry_gradient(self) -> list[Atom]:
        """Their cotangents, before the backward and after it."""
        count = len(self.appended)
        return [*self.dy[len(self.dy) - count :], *self.dx[self.num_x - count :]]

    @cached_property
    def buffers(self) -> list[Atom]:
        """The values of each buffer that slices append to, before F and after it."""
        return [v for n, v in enumerate(self.carry) if self.appended[n // 2]]

    @cached_property
    def dy(self) -> list[Atom]:
        return self.backward.jaxpr.invars[len(self.source) :]

    @cached_property
    def dx(self) -> list[Atom]:
        return self.backward.jaxpr.outvars[: self.num_x]

    @cached_property
    def dparams(self) -> list[Atom]:
        return self.backward.jaxpr.outvars[self.num_x :]


@dataclasses.dataclass(frozen=True)
class Split:
    """F, B and W of one layer.

    Args:
      traced: the programs that are cut.
      b, w: equations of B, and of W alone.
      again: equations of B that W repeats: they gather over devices what crosses in parts.
      read_by_b, read_by_w: variables of the backward that B and W read.
      kept_until_b: the forward's values that only B reads.
      kept_until_w: the forward's values that W reads (B may read them, too).
      crosses: values that B computes and W reads.
      reads_state: whether y or a residual depends on the state; False if only the new state does.
    """

    traced: _Traced
    b: list[Atom]
    w: list[Atom]
    again: list[Atom]
    read_by_b: Vars
    read_by_w: Vars
    kept_until_b: list[Atom]
    kept_until_w: list[Atom]
    crosses: list[Atom]
    reads_state: bool

    @property
    def loss(self) -> Shapes:
        """Shapes of the layer's own loss and metrics; None if it has none."""
        return self.traced.loss

    @property
    def params(self) -> Shapes:
        """Shapes of the parameters that F, B and W take."""
        tree = self.traced.params
        shapes = jaxprs.shapes_of_variables(self.traced.known[: tree.num_leaves])
        return jax.tree.unflatten(tree, shapes)

    @property
    def reads_of_context(self) -> list[int]:
        """Numbers of the context's leaves that the layer reads."""
        context = self.traced.known[self.traced.params.num_leaves :]
        eqns = jaxprs.needed(self.traced.forward.jaxpr.eqns, self.traced.outputs)
        read = jaxprs.reads(eqns, self.traced.outputs)
        return [n for n, var in enumerate(context) if var in read]

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

    def forward(
        self, params: LayerParams, x: Activation, *context: Tree, state: States = None
    ) -> tuple[Activation, Values, Values]:
        """Runs F: returns what the layer returns, and the residuals until B and until W."""
        traced, kept = self.traced, [*self.kept_until_b, *self.kept_until_w]
        env = self._known(params, context)
        env |= dict(zip(traced.own, jax.tree.leaves((x, state)), strict=True))
        env = jaxprs.run_eqns(
            jaxprs.needed(traced.forward.jaxpr.eqns, [*traced.outputs, *kept]), env
        )
        y = jax.tree.unflatten(traced.y, jaxprs.values(traced.outputs, env))
        return y, [env[v] for v in self.kept_until_b], [env[v] for v in self.kept_until_w]

    def backward_input(
        self,
        params: LayerParams,
        until_b: Values,
        until_w: Values,
        dy: Activation,
        *context: Tree,
        buffers: Sequence[jax.Array] = (),
    ) -> tuple[Activation, Values]:
        """Runs B: returns dx, and the values that cross to W.

        ``buffers`` are those that slices append to, as they are now."""
        kept = self._kept(until_b, until_w, buffers)
        env = self._run_b(params, kept, dy, context, self.read_by_b)
        return self._dx(env), [env[v] for v in self.crosses]

    def backward_weights(
        self,
        params: LayerParams,
        until_w: Values,
        crossing: Values,
        *context: Tree,
        buffers: Sequence[jax.Array] = (),
    ) -> Gradients:
        """Runs W: returns dparams."""
        kept = self._kept(None, until_w, buffers)
        env = jaxprs.consts(self.traced.backward) | dict(zip(self.crosses, crossing, strict=True))
        env |= self._residuals(self.read_by_w, params, context, kept)
        return self._dparams(jaxprs.run_eqns([*self.again, *self.w], env))

    def backward_fused(
        self,
        params: LayerParams,
        until_b: Values,
        until_w: Values,
        dy: Activation,
        *context: Tree,
        buffers: Sequence[jax.Array] = (),
    ) -> tuple[Activation, Gradients]:
        """Runs B and W at once: returns dx and dparams."""
        read, kept = self.read_by_b | self.read_by_w, self._kept(until_b, until_w, buffers)
        env = jaxprs.run_eqns(self.w, self._run_b(params, kept, dy, context, read))
        return self._dx(env), self._dparams(env)

    def _kept(self, until_b: Values | None, until_w: Values, buffers: Sequence[jax.Array]) -> Env:
        """Values of the forward that a backward is given."""
        kept = dict(zip(self.kept_until_w, until_w, strict=True))
        if until_b is not None:
            kept |= dict(zip(self.kept_until_b, until_b, strict=True))
        twice = [value for value in buffers for _ in range(2)]
        return kept | dict(zip(self.traced.buffers, twice, strict=True))

    def _run_b(
        self, params: LayerParams, kept: Env, dy: Activation, context: Tree, read: Vars
    ) -> Env:
        env = jaxprs.consts(self.traced.backward)
        env |= dict(zip(self.traced.dy, jax.tree.leaves(dy), strict=True))
        return jaxprs.run_eqns(self.b, env | self._residuals(read, params, context, kept))

    def _residuals(self, read: Vars, params: LayerParams, context: Tree, kept: Env) -> Env:
        """Finds the backward's inputs: kept, or recomputed from parameters and context."""
        source = self.traced.source
        wanted = [v for v in source if v in read]
        behind = [source[v] for v in wanted]
        recomputed = [v for v in behind if jaxprs.is_var(v) and v not in kept]
        eqns = jaxprs.needed(self.traced.forward.jaxpr.eqns, recomputed, kept)
        env = jaxprs.run_eqns(eqns, self._known(params, context) | kept)
        return dict(zip(wanted, jaxprs.values(behind, env), strict=True))

    def _known(self, params: LayerParams, context: Tree) -> Env:
        known = zip(self.traced.known, jax.tree.leaves((params, context)), strict=True)
        return jaxprs.consts(self.traced.forward) | dict(known)

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
    remat: str = "none",
    loss_scale: float = 1.0,
    early: bool = True,
    appended: tuple[bool, ...] = (),
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
      quantized: names of parameters whose matmuls run in 8-bit floats, None for others. F, B and W
        then take a pair, the parameters with these in E4M3, and the list of their scales.
      remat: a name in `REMAT_POLICIES`; a layer that uses `jax.checkpoint` itself composes with it.
      loss_scale: the cotangent of the layer's own loss, if it has one.
      early: whether B also runs equations of W where fewer bytes then cross.
      appended: for the last leaves of x and of y, whether each is a buffer that slices of a
        sequence append to; B and W are given these as they are then.

    Returns:
      The split.

    Raises:
      ValueError: an unknown policy.

    Example:
      >>> import jax.numpy as jnp
      >>> split = split_layer(lambda w, x: jnp.tanh(x @ w), jnp.ones((4, 4)), jnp.ones((2, 4)))
      >>> [leaf.shape for leaf in split.crossing]  # the gradient at the matmul's output
      [(2, 4)]
    """
    refuse(unknown_remat(remat))
    args = params, frozen, x, context, state
    policy = REMAT_POLICIES[remat]
    traced = _trace(layer, *args, policy=policy, loss_scale=loss_scale, appended=appended)
    if any(quantized):
        traced = _with_quantized_matmuls(traced, params, frozen, quantized)
    return _cut(traced, early)


def _trace(
    layer: Callable[..., Tree],
    params: LayerParams,
    frozen: LayerParams,
    x: Activation,
    context: Tree,
    state: States,
    *,
    policy: Policy | None,
    loss_scale: float,
    appended: tuple[bool, ...],
) -> _Traced:
    def differentiate(params: LayerParams, context: Tree, x: Activation, state: States) -> Tree:
        trained, fixed = (params, None) if frozen is None else divide(params, frozen)

        def of_trained_and_x(trained: LayerParams, x: Activation) -> tuple[Activation, States]:
            params = trained if frozen is None else combine(trained, fixed)
            if state is None:
                return without_metric_gradients(layer(params, x, *context)), None
            y, new_state = layer(params, x, *context, state)
            return without_metric_gradients(y), new_state

        if policy is not None:
            of_trained_and_x = jax.checkpoint(of_trained_and_x, policy=policy)
        return jax.vjp(of_trained_and_x, trained, x, has_aux=True)

    structure = []

    def forward(*args: Tree) -> tuple[Activation, Values]:
        y, vjp, new_state = differentiate(*args)
        leaves, tree = jax.tree.flatten(vjp)
        structure.append(tree)
        return (y if state is None else (y, new_state)), leaves

    args = (params, context, x, state)
    forward_jaxpr = jax.make_jaxpr(forward)(*args)
    outputs, residuals = jax.eval_shape(forward, *args)
    y = outputs if state is None else outputs[0]
    dy, loss = (y.x, y.loss) if isinstance(y, WithLoss) else (y, None)

    def backward(residuals: Values, dy: Activation) -> tuple[Activation, Gradients]:
        cotangent = dy
        if loss is not None:
            cotangent = WithLoss(dy, cotangent_of_layer(loss, loss_scale))
        dparams, dx = jax.tree.unflatten(structure[0], residuals)(cotangent)
        return dx, dparams

    backward_jaxpr = jax.make_jaxpr(backward)(residuals, dy)
    both = forward_jaxpr.jaxpr, backward_jaxpr.jaxpr
    return _Traced(
        forward=jaxprs.flatten(forward_jaxpr),
        backward=jaxprs.flatten(backward_jaxpr),
        num_known=len(jax.tree.leaves((params, context))),
        num_x=len(jax.tree.leaves(x)),
        params=jax.tree.structure(params),
        trained=jax.tree.structure(params if frozen is None else divide(params, frozen)[0]),
        x=jax.tree.structure(x),
        y=jax.tree.structure(outputs),
        loss=loss,
        appended=appended,
        collectives=tuple(call for jaxpr in both for call in jaxprs.collectives(jaxpr)),
    )


def _with_quantized_matmuls(
    traced: _Traced, params: LayerParams, frozen: LayerParams, names: Sequence[str | None]
) -> _Traced:
    count = traced.params.num_leaves
    numbers = jax.tree.unflatten(traced.params, range(count))
    trained = jax.tree.leaves(numbers if frozen is None else divide(numbers, frozen)[0])
    forward, backward = quantize_matmuls(
        traced.forward,
        traced.backward,
        [*names, *[None] * (count - len(names))],
        trained,
        num_outputs=traced.y.num_leaves,
        num_x=traced.num_x,
    )
    scales = list(filter(None, names))
    return dataclasses.replace(
        traced,
        forward=forward,
        backward=backward,
        num_known=traced.num_known + len(scales),
        params=jax.tree.structure((params, scales)),
    )


def _cut(traced: _Traced, early: bool) -> Split:
    """Partitions the two flat programs into F, B, W and names what is kept between them."""
    forward, backward, source = traced.forward.jaxpr, traced.backward.jaxpr, traced.source
    from_x = jaxprs.reachable(forward.eqns, set(traced.own), traced.buffers)
    b = jaxprs.needed(backward.eqns, traced.dx)
    in_b = {id(eqn) for eqn in b}
    # W repeats what B makes of parameters and context alone (casts, masks) rather than keep it.
    kept_inputs = {v for v in source if jaxprs.is_var(source[v]) and source[v] in from_x}
    from_kept = jaxprs.reachable(backward.eqns, kept_inputs | set(traced.dy))
    needed = jaxprs.needed(backward.eqns, traced.dparams)
    w = [eqn for eqn in needed if id(eqn) not in in_b or from_kept.isdisjoint(eqn.outvars)]
    made = {v for eqn in b for v in eqn.outvars} | set(traced.dy)
    if early:
        in_b |= _early(w, traced.dparams, made & from_kept, {v: source[v] for v in kept_inputs})
    b = [eqn for eqn in backward.eqns if id(eqn) in in_b]
    w = [eqn for eqn in needed if id(eqn) not in in_b or from_kept.isdisjoint(eqn.outvars)]
    read_by_b, read_by_w = jaxprs.reads(b, traced.dx), jaxprs.reads(w, traced.dparams)
    crossing = read_by_w & from_kept
    again = [eqn for eqn in b if jaxprs.gathers(eqn) and not crossing.isdisjoint(eqn.outvars)]
    read_by_w |= jaxprs.reads(again, ())
    read_by_w -= {v for eqn in again for v in eqn.outvars}

    def saved(read: Vars) -> list[Atom]:
        """Lists the forward's values behind ``read`` that must be kept, in a fixed order."""
        kept = (source[v] for v in source if v in read)
        return list(dict.fromkeys(r for r in kept if jaxprs.is_var(r) and r in from_x))

    until_w = saved(read_by_w)
    until_b = [v for v in saved(read_by_b) if v not in until_w]
    until_b = [w for v in until_b for w in jaxprs.gathered_parts(forward.eqns, v, from_x)]
    until_b = [v for v in dict.fromkeys(until_b) if v not in until_w]
    made_by_b = {v for eqn in b for v in eqn.outvars} | set(traced.dy)
    crosses = sorted(read_by_w & made_by_b & from_kept, key=jaxprs.order(backward))
    state = traced.own[traced.num_x :]
    from_state = jaxprs.reachable(forward.eqns, set(state))
    passed_on = [*traced.outputs[: len(traced.outputs) - len(state)], *until_b, *until_w]
    reads_state = any(jaxprs.is_var(v) and v in from_state for v in passed_on)
    return Split(traced, b, w, again, read_by_b, read_by_w, until_b, until_w, crosses, reads_state)


def _early(w: list[Atom], dparams: list[Atom], made: Vars, kept: dict[Atom, Atom]) -> set[int]:
    """Chooses equations of W, by id, that B should run because W then has less to read.

    Matmuls stay in W. Values that cross are written and read, values kept since F are only read.

    Args:
      w: the equations, in order.
      dparams: their results.
      made: values that B computes from those that are kept.
      kept: kept inputs of the backward, and the forward's values behind them.
    """

    def moved_bytes(early: set[int]) -> int:
        read = jaxprs.reads([eqn for eqn in w if id(eqn) not in early], dparams)
        crosses = made.union(*(eqn.outvars for eqn in w if id(eqn) in early))
        old = {source for v, source in kept.items() if v in read}
        return 2 * jaxprs.bytes_of(read & crosses) + jaxprs.bytes_of(old)

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
