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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxpipe.runtime.float8 import E4M3, E5M2, Quantized, quantize
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import FORMS, Atom, Env, Eqn, Eqns, Vars
from jaxpipe.runtime.types import Tree
from jaxpipe.schedule.problems import refuse

_SUMS = {"add", "add_any", "pad"}
"""Primitives that put a gradient together, beside forms."""
Names = dict[Atom, str]
"""Variables that are a chosen weight in some form, and its name."""


class Programs(NamedTuple):
    """A layer's flat forward and backward programs, as `split.split_layer` cuts them."""

    forward: core.ClosedJaxpr
    backward: core.ClosedJaxpr


def quantize_matmuls(
    programs: Programs,
    names: Sequence[str | None],
    trained: Sequence[int],
    *,
    num_outputs: int,
    num_x: int,
) -> Programs:
    """Rewrites the matmuls of chosen weights.

    Args:
      programs: the forward takes parameters first and returns residuals last; the backward takes
        them first and returns gradients of the parameters that are trained last.
      names: the names of chosen weights, None for other parameters.
      trained: numbers of the parameters that are trained.
      num_outputs: how many results of the forward come before the residuals.
      num_x: how many results of the backward come before the gradients.

    Returns:
      The programs; the forward takes chosen weights in E4M3, and their scales behind the
      parameters.

    Raises:
      ValueError: a chosen weight that is read otherwise, or whose gradient is made otherwise.
    """
    forward, backward = (program.jaxpr for program in programs)
    residuals = forward.outvars[num_outputs:]
    behind = dict(zip(backward.invars, residuals, strict=False))
    weights = {v: n for v, n in zip(forward.invars, names, strict=False) if n is not None}
    in_f = _matmuls(forward.eqns, weights)
    in_backward = {v: weights[r] for v, r in behind.items() if jaxprs.is_var(r) and r in weights}
    in_b = _matmuls(backward.eqns, in_backward)
    gradients = zip(trained, backward.outvars[num_x:], strict=True)
    in_w = {
        id(eqn)
        for n, v in gradients
        if (name := names[n]) is not None
        for eqn in _makers(backward.eqns, v, name)
    }
    dots = [eqn for eqn in backward.eqns if id(eqn) in in_b | in_w]
    kept = [v for v in behind if v in in_backward or any(v in eqn.invars for eqn in dots)]
    chosen = [n for n, name in enumerate(names) if name is not None]

    def run_forward(params: list[Tree], scales: list[Tree], rest: list[Tree]) -> list[Tree]:
        env = jaxprs.consts(programs.forward)
        env |= dict(zip(forward.invars, [*params, *rest], strict=True))
        pairs = {}
        for n, scale in zip(chosen, scales, strict=True):
            var = forward.invars[n]
            pairs[var] = Quantized(params[n], scale)
            env[var] = params[n].astype(var.aval.dtype) * scale.astype(var.aval.dtype)
        run = _Run(env, pairs, in_f, set(weights), set())
        run.eqns(forward.eqns)
        found = [leaf for v in kept for leaf in run.quantized(behind[v])]
        return [*jaxprs.values(forward.outvars, run.env), *found]

    def run_backward(values: list[Tree], pairs: list[Tree], dy: list[Tree]) -> list[Tree]:
        env = jaxprs.consts(programs.backward)
        env |= dict(zip(backward.invars, [*values, *dy], strict=True))
        late = jaxprs.reachable(backward.eqns, set(backward.invars[len(behind) :]))
        quantized = {v: Quantized(*pair) for v, pair in zip(kept, pairs, strict=True)}
        run = _Run(env, quantized, in_b | in_w, set(in_backward), late)
        run.eqns(backward.eqns)
        return jaxprs.values(backward.outvars, run.env)

    given, inputs = map(jaxprs.shapes_of_variables, (forward.invars, backward.invars))
    params = [
        shape if name is None else jax.ShapeDtypeStruct(shape.shape, E4M3)
        for shape, name in zip(given, names, strict=False)
    ]
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    pairs = [(jax.ShapeDtypeStruct(v.aval.shape, E4M3), scale) for v in kept]
    of_f = jax.make_jaxpr(run_forward)(params, [scale] * len(chosen), given[len(names) :])
    of_b = jax.make_jaxpr(run_backward)(inputs[: len(behind)], pairs, inputs[len(behind) :])
    return Programs(jaxprs.flatten(of_f), jaxprs.flatten(of_b))


class _Run:
    """A program that is run with some matmuls quantized.

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

    def eqns(self, eqns: Eqns) -> None:
        """Runs equations in order."""
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


def _makers(eqns: Eqns, gradient: Atom, name: str) -> Iterator[Eqn]:
    """Yields the matmuls whose sum is a gradient."""
    made_by = {v: eqn for eqn in eqns for v in eqn.outvars}
    wanted = [gradient]
    while wanted:
        var = wanted.pop()
        if not jaxprs.is_var(var) or var not in made_by:
            continue
        eqn = made_by[var]
        if eqn.primitive.name == "dot_general":
            yield eqn
        elif eqn.primitive.name in _SUMS | FORMS:
            wanted += eqn.invars
        else:
            refuse([_unfit(name, "has a gradient made by", eqn)])


def _unfit(name: str, verb: str, eqn: Eqn) -> str:
    return (
        f"fp8 chooses {name}, which {verb} {eqn.primitive.name!r}. Layers may only multiply by "
        "what it chooses (dot_general), after casts and other forms: choose fewer, such as "
        "'*kernel', or add it to full_precision."
    )
