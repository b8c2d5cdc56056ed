"""The steady state of asynchronous methods: the papers' formulas, and its rows tick by tick."""

import collections
import itertools
import math

import numpy as np
import pytest

from jaxpipe import cli
from jaxpipe.asynchronous import ASYNCHRONOUS_METHODS, SteadyState
from jaxpipe.asynchronous.rows import SteadyRows
from jaxpipe.schedule.actions import GUESTS, Kind
from jaxpipe.schedule.lowering.table import NONE
from jaxpipe.schedule.simulate import Costs


def test_delays_are_the_papers_for_every_stage_and_microbatch():
    for P, N in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 5, 8, 16)):
        steady = SteadyState(P, N)
        for i in range(1, P + 1):
            part = steady.stage(i - 1)
            delays = [steady.delay(part, j) for j in range(N)]
            assert delays == [max(math.ceil((2 * (P - i) + 1 - j) / N), 0) for j in range(N)]
            assert sum(delays) / N == pytest.approx(steady.mean_delay(part))
            assert steady.mean_delay(part) == pytest.approx((2 * (P - i) + 1) / N)
        assert [steady.delay(steady.head, j) for j in range(N)] == [0] * N
        first = [steady.delay(steady.stage(0), j) for j in range(N)]
        assert [steady.delay(steady.embed, j) for j in range(N)] == first
        assert SteadyState(P, N, "pipedream").num_versions == 1 + math.ceil((2 * P - 1) / N)


def test_the_steady_state_is_drawn_with_the_versions_that_its_actions_find(capsys):
    shape = ["--stages", "4", "--microbatches", "3"]
    assert cli.main(["show", "pipemare", *shape]) == 0
    drawn = capsys.readouterr().out
    assert [line.split() for line in drawn.splitlines()[1:5]] == [
        ["stage", "0", "F0@0", "B2@0+", "F1@1", "B0@1", "F2@1", "B1@1"],
        ["stage", "1", "F2@1", "B0@1", "F0@1", "B1@1", "F1@1", "B2@1+"],
        ["stage", "2", "F1@1", "B1@1", "F2@1", "B2@1+", "F0@2", "B0@2"],
        ["stage", "3", "F0@1", "B2@1+", "F1@2", "B0@2", "F2@2", "B1@2"],
    ]
    assert "weight versions kept: 1" in drawn
    recomputing = ["--stages", "4", "--microbatches", "2", "--recompute-segment", "2"]
    assert cli.main(["show", "pipemare", *recomputing]) == 0
    drawn = capsys.readouterr().out
    assert "stage 0  F0@0 R1@0 B1@0+  F1@1 R0@1 B0@1" in drawn
    assert "of them with residuals, per stage: 3, 1, 3, 1" in drawn


SEGMENTS = [(P, N, S) for P, N in [(1, 1), (4, 3), (8, 1)] for S in range(1, P + 1)]


@pytest.mark.parametrize(("P", "N", "S"), SEGMENTS)
def test_a_segment_runs_again_just_in_time_for_its_last_stage(P, N, S):
    steady = SteadyState(P, N, recompute_segment=S)
    plain, total = SteadyState(P, N), 6 * P * N
    residuals, inputs = 0, 0
    for d in range(P):
        part, end = steady.stage(d), min((d // S + 1) * S, P) - 1
        assert (part.forward, part.backward) == (plain.stage(d).forward, plain.stage(d).backward)
        assert steady.stage(end).recompute == steady.stage(end).backward
        assert steady.stage(end).recompute - part.recompute == end - d
        assert part.forward < part.recompute <= part.backward
        residuals = max(residuals, part.backward - part.recompute + 1)
        if steady.begins_segment(d):
            inputs = max(inputs, part.recompute - part.forward)
        assert steady.begins_segment(d) == (d % S == 0)
        missed = []
        for g in range(total - N, total):
            version = steady.version(part, Kind.R, g)
            # Every minibatch whose last gradient comes before this tick has updated the stage.
            assert version == sum(
                part.backward + k * N + N - 1 < g + part.recompute for k in range(total // N)
            )
            missed.append(g // N - version)
        assert sum(missed) / N == pytest.approx(steady.mean_delay(part, Kind.R))
    assert (residuals, inputs) == (steady.residual_slots, steady.input_slots)


@pytest.mark.parametrize(("P", "N"), [(4, 2), (2, 5), (3, 1)])
def test_the_work_of_minibatches_adds_up_to_all_but_the_fill(P, N):
    steady = SteadyState(P, N)
    count = 2 * P  # minibatches: long enough to fill
    work = sum(steady.work_ratio(k) for k in range(count)) * N * 2 * P
    # Stage d waits d ticks for its first F and 2P-1-d for its first backward.
    assert work == pytest.approx(2 * P * count * N - P * (2 * P - 1))
    assert steady.work_ratio(count) == 1


def costs_of(*shares: float, message: float = 0.0) -> list[Costs]:
    return [Costs(share, 1.2 * share, 0.8 * share, message) for share in shares]


def share_by_hand(steady: SteadyState, costs: list[Costs], ticks: range) -> float:
    """What a program does that exchanges messages after every tick, played tick by tick."""
    busy = elapsed = 0.0
    for tick in ticks:
        lengths = []
        for d, cost in enumerate(costs):
            part, length = steady.stage(d), 0.0
            length += cost.f if tick >= part.forward else 0
            length += cost.b + cost.w if tick >= part.backward else 0
            if part.recompute is not None and tick >= part.recompute:
                length += cost.f
            lengths.append(length)
        busy += sum(lengths)
        elapsed += max(lengths) + (costs[0].message if len(costs) > 1 else 0)
    return busy / (len(costs) * elapsed)


@pytest.mark.parametrize("segment", [None, 1, 2])
@pytest.mark.parametrize(
    "costs",
    [
        costs_of(1, 1, 1, 1),
        costs_of(7, 1, 1, 1),
        costs_of(3, 3, 2, 2),
        costs_of(3, 3, 2, 2, message=0.5),
        [Costs(1, 2, 1), Costs(4, 1, 1), Costs(1, 1, 1), Costs(2, 2, 2)],
        costs_of(5, message=0.5),
    ],
)
def test_a_full_pipeline_works_as_much_as_its_slowest_stage_lets_it(costs, segment):
    segment = segment and min(segment, len(costs))
    steady = SteadyState(len(costs), 3, recompute_segment=segment)
    full = range(steady.drain_ticks, steady.drain_ticks + 6)
    expected = share_by_hand(steady, costs, full)
    assert steady.full_utilization(costs) == pytest.approx(expected, rel=1e-12)
    # A run of k minibatches takes 2P-1 ticks more than they have.
    assert steady.utilization(5, costs) == pytest.approx(expected * 15 / (15 + full.start))


def test_what_does_not_fit_is_refused():
    for method, text in (
        ("2bw", r"microbatches=6 on 4 stages[\s\S]*microbatches=7\."),
        ("gpipe", ", ".join(ASYNCHRONOUS_METHODS)),
    ):
        with pytest.raises(ValueError, match=text):
            SteadyState(4, 6, method)
    with pytest.raises(ValueError, match=r"3 costs for num_stages=4\.\nNearest valid: 4, or one f"):
        SteadyState(4, 8).full_utilization(costs_of(1, 2, 3))


# Rows, played.

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
