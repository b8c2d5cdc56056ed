"""Whole arrays of layers, each layer's on one of the devices that share a stage."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe
from benchmarks.hlo import HloProgram

pytestmark = pytest.mark.pipeline

WIDTH, NS_STEPS, STEPS = 8, 2, 2
MATRICES = {"q": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH)}
SPLIT = {"q": P(None, "tensor"), "up": P("tensor"), "bias": P()}


def params(depth):
    rng = np.random.default_rng(depth)
    shapes = MATRICES | {"bias": (WIDTH,)}
    layers = {k: np.asarray(rng.normal(size=(depth, *s)), "f") for k, s in shapes.items()}
    return {"embed": {"bias": layers["bias"][0]}, "layers": layers, "head": {}}


def pipeline(depth, zero, mesh, schedule, weights):
    def layer(w, x, batch, rng):
        return x

    split = {"axes": ("tensor",), "axis_split": {"embed": None, "layers": SPLIT, "head": None}}
    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=layer,
        head_loss=lambda outer, x, batch, rng: jnp.mean(x),
        **(split if "tensor" in mesh else {}),
    )
    given = {"schedule": schedule, "zero": zero, "weights": weights}
    shapes = jax.eval_shape(lambda: params(depth))
    return jaxpipe.Pipeline(model, shapes, mesh=jaxpipe.make_mesh(stage=2, **mesh), **given)


def gradients(tree, number):
    return jax.tree.map(lambda w: jnp.sin(7 * w + number), tree)


OPTIMIZER = optax.contrib.muon(0.05, ns_steps=NS_STEPS, weight_decay=0.1)


@pytest.mark.parametrize(
    ("depth", "zero", "mesh", "schedule", "weights"),
    [
        (10, 0, {"data": 4}, "1f1b", "unrolled"),  # 5 layers on 4 devices
        (4, 1, {"data": 2, "tensor": 2}, "zb-v", "stacked"),  # 2 layers, each on 2 devices
        (10, 2, {"data": 4, "replica": 2}, "zb-v", "unrolled"),  # chunks of 3 and 2 layers
        (10, 3, {"data": 2, "tensor": 2}, "1f1b", "stacked"),
    ],
)
def test_muon_is_that_of_whole_matrices(depth, zero, mesh, schedule, weights):
    pipe, start = pipeline(depth, zero, mesh, schedule, weights), params(depth)
    placed = pipe.place(start)
    state = pipe.init(OPTIMIZER, placed)

    @jax.jit
    def step(placed, state, number):
        return pipe.update(OPTIMIZER, gradients(placed, number), state, placed)

    @jax.jit
    def reference(layers):
        state = OPTIMIZER.init(layers)
        for number in range(STEPS):
            updates, state = OPTIMIZER.update(gradients(layers, number), state, layers)
            layers = optax.apply_updates(layers, updates)
        return layers

    for number in range(STEPS):
        placed, state = step(placed, state, number)
    # One layer is a tree of matrices; what is mapped is not stacked for the optimizer.
    expected = jax.jit(jax.vmap(reference))(start["layers"])
    got = jax.device_get(pipe.unplace(placed))["layers"]
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(got["up"] - start["layers"]["up"]).max() > 1e-2


def test_muon_of_layers_that_are_alike_place_by_place():
    """Two of a stage's four layers, at their homes at once, are of different kinds."""
    start, depth = params(8), 8
    layers = [jax.tree.map(lambda w, n=n: w[n], start["layers"]) for n in range(depth)]
    start["layers"] = tuple(w if n % 2 else {"up": w["up"]} for n, w in enumerate(layers))

    def layer(w, x, batch, rng):
        return x

    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"],
        layer=(layer,) * depth,
        head_loss=lambda outer, x, batch, rng: jnp.mean(x),
    )
    mesh = jaxpipe.make_mesh(stage=2, data=2)
    given = {"schedule": "1f1b", "zero": 3, "weights": "unrolled"}
    pipe = jaxpipe.Pipeline(model, start, mesh=mesh, **given)
    placed = pipe.place(start)
    got, _ = jax.jit(lambda w, state: pipe.update(OPTIMIZER, gradients(w, 0), state, w))(
        placed, pipe.init(OPTIMIZER, placed)
    )

    @jax.jit
    def reference(start):
        updates, _ = OPTIMIZER.update(gradients(start, 0), OPTIMIZER.init(start), start)
        return optax.apply_updates(start, updates)

    found = jax.device_get(pipe.unplace(got))
    chex.assert_trees_all_close(found, reference(start), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("depth", "mesh"), [(8, {"data": 2, "tensor": 2}), (4, {"data": 4})], ids=["8", "4"]
)
def test_no_device_holds_the_matrices_of_several_layers(depth, mesh):
    """Each is exchanged once there and once back, and multiplied on its home alone."""
    pipe = pipeline(depth, 3, mesh, "1f1b", "stacked")
    placed = pipe.placed_params, pipe.optimizer_placing(OPTIMIZER).placed

    @jax.jit
    def step(placed, state):
        return pipe.update(OPTIMIZER, gradients(placed, 0), state, placed)

    text = step.lower(*placed).compile().as_text()
    program = HloProgram(text)
    found = [one for rows in program.computations.values() for one in rows]
    sizes = {name: math.prod(shape) for name, shape in MATRICES.items()}
    # A device's part of 4 layers, or a layer on its home, has the elements of one layer.
    assert max(math.prod(shape) for one in found for shape in one.shapes) <= max(sizes.values())
    moved = [sum(map(math.prod, one.shapes)) for one in found if one.opcode == "all-to-all"]
    assert sorted(moved) == sorted(2 * list(sizes.values()))
    assert not [one for one in found if one.opcode == "all-gather"]
    # No loop runs one layer after another: those of all layers are multiplied at once; and if
    # there are two devices for each layer, either multiplies one of its two matrices.
    assert sum(one.opcode == "conditional" for one in found) == (2 if depth == 4 else 0)
    assert sum(one.opcode == "dot" for one in found) == 3 * NS_STEPS * len(MATRICES)
    assert set(re.findall(r'known_trip_count":{"n":"(\d+)', text)) <= {"1"}
