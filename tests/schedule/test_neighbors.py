"""The neighbor clock: what a tick table waits for on GPUs."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.table import NONE
from jaxpipe.schedule.neighbors import neighbor_clock, replay
from jaxpipe.schedule.problems import ArgumentError
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import Costs, in_flight, lock_step, simulate

COSTS = Costs(1, 1.2, 0.8)
NAMES = ("1f1b", "zb-v", "breadth-first", "interleaved", "hanayo-fused", "v-half", "gpipe")


def times(table) -> np.ndarray:
    """How long every stage works in every tick, on `COSTS`."""
    return sum(COSTS.of(kind) * (cell.hi - cell.lo) for kind, cell in table.passes.items())


@pytest.mark.parametrize(
    ("name", "p", "locked", "neighbors_and_sums", "neighbors", "free"),
    [
        ("zb-v", 4, 0.167, 0.153, 0.053, 0.036),
        ("zb-v", 8, 0.172, 0.160, 0.075, 0.042),
        ("1f1b", 8, 0.262, 0.262, 0.225, 0.138),
    ],
)
def test_what_each_kind_of_waiting_costs(name, p, locked, neighbors_and_sums, neighbors, free):
    schedule = catalog.build(name, stages=p, microbatches=4 * p)
    assert lock_step(schedule, COSTS).bubble_ratio == pytest.approx(locked, abs=5e-4)
    assert simulate(schedule, COSTS).bubble_ratio == pytest.approx(free, abs=5e-4)
    table = in_time(lower(schedule, [1] * schedule.placement.num_virtual_stages))
    work = times(table)
    for sums, expected in ((True, neighbors_and_sums), (False, neighbors)):
        bubble = 1 - work.sum(0).mean() / replay(table, work, sums=sums)[-1].max()
        assert bubble == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("p", "most"), [(4, 0.03), (8, 0.04)])
def test_whole_actions_of_zb_v_come_near_to_the_free_running_clock(p, most):
    schedule = catalog.build("zb-v", stages=p, microbatches=4 * p)
    neighbor, free = (clock(schedule, COSTS) for clock in (neighbor_clock, simulate))
    assert neighbor.bubble_ratio < free.bubble_ratio + most


@pytest.mark.parametrize("message", [0.0, 0.1])
@pytest.mark.parametrize("name", ["interleaved", "dualpipe-v", "zb-v", "1f1b"])
def test_patient_ticks_wait_less_than_the_earliest(name, message):
    schedule = catalog.build(name, stages=4, microbatches=16)
    soon = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    earliest = replay(soon, times(soon), message=message)[-1].max()
    patient = neighbor_clock(schedule, dataclasses.replace(COSTS, message=message))
    assert patient.makespan < earliest
    assert len(patient.ticks) == soon.num_ticks + 1


def most_inputs(schedule, *, forward: bool) -> int:
    """How many inputs of F, or of backwards, wait on a stage at most, if each is sent as soon as it
    exists."""
    ran = {
        (
            timed.action.virtual_stage,
            timed.action.kind is Kind.F,
            timed.action.microbatch,
        ): timed.tick
        for row in lock_step(schedule, Costs(1, 1, 1)).rows
        for timed in row
        if timed.action.kind is not Kind.W
    }
    last = schedule.placement.num_virtual_stages - 1
    waiting = collections.Counter()
    for (s, is_forward, i), read in ran.items():
        if is_forward is forward:
            before = (s - 1, True) if forward else (s + 1, False)
            before = (last, True) if not forward and s == last else before
            sent = ran.get((*before, i), read - 1)
            stage = schedule.placement.stages[s]
            waiting.update((stage, tick) for tick in range(sent + 1, read + 1))
    return max(waiting.values())


def in_time(table):
    """The table with each microbatch embedded in the tick of its first F, and its cotangent put
    through the embedding in that of its last B."""
    cells, first = table.passes, table.schedule.placement.stages[0]
    moved = {"embed": cells[Kind.F], "embed_gradient": cells.get(Kind.BW, cells.get(Kind.B))}
    columns = {}
    for name, cell in moved.items():
        mine = (cell.lo[:, first] < cell.hi[:, first]) & (cell.chunk[:, first] == 0)
        columns[name] = np.where(mine, cell.microbatch[:, first], NONE)
    columns["embed_gradient"] = columns["embed_gradient"][:, None]
    return dataclasses.replace(table, **columns)


@pytest.mark.parametrize("name", [e.name for e in catalog.executable() if e.name != "auto"])
def test_on_the_lock_step_clock_a_table_waits_for_the_messages_that_are_not_late(name):
    schedule = catalog.build(name, stages=4, microbatches=8, costs=COSTS)
    table = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    work, message = times(table), 0.1  # shorter than any layer, which hides it
    costs = dataclasses.replace(COSTS, message=message)
    every = lock_step(schedule, costs).makespan
    ends = replay(table, work, message=message, clock="lock-step")[-1].max()
    spared = message * (~table.meets).sum()
    assert ends <= every - spared + 1e-9
    if table.meets.all():
        assert ends == pytest.approx(every)
    neighbors = replay(table, work, message=message)[-1].max()
    assert neighbors <= ends + 1e-9


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", [e.name for e in catalog.executable() if e.name != "auto"])
def test_embedding_beside_heads_waits_no_longer_and_takes_no_slot_more(name, p):
    schedule = catalog.build(name, stages=p, microbatches=2 * p, costs=COSTS)
    table = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    work, before = times(table), in_time(table)
    assert replay(table, work)[-1].max() <= replay(before, work)[-1].max() + 1e-9
    for forward, buffer in ((True, "x"), (False, "dy")):
        assert table.num_slots[buffer] <= most_inputs(schedule, forward=forward)


@pytest.mark.parametrize("p", [4, 8])
def test_the_sums_of_embedding_cost_little(p):
    table = lower(catalog.build("zb-v", stages=p, microbatches=4 * p), [1] * 2 * p)
    work = times(table)
    never = np.full_like(table.embed, NONE)
    heads_alone = dataclasses.replace(table, embed=never, embed_gradient=never[:, None])
    before, now, least = (
        replay(one, work)[-1].max() for one in (in_time(table), table, heads_alone)
    )
    assert now - least < 0.1 * (before - least)


@pytest.mark.parametrize("message", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_it_lies_between_the_other_clocks(name, message):
    schedule = catalog.build(name, stages=4, microbatches=16)
    costs = Costs(1, 1.2, 0.8, message)
    clocks = (simulate, neighbor_clock, lock_step)
    free, neighbor, locked = (clock(schedule, costs).makespan for clock in clocks)
    assert free - 1e-9 <= neighbor <= locked + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_actions_keep_their_order_and_their_length(name):
    schedule = catalog.build(name, stages=4, microbatches=8)
    timeline = neighbor_clock(schedule, COSTS)
    assert [tuple(timed.action for timed in row) for row in timeline.rows] == list(schedule.orders)
    for row in timeline.rows:
        ends = [0.0, *(timed.end for timed in row)]
        assert all(timed.start >= end - 1e-9 for timed, end in zip(row, ends[:-1], strict=True))
        for timed in row:
            assert timed.end - timed.start == pytest.approx(COSTS.of(timed.action.kind))


def test_in_fine_slices_all_clocks_agree():
    schedule = catalog.build("zb-v", stages=3, microbatches=9)
    sliced = slice_ticks(schedule, COSTS, [8] * 6)
    neighbor = neighbor_clock(sliced, COSTS).bubble_ratio
    assert neighbor == pytest.approx(lock_step(sliced, COSTS).bubble_ratio, abs=2e-3)
    assert neighbor == pytest.approx(simulate(schedule, COSTS).bubble_ratio, abs=2e-3)


def test_one_stage_waits_for_nobody():
    timeline = neighbor_clock(catalog.build("1f1b", stages=1, microbatches=3), Costs(1, 1, 1, 5))
    assert timeline.makespan == 9


def test_chunks_may_cost_differently():
    schedule = catalog.build("gpipe", stages=2, microbatches=1)
    timeline = neighbor_clock(schedule, [Costs(1, 2, 3), Costs(10, 20, 30)])
    lengths = {str(t.action): t.end - t.start for row in timeline.rows for t in row}
    assert lengths == {"0F0": 1, "0B0": 2, "0W0": 3, "1F0": 10, "1B0": 20, "1W0": 30}


def test_what_can_only_be_simulated_is_refused():
    schedule = catalog.build("chimera", stages=4, microbatches=8)
    assert {action.kind for action in schedule.orders[0]} >= {Kind.F}
    with pytest.raises(ValueError, match="can only be simulated"):
        neighbor_clock(schedule, COSTS)


def test_auto_plans_for_the_clock_that_it_is_told():
    zb_v = catalog.build("zb-v", stages=4, microbatches=8)
    for_gpus, for_cpus = (
        auto(4, 8, costs=COSTS, layers_per_chunk=1, candidates=[zb_v], clock=clock)
        for clock in ("neighbor", "lock-step")
    )
    # With one layer per chunk, slices gain in lock-step what they lose on GPUs.
    ends = [neighbor_clock(each, COSTS).makespan for each in (for_gpus, zb_v, for_cpus)]
    assert ends[0] <= ends[1] < ends[2]
    assert lock_step(for_cpus, COSTS).makespan < lock_step(for_gpus, COSTS).makespan
    small = {"stages": 2, "microbatches": 2, "costs": COSTS, "layers_per_chunk": 1}
    built = catalog.build("auto", clock="neighbor", **small)
    assert built == auto(2, 2, costs=COSTS, layers_per_chunk=1, clock="neighbor")


def test_slices_may_have_to_end_before_whole_actions_on_gpus():
    schedule, layers = catalog.build("zb-v", stages=4, microbatches=8), [2] * 8
    chosen = slice_ticks(schedule, COSTS, layers, clock="neighbor")
    cut = slice_ticks(schedule, COSTS, layers)
    ends = [neighbor_clock(each, COSTS).makespan for each in (schedule, cut)]
    assert neighbor_clock(chosen, COSTS).makespan == min(ends)


def test_nothing_is_planned_for_another_clock():
    with pytest.raises(
        ArgumentError, match=r"clock='free' .*\nNearest valid: 'lock-step', 'neighbor'"
    ):
        catalog.build("auto", stages=2, microbatches=4, clock="free")


def test_memory_never_goes_back_in_time():
    ticked = slice_ticks(catalog.build("1f1b", stages=4, microbatches=8), COSTS, [4] * 4)
    clock = neighbor_clock(ticked, COSTS)
    for row, peak in zip(clock.rows, clock.peak_in_flight, strict=True):
        moments, counts = zip(*in_flight(row), strict=True)
        assert list(moments) == sorted(moments)
        assert max(counts) == peak
