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

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxpipe.runtime.float8 import E4M3, E5M2, Quantized, quantize
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import FORMS, Atom, Env, Eqn, Eqns, Vars
from jaxpipe.runtime.types import Tree
from jaxpipe.schedule.problems import refuse

Names = dict[Atom, str]
"""Variables that are a chosen weight in some form, and its name."""

_SUMS = {"add", "add_any", "pad"}
"""Primitives that put a gradient together, beside forms."""
_SCALE = jax.ShapeDtypeStruct((), jnp.float32)


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
    eqns = backward.jaxpr.eqns
    weights = _chosen(forward.jaxpr.invars, names)
    in_forward = _matmuls(forward.jaxpr.eqns, weights)
    source = dict(zip(backward.jaxpr.invars, forward.jaxpr.outvars[num_outputs:], strict=False))
    read = {v: weights[r] for v, r in source.items() if jaxprs.is_var(r) and r in weights}
    in_backward = _matmuls(eqns, read)
    for n, gradient in zip(trained, backward.jaxpr.outvars[num_x:], strict=True):
        if (name := names[n]) is not None:
            in_backward |= _makers(eqns, gradient, name)
    operands = {v for eqn in eqns if id(eqn) in in_backward for v in eqn.invars}
    kept = [v for v in source if v in read or v in operands]
    return (
        _forward(forward, names, in_forward, set(weights), [source[v] for v in kept]),
        _backward(backward, len(source), in_backward, set(read), kept),
    )


def _forward(
    program: ClosedJaxpr,
    names: Sequence[str | None],
    matmuls: set[int],
    weights: Vars,
    kept: list[Atom],
) -> ClosedJaxpr:
    """The forward with quantized matmuls, which also returns ``kept`` quantized."""
    jaxpr = program.jaxpr
    chosen = list(_chosen(jaxpr.invars, names))

    def run(params: list[Tree], scales: list[Tree], rest: list[Tree]) -> list[Tree]:
        env = jaxprs.consts(program) | dict(zip(jaxpr.invars, [*params, *rest], strict=True))
        pairs = {v: Quantized(env[v], scale) for v, scale in zip(chosen, scales, strict=True)}
        env |= {v: pair.widened(v.aval.dtype) for v, pair in pairs.items()}
        evaluation = _Evaluation(env, pairs, matmuls, weights, set())
        evaluation.run(jaxpr.eqns)
        found = [leaf for v in kept for leaf in evaluation.quantized(v)]
        return [*jaxprs.values(jaxpr.outvars, evaluation.env), *found]

    shapes = jaxprs.shapes_of_variables(jaxpr.invars)
    params = [
        shape if name is None else shape.update(dtype=E4M3)
        for shape, name in zip(shapes, names, strict=False)
    ]
    rest = shapes[len(params) :]
    return jaxprs.flatten(jax.make_jaxpr(run)(params, [_SCALE] * len(chosen), rest))


def _backward(
    program: ClosedJaxpr, num_residuals: int, matmuls: set[int], weights: Vars, kept: list[Atom]
) -> ClosedJaxpr:
    """The backward with quantized matmuls, which also takes ``kept`` quantized."""
    jaxpr = program.jaxpr
    late = jaxprs.reachable(jaxpr.eqns, set(jaxpr.invars[num_residuals:]))

    def run(residuals: list[Tree], pairs: list[Tree], dy: list[Tree]) -> list[Tree]:
        env = jaxprs.consts(program) | dict(zip(jaxpr.invars, [*residuals, *dy], strict=True))
        quantized = {v: Quantized(*pair) for v, pair in zip(kept, pairs, strict=True)}
        evaluation = _Evaluation(env, quantized, matmuls, weights, late)
        evaluation.run(jaxpr.eqns)
        return jaxprs.values(jaxpr.outvars, evaluation.env)

    shapes = jaxprs.shapes_of_variables(jaxpr.invars)
    pairs = [(shape.update(dtype=E4M3), _SCALE) for shape in jaxprs.shapes_of_variables(kept)]
    residuals, dy = shapes[:num_residuals], shapes[num_residuals:]
    return jaxprs.flatten(jax.make_jaxpr(run)(residuals, pairs, dy))


class _Evaluation:
    """An evaluation of a program with some matmuls quantized.

    Args:
      env: values of its inputs.
      pairs: operands that are quantized already.
      matmuls: ids of the equations.
      weights: variables that are chosen weights in some form.
      late: variables that depend on a cotangent.
    """

    def __init__(
        self, env: Env, pairs: dict[Atom, Quantized], matmuls: set[int], weights: Vars, late: Vars
    ) -> None:
        self.env, self._pairs, self._matmuls = env, pairs, matmuls
        self._weights, self._late = weights, late

    def run(self, eqns: Eqns) -> None:
        """Evaluates equations in order."""
        for eqn in eqns:
            if not self._weights.isdisjoint(eqn.outvars):
                self._pairs |= _formed(eqn, self._pairs[eqn.invars[0]])
            if id(eqn) in self._matmuls:
                outs = [_product(eqn, *map(self.quantized, eqn.invars))]
            else:
                outs = jaxprs.bind(eqn, jaxprs.values(eqn.invars, self.env))
            self.env.update(zip(eqn.outvars, outs, strict=True))

    def quantized(self, var: Atom) -> Quantized:
        """A matmul's operand, which is quantized where it is first read."""
        if var not in self._pairs:
            self._pairs[var] = quantize(self.env[var], E5M2 if var in self._late else E4M3)
        return self._pairs[var]


def _formed(eqn: Eqn, weight: Quantized) -> dict[Atom, Quantized]:
    """A quantized weight in another form; its dtype stays."""
    is_cast = eqn.primitive.name == "convert_element_type"
    values = [weight.values] if is_cast else jaxprs.bind(eqn, [weight.values])
    return {v: Quantized(w, weight.scale) for v, w in zip(eqn.outvars, values, strict=True)}


def _product(eqn: Eqn, a: Quantized, b: Quantized) -> jax.Array:
    """A matmul's result. Rounded before it is scaled, it is the same as rounded after, and cuBLAS
    does both; float16 alone may have no room for what is not scaled."""
    dtype = eqn.outvars[0].aval.dtype
    wide = jnp.promote_types(dtype, jnp.bfloat16)
    product = lax.dot_general(
        a.values, b.values, eqn.params["dimension_numbers"], preferred_element_type=wide
    )
    return (product * (a.scale * b.scale).astype(wide)).astype(dtype)


def _chosen(params: Sequence[Atom], names: Sequence[str | None]) -> Names:
    return {v: name for v, name in zip(params, names, strict=False) if name is not None}


def _matmuls(eqns: Eqns, weights: Names) -> set[int]:
    """Finds the matmuls that read weights, by id, and adds the forms that weights take to them."""
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
        "what it chooses (dot_general), after casts and changes of shape: choose fewer weights, or "
        "except this one with full_precision."
    )
