"""The table of every schedule, replayed without jax; a few are executed in `test_equivalence`."""

import collections
import itertools
import re

import jax
import pytest
from asynchronous_reference import Settings
from asynchronous_toy import minibatches, params, pipeline

from jaxpipe.runtime import assembly
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import NONE, TickTable

MOVING = [
    {},
    {"own_slots": True, "gradient_slots": 2},
    {"own_slots": True, "weight_slots": 2},
    {"weight_slots": 2, "gradient_slots": 2, "pieces": 1},
    {"weight_slots": 2, "pieces": 2},
    {"weight_slots": 3, "pieces": 3, "shares": 4},
]
DEEP = ("interleaved", "interleaved-zb", "breadth-first", "breadth-first-fused")
DEEP += ("modular", "modular-fused", "hanayo-fused")
"""Schedules of chunks that do not all fit into the slots, so that they move under layers."""


@pytest.mark.parametrize(
    ("name", "options"),
    [*((entry.name, {}) for entry in catalog.entries()), *((name, {"chunks": 4}) for name in DEEP)],
)
def test_every_action_finds_its_layers_residuals_and_weights_and_every_gradient_is_reduced(
    name, options
):
    """`test_lower` follows the messages."""
    for stages, microbatches in ((1, 2), (2, 4), (4, 7)):
        if options:
            microbatches = 2 * stages  # not every schedule of many chunks takes any number
        schedule = catalog.build(name, stages=stages, microbatches=microbatches, **options)
        virtual = schedule.placement.num_virtual_stages
        for moving in MOVING:
            table = lower(schedule, [s % 3 for s in range(virtual)], **moving)
            for stage in range(stages):
                replay_residuals(table, stage)
                replay_weights(table, stage)
                replay_gradients(table, stage)


def actions(table: TickTable, stage: int):
    """The cells of a stage in the order of their execution: tick, kind, work, and slots."""
    for tick, (kind, cell) in itertools.product(range(table.num_ticks), table.passes.items()):
        if cell.runs[tick, stage]:
            slots = {
                name: int(column[tick, stage])
                for name, column in vars(cell).items()
                if column is not None  # without slices
            }
            yield tick, kind, (slots.pop("chunk"), slots.pop("microbatch")), slots


def replay_residuals(table: TickTable, stage: int) -> None:
    """F fills slots, B reads some of them and fills others, and W reads and frees the last."""
    kept, ran = {}, collections.defaultdict(list)
    fills = {Kind.F: ("until_b", "until_w"), Kind.B: ("crossing",)}
    reads = {Kind.B: ("until_b",), Kind.W: ("until_w", "crossing"), Kind.BW: fills[Kind.F]}
    for _, kind, work, slots in actions(table, stage):
        virtual = table.schedule.placement.virtual_stages[stage][work[0]]
        assert slots["layers"] == table.layer_counts[virtual]
        ran[work].append(kind)
        for name in reads.get(kind, ()):
            assert kept.pop((name, slots[name])) == work
        for name in fills.get(kind, ()):
            assert slots[name] < table.num_slots[name]
            assert kept.setdefault((name, slots[name]), work) is work  # it was free
    assert not kept
    assert ran.keys() == all_work(table)
    assert all(kinds in ([Kind.F, Kind.BW], [Kind.F, Kind.B, Kind.W]) for kinds in ran.values())


def all_work(table: TickTable) -> set[tuple[int, int]]:
    """Chunk and microbatch of everything that a stage runs."""
    counts = table.schedule.num_chunks, table.schedule.num_microbatches
    return set(itertools.product(*map(range, counts)))


def moves(transfers, tick: int, stage: int):
    chunk = int(transfers.chunk[tick, stage])
    return [] if chunk == NONE else [(int(transfers.slot[tick, stage]), chunk)]


def edge_moves(transfers, stage: int):
    moved = zip(transfers.edge.chunk[:, stage], transfers.edge.slot[:, stage], strict=True)
    return [(int(slot), int(chunk)) for chunk, slot in moved if chunk != NONE]


def replay_weights(table: TickTable, stage: int) -> None:
    """A chunk is whole in the slot that an action reads, and has been before its tick begins if it
    moves in parts."""
    gathers = table.gathers
    slots = {slot: (chunk, gathers.parts) for slot, chunk in edge_moves(gathers, stage)}
    reads = collections.defaultdict(list)
    for tick, _, (chunk, _), cell in actions(table, stage):
        reads[tick].append((cell["weights"], chunk))
    for tick in range(table.num_ticks):
        moved = moves(gathers, tick, stage)
        for slot, chunk in moved:
            before = slots.pop(slot, None)
            assert slot < gathers.num_slots
            if gathers.whole:
                slots[slot] = chunk, gathers.parts
            else:
                going = before is not None and before[0] == chunk and before[1] < gathers.parts
                slots[slot] = chunk, 1 + (before[1] if going else 0)
                assert slot not in {slot for slot, _ in reads[tick]}
        for slot, chunk in reads[tick]:
            assert slots[slot] == (chunk, gathers.parts)


def replay_gradients(table: TickTable, stage: int) -> None:
    """A slot sums gradients of one chunk, which are reduced once."""
    reduces, sums, reduced = table.reduces, {}, collections.Counter()
    moved_parts = collections.Counter()
    adds = collections.defaultdict(list)
    for tick, kind, work, cell in actions(table, stage):
        if kind in (Kind.W, Kind.BW):
            adds[tick].append((cell["gradient"], work))

    def leave(slot: int, chunk: int) -> None:
        works = sums.pop(slot)
        assert {work[0] for work in works} == {chunk}
        reduced.update(works)

    for tick in range(table.num_ticks):
        if reduces.group:
            for slot, chunk in moves(reduces, tick, stage):
                assert slot not in {slot for slot, _ in adds[tick]}
                moved_parts[slot] += 1
                if moved_parts[slot] == reduces.parts:
                    leave(slot, chunk)
                    moved_parts[slot] = 0
        for slot, work in adds[tick]:
            assert slot < reduces.num_slots
            assert not moved_parts[slot]
            assert {other[0] for other in sums.setdefault(slot, [])} <= {work[0]}
            sums[slot].append(work)
        if not reduces.group:
            for slot, chunk in moves(reduces, tick, stage):
                leave(slot, chunk)
    for slot, chunk in edge_moves(reduces, stage):
        leave(slot, chunk)
    assert not sums
    assert reduced == collections.Counter(all_work(table))


def test_messages_of_an_asynchronous_pipeline_are_never_late(monkeypatch):
    start, (batch,) = params(layers=3), minibatches(1, 4)

    def program(*, overlaps: bool) -> list[str]:
        """Its loops, matmuls and messages, in order: a late message would come before layers."""
        monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: overlaps)
        training = pipeline(Settings(3, 2), start)
        placed = training.pipe.place(start)
        state = training.init(placed, training.optimizer.init(placed), batch)
        text = jax.jit(training.step).lower(state, batch).as_text()
        return re.findall(r"stablehlo\.(while|dot_general|collective_permute)", text)

    apart = program(overlaps=False)
    assert "collective_permute" in apart
    assert program(overlaps=True) == apart
