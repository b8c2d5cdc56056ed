"""Indices are int32: under ``jax_enable_x64``, in which parameters in float64 train in it, and in
arrays whose ends int32 does not reach."""

import itertools

import asynchronous_toy
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from asynchronous_reference import Settings
from asynchronous_reference import train as reference
from compilations import refusal
from covering import some

import jaxpipe
from jaxpipe.runtime import assembly, indices
from jaxpipe.runtime.memory import buffers
from jaxpipe.testing import assert_matches_unpipelined

INDEXED = {"dynamic_slice", "dynamic_update_slice", "gather", "scatter", "scatter-add"}
CASES = [
    ("tied", "zb-v", {"stage": 2, "data": 2}, {"zero": 3}),
    ("unrolled", "breadth-first", {"stage": 2, "data": 2}, {"zero": 3, "weight_slots": 2}),
    ("uneven", "interleaved", {"stage": 2, "data": 2}, {"zero": 2, "remat": "full"}),
    ("stateful", "1f1b-fused", {"stage": 2}, {}),
]
MIXTURE = ("mixture", "gpipe", {"stage": 2, "data": 2}, {"zero": 3})


def wide(tree):
    """The arrays of floating point in float64."""

    def widen(w):
        return np.float64(w) if jnp.issubdtype(w.dtype, jnp.floating) else w

    return jax.tree.map(widen, tree)


def index_dtypes(jaxpr):
    """Yields the dtypes of all integers that say where arrays are read or written."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in INDEXED:
            dtypes = {v.aval.dtype for v in eqn.invars[1:]}
            yield from (str(d) for d in dtypes if jnp.issubdtype(d, jnp.signedinteger))
        for parameter in jax.tree.leaves(list(eqn.params.values()), is_leaf=has_equations):
            if has_equations(parameter):
                yield from index_dtypes(getattr(parameter, "jaxpr", parameter))


def has_equations(parameter):
    return hasattr(getattr(parameter, "jaxpr", parameter), "eqns")


@pytest.mark.parametrize(
    ("case", "tiles"),
    some(itertools.product(CASES, (False, True)), *zip(CASES, (True, False) * 2, strict=True)),
)
def test_every_index_is_int32(case, tiles, monkeypatch):
    """In steps, of an optimizer with a condition, and in programs that place and unplace."""
    monkeypatch.setattr(assembly, "stores_tiles", lambda mesh: tiles)
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: tiles)
    name, schedule, sizes, options = case
    pipe = toys.pipeline(name, schedule, sizes, microbatches=4, **options)
    params, batch = toys.named(name).params, toys.named(name).batch(16)
    optimizer = optax.MultiSteps(optax.adam(0.1), 2)
    with jax.enable_x64(True):
        step = jax.make_jaxpr(pipe.train_step(optimizer))
        state = pipe.optimizer_placing(optimizer).placed
        programs = [
            step(pipe.placed_params, state, batch, None, pipe.placed_states),
            jax.make_jaxpr(pipe.place)(params),
            jax.make_jaxpr(pipe.unplace)(pipe.placed_params),
        ]
    assert {dtype for program in programs for dtype in index_dtypes(program.jaxpr)} == {"int32"}


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("name", "schedule", "sizes", "options"), some([CASES[2], MIXTURE], MIXTURE)
)
def test_float64_parameters_train_in_float64(name, schedule, sizes, options):
    """Weights of losses and what layers add, too: a third in float32 would be off by 1e-8."""
    toy = toys.named(name)
    with jax.enable_x64(True):
        (pipe,) = assert_matches_unpipelined(
            toy.model,
            wide(toy.params),
            wide(toy.batch(12)),
            schedules=[schedule],
            meshes=[toys.mesh(name, sizes)],
            reference=toy.reference,
            microbatches=3 if name == "mixture" else 2,
            tolerance=1e-12,
            **toy.options | options,
        )
    assert {w.dtype for w in jax.tree.leaves(pipe.placed_params)} == {np.dtype("float64")}


@pytest.mark.pipeline
def test_asynchronous_pipelines_train_in_float64_with_weights_of_any_length(monkeypatch):
    settings = Settings(2, 2, "pipemare", "momentum", 6, 0.135, recompute_segment=2)
    start = asynchronous_toy.params(layers=3, differ=True)
    batches = asynchronous_toy.minibatches(4, 4)
    expected, end, _ = reference(settings, start, batches)
    counting_rows(monkeypatch)
    with jax.enable_x64(True):
        exact = asynchronous_toy.pipeline(settings, wide(start))
        found, last, _ = asynchronous_toy.train(settings, exact, wide(start), wide(batches))
        assert {w.dtype for w in jax.tree.leaves(last)} == {np.dtype("float64")}
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    chex.assert_trees_all_close(last, end, rtol=1e-7, atol=1e-7)


def counting_rows(monkeypatch):
    """Has indices count rows of 8 elements, as if int32 ended at 30."""
    monkeypatch.setattr(indices, "LONGEST", 30)
    monkeypatch.setattr(indices, "UNIT", 8)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    [
        ("uneven", "interleaved", {"zero": 3}),
        pytest.param("adapted tuple", "zb-v", {"zero": 1, "keyed": True}, marks=pytest.mark.slow),
    ],
)
def test_results_are_the_same_where_indices_count_rows(name, schedule, options, monkeypatch):
    counting_rows(monkeypatch)
    pipe = toys.check(name, schedule, {"stage": 2, "data": 2}, **options)
    kept = buffers(pipe, toys.named(name).batch(16))
    assert {leaf.shape[2:] for leaf in kept["until_b"]} == {(8,)}


def test_buffers_and_weights_that_int32_does_not_reach_are_traced():
    """Each microbatch's activation has 2**31 elements, and each stage's weights have more."""
    size = jax.ShapeDtypeStruct((2**28,), "float32")
    layers = (
        lambda w, x, batch, rng: jnp.tanh(x * w["one"]),
        lambda w, x, batch, rng: x + jnp.sin(x * w["two"] * w["three"].sum(0)),
    )
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=layers + layers[::-1],  # else each kind has buffers of its own
        head_loss=lambda outer, x, batch, rng: x.mean(),
    )
    wide = jax.ShapeDtypeStruct((2**3, 2**28), "float32")
    weights = {"one": size}, {"two": size, "three": wide}
    params = {"embed": {}, "layers": weights + weights[::-1], "head": {}}
    pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=2))
    sgd, batch = optax.sgd(0.1), {"x": jax.ShapeDtypeStruct((32, 2**28), "float32")}
    state, step = pipe.optimizer_placing(sgd).placed, pipe.train_step(sgd)
    loss, placed, _ = jax.eval_shape(step, pipe.placed_params, state, batch)
    assert loss.shape == ()
    (packed,) = jax.tree.leaves(placed["layers"])
    assert packed.shape[-1] > indices.LONGEST
    (kept,) = buffers(pipe, batch)["until_b"]
    assert kept.shape[1] * kept.shape[2] > indices.LONGEST
    assert max(kept.shape) < 2**31


def test_complex_activations_are_refused_with_a_tree_of_two_parts_as_the_remedy():
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: jax.lax.complex(batch["x"], batch["x"]),
        layer=lambda w, x, batch, rng: x * w,
        head_loss=lambda outer, x, batch, rng: jnp.mean(jnp.abs(x)),
    )
    params = {"embed": {}, "layers": jnp.ones((2, 3)), "head": {}}
    pipe = jaxpipe.Pipeline(model, params, schedule="gpipe", mesh=jaxpipe.make_mesh(stage=2))
    message = refusal(pipe.value_and_grad, pipe.placed_params, {"x": np.ones((4, 3), np.float32)})
    assert message == (
        "The embedding returns complex64[1, 3]; only floating-point arrays travel between layers. "
        "Let a complex array z travel as a tree of its parts, (z.real, z.imag), which a layer "
        "joins again with `jax.lax.complex`."
    )
