"""Rows of a pipeline that never drains, played tick by tick, and the schedule that shows them."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from jaxpipe.asynchronous import ASYNCHRONOUS_METHODS, SteadyState, steady_schedule
from jaxpipe.asynchronous.rows import SteadyRows
from jaxpipe.schedule.actions import GUESTS, Action, Kind
from jaxpipe.schedule.check.validate import ScheduleError, validate
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.formats.csv_format import write_csv
from jaxpipe.schedule.lowering.table import NONE
from jaxpipe.schedule.show import draw
from jaxpipe.schedule.simulate import Costs, simulate

CASES = [
    (SteadyState(P, N, method, segment), fused)
    for (P, N), method, fused in itertools.product(
        [(1, 1), (3, 2), (4, 7)], ASYNCHRONOUS_METHODS, (False, True)
    )
    for segment in (None, 1, 2)
    if (method != "2bw" or N >= 2 * P - 1) and (segment is None or segment <= P)
]
MINIBATCHES, FIRST = 9, 5


class Weights:
    """Versions of a part in their slots; which of them actions read, by the method's rule."""

    def __init__(self, steady: SteadyState) -> None:
        self.method, self.size = steady.method, steady.num_microbatches
        self.newest, self.slots = FIRST, dict.fromkeys(range(steady.num_versions), FIRST)
        self.count, self.read_by_forward = steady.num_versions, {}

    def check(self, g: int, slot: int, *, forward: bool) -> None:
        rule = {"pipemare": self.newest, "2bw": FIRST + max(g // self.size - 1, 0)}
        if forward:
            self.read_by_forward[g] = rule.get(self.method, self.newest)
        assert self.slots[slot] == rule.get(self.method, self.read_by_forward[g])

    def update(self, update, t: int, g: int | None) -> bool:
        """Checks the update after a microbatch's gradient, if any, and says whether one is due."""
        minibatch, version = update
        if g is None or g % self.size != self.size - 1:
            assert minibatch[t] == NONE
            return False
        assert (minibatch[t], version[t]) == (g // self.size, self.newest)
        self.newest += 1
        self.slots[self.newest % self.count] = self.newest
        return True


@pytest.mark.parametrize(("steady", "fused"), CASES)
def test_every_action_finds_its_input_its_residuals_and_its_weights(steady, fused):
    P, total = steady.num_stages, MINIBATCHES * steady.num_microbatches
    ticks = total + steady.drain_ticks
    source = SteadyRows(steady, entered=total, first=FIRST, fused=fused, xp=np)
    stages = [source.at(np.arange(ticks), d, layers=1 + d) for d in range(P)]
    weights, embed, head = [Weights(steady) for _ in range(P)], Weights(steady), Weights(steady)
    x, dy, again = [None] * P, [None] * P, [None] * P
    kept = [collections.defaultdict(dict) for _ in range(P)]
    counts = collections.Counter()
    for t in range(ticks):
        outer, reads = stages[0].row.outer, stages[0].reads
        ran: list[dict[Kind, int]] = [{} for _ in range(P)]
        if (g := outer.embed[t]) != NONE:
            assert g == t
            x[0] = g
            embed.check(g, reads["enter"]["embed"][t], forward=True)
        before = again.copy()
        for d, stage in enumerate(stages):
            for kind, cell in stage.row.cells.items():
                if not cell.layers[t]:
                    continue
                assert cell.layers[t] == 1 + d
                g = ran[d][kind] = int(cell.microbatch[t])
                residual, version = cell.until_w[t], cell.weights[t]
                if kind is Kind.R:
                    # The order within a tick: R has read its input before F keeps another.
                    begins = steady.begins_segment(d)
                    assert (kept[d]["x"][stage.inputs[kind][t]] if begins else before[d - 1]) == g
                    again[d] = g
                elif kind is Kind.F:
                    assert x[d] == g
                    if stage.inputs:
                        kept[d]["x"][stage.inputs[kind][t]] = g
                else:
                    assert dy[d] == g == kept[d]["residuals"][residual]
                if kind is (Kind.F if steady.recompute_segment is None else Kind.R):
                    kept[d]["residuals"][residual] = g
                if kind is not Kind.R or steady.method != "pipemare":
                    weights[d].check(g, version, forward=kind is Kind.F)
                counts[kind] += 1
        for d, stage in enumerate(stages if P > 1 else ()):
            back, forth = (np.broadcast_to(a.slot, ticks)[t] for a in stage.row.arrivals)
            messages = (dy, back, d + 1, Kind.BW if fused else Kind.B), (x, forth, d - 1, Kind.F)
            for inbox, slot, sender, kind in messages:
                sent = ran[sender].get(kind) if 0 <= sender < P else None
                assert (slot == NONE) == (sent is None)
                inbox[d] = inbox[d] if sent is None else sent
        backward = [cells.get(Kind.BW if fused else Kind.W) for cells in ran]
        (back,), left = outer.embed_gradient[t], outer.head[t]
        assert (back == NONE) == (backward[0] is None)
        assert (left == NONE) == (ran[-1].get(Kind.F) is None)
        if left != NONE:
            dy[-1] = ran[-1][Kind.F]
            head.check(left, reads["leave"]["head"][t], forward=True)
            newest = embed.newest
            if steady.method == "2bw":
                newest = FIRST + max(left // steady.num_microbatches - 1, 0)
            assert embed.slots[reads["leave"]["embed"][t]] == newest
        if back != NONE:
            embed.check(back, reads["embed_gradient"]["embed"][t], forward=False)
        updates = [stage.updates["layers"] for stage in stages]
        due = [
            w.update(*args) for w, *args in zip(weights, updates, [t] * P, backward, strict=True)
        ]
        due.append(embed.update(stages[0].updates["embed"], t, backward[0]))
        due.append(head.update(stages[0].updates["head"], t, None if left == NONE else left))
        assert stages[0].any_update[t] == any(due)
    assert {part.newest for part in (*weights, embed, head)} == {FIRST + MINIBATCHES}
    assert counts == dict.fromkeys(source.kinds, P * total)
    slots = {name: {len(stage[name]) for stage in kept} for name in ("x", "residuals")}
    assert max(slots["x"]) == min(steady.input_slots, total)
    assert max(slots["residuals"]) == steady.residual_slots


@pytest.mark.parametrize(("steady", "fused"), CASES)
def test_the_schedule_is_validated_simulated_and_drawn_in_the_ticks_of_the_rows(steady, fused):
    schedule = steady_schedule(steady, MINIBATCHES, fused=fused)
    validate(schedule)
    costs, turns = Costs(1, 1.5, 0.5), {kind: n for n, kind in enumerate(schedule.kinds)}
    tick = costs.b + costs.w + costs.f * (1 if steady.recompute_segment is None else 2)
    timeline = device_clock(schedule, costs)
    own = [
        [(action.microbatch + steady.stage(d).start(action.kind), action) for action in order]
        for d, order in enumerate(schedule.orders)
    ]
    assert [[(part.tick, part.action) for part in row] for row in timeline.rows] == own
    at = {action: (t, turns[action.kind]) for row in own for t, action in row}
    for action, (t, turn) in at.items():
        for needed in schedule.inputs(action):
            if fused and needed.kind is Kind.B:
                needed = dataclasses.replace(needed, kind=Kind.BW)
            within = {action.kind, needed.kind} & {Kind.W, Kind.R} and needed.kind != action.kind
            assert at[needed] < ((t, turn) if within and needed.kind is not Kind.F else (t,))
    work = tick * MINIBATCHES * steady.num_microbatches
    assert timeline.bubble_ratio == pytest.approx(1 - work / timeline.makespan)
    # Ticks in which the pipeline fills or drains are at most as long as the others.
    assert timeline.bubble_ratio <= 1 - steady.utilization(MINIBATCHES) + 1e-9
    assert timeline.peak_in_flight == schedule.peak_in_flight
    text = draw.text(simulate(schedule, costs))
    assert ("R0" in text) == (steady.recompute_segment is not None)


def test_a_broken_steady_state_is_refused():
    schedule = steady_schedule(SteadyState(3, 2, "pipemare", 2), MINIBATCHES)
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
    with pytest.raises(ScheduleError, match="0R0 on stage 0 is none of F, B, W"):
        validate(dataclasses.replace(schedule, steady=SteadyState(3, 2)))


def test_a_schedule_of_minibatches_is_not_written_as_csv():
    assert GUESTS.keys() == ASYNCHRONOUS_METHODS.keys()
    with pytest.raises(ValueError, match="runs R, which PyTorch's CSV cannot say"):
        write_csv(steady_schedule(SteadyState(3, 2, "pipedream", 2), MINIBATCHES))
