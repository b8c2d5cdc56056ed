"""Losses, metrics and outputs: as of the unpipelined model, whatever runs it."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import mixture
import numpy as np
import optax
import pytest
import toy
import toys
from compilations import refusal
from covering import some
from jax import lax
from jax.sharding import PartitionSpec as P
from toys import assert_close

import jaxpipe
from jaxpipe import Sum, Weighted, WithLoss, testing
from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.memory import buffers

pytestmark = pytest.mark.pipeline

MODEL, UNEVEN, BATCH = mixture.model(), toys.named("uneven"), mixture.batch(6)


@functools.cache
def unpipelined():
    """The batch, its value and its gradients; several tests share them."""
    batch = mixture.batch(12)
    loss = functools.partial(jaxpipe.unpipelined.loss, MODEL, num_microbatches=3, data_shards=2)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return batch, *step(mixture.params(), batch)


def pipeline(schedule="1f1b", sizes=toys.ON_DATA, **options) -> jaxpipe.Pipeline:
    return toys.pipeline("mixture", schedule, sizes, microbatches=3, **options)


def test_a_weighted_loss_is_the_mean_over_all_tokens_of_the_batch():
    """Computed at once from all rows, without a word of microbatches."""
    start, batch = mixture.params(), mixture.batch(12)

    def layer(w, x, batch, rng):
        return mixture.layer(w, x, batch, rng).x

    def expected(params):
        x = params["embed"]["table"][batch["tokens"]]
        for n in range(len(mixture.DIFFERENT)):
            x = layer(jax.tree.map(lambda w, n=n: w[n], params["layers"]), x, batch, None)
        losses, right = mixture.losses_of(params, x, batch)
        valid = batch["mask"] > 0
        return jnp.sum(jnp.where(valid, losses, 0)) / valid.sum(), (right & valid).sum()

    model = dataclasses.replace(MODEL, layer=layer)
    loss = functools.partial(jaxpipe.unpipelined.loss, model, num_microbatches=3, data_shards=2)
    (got, metrics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(start, batch)
    (value, right), gradients = jax.jit(jax.value_and_grad(expected, has_aux=True))(start)
    assert_close((got, grads), (value, gradients))
    tokens = int(batch["mask"].sum())
    assert metrics["tokens"] == tokens
    assert metrics["right by target"].sum() == right
    np.testing.assert_allclose(metrics["accuracy"], right / tokens, rtol=1e-6)
    np.testing.assert_allclose(metrics["cross entropy"], value, rtol=1e-6)


@pytest.fixture(scope="module")
def pipe():
    return pipeline(zero=1)


def test_a_batch_without_a_token_has_no_loss_but_that_of_its_layers(pipe):
    """Calls outside jit compile their program once; other calls of this file share it."""
    batch, placed = mixture.batch(12), pipe.place(mixture.params())
    batch |= {"mask": jnp.zeros_like(batch["mask"])}
    (loss, metrics), grads = pipe.value_and_grad(placed, batch)
    assert metrics["cross entropy"] == 0
    assert loss > 0
    assert not jnp.any(grads["head"]["table"])
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_rows_that_pad_a_batch_have_no_part_in_its_loss_and_gradients():
    """Seven rows become twelve, of which a microbatch holds nothing else."""

    def layer(w, x, batch, rng):
        return mixture.layer(w, x, batch, rng).x

    start, batch = mixture.params(), mixture.batch(7)
    model = dataclasses.replace(MODEL, layer=layer)
    mesh = jaxpipe.make_mesh(**toys.ON_DATA)
    pipe = jaxpipe.Pipeline(model, start, schedule="1f1b", microbatches=3, mesh=mesh)
    padded = pipe.pad_batch(batch)
    chex.assert_trees_all_equal(jax.tree.map(lambda w: w[:7], padded), batch)
    assert padded["mask"].shape == (12, mixture.LENGTH)
    got, gradients = jax.jit(pipe.value_and_grad)(pipe.place(start), padded)
    step = functools.partial(jaxpipe.unpipelined.value_and_grad, model)
    expected, wanted = jax.jit(step)(start, batch)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    assert got[1]["tokens"] == expected[1]["tokens"]
    assert_close(pipe.unplace(gradients), wanted)


def test_a_batch_without_weights_gets_some_by_row_and_what_cannot_be_padded_is_refused(pipe):
    rows = {"x": jnp.arange(5), "y": {"z": np.ones((5, 2), np.int8)}}
    padded = pipe.pad_batch(rows, mask="valid")
    assert padded["x"].tolist() == [0, 1, 2, 3, 4, 0]
    assert padded["valid"].tolist() == [1, 1, 1, 1, 1, 0]
    assert (padded["y"]["z"].shape, padded["y"]["z"].dtype) == ((6, 2), np.int8)
    assert pipe.pad_batch(padded, mask="valid")["valid"].tolist() == padded["valid"].tolist()
    assert "batch is a tuple; a mask needs" in refusal(pipe.pad_batch, (np.ones(5),))
    assert refusal(pipe.pad_batch, {"x": np.ones((0, 2))}) == "batch holds no rows."
    assert "equally many rows" in refusal(pipe.pad_batch, {"x": np.ones(5), "y": np.ones(3)})


def test_jax_grad_of_the_loss_runs_the_schedule_and_calls_compile_once(pipe):
    optimizer = optax.sgd(0.1)
    batch, (value, metrics), gradients = unpipelined()
    placed = pipe.place(mixture.params())
    state = pipe.init(optimizer, placed)

    def doubled(placed):
        loss, metrics = pipe.loss(placed, batch)
        return 2 * loss, metrics

    def step():
        got, grads = pipe.value_and_grad(placed, batch)
        return got, pipe.update(optimizer, grads, state, placed), grads

    loss_and_grads = jax.value_and_grad(doubled, has_aux=True)
    loss_and_grads(placed), step()
    with testing.compilations() as compiled:
        got, grads = loss_and_grads(placed)
        again, _, same = step()
    assert not compiled
    assert_close((got, again), ((2 * value, metrics), (value, metrics)))
    doubled_grads = jax.tree.map(lambda g: 2 * g, gradients)
    assert_close((pipe.unplace(grads), pipe.unplace(same)), (doubled_grads, gradients))


def test_totals_of_batches_add_up_to_what_all_rows_give_at_once(pipe):
    rows, placed = mixture.batch(30), pipe.place(mixture.params())
    parts = [jax.tree.map(lambda w, cut=cut: w[cut], rows) for cut in (np.s_[:6], np.s_[6:])]
    found = [pipe.totals(placed, part) for part in parts]
    loss, metrics = jax.tree.map(lambda *w: sum(w), *found)
    _, want = jax.jit(functools.partial(jaxpipe.unpipelined.loss, MODEL))(mixture.params(), rows)
    for name in ("cross entropy", "accuracy"):
        np.testing.assert_allclose(metrics[name].mean, want[name], rtol=1e-5)
    for name in ("tokens", "right by target", "use"):
        np.testing.assert_array_equal(metrics[name].value, want[name])
    # Rows weigh alike, whatever their microbatch.
    np.testing.assert_allclose(metrics["confidence"].mean, want["confidence"], rtol=1e-5)
    assert metrics["largest"]["token"].weight == 30
    assert loss.weight == metrics["cross entropy"].weight == rows["mask"].sum()
    of_one, (value, _) = found[0][0], pipe.loss(placed, parts[0])
    np.testing.assert_allclose(of_one.mean, value, rtol=1e-6)
    means = [float(part[0].mean) for part in found]
    assert abs(np.average(means, weights=[6, 24]) - loss.mean) > 1e-3


def test_totals_have_no_derivative(pipe):
    batch, placed = mixture.batch(6), pipe.place(mixture.params())
    with pytest.raises(ValueError, match=r"Pipeline\.totals was differentiated"):
        jax.grad(lambda w: pipe.totals(w, batch)[0].mean)(placed)


@pytest.mark.parametrize("together", [pytest.param(False, marks=pytest.mark.slow), True])
def test_jax_grad_by_what_the_embedding_and_the_head_read_of_the_batch(together, monkeypatch):
    if together:
        toys.compute_together(monkeypatch)
    pipe = toys.pipeline("uneven", "1f1b", toys.ON_DATA, microbatches=3, zero=2)
    start, batch = UNEVEN.params, UNEVEN.batch(12)
    read = {name: batch[name] for name in ("x", "y")}
    loss = functools.partial(UNEVEN.reference, num_microbatches=3, data_shards=2)

    def pipelined(params, read):
        return pipe.loss(params, batch | read)

    def expected(params, read):
        return loss(params, batch | read)

    step = jax.jit(jax.value_and_grad(pipelined, argnums=(0, 1)))
    value, (grads, of_batch) = step(pipe.place(start), read)
    got = value, (pipe.unplace(grads), of_batch)
    assert_close(got, jax.jit(jax.value_and_grad(expected, argnums=(0, 1)))(start, read))


def test_other_derivatives_are_refused_in_a_sentence():
    pipe = pipeline("1f1b", toys.STAGES)
    placed, batch = pipe.placed_params, BATCH

    def loss(placed, batch):
        return pipe.loss(placed, batch)[0]

    def gradient(placed):
        return jax.tree.leaves(jax.grad(loss)(placed, batch))[0].sum()

    def of_metric(placed):
        return pipe.loss(placed, batch)[1]["accuracy"]

    def of_gradients(placed):
        return jax.tree.leaves(pipe.value_and_grad(placed, batch)[1])[0].sum()

    for function, text in (
        (jax.grad(gradient), "has only first derivatives"),
        (jax.grad(of_gradients), "has only first derivatives"),
        (jax.grad(of_metric), "A metric of Pipeline.loss was differentiated"),
        (
            lambda p: jax.grad(lambda mask: loss(p, batch | {"mask": mask}))(batch["mask"]),
            "on which the weight of the loss depends",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(function, placed)
    uneven = toys.pipeline("uneven", microbatches=2)
    given = uneven.placed_params, UNEVEN.batch(4)
    with pytest.raises(ValueError, match=r"batch\['shift'\], which layer 0 reads; only what"):
        jax.eval_shape(jax.grad(uneven.loss, argnums=1), *given)


def test_forward_mode_is_refused(pipe):
    placed, batch = pipe.place(mixture.params()), mixture.batch(12)
    with pytest.raises(ValueError, match=r"differentiated in forward mode, as by jax\.jvp"):
        jax.jvp(lambda w: pipe.loss(w, batch)[0], (placed,), (placed,))


def test_metrics_are_added_up_without_loss():
    counts, half = jnp.full(3, 200, jnp.uint8), jnp.ones((), jnp.bfloat16)
    metrics = {"sum": Sum(counts), "right": Sum(counts > 0), "half": Sum(half), "mean": counts}
    _, added = losses.addable((jnp.zeros(()), metrics | {"weighted": Weighted(half, counts)}))
    dtypes = {name: {w.dtype.name for w in jax.tree.leaves(tree)} for name, tree in added.items()}
    integers = {name: dtypes.pop(name) for name in ("sum", "right")}
    assert integers == {"sum": {"uint32"}, "right": {"int32"}}
    assert all(found == {"float32"} for found in dtypes.values())


RECOMPUTING = (2, 2, {"recompute_segment": 2})


@pytest.mark.parametrize(
    ("microbatches", "zero", "options"),
    some([RECOMPUTING, (1, 0, {}), (5, 3, {"method": "2bw"})], RECOMPUTING),
)
def test_asynchronous_losses_and_gradients_are_those_of_their_minibatch(
    microbatches, zero, options
):
    """By an optimizer that adds gradients up and leaves weights as they are."""
    start, rows = mixture.params(), 4 * microbatches
    optimizer = optax.chain(optax.trace(decay=1.0), optax.scale(0.0))
    sizes = {"stage": 3, "data": 2}
    pipe = toys.pipeline("mixture", "1f1b", sizes, microbatches=microbatches, zero=zero)
    training = jaxpipe.AsyncPipeline(pipe, optimizer, **options)
    drawn = mixture.batch(4 * rows)
    batches = [jax.tree.map(lambda w, n=n: w[n * rows :][:rows], drawn) for n in range(4)]
    loss = functools.partial(
        jaxpipe.unpipelined.loss, MODEL, num_microbatches=microbatches, data_shards=2
    )
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected, gradients = zip(*(step(start, batch) for batch in batches), strict=True)

    run, left, placed = jax.jit(training.step), [], pipe.place(start)
    state = training.init(placed, pipe.init(optimizer, placed), batches[0])
    for batch in batches:
        state, value = run(state, batch)
        left.append(jax.tree.map(lambda w: w[None], value))
    state, rest = jax.jit(training.drain)(state)
    values = jax.tree.map(lambda *w: np.concatenate(w), *left, rest)
    there = ~np.isnan(values[0])
    assert not values[1]["tokens"][~there].any()
    got = jax.tree.map(functools.partial(np.compress, there, axis=0), values)
    assert_close(got, jax.tree.map(lambda *w: np.stack(w), *expected))
    placed, state = training.finish(state)
    chex.assert_trees_all_equal(pipe.unplace(placed), start)
    summed = pipe.optimizer_placing(optimizer).unplace(state)[0].trace
    assert_close(summed, jax.tree.map(lambda *g: sum(g), *gradients))


# What is refused.


# fmt: off
LOSSES = [  # of the head
    (lambda x: x.mean().astype(jnp.bfloat16),
     "Model.head_loss returns bfloat16[]; it must be a float32 scalar", ".astype(jnp.float32)"),
    (lambda x: x.mean((1, 2)), "Model.head_loss returns float32[2]; it must"),
    (lambda x: {"loss": x.mean()}, "Model.head_loss returns {'loss': float32[]}; it must"),
    (lambda x: x.size, "Model.head_loss returns int32[]; it must"),
    (lambda x: None, "Model.head_loss returns None; it must"),
    (lambda x: (x.sum(), x.size), "beside the loss there may only be a dictionary of metrics"),
    (lambda x: Weighted(x.sum(-1), 1.0), "`total` must be a float32 scalar"),
    (lambda x: Weighted(x.sum(), jnp.ones(2)), "`weight` a scalar"),
    (lambda x: (Sum(x.sum()), {}), "it must be a float32 scalar"),
]
OF_LAYERS = [
    (lambda x: x.mean(-1), "Layer 0 returns WithLoss with the loss float32[2, 4]; it must be"),
    (lambda x: (x.mean(), x.max()), "beside the loss there may only be a dictionary of metrics"),
    (lambda x: (x.mean(), {"tokens": x.max()}),
     "Layers and Model.head_loss both return a metric named 'tokens'. Give them other names"),
]
# fmt: on


@pytest.mark.parametrize(
    ("function", "loss", "texts"),
    [
        *(("head_loss", loss, texts) for loss, *texts in LOSSES),
        *(("layer", loss, texts) for loss, *texts in OF_LAYERS),
    ],
)
def test_what_is_no_loss_is_refused(function, loss, texts):
    functions = {
        "head_loss": lambda outer, x, batch, rng: loss(x),
        "layer": lambda w, x, batch, rng: WithLoss(x, loss(x)),
    }
    pipe = pipeline("1f1b", toys.STAGES)
    pipe.model = dataclasses.replace(MODEL, **{function: functions[function]})
    found = refusal(jax.eval_shape, pipe.loss, pipe.placed_params, BATCH)
    if loss in (LOSSES[0][0], OF_LAYERS[0][0]):  # one of each
        assert found == of_steps(pipe)
    for text in texts:
        assert text in found


def of_steps(pipe: jaxpipe.Pipeline) -> str:
    """The refusal by a step, by one with updates, by an asynchronous one and by a plan."""
    placed, sgd = pipe.placed_params, optax.sgd(0.1)
    state = pipe.optimizer_placing(sgd).placed
    (found,) = {
        refusal(jax.eval_shape, function, *args)
        for function, *args in (
            (pipe.value_and_grad, placed, BATCH),
            (pipe.train_step(sgd, update="chunk"), placed, state, BATCH),
            (jaxpipe.AsyncPipeline(pipe, sgd).init, placed, state, BATCH),
            (functools.partial(buffers, pipe, BATCH),),
        )
    }
    return found


def test_the_weight_of_a_loss_depends_on_the_batch_alone():
    pipe = pipeline("1f1b", toys.STAGES)
    pipe.model = dataclasses.replace(
        MODEL, head_loss=lambda outer, x, batch, rng: Weighted(x.sum(), (x > 0).sum())
    )
    assert "whose weight depends on parameters or" in of_steps(pipe)


@pytest.mark.parametrize("loss", [2.0, np.float32(2)])
def test_a_loss_that_is_a_number_is_a_loss(loss):
    pipe = pipeline("1f1b", toys.STAGES)
    pipe.model = dataclasses.replace(MODEL, head_loss=lambda *_: loss)
    with pytest.warns(UserWarning, match="does not depend on head/table"):
        (value, _), _ = jax.eval_shape(pipe.value_and_grad, pipe.placed_params, BATCH)
    assert value == jax.ShapeDtypeStruct((), jnp.float32)


def test_layers_with_losses_have_the_same_metrics():
    layers = [lambda w, x, *_: WithLoss(x, x.mean())] * len(mixture.DIFFERENT)
    layers[3] = lambda w, x, *_: WithLoss(x, (x.mean(), {"peak": x.max()}))
    pipe = toys.pipeline("mixture tuple")
    pipe.model = dataclasses.replace(pipe.model, layer=tuple(layers))
    text = refusal(jax.eval_shape, pipe.value_and_grad, pipe.placed_params, mixture.batch(8))
    assert text.endswith("layers that have losses must all have the same metrics.")


# Outputs.


def logits(outer, x, batch, rng, *, axis=None):
    """Logits of every token, gathered where the table is split; and which rows they are of, also as
    booleans."""
    del rng
    z = (x * outer["head"]["scale"]) @ outer["head"]["table"].T
    if axis is not None:
        z = lax.all_gather(z, axis, axis=-1, tiled=True)
    first = batch["tokens"][:, 0]
    return {"logits": z[..., : toy.VOCAB], "first": first, "even": first % 2 == 0}


@pytest.mark.parametrize(
    ("schedule", "stages", "data", "zero", "axis"),
    some(
        [
            *(("1f1b", 4, 2, 0, "stage"), ("zb-v", 2, 2, 3, "stage")),
            *(("breadth-first", 2, 1, 0, None), ("gpipe", 1, 1, 0, None)),
        ],
        *(("zb-v", 2, 2, 3, "stage"), ("breadth-first", 2, 1, 0, None)),
    ),
)
def test_outputs_are_those_of_the_unpipelined_model_row_by_row(schedule, stages, data, zero, axis):
    """With dropout."""
    name, sizes = "untied" if axis else "ends", {"stage": stages, "data": data}
    pipe = toys.pipeline(name, schedule, sizes, microbatches=3, zero=zero)
    pipe.model = dataclasses.replace(pipe.model, output=functools.partial(logits, axis=axis))
    whole = dataclasses.replace(toys.named("ends").model, output=logits)
    reference = functools.partial(
        jaxpipe.unpipelined.outputs, whole, num_microbatches=3, data_shards=data
    )
    params, batch, rng = toys.named(name).params, toy.batch(6 * data), jax.random.key(3)
    got = jax.jit(pipe.outputs)(pipe.place(params), batch, rng)
    expected = jax.jit(reference)(params, batch, rng)
    np.testing.assert_array_equal(got["first"], batch["tokens"][:, 0])
    chex.assert_trees_all_equal_dtypes(got, expected)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)
    for leaf in jax.tree.leaves(got):
        assert leaf.sharding.is_equivalent_to(pipe.batch_sharding, leaf.ndim)
    assert pipe.batch_sharding.spec == P("data")


def test_without_a_function_outputs_are_the_last_activation():
    """Of layers that differ and keep a state."""
    _, _, params, batch, given = toys.named("stateful")
    pipe = toys.pipeline("stateful", "1f1b", toys.ON_DATA, microbatches=2)
    states = pipe.place_states(given["states"])
    got = jax.jit(pipe.outputs)(pipe.place(params), batch(8), states=states)
    outputs = functools.partial(
        jaxpipe.unpipelined.outputs, pipe.model, num_microbatches=2, data_shards=2
    )
    expected = jax.jit(outputs)(params, batch(8), **given)
    assert got.keys() == {"main", "kept"}
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("output", "found"),
    [(lambda x: x.mean(), "float32[]"), (lambda x: {"x": x[1:]}, "{'x': float32[1, 5, 8]}")],
)
def test_what_does_not_begin_with_rows_is_refused(output, found):
    pipe = toys.pipeline("ends", microbatches=2)
    pipe.model = dataclasses.replace(pipe.model, output=lambda outer, x, *_: output(x))
    text = refusal(jax.eval_shape, pipe.outputs, pipe.placed_params, toy.batch(4))
    assert text.startswith(f"Model.output returns {found}; ")
    assert "arrays whose first dimension is the 2 rows" in text


def test_a_derivative_of_outputs_is_refused():
    pipe = toys.pipeline("ends", microbatches=2)
    largest = jax.grad(lambda placed: pipe.outputs(placed, toy.batch(4)).max())
    text = refusal(jax.eval_shape, largest, pipe.placed_params)
    assert "it only runs forward" in text
    assert "differentiate `Pipeline.loss`" in text
