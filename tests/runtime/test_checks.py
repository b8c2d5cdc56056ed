"""Trees, batches and losses that do not fit a pipeline are refused before anything compiles."""

from __future__ import annotations

import dataclasses
import functools

import chex
import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
import uneven

import jaxpipe
from jaxpipe.runtime.measure import traced

WIDTH = toy.WIDTH


def toy_pipeline(model=None, **options) -> jaxpipe.Pipeline:
    """Four layers on two stages; every layer has ``up``, ``down`` and ``bias``."""
    return jaxpipe.Pipeline(
        toy.model(tied=False, axis=None) if model is None else model,
        options.pop("params", toy.params(tied=False, num_layers=4)),
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=2),
        **options,
    )


@functools.cache
def pipe() -> jaxpipe.Pipeline:
    return toy_pipeline()


@functools.cache
def uneven_pipe(*, stateful: bool = False) -> jaxpipe.Pipeline:
    """Eight layers that differ on two stages."""
    return jaxpipe.Pipeline(
        uneven.model(stateful=stateful),
        uneven.params(),
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=2),
        states=uneven.states() if stateful else None,
    )


def params(num_layers: int = 4) -> dict:
    return toy.params(tied=False, num_layers=num_layers)


def refusal(function, *arguments, **options) -> list[str]:
    """The lines of the error; nothing is compiled on the way to it."""
    return compilations.refusal(function, *arguments, **options).split("\n")


def changed(tree: dict, *path, value) -> dict:
    """A copy of nested dicts with one value replaced, added, or removed if it is None."""
    key, *rest = path
    if rest:
        value = changed(tree[key], *rest, value=value)
    rest_of_tree = {k: v for k, v in tree.items() if k != key}
    return rest_of_tree if value is None else rest_of_tree | {key: value}


# Parameters.


def test_another_number_of_layers_is_refused():
    assert set(refusal(pipe().place, params(3))) == {
        "params['layers'] holds 3 layers; expected 4.",
        "params['layers']['up'] is float32[3, 8, 16]; expected float32[4, 8, 16].",
        "params['layers']['down'] is float32[3, 16, 8]; expected float32[4, 16, 8].",
        "params['layers']['bias'] is float32[3, 16]; expected float32[4, 16].",
    }


def test_every_difference_is_in_one_error():
    wrong = changed(params(), "embed", "table", value=np.ones((3, WIDTH)))
    wrong = changed(wrong, "layers", "bias", value=jnp.ones((4, 2 * WIDTH), jnp.bfloat16))
    wrong = changed(wrong, "layers", "gate", value=2.0)
    wrong = changed(wrong, "head", "scale", value=None)
    wrong = changed(wrong, "embed", "positions", value="sinusoidal")
    assert set(refusal(pipe().place, wrong)) == {
        "params['embed']['table'] is float32[3, 8]; expected float32[11, 8].",
        "params['embed']['positions'] is a str, not an array; expected float32[5, 8].",
        "params['layers']['bias'] is bfloat16[4, 16]; expected float32[4, 16].",
        "params['layers']['gate'] is float32[]; nothing is expected there.",
        "params['head']['scale'] is missing; expected float32[8].",
    }


@pytest.mark.parametrize("wrong", [None, (), [1.0], {"layers": None}])
def test_what_is_no_tree_of_parameters_is_refused(wrong):
    missing = "params['head']['scale'] is missing; expected float32[8]."
    assert missing in refusal(pipe().place, wrong)


def test_a_tree_that_is_placed_already_is_refused():
    for built, canonical in (pipe(), params()), (uneven_pipe(), uneven.params()):
        placed = built.place(canonical)
        assert refusal(built.place, placed) == ["params is placed already."]


def test_another_dtype_is_refused_and_the_cast_named():
    *lines, remedy = refusal(pipe().place, jax.tree.map(lambda w: w.astype("bfloat16"), params()))
    assert len(lines) == len(jax.tree.leaves(params()))
    assert "params['head']['table'] is bfloat16[11, 8]; expected float32[11, 8]." in lines
    assert remedy.startswith("Cast params to these dtypes.")
    doubled = jax.tree.map(lambda w: np.asarray(w, np.float64), params())
    pipe().place(doubled)  # without x64 JAX has no other float64 than float32


def test_layers_that_differ_are_compared_one_by_one():
    right, place = uneven.params(), uneven_pipe().place
    narrow = uneven.FUNCTIONS.index(uneven.narrow)
    reshaped = list(right["layers"])
    reshaped[narrow] = changed(reshaped[narrow], "kernel", value=jnp.ones((4, 8)))
    tuples, stacked = "a tuple of one tree per layer", "one tree whose arrays stack all layers"
    for layers, line in (
        (
            tuple(reshaped),
            f"params['layers'][{narrow}]['kernel'] is float32[4, 8]; expected float32[8, 4].",
        ),
        (right["layers"][:-1], "params['layers'] holds 7 layers; expected 8."),
        (
            dict(enumerate(right["layers"])),
            f"params['layers'] is {stacked}; expected {tuples}.",
        ),
    ):
        assert refusal(place, right | {"layers": layers})[0] == line
    layers = params()["layers"]
    as_tuple = tuple(jax.tree.map(lambda w, n=n: w[n], layers) for n in range(4))
    assert refusal(pipe().place, params() | {"layers": as_tuple})[0] == (
        f"params['layers'] is {tuples}; expected {stacked}."
    )


def test_what_steps_take_must_be_placed():
    hint = "placed is in canonical order, not placed; call `pipe.place` first."
    for built, canonical in (pipe(), params()), (uneven_pipe(), uneven.params()):
        assert refusal(built.unplace, canonical) == [hint]
    assert refusal(jax.jit(pipe().value_and_grad), params(), toy.batch(4)) == [hint]
    assert refusal(pipe().init, optax.sgd(0.1), params()) == [hint.replace("placed", "params", 1)]


def test_placed_trees_are_compared_leaf_by_leaf():
    placed = pipe().place(params())
    wrong = changed(placed, "layers", "bias", value=placed["layers"]["bias"][:, :1])
    wrong = changed(wrong, "head", "scale", value=placed["head"]["scale"].astype("bfloat16"))
    assert refusal(pipe().value_and_grad, wrong, toy.batch(4))[:2] == [
        "placed['head']['scale'] is bfloat16[8]; expected float32[8].",
        "placed['layers']['bias'] is float32[2, 1, 16]; expected float32[2, 2, 16].",
    ]


def test_an_optimizer_state_is_converted_in_its_own_dtypes():
    adam = optax.adam(0.1, mu_dtype="bfloat16")
    for built, canonical in (pipe(), params()), (uneven_pipe(), uneven.params()):
        state = adam.init(canonical)
        leaves, tree = jax.tree.flatten(state)
        leaves = [jnp.full_like(w, number) for number, w in enumerate(leaves)]
        state = jax.tree.unflatten(tree, leaves)
        placed = built.optimizer_placing(adam).place(state)
        assert {w.dtype for w in jax.tree.leaves(placed[0].mu)} == {jnp.dtype(jnp.bfloat16)}
        back = built.optimizer_placing(adam).unplace(placed)
        chex.assert_trees_all_equal(back, state)
        twice = refusal(built.optimizer_placing(adam).place, placed)
        assert twice == ["state is placed already."]
    lines = refusal(pipe().optimizer_placing(adam).place, adam.init(params(5)))
    assert lines[0] == "state[0].mu['layers']['bias'] is bfloat16[5, 16]; expected bfloat16[4, 16]."
    shapes = jax.eval_shape(pipe().place, jax.eval_shape(params))
    assert jax.tree.map(jnp.shape, pipe().place(params())) == jax.tree.map(
        lambda w: w.shape, shapes
    )


# States.


def test_states_are_compared_like_parameters():
    built, states, other = uneven_pipe(stateful=True), uneven.states(), uneven_pipe()
    placed, batch = built.layout.placed_shapes(), uneven.batch(4)
    (line,) = refusal(built.place_states, states[:-1])
    assert line == "states[7]['mean'] is missing; expected float32[4]."
    hint = "is in canonical order, not placed; call `pipe.place_states` first."
    assert refusal(built.unplace_states, states) == [f"placed {hint}"]
    assert refusal(built.loss, placed, batch, states=states) == [f"states {hint}"]
    assert "states=None" in refusal(built.value_and_grad, placed, batch)[0]
    assert "layers keep no state" in refusal(other.loss, placed, batch, states=states)[0]
    assert "layers keep no state" in refusal(other.place_states, states)[0]


# Training steps.


def test_training_steps_compare_parameters_and_optimizer_state():
    optimizer = optax.adam(0.1)
    placed, batch = pipe().place(params()), toy.batch(4)
    state = pipe().init(optimizer, placed)
    steps = [pipe().train_step(optimizer, update=update) for update in ("step", "chunk")]
    init = jaxpipe.AsyncPipeline(pipe(), optimizer).init
    hint = "params is in canonical order, not placed; call `pipe.place` first."
    for step, name in (*((step, "state") for step in steps), (init, "optimizer_state")):
        assert refusal(step, params(), state, batch) == [hint]
        lines = refusal(step, placed, optimizer.init(params()), batch)
        bias = f"{name}[0].mu['layers']['bias']"
        assert f"{bias} is float32[4, 16]; expected float32[2, 2, 16]." in lines
    wrong = refusal(pipe().update, optimizer, params(), pipe().init(optax.sgd(0.1), placed), placed)
    assert "state[0].count is missing; expected int32[]." in wrong
    assert "grads is in canonical order, not placed; call `pipe.place` first." in wrong


# Batches.


@pytest.mark.parametrize(
    ("batch", "lines"),
    [
        (
            {"x": np.ones((8, 2)), "y": np.ones((4, 2)), "z": np.ones(8)},
            ["The arrays of a batch must have equally many rows, but batch['x'] has 8, batch['y'] "
             "has 4, batch['z'] has 8."],
        ),
        (
            {"x": np.ones((8, 2)), "n": 3, "name": "a"},
            ["batch['n'] is int32[]; expected an array whose first dimension is rows. Repeat it "
             "for every row, as `jnp.full(rows, value)` does.",
             "batch['name'] is a str, not an array; expected an array whose first dimension is "
             "rows."],
        ),
        ({}, ["batch holds no array; expected arrays whose rows divide into 2 microbatches x 1 "
              "data shards."]),
        ({"x": np.ones((0, 2))}, ["batch['x'] has 0 rows, which do not divide into 2 microbatches "
                                  "x 1 data shards.", "Nearest valid: 2."]),
        ({"x": np.ones((3, 2)), "y": np.ones(3)}, ["batch['x'] has 3 rows, which do not divide "
                                                  "into 2 microbatches x 1 data shards.",
                                                  "Nearest valid: 2, 4."]),
    ],
)  # fmt: skip
def test_batches_that_do_not_divide_are_refused(batch, lines):
    placed = pipe().place(params())
    assert refusal(pipe().value_and_grad, placed, batch) == lines
    assert refusal(traced.buffers, pipe(), batch) == lines


# The loss.


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda x: x.mean().astype(jnp.bfloat16), "bfloat16[]"),
        (lambda x: x.mean(axis=(1, 2)), "float32[2]"),
        (lambda x: {"loss": x.mean()}, "{'loss': float32[]}"),
        (lambda x: x.size, "int32[]"),
        (lambda x: None, "None"),
    ],
)
def test_a_loss_that_is_not_a_float32_scalar_is_refused(loss, found):
    model = dataclasses.replace(
        toy.model(tied=False, axis=None), head_loss=lambda outer, x, batch, rng: loss(x)
    )
    built, batch, sgd = toy_pipeline(model), toy.batch(4), optax.sgd(0.1)
    placed = built.layout.placed_shapes()
    for refuse in (
        functools.partial(jax.eval_shape, built.value_and_grad, placed, batch),
        functools.partial(jax.eval_shape, built.loss, placed, batch),
        functools.partial(traced.buffers, built, batch),
        functools.partial(jaxpipe.AsyncPipeline(built, sgd).init, placed, sgd.init(placed), batch),
    ):
        (line,) = refusal(refuse)
        assert line.startswith(f"Model.head_loss returns {found}; it must return a float32 scalar")
        assert ".astype(jnp.float32)" in line


@pytest.mark.parametrize("loss", [2.0, np.float32(2)])
def test_a_loss_that_is_a_number_is_a_loss(loss):
    model = dataclasses.replace(toy.model(tied=False, axis=None), head_loss=lambda *_: loss)
    built = toy_pipeline(model)
    value, _ = jax.eval_shape(built.value_and_grad, built.layout.placed_shapes(), toy.batch(4))
    assert value == jax.ShapeDtypeStruct((), jnp.float32)


# What a pipeline is built from.


def test_what_a_pipeline_is_built_from_is_checked():
    one = {"embed": {}, "layers": jnp.ones((4, 3, 3)), "head": {}}
    lengths, scalar = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, {"w": jnp.ones((4, 3)), "b": 1.0}
    for wrong, text in (
        ({"embed": {}, "layers": one["layers"]}, "found the keys ['embed', 'layers']."),
        (one | {"decoder": {}}, "found the keys ['embed', 'layers', 'head', 'decoder']."),
        ([one], "found a list."),
        (one | {"head": "linear"}, "params['head'] is a str, not an array."),
        (one | {"layers": {}}, "found no array."),
        (
            one | {"layers": lengths},
            "found params['layers']['b'] is float32[3], params['layers']['w'] is f",
        ),
        (
            one | {"layers": scalar},
            "found params['layers']['b'] is float32[], params['layers']['w'] is f",
        ),
    ):
        (line,) = refusal(toy_pipeline, params=wrong)
        assert text in line
    assert refusal(toy_pipeline, layer_counts=(2, 3)) == [
        "layer_counts=(2, 3) must be 2 numbers, one per virtual stage of schedule '1f1b', that add "
        "up to the 4 layers of params['layers']."
    ]
    assert refusal(toy_pipeline, params=toy.params(tied=False, num_layers=1)) == [
        "params['layers'] holds 1 layers, and schedule '1f1b' has 2 virtual stages: each needs a "
        "layer. Use fewer stages or chunks, or say with layer_counts which stay empty."
    ]
    model = dataclasses.replace(
        toy.model(tied=False, axis=None), layer=lambda w, x, batch, rng, state: x, stateful=True
    )
    assert refusal(toy_pipeline, model, states=({},) * 3) == [
        "states holds 3 layers and params['layers'] 4."
    ]


def test_states_that_are_no_tree_of_layers_are_refused_for_any_model():
    lines = refusal(toy_pipeline, states=3)
    assert lines[0].startswith("Model.stateful=False, but Pipeline was given states")
    assert lines[1].startswith("states must stack every layer on the leading dimension")


@pytest.mark.parametrize(("stage", "data"), [(0, 1), (2, 0), (-1, -2)])
def test_a_mesh_without_devices_is_refused(stage, data):
    lines = refusal(jaxpipe.make_mesh, stage=stage, data=data)
    wrong = [f"{k}={n} must be" for k, n in (("data", data), ("stage", stage)) if n < 1]
    assert [line.partition(" at ")[0] for line in lines[::2]] == wrong
