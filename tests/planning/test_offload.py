"""Plans whose optimizer state lies on the host."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpipe.planning import devices, memory, search, step
from jaxpipe.planning.plans import Placed, Plan
from jaxpipe.planning.sizes import Kernel, LayerSizes, Linear, ModelSizes, Pass, Sizes

PLAN = Plan(2, 2, 1, 1, 1, "1f1b-fused", 1, 4, 4, "none", 1, 1, "stacked")
PARAMETERS, OUTER = 10**6, 2 * 10**6


def placed(kept_bytes: float, *, offload: bool) -> Placed:
    """Two of four layers on each stage; a layer keeps so many bytes per row of a microbatch."""
    nothing, kept = Linear(0, 0), Linear(0, kept_bytes)
    matmul = Pass((Kernel(Linear(0, 1e9), nothing),), nothing, ())
    layer = LayerSizes(*(matmul, matmul, matmul, PARAMETERS, kept), *[nothing] * 4, ((1000, 1000),))
    sizes = Sizes((layer,), (0,) * 4, Linear(0, 1.0), OUTER, 0, matmul, nothing)
    model = ModelSizes("equal", 64, 4, 4, 2, 32, 1, {(1, 1, "none"): sizes})
    plan = dataclasses.replace(PLAN, offload=offload)
    return Placed(plan, model, devices.cluster("h100", 4))


def parts(one: Placed):
    return memory.device_bytes(one, step.program_of(one, published=True))


STATE = 2 * 4 * (2 * PARAMETERS + OUTER) / 2
"""Two moments in float32 of two layers and the rest, sharded over two."""


@pytest.mark.parametrize("kept_bytes", [10.0, 1e5, 1e9])
def test_the_state_takes_what_activations_leave_of_it(kept_bytes):
    here, there = (parts(placed(kept_bytes, offload=offload)) for offload in (False, True))
    assert here["optimizer"] == STATE
    layers = sum(here[name] for name in ("residuals", "crossing", "inboxes", "moving", "working"))
    rest = step.total(here) - layers - STATE
    assert step.total(there) == pytest.approx(rest + max(layers, STATE))
    assert search.least_bytes(placed(kept_bytes, offload=True)) <= step.total(there)


def test_it_goes_over_the_bus_twice():
    seconds = [
        step.step_seconds(one, step.program_of(one, published=True))
        for one in (placed(1e5, offload=True), placed(1e5, offload=False))
    ]
    more = {name: seconds[0][name] - seconds[1][name] for name in step.PARTS}
    assert more.pop("update") == pytest.approx(2 * STATE / (0.8 * 64e9))
    assert not any(more.values())
