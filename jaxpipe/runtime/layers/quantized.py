"""Matmuls of chosen weights in 8-bit floats, in a layer's forward and backward as traced.

A matmul of a chosen weight is a ``dot_general`` that reads it (in F and B), or whose result is its
gradient (in W). Each is computed from operands of 8 bits, and accumulated in float32. There are two
recipes:

- "tensorwise" scales each tensor by its largest value. The weight comes quantized, other operands
  are quantized as they are read, those that depend on the cotangent to E5M2 and all others to E4M3.
  An operand is quantized once: B and W share the cotangent.
- "mxfp8" scales each 32 values along the dimension that a matmul sums over (OCP Microscaling
  Formats, section 5.1), all in E4M3; zeros fill the last block. So an operand of two matmuls is
  quantized for each of them.

F keeps for W what W multiplies, in 8 bits. Any layer is rewritten like this, whoever wrote its
derivatives, since only primitives are left when it is cut into F, B and W.
"""

import abc
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from jaxpipe.runtime.float8 import E4M3, E5M2, Quantized, quantize, quantize_blocks
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import FORMS, Atom, Env, Eqn, Eqns, Vars
from jaxpipe.runtime.types import Tree
from jaxpipe.schedule.problems import refuse

RECIPES = "tensorwise", "mxfp8"
BLOCK_MATMUL = "jaxpipe.mxfp8_matmul"
"""The name of a matmul of blocks in a trace."""
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
    recipe: str,
) -> ClosedJaxpr:
    """Rewrites the matmuls of chosen weights in a layer's flat forward and backward.

    Args:
      program: takes parameters first and dy last; returns outputs, residuals, dx and dparams.
      names: the names of chosen weights, None for other parameters.
      trained: numbers of the parameters that have gradients.
      num_outputs, num_x, num_dy: how many arrays outputs, dx and dy are.
      recipe: "tensorwise" or "mxfp8".

    Returns:
      A program that returns some residuals also quantized, behind the others. With "tensorwise" it
      takes chosen weights in E4M3, and behind the parameters the list of their scales.

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
    residuals = set(filter(jaxprs.is_var, results[num_outputs:gradients]))
    kept_for = [
        (eqn, side)
        for eqn in backward
        if id(eqn) in matmuls
        for side, v in enumerate(eqn.invars)
        if v in residuals and v not in weights
    ]
    late = jaxprs.reachable(eqns, dy)

    def run(params: list[Tree], scales: list[Tree], rest: list[Tree]) -> list[Tree]:
        env = jaxprs.consts(program) | dict(zip(inputs, [*params, *rest], strict=True))
        values: _Values
        if recipe == "mxfp8":
            values = _Blocks(env, matmuls)
        else:
            pairs = {v: Quantized(env[v], scale) for v, scale in zip(chosen, scales, strict=True)}
            env |= {v: pair.widened(v.aval.dtype) for v, pair in pairs.items()}
            values = _Tensors(env, matmuls, pairs, set(weights), late)
        values.evaluate(forward)
        kept = [values.operand(eqn, side) for eqn, side in kept_for]
        values.evaluate(backward)
        found = jaxprs.values(results, env)
        return [*found[:gradients], *jax.tree.leaves(kept), *found[gradients:]]

    shapes, scale = jaxprs.shapes_of_variables(inputs), jax.ShapeDtypeStruct((), jnp.float32)
    params, scales = list(shapes[:count]), list[Tree]()
    if recipe == "tensorwise":
        params = [w.update(dtype=E4M3) if names[n] else w for n, w in enumerate(params)]
        scales = [scale] * len(chosen)
    return jaxprs.flatten(jax.make_jaxpr(run)(params, scales, shapes[count:]))


class _Values(abc.ABC):
    """Values of a program's variables, with some matmuls quantized."""

    def __init__(self, env: Env, matmuls: set[int]) -> None:
        self.env, self.matmuls = env, matmuls

    @abc.abstractmethod
    def operand(self, eqn: Eqn, side: int) -> Quantized:
        """An operand of a matmul in 8 bits, made once."""

    @abc.abstractmethod
    def product(self, eqn: Eqn, a: Quantized, b: Quantized) -> jax.Array:
        """The result of a matmul in its dtype."""

    def evaluate(self, eqns: Eqns) -> None:
        """Adds the results of equations."""
        for eqn in eqns:
            if id(eqn) in self.matmuls:
                outs = [self.product(eqn, self.operand(eqn, 0), self.operand(eqn, 1))]
            else:
                outs = jaxprs.bind(eqn, jaxprs.values(eqn.invars, self.env))
            self.env.update(zip(eqn.outvars, outs, strict=True))


class _Tensors(_Values):
    """One scale per tensor.

    Args:
      pairs: operands that are quantized already; more are added.
      weights: variables that are chosen weights in some form.
      late: variables that depend on a cotangent.
    """

    def __init__(
        self, env: Env, matmuls: set[int], pairs: dict[Atom, Quantized], weights: Vars, late: Vars
    ) -> None:
        super().__init__(env, matmuls)
        self.pairs, self.weights, self.late = pairs, weights, late

    def operand(self, eqn: Eqn, side: int) -> Quantized:
        var = eqn.invars[side]
        if var not in self.pairs:
            self.pairs[var] = quantize(self.env[var], E5M2 if var in self.late else E4M3)
        return self.pairs[var]

    def product(self, eqn: Eqn, a: Quantized, b: Quantized) -> jax.Array:
        """Rounded before it is scaled, a product is the same as rounded after, and cuBLAS does
        both; float16 alone may have no room for what is not scaled."""
        dtype = eqn.outvars[0].aval.dtype
        wide = jnp.promote_types(dtype, jnp.bfloat16)
        product = lax.dot_general(
            a.values, b.values, eqn.params["dimension_numbers"], preferred_element_type=wide
        )
        return (product * (a.scale * b.scale).astype(wide)).astype(dtype)

    def evaluate(self, eqns: Eqns) -> None:
        """Adds the results of equations, and the forms of weights also in 8 bits."""
        for eqn in eqns:
            if not self.weights.isdisjoint(eqn.outvars):
                values, scale = self.pairs[eqn.invars[0]]
                is_cast = eqn.primitive.name == "convert_element_type"
                formed = [values] if is_cast else jaxprs.bind(eqn, [values])
                pairs = {v: Quantized(w, scale) for v, w in zip(eqn.outvars, formed, strict=True)}
                self.pairs.update(pairs)
            super().evaluate([eqn])


class _Blocks(_Values):
    """A scale for each block of values that a matmul sums over."""

    def __init__(self, env: Env, matmuls: set[int]) -> None:
        super().__init__(env, matmuls)
        self.pairs: dict[tuple[Atom, tuple[int, ...], tuple[int, ...]], Quantized] = {}

    def operand(self, eqn: Eqn, side: int) -> Quantized:
        """An operand as ``[batch, row, summed]``: a matmul for each batch, and a row for each row
        or column of its result."""
        contracted, batch = (pair[side] for pair in eqn.params["dimension_numbers"])
        var = eqn.invars[side]
        key = var, tuple(contracted), tuple(batch)
        if key not in self.pairs:
            rows = [d for d in range(var.aval.ndim) if d not in (*contracted, *batch)]
            x = lax.transpose(self.env[var], (*batch, *rows, *contracted))
            sizes = (
                math.prod(var.aval.shape[d] for d in dims) for dims in (batch, rows, contracted)
            )
            self.pairs[key] = quantize_blocks(x.reshape(tuple(sizes)))
        return self.pairs[key]

    def product(self, eqn: Eqn, a: Quantized, b: Quantized) -> jax.Array:
        result = eqn.outvars[0].aval
        flops = 2.0 * result.size * a.values.shape[-1]
        wide = jnp.promote_types(result.dtype, jnp.bfloat16)
        product = _block_product(*a, *b, dtype=wide, flops=flops)
        return product.reshape(result.shape).astype(result.dtype)


@functools.partial(lax.composite, name=BLOCK_MATMUL)
def _block_product(
    a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array, /, *, dtype: DTypeLike,
    flops: float,
) -> jax.Array:  # fmt: skip
    """Multiplies rows by rows: by cuDNN's kernel for Blackwell on GPUs.

    XLA's own operation, `jax.lax.scaled_dot`, compiles for no more than one GPU in JAX 0.10.
    """
    del flops

    def on_gpus(a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array) -> jax.Array:
        return jax.nn.scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=dtype)

    def elsewhere(a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array) -> jax.Array:
        rows_by_rows = ((2,), (2,)), ((0,), (0,))
        scales = {"lhs_scale": a_scale, "rhs_scale": b_scale}
        return lax.scaled_dot(
            a, b, **scales, dimension_numbers=rows_by_rows, preferred_element_type=dtype
        )

    return lax.platform_dependent(a, a_scale, b, b_scale, cuda=on_gpus, default=elsewhere)


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
