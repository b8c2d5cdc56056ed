"""Slices of a sequence as passes of a pipeline give the gradients of whole sequences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import refusal
from covering import some

import jaxpipe
from benchmarks.studies.uneven_slices import in_runs
from jaxpipe import testing
from jaxpipe.runtime import tracing

ROWS, LENGTH, WIDTH, LAYERS, TOKENS = 8, 16, 6, 8, 11


def _attention(w, x, batch, rng, carry=None, start=0):
    """Causal attention within documents."""
    q, k, v = jnp.split(x @ w["in"], 3, axis=-1)
    documents = batch["documents"]
    own = documents
    if carry is not None:
        k = jax.lax.dynamic_update_slice(carry["k"], k, (0, start, 0))
        v = jax.lax.dynamic_update_slice(carry["v"], v, (0, start, 0))
        documents = jax.lax.dynamic_update_slice(carry["documents"], 1.0 * own, (0, start))
        carry = {"k": k, "v": v, "documents": documents}
    position = start + jnp.arange(q.shape[1])
    seen = position[:, None] >= jnp.arange(k.shape[1])
    seen = seen & (own[:, :, None] == documents[:, None])
    scores = jnp.where(seen, q @ k.swapaxes(1, 2) * WIDTH**-0.5, -jnp.inf)
    y = x + jnp.tanh(jax.nn.softmax(scores) @ v @ w["out"])
    return y if carry is None else (y, carry)


def _empty_cache(x, microbatch, num_slices):
    rows, length, width = x.shape
    keys = jnp.zeros((rows, num_slices * length, width), x.dtype)
    return {
        "k": jaxpipe.Appended(keys),
        "v": jaxpipe.Appended(keys),
        "documents": jaxpipe.Appended(jnp.zeros(keys.shape[:2])),
    }


def _recurrent(w, x, batch, rng, carry=None, start=0):
    """A decaying sum of projected inputs, that starts at half of the first input."""

    def step(state, token):
        state = jnp.tanh(0.9 * state + token)
        return state, state

    whole = carry is None
    state = _half(x, batch, 1) if whole else carry
    state, y = jax.lax.scan(step, state, jnp.moveaxis(x @ w["in"], 1, 0))
    y = x + jnp.moveaxis(y, 0, 1) @ w["out"]
    return y if whole else (y, state)


def _half(x, microbatch, num_slices):
    return 0.5 * x[:, 0]


def _params(kinds):
    draw = np.random.default_rng(0).normal
    wide = {"attention": 3 * WIDTH, "recurrent": WIDTH}
    layers = [
        {"in": 0.5 * draw(size=(WIDTH, wide[kind])), "out": 0.5 * draw(size=(WIDTH, WIDTH))}
        for kind in kinds
    ]
    alike = len(set(kinds)) == 1
    layers = jax.tree.map(lambda *w: np.stack(w), *layers) if alike else tuple(layers)
    outer = {"embed": 0.5 * draw(size=(TOKENS, WIDTH)), "head": 0.5 * draw(size=(WIDTH, TOKENS))}
    return jax.tree.map(np.float32, outer | {"layers": layers})


def _loss(outer, x, batch, rng):
    scores = jax.nn.log_softmax(batch["gain"][:, None, None] * x @ outer["head"])
    losses = -jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
    weights = batch["weights"][:, None] * (batch["targets"] > 0)
    return jaxpipe.Weighted((weights * losses).sum(), weights.sum())


LAYER = {"attention": _attention, "recurrent": _recurrent}
CARRY = {"attention": _empty_cache, "recurrent": _half}


def _model(kinds):
    alike = len(set(kinds)) == 1
    return jaxpipe.Model(
        embed=lambda outer, batch, rng: outer["embed"][batch["tokens"]] + batch["x"],
        layer=LAYER[kinds[0]] if alike else [LAYER[kind] for kind in kinds],
        head_loss=_loss,
        carry=CARRY[kinds[0]] if alike else [CARRY[kind] for kind in kinds],
        output=lambda outer, x, batch, rng: x @ outer["head"],
    )


@functools.cache
def _batch():
    keys = jax.random.split(jax.random.key(1), 6)
    shape = ROWS, LENGTH
    return {
        "tokens": jax.random.randint(keys[0], shape, 0, TOKENS),
        "targets": jax.random.randint(keys[1], shape, 0, TOKENS),
        "documents": jnp.sort(jax.random.randint(keys[2], shape, 0, 3)),
        "weights": jax.random.uniform(keys[3], (ROWS,), minval=0.5),
        "gain": jax.random.uniform(keys[4], (ROWS,), minval=0.5),
        "x": jax.random.normal(keys[5], (*shape, WIDTH)),
    }


KINDS = {
    "attention": ("attention",) * LAYERS,
    "recurrent": ("recurrent",) * LAYERS,
    "hybrid": ("attention", "recurrent") * (LAYERS // 2),
}


@functools.cache
def _case(kind):
    return _model(KINDS[kind]), _params(KINDS[kind])


CASES = [
    ("1f1b", 4, "attention", "dots", 3),
    ("interleaved-fused", 4, "hybrid", "dots", 2),
    ("interleaved-zb", 4, "recurrent", "none", 1),
    ("zb-h1", 2, "hybrid", "none", 0),
    ("1f1b-fused", 2, "attention", "none", 0),
    ("zb-h1", 8, "attention", "full", 2),
    ("interleaved", 2, "recurrent", "full", 3),
]


@pytest.mark.pipeline
@pytest.mark.parametrize(("name", "slices", "kind", "remat", "zero"), some(CASES, *CASES[1:3]))
def test_slices_match_whole_sequences(name, slices, kind, remat, zero):
    model, params = _case(kind)
    schedule = jaxpipe.schedules.build(name, stages=2, microbatches=2, slices=slices)
    testing.assert_matches_unpipelined(
        model,
        params,
        _batch(),
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=2, data=2)],
        remat=remat,
        zero=zero,
    )


@pytest.mark.slow
@pytest.mark.pipeline
def test_slices_of_unequal_length_are_runs_of_equal_ones():
    """Of 3 and 1 quarters of a sequence."""
    model, params = _case("attention")
    halves = jaxpipe.schedules.build("zb-h1", stages=2, microbatches=2, slices=2)
    testing.assert_matches_unpipelined(
        model,
        params,
        _batch(),
        schedules=[in_runs(halves, (0, 3, 4))],
        meshes=[jaxpipe.make_mesh(stage=2)],
        remat="dots",
    )


def _sliced(kind: str, slices: int = 4, *, data: int = 1, changes=None, **options):
    model, params = _case(kind)
    return jaxpipe.Pipeline(
        dataclasses.replace(model, **changes or {}),
        params,
        schedule=jaxpipe.schedules.build("1f1b", stages=2, microbatches=2, slices=slices),
        mesh=jaxpipe.make_mesh(stage=2, data=data),
        **options,
    )


@pytest.mark.pipeline
def test_outputs_and_gradients_by_inputs_are_those_of_sequences():
    """Whether slices cut the input or not."""
    (model, params), pipe, batch = _case("hybrid"), _sliced("hybrid", data=2), _batch()
    placed, inputs = pipe.place(params), {name: batch[name] for name in ("x", "gain")}
    outputs = pipe.outputs(placed, batch)
    expected = jax.jit(functools.partial(jaxpipe.unpipelined.outputs, model))(params, batch)
    assert outputs.shape == (ROWS, LENGTH, TOKENS)
    assert jnp.allclose(outputs, expected, rtol=1e-5, atol=1e-5 * jnp.abs(expected).max())

    def loss(inputs, of, params):
        return of(params, batch | inputs)

    found = jax.jit(jax.grad(loss), static_argnums=1)(inputs, pipe.loss, placed)
    of_model = functools.partial(jaxpipe.unpipelined.loss, model)
    expected = jax.jit(jax.grad(loss), static_argnums=1)(inputs, of_model, params)
    for name in inputs:
        assert jnp.allclose(found[name], expected[name], atol=1e-6)


def test_no_slice_keeps_a_copy_of_what_slices_append_to():
    for remat in ("none", "dots", "full"):
        pipe = _sliced("attention", remat=remat)
        split = tracing.traced_layers(pipe, _batch())[0].kinds[0].split
        kept = [*split.until_b, *split.until_w, *split.crossing]
        assert (ROWS // 2, LENGTH, WIDTH) not in {leaf.shape for leaf in kept}


def _hands_on_all(w, x, batch, rng, carry=None, start=0):
    return x if carry is None else (x, x)


# fmt: off
MISFITS = [
    (4, {"carry": None}, {}, "cuts sequences into 4 slices, and Model.carry is None"),
    (4, {}, {"targets": np.zeros((ROWS, 18), int)}, "batch['targets']: 18"),
    (3, {}, {}, "16 positions", "into 3 slices.\nNearest valid: 15, 18"),
    (32, {}, {}, "into 32 slices.\nNearest valid: 32."),
    (4, {"layer": _hands_on_all}, {}, "must keep its structure, shapes"),
    (4, {"layer": lambda w, x, batch, rng: x}, {}, "start"),
    (4, {"layer": lambda w, x, batch, rng, carry, start: x}, {}, "runs whole sequences"),
    (4, {"carry": lambda x, batch, k: jnp.zeros(3, int)}, {}, "only floating-point arrays"),
    (4, {"carry": (_half, _half)}, {}, "Model.layer must be a tuple of the same length"),
    (4, {"stateful": True}, {}, "may have a carry or a state, not both"),
]
# fmt: on


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_cannot_be_cut_is_refused(misfit):
    slices, changes, replaced, *texts = misfit
    batch = _batch() | replaced  # drawn by programs, which the refusal compiles none of

    def run():
        pipe = _sliced("recurrent", slices, changes=changes)
        jax.eval_shape(pipe.loss, pipe.placed_params, batch)

    found = refusal(run)
    assert all(text in found for text in texts)
