"""Every optax transformation does on placed parameters what it does on one tree per layer."""

from __future__ import annotations

import functools
import itertools

import chex
import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from benchmarks.hlo import HloProgram
from jaxpipe import testing
from jaxpipe.runtime.types import Params

pytestmark = pytest.mark.pipeline

DEPTH, WIDTH, ODD = {"stacked": 3, "tuple": 4}, 4, 3
STEPS = 5


def is_matrix(params: Params) -> Params:
    return jax.tree.map(lambda w: w.ndim > 1, params)


def by_name(params: Params) -> Params:
    def label(path, _) -> str:
        return "frozen" if path[-1].key == "bias" else "trained"

    return jax.tree.map_with_path(label, params)


def by_depth(params: Params) -> Params:
    def label(path, _) -> str:
        return "low" if path[0].key == "layers" and path[1].idx < 2 else "high"

    return jax.tree.map_with_path(label, params)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
OPTIMIZERS = {
    "adamw, mask": optax.adamw(1e-2, weight_decay=0.5, mask=is_matrix),
    "weight decay by ndim": optax.chain(
        optax.add_decayed_weights(0.5, is_matrix), optax.sgd(0.1, momentum=0.9)
    ),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-1, weight_decay=0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=ODD),
    "muon": optax.contrib.muon(1e-2),
    "by name": optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, by_name
    ),
    "by depth": optax.multi_transform(
        {"low": optax.sgd(1e-1, momentum=0.9), "high": optax.adam(1e-2)}, by_depth
    ),
    "MultiSteps": optax.MultiSteps(CLIPPED, 2),
    "global clipping": CLIPPED,
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "block clipping": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
    "block scaling": optax.chain(optax.scale_by_param_block_rms(), optax.sgd(0.1)),
    "EMA": optax.chain(optax.scale_by_adam(), optax.ema(0.9), optax.scale(-1e-2)),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "injected": optax.inject_hyperparams(optax.adamw)(1e-2, mu_dtype="bfloat16"),
    "noise": optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(1)), optax.sgd(0.1)),
    "prodigy": optax.contrib.prodigy(1.0, estim_lr0=1e-2),
    "novograd": optax.novograd(1e-2),
    "centralized": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "many in a chain": optax.chain(
        optax.adaptive_grad_clip(0.01),
        optax.clip_by_block_rms(0.01),
        optax.centralize(),
        optax.add_noise(0.01, 0.5, jax.random.key(1)),
        optax.scale_by_param_block_rms(),
        optax.add_decayed_weights(0.5, is_matrix),
        optax.sgd(0.1, momentum=0.9),
    ),
    "plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
    ),
}
NEEDED = {"plateau": {"value": 1.0}}
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
def pipeline(form: str, stages: int, data: int, zero: int, weights: str) -> jaxpipe.Pipeline:
    """Of a model that is never run: only its parameters are trained."""

    def layer(w, x, batch, rng):
        return x

    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=(layer,) * DEPTH[form] if form == "tuple" else layer,
        head_loss=lambda outer, x, batch, rng: jnp.mean(x),
        # The vocabulary of 3 does not divide by the stages: the last part is padded.
        stage_split={"embed": {"table": 0}, "head": {"out": None, "bias": 0}},
    )
    return jaxpipe.Pipeline(
        model,
        jax.eval_shape(lambda: params(form)),
        schedule=jaxpipe.schedules.build("1f1b", stages=stages, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=stages, data=data),
        zero=zero,
        weights=weights,
    )


@functools.cache
def expected(form: str, name: str) -> Params:
    """Parameters, gradients and the parameters after some steps without a pipeline."""
    start, optimizer = layer_by_layer(params(form)), OPTIMIZERS[name]

    @jax.jit
    def step(params, state, number):
        given = gradients(params, number), state, params
        updates, state = optimizer.update(*given, **NEEDED.get(name, {}))
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(start)
    for number in range(STEPS):
        start, state = step(start, state, number)
    return start


def gradients(params: Params, number: jax.Array) -> Params:
    """Some that differ from step to step and keep no sign."""
    return jax.tree.map(lambda w: jnp.sin(7 * w + number), params)


PLACES = {
    "stacked": ("stacked", 1, 2, 3, "stacked"),
    "uneven": ("stacked", 2, 2, 1, "stacked"),
    "unrolled": ("stacked", 2, 2, 2, "unrolled"),
    "tuple": ("tuple", 2, 2, 3, "stacked"),
    "tuple, whole": ("tuple", 4, 1, 0, "stacked"),
}
UNEVEN = {"lamb", "adafactor", "muon", "global clipping", "many in a chain"}
WITHIN = {  # "many in a chain", MultiSteps or another mask
    *("weight decay by ndim", "adaptive clipping", "block clipping", "block scaling", "noise"),
    *("centralized", "global clipping"),
}
OFTEN = {"tuple": OPTIMIZERS.keys() - WITHIN, "uneven": UNEVEN}
CASES = [
    pytest.param(name, place, marks=[] if name in OFTEN.get(place, ()) else pytest.mark.slow)
    for name, place in itertools.product(OPTIMIZERS, PLACES)
]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_an_optimizer_does_what_it_does_without_a_pipeline(name, place):
    form, *_ = PLACES[place]
    pipe, optimizer = pipeline(*PLACES[place]), OPTIMIZERS[name]
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
    pipe, optimizer = pipeline(*PLACES["uneven"]), OPTIMIZERS["global clipping"]
    placed = pipe.place(params("stacked"))

    @jax.jit
    def step(placed, state):
        return pipe.update(optimizer, gradients(placed, 0), state, placed)

    lowered = step.lower(placed, pipe.init(optimizer, placed))
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


def refused(optimizer: optax.GradientTransformation) -> str:
    pipe = pipeline(*PLACES["uneven"])
    placed = pipe.placed_params

    def update(grads):
        state = jax.eval_shape(functools.partial(pipe.init, optimizer), grads)
        return pipe.update(optimizer, grads, state, grads)

    return compilations.refusal(jax.eval_shape, update, placed)


def stateless(update) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: update(updates))


def test_what_cannot_run_where_the_layers_lie_is_refused_by_what_it_does():
    def mean_of_layers(updates):
        layers = updates["layers"]
        mean = sum(layer["kernel"] for layer in layers) / len(layers)
        return updates | {"layers": tuple(layer | {"kernel": mean} for layer in layers)}

    assert (
        "This optimizer's add reads grads['layers'][0]['kernel'] and grads['layers'][1]['kernel'] "
        "at once. A stage has its own layers only" in refused(stateless(mean_of_layers))
    )

    def across(updates):
        return jax.tree.map(lambda g: jax.lax.pmean(g, "data"), updates)

    text = refused(stateless(across))
    assert "communicates between devices" in text
    assert "leave collectives to the pipeline" in text
    mask = jax.tree.map(lambda w: w.ndim > 2, params("stacked"))
    assert "whose 'layers' are a tuple of one tree per layer" in refused(
        optax.adamw(0.1, mask=mask)
    )


def test_gradients_and_states_of_another_dtype_are_refused():
    pipe, adam = pipeline(*PLACES["uneven"]), optax.adam(0.1)
    placed = pipe.place(params("stacked"))
    state = pipe.init(adam, placed)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), placed)
    with pytest.raises(ValueError, match=r"(?s)grads\['head'\].*expected float32.*Cast grads to"):
        pipe.update(adam, half, state, placed)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state)
    with pytest.raises(ValueError, match=r"state\[0\]\.mu.*bfloat16.*expected float32"):
        pipe.update(adam, placed, half, placed)
