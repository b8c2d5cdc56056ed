"""Cuts a function of whole trees, such as an optimizer's update, into programs of units.

A *unit* is the embedding, the head, what layers share, or one layer. What a function computes for a
unit may read that unit's arrays and what all units share: counts and rates, and scalars computed
from several units, such as a global norm. Each of these takes a *round* more: every unit gives its
scalars, then every unit goes on with what has become of them. `docs/design/004-optimizers.md`
explains it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Atom, Eqn, Eqns
from jaxpipe.runtime.types import Shapes, Tree, Unit

_LARGEST_SHARED = 1024
"""Elements of an array that is computed once for all units; a larger one where it is read."""


class UnitsMeetError(ValueError):
    """A unit needs arrays of another."""


class Slice(NamedTuple):
    """The part of the program that a unit runs in one round.

    Args:
      inputs: all of the unit's input variables.
      shared: variables that it reads of what all units share.
      targets: variables and literals that it computes.
    """

    eqns: Eqns
    inputs: Sequence[Atom]
    shared: Sequence[Atom]
    targets: Sequence[Atom]

    def signature(self) -> str:
        """Describes the program: those with equal signatures compute the same."""
        return jaxprs.signature(self.eqns, [*self.inputs, *self.shared], self.targets)


class Units:
    """A function of trees, cut into programs of units.

    Args:
      unit_of: finds the unit of every leaf of a tree of shapes; None for what all share.

    Attributes:
      inputs, results: variables that belong to no unit, of the arguments and of the result.
      rounds: how often units must give scalars before their results can be computed.
      mixes: says where units give scalars for the first time; None if no unit does.
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
        variables, outputs = program.jaxpr.invars, program.jaxpr.outvars
        self._eqns = jaxprs.needed(program.jaxpr.eqns, outputs)
        owners = [unit for arg in args.values() for unit in unit_of(arg)]
        self._unit = dict.fromkeys(self.consts) | dict(zip(variables, owners, strict=True))
        self._path = dict.fromkeys(self.consts, "") | dict(
            zip(variables, _paths(args), strict=True)
        )
        self._round = dict.fromkeys(self._unit, 0)
        # Variables that units read without computing them: those of no unit, and scalars given.
        self._shared = {v for v, unit in self._unit.items() if unit is None}
        self._given: dict[Unit, dict[Atom, None]] = {}
        self.mixes: str | None = None
        for eqn in self._eqns:
            self._place(eqn)
        self._inputs = _by_unit(variables, owners)
        self._results = _by_unit(outputs, unit_of(self.result))
        self.inputs, self.results = self._inputs.get(None, []), self._results.get(None, [])
        read = [self._read(v, unit) for unit, found in self._results.items() for v in found]
        self.rounds = max(read, default=0)

    def _place(self, eqn: Eqn) -> None:
        """Decides which unit computes an equation, or None: all of them, each for itself."""
        read = [v for v in eqn.invars if jaxprs.is_var(v)]
        owned = [v for v in read if self._unit[v] is not None]
        arrays: dict[Unit | None, Tree] = {}
        for v in owned:
            if v.aval.size > 1:
                arrays.setdefault(self._unit[v], v)
        if len(arrays) > 1:
            names = " and ".join([self._path[v] for v in arrays.values()][:2])
            raise UnitsMeetError(f"This optimizer's {eqn.primitive.name} reads {names} {_SCALARS}")
        # A sum of one scalar per unit takes one round: what is summed already belongs to no unit.
        met = any(self._round[v] > 0 for v in read if v not in owned)
        units = set(arrays or [self._unit[v] for v in owned if not met])
        unit = units.pop() if len(units) == 1 else None
        if unit is None and owned and self.mixes is None:
            names = " and ".join(list(dict.fromkeys(self._path[v] for v in owned))[:2])
            self.mixes = f"{eqn.primitive.name} reads {names}"
        first = max((self._read(v, unit) for v in read), default=0)
        path = next((self._path[v] for v in [*owned, *read]), "")
        for v in eqn.outvars:
            self._unit[v], self._round[v], self._path[v] = unit, first, path
            if unit is None and v.aval.size <= _LARGEST_SHARED:
                self._shared.add(v)

    def _read(self, atom: Atom, unit: Unit | None) -> int:
        """Finds the first round in which a unit can read a value; another one's scalar is given."""
        if not jaxprs.is_var(atom):
            return 0
        owner = self._unit[atom]
        if owner is None or owner == unit:
            return self._round[atom]
        if atom.aval.size > 1:
            owner_of = "no parameter" if unit is None else repr(unit)
            raise UnitsMeetError(
                f"What this optimizer computes for {owner_of} is made of {self._path[atom]} "
                f"{_SCALARS}"
            )
        self._given.setdefault(owner, {})[atom] = None
        self._shared.add(atom)
        return self._round[atom] + 1

    def slices(self, unit: Unit) -> list[Slice]:
        """Programs of a unit, one per round: of the scalars that it gives, the last of results."""
        given = self._given.get(unit, {})
        rounds = [[v for v in given if self._round[v] == n] for n in range(self.rounds)]
        known, inputs = self._shared.difference(given), self._inputs.get(unit, [])
        slices = []
        for targets in [*rounds, self._results.get(unit, [])]:
            eqns = jaxprs.needed(self._eqns, targets, known)
            read = [*(v for eqn in eqns for v in eqn.invars), *targets]
            shared = dict.fromkeys(v for v in read if jaxprs.is_var(v) and v in known)
            slices.append(Slice(eqns, inputs, list(shared), targets))
        return slices

    def of_all(self, wanted: Iterable[Atom]) -> list[list[Atom]]:
        """Equations of no unit, by round, as far as results or anything wanted needs them."""
        unowned = [eqn for eqn in self._eqns if self._unit[eqn.outvars[0]] is None]
        needed = jaxprs.needed(unowned, [*wanted, *self.results])
        rounds = range(self.rounds + 1)
        return [[eqn for eqn in needed if self._round[eqn.outvars[0]] == n] for n in rounds]


_SCALARS = (
    "at once. A stage has its own layers only, and other units can give it no more than scalars, "
    "such as a norm. Use a transformation that treats every parameter by itself."
)


def _by_unit(atoms: Sequence[Atom], units: Sequence[Unit | None]) -> dict[Unit | None, list[Atom]]:
    found: dict[Unit | None, list[Atom]] = {}
    for atom, unit in zip(atoms, units, strict=True):
        found.setdefault(unit, []).append(atom)
    return found


def _paths(args: dict[str, Shapes]) -> list[str]:
    return [
        name + jax.tree_util.keystr(path)
        for name, arg in args.items()
        for path, _ in jax.tree.leaves_with_path(arg)
    ]
