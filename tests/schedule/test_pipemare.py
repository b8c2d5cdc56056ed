"""The rules of the steady state: the papers' formulas, and a run of them tick by tick."""

from __future__ import annotations

import itertools
import math

import pytest

from jaxpipe import cli
from jaxpipe.asynchronous import ASYNCHRONOUS_METHODS, SteadyState
from jaxpipe.schedule.simulate import Costs


def executed_versions(num_stages: int, num_microbatches: int, minibatches: int) -> dict:
    """Plays the steady state with one counter a stage; what each F and backward finds in it."""
    total = minibatches * num_microbatches
    versions = [0] * num_stages
    found = {}
    for tick in range(total + 2 * num_stages):
        for i in range(1, num_stages + 1):
            forward, backward = tick - (i - 1), tick - 2 * num_stages + i
            if 0 <= forward < total:
                found["F", i, forward] = versions[i - 1]
            if 0 <= backward < total:
                found["B", i, backward] = versions[i - 1]
                if backward % num_microbatches == num_microbatches - 1:
                    versions[i - 1] += 1
    assert versions == [minibatches] * num_stages
    return found


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


def test_the_steady_state_is_drawn_with_what_a_run_finds(capsys):
    P, N = 4, 3
    assert cli.main(["show", "pipemare", "--stages", str(P), "--microbatches", str(N)]) == 0
    out = capsys.readouterr().out
    found = executed_versions(P, N, 20)
    start = 10 * N
    newest = found["B", 1, start - 2 * P + 1]
    for i, line in enumerate(out.splitlines()[1 : P + 1], start=1):
        cells = line.split(maxsplit=2)[2].split()
        for t in range(N):
            f, b = start + t - (i - 1), start + t - 2 * P + i
            assert cells[2 * t] == f"F{f % N}@{found['F', i, f] - newest}"
            assert cells[2 * t + 1].rstrip("+") == f"B{b % N}@{found['B', i, b] - newest}"
            assert cells[2 * t + 1].endswith("+") == (b % N == N - 1)
    assert "weight versions kept: 1" in out


SMALL = ["--stages", "2", "--microbatches", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pipemare"], "needs --stages and --microbatches"),
        (["pipemare", "--stages", "4", "--microbatches", "0"], "--microbatches 0 must be at least"),
        (["pipemare", *SMALL, "--chunks", "2"], "--chunks 2 does not fit 'pipemare': each of its"),
        (["1f1b", *SMALL, "--recompute-segment", "2"], "does not fit '1f1b': segments are for"),
        (
            ["pipemare", *SMALL, "--recompute-segment", "3"],
            "--recompute-segment 3 must be a number of stages from 1 to 2.\n"
            "Nearest valid: --recompute-segment 2.",
        ),
        (["pipemare", "--stages", "2", "--microbatches", "1000000"], "columns, beyond 200000"),
        (["pipedream", *SMALL, "--format", "csv"], "--format csv does not fit 'pipedream': it nev"),
    ],
)
def test_what_cannot_be_drawn_says_why(capsys, arguments, message):
    assert cli.main(["show", *arguments]) == 2
    assert message in capsys.readouterr().err


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
            version = steady.recompute_version(part, g)
            # Every minibatch whose last gradient comes before this tick has updated the stage.
            assert version == sum(
                part.backward + k * N + N - 1 < g + part.recompute for k in range(total // N)
            )
            missed.append(g // N - version)
        assert sum(missed) / N == pytest.approx(steady.mean_recompute_delay(part))
    assert (residuals, inputs) == (steady.residual_slots, steady.input_slots)


def test_a_recomputing_steady_state_is_drawn_with_its_versions(capsys):
    asked = ["show", "pipemare", "--stages", "4", "--microbatches", "2", "--recompute-segment", "2"]
    assert cli.main(asked) == 0
    out = capsys.readouterr().out
    assert "stage 0  F0@0 R1@0 B1@0+  F1@1 R0@1 B0@1" in out
    assert "of them with residuals, per stage: 3, 1, 3, 1" in out


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
