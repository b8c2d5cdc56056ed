"""Plans whose optimizer state lies on the host."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from jaxpipe.errors import ArgumentError
from jaxpipe.planning import cost, devices, plans, search
from jaxpipe.planning.plans import NOTHING, Offload, PlacedPlan, Plan
from jaxpipe.planning.search import Goal
from jaxpipe.planning.sizes import Kernel, LayerSizes, Linear, ModelSizes, Pass, Sizes, Variant

PLAN = Plan(2, 2, 1, 1, 1, "1f1b-fused", 1, 4, 4, "none", 1, 1, "stacked")
PARAMETERS, OUTER = 10**6, 2 * 10**6


def placed(kept_bytes: float, *on_host: str) -> PlacedPlan:
    """Two of four layers on each stage; a layer keeps so many bytes per row of a microbatch."""
    nothing, kept = Linear(0, 0), Linear(0, kept_bytes)
    matmul = Pass((Kernel(Linear(0, 1e9), nothing),), nothing, ())
    layer = LayerSizes(*(matmul, matmul, matmul, PARAMETERS, kept), *[nothing] * 3, ((1000, 1000),))
    sizes = Sizes((layer,), (0,) * 4, Linear(0, 1.0), OUTER, 0, matmul, nothing)
    model = ModelSizes("equal", 64, 4, 4, 2, 32, 1, {Variant(1, 1, "none"): sizes})
    plan = dataclasses.replace(PLAN, on_host=Offload(**dict.fromkeys(on_host, True)))
    return PlacedPlan(plan, model, devices.cluster("h100", 4))


def parts(one: PlacedPlan):
    return cost.device_bytes(one, cost.program_of(one, published=True))


STATE = 2 * 4 * (2 * PARAMETERS + OUTER) / 2
"""Two moments in float32 of two layers and the rest, sharded over two."""


@pytest.mark.parametrize("kept_bytes", [10.0, 1e5, 1e9])
def test_the_state_takes_what_activations_leave_of_it(kept_bytes):
    here, there = (parts(placed(kept_bytes, *on_host)) for on_host in ((), ("state",)))
    assert here["optimizer"] == STATE
    layers = sum(here[name] for name in ("residuals", "crossing", "inboxes", "moving", "working"))
    rest = sum(here.values()) - layers - STATE
    assert sum(there.values()) == pytest.approx(rest + max(layers, STATE))
    assert cost.least_bytes(placed(kept_bytes, "state")) <= sum(there.values())


def test_it_goes_over_the_bus_twice():
    seconds = [
        cost.step_seconds(one, cost.program_of(one, published=True))
        for one in (placed(1e5, "state"), placed(1e5))
    ]
    more = {name: seconds[0][name] - seconds[1][name] for name in seconds[0]}
    assert more.pop("update") == pytest.approx(2 * STATE / (0.8 * 64e9))
    assert not any(more.values())


def model_of(kept_bytes: float) -> ModelSizes:
    return placed(kept_bytes).model


@pytest.fixture
def limited() -> tuple[ModelSizes, devices.Cluster]:
    """A cluster whose devices hold a little less than the leanest plan with its state on them."""
    model, cluster, goal = model_of(1e7), devices.cluster("h100", 2), Goal(None, (16,))
    every = plans.families(
        model, cluster, goal.batches, Counter(), on_host=plans.on_host(model, cluster)
    )
    found = [search.evaluated(one, goal, Counter()) for family in every for one in family]
    leanest = min(
        one.device_bytes for one in found if one is not None and not any(one.plan.on_host)
    )
    return model, dataclasses.replace(cluster, memory_bytes=leanest - 1)


def test_plans_whose_room_would_not_do_put_the_state_on_the_host(limited):
    model, cluster = limited
    goal = Goal(None, (16,))
    best = search.search(model, [cluster], goal).best
    assert all(one.plan.on_host.state for one in best)
    stays = dataclasses.replace(model, may_offload=False)
    with pytest.raises(ArgumentError, match="is too little for any plan"):
        search.search(stays, [cluster], goal)


def test_devices_that_share_the_memory_of_the_host_offload_nothing():
    assert [*plans.on_host(model_of(1e5), devices.cluster("cpu", 4))] == [NOTHING]


@pytest.mark.parametrize("kept_bytes", [10.0, 1e5, 1e9])
def test_residuals_leave_the_device_and_take_the_bus(kept_bytes):
    here, there = (placed(kept_bytes, *on_host) for on_host in ((), ("residuals",)))
    bytes_here, bytes_there = parts(here), parts(there)
    kept = bytes_here.pop("residuals")
    assert kept > 0
    assert bytes_there.pop("residuals") == 0
    assert bytes_here == bytes_there
    assert cost.least_bytes(there) <= sum(bytes_there.values())
    one, other = cost.layer_costs(here), cost.layer_costs(there)
    sent = kept_bytes * PLAN.rows / (0.8 * 64e9)
    assert other.f == pytest.approx(one.f + sent)
    assert other.b == pytest.approx(one.b + sent)
    assert other.w == one.w  # nothing is kept for W
    program = cost.program_of(there, published=True)
    more = cost.step_seconds(there, program)["transfers"]
    more -= cost.step_seconds(here, program)["transfers"]
    assert more == pytest.approx(kept / (0.8 * 64e9))
