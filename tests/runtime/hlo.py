"""Reads compiled HLO text: which instructions run in which loop."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b[a-z]+\d*\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(body|condition|calls|to_apply)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO: its opcode, the shapes of its results, what it calls and reads."""

    name: str
    operands: tuple[str, ...]
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
                operands = tuple(_NAME.findall(line[found.end() :].split("), ")[0]))
                current.append(
                    Instruction(found[1], operands, found[3], shapes, calls, line.strip())
                )

    def reached(self, computation: str, *, into_loops: bool) -> Iterator[Instruction]:
        """Instructions of a computation and of what it calls, loops inside it left out or not."""
        for instruction in self.computations[computation]:
            yield instruction
            if instruction.opcode == "while" and not into_loops:
                continue
            for called in instruction.calls.values():
                yield from self.reached(called, into_loops=into_loops)

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
