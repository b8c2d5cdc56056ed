"""Collectives, edges of messages, and copies of whole buffers in the ticks of a compiled step."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import numpy as np
from jax.sharding import Mesh

import jaxpipe
from benchmarks.hlo import HloProgram, Instruction, pass_of
from jaxpipe.runtime import memory
from jaxpipe.runtime.defaults import RESIDUALS
from jaxpipe.runtime.tick.setup import INBOX
from jaxpipe.runtime.types import Batch
from jaxpipe.schedule.lowering.table import BodyParts, Edges, TickTable

_MOVING = ("collective-permute", "all-gather", "all-reduce", "reduce-scatter", "send")
_FUSED_START = "async-collective-start"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the tick loop.

    Args:
      opcode: what it does.
      bytes: of its largest array.
      place: "tick"; "end" for a message that every such tick ends with; or, where it runs only in
        some ticks, "loop" for a gated one or the branch of a conditional.
      hidden_by: loops over layers between its start and its end; 0 if it is synchronous.
      tick: the name of the tick's parts.
      arrays: how many travel: XLA combines messages with equal edges.
      pairs: the devices that a message connects.
    """

    opcode: str
    bytes: int
    place: str
    hidden_by: int
    tick: str
    arrays: int = 1
    pairs: Edges = ()


def collectives(program: HloProgram) -> list[Collective]:
    """The collectives of one tick of every kind, at any depth."""
    found = []
    ticks = program.tick_bodies()
    for name, tick in ticks.items():
        # In the entry stand the ticks that run once, and what moves at the edges. Branches of these
        # ticks may be one computation, which has the name of one of them.
        scope = f"{name}/" if tick == program.entry else ""
        places = dict(map(reversed, bodies_by_place(program, tick, scope=scope)))
        # XLA leaves out the loop of a tick that runs once: it stands beside those of others.
        inside = [other for other in ticks.values() if other != tick and other in places]
        others = {body for other in inside for body in loop_bodies(program, other)}
        for body, place in places.items():
            if body in others:
                continue
            rows = program.computations[body]
            for position, row in enumerate(rows):
                opcode, asynchronous = _moves(program, row)
                if opcode is None or (body == tick and scope not in row.text):
                    continue
                between = rows[position : _end(rows, position)] if asynchronous else []
                hidden_by = sum(pass_of(later) is not None for later in between)
                where = "end" if place == "tick" and "/meet/" in row.text else place
                arrays = len(row.operands)
                one = opcode, max(row.bytes), where, hidden_by, name, arrays, tuple(row.pairs)
                found.append(Collective(*one))
    return found


def _moves(program: HloProgram, row: Instruction) -> tuple[str | None, bool]:
    """The opcode of the collective that an instruction runs or starts, None for any other, and
    whether it ends elsewhere.

    XLA for TPUs puts gathers into fusions, with steps of them in the loops that hide them, and
    reductions whose parts do not fill tiles. It sends what goes to another slice of TPUs.
    """
    if row.calls.get("calls", "").startswith("all-reduce-scatter"):
        return "reduce-scatter", False
    if row.name.startswith(_FUSED_START):
        return next(one.opcode for one in fused(program, row) if one.opcode in _MOVING), True
    opcode = row.opcode.removesuffix("-start")
    starts = (row.opcode != opcode or opcode == "send") and '"is_sync":true' not in row.text
    return (opcode if opcode in _MOVING else None), starts


def _end(rows: list[Instruction], start: int) -> int:
    """The row in which a collective ends that starts in one."""
    name, after = rows[start].name, range(start + 1, len(rows))
    if name.startswith(_FUSED_START):
        done = name.replace("start", "done")
        return next(i for i in after if rows[i].name == done)
    return next(i for i in after if name in rows[i].operands)


def edges_of_stages(pairs: Edges, mesh: Mesh) -> Edges:
    """The stages that a message between devices connects."""
    names, shape = mesh.axis_names, mesh.devices.shape
    stage = np.unravel_index(np.arange(mesh.size), shape)[names.index("stage")]
    return tuple(sorted({(int(stage[sender]), int(stage[to])) for sender, to in pairs}))


def check_edges(messages: list[Collective], table: TickTable) -> None:
    """Checks that messages, with stages for devices, connect what the table says: late ones all
    pairs that ever have one, and others, in every branch, those of one of the table's exchanges."""
    for tick in {message.tick for message in messages}:
        parts = BodyParts("forward" in tick, "backward" in tick)
        runs = [parts.has(channel.kind) for channel in table.channels]
        late = [c.late_edges for c in itertools.compress(table.channels, runs) if c.late_edges]
        late = [] if tick.endswith("first") else late  # nothing has been sent before
        kinds = {c.kind for c in itertools.compress(table.channels, runs)}
        exchanges = [itertools.chain(*lists) for lists in table.branches(kinds)[1]]
        by_place: dict[str, list[Edges]] = {}
        for one in messages:
            if one.tick == tick:
                by_place.setdefault(one.place, []).extend([one.pairs] * one.arrays)
        # Where activations and cotangents share their outbox, they travel as one message.
        assert sorted(by_place.pop("tick", [])) in (sorted(late), sorted(set(late))), tick
        found = sorted(sorted(pairs) for pairs in by_place.values())
        assert found == sorted(filter(None, map(sorted, exchanges))), tick


def buffer_shapes(pipe: jaxpipe.Pipeline, batch: Batch) -> set[tuple[int, ...]]:
    """The shapes of the tick loop's buffers, without dimensions of 1.

    A buffer holds more than one layer of one microbatch; one layer's values are not a buffer, and
    its weights are none.
    """
    buffers = memory.buffers(pipe, batch)
    leaves = jax.tree.leaves(buffers)
    found = {squeezed(leaf.shape) for leaf in leaves if math.prod(leaf.shape[:-1]) > 1}
    kept = [buffers.get(name, []) for name in (*INBOX.values(), *RESIDUALS)]
    values = {squeezed(leaf.shape[1:]) for leaf in jax.tree.leaves(kept)}
    piece = jax.tree.leaves(pipe.layout.layers.piece)
    weights = {squeezed(leaf.struct(sharded=s).shape) for leaf in piece for s in (False, True)}
    return found - values - weights


def whole_buffers(program: HloProgram, shapes: set[tuple[int, ...]]) -> list[Instruction]:
    """The operations that copy, transpose or write a whole buffer in the tick loop."""
    found = []
    loops = (body for loop in program.tick_loops() for body in loop_bodies(program, loop))
    for body in loops:
        for row in program.computations[body]:
            inside = {i.opcode for i in fused(program, row)}
            in_place = row.opcode == "fusion" and "dynamic-update-slice" in inside
            writes = row.opcode in ("copy", "copy-start", "transpose", "fusion") and not in_place
            if writes and any(squeezed(shape) in shapes for shape in row.shapes):
                found.append(row)
    return found


def loop_bodies(program: HloProgram, computation: str) -> list[str]:
    """A computation, and the bodies of all loops and branches in it."""
    return [body for _, body in bodies_by_place(program, computation)]


def bodies_by_place(
    program: HloProgram, computation: str, place: str = "tick", *, scope: str = ""
) -> list[tuple[str, str]]:
    """The computations of `loop_bodies`, each with its place: that of `Collective`; of those that a
    computation itself calls, only those in a scope."""
    found = [(place, computation)]
    for row in program.computations[computation]:
        for name, called in row.calls.items() if scope in row.text else ():
            if row.opcode == "while" and name == "body":
                found += bodies_by_place(program, called, "loop")
            elif row.opcode == "conditional":
                found += bodies_by_place(program, called, name)
            elif row.opcode == "call":
                found += bodies_by_place(program, called, place)
    return found


def fused(program: HloProgram, row: Instruction) -> list[Instruction]:
    """The operations in a fusion."""
    return [i for called in row.calls.values() for i in program.reached(called, into_loops=True)]


def ends_tick(one: dict) -> bool:
    """Whether a collective, as a dictionary, is a message that is not late."""
    return one["opcode"] == "collective-permute" and one["place"] != "tick"


def transfers(found: list[dict], opcodes: tuple[str, ...]) -> str:
    """How each is hidden: "2 in a loop" are two that nothing overlaps but most ticks skip."""
    rows = [row for row in found if row["opcode"] in opcodes and not ends_tick(row)]
    gated = sum(row["place"] != "tick" for row in rows)
    always = ", ".join(str(row["hidden_by"]) for row in rows if row["place"] == "tick")
    return "; ".join(filter(None, (always, f"{gated} in a loop" if gated else "")))


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of 1."""
    return tuple(n for n in shape if n != 1)
