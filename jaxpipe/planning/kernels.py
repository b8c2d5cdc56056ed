"""Kernels of traced equations: their FLOPs, and the bytes that they move once XLA has fused them.

Matmuls, convolutions, attention, gathers and the like are kernels of their own, which read their
operands and write their results. What is element by element is fused: only what such a kernel, a
reduction or the program's caller reads is written, by one kernel that reads what it is made from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxpipe.planning.working_set import Operation, most_at_once
from jaxpipe.runtime.layers import jaxprs

_RENAMES = {"reshape", "squeeze", "expand_dims", "convert_element_type", "copy", "bitcast"}
_FUSED_MOVES = {"transpose", "slice", "concatenate", "pad", "rev", "split", "dynamic_slice"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_precision_sum"}
_FREE = {"optimization_barrier", "iota", "broadcast_in_dim", "axis_index", "create_token"}
_HEAVY = {
    *("dot_general", "conv_general_dilated", "ragged_dot_general", "gather", "scatter"),
    *("scatter-add", "scatter_add", "sort", "top_k", "cumsum", "dynamic_update_slice"),
    *("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper", "while", "scan"),
    *("cond", "custom_call", "pure_callback", "reduce_window_sum", "select_and_scatter_add"),
}
_COLLECTIVES = {
    "psum": "sum",
    "psum_invariant": "sum",
    "pmax": "sum",
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "psum_scatter": "scatter",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}
_ATTENTION_MATMULS = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 5,
}
"""Dao et al. 2022, algorithms 1 and 4."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """What equations do, for one number of rows.

    Args:
      kernels: (FLOPs, bytes) of each, in order.
      values: bytes copied into slots and out of them.
      collectives: (axis, kind, bytes that a device sends).
      live: the most bytes that exist at once of what the equations make.
      stacked_live: the same with the weights that they read, cut out of a stack.
    """

    kernels: list[tuple[float, float]]
    values: float
    collectives: list[tuple[str, str, float]]
    live: float
    stacked_live: float


def count(
    eqns: Sequence[Any],
    outputs: Iterable[Any],
    *,
    slots: Collection[Any] = (),
    stored: Collection[Any] = (),
    axis_sizes: dict[str, int],
    parameters: Collection[Any] = (),
    parameter_bytes: float | None = None,
) -> Counted:
    """Counts flat equations.

    Args:
      eqns: with calls inlined, in order.
      outputs: variables that are returned.
      slots: variables that are read from slots, or, among the outputs, written to them.
      stored: outputs that are added to what lies elsewhere, such as gradients.
      axis_sizes: of the mesh.
      parameters: variables that are weights.
      parameter_bytes: of one of their elements, where the program reads a copy in another dtype.
    """
    program = _Program(eqns, outputs, parameters, parameter_bytes)
    kernels: list[tuple[float, float]] = []
    collectives: list[tuple[str, str, float]] = []
    copied = 0.0
    for eqn in eqns:
        name = eqn.primitive.name
        if name in _COLLECTIVES:
            collectives += _collective(eqn, axis_sizes)
        elif name in _HEAVY or jaxprs.multiplies(eqn):
            read, written = _inputs(eqn), eqn.outvars
            moved = sum(program.bytes(program.origin(v)) for v in read)
            moved += sum(map(program.bytes, written))
            kernels.append((_flops(eqn), moved))
            # A kernel that is not fused reads a copy that is cut out of the slot, and what it
            # writes is copied into one.
            cut = {program.origin(v) for v in read} & set(slots)
            put = {v for v in written if program.kept_as(v, slots)}
            copied += 2 * sum(map(program.bytes, cut | put))
        else:
            kernels += [program.fusion(v) for v in eqn.outvars if v in program.materialised]
    elsewhere = {*slots, *stored}
    live, stacked = (program.most_live(elsewhere, cut) for cut in (slots, [*slots, *parameters]))
    return Counted(kernels, copied, collectives, live, stacked)


class _Program:
    """Which variables exist in memory, and what each is made from."""

    def __init__(
        self,
        eqns: Sequence[Any],
        outputs: Iterable[Any],
        parameters: Collection[Any],
        parameter_bytes: float | None,
    ) -> None:
        self.eqns, self.outputs = eqns, [v for v in outputs if jaxprs.is_var(v)]
        self.maker = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.parameters, self.parameter_bytes = set(parameters), parameter_bytes
        self.casts: dict[tuple[Any, Any], Any] = {}
        self.materialised: set[Any] = set()
        wanted = list(self.outputs)
        for eqn in eqns:
            name = eqn.primitive.name
            if name in _HEAVY or name in _COLLECTIVES or jaxprs.multiplies(eqn):
                wanted += _inputs(eqn)
            if name in _REDUCTIONS:
                wanted += eqn.outvars
        for v in wanted:
            self._materialise(self.origin(v))

    def _materialise(self, v: Any) -> None:
        eqn = self.maker.get(v)
        if eqn is None or not self._fuses(eqn) or eqn.primitive.name in _FREE:
            return
        self.materialised.add(v)

    @staticmethod
    def _fuses(eqn: Any) -> bool:
        name = eqn.primitive.name
        return not (name in _HEAVY or name in _COLLECTIVES or jaxprs.multiplies(eqn))

    def origin(self, v: Any) -> Any:
        """What a variable is another name of; a weight in another dtype counts as the weight."""
        while (eqn := self.maker.get(v)) is not None:
            name = eqn.primitive.name
            cast = name == "convert_element_type"
            if name not in _RENAMES or not jaxprs.is_var(eqn.invars[0]):
                return v
            source = eqn.invars[0]
            if cast and self.origin(source) not in self.parameters:
                # Equal casts are one.
                return self.casts.setdefault((self.origin(source), v.aval.dtype), v)
            v = source
        return v

    def kept_as(self, v: Any, slots: Collection[Any]) -> bool:
        """Whether a variable is an output that goes to a slot, perhaps by another name."""
        return any(self.origin(out) is v for out in self.outputs if out in slots)

    def bytes(self, v: Any) -> float:
        size = math.prod(v.aval.shape)
        if v in self.parameters and self.parameter_bytes is not None:
            return size * self.parameter_bytes
        return size * _itemsize(v)

    def fusion(self, v: Any) -> tuple[float, float]:
        """The kernel that writes a variable: no FLOPs of matmuls, and its bytes."""
        return 0.0, self.bytes(v) + sum(map(self.bytes, self._read_for(v)))

    def _read_for(self, v: Any) -> set[Any]:
        """What exists in memory of what a variable is made from, through what is fused into it."""
        read, seen, missing = set[Any](), set[Any](), [v]
        while missing:
            eqn = self.maker.get(missing.pop())
            if eqn is None or id(eqn) in seen:
                continue
            seen.add(id(eqn))
            for operand in map(self.origin, _inputs(eqn)):
                made = self.maker.get(operand)
                outside = made is None or not self._fuses(made) or operand in self.materialised
                if outside:
                    read.add(operand)
                else:
                    missing.append(operand)
        return read

    def most_live(self, stored: Collection[Any], cut: Collection[Any]) -> float:
        """The most bytes at once of what is made here.

        What is cut out of slots, or of a stack of weights, is cut first, and stays until it is last
        read. What is stored elsewhere needs no room once nobody reads it here, and none at all if
        it is element by element: the kernel writes it there. What is made of weights alone is made
        again where it is read.
        """
        weights = {v: frozenset([v]) for v in self.parameters}
        for eqn in self.eqns:
            inputs = [self.origin(v) for v in _inputs(eqn)]
            if self._fuses(eqn) and weights.keys() >= set(inputs):
                made_of = frozenset[Any]().union(*(weights[v] for v in inputs))
                weights |= dict.fromkeys(eqn.outvars, made_of)

        def named(variables: Iterable[Any]) -> frozenset[Any]:
            return frozenset(one for v in variables for one in weights.get(v, (v,)))

        read = named(self.origin(v) for eqn in self.eqns for v in _inputs(eqn))
        first = tuple(v for v in cut if v in read and v not in self.maker)
        operations = [Operation(first, frozenset(), by_element=False)]
        elsewhere = {self.origin(v) for v in stored}
        elsewhere -= {self.origin(v) for eqn in self.eqns for v in _inputs(eqn)}
        for eqn in self.eqns:
            if not self._fuses(eqn):
                reads = named(map(self.origin, _inputs(eqn)))
                operations.append(Operation(tuple(eqn.outvars), reads, by_element=False))
                continue
            operations += [
                Operation(() if v in elsewhere else (v,), named(self._read_for(v)), by_element=True)
                for v in eqn.outvars
                if v in self.materialised and v not in weights
            ]
        returned = [self.origin(v) for v in self.outputs if v not in stored]
        return most_at_once(operations, self.bytes, returned)


def _inputs(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if jaxprs.is_var(v)]


def _itemsize(v: Any) -> int:
    dtype = v.aval.dtype
    return getattr(dtype, "itemsize", 8)  # a key has none on some versions of jax


def _flops(eqn: Any) -> float:
    """Multiplications and additions of a matmul, a convolution or an attention."""
    name, out = eqn.primitive.name, math.prod(eqn.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * out * math.prod(shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        features = kernel[numbers.rhs_spec[0]]
        return 2.0 * out * math.prod(kernel) / features
    if name in _ATTENTION_MATMULS:
        query, key = (v.aval.shape for v in eqn.invars[:2])
        causal = "CAUSAL" in str(eqn.params.get("mask_type", ""))
        whole = 2.0 * _ATTENTION_MATMULS[name] * math.prod(query) * key[1]
        return whole / 2 if causal else whole
    if name == "scan":
        inner = eqn.params["jaxpr"].jaxpr.eqns
        return eqn.params["length"] * sum(map(_flops, inner))
    if name == "cond":
        return max(sum(map(_flops, one.jaxpr.eqns)) for one in eqn.params["branches"])
    return 0.0


def _collective(eqn: Any, sizes: dict[str, int]) -> list[tuple[str, str, float]]:
    """One entry per axis of more than one device: what a device sends of its operands."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = names if isinstance(names, tuple) else (names,)
    group = math.prod(sizes.get(str(name), 1) for name in names)
    if group == 1:
        return []
    kind = _COLLECTIVES[eqn.primitive.name]
    own = sum(math.prod(v.aval.shape) * _itemsize(v) for v in _inputs(eqn))
    times = {
        "sum": 2 * (group - 1) / group,
        "gather": group - 1,
        "scatter": (group - 1) / group,
        "all-to-all": (group - 1) / group,
        "permute": 1,
    }[kind]
    return [("+".join(map(str, names)), kind, own * times)]
