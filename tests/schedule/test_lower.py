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
from jaxpipe.schedule.placement import linear


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
