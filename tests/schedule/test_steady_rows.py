"""Rows of a pipeline that never drains, played tick by tick, and the schedule that shows them."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest

from jaxpipe.asynchronous import ASYNCHRONOUS_METHODS, SteadyState
from jaxpipe.asynchronous.rows import SteadyRows
from jaxpipe.schedule.actions import GUESTS, Kind
from jaxpipe.schedule.lowering.table import NONE

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


def test_the_core_knows_the_names_of_the_methods():
    assert tuple(ASYNCHRONOUS_METHODS) == GUESTS
