"""What an asynchronous run carries from call to call: complete, exact, and no weights in flight."""

from __future__ import annotations

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from asynchronous_reference import Settings
from asynchronous_toy import WIDTH, minibatches, model, params, pipeline
from compilations import AS_USED

import jaxpipe
from benchmarks.hlo import HloProgram
from jaxpipe import AsyncPipeline


def saved(state):
    """The state as a checkpoint has it: host arrays, and where they were."""
    return jax.tree.map(lambda w: (np.asarray(w), w.sharding), state)


def restored(checkpoint):
    def put(leaf):
        return jax.device_put(*leaf)

    return jax.tree.map(put, checkpoint, is_leaf=lambda leaf: isinstance(leaf, tuple))


def equal(a, b) -> None:
    chex.assert_trees_all_equal(a, b, strict=True)


@pytest.mark.pipeline
def test_a_run_cut_in_mid_flight_goes_on_bit_by_bit():
    """With dropout, data shards, all techniques, Adam, clipping, a tied vocabulary over stages."""
    start = toy.params(tied=True, num_layers=3)
    pipe = jaxpipe.Pipeline(
        toy.model(tied=True, axis="stage"),
        start,
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        zero=1,
    )
    training = AsyncPipeline(
        pipe,
        optax.adam(0.01),
        rescheduling_steps=5,
        discrepancy_decay=0.135,
        recompute_segment=2,
        clip_norm=1.0,
    )
    placed, batch = pipe.place(start), toy.batch(8)
    keys = [jax.random.fold_in(jax.random.key(3), k) for k in range(6)]
    step, drain = jax.jit(training.step), jax.jit(training.drain)
    state = training.init(placed, training.optimizer.init(placed), batch, keys[0])
    checkpoints, losses = [], []
    for key in keys:
        rng = jax.random.key_data(state["recent"]["rng"])
        checkpoints.append(saved(state | {"recent": state["recent"] | {"rng": rng}}))
        state, loss = step(state, batch, key)
        losses.append(loss)
    want = drain(state)
    assert np.isfinite(np.asarray(losses[2:])).all()
    for cut in (1, 4):
        state = restored(checkpoints[cut])
        rng = jax.random.wrap_key_data(state["recent"]["rng"])
        state = state | {"recent": state["recent"] | {"rng": rng}}
        for k in range(cut, len(keys)):
            state, loss = step(state, batch, keys[k])
            equal(loss, losses[k])
        got = drain(state)
        equal(training.params(got[0]), training.params(want[0]))
        equal(training.finish(got[0])[1], training.finish(want[0])[1])
    assert int(training.finish(want[0])[1][0].count) == len(keys)  # no minibatch lost or repeated


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("remat", "segment", "slots"),
    [("none", None, 4), ("full", 1, 1), ("dots", 2, 3)],
)
def test_residuals_hold_rows_of_activations_and_no_weights(remat, segment, slots):
    settings = Settings(2, 2, "pipemare", "sgd", remat=remat, recompute_segment=segment)
    start, rows = params(layers=4, tied=True), 7  # of a microbatch; no weight's size is a multiple
    training = pipeline(settings, start)
    placed = training.pipe.place(start)
    (batch,) = minibatches(1, rows * settings.microbatches)
    state = jax.eval_shape(lambda p: training.init(p, training.optimizer.init(p), batch), placed)
    kept = [leaf for name in ("until_b", "until_w", "crossing") for leaf in state["flight"][name]]
    assert kept
    for leaf in kept:
        assert leaf.shape[-1] % rows == 0
        assert leaf.shape[-1] <= rows * 2 * WIDTH
    assert {leaf.shape[2] for leaf in state["flight"]["until_w"]} == {2 * slots}  # of 2 layers each


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("method", "zero", "segment", "layers"),
    [
        pytest.param("pipemare", 0, None, 3, marks=pytest.mark.slow),
        pytest.param("pipemare", 3, None, 7, marks=pytest.mark.slow),
        pytest.param("pipedream", 1, None, 7, marks=pytest.mark.slow),
        ("pipemare", 1, 2, 7),
    ],
)
def test_idle_ticks_compute_nothing_and_no_residual_is_copied(method, zero, segment, layers):
    settings = Settings(
        *(3, 2, method, "adam", None, 0.135 if method == "pipemare" else None),
        recompute_segment=segment,
        clip_norm=1.0,
    )
    start, data = params(layers=layers, tied=True), 2 if zero else 1
    training = pipeline(settings, start, data=data, zero=zero)
    placed, (batch,) = training.pipe.place(start), minibatches(1, 70 * data * 2)
    state = training.init(placed, training.optimizer.init(placed), batch)
    compiled = jax.jit(training.step, donate_argnums=0).lower(state, batch).compile(AS_USED)
    program = HloProgram(compiled.as_text())
    body = program.tick_loop()
    work = {"dot", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    gated = list(program.reached(body, into_loops=True))
    assert not work & {i.opcode for i in program.reached(body, into_loops=False)}
    assert {"dot", "all-reduce"} <= {i.opcode for i in gated}
    kept = [leaf for name in ("until_b", "until_w") for leaf in state["flight"][name]]
    slots = {leaf.shape[2:] for leaf in kept}
    copied = [i for i in gated if i.opcode in ("copy", "transpose") and slots & set(i.shapes)]
    assert not copied
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 0.95 * memory.output_size_in_bytes  # all donated
    # What is in flight is not copied on the way in or out.
    per_device = sum(leaf.nbytes for leaf in kept) // (settings.stages * data)
    assert memory.temp_size_in_bytes < per_device


SGD = optax.sgd(0.1)


@functools.cache
def make(schedule="1f1b", *, stages=2, microbatches=2, optimizer=None, **options) -> AsyncPipeline:
    start = params(layers=4, tied=True)
    pipe = jaxpipe.Pipeline(
        model(tied=True),
        start,
        schedule=jaxpipe.schedules.build(schedule, stages=stages, microbatches=microbatches),
        mesh=jaxpipe.make_mesh(stage=stages),
    )
    return AsyncPipeline(pipe, optimizer or SGD, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zb-v"}, r"'zb-v' has 2 chunks per stage[\s\S]*Nearest valid: '1f1b'"),
        ({"method": "naive"}, "choose one of pipemare, pipedream, 2bw"),
        ({"method": "2bw"}, r"Nearest valid: num_microbatches=3"),
        ({"method": "pipedream", "discrepancy_decay": 0.1}, "reads what its forward has read"),
        ({"discrepancy_decay": 1.5}, r"must lie between 0 and 1"),
        ({"rescheduling_steps": 0}, "must be at least 1"),
        ({"clip_norm": -1.0}, "must be positive"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_valid(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def carried(training: AsyncPipeline, batch: dict, rng=None):
    """Shapes of an empty state."""

    def init(placed):
        return training.init(placed, training.optimizer.init(placed), batch, rng)

    return jax.eval_shape(init, training.pipe.layout.placed_shapes())


ROWS = {"inputs": jnp.zeros((8, 3)), "targets": jnp.zeros((8, 3))}


@pytest.mark.parametrize(
    ("batch", "messages"),
    [
        (
            {name: jnp.zeros((4, 3)) for name in ROWS},
            [r"batch\['inputs'\] is float32\[4, 3\]; expected float32\[8, 3\]", "'targets'"],
        ),
        (ROWS | {"inputs": jnp.zeros((8, 3), jnp.bfloat16)}, [r"is bfloat16\[8, 3\]; expected"]),
        ({"inputs": ROWS["inputs"]}, [r"batch\['targets'\] is missing"]),
        (tuple(ROWS.values()), [r"batch\['inputs'\] is missing", r"batch\[0\] is float32"]),
    ],
)
def test_a_minibatch_unlike_that_of_init_is_refused(batch, messages):
    training = make()
    state = carried(training, ROWS)
    with pytest.raises(ValueError, match="call `init` with what `finish` returns") as error:
        jax.eval_shape(training.step, state, batch)
    for message in messages:
        assert re.search(message, str(error.value))


def test_a_restored_state_knows_what_its_init_was_given():
    """Host arrays, and a pipeline of its own."""
    training = make()
    placed = training.pipe.place(params(layers=4, tied=True))
    wide = jax.tree.map(np.float64, ROWS)  # which JAX makes float32
    state = jax.tree.map(np.asarray, training.init(placed, training.optimizer.init(placed), wide))
    del state["steady"]  # arrays alone, as many checkpoints hold them
    with pytest.raises(ValueError, match=r"state\['flight'\]\['inputs'\]\[0\] is missing"):
        make(recompute_segment=1).drain(state)
    again = make()
    with pytest.raises(ValueError, match=r"float32\[4, 3\]; expected float32\[8, 3\]"):
        again.step(state, jax.tree.map(lambda w: w[:4], ROWS))
    jax.eval_shape(again.step, state, wide)
    jax.eval_shape(again.step, state, ROWS)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"method": "pipedream"}, r"state\['weights'\]\['embed'\]\['table'\] is float32\[3, "),
        ({"discrepancy_decay": 0.1}, r"state\['delta'\].*nothing is expected"),
        ({"recompute_segment": 1}, r"recompute_segment=1\); expected .*recompute_segment=None"),
        ({"optimizer": optax.adam(0.1)}, r"state\['owned'\]\[0\].*nothing is expected"),
        ({"microbatches": 4}, r"num_microbatches=4, .*; expected .*num_microbatches=2, "),
    ],
)
def test_the_state_of_another_pipeline_is_refused(other, message):
    training, state = make(), carried(make(**other), ROWS)
    for use in ("step", "drain", "finish", "params", "discrepancy", "grad_norm"):
        arguments = (ROWS,) if use == "step" else ()
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(getattr(training, use), state, *arguments)


@pytest.mark.parametrize("state", [None, {"recent": {}}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="comes from its own `init`, `step` or `drain`"):
        make().drain(state)


def test_an_embedding_that_reads_the_head_is_refused():
    whole = model(tied=False)
    reads_head = dataclasses.replace(
        whole, embed=lambda outer, batch, rng: batch["inputs"] @ outer["head"]["readout"].T
    )
    mesh = jaxpipe.make_mesh(stage=2)
    start = params(layers=2, tied=False)
    pipe = jaxpipe.Pipeline(reads_head, start, schedule="1f1b", mesh=mesh)
    with pytest.raises(ValueError, match="belong to params"):
        carried(AsyncPipeline(pipe, SGD), minibatches(1, 4)[0])


def test_a_batch_that_does_not_divide_is_refused():
    training = make(microbatches=4)
    placed = training.pipe.layout.placed_shapes()
    with pytest.raises(ValueError, match=r"Nearest valid: 4, 8"):
        training.init(placed, optax.sgd(0.1).init(placed), {"inputs": jnp.zeros((6, 3))})
