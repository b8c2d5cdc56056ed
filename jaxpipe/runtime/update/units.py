"""Cuts a function of whole trees, such as an optimizer's update, into programs of units.

A *unit* is the embedding, the head, what layers share, or one layer. What a function computes for a
unit may read that unit's arrays and what all units have in common: counts and rates, and scalars
computed from several units, such as a global norm. These take a *pass* more: every unit gives its
scalars, then every unit goes on with what has become of them. `docs/design/004-optimizers.md`
explains it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Env
from jaxpipe.runtime.types import Shapes, Tree

Unit: TypeAlias = str | int
"""``"embed"``, ``"head"``, ``"shared"``, or the canonical number of a layer."""

_LARGEST_SHARED = 1024
"""Elements of an array that is computed once for all units; a larger one where it is read."""


class UnitsMeetError(ValueError):
    """A unit needs arrays of another."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """What a unit computes in one pass.

    Args:
      eqns: equations, in program order.
      inputs: all of the unit's input variables.
      shared: variables that it reads of what all units share.
      targets: variables and literals that it computes.
    """

    eqns: tuple[Any, ...]
    inputs: tuple[Any, ...]
    shared: tuple[Any, ...]
    targets: tuple[Any, ...]

    def signature(self) -> tuple[Any, ...]:
        """What slices have in common that do the same with arrays of the same shapes."""
        numbers: dict[Any, int] = {}

        def name(atom: Any) -> Any:
            if jaxprs.is_var(atom):
                return numbers.setdefault(atom, len(numbers))
            return np.asarray(atom.val).tobytes()

        def atoms(variables: Iterable[Any]) -> tuple[Any, ...]:
            return tuple((name(v), str(v.aval)) for v in variables)

        given = atoms(self.inputs), atoms(self.shared)
        body = tuple(
            (
                eqn.primitive.name,
                str(sorted(eqn.params.items())),
                atoms(eqn.invars),
                atoms(eqn.outvars),
            )
            for eqn in self.eqns
        )
        return *given, body, atoms(self.targets)


class Units:
    """A function of trees, cut into programs of units.

    Args:
      function: of trees of arrays.
      args: shapes of its arguments, by name.
      unit_of: finds the unit of every leaf of a tree of shapes; None for what all share.

    Attributes:
      result: shapes of the function's result.
      consts: values of the program's constants.
      passes: how often units must give scalars before their results can be computed.
      mixes: says where units give scalars for the first time; None if no unit does.

    Raises:
      UnitsMeetError: a unit that needs the arrays of another.
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        args: dict[str, Shapes],
        unit_of: Callable[[Tree], Sequence[Unit | None]],
    ) -> None:
        traced, self.result = jax.make_jaxpr(function, return_shape=True)(*args.values())
        program = jaxprs.flatten(traced, selects=True)
        self.consts = jaxprs.consts(program)
        self._inputs, self._outputs = program.jaxpr.invars, program.jaxpr.outvars
        self._paths = dict(zip(self._inputs, _paths(args), strict=True))
        self._eqns = jaxprs.needed(program.jaxpr.eqns, self._outputs)
        self._maker = {v: eqn for eqn in self._eqns for v in eqn.outvars}
        self._order = {id(eqn): number for number, eqn in enumerate(self._eqns)}
        owners = [unit for arg in args.values() for unit in unit_of(arg)]
        self._unit = dict(zip(self._inputs, owners, strict=True))
        self._ready = dict.fromkeys([*self._inputs, *self.consts], 0)
        self._given: dict[Unit, dict[Any, int]] = {}
        self.mixes: str | None = None
        for eqn in self._eqns:
            self._place(eqn)
        self._results: dict[Unit | None, list[Any]] = {}
        for v, unit in zip(self._outputs, unit_of(self.result), strict=True):
            self._results.setdefault(unit, []).append(v)
        self.passes = max(
            (self._read(v, unit) for unit, found in self._results.items() for v in found), default=0
        )

    # Which unit computes what, and in which pass.

    def _place(self, eqn: Any) -> None:
        """Decides which unit computes an equation, or None: all of them, each for itself."""
        read = [v for v in eqn.invars if jaxprs.is_var(v)]
        owned = {v: self._unit[v] for v in read if self._unit.get(v) is not None}
        large = {unit for v, unit in owned.items() if math.prod(v.aval.shape) > 1}
        met = any(self._ready[v] > 0 and v not in owned for v in read)
        unit = None
        if len(large) > 1:
            raise UnitsMeetError(self._refusal(eqn, owned))
        if large:
            (unit,) = large
        elif len(set(owned.values())) == 1 and not met:
            (unit,) = set(owned.values())
        if unit is None and owned and self.mixes is None:
            names = " and ".join(list(dict.fromkeys(map(self._name, owned)))[:2])
            self.mixes = f"{eqn.primitive.name} reads {names}"
        ready = max((self._read(v, unit) for v in read), default=0)
        for v in eqn.outvars:
            self._unit[v], self._ready[v] = unit, ready

    def _read(self, atom: Any, unit: Unit | None) -> int:
        """The first pass in which a unit can read a variable; another one's scalar is given."""
        if not jaxprs.is_var(atom):
            return 0
        owner, ready = self._unit.get(atom), self._ready[atom]
        if owner is None or owner == unit:
            return ready
        if math.prod(atom.aval.shape) > 1:
            owner_of = "no parameter" if unit is None else repr(unit)
            raise UnitsMeetError(
                f"What this optimizer computes for {owner_of} is made of {self._name(atom)} "
                f"{_SCALARS}"
            )
        self._given.setdefault(owner, {})[atom] = ready
        return ready + 1

    def _refusal(self, eqn: Any, owned: dict[Any, Unit]) -> str:
        first: dict[Unit, Any] = {}
        for v, unit in owned.items():
            if math.prod(v.aval.shape) > 1:
                first.setdefault(unit, v)
        names = " and ".join([self._name(v) for v in first.values()][:2])
        return f"This optimizer's {eqn.primitive.name} reads {names} {_SCALARS}"

    def _name(self, v: Any) -> str:
        """The first parameter behind a variable."""
        while v in self._maker:
            read = [u for u in self._maker[v].invars if jaxprs.is_var(u)]
            v = max(read, key=lambda u: self._unit.get(u) is not None)
        return self._paths[v]

    # Slices.

    def given(self, unit: Unit, number: int) -> Slice:
        """What a unit computes in a pass for all others."""
        ready = self._given.get(unit, {})
        return self._slice(unit, [v for v in ready if ready[v] == number])

    def results(self, unit: Unit) -> Slice:
        """What a unit computes in the end."""
        return self._slice(unit, self._results.get(unit, []))

    def _slice(self, unit: Unit, targets: list[Any]) -> Slice:
        eqns: dict[int, Any] = {}
        shared: dict[Any, None] = {}
        for v in self._behind(targets, lambda v: self._is_shared(v, unit)):
            if self._is_shared(v, unit):
                shared[v] = None
            elif v in self._maker:
                eqns[id(self._maker[v])] = self._maker[v]
        ordered = [eqns[key] for key in sorted(eqns, key=self._order.__getitem__)]
        inputs = [v for v in self._inputs if self._unit[v] == unit]
        return Slice(*map(tuple, (ordered, inputs, shared, targets)))

    def _behind(self, targets: Iterable[Any], stops: Callable[[Any], bool]) -> Iterator[Any]:
        """The targets, and what they are made of as far as variables where it stops."""
        seen: set[Any] = set()
        waiting = [v for v in reversed(list(targets)) if jaxprs.is_var(v)]
        while waiting:
            v = waiting.pop()
            if v in seen:
                continue
            seen.add(v)
            yield v
            if v in self._maker and not stops(v):
                waiting += [u for u in reversed(self._maker[v].invars) if jaxprs.is_var(u)]

    def _is_shared(self, v: Any, unit: Unit) -> bool:
        """Whether a unit reads a variable of what all share, and does not compute it."""
        owner = self._unit.get(v)
        if owner is not None:
            return owner != unit
        return v not in self._maker or math.prod(v.aval.shape) <= _LARGEST_SHARED

    # What all share.

    def shared_results(self) -> list[Any]:
        """The results that belong to no unit, in their order."""
        return self._results.get(None, [])

    def start(self, values: Iterable[jax.Array]) -> Env:
        """What all units share at first, from the arguments' leaves that belong to no unit."""
        inputs = [v for v in self._inputs if self._unit[v] is None]
        return self.consts | dict(zip(inputs, values, strict=True))

    def go_on(self, env: Env, wanted: Iterable[Any], number: int) -> Env:
        """What all units share in a pass, as far as anything wanted is made of it.

        ``env`` holds the scalars that units gave in the passes before.
        """
        needed = {
            id(self._maker[v])
            for v in self._behind(wanted, lambda v: self._unit.get(v) is not None)
            if v in self._maker and self._unit[v] is None and self._ready[v] == number
        }
        ordered = sorted(needed, key=self._order.__getitem__)
        return jaxprs.run([self._eqns[self._order[key]] for key in ordered], env)


_SCALARS = (
    "at once. A stage has its own layers only, and other units can give it no more than scalars, "
    "such as a norm. Use a transformation that treats every parameter by itself."
)


def _paths(args: dict[str, Shapes]) -> list[str]:
    return [
        name + jax.tree_util.keystr(path)
        for name, arg in args.items()
        for path, _ in jax.tree.leaves_with_path(arg)
    ]
