"""Derives F, B and W from any layer function.

``layer(params, x, rng) -> y`` is traced once through `jax.vjp`, which gives two programs: the
forward (output and residuals) and the backward (residuals and cotangent to dx and dparams). Both
are flattened (``jit`` and ``checkpoint`` equations inlined), then cut:

- residuals that do not depend on x (parameters, casts of them, dropout masks made from the key
  alone) are recomputed where they are used; the others are saved, once each;
- B is what dx needs, W is the rest of what dparams needs, and what W reads of B's values *crosses*.

Weights are therefore never residuals, which is what lets a backward use newer weights than its
forward. This is the only module that looks inside jaxprs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

PyTree = Any

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
      forward: ``(params, x, rng) -> (y, saved_until_b, saved_until_w)``.
      backward_input: ``(params, saved_until_b, saved_until_w, dy, rng) -> (dx, crossing)``.
      backward_weights: ``(params, saved_until_w, crossing, rng) -> dparams``.
      backward_fused: ``(params, saved_until_b, saved_until_w, dy, rng) -> (dx, dparams)``.
      until_b: shapes of the residuals that only B reads.
      until_w: shapes of the residuals that W reads (B may read them too).
      crossing: shapes of what B computes and W reads.
    """

    forward: Callable[..., Any]
    backward_input: Callable[..., Any]
    backward_weights: Callable[..., Any]
    backward_fused: Callable[..., Any]
    until_b: tuple[jax.ShapeDtypeStruct, ...]
    until_w: tuple[jax.ShapeDtypeStruct, ...]
    crossing: tuple[jax.ShapeDtypeStruct, ...]


def split_layer(
    layer: Callable[..., jax.Array], params: PyTree, x: Any, rng: Any = None, *, remat: str = "none"
) -> Split:
    """Cuts a layer's derivative into F, B and W.

    Args:
      layer: ``layer(params, x, rng) -> y``, y like x.
      params: one layer's parameters, arrays or shapes.
      x: the layer's input, array or shape.
      rng: a key, the shape of one, or None.
      remat: a name in `REMAT_POLICIES`; a layer that uses `jax.checkpoint` itself composes with it.

    Returns:
      The split.

    Raises:
      ValueError: an unknown policy, or a layer whose output differs from its input in shape or
        dtype.

    Example:
      >>> split = split_layer(lambda w, x, rng: jnp.tanh(x @ w), jnp.ones((4, 4)), jnp.ones((2, 4)))
      >>> [leaf.shape for leaf in split.crossing]  # the gradient at the matmul's output
      [(2, 4)]
    """
    if remat not in REMAT_POLICIES:
        raise ValueError(
            f"remat={remat!r} is not a policy; choose one of {', '.join(REMAT_POLICIES)}."
        )
    y = jax.eval_shape(layer, params, x, rng)
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"The layer maps x {x.dtype}{list(x.shape)} to {y.dtype}{list(y.shape)}; its output "
            "must have the shape and dtype of its input, because it is the next layer's input."
        )
    traced = _trace(layer, params, x, rng, REMAT_POLICIES[remat])
    return _cut(*traced)


def _trace(layer, params, x, rng, policy):
    """Flat forward and backward programs, and how their inputs and outputs are laid out."""

    def run(params, x, rng):
        def of_params_and_x(params, x):
            return layer(params, x, rng)

        if policy is not None:
            of_params_and_x = jax.checkpoint(of_params_and_x, policy=policy)
        return jax.vjp(of_params_and_x, params, x)

    structure = []

    def forward(params, x, rng):
        y, vjp = run(params, x, rng)
        leaves, tree = jax.tree.flatten(vjp)
        structure.append(tree)
        return y, leaves

    forward_jaxpr = _flatten(jax.make_jaxpr(forward)(params, x, rng))
    residuals = jax.eval_shape(lambda *args: forward(*args)[1], params, x, rng)

    def backward(residuals, dy):
        dparams, dx = jax.tree.unflatten(structure[0], residuals)(dy)
        return dx, jax.tree.leaves(dparams)

    dy = jax.eval_shape(layer, params, x, rng)
    backward_jaxpr = _flatten(jax.make_jaxpr(backward)(residuals, dy))
    return forward_jaxpr, backward_jaxpr, jax.tree.structure(params)


def _cut(forward: core.ClosedJaxpr, backward: core.ClosedJaxpr, params_tree) -> Split:
    """Partitions the two flat programs into F, B, W and names what is kept between them."""
    num_params = params_tree.num_leaves
    inputs = forward.jaxpr.invars
    x_var = inputs[num_params]
    without_x = [v for v in inputs if v is not x_var]
    y_var, *residual_vars = forward.jaxpr.outvars
    *bw_inputs, dy_var = backward.jaxpr.invars
    dx_var, *dparam_vars = backward.jaxpr.outvars

    from_x = _reachable(forward.jaxpr.eqns, {x_var})
    # Backward input -> the forward value it stands for.
    source = dict(zip(bw_inputs, residual_vars, strict=True))

    b_eqns = _needed(backward.jaxpr.eqns, [dx_var])
    in_b = {id(eqn) for eqn in b_eqns}
    # W repeats what B makes of parameters and key alone (casts, dropout masks) rather than keep it.
    kept_inputs = {v for v in bw_inputs if _is_var(source[v]) and source[v] in from_x}
    from_kept = _reachable(backward.jaxpr.eqns, kept_inputs | {dy_var})
    w_eqns = [
        eqn
        for eqn in _needed(backward.jaxpr.eqns, dparam_vars)
        if id(eqn) not in in_b or from_kept.isdisjoint(eqn.outvars)
    ]
    read_by_b = _reads(b_eqns, [dx_var])
    read_by_w = _reads(w_eqns, dparam_vars)

    def saved(read: set) -> list:
        """The forward values behind ``read`` that must be kept, once each, in a fixed order."""
        kept = (source[v] for v in bw_inputs if v in read)
        return list(dict.fromkeys(r for r in kept if _is_var(r) and r in from_x))

    until_w = saved(read_by_w)
    until_b = [v for v in saved(read_by_b) if v not in until_w]
    made_by_b = {v for eqn in b_eqns for v in eqn.outvars} | {dy_var}
    crossing = sorted(read_by_w & made_by_b & from_kept, key=_order(backward.jaxpr))

    def split_inputs(params, rng) -> dict:
        return dict(zip(without_x, [*jax.tree.leaves(params), *jax.tree.leaves(rng)], strict=True))

    def residual_env(read: set, params, rng, kept: dict) -> dict:
        """Values of the backward's inputs: kept, or recomputed from parameters and key."""
        wanted = [v for v in bw_inputs if v in read]
        recomputed = [source[v] for v in wanted if _is_var(source[v]) and source[v] not in kept]
        env = _consts(forward) | split_inputs(params, rng)
        env = _run(_needed(forward.jaxpr.eqns, recomputed), env) | kept
        return {v: _value(source[v], env) for v in wanted}

    def forward_fn(params, x, rng):
        env = _consts(forward) | split_inputs(params, rng) | {x_var: x}
        env = _run(_needed(forward.jaxpr.eqns, [y_var, *until_b, *until_w]), env)
        return _value(y_var, env), [env[v] for v in until_b], [env[v] for v in until_w]

    def kept_env(saved_until_b, saved_until_w) -> dict:
        return dict(zip([*until_b, *until_w], [*saved_until_b, *saved_until_w], strict=True))

    def run_b(params, saved_until_b, saved_until_w, dy, rng, read) -> dict:
        env = _consts(backward) | {dy_var: dy}
        env |= residual_env(read, params, rng, kept_env(saved_until_b, saved_until_w))
        return _run(b_eqns, env)

    def dparams(env: dict):
        return jax.tree.unflatten(params_tree, [_value(v, env) for v in dparam_vars])

    def backward_input(params, saved_until_b, saved_until_w, dy, rng):
        env = run_b(params, saved_until_b, saved_until_w, dy, rng, read_by_b)
        return _value(dx_var, env), [env[v] for v in crossing]

    def backward_weights(params, saved_until_w, crossed, rng):
        kept = dict(zip(until_w, saved_until_w, strict=True))
        env = _consts(backward) | dict(zip(crossing, crossed, strict=True))
        env |= residual_env(read_by_w, params, rng, kept)
        return dparams(_run(w_eqns, env))

    def backward_fused(params, saved_until_b, saved_until_w, dy, rng):
        env = run_b(params, saved_until_b, saved_until_w, dy, rng, read_by_b | read_by_w)
        env = _run(w_eqns, env)
        return _value(dx_var, env), dparams(env)

    return Split(
        forward=forward_fn,
        backward_input=backward_input,
        backward_weights=backward_weights,
        backward_fused=backward_fused,
        until_b=_shapes(until_b),
        until_w=_shapes(until_w),
        crossing=_shapes(crossing),
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
