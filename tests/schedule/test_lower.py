"""Tick tables, replayed: slots, messages, and how often weights are gathered."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check import validate
from jaxpipe.schedule.lowering.lower import colour_beside, colour_intervals, lower
from jaxpipe.schedule.lowering.table import NONE, BodyParts, TickTable
from jaxpipe.schedule.placement import linear


def beside(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    return colour_beside(starts, ends, np.arange(len(starts)) % 3, set())


@pytest.mark.parametrize("colour", [colour_intervals, beside])
@given(spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=30))
def test_intervals_that_overlap_have_different_slots_and_no_slot_is_wasted(colour, spans):
    intervals = [(start, start + length) for start, length in spans]
    starts, ends = (np.array([span[k] for span in intervals], np.int64) for k in (0, 1))
    slots = colour(starts, ends).tolist()
    for one, other in itertools.combinations(range(len(intervals)), 2):
        if intervals[one][0] <= intervals[other][1] and intervals[other][0] <= intervals[one][1]:
            assert slots[one] != slots[other]
    together = [sum(start <= t <= end for start, end in intervals) for t in range(27)]
    assert set(slots) == set(range(max(together)))


@pytest.mark.parametrize(
    ("name", "most"),
    [("1f1b-fused", 5), ("zb-h1", 5), ("zb-v", 10 * 2), ("dualpipe-v", 11 * 2 * 2)],
)
def test_actions_use_few_sets_of_slots(name, most):
    """No more than slots of what W reads, for every chunk; where less crosses from B to W, of which
    11 and 5 slots of each could be 55 for every chunk, at most twice as many."""
    schedule = catalog.build(name, stages=5, microbatches=20)
    table = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    for kind in table.passes.keys() - {Kind.F}:
        slots = ("until_w",) if kind is Kind.BW else ("until_w", "crossing")
        assert len(table.cells(kind, ("chunk", *slots))) <= most
    assert len(table.cells(Kind.F, ("until_b", "until_w"))) == table.num_slots["until_w"]


def test_cells_have_the_numbers_of_their_places():
    schedule = catalog.build("v-half", stages=3, microbatches=7)
    table = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    for kind, cell in table.passes.items():
        fields = ("chunk", "until_w")
        places, numbers = table.cells(kind, fields), table.cell_numbers(kind, fields)
        assert ((numbers == NONE) == (cell.microbatch == NONE)).all()
        for place in map(tuple, np.argwhere(numbers != NONE)):
            found = {field: getattr(cell, field)[place] for field in fields}
            assert places[numbers[place]] == found
        some = np.arange(table.num_ticks) % 3 == 1
        numbers_of_some = set(numbers[some].ravel()) - {NONE}
        assert table.cells(kind, fields, some) == {n: places[n] for n in sorted(numbers_of_some)}


def test_two_kinds_of_backward_become_one():
    split, fused = (Kind.F, Kind.B, Kind.W), (Kind.F, Kind.BW)
    order = [Action(0, kind, i) for i, kinds in enumerate((split, fused)) for kind in kinds]
    schedule = Schedule("mine", linear(1), 2, (tuple(order),))
    validate(schedule)
    table = lower(schedule, [1])
    passes = table.passes.items()
    ticks = {kind.value: cell.layers[:, 0].nonzero()[0].tolist() for kind, cell in passes}
    assert ticks == {"F": [0, 3], "B": [1, 4], "W": [2, 4]}


def cycles(edges: tuple[tuple[int, int], ...]) -> int:
    """Cycles of more than one stage among the edges of a permutation."""
    following, seen, found = dict(edges), set(), 0
    for start in following:
        at, path = start, []
        while at in following and at not in seen:
            seen.add(at)
            path.append(at)
            at = following[at]
        found += len(path) > 1 and at in path
    return found


@pytest.mark.parametrize("name", ["gpipe", "breadth-first", "modular-fused", "1f1b", "zb-v"])
def test_a_tick_has_the_parts_that_its_actions_and_messages_need(name):
    schedule = catalog.build(name, stages=4, microbatches=16)
    counts = [4] * schedule.placement.num_virtual_stages
    table = lower(schedule, counts)
    parts = table.parts(gathers=True, reduces=True)
    for tick, one in enumerate(parts):
        needed = {kind for kind, cell in table.passes.items() if cell.layers[tick].any()}
        for channel in table.channels:
            if (channel.slot[tick] != NONE).any() or (channel.late_slot[tick] != NONE).any():
                needed.add(channel.kind)
        assert all(map(one.has, needed))
        assert one.forward or table.outer.embed[tick] == table.outer.head[tick] == NONE
        assert one.backward or (table.outer.embed_gradient[tick] == NONE).all()
    both = np.mean([one.forward and one.backward for one in parts])
    assert both <= 1 / 4 or both == 1


@pytest.mark.parametrize("name", ["gpipe", "breadth-first", "modular", "gpipe-fused"])
def test_whole_phases_are_two_runs_of_ticks_in_one_direction(name):
    schedule = catalog.build(name, stages=4, microbatches=8)
    table = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    found, rounds = table.runs(gathers=True, reduces=True)
    assert found == (BodyParts(backward=False), BodyParts(forward=False))
    forwards = 8 * schedule.num_chunks + 4 - 1  # the last stage starts p - 1 ticks after the first
    assert rounds.tolist() == [[forwards, table.num_ticks - forwards]]


@pytest.mark.parametrize(
    "shapes",
    [((1, 2), (2, 4), (4, 8)), pytest.param([(8, 16)], marks=pytest.mark.slow)],
    ids=["small", "large"],
)
@pytest.mark.parametrize("name", [entry.name for entry in catalog.entries()])
def test_every_message_is_there_when_it_is_read_and_connects_its_two_ends_alone(name, shapes):
    built = [(p, catalog.build(name, stages=p, microbatches=m)) for p, m in shapes]
    ways = ((True, False), (False, True))
    for (stages, schedule), (overlaps, together) in itertools.product(built, ways):
        counts = [1] * schedule.placement.num_virtual_stages
        table = lower(schedule, counts, overlaps=overlaps, together=together)
        replay(table, overlaps=overlaps)
        assert len(set(table.exchanges)) == len(table.exchanges) == 1 + table.exchange.max()
        for tick, number in enumerate(table.exchange):
            for channel, pairs in zip(table.channels, table.exchanges[number], strict=True):
                received = np.flatnonzero(channel.slot[tick] != NONE)
                assert {receiver for _, receiver in pairs} == set(() if channel.local else received)
                assert set(pairs) <= set(channel.edges)
        lists, exchanges, numbers = table.branches((Kind.F, Kind.B))
        for pairs, number in zip(table.exchanges, numbers, strict=True):
            for own, permutations in zip(lists, exchanges[number], strict=True):
                edges = [edge for n in own for edge in pairs[n]]
                assert sorted(edges) == sorted(itertools.chain(*permutations))
                assert len({receiver for _, receiver in edges}) == len(edges)
                assert len(permutations) == 1 or cycles(edges) > 0 or not edges
                assert all(cycles(edges) <= 1 for edges in permutations)
        # XLA for GPUs compiles a permutation of several cycles to wrong code.
        for channel in table.channels if stages > 1 else ():
            senders, receivers = zip(*channel.edges, strict=True)
            assert len(set(senders)) == len(senders)
            assert len(set(receivers)) == len(receivers)
            assert cycles(channel.edges) <= 1


def replay(table: TickTable, *, overlaps: bool) -> None:
    """Follows the inputs of all virtual stages through the slots of inboxes: who sends them, when,
    and whether they are late."""
    stages, held = table.schedule.placement.stages, table.schedule.placement.virtual_stages
    first, last, V = stages[0], stages[-1], len(stages)
    slots, before, ran = {}, {}, 0

    def put(kind: Kind, stage: int, slot: int, *message: int) -> None:
        assert slots.setdefault((kind, stage, int(slot)), message) is message  # it was free

    for tick in range(table.num_ticks):
        outputs = {}
        if (i := table.outer.embed[tick]) != NONE:
            put(Kind.F, first, table.outer.embed_slot[tick], 0, i, tick - 1, False)
        for kind, cell in table.passes.items():
            if kind is Kind.W:
                continue
            way, step = (Kind.F, 1) if kind is Kind.F else (Kind.B, -1)
            for stage in np.flatnonzero(cell.layers[tick]).tolist():
                s, i = held[stage][cell.chunk[tick, stage]], cell.microbatch[tick, stage]
                target, number, sent, late = slots.pop((way, stage, int(cell.inbox[tick, stage])))
                assert (target, number) == (s, i)
                moved = 0 <= s - step < V and stages[s - step] != stage
                assert late == (overlaps and moved and tick > sent + 1)
                assert tick > sent
                outputs[way, stage] = s + step, i, tick
                ran += 1
        for channel in table.channels:
            arrivals = (channel.slot, outputs, False), (channel.late_slot, before, True)
            for (sender, receiver), (slot, source, late) in itertools.product(
                channel.edges, arrivals
            ):
                if slot[tick, receiver] != NONE:
                    s, *message = source[channel.kind, sender]
                    assert s == NONE or stages[s] == receiver
                    put(channel.kind, receiver, slot[tick, receiver], s, *message, late)
        for i, slot in zip(
            table.outer.embed_gradient[tick], table.outer.embed_gradient_slot[tick], strict=True
        ):
            if i != NONE:
                waits = slot != NONE
                found = slots.pop((Kind.B, first, int(slot))) if waits else outputs[Kind.B, first]
                assert found[:2] == (NONE, i)
        if (i := table.outer.head[tick]) != NONE:
            assert outputs[Kind.F, last] == (V, i, tick)
            put(Kind.B, last, table.outer.head_slot[tick], V - 1, i, tick, False)
        before = outputs
    assert ran == 2 * V * table.schedule.num_microbatches
    assert not slots


@pytest.mark.parametrize("name", ["zb-v", "zb-h1", "1f1b"])
def test_stages_that_embed_together_meet_for_no_cotangent_before_the_last_head(name):
    schedule = catalog.build(name, stages=4, microbatches=16)
    counts = [1] * schedule.placement.num_virtual_stages
    table = lower(schedule, counts, together=True)
    heads = table.outer.head != NONE
    alone = (table.outer.embed_gradient != NONE).any(axis=1) & ~heads
    assert not alone[: heads.nonzero()[0].max()].any()
    slots = lower(schedule, counts).num_slots["dy"]
    assert table.outer.embed_gradient_slot.max() < table.num_slots["dy"] <= max(2, slots)


# Gathers of weights and reductions of gradients.


def gathers_and_reduces(schedule: Schedule, *, slots: int) -> tuple[list[int], list[int]]:
    """Per stage, how many chunks are gathered and how many gradient sums reduced."""
    layers = [1] * schedule.placement.num_virtual_stages
    table = lower(schedule, layers, weight_slots=slots)
    gathers, reduces = (
        (t.chunk != NONE).sum(axis=0).tolist() for t in (table.gathers, table.reduces)
    )
    return gathers, reduces


@pytest.mark.parametrize("v", [3, 4])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_gathers_and_reductions_of_the_published_table(v, k):
    """With two slots the table's count, but for chunks that stay between groups."""
    p = 4
    build = functools.partial(catalog.build, stages=p, microbatches=k * p, chunks=v)
    for name in ("breadth-first", "breadth-first-fused", "modular-fused"):
        assert gathers_and_reduces(build(name), slots=1) == ([2 * v - 1] * p, [v] * p)
        assert gathers_and_reduces(build(name), slots=2)[0] == [2 * v - 2] * p
    grouped = build("breadth-first-fused", group=p)
    for schedule in (grouped, build("interleaved-fused")):
        assert gathers_and_reduces(schedule, slots=1)[1] == [v * k] * p
    assert gathers_and_reduces(grouped, slots=2)[0] == [k * (2 * v - 2) - 2 * (k - 1)] * p


def fewest_gathers(chunks: Sequence[int], slots: int) -> int:
    """Gathers of the best of all choices of the chunk that makes room."""

    @functools.cache
    def after(at: int, held: frozenset[int]) -> int:
        if at == len(chunks):
            return 0
        if chunks[at] in held:
            return after(at + 1, held)
        kept = [held] if len(held) < slots else [held - {out} for out in held]
        return 1 + min(after(at + 1, rest | {chunks[at]}) for rest in kept)

    return after(0, frozenset())


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("name", ["breadth-first-fused", "interleaved", "hanayo", "zb-v"])
def test_no_choice_of_what_makes_room_gathers_less(name, slots):
    options = {} if name == "zb-v" else {"chunks": 4}
    schedule = catalog.build(name, stages=3, microbatches=6, **options)
    chunks = schedule.placement.chunks
    gathers, _ = gathers_and_reduces(schedule, slots=slots)
    assert gathers == [
        fewest_gathers([chunks[action.virtual_stage] for action in order], slots)
        for order in schedule.orders
    ]
