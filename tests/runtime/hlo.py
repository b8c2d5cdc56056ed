"""Reads compiled HLO text: which instructions run in which loop."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b[a-z]+\d*\[([\d,]*)\]")
_CALLED = re.compile(r"(body|condition|calls|to_apply)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO: its opcode, the shapes of its results, what it calls."""

    opcode: str
    shapes: tuple[tuple[int, ...], ...]
    calls: dict[str, str]
    text: str


class Program:
    """A compiled module, by computation."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                current = self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                shapes = tuple(
                    tuple(int(n) for n in dims.split(",") if n) for dims in _ARRAY.findall(found[2])
                )
                calls = dict(_CALLED.findall(line))
                current.append(Instruction(found[3], shapes, calls, line.strip()))

    def reached(self, computation: str, *, into_loops: bool) -> Iterator[Instruction]:
        """Instructions of a computation and of what it calls, loops inside it left out or not."""
        for instruction in self.computations[computation]:
            yield instruction
            if instruction.opcode == "while" and not into_loops:
                continue
            for called in instruction.calls.values():
                yield from self.reached(called, into_loops=into_loops)

    def tick_loop(self) -> str:
        """The body of the one loop of the entry that contains the messages."""
        bodies = [
            instruction.calls["body"]
            for instruction in self.reached(self.entry, into_loops=False)
            if instruction.opcode == "while"
        ]
        (body,) = [
            body
            for body in bodies
            if any(i.opcode == "collective-permute" for i in self.reached(body, into_loops=False))
        ]
        return body
