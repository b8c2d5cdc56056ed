"""The studies of benchmarks/studies on tiny grids: they run, and theory decides who is ahead."""

import dataclasses
import functools
import math

import pytest

from benchmarks.studies import (
    breadth_first,
    common,
    controllable_memory,
    hanayo,
    layered,
    stability,
)
from jaxpipe.planning import devices
from jaxpipe.planning.plans import Plan
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.simulate import UNIT, Costs

pytestmark = pytest.mark.slow


@functools.cache
def tiny() -> ModelSizes:
    config = common.gpt_of(layers=16, width=256, heads=4, length=128)
    return common.sizes("tiny", config, tensors=(1,), remats=("none",))


def without_messages(count: int) -> devices.Cluster:
    """Devices whose links take no time."""
    cluster = devices.cluster("a100", count)
    device = dataclasses.replace(cluster.device, latency=0.0)
    return dataclasses.replace(cluster, device=device, within=1e30, across=1e30)


def test_more_waves_are_faster_than_one_pass_at_one_microbatch_per_stage():
    cluster = without_messages(4)
    found = {
        method: min(
            (one.seconds, one.placed.plan.chunks)
            for one in hanayo.fitting(method, tiny(), cluster, 4, stages=4)
        )
        for method in hanayo.METHODS
    }
    assert found["Hanayo"] < min(found["1F1B"], found["GPipe"])
    assert found["Hanayo"][1] > 2
    assert found["Hanayo"][0] == pytest.approx(found["interleaved"][0], rel=0.1)


def test_the_second_copy_of_chimera_doubles_the_state():
    (one, *_), (two, *_) = (
        hanayo.fitting(method, tiny(), without_messages(4), 4, stages=4)
        for method in ("1F1B", "Chimera")
    )
    state = hanayo.STATE_BYTES * one.placed.stage_parameters
    assert one.sums == 0 < two.memory - one.memory
    assert two.memory - one.memory == pytest.approx(state, rel=0.1)


def test_chunks_pay_at_small_batches_and_only_messages_tell_the_two_orders_apart():
    def seconds(key: str) -> float:
        method = breadth_first.METHODS[key]

        def allowed(plan: Plan) -> bool:
            return plan.schedule in method.schedules and (plan.stage, plan.rows) == (4, 1)

        cluster = without_messages(4)
        return common.best(tiny(), cluster, [4], allowed, timed=method.timed).step_seconds

    assert seconds("breadth-first") == pytest.approx(seconds("depth-first"))
    assert seconds("breadth-first") < seconds("1F1B")
    assert seconds("whole messages") == pytest.approx(seconds("depth-first"))


def test_memory_buys_time_at_equal_costs_and_v_min_loses_at_others():
    def rate(name: str, costs: Costs, m: int = 8) -> float:
        return 1 / controllable_memory.makespan(name, 4, m, costs)

    named = [rate(name, UNIT) for name in ("1f1b-fused", "v-min", "v-half", "v-zb")]
    assert named == sorted(set(named))
    hard = controllable_memory.HARD
    assert rate("v-min", hard, m=32) < rate("1f1b-fused", hard, m=32) < rate("v-half", hard, m=32)


def test_layered_accumulation_waits_less_and_gathers_layers_twice():
    waits = {}
    for method, allowed in layered.METHODS.items():

        def four_stages(plan: Plan, allowed=allowed) -> bool:
            return allowed(plan, 16) and (plan.stage, plan.rows) == (4, 1)

        found = common.best(tiny(), without_messages(4), [4], four_stages, timed=common.hidden)
        waits[method] = found.seconds["waits"]
    # (p-1) F+B+W of one chunk: a fourth of the stage.
    assert waits["improved"] == pytest.approx(waits["baseline"] / 4)
    v, m = 8, 4
    counts = [list(row.values())[1:3] for row in layered.counts_of(2, v, m)]
    # Of two slots, one keeps its chunk from the forward to the backward, and between microbatches.
    one_by_one = [2 * v - 2 + (m - 1) * (2 * v - 4), m * (v - 1)]
    assert counts[:2] == [one_by_one, [2 * v - 2, v]]


def test_stable_rates_end_where_the_formula_says_and_t2_widens_them():
    tau, plain = 3, stability.Method()
    limit = stability.boundary(stability.by_eigenvalues, plain, tau)
    assert limit == pytest.approx(2 * math.sin(math.pi / (4 * tau + 2)), rel=1e-6)
    for method in stability.METHODS.values():
        known = stability.boundary(stability.by_eigenvalues, method, tau)
        assert stability.by_running(method, tau, 0.97 * known)
        assert not stability.by_running(method, tau, 1.03 * known)
    apart = stability.METHODS["SGD, discrepancy 5"]
    corrected = dataclasses.replace(apart, corrected=True)
    assert not stability.by_eigenvalues(apart, tau, 0.1)
    assert stability.by_eigenvalues(corrected, tau, 0.1)
