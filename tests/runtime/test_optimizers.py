"""Every optax transformation does on placed parameters what it does on one tree per layer."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import refusal

import jaxpipe
from benchmarks.hlo import HloProgram
from jaxpipe import testing
from jaxpipe.runtime.types import Params

pytestmark = pytest.mark.pipeline

DEPTH, WIDTH, ODD = {"stacked": 3, "tuple": 4}, 4, 3
STEPS = 5


def is_matrix(params: Params) -> Params:
    return jax.tree.map(lambda w: w.ndim > 1, params)


def by_path(params: Params) -> Params:
    def label(path, _) -> str:
        if path[-1].key == "bias":
            return "frozen"
        return "low" if path[0].key == "layers" and path[1].idx < 2 else "high"

    return jax.tree.map_with_path(label, params)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
OPTIMIZERS = {
    "adamw, mask": optax.adamw(1e-2, weight_decay=0.5, mask=is_matrix),
    "lars": optax.lars(1e-1, weight_decay=0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=ODD),
    "muon on a plateau": optax.chain(
        optax.contrib.muon(1e-2),
        optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1),
    ),
    "by path": optax.multi_transform(
        {
            "frozen": optax.set_to_zero(),
            "low": optax.sgd(0.1, 0.9),
            "high": optax.inject_hyperparams(optax.adamw)(1e-2, mu_dtype="bfloat16"),
        },
        by_path,
    ),
    "MultiSteps": optax.MultiSteps(CLIPPED, 2),
    "EMA": optax.chain(optax.scale_by_adam(), optax.ema(0.9), optax.scale(-1e-2)),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "prodigy": optax.contrib.prodigy(1.0, estim_lr0=1e-2),
    "novograd": optax.novograd(1e-2),
    "many in a chain": optax.chain(
        optax.adaptive_grad_clip(0.01),
        optax.clip_by_block_rms(0.01),
        optax.centralize(),
        optax.add_noise(0.01, 0.5, jax.random.key(1)),
        optax.scale_by_param_block_rms(),
        optax.scale_by_trust_ratio(),  # as LAMB
        optax.add_decayed_weights(0.5, is_matrix),
        optax.sgd(0.1, momentum=0.9),
    ),
}
NEEDED = {"muon on a plateau": {"value": 1.0}}
"""Further arguments of an update: a plateau of this loss reduces the rate."""


def params(form: str) -> Params:
    """Layers that are alike, stacked, or a tuple with one that is not like the others.

    Two stages have two and one of those that are alike.
    """
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return np.asarray(rng.normal(size=shape), np.float32)

    layers = [
        {"bias": array(WIDTH), "kernel": array(WIDTH, WIDTH), "scale": array()}
        for _ in range(DEPTH[form])
    ]
    if form == "tuple":
        layers[2] = {"down": array(WIDTH, ODD), "bias": array(ODD), "up": array(ODD, WIDTH)}
    return {
        "embed": {"table": array(ODD, WIDTH)},
        "layers": tuple(layers)
        if form == "tuple"
        else jax.tree.map(lambda *w: np.stack(w), *layers),
        "head": {"out": array(WIDTH, ODD), "bias": array(ODD)},
    }


def layer_by_layer(tree: Params) -> Params:
    if isinstance(tree["layers"], tuple):
        return tree
    layers = jax.device_get(tree["layers"])
    one = [jax.tree.map(lambda w, n=n: w[n], layers) for n in range(DEPTH["stacked"])]
    return tree | {"layers": tuple(one)}


@functools.cache
def pipeline(place: str) -> jaxpipe.Pipeline:
    """Of a model that is never run: only its parameters are trained."""
    form, stages, data, zero, weights = PLACES[place]

    def layer(w, x, batch, rng):
        return x

    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=(layer,) * DEPTH[form] if form == "tuple" else layer,
        head_loss=lambda outer, x, batch, rng: jnp.mean(x),
        # The vocabulary of 3 does not divide by the stages: the last part is padded.
        stage_split={"embed": {"table": 0}, "head": {"out": None, "bias": 0}},
    )
    mesh = jaxpipe.make_mesh(stage=stages, data=data)
    given = {"schedule": "1f1b", "mesh": mesh, "zero": zero, "weights": weights}
    return jaxpipe.Pipeline(model, jax.eval_shape(lambda: params(form)), **given)


@functools.cache
def expected(form: str, name: str) -> Params:
    """The parameters after some steps without a pipeline."""
    start, optimizer = layer_by_layer(params(form)), OPTIMIZERS[name]

    @jax.jit
    def train(params):
        def step(carry, number):
            params, state = carry
            given = gradients(params, number), state, params
            updates, state = optimizer.update(*given, **NEEDED.get(name, {}))
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(STEPS))[0][0]

    return train(start)


def gradients(params: Params, number: jax.Array) -> Params:
    """Some that differ from step to step and keep no sign."""
    return jax.tree.map(lambda w: jnp.sin(7 * w + number), params)


PLACES = {
    "stacked": ("stacked", 1, 2, 3, "stacked"),
    "uneven": ("stacked", 2, 2, 1, "stacked"),
    "unrolled": ("stacked", 2, 2, 2, "unrolled"),
    "tuple": ("tuple", 2, 4, 3, "stacked"),
    "tuple, unrolled": ("tuple", 4, 1, 0, "unrolled"),
}
OFTEN = {
    "tuple": {"adafactor", "MultiSteps"},
    "tuple, unrolled": {"muon on a plateau"},
    "uneven": {"adamw, mask", "many in a chain"},
}
CASES = [
    pytest.param(name, place, marks=[] if name in OFTEN.get(place, ()) else pytest.mark.slow)
    for name, place in itertools.product(OPTIMIZERS, PLACES)
]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_an_optimizer_does_what_it_does_without_a_pipeline(name, place):
    form, pipe, optimizer = PLACES[place][0], pipeline(place), OPTIMIZERS[name]
    placed = pipe.place(params(form))
    state = pipe.init(optimizer, placed)

    @jax.jit
    def step(placed, state, number):
        given = gradients(placed, number), state, placed
        return pipe.update(optimizer, *given, **NEEDED.get(name, {}))

    with testing.compilations() as compiled:
        for number in range(STEPS):
            placed, state = step(placed, state, number)
    assert compiled == ["jit(step)"]
    got = layer_by_layer(jax.device_get(pipe.unplace(placed)))
    chex.assert_trees_all_close(got, expected(form, name), rtol=1e-5, atol=1e-5)
    start = layer_by_layer(params(form))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), got, start)
    assert max(jax.tree.leaves(moved)) > 1e-3
    canonical = pipe.optimizer_placing(optimizer).unplace(state)
    back = pipe.optimizer_placing(optimizer).place(canonical)
    chex.assert_trees_all_equal(pipe.optimizer_placing(optimizer).unplace(back), canonical)


def test_layers_and_the_rest_communicate_one_after_the_other():
    """XLA's CPU client runs at the same time what does not depend on each other."""
    pipe = pipeline("uneven")

    @jax.jit
    def step(placed, state):
        return pipe.update(CLIPPED, gradients(placed, 0), state, placed)

    lowered = step.lower(pipe.placed_params, pipe.optimizer_placing(CLIPPED).placed)
    program = HloProgram(lowered.compile().as_text())
    entry = program.computations[program.entry]
    names = {"all-gather", "all-reduce", "reduce-scatter"}
    loops = [
        row
        for row in entry
        if row.opcode == "while"
        and any(one.opcode in names for one in program.reached(row.calls["body"], into_loops=True))
    ]
    others = [row for row in entry if row.opcode in names]
    assert loops
    assert others
    for loop, other in itertools.product(loops, others):
        assert loop in program.before(program.entry, other) or other in program.before(
            program.entry, loop
        ), (loop.text, other.text)


def test_what_cannot_run_where_the_layers_lie_is_refused_by_what_it_does():
    pipe = pipeline("uneven")

    def refused(optimizer: optax.GradientTransformation) -> str:
        def update(grads):
            return pipe.update(optimizer, grads, pipe.init(optimizer, grads), grads)

        return refusal(jax.eval_shape, update, pipe.placed_params)

    def mean_of_layers(updates, params):
        layers = updates["layers"]
        mean = sum(layer["kernel"] for layer in layers) / len(layers)
        return updates | {"layers": tuple(layer | {"kernel": mean} for layer in layers)}

    def across(updates, params):
        return jax.tree.map(lambda g: jax.lax.pmean(g, "data"), updates)

    assert (
        "This optimizer's add reads grads['layers'][0]['kernel'] and grads['layers'][1]['kernel'] "
        "at once. A stage has its own layers only" in refused(optax.stateless(mean_of_layers))
    )
    text = refused(optax.stateless(across))
    assert "communicates between devices" in text
    assert "leave collectives to the pipeline" in text
    mask = jax.tree.map(lambda w: w.ndim > 2, params("stacked"))
    text = refused(optax.adamw(0.1, mask=mask))
    assert "whose 'layers' are a tuple of one tree per layer" in text


def test_gradients_and_states_of_another_dtype_are_refused():
    pipe, adam = pipeline("uneven"), optax.adam(0.1)
    placed, state = pipe.placed_params, pipe.optimizer_placing(adam).placed

    def half(tree):
        return jax.tree.map(lambda w: w.update(dtype=jnp.bfloat16), tree)

    found = refusal(pipe.update, adam, half(placed), state, placed)
    assert re.search(r"(?s)grads\['head'\].*expected float32.*Cast grads to", found)
    found = refusal(pipe.update, adam, placed, half(state), placed)
    assert re.search(r"state\[0\]\.mu.*bfloat16.*expected float32", found)
