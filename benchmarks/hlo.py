"""Reads compiled HLO text: which instructions run in which loop, and in which order."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CALLED = re.compile(
    r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_SCOPE = re.compile(
    r"/(?:(tick_\w+)/while/body/(?:(?:closed_call|eval_jaxpr)/)?)?"
    r"((?:BW_|B_)?F|BW|B|W|R|enter|leave|embed_gradient|gather|reduce|store_gathered|"
    r"store_reduced|meet/receive[\d_]+|tick_\w+)"
    r"(?:/cells\d+_to\d+/while/body(?:/closed_call)?)*(/cells\d+_to\d+)?"
    r'(?:/chunk(\d+)(?:_layer(\d+)(?:_chunk\d+_layer\d+)*)?((?:_[a-z_]+\d+)*))?/while"'
)
_FIELD = re.compile(r"_([a-z_]+?)(\d+)")
_PERMUTES = frozenset({"collective-permute", "collective-permute-start"})

PASSES = ("F", "B", "BW", "W", "R")
"""The scopes of loops over layers."""


class Scope(NamedTuple):
    """What `jax.named_scope` in `jaxpipe.runtime.tick` calls a loop.

    Args:
      tick: the name of the parts of the tick that it is in; None for a loop outside.
      name: what the loop does; for one over ticks, the name of their parts.
      chunk, layer: where it is of one chunk, or of one layer.
      cell: where it is of one cell: the other fields that the program knows, and their values.
      several: whether it stands around the loops of several cells.
    """

    tick: str | None
    name: str
    chunk: int | None
    layer: int | None
    cell: tuple[tuple[str, int], ...] = ()
    several: bool = False

    @property
    def num_layers(self) -> int:
        """Layers that an iteration runs."""
        return dict(self.cell).get("layers", 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of HLO: its opcode, its results' shapes and bytes, what it calls and reads."""

    name: str
    operands: tuple[str, ...]
    opcode: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    calls: dict[str, str]
    text: str

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Senders and receivers of a permute."""
        found = _PAIRS.search(self.text)
        numbers = [int(n) for n in re.findall(r"\d+", found[1])] if found else []
        return list(zip(numbers[::2], numbers[1::2], strict=True))


class HloProgram:
    """A compiled module, by computation; instructions are in the order in which they run.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> found = HloProgram(jax.jit(jnp.sum).lower(jnp.ones(3)).compile().as_text())
      >>> [instruction.shapes for instruction in found.computations[found.entry]][-1]
      ((),)
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._by_name: dict[str, dict[str, Instruction]] = {}
        current: list[Instruction] = []
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                current = self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                current.append(_instruction(line, found))

    def reached(self, computation: str, *, into_loops: bool) -> Iterator[Instruction]:
        """Instructions of a computation and of what it calls, loops inside it left out or not."""
        for instruction in self.computations[computation]:
            yield instruction
            if instruction.opcode == "while" and not into_loops:
                continue
            for called in instruction.calls.values():
                yield from self.reached(called, into_loops=into_loops)

    def operands(self, computation: str, of: Instruction) -> list[Instruction]:
        """The instructions of a computation whose results one of them reads."""
        if computation not in self._by_name:
            self._by_name[computation] = {one.name: one for one in self.computations[computation]}
        by_name = self._by_name[computation]
        return [by_name[name] for name in of.operands if name in by_name]

    def before(self, computation: str, last: Instruction) -> list[Instruction]:
        """Instructions of a computation whose results ``last`` depends on."""
        by_name = {instruction.name: instruction for instruction in self.computations[computation]}
        found: dict[str, Instruction] = {}
        missing = list(last.operands)
        while missing:
            name = missing.pop()
            if name in by_name and name not in found:
                found[name] = by_name[name]
                missing.extend(by_name[name].operands)
        return list(found.values())

    def dot_flops(self, computation: str) -> int:
        """Multiplications and additions of the matmuls that one run of a computation does.

        Raises:
          ValueError: there is a loop in it, of which the text does not say how often it runs.
        """
        flops = 0
        for instruction in self.computations[computation]:
            if instruction.opcode == "while":
                raise ValueError(f"How often does {instruction.name} run?")
            if instruction.opcode == "dot":
                flops += self.flops_of_dot(computation, instruction)
            flops += sum(self.dot_flops(called) for called in instruction.calls.values())
        return flops

    def flops_of_dot(self, computation: str, dot: Instruction) -> int:
        """Multiplications and additions of one matmul of a computation."""
        summed = _CONTRACTED.search(dot.text)
        assert summed is not None  # every dot has these, if only empty ones
        left = self.operands(computation, dot)[0]
        sizes = (left.shapes[0][int(dim)] for dim in summed[1].split(",") if dim)
        return 2 * math.prod(dot.shapes[0]) * math.prod(sizes)

    def tick_loops(self) -> list[str]:
        """The bodies of the entry's loops that contain messages: over ticks, or rounds of them."""
        bodies = [
            instruction.calls["body"]
            for instruction in self.reached(self.entry, into_loops=False)
            if instruction.opcode == "while"
        ]
        return [
            body
            for body in bodies
            if any(i.opcode in _PERMUTES for i in self.reached(body, into_loops=True))
        ]

    def tick_loop(self) -> str:
        """The only one of them."""
        (body,) = self.tick_loops()
        return body

    def tick_bodies(self) -> dict[str, str]:
        """The computations that are one tick, by the name of its parts."""
        return {
            scope.tick: name
            for name in self.computations
            for loop in self.loops(name)
            if (scope := scope_of(loop)) and scope.tick
        }

    def layer_loops(self) -> dict[str, list[Instruction]]:
        """The loops over layers of all bodies, by pass, in the order of `PASSES`."""
        loops = [loop for body in self.tick_bodies().values() for loop in self.loops(body)]
        found = {name: [one for one in loops if pass_of(one) == name] for name in PASSES}
        return {name: some for name, some in found.items() if some}

    def loops(self, computation: str) -> list[Instruction]:
        """The loops of a computation, those around loops of several cells replaced by these."""
        found = []
        for row in self.computations[computation]:
            if row.opcode == "while":
                found += self.loops(row.calls["body"]) if is_around(row) else [row]
        return found


@functools.cache
def scope_of(loop: Instruction) -> Scope | None:
    """The name of a loop; None if it has none."""
    if (found := _SCOPE.search(loop.text)) is None:
        return None
    tick, name, several, *numbers, cell = found.groups()
    fields = tuple((field, int(n)) for field, n in _FIELD.findall(cell or ""))
    chunk, layer = (None if n is None else int(n) for n in numbers)
    return Scope(tick, name, chunk, layer, fields, several is not None)


def is_around(loop: Instruction) -> bool:
    """Whether a loop stands around those of several cells."""
    scope = scope_of(loop)
    return scope is not None and scope.several


def layers_of(loop: Instruction) -> int:
    """Layers that an iteration of a loop over layers runs."""
    scope = scope_of(loop)
    return 1 if scope is None else scope.num_layers


def pass_of(row: Instruction) -> str | None:
    """The pass that a loop over layers belongs to; None for what is not such a loop."""
    scope = scope_of(row) if row.opcode == "while" else None
    return scope.name if scope and scope.name in PASSES else None


def _instruction(line: str, found: re.Match[str]) -> Instruction:
    arrays = _ARRAY.findall(found[2])
    shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for _, _, dims in arrays)
    sizes = tuple(
        math.prod(shape) * max(int(bits or 8), 8) // 8
        for shape, (_, bits, _) in zip(shapes, arrays, strict=True)
    )
    operands = tuple(_NAME.findall(line[found.end() :].split("), ")[0]))
    calls = dict(_CALLED.findall(line))
    if branches := _BRANCHES.search(line):
        calls |= {f"branch {n}": name for n, name in enumerate(_NAME.findall(branches[1]))}
    return Instruction(found[1], operands, found[3], shapes, sizes, calls, line.strip())
