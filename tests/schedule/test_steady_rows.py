"""The steady state is a schedule like any other, and its rows are those of its lowered table."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from counted_updates import counted_rows

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check.validate import ScheduleError, validate
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.formats.csv_format import write_csv
from jaxpipe.schedule.formats.json_format import from_json, to_json
from jaxpipe.schedule.generators.pipemare import ASYNCHRONOUS_METHODS, SteadyState
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.lowering.steady_rows import SteadyRows, steady_schedule
from jaxpipe.schedule.lowering.table import NONE, Row
from jaxpipe.schedule.show import draw
from jaxpipe.schedule.simulate import Costs, simulate

CASES = [
    (P, N, method, segment, fused)
    for (P, N), method, fused in itertools.product(
        [(1, 1), (2, 1), (3, 2), (4, 7), (5, 3)], ASYNCHRONOUS_METHODS, (False, True)
    )
    for segment in (None, 1, 2, P)
    if (method != "2bw" or N >= 2 * P - 1) and (segment is None or segment <= P)
]
each_case = pytest.mark.parametrize(("P", "N", "method", "segment", "fused"), CASES)
MINIBATCHES = 9


def build(P, N, method, segment, fused) -> tuple[SteadyState, Schedule]:
    steady = SteadyState(P, N, method, segment)
    return steady, steady_schedule(steady, MINIBATCHES, fused=fused)


def rows_of(steady: SteadyState, schedule: Schedule, num_ticks: int, *, fused: bool) -> Row:
    """All rows of the source, as columns."""
    source = SteadyRows(steady, entered=schedule.num_microbatches, fused=fused, xp=np)
    stage = np.arange(steady.num_stages)
    return source.row(np.arange(num_ticks)[:, None], stage, layers=1 + stage % 3)


def equal(found, expected) -> None:
    """Columns that may leave out a dimension along which they do not change."""
    expected = np.asarray(expected)
    found = np.broadcast_to(found, expected.shape) if expected.ndim > 1 else np.ravel(found)
    np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)


@each_case
def test_the_source_of_rows_is_the_lowered_table_tick_by_tick(P, N, method, segment, fused):
    steady, schedule = build(P, N, method, segment, fused)
    table = lower(schedule, [1 + d % 3 for d in range(P)])
    found, expected = rows_of(steady, schedule, table.num_ticks, fused=fused), counted_rows(table)
    assert found.cells.keys() == expected.cells.keys()
    for kind, cell in expected.cells.items():
        own = found.cells[kind]
        equal(own.layers, cell.layers)
        runs = cell.layers > 0
        for name in ("chunk", "microbatch", "inbox", "weights"):
            value = np.broadcast_to(getattr(own, name), runs.shape)
            np.testing.assert_array_equal(value[runs], getattr(cell, name)[runs], err_msg=name)
    assert len(found.arrivals) == len(expected.arrivals)
    for own, arrival in zip(found.arrivals, expected.arrivals, strict=True):
        equal(own.slot, arrival.slot)
        equal(own.late_slot, arrival.late_slot)
    for name in ("embed", "embed_slot", "head", "head_slot", "embed_gradient"):
        equal(getattr(found.outer, name), np.ravel(getattr(expected.outer, name)))
    phases = {"enter": "embed", "leave": "head", "embed_gradient": "embed_gradient"}
    for phase, column in phases.items():
        runs = np.ravel(getattr(expected.outer, column)) != NONE
        for own, read in zip(found.outer.reads[phase], expected.outer.reads[phase], strict=True):
            equal(np.where(runs, np.ravel(own), 0), np.where(runs, read, 0))
    for part in ("layers", "embed", "head"):
        own, update = getattr(found.updates, part), getattr(expected.updates, part)
        equal(own.minibatch, update.minibatch)
        due = update.minibatch != NONE
        version = np.asarray(own.version).reshape(len(due), -1)
        np.testing.assert_array_equal(
            np.broadcast_to(version, due.reshape(len(due), -1).shape)[due.reshape(len(due), -1)],
            update.version[due],
        )
    equal(found.updates.any_stage, expected.updates.any_stage)


def stays(cells: dict, columns: dict, stage: int) -> dict[int, tuple[int, int, set[int]]]:
    """A stage's microbatches, with the ticks from their first cell to their last, and all slots
    that these cells name."""
    found: dict[int, tuple[list[int], set[int]]] = {}
    for kind, column in columns.items():
        cell = cells[kind]
        for t in np.flatnonzero((cell.layers > 0)[:, stage]):
            slot = np.broadcast_to(column, cell.layers.shape)[t, stage]
            ticks, slots = found.setdefault(int(cell.microbatch[t, stage]), ([], set()))
            ticks.append(int(t))
            slots.add(int(slot))
    return {i: (min(ticks), max(ticks), slots) for i, (ticks, slots) in found.items()}


@each_case
def test_slots_are_as_many_as_lowering_needs_and_none_is_overwritten(P, N, method, segment, fused):
    steady, schedule = build(P, N, method, segment, fused)
    table = lower(schedule, [1 + d % 3 for d in range(P)])
    assert table.num_slots["until_w"] == steady.residual_slots
    assert table.num_slots.get("replay", 0) == steady.input_slots
    assert table.num_slots["x"] == 1
    rows = rows_of(steady, schedule, table.num_ticks, fused=fused)
    writer = Kind.F if segment is None else Kind.R
    readers = [kind for kind in rows.cells if kind not in (Kind.F, Kind.R)]
    kept = {kind: rows.cells[kind].until_w for kind in (writer, *readers)}
    used = [(kept, steady.residual_slots, 0)]
    if rows.replay is not None:
        # R has read before F writes, in one tick.
        used.append((rows.replay, steady.input_slots, 1))
    for (columns, size, shared), stage in itertools.product(used, range(P)):
        by_slot: dict[int, list[tuple[int, int]]] = {}
        for first, last, slots in stays(rows.cells, columns, stage).values():
            assert len(slots) == 1
            by_slot.setdefault(slots.pop(), []).append((first, last))
        assert max(by_slot) < size
        for spans in by_slot.values():
            spans.sort()
            assert all(b[0] + shared > a[1] for a, b in itertools.pairwise(spans))


@each_case
def test_the_steady_state_is_validated_simulated_and_drawn(P, N, method, segment, fused):
    steady, schedule = build(P, N, method, segment, fused)
    validate(schedule)
    costs = Costs(1, 1.5, 0.5)
    tick = costs.b + costs.w + costs.f * (1 if segment is None else 2)
    timeline = device_clock(schedule, costs)
    work = tick * MINIBATCHES * N
    assert timeline.bubble_ratio == pytest.approx(1 - work / timeline.makespan)
    # Ticks in which the pipeline fills or drains are at most as long as the others.
    assert timeline.bubble_ratio <= 1 - steady.utilization(MINIBATCHES) + 1e-9
    assert timeline.peak_in_flight == schedule.peak_in_flight
    text = draw.text(simulate(schedule, costs))
    assert ("R0" in text) == (segment is not None)


def test_a_broken_steady_state_is_refused():
    _, schedule = build(3, 2, "pipemare", 2, False)
    late = [action for action in schedule.orders[1] if action.kind is not Kind.R]
    orders = (schedule.orders[0], tuple(late), schedule.orders[2])
    with pytest.raises(ScheduleError, match="1R0 is missing from stage 1"):
        validate(dataclasses.replace(schedule, orders=orders))
    own = list(schedule.orders[1])
    again, back = own.index(Action(1, Kind.R, 0)), own.index(Action(1, Kind.B, 0))
    own[again], own[back] = own[back], own[again]
    swapped = (schedule.orders[0], tuple(own), schedule.orders[2])
    with pytest.raises(ScheduleError, match="1B0 on stage 1 comes before its own R"):
        validate(dataclasses.replace(schedule, orders=swapped))
    with pytest.raises(ScheduleError, match="no segments"):
        validate(dataclasses.replace(schedule, several=None))


def test_a_schedule_of_minibatches_survives_json_and_is_not_written_as_csv():
    _, schedule = build(3, 2, "pipedream", 2, True)
    assert from_json(to_json(schedule)) == schedule
    rows = zip(schedule.ticks, schedule.orders, strict=True)
    former = [" ".join(f"{t}:{a}[0:1]" for t, a in zip(*row, strict=True)) for row in rows]
    data = to_json(schedule) | {"slices": former}
    del data["ticks"]
    assert from_json(data) == schedule
    early = (schedule.ticks[0][:-1] + schedule.ticks[0][-2:-1], *schedule.ticks[1:])
    with pytest.raises(ScheduleError, match="runs too early, in tick"):
        validate(dataclasses.replace(schedule, ticks=early))
    with pytest.raises(ValueError, match="recomputes, which PyTorch's CSV cannot say"):
        write_csv(schedule)
