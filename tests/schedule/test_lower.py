"""Slots: as few as the intervals need, and never two values in one."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule, Slice
from jaxpipe.schedule.check.validate import validate
from jaxpipe.schedule.lowering.lower import colour_intervals, lower
from jaxpipe.schedule.lowering.table import NONE, Parts
from jaxpipe.schedule.placement import linear
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import Costs


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=30))
def test_intervals_that_overlap_have_different_slots_and_no_slot_is_wasted(spans):
    intervals = [(start, start + length) for start, length in spans]
    starts, ends = (np.array([span[k] for span in intervals], np.int64) for k in (0, 1))
    slots = colour_intervals(starts, ends).tolist()
    for one, other in itertools.combinations(range(len(intervals)), 2):
        if intervals[one][0] <= intervals[other][1] and intervals[other][0] <= intervals[one][1]:
            assert slots[one] != slots[other]
    together = [sum(start <= t <= end for start, end in intervals) for t in range(27)]
    assert set(slots) == set(range(max(together)))


def test_two_kinds_of_backward_become_one_and_their_slices_are_simulated_only():
    split, fused = (Kind.F, Kind.B, Kind.W), (Kind.F, Kind.BW)
    order = [Action(0, kind, i) for i, kinds in enumerate((split, fused)) for kind in kinds]
    schedule = Schedule("mine", linear(1), 2, (tuple(order),))
    validate(schedule)
    table = lower(schedule, [1])
    ticks = {kind.value: cell.hi[:, 0].nonzero()[0].tolist() for kind, cell in table.passes.items()}
    assert ticks == {"F": [0, 3], "B": [1, 4], "W": [2, 4]}
    slices = tuple(Slice(tick, action, 0, 1) for tick, action in enumerate(order))
    schedule = dataclasses.replace(schedule, slices=(slices,))
    validate(schedule)
    with pytest.raises(ValueError, match="simulated: it has slices of both B and BW"):
        lower(schedule, [1])


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


@pytest.mark.parametrize("name", [entry.name for entry in catalog.executable()])
def test_no_message_s_permutation_has_two_cycles(name):
    """XLA for GPUs compiles a permutation of several cycles to wrong code."""
    for stages in (2, 4, 8):
        schedule = catalog.build(name, stages=stages, microbatches=2 * stages)
        layers = schedule.placement.num_virtual_stages
        for channel in lower(schedule, [1] * layers).channels:
            senders, receivers = zip(*channel.edges, strict=True)
            assert len(set(senders)) == len(senders)
            assert len(set(receivers)) == len(receivers)
            assert cycles(channel.edges) <= 1


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "breadth-first", "modular-fused", "1f1b", "zb-v"])
def test_a_tick_has_the_parts_that_its_actions_and_messages_need(name, sliced):
    schedule = catalog.build(name, stages=4, microbatches=16)
    counts = [4] * schedule.placement.num_virtual_stages
    table = lower(slice_ticks(schedule, Costs(1, 1.2, 0.8), counts) if sliced else schedule, counts)
    parts = table.parts(gathers=True, reduces=True)
    for tick, one in enumerate(parts):
        needed = {kind for kind, cell in table.passes.items() if (cell.lo < cell.hi)[tick].any()}
        for channel in table.channels:
            if (channel.slot[tick] != NONE).any() or (channel.late_slot[tick] != NONE).any():
                needed.add(channel.kind)
        assert all(map(one.has, needed))
        assert one.forward or table.embed[tick] == table.head[tick] == NONE
        assert one.backward or (table.embed_gradient[tick] == NONE).all()
    both = np.mean([one.forward and one.backward for one in parts])
    assert both <= 1 / 4 or both == 1


@pytest.mark.parametrize("name", ["gpipe", "breadth-first", "modular", "gpipe-fused"])
def test_whole_phases_are_two_runs_of_ticks_in_one_direction(name):
    schedule = catalog.build(name, stages=4, microbatches=8)
    table = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    found, rounds = table.runs(gathers=True, reduces=True)
    assert found == (Parts(backward=False), Parts(forward=False))
    forwards = 8 * schedule.num_chunks + 4 - 1  # the last stage starts p - 1 ticks after the first
    assert rounds.tolist() == [[forwards, table.num_ticks - forwards]]
