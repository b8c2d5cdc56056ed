"""Matmuls of chosen weights in 8-bit floats, in a layer's forward and backward as traced.

A matmul of a chosen weight is a ``dot_general`` that reads it (in F and B), or whose result is its
gradient (in W). Each is computed from operands of 8 bits, and accumulated in float32: the weight
comes quantized, other operands are quantized as they are read, those that depend on the cotangent
to E5M2 and all others to E4M3. An operand is quantized once: B and W share the cotangent, and F
keeps for W what it has multiplied, in 8 bits.

Any layer is rewritten like this, whoever wrote its derivatives, since only primitives are left when
it is cut into F, B and W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxpipe.runtime.float8 import E4M3, E5M2, Quantized, quantize
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import FORMS, Atom, Env, Eqn, Eqns, Vars
from jaxpipe.runtime.types import Tree
from jaxpipe.schedule.problems import refuse

_SUMS = {"add", "add_any", "pad"}
"""Primitives that put a gradient together, beside forms."""


def quantize_matmuls(
    forward: ClosedJaxpr,
    backward: ClosedJaxpr,
    names: Sequence[str | None],
    trained: Sequence[int],
    *,
    num_outputs: int,
    num_x: int,
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Rewrites the matmuls of chosen weights in a layer's flat programs.

    Args:
      forward: takes parameters first and returns residuals last.
      backward: takes residuals first and returns gradients of parameters last.
      names: the names of chosen weights, None for other parameters.
      trained: numbers of the parameters that have gradients.
      num_outputs: how many results of the forward come before the residuals.
      num_x: how many results of the backward come before the gradients.

    Returns:
      Forward and backward. The forward takes chosen weights in E4M3, and behind the parameters the
      list of their scales; it returns some residuals also quantized, which the backward takes
      behind the others.

    Raises:
      ValueError: a chosen weight that is read otherwise, or whose gradient is made otherwise.
    """
    eqns, count = backward.jaxpr.eqns, len(names)
    weights = {v: n for v, n in zip(forward.jaxpr.invars, names, strict=False) if n is not None}
    chosen = list(weights)
    in_forward = _matmuls(forward.jaxpr.eqns, weights)
    source = dict(zip(backward.jaxpr.invars, forward.jaxpr.outvars[num_outputs:], strict=False))
    read = {v: weights[r] for v, r in source.items() if jaxprs.is_var(r) and r in weights}
    in_backward = _matmuls(eqns, read)
    for n, gradient in zip(trained, backward.jaxpr.outvars[num_x:], strict=True):
        if (name := names[n]) is not None:
            in_backward |= _makers(eqns, gradient, name)
    operands = {v for eqn in eqns if id(eqn) in in_backward for v in eqn.invars}
    kept = [v for v in source if v in read or v in operands]
    late = jaxprs.reachable(eqns, set(backward.jaxpr.invars[len(source) :]))

    def run_forward(params: list[Tree], scales: list[Tree], rest: list[Tree]) -> list[Tree]:
        given = dict(zip(forward.jaxpr.invars, [*params, *rest], strict=True))
        pairs = {v: Quantized(given[v], scale) for v, scale in zip(chosen, scales, strict=True)}
        given |= {v: pair.widened(v.aval.dtype) for v, pair in pairs.items()}
        results, quantized = _evaluate(forward, given, pairs, in_forward, set(weights), set())
        return [*results, *(leaf for v in kept for leaf in quantized(source[v]))]

    def run_backward(residuals: list[Tree], pairs: list[Tree], dy: list[Tree]) -> list[Tree]:
        given = dict(zip(backward.jaxpr.invars, [*residuals, *dy], strict=True))
        quantized = {v: Quantized(*pair) for v, pair in zip(kept, pairs, strict=True)}
        return _evaluate(backward, given, quantized, in_backward, set(read), late)[0]

    scale = jax.ShapeDtypeStruct((), jnp.float32)
    shapes, inputs = (jaxprs.shapes_of_variables(p.jaxpr.invars) for p in (forward, backward))
    params = [w.update(dtype=E4M3) if names[n] else w for n, w in enumerate(shapes[:count])]
    pairs = [(w.update(dtype=E4M3), scale) for w in jaxprs.shapes_of_variables(kept)]
    of_f = jax.make_jaxpr(run_forward)(params, [scale] * len(chosen), shapes[count:])
    of_b = jax.make_jaxpr(run_backward)(inputs[: len(source)], pairs, inputs[len(source) :])
    return jaxprs.flatten(of_f), jaxprs.flatten(of_b)


def _evaluate(
    program: ClosedJaxpr,
    given: Env,
    pairs: dict[Atom, Quantized],
    matmuls: set[int],
    weights: Vars,
    late: Vars,
) -> tuple[list[Tree], Callable[[Atom], Quantized]]:
    """Evaluates a program with some matmuls quantized.

    Args:
      given: values of its inputs.
      pairs: operands that are quantized already; more are added.
      matmuls: ids of the equations.
      weights: variables that are chosen weights in some form.
      late: variables that depend on a cotangent.

    Returns:
      The results, and what quantizes a variable, once.
    """
    env = jaxprs.consts(program) | given

    def quantized(var: Atom) -> Quantized:
        if var not in pairs:
            pairs[var] = quantize(env[var], E5M2 if var in late else E4M3)
        return pairs[var]

    for eqn in program.jaxpr.eqns:
        if not weights.isdisjoint(eqn.outvars):
            values, scale = pairs[eqn.invars[0]]
            is_cast = eqn.primitive.name == "convert_element_type"
            formed = [values] if is_cast else jaxprs.bind(eqn, [values])
            pairs |= {v: Quantized(w, scale) for v, w in zip(eqn.outvars, formed, strict=True)}
        if id(eqn) in matmuls:
            outs = [_product(eqn, *map(quantized, eqn.invars))]
        else:
            outs = jaxprs.bind(eqn, jaxprs.values(eqn.invars, env))
        env.update(zip(eqn.outvars, outs, strict=True))
    return jaxprs.values(program.jaxpr.outvars, env), quantized


def _product(eqn: Eqn, a: Quantized, b: Quantized) -> jax.Array:
    """A matmul's result. Rounded before it is scaled, it is the same as rounded after, and cuBLAS
    does both; float16 alone may have no room for what is not scaled."""
    dtype = eqn.outvars[0].aval.dtype
    wide = jnp.promote_types(dtype, jnp.bfloat16)
    product = lax.dot_general(
        a.values, b.values, eqn.params["dimension_numbers"], preferred_element_type=wide
    )
    return (product * (a.scale * b.scale).astype(wide)).astype(dtype)


def _matmuls(eqns: Eqns, weights: dict[Atom, str]) -> set[int]:
    """Finds the matmuls that read weights, by id, and adds the forms of these to the weights."""
    found = set()
    for eqn in eqns:
        read = [v for v in eqn.invars if jaxprs.is_var(v) and v in weights]
        if not read:
            continue
        if eqn.primitive.name == "dot_general":
            found.add(id(eqn))
        elif jaxprs.forms(eqn):
            weights.update(dict.fromkeys(eqn.outvars, weights[read[0]]))
        else:
            refuse([_unfit(weights[read[0]], "is read by", eqn)])
    return found


def _makers(eqns: Eqns, gradient: Atom, name: str) -> set[int]:
    """Finds the matmuls whose sum is a weight's gradient, by id."""
    made_by = {v: eqn for eqn in eqns for v in eqn.outvars}
    found, wanted = set(), [gradient]
    while wanted:
        var = wanted.pop()
        if not jaxprs.is_var(var) or var not in made_by:
            continue
        eqn = made_by[var]
        if eqn.primitive.name == "dot_general":
            found.add(id(eqn))
        elif eqn.primitive.name in _SUMS | FORMS:
            wanted += eqn.invars
        else:
            refuse([_unfit(name, "has a gradient made by", eqn)])
    return found


def _unfit(name: str, verb: str, eqn: Eqn) -> str:
    return (
        f"fp8 chooses {name}, which {verb} {eqn.primitive.name!r}. Layers may only multiply by "
        "what it chooses (dot_general), after casts and changes of shape: choose fewer weights."
    )
