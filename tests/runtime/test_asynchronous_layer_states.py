"""States of layers in a pipeline that never drains, against the reference's."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asynchronous_reference import Settings
from asynchronous_reference import train as reference
from asynchronous_toy import minibatches, packed, params, pipeline, states
from covering import some
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.runtime.layout.data_axis import average
from jaxpipe.runtime.mesh import Axes

CALLS = 1, 2, 1, 2
"""How many minibatches enter in every call."""


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("settings", "data", "zero", "differ"),
    some(
        [
            (Settings(3, 2, "pipemare", "momentum"), 2, 1, False),
            (Settings(2, 2, "pipedream", "adam", recompute_segment=2), 2, 0, False),
            (Settings(3, 2, discrepancy_decay=0.3, recompute_segment=2), 1, 0, True),
            (Settings(2, 3, "2bw", "adam", recompute_segment=1), 2, 3, True),
        ],
        (Settings(2, 2, "pipedream", "adam", recompute_segment=2), 2, 0, False),
    ),
)
def test_states_that_change_the_output_are_the_references(settings, data, zero, differ):
    """However many minibatches a call lets in, with a checkpoint in mid-flight after each call."""
    count, first = settings.stages + 1, states(settings.stages + 1)
    start = packed(count) if differ else params(layers=count, tied=True)
    batches = minibatches(sum(CALLS), 2 * data * settings.microbatches)
    want = reference(
        dataclasses.replace(settings, shards=data),
        start,
        batches,
        {n: state["mean"] for n, state in enumerate(first)},
    )
    training = pipeline(settings, start, data=data, zero=zero, states=first)
    pipe, placed = training.pipe, training.pipe.place(start)
    state = training.init(
        placed, training.optimizer.init(placed), batches[0], states=pipe.place_states(first)
    )
    stage_of = np.repeat(np.arange(settings.stages), pipe.table.layer_counts)

    def check_states(state, done):
        """After as many minibatches as F has run on the stage of each layer."""
        for n, layer in enumerate(pipe.unplace_states(state["states"])):
            k = done(stage_of[n])
            mean = first[n]["mean"] if k == 0 else want.states[k - 1][n]
            np.testing.assert_allclose(layer["mean"], mean, rtol=1e-4, atol=1e-5)

    several = jax.jit(lambda state, batches: jax.lax.scan(training.step, state, batches))
    entered, losses = 0, []
    for call in CALLS:
        entering = batches[entered : entered + call]
        state, new = several(state, jax.tree.map(lambda *w: np.stack(w), *entering))
        state = jax.tree.map(lambda w: jax.device_put(np.asarray(w), w.sharding), state)
        losses, entered = [*losses, *new], entered + call
        check_states(state, lambda d, n=entered: max(0, n - math.ceil(d / settings.microbatches)))
    state, new = jax.jit(training.drain)(state)
    check_states(state, lambda d: len(batches))
    losses = np.asarray([*losses, *new])
    np.testing.assert_allclose(losses[~np.isnan(losses)], want.losses, rtol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        pipe.unplace(training.params(state)),
        want.params,
    )


@pytest.mark.parametrize(("segment", "reads"), [(None, True), (2, False), (2, True)])
def test_states_that_recomputation_reads_again_are_kept_and_no_others(segment, reads):
    start, first = params(layers=3, tied=True), states(3)
    settings = Settings(3, 2, recompute_segment=segment)
    training = pipeline(settings, start, states=first, reads=reads)
    (batch,) = minibatches(1, 4)
    flight = jax.eval_shape(
        lambda p, s: training.init(p, training.optimizer.init(p), batch, states=s)["flight"],
        training.pipe.layout.placed_shapes(),
        training.pipe.placed_states,
    )
    assert ("read_states" in flight) == (segment is not None and reads)
    if "read_states" in flight:  # of one layer a stage, for every input that its segment keeps
        (kept,) = jax.tree.leaves(flight["read_states"])
        assert kept.size == 3 * training.steady.input_slots * first[0]["mean"].size


def test_averages_keep_their_dtype_and_count_exactly():
    mesh, large = jaxpipe.make_mesh(stage=1, data=2), 2**24 + 1
    values = {"count": jnp.full(2, large), "mean": jnp.asarray([1.0, 2.0], jnp.bfloat16)}
    mean = functools.partial(average, axes=Axes())
    averaged = jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(values)
    assert averaged["count"].tolist() == [large, large]
    assert averaged["mean"].dtype == jnp.bfloat16
    assert averaged["mean"].tolist() == [1.5, 1.5]
