"""Asynchronous training is exactly that of a slow loop over a weight history, from call to call."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from asynchronous_reference import Settings
from asynchronous_reference import train as reference
from asynchronous_toy import (
    WIDTH,
    minibatches,
    model,
    params,
    pipeline,
    states,
    synchronous_step,
    train,
)
from compilations import AS_USED, refusal

import jaxpipe
from benchmarks.hlo import HloProgram
from jaxpipe import AsyncPipeline


@dataclasses.dataclass
class Case:
    """A run to compare; its layers are of two kinds if they ``differ``, and may be stateful."""

    settings: Settings
    tied: bool = True
    layers: int | None = None
    data: int = 1
    zero: int = 0
    fused: bool = False
    differ: bool = False
    stateful: bool = False


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
    "T1 and T2, recomputing, clipped, ZeRO-3, layers that differ and keep states": Case(
        Settings(3, 2, "pipemare", "adam", **T1, **T2, clip_norm=0.3, recompute_segment=2),
        data=2,
        zero=3,
        layers=5,
        differ=True,
        stateful=True,
    ),
    "PipeDream after a warm-up, ZeRO-1": Case(
        Settings(2, 2, "pipedream", "adamw", **T1, warm_up=3), layers=3, data=2, zero=1
    ),
    "2BW, recomputing, more microbatches than stages": Case(
        Settings(3, 5, "2bw", "adam", recompute_segment=2, remat="dots"), tied=False
    ),
}
MANY = [
    *(Case(Settings(4, 3, optimizer=name)) for name in ("momentum", "adam", "adamw")),
    *(
        Case(Settings(3, 2, optimizer="momentum", **T2, remat=remat), layers=5, fused=fused)
        for remat in ("none", "dots")
        for fused in (False, True)
    ),
    *(
        Case(Settings(P, N, optimizer="adamw", recompute_segment=segment, **options), layers=P + 1)
        for segment, P, N, options in (
            *((1, 4, 2, {}), (3, 4, 8, {**T1, **T2, "clip_norm": 0.5}), (4, 4, 1, T2)),
            (2, 5, 2, {"warm_up": 3, "drains": (6,), "remat": "dots", **T1, **T2}),
        )
    ),
    *(
        Case(Settings(2, 2, method, "adam", warm_up=1, drains=(4,)), layers=3, data=2, zero=zero)
        for method in ("pipemare", "pipedream")
        for zero in range(4)
    ),
    *(
        Case(Settings(P, N, optimizer="momentum", clip_norm=0.3), layers=5, data=data)
        for P, N, data in ((3, 4, 1), (3, 4, 2), (4, 1, 1), (4, 2, 1))
    ),
    Case(Settings(2, 3, "2bw", "sgd", 7, warm_up=1, drains=(4, 7))),
    *(
        Case(settings, layers=settings.stages + 1, data=2, zero=zero, stateful=True)
        for settings, zero in (
            (Settings(3, 2, "pipemare", "momentum"), 1),
            (Settings(2, 2, "pipedream", "adam", recompute_segment=2), 0),
            (Settings(2, 3, "2bw", "adam", recompute_segment=1), 3),
        )
    ),
]


def check(case: Case) -> None:
    settings, layers = case.settings, case.layers or case.settings.stages
    start = params(layers=layers, tied=case.tied, differ=case.differ)
    first, batches = states(layers), minibatches(10, 2 * case.data * settings.microbatches)
    given = {"data": case.data, "zero": case.zero, "states": first if case.stateful else None}
    schedule = "1f1b-fused" if case.fused else "1f1b"
    training = pipeline(settings, start, schedule=schedule, **given)
    got, end, means = train(settings, training, start, batches, given["states"])
    want, want_end, want_means = reference(
        dataclasses.replace(settings, shards=case.data),
        start,
        batches,
        {n: state["mean"] for n, state in enumerate(first)} if case.stateful else {},
    )
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert np.ptp(want) > 0.01 * abs(np.mean(want))
    chex.assert_trees_all_close(end, want_end, rtol=1e-3, atol=1e-4)
    for n, state in enumerate(means):
        np.testing.assert_allclose(state["mean"], want_means[-1][n], rtol=1e-4, atol=1e-5)


@pytest.mark.pipeline
@pytest.mark.parametrize("name", FEW)
def test_it_trains_as_the_reference(name):
    check(FEW[name])


@pytest.mark.pipeline
@pytest.mark.slow
def test_it_trains_as_the_reference_everywhere():
    for case in MANY:
        check(case)


@pytest.mark.pipeline
@pytest.mark.parametrize("counts", [(0, 2, 3), pytest.param((3, 0, 2), marks=pytest.mark.slow)])
def test_a_stage_without_layers_keeps_what_its_segment_recomputes_from(counts):
    """No weights are late for the first minibatch."""
    settings, start = Settings(3, 5, "2bw", "sgd", recompute_segment=2), params(layers=5)
    (batch,) = minibatches(1, 10)
    training = pipeline(settings, start, layer_counts=counts)
    got, end, _ = train(settings, training, start, [batch])
    placed = training.pipe.place(start)
    state = training.optimizer.init(placed)
    want, _, loss = jax.jit(functools.partial(synchronous_step, training))(placed, state, batch)
    np.testing.assert_allclose(got, [loss], rtol=1e-5)
    chex.assert_trees_all_close(end, training.pipe.unplace(want), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("segment", "reads"), [(None, True), (2, False), (2, True)])
def test_states_that_recomputation_reads_again_are_kept_and_no_others(segment, reads):
    start, first = params(layers=3), states(3)
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


# The reference itself.


@pytest.mark.parametrize("tied", [True, False])
def test_its_synchronous_gradient_is_the_derivative(tied):
    start, (batch,) = params(layers=3, tied=tied), minibatches(1, 6)
    functions = model(start)

    def loss(p):
        x = functions.embed(p, batch, None)
        for n in range(3):
            x = functions.layer(jax.tree.map(lambda w, n=n: w[n], p["layers"]), x, batch, None)
        return functions.head_loss(p, x, batch, None)

    value, gradients = jax.jit(jax.value_and_grad(loss))(start)
    (got,), end, _ = reference(Settings(2, 3, "synchronous"), start, [batch])
    np.testing.assert_allclose(got, value, rtol=1e-5)
    expected = jax.tree.map(lambda w, g: w - 0.02 * g, start, gradients)
    chex.assert_trees_all_close(jax.tree.map(np.float32, end), expected, rtol=1e-5, atol=1e-6)


def test_what_it_switches_changes_the_losses():
    plain = Settings(3, 2, "pipemare", "momentum")
    variants = [
        {},
        *({"method": "synchronous"}, {"method": "pipedream"}, {"method": "2bw", "microbatches": 5}),
        *(T1, T2, {"remat": "full"}, {"remat": "dots"}),
        *({"recompute_segment": 2}, {"recompute_segment": 2, **T2}),
        *({"optimizer": "adam"}, {"microbatches": 5, "clip_norm": 0.5}),
    ]
    ends = {
        round(reference(settings, params(layers=3), minibatches(8, 10)).losses[-1], 6)
        for settings in (dataclasses.replace(plain, **variant) for variant in variants)
    }
    assert len(ends) == len(variants)


# What a run carries from call to call: complete, exact, and no weights in flight.


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
    toy = toys.named("tied", 3)
    pipe = toys.pipeline("tied", "1f1b", toys.ON_DATA, num_layers=3, microbatches=2, zero=1)
    training = AsyncPipeline(
        pipe,
        optax.adam(0.01),
        rescheduling_steps=5,
        discrepancy_decay=0.135,
        recompute_segment=2,
        clip_norm=1.0,
    )
    placed, batch = pipe.place(toy.params), toy.batch(8)
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
    ("remat", "segment", "slots"), [("none", None, 4), ("full", 1, 1), ("dots", 2, 3)]
)
def test_residuals_hold_rows_of_activations_and_no_weights(remat, segment, slots):
    settings = Settings(2, 2, "pipemare", "sgd", remat=remat, recompute_segment=segment)
    start, rows = params(layers=4), 7  # of a microbatch; no weight's size is a multiple
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
    start, data = params(layers=layers), 2 if zero else 1
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


START, SGD = params(layers=4), optax.sgd(0.1)


@functools.cache
def make(schedule="1f1b", *, microbatches=2, optimizer=SGD, **options) -> AsyncPipeline:
    given = {"schedule": schedule, "microbatches": microbatches, "mesh": jaxpipe.make_mesh(stage=2)}
    return AsyncPipeline(jaxpipe.Pipeline(model(START), START, **given), optimizer, **options)


def carried(training: AsyncPipeline, batch: dict, rng=None):
    """Shapes of an empty state."""
    placed = training.pipe.placed_params
    state = training.pipe.optimizer_placing(training.optimizer).placed
    return jax.eval_shape(training.init, placed, state, batch, rng)


ROWS = {"inputs": np.zeros((8, 3), np.float32), "targets": np.zeros((8, 3), np.float32)}
FOUR = jax.tree.map(lambda w: w[:4], ROWS)

# fmt: off
OPTIONS = [
    ({"schedule": "zb-v"}, "'zb-v' has 2 chunks per stage", "Nearest valid: '1f1b'"),
    ({"method": "naive"}, "choose one of pipemare, pipedream, 2bw"),
    ({"method": "2bw"}, "Nearest valid: num_microbatches=3"),
    ({"method": "pipedream", "discrepancy_decay": 0.1}, "reads what its forward has read"),
    ({"discrepancy_decay": 1.5}, "must lie between 0 and 1"),
    ({"rescheduling_steps": 0}, "must be at least 1"),
    ({"clip_norm": -1.0}, "must be positive"),
]
BATCHES = [
    (FOUR, "batch['inputs'] is float32[4, 3]; expected float32[8, 3]", "'targets'"),
    (ROWS | {"inputs": jnp.zeros((8, 3), jnp.bfloat16)}, "is bfloat16[8, 3]; expected"),
    ({"inputs": ROWS["inputs"]}, "batch['targets'] is missing"),
    (tuple(ROWS.values()), "batch['inputs'] is missing", "batch[0] is float32"),
]
OTHERS = [
    ({"method": "pipedream"}, "state['weights']['embed']['table'] is float32[3, "),
    ({"discrepancy_decay": 0.1}, "state['delta']", "nothing is expected"),
    ({"recompute_segment": 1}, "recompute_segment=1); expected ", "recompute_segment=None"),
    ({"optimizer": optax.adam(0.1)}, "state['owned'][0]", "nothing is expected"),
    ({"microbatches": 4}, "num_microbatches=4, ", "; expected ", "num_microbatches=2, "),
]
# fmt: on


@pytest.mark.parametrize("row", OPTIONS)
def test_what_does_not_fit_is_refused_with_the_nearest_valid(row):
    options, *texts = row
    found = refusal(make, **options)
    assert all(text in found for text in texts)


@pytest.mark.parametrize("row", BATCHES)
def test_a_minibatch_unlike_that_of_init_is_refused(row):
    batch, *texts = row
    found = refusal(jax.eval_shape, make().step, carried(make(), ROWS), batch)
    assert all(text in found for text in ("call `init` with what `finish` returns", *texts))


@pytest.mark.parametrize("row", OTHERS)
def test_the_state_of_another_pipeline_is_refused(row):
    other, *texts = row
    state = carried(make(**other), ROWS)
    for use in ("step", "drain", "finish", "params", "discrepancy", "grad_norm"):
        arguments = (ROWS,) if use == "step" else ()
        found = refusal(jax.eval_shape, getattr(make(), use), state, *arguments)
        assert all(text in found for text in texts)


def test_a_restored_state_knows_what_its_init_was_given():
    """Host arrays, and a pipeline of its own."""
    training = make()
    placed = training.pipe.place(START)
    wide = jax.tree.map(np.float64, ROWS)  # which JAX makes float32
    state = jax.tree.map(np.asarray, training.init(placed, training.optimizer.init(placed), wide))
    del state["steady"]  # arrays alone, as many checkpoints hold them
    found = refusal(make(recompute_segment=1).drain, state)
    assert "state['flight']['inputs'][0] is missing" in found
    again = AsyncPipeline(training.pipe, SGD)
    assert "float32[4, 3]; expected float32[8, 3]" in refusal(again.step, state, FOUR)
    jax.eval_shape(again.step, state, wide)
    jax.eval_shape(again.step, state, ROWS)


def test_what_is_no_state_or_batch_and_an_embedding_that_reads_the_head_are_refused():
    for state in (None, {"recent": {}}):
        found = refusal(make().drain, state)
        assert "comes from its own `init`, `step` or `drain`" in found
    six = {"inputs": np.zeros((6, 3))}
    assert "Nearest valid: 4, 8" in refusal(carried, make(microbatches=4), six)
    start = params(layers=2, tied=False)

    def embed(outer, batch, rng):
        return batch["inputs"] @ (outer["embed"]["table"] + outer["head"]["readout"].T)

    reads_head = dataclasses.replace(model(start), embed=embed)
    pipe = jaxpipe.Pipeline(reads_head, start, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=2))
    assert "belong to params" in refusal(carried, AsyncPipeline(pipe, SGD), ROWS)
