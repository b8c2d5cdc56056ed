"""Evaluates equations on parts of arrays: nothing is gathered that an equation can do without.

An equation that treats every element by itself runs on parts; a reduction to a scalar runs on parts
and then across devices. Any other equation is given whole arrays, which are gathered where it first
needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Atom, Env, Eqn, Eqns
from jaxpipe.runtime.layout.parts import Cut, DevicePart, communicate
from jaxpipe.runtime.types import Tree

_ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "asin", "acos", "atan", "atan2", "cbrt", "ceil", "clamp"),
    *("convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf", "erf_inv", "exp", "exp2"),
    *("expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p"),
    *("logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real"),
    *("reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt"),
    *("square", "stop_gradient", "sub", "tan", "tanh", "xor"),
}

_REDUCTIONS: dict[str, tuple[Any, Any, Any]] = {
    "reduce_sum": (lambda part: jnp.sum(part, dtype=part.dtype), lax.psum, 0),
    "reduce_max": (jnp.max, lax.pmax, -jnp.inf),
    "reduce_min": (jnp.min, lax.pmin, jnp.inf),
    "reduce_and": (jnp.all, lax.pmin, True),
    "reduce_or": (jnp.any, lax.pmax, False),
}
"""Primitives that reduce: on one device, across devices, and the result of nothing."""


def run_on_parts(eqns: Eqns, env: Env) -> Env:
    """Evaluates equations in order; values of the environment are arrays or `DevicePart`.

    Returns:
      The environment grown by the equations' outputs.
    """
    env, wholes = dict(env), {}

    def value(atom: Atom) -> Tree:
        return env[atom] if jaxprs.is_var(atom) else jaxprs.values([atom], {})[0]

    def gathered(atom: Atom) -> jax.Array:
        if not jaxprs.is_var(atom):
            return value(atom)
        if atom not in wholes:
            wholes[atom] = whole(env[atom])
        return wholes[atom]

    for eqn in eqns:
        found = [value(atom) for atom in eqn.invars]
        parts = [v for v in found if isinstance(v, DevicePart)]
        if parts and _is_elementwise(eqn, parts):
            cut = parts[0].cut
            outs = jaxprs.bind(eqn, [_own(v, cut) for v in found])
            env.update(zip(eqn.outvars, [DevicePart(out, cut) for out in outs], strict=True))
        elif parts and _is_full_reduction(eqn, parts[0]):
            env[eqn.outvars[0]] = _reduced(parts[0], eqn.primitive.name)
        else:
            outs = jaxprs.bind(eqn, [gathered(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
    return env


def whole(value: Tree) -> jax.Array:
    """An array, whether it is whole or cut."""
    return value.cut.whole(value.value) if isinstance(value, DevicePart) else value


def own(value: Tree, cut: Cut) -> jax.Array:
    """This device's part of a value that is whole or cut, as ``cut`` wants it."""
    if isinstance(value, DevicePart) and value.cut == cut:
        return value.value
    return cut.own(whole(value))


def _own(value: Tree, cut: Cut) -> jax.Array:
    """An operand: a part of it, or the whole of a scalar."""
    return value if not isinstance(value, DevicePart) and value.shape == () else own(value, cut)


def _is_elementwise(eqn: Eqn, parts: Sequence[DevicePart]) -> bool:
    shape = parts[0].cut.shape
    return (
        shape != ()
        and eqn.primitive.name in _ELEMENTWISE
        and all(part.cut == parts[0].cut for part in parts)
        and all(v.aval.shape in ((), shape) for v in eqn.invars)
        and all(v.aval.shape == shape for v in eqn.outvars)
    )


def _is_full_reduction(eqn: Eqn, part: DevicePart) -> bool:
    of_numbers = eqn.primitive.name in ("reduce_max", "reduce_min")
    return (
        eqn.primitive.name in _REDUCTIONS
        # The result of nothing must be of the dtype.
        and (not of_numbers or jnp.issubdtype(part.value.dtype, jnp.floating))
        and len(eqn.invars) == 1
        and eqn.outvars[0].aval.shape == ()
        and part.cut.shape != ()
    )


def _reduced(part: DevicePart, name: str) -> jax.Array:
    """Reduces the whole array to a scalar, by the name of the reduction's primitive."""
    local, across, nothing = _REDUCTIONS[name]
    counts, axes = part.cut.counts(), part.cut.axes
    total = local(part.value if counts is None else jnp.where(counts, part.value, nothing))
    return communicate(across, total, axes) if axes else total
