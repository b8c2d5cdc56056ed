"""The asynchronous executor trains exactly as a slow loop over a weight history does."""

from __future__ import annotations

import dataclasses

import chex
import numpy as np
import pytest
from asynchronous_reference import Settings
from asynchronous_reference import losses as reference
from asynchronous_toy import minibatches, packed, params, pipeline, train

pytestmark = pytest.mark.pipeline


@dataclasses.dataclass
class Case:
    """A run to compare; its layers are of two kinds if they ``differ``."""

    settings: Settings
    tied: bool = True
    layers: int | None = None
    data: int = 1
    zero: int = 0
    fused: bool = False
    differ: bool = False


T1, T2 = {"rescheduling_steps": 6}, {"discrepancy_decay": 0.135}
FEW = {
    # More stages than microbatches. With few of them later stages are minibatches ahead, and their
    # norms with them.
    "naive, clipped, drained": Case(
        Settings(4, 3, "pipemare", "sgd", clip_norm=0.3, drains=(6,)), tied=False, layers=5
    ),
    "T1 and T2, a minibatch of one": Case(
        Settings(3, 1, "pipemare", "momentum", **T1, **T2, remat="full"), layers=5, fused=True
    ),
    "T1 and T2, recomputing, clipped, ZeRO-3, layers that differ": Case(
        Settings(3, 2, "pipemare", "adam", **T1, **T2, clip_norm=0.3, recompute_segment=2),
        data=2,
        zero=3,
        differ=True,
    ),
    "PipeDream after a warm-up, ZeRO-1": Case(
        Settings(2, 2, "pipedream", "adamw", **T1, warm_up=3), layers=3, data=2, zero=1
    ),
    "2BW, recomputing, more microbatches than stages": Case(
        Settings(3, 5, "2bw", "adam", recompute_segment=2, remat="dots"), tied=False
    ),
}
MANY = [
    *(Case(Settings(4, 3, optimizer=optimizer)) for optimizer in ("momentum", "adam", "adamw")),
    *(Case(Settings(2, 5, optimizer=optimizer, **T1)) for optimizer in ("sgd", "adamw")),
    *(Case(Settings(2, 5, "pipedream", optimizer, **T1)) for optimizer in ("momentum", "adamw")),
    *(
        Case(Settings(3, 2, optimizer="momentum", **T2, remat=remat), layers=7, fused=fused)
        for remat in ("none", "dots", "full")
        for fused in (False, True)
    ),
    *(
        Case(Settings(P, N, optimizer="adamw", recompute_segment=segment, **options), layers=P + 2)
        for segment, P, N, options in (
            (1, 4, 2, {}),
            (3, 4, 8, {"discrepancy_decay": 0.3, "rescheduling_steps": 6, "clip_norm": 0.5}),
            (4, 4, 1, T2),
            (2, 3, 2, {"warm_up": 3, "drains": (6,), **T2}),
            (2, 3, 2, {"method": "pipedream"}),
            (2, 5, 2, {"warm_up": 3, "remat": "dots", **T1, **T2}),
        )
    ),
    *(
        Case(Settings(3, 2, "pipemare", "adam", 5, 0.135, recompute_segment=2), **options)
        for options in ({"differ": True}, {"data": 2, "zero": 1, "layers": 4})
    ),
    *(
        Case(Settings(2, 2, method, "adam", warm_up=1, drains=(4,)), layers=3, data=2, zero=zero)
        for method in ("pipemare", "pipedream")
        for zero in range(4)
    ),
    *(
        Case(
            Settings(P, N, optimizer="momentum", clip_norm=0.3, drains=(6,)),
            layers=5,
            tied=tied,
            data=data,
            zero=data - 1,
        )
        for P, N, data in ((3, 4, 1), (3, 4, 2), (4, 1, 1), (4, 2, 1), (4, 3, 1))
        for tied in (True, False)
    ),
    Case(Settings(2, 3, "2bw", "sgd", 7, warm_up=1, drains=(4, 7))),
    Case(Settings(2, 2, "pipedream", "adam"), data=2, zero=3, differ=True),
]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in FEW.items()),
        *(pytest.param(case, marks=pytest.mark.slow) for case in MANY),
    ],
)
def test_it_trains_as_the_reference(case):
    settings, layers = case.settings, case.layers or case.settings.stages
    start = packed(5) if case.differ else params(layers=layers, tied=case.tied)
    batches = minibatches(10, 2 * case.data * settings.microbatches)
    training = pipeline(settings, start, data=case.data, zero=case.zero, fused=case.fused)
    got, end, _ = train(settings, training, start, batches)
    want, want_end = reference(dataclasses.replace(settings, shards=case.data), start, batches)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert np.ptp(want) > 0.01 * abs(np.mean(want))
    chex.assert_trees_all_close(end, want_end, rtol=1e-3, atol=1e-4)
