"""Derives F, B and W from any layer function.

``layer(params, x, *context) -> y`` is traced once through `jax.vjp`, which gives two programs: the
forward (output and residuals) and the backward (residuals and cotangent to dx and dparams). Both
are flattened (``jit`` and ``checkpoint`` equations inlined), then cut:

- residuals that do not depend on x (parameters, casts of them, what is made of the context alone,
  such as dropout masks) are recomputed where they are used; the others are saved, once each;
- B is what dx needs, W is the rest of what dparams needs, and what W reads of B's values *crosses*.

Weights are therefore never residuals, which is what lets a backward use newer weights than its
forward. This is the only module that looks inside jaxprs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpipe.runtime.types import Activation, LayerParams, States, Tree
from jaxpipe.schedule.problems import Problem, refuse

REMAT_POLICIES: dict[str, Any] = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Rematerialisation by name: keep every residual; keep the outputs of weight matmuls and recompute
the rest; keep only the layer's input and recompute the layer."""

_INLINED = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "remat"}


@dataclasses.dataclass(frozen=True)
class Split:
    """F, B and W of one layer, and the shapes of what travels between them.

    Attributes:
      forward: ``(params, x, *context) -> (y, saved_until_b, saved_until_w)``; with a state,
        ``(params, x, *context, state=state) -> ((y, state), saved_until_b, saved_until_w)``.
      backward_input: ``(params, saved_until_b, saved_until_w, dy, *context) -> (dx, crossing)``.
      backward_weights: ``(params, saved_until_w, crossing, *context) -> dparams``.
      backward_fused: ``(params, saved_until_b, saved_until_w, dy, *context) -> (dx, dparams)``.
      until_b: shapes of the residuals that only B reads.
      until_w: shapes of the residuals that W reads (B may read them too).
      crossing: shapes of what B computes and W reads.
      reads_state: whether y or a residual depends on the state; False if only the new state does.
    """

    forward: Callable[..., Any]
    backward_input: Callable[..., Any]
    backward_weights: Callable[..., Any]
    backward_fused: Callable[..., Any]
    until_b: tuple[jax.ShapeDtypeStruct, ...]
    until_w: tuple[jax.ShapeDtypeStruct, ...]
    crossing: tuple[jax.ShapeDtypeStruct, ...]
    reads_state: bool


def split_layer(
    layer: Callable[..., Any],
    params: LayerParams,
    x: Activation,
    *context: Tree,
    state: States = None,
    remat: str = "none",
) -> Split:
    """Cuts a layer's derivative into F, B and W.

    Args:
      layer: ``layer(params, x, *context) -> y``, or with a state ``layer(params, x, *context,
        state) -> (y, state)``.
      params: one layer's parameters, arrays or shapes.
      x: the layer's input, a tree of arrays or shapes; y may be another tree.
      *context: what F, B and W all read and nobody differentiates (the microbatch's rows, a key):
        trees of arrays or shapes, or None.
      state: what the layer reads and renews in F, such as running statistics; None if it has none.
      remat: a name in `REMAT_POLICIES`; a layer that uses `jax.checkpoint` itself composes with it.

    Returns:
      The split.

    Raises:
      ValueError: an unknown policy.

    Example:
      >>> split = split_layer(lambda w, x: jnp.tanh(x @ w), jnp.ones((4, 4)), jnp.ones((2, 4)))
      >>> [leaf.shape for leaf in split.crossing]  # the gradient at the matmul's output
      [(2, 4)]
    """
    refuse(unknown_remat(remat))
    return _cut(_trace(layer, params, x, context, state, REMAT_POLICIES[remat]))


def unknown_remat(remat: str) -> Iterator[Problem]:
    """Says that a name is not in `REMAT_POLICIES`."""
    if remat not in REMAT_POLICIES:
        rule = f"is not a policy; choose one of {', '.join(REMAT_POLICIES)}"
        yield Problem("remat", remat, rule)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Flat forward and backward programs, and how their inputs and outputs are laid out.

    The forward maps the leaves of (params, context, x, state) to those of (y, state, residuals),
    the backward those of (residuals, dy) to those of (dx, dparams).
    """

    forward: core.ClosedJaxpr
    backward: core.ClosedJaxpr
    num_known: int  # leaves of params and context: there at F, B and W alike
    num_x: int
    params: Any
    x: Any
    y: Any  # with the new state, if there is one


def _trace(layer, params, x, context, state, policy) -> _Traced:
    def run(params, context, x, state):
        def of_params_and_x(params, x):
            if state is None:
                return layer(params, x, *context), None
            return layer(params, x, *context, state)

        if policy is not None:
            of_params_and_x = jax.checkpoint(of_params_and_x, policy=policy)
        return jax.vjp(of_params_and_x, params, x, has_aux=True)

    structure = []

    def forward(*args):
        y, vjp, new_state = run(*args)
        leaves, tree = jax.tree.flatten(vjp)
        structure.append(tree)
        return (y if state is None else (y, new_state)), leaves

    args = (params, context, x, state)
    forward_jaxpr = _flatten(jax.make_jaxpr(forward)(*args))
    outputs, residuals = jax.eval_shape(forward, *args)
    dy = outputs if state is None else outputs[0]

    def backward(residuals, dy):
        dparams, dx = jax.tree.unflatten(structure[0], residuals)(dy)
        return dx, dparams

    return _Traced(
        forward=forward_jaxpr,
        backward=_flatten(jax.make_jaxpr(backward)(residuals, dy)),
        num_known=len(jax.tree.leaves((params, context))),
        num_x=len(jax.tree.leaves(x)),
        params=jax.tree.structure(params),
        x=jax.tree.structure(x),
        y=jax.tree.structure(outputs),
    )


def _cut(traced: _Traced) -> Split:
    """Partitions the two flat programs into F, B, W and names what is kept between them."""
    forward, backward = traced.forward, traced.backward
    known_vars = forward.jaxpr.invars[: traced.num_known]
    own_vars = forward.jaxpr.invars[traced.num_known :]  # x, then the state
    num_outputs = traced.y.num_leaves
    y_vars = forward.jaxpr.outvars[:num_outputs]
    residual_vars = forward.jaxpr.outvars[num_outputs:]
    bw_inputs = backward.jaxpr.invars[: len(residual_vars)]
    dy_vars = backward.jaxpr.invars[len(residual_vars) :]
    dx_vars = backward.jaxpr.outvars[: traced.num_x]
    dparam_vars = backward.jaxpr.outvars[traced.num_x :]

    from_x = _reachable(forward.jaxpr.eqns, set(own_vars))
    # Backward input -> the forward value it stands for.
    source = dict(zip(bw_inputs, residual_vars, strict=True))

    b_eqns = _needed(backward.jaxpr.eqns, dx_vars)
    in_b = {id(eqn) for eqn in b_eqns}
    # W repeats what B makes of parameters and context alone (casts, masks) rather than keep it.
    kept_inputs = {v for v in bw_inputs if _is_var(source[v]) and source[v] in from_x}
    from_kept = _reachable(backward.jaxpr.eqns, kept_inputs | set(dy_vars))
    w_eqns = [
        eqn
        for eqn in _needed(backward.jaxpr.eqns, dparam_vars)
        if id(eqn) not in in_b or from_kept.isdisjoint(eqn.outvars)
    ]
    read_by_b = _reads(b_eqns, dx_vars)
    read_by_w = _reads(w_eqns, dparam_vars)

    def saved(read: set) -> list:
        """The forward values behind ``read`` that must be kept, once each, in a fixed order."""
        kept = (source[v] for v in bw_inputs if v in read)
        return list(dict.fromkeys(r for r in kept if _is_var(r) and r in from_x))

    until_w = saved(read_by_w)
    until_b = [v for v in saved(read_by_b) if v not in until_w]
    made_by_b = {v for eqn in b_eqns for v in eqn.outvars} | set(dy_vars)
    crossing = sorted(read_by_w & made_by_b & from_kept, key=_order(backward.jaxpr))
    state_vars = own_vars[traced.num_x :]
    from_state = _reachable(forward.jaxpr.eqns, set(state_vars))
    passed_on = [*y_vars[: num_outputs - len(state_vars)], *until_b, *until_w]

    def known(params, context) -> dict:
        return dict(zip(known_vars, jax.tree.leaves((params, context)), strict=True))

    def residual_env(read: set, params, context, kept: dict) -> dict:
        """Values of the backward's inputs: kept, or recomputed from parameters and context."""
        wanted = [v for v in bw_inputs if v in read]
        recomputed = [source[v] for v in wanted if _is_var(source[v]) and source[v] not in kept]
        env = _consts(forward) | known(params, context)
        env = _run(_needed(forward.jaxpr.eqns, recomputed), env) | kept
        return {v: _value(source[v], env) for v in wanted}

    def forward_fn(params, x, *context, state=None):
        own = dict(zip(own_vars, jax.tree.leaves((x, state)), strict=True))
        env = _consts(forward) | known(params, context) | own
        env = _run(_needed(forward.jaxpr.eqns, [*y_vars, *until_b, *until_w]), env)
        y = jax.tree.unflatten(traced.y, [_value(v, env) for v in y_vars])
        return y, [env[v] for v in until_b], [env[v] for v in until_w]

    def run_b(params, saved_until_b, saved_until_w, dy, context, read) -> dict:
        kept = dict(zip([*until_b, *until_w], [*saved_until_b, *saved_until_w], strict=True))
        env = _consts(backward) | dict(zip(dy_vars, jax.tree.leaves(dy), strict=True))
        return _run(b_eqns, env | residual_env(read, params, context, kept))

    def dx(env: dict):
        return jax.tree.unflatten(traced.x, [_value(v, env) for v in dx_vars])

    def dparams(env: dict):
        return jax.tree.unflatten(traced.params, [_value(v, env) for v in dparam_vars])

    def backward_input(params, saved_until_b, saved_until_w, dy, *context):
        env = run_b(params, saved_until_b, saved_until_w, dy, context, read_by_b)
        return dx(env), [env[v] for v in crossing]

    def backward_weights(params, saved_until_w, crossed, *context):
        kept = dict(zip(until_w, saved_until_w, strict=True))
        env = _consts(backward) | dict(zip(crossing, crossed, strict=True))
        env |= residual_env(read_by_w, params, context, kept)
        return dparams(_run(w_eqns, env))

    def backward_fused(params, saved_until_b, saved_until_w, dy, *context):
        env = run_b(params, saved_until_b, saved_until_w, dy, context, read_by_b | read_by_w)
        env = _run(w_eqns, env)
        return dx(env), dparams(env)

    return Split(
        forward=forward_fn,
        backward_input=backward_input,
        backward_weights=backward_weights,
        backward_fused=backward_fused,
        until_b=_shapes(until_b),
        until_w=_shapes(until_w),
        crossing=_shapes(crossing),
        reads_state=any(_is_var(v) and v in from_state for v in passed_on),
    )


def _flatten(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same program with calls inlined, as one list of equations."""

    def run(*args):
        return _inline(closed.jaxpr, closed.consts, args)

    return jax.make_jaxpr(run)(*[_shape(v) for v in closed.jaxpr.invars])


def _inline(jaxpr, consts, args) -> list:
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [_value(v, env) for v in eqn.invars]
        if eqn.primitive.name in _INLINED:
            inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
            closed = isinstance(inner, core.ClosedJaxpr)
            outs = (
                _inline(inner.jaxpr, inner.consts, values) if closed else _inline(inner, (), values)
            )
        else:
            outs = _bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_value(v, env) for v in jaxpr.outvars]


def _run(eqns: Sequence, env: dict) -> dict:
    """Evaluates equations in order; returns the environment grown by their outputs."""
    env = dict(env)
    for eqn in eqns:
        env.update(zip(eqn.outvars, _bind(eqn, [_value(v, env) for v in eqn.invars]), strict=True))
    return env


def _bind(eqn, values: list) -> list:
    outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _is_var(atom) -> bool:
    return not isinstance(atom, core.Literal)


def _value(atom, env: dict):
    return env[atom] if _is_var(atom) else jnp.asarray(atom.val, atom.aval.dtype)


def _consts(closed: core.ClosedJaxpr) -> dict:
    return dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def _reachable(eqns: Sequence, start: set) -> set:
    """Variables that depend on any of ``start``."""
    reached = set(start)
    for eqn in eqns:
        if any(_is_var(v) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return reached


def _needed(eqns: Sequence, outputs: Iterable) -> list:
    """The equations that ``outputs`` depend on, in program order."""
    wanted = {v for v in outputs if _is_var(v)}
    kept = []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            kept.append(eqn)
            wanted.update(v for v in eqn.invars if _is_var(v))
    return kept[::-1]


def _reads(eqns: Sequence, outputs: Iterable) -> set:
    """Variables read by the equations or returned, whoever made them."""
    reads = {v for eqn in eqns for v in eqn.invars if _is_var(v)}
    return reads | {v for v in outputs if _is_var(v)}


def _order(jaxpr) -> Callable[[Any], int]:
    """Sort key: the place in the program where a variable is made."""
    made = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    position = {v: i for i, v in enumerate(made)}
    return position.__getitem__


def _shape(var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _shapes(variables: Sequence) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(_shape(v) for v in variables)
