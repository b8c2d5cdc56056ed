"""The asynchronous executor trains exactly as a slow loop over a weight history does."""

from __future__ import annotations

import dataclasses
import itertools

import chex
import numpy as np
import pytest
from asynchronous_reference import Settings
from asynchronous_reference import losses as reference
from asynchronous_toy import minibatches, packed, params, pipeline, train
from covering import some

pytestmark = pytest.mark.pipeline


def check(
    settings: Settings, *, tied=True, layers=None, data=1, zero=0, fused=False, steps=10, start=None
):
    start = start or params(layers=layers or settings.stages, tied=tied)
    batches = minibatches(steps, 2 * data * settings.microbatches)
    training = pipeline(settings, start, data=data, zero=zero, fused=fused)
    got, end, _ = train(settings, training, start, batches)
    want, want_end = reference(dataclasses.replace(settings, shards=data), start, batches)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert np.ptp(want) > 0.01 * abs(np.mean(want))
    chex.assert_trees_all_close(end, want_end, rtol=1e-3, atol=1e-4)


OPTIMIZERS = ["sgd", "momentum", "adam", "adamw"]
TECHNIQUES = {
    "naive": {},
    "T1": {"rescheduling_steps": 6},
    "T2": {"discrepancy_decay": 0.135},
    "T1+T2": {"rescheduling_steps": 6, "discrepancy_decay": 0.3},
}


@pytest.mark.parametrize(
    ("techniques", "optimizer"),
    some(
        itertools.product(TECHNIQUES, OPTIMIZERS),
        *zip(TECHNIQUES, ["sgd", "momentum", "adam", "adamw"], strict=True),
    ),
)
def test_pipemare_trains_as_the_reference(techniques, optimizer):
    # More stages than microbatches, a minibatch of one, more microbatches than stages.
    P, N = [(4, 3), (3, 1), (2, 5), (4, 2)][OPTIMIZERS.index(optimizer)]
    settings = Settings(P, N, optimizer=optimizer, **TECHNIQUES[techniques])
    check(settings, tied=techniques != "naive")


@pytest.mark.parametrize(
    ("P", "N", "optimizer"),
    some(
        [(4, 2, "adamw"), (2, 5, "adamw"), (4, 2, "momentum"), (2, 5, "momentum")], (4, 2, "adamw")
    ),
)
def test_pipedream_trains_as_the_reference(P, N, optimizer):
    check(Settings(P, N, "pipedream", optimizer, rescheduling_steps=5), tied=optimizer == "adamw")


@pytest.mark.parametrize("optimizer", some([("sgd",), ("adam",)], ("adam",)))
def test_2bw_trains_as_the_reference(optimizer):
    check(Settings(3, 5, "2bw", optimizer), tied=optimizer == "adam")


@pytest.mark.parametrize(
    ("remat", "fused"),
    some(
        itertools.product(["none", "dots", "full"], [False, True]), ("dots", False), ("full", True)
    ),
)
def test_every_remat_policy_reads_the_corrected_weights(remat, fused):
    settings = Settings(3, 2, "pipemare", "momentum", None, 0.135, remat)
    check(settings, layers=7, fused=fused)


@pytest.mark.parametrize(
    ("segment", "P", "N", "options"),
    some(
        [
            (1, 4, 2, {}),
            (2, 4, 3, {"discrepancy_decay": 0.135}),
            (2, 5, 2, {"discrepancy_decay": 0.135, "remat": "full"}),
            (3, 4, 8, {"discrepancy_decay": 0.3, "rescheduling_steps": 6, "clip_norm": 0.5}),
            (4, 4, 1, {"discrepancy_decay": 0.135}),
            (2, 3, 2, {"warm_up": 3, "drains": (6,), "discrepancy_decay": 0.135}),
            (2, 3, 2, {"method": "pipedream"}),
        ],
        (2, 5, 2, {"discrepancy_decay": 0.135, "remat": "full"}),
        (2, 3, 2, {"warm_up": 3, "drains": (6,), "discrepancy_decay": 0.135}),
    ),
)
def test_segments_are_recomputed_with_weights_of_their_own(segment, P, N, options):
    settings = Settings(P, N, optimizer="adamw", recompute_segment=segment, **options)
    check(settings, layers=P + 2)


@pytest.mark.parametrize(
    ("data", "zero", "differ"),
    some([(2, 3, False), (1, 0, True), (2, 1, True)], (2, 3, False), (1, 0, True)),
)
def test_segments_with_data_shards_and_layers_that_differ(data, zero, differ):
    settings = Settings(3, 2, "pipemare", "adam", 5, 0.135, recompute_segment=2)
    check(settings, layers=4, data=data, zero=zero, start=packed(5) if differ else None)


@pytest.mark.parametrize("zero", some([(0,), (1,), (2,), (3,)], (1,), (3,)))
def test_data_shards_and_zero(zero):
    settings = Settings(2, 2, "pipemare", "adamw", 5, 0.135, clip_norm=None)
    check(settings, layers=3, data=2, zero=zero)


@pytest.mark.parametrize("zero", some([(0,), (1,), (3,)], (1,)))
def test_data_shards_and_weight_versions(zero):
    check(Settings(2, 2, "pipedream", "adam"), layers=3, data=2, zero=zero)


@pytest.mark.parametrize(
    ("P", "N", "data", "zero", "tied"),
    some(
        [
            *((3, 4, data, data - 1, tied) for data in (1, 2) for tied in (True, False)),
            *((4, N, 1, 0, tied) for N in (1, 2, 3) for tied in (True, False)),
        ],
        (3, 4, 2, 1, True),
        (4, 1, 1, 0, False),
    ),
)
def test_clipping_uses_the_newest_finished_gradient_of_each_part(P, N, data, zero, tied):
    """With few microbatches later stages are minibatches ahead, and their norms with them."""
    settings = Settings(P, N, "pipemare", "momentum", clip_norm=0.3, drains=(6,))
    check(settings, layers=5, tied=tied, data=data, zero=zero)


def test_a_synchronous_warm_up_hands_over_weights_and_moments():
    check(Settings(3, 2, "pipemare", "adamw", 4, 0.135, warm_up=4), tied=False)


@pytest.mark.parametrize("method", some([("pipemare",), ("pipedream",), ("2bw",)], ("pipemare",)))
def test_training_goes_on_after_draining(method):
    check(Settings(2, 3, method, "adam", 7, warm_up=1, drains=(4, 7)))


@pytest.mark.parametrize(
    ("method", "data", "zero"),
    some(
        [("pipemare", 1, 0), ("pipemare", 2, 1), ("pipemare", 2, 3), ("pipedream", 2, 3)],
        ("pipemare", 2, 3),
    ),
)
def test_layers_that_differ(method, data, zero):
    corrects = method == "pipemare"
    settings = Settings(
        *(2, 2, method, "adam", 5 if corrects else None, 0.135 if corrects else None),
        clip_norm=None,
    )
    check(settings, start=packed(5), data=data, zero=zero)
