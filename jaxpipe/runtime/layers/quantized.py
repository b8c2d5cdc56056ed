"""Matmuls of chosen weights in 8-bit floats, in a layer's forward and backward as traced.

A matmul of a chosen weight is a ``dot_general`` that reads it (in F and B), or whose result is its
gradient (in W). Each is computed from operands of 8 bits, and accumulated in float32: the weight
comes quantized, other operands are quantized as they are read, those that depend on the cotangent
to E5M2 and all others to E4M3. An operand is quantized once: B and W share the cotangent, and F
keeps for W what it has multiplied, in 8 bits.

Any layer is rewritten like this, whoever wrote its derivatives, since only primitives are left when
it is cut into F, B and W.
"""

from collections.abc import Sequence
from typing import NamedTuple

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
    program: ClosedJaxpr,
    names: Sequence[str | None],
    trained: Sequence[int],
    *,
    num_outputs: int,
    num_x: int,
    num_dy: int,
) -> ClosedJaxpr:
    """Rewrites the matmuls of chosen weights in a layer's flat forward and backward.

    Args:
      program: takes parameters first and dy last; returns outputs, residuals, dx and dparams.
      names: the names of chosen weights, None for other parameters.
      trained: numbers of the parameters that have gradients.
      num_outputs, num_x, num_dy: how many arrays outputs, dx and dy are.

    Returns:
      A program that takes chosen weights in E4M3, and behind the parameters the list of their
      scales; some residuals it returns also quantized, behind the others.

    Raises:
      ValueError: a chosen weight that is read otherwise, or whose gradient is made otherwise.
    """
    inputs, results, eqns = program.jaxpr.invars, program.jaxpr.outvars, program.jaxpr.eqns
    count, gradients = len(names), len(results) - num_x - len(trained)
    dy = set(inputs[len(inputs) - num_dy :])
    forward, backward = jaxprs.divided(eqns, results[:gradients], dy)
    weights = {v: n for v, n in zip(inputs, names, strict=False) if n is not None}
    chosen = list(weights)
    matmuls = _matmuls(eqns, weights)
    for n, gradient in zip(trained, results[gradients + num_x :], strict=True):
        if (name := names[n]) is not None:
            matmuls |= _makers(eqns, gradient, name)
    operands = {v for eqn in backward if id(eqn) in matmuls for v in eqn.invars}
    residuals = dict.fromkeys(filter(jaxprs.is_var, results[num_outputs:gradients]))
    late = jaxprs.reachable(eqns, dy)

    def run(params: list[Tree], scales: list[Tree], rest: list[Tree]) -> list[Tree]:
        env = jaxprs.consts(program) | dict(zip(inputs, [*params, *rest], strict=True))
        pairs = {v: Quantized(env[v], scale) for v, scale in zip(chosen, scales, strict=True)}
        env |= {v: pair.widened(v.aval.dtype) for v, pair in pairs.items()}
        values = _Values(env, pairs, matmuls, set(weights), late)
        values.evaluate(forward)
        kept = [values.quantized(v) for v in residuals if v in weights or v in operands]
        values.evaluate(backward)
        found = jaxprs.values(results, env)
        return [*found[:gradients], *jax.tree.leaves(kept), *found[gradients:]]

    shapes, scale = jaxprs.shapes_of_variables(inputs), jax.ShapeDtypeStruct((), jnp.float32)
    params = [w.update(dtype=E4M3) if names[n] else w for n, w in enumerate(shapes[:count])]
    return jaxprs.flatten(jax.make_jaxpr(run)(params, [scale] * len(chosen), shapes[count:]))


class _Values(NamedTuple):
    """Values of a program's variables, with some matmuls quantized.

    Args:
      pairs: operands that are quantized already; more are added.
      weights: variables that are chosen weights in some form.
      late: variables that depend on a cotangent.
    """

    env: Env
    pairs: dict[Atom, Quantized]
    matmuls: set[int]
    weights: Vars
    late: Vars

    def quantized(self, var: Atom) -> Quantized:
        """A value in 8 bits, made once."""
        if var not in self.pairs:
            self.pairs[var] = quantize(self.env[var], E5M2 if var in self.late else E4M3)
        return self.pairs[var]

    def evaluate(self, eqns: Eqns) -> None:
        """Adds the results of equations."""
        for eqn in eqns:
            if not self.weights.isdisjoint(eqn.outvars):
                values, scale = self.pairs[eqn.invars[0]]
                is_cast = eqn.primitive.name == "convert_element_type"
                formed = [values] if is_cast else jaxprs.bind(eqn, [values])
                pairs = {v: Quantized(w, scale) for v, w in zip(eqn.outvars, formed, strict=True)}
                self.pairs.update(pairs)
            if id(eqn) in self.matmuls:
                outs = [_product(eqn, *map(self.quantized, eqn.invars))]
            else:
                outs = jaxprs.bind(eqn, jaxprs.values(eqn.invars, self.env))
            self.env.update(zip(eqn.outvars, outs, strict=True))


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
        elif eqn.primitive.name in FORMS and len(eqn.invars) == 1:
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
