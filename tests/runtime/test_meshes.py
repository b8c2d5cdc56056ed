"""Meshes that people already have: axes of other names, several of data, others of one device."""

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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.runtime import mesh as meshes
from jaxpipe.runtime.measure.memory import predicted_bytes

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
DATA_FIRST = {"dp": 2, "fsdp": 2, "pp": 2}


def make_mesh(sizes, kind=AUTO) -> Mesh:
    """A mesh of the axes and sizes of a dictionary."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def pipeline(mesh, stage="pp", data=("dp", "fsdp"), **options) -> jaxpipe.Pipeline:
    """The toy on a mesh, its vocabulary split over the stages."""
    return jaxpipe.Pipeline(
        toy.model(tied=True, axis=stage),
        toy.params(tied=True, num_layers=4),
        schedule="1f1b",
        mesh=mesh,
        stage_axis=stage,
        data_axes=data,
        **options,
    )


def gradients(pipe):
    placed = pipe.place(toy.params(tied=True, num_layers=4))
    loss, grads = jax.jit(pipe.value_and_grad)(placed, toy.batch(16), jax.random.key(2))
    return loss, pipe.unplace(grads)


@functools.cache
def expected(data):
    """Loss and gradients of a mesh of our own."""
    return gradients(pipeline(jaxpipe.make_mesh(stage=2, data=data), "stage", ("data",)))


@pytest.mark.parametrize(
    ("sizes", "data", "zero"),
    [
        *((DATA_FIRST, ("dp", "fsdp"), zero) for zero in (0, 1, 2)),
        ({"pp": 2, "fsdp": 2, "dp": 2}, ("dp", "fsdp"), 3),
        ({"dp": 4, "tensor": 1, "pp": 2, "expert": 1}, ("dp", "tensor"), 3),
    ],
)
def test_axes_of_any_name_and_number_give_the_gradients_of_one(sizes, data, zero):
    actual = gradients(pipeline(make_mesh(sizes), data=data, zero=zero))
    chex.assert_trees_all_close(actual, expected(4), rtol=1e-5, atol=1e-6)


def test_a_mesh_needs_no_axis_of_data_shards():
    actual = gradients(pipeline(make_mesh({"pp": 2}), data=(), zero=3))
    chex.assert_trees_all_equal(actual, expected(1))


@pytest.mark.parametrize(
    ("sizes", "data", "kind", "zero"),
    [
        (DATA_FIRST, ("dp", "fsdp"), AUTO, 3),
        (DATA_FIRST, ("dp", "fsdp"), EXPLICIT, 0),
        ({"dp": 4, "tensor": 1, "pp": 2}, ("dp", "tensor"), EXPLICIT, 3),
    ],
)
def test_a_step_compiles_once_and_takes_batches_that_lie_on_the_mesh(sizes, data, kind, zero):
    mesh = make_mesh(sizes, kind)
    pipe, adam = pipeline(mesh, data=data, zero=zero), optax.adam(0.1)
    rows = NamedSharding(mesh, P(data))
    batch = jax.tree.map(lambda w: jax.device_put(w, rows), toy.batch(16))
    params = pipe.place(toy.params(tied=True, num_layers=4))
    state = pipe.init(adam, params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = pipe.value_and_grad(params, batch)
        return loss, *pipe.update(adam, grads, state, params)

    for _ in range(3):
        loss, params, state = step(params, state, batch)
    assert step._cache_size() == 1
    assert jnp.isfinite(loss)
    leaf = params["layers"]["up"]
    assert leaf.addressable_shards[0].data.size == leaf.size // (8 if zero == 3 else 2)


def test_inside_explicit_axes_nothing_runs_and_the_mesh_of_the_pipeline_is_named():
    mesh = make_mesh(DATA_FIRST, EXPLICIT)
    pipe, params = pipeline(mesh), toy.params(tied=True, num_layers=4)
    placed = pipe.place(params)
    with jax.set_mesh(mesh):
        for call in (
            lambda: pipe.place(params),
            lambda: pipe.unplace(placed),
            lambda: pipe.init(optax.sgd(0.1), placed),
            lambda: jax.jit(pipe.loss)(placed, toy.batch(16)),
        ):
            with pytest.raises(ValueError, match=r"explicit axes.* Set `pipe\.mesh`, or no mesh\."):
                call()
    with jax.set_mesh(pipe.mesh):
        assert jnp.isfinite(jax.jit(pipe.loss)(pipe.place(params), toy.batch(16)))


def test_updates_within_the_step_and_asynchronous_steps_know_the_axes():
    sgd, batch = optax.sgd(0.1), toy.batch(16)
    found = []
    for mesh, stage, data in (
        (make_mesh(DATA_FIRST), "pp", ("dp", "fsdp")),
        (jaxpipe.make_mesh(stage=2, data=4), "stage", ("data",)),
    ):
        pipe = pipeline(mesh, stage, data, zero=2)
        params = pipe.place(toy.params(tied=True, num_layers=4))
        state = pipe.init(sgd, params)
        training = jaxpipe.AsyncPipeline(pipe, sgd, clip_norm=1.0)
        flying = training.init(params, state, batch)
        within = pipe.train_step(sgd, update="chunk")(params, state, batch)
        for _ in range(2):
            flying, loss = jax.jit(training.step)(flying, batch)
        flying, _ = jax.jit(training.drain)(flying)
        late, _ = training.finish(flying)
        found.append((within[0], pipe.unplace(within[1]), loss, pipe.unplace(late)))
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-6)


def test_memory_is_predicted_on_any_axes():
    batch = jax.eval_shape(lambda: toy.batch(16))
    found = [
        predicted_bytes(pipeline(make_mesh(DATA_FIRST), zero=3), batch),
        predicted_bytes(
            pipeline(jaxpipe.make_mesh(stage=2, data=4), "stage", ("data",), zero=3), batch
        ),
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("sizes", "stage", "data", "lines"),
    [
        (
            {"dp": 2, "pp": 2},
            "stage",
            ("data",),
            [
                "mesh has the axes {'dp': 2, 'pp': 2}, and none is 'stage'. Name the one of the "
                "stages: stage_axis=...",
                "mesh has the axes {'dp': 2, 'pp': 2}, and none is 'data'. Name those of the data "
                "shards: data_axes=(...), which is () if there are none.",
            ],
        ),
        (
            {"dp": 2, "tp": 2, "pp": 2},
            "pp",
            ("dp",),
            [
                "mesh has the axes {'dp': 2, 'tp': 2, 'pp': 2}, and a pipeline would compute the "
                "same on all 2 devices along 'tp'. Name it in data_axes, or in Model.axes if the "
                "model's functions use it, or give it one device."
            ],
        ),
        ({"dp": 2, "pp": 2}, "pp", ("dp", "pp"), ["uses an axis twice"]),
    ],
)
def test_a_mesh_without_the_axes_is_refused(sizes, stage, data, lines):
    found = compilations.refusal(pipeline, make_mesh(sizes), stage, data)
    for line in lines:
        assert line in found


def test_the_devices_of_a_mesh_stay_in_their_order():
    mesh = make_mesh(DATA_FIRST, EXPLICIT)
    assert np.array_equal(pipeline(mesh).mesh.devices, mesh.devices)


@dataclasses.dataclass(frozen=True)
class Device:
    """What `make_mesh` asks of a device when it looks for its host."""

    id: int
    process_index: int
    slice_index: int


def on_hosts(hosts, each, *, processes_of=None):
    """Devices of several hosts, one process per host or ``processes_of`` devices each."""
    return [Device(i, i // (processes_of or each), i // each) for i in range(hosts * each)]


@pytest.mark.parametrize("processes_of", [None, 1])
@pytest.mark.parametrize(
    ("sizes", "hosts", "together", "across"),
    [
        ({"data": 2, "stage": 8}, 2, "data", "stage"),
        ({"data": 8, "stage": 2}, 2, "data", "stage"),
        ({"data": 8, "stage": 1}, 1, "data stage", ""),
        ({"data": 2, "stage": 4, "tensor": 4}, 4, "data tensor", "stage"),
        ({"replica": 2, "data": 4, "stage": 2}, 2, "data stage", "replica"),
        ({"data": 16, "stage": 2}, 4, "stage", "data"),
        ({"data": 4, "stage": 2, "tensor": 4}, 4, "stage tensor", "data"),
    ],
)
def test_shards_and_model_axes_lie_within_hosts(sizes, hosts, together, across, processes_of):
    devices = on_hosts(hosts, 8, processes_of=processes_of)
    placed = np.reshape(
        [d.slice_index for d in meshes._on_hosts(devices, sizes)], [*sizes.values()]
    )
    for axis, name in enumerate(sizes):
        spread = (placed != placed.take([0], axis=axis)).any()
        assert spread == (name in across.split()), name
        assert spread != (name in together.split()), name


def test_an_array_of_devices_keeps_its_order():
    devices = np.asarray(jax.devices()[:4], object)[::-1].reshape(2, 2)
    assert (jaxpipe.make_mesh(stage=2, data=2, devices=devices).devices == devices).all()
    with pytest.raises(ValueError, match=r"array \(2, 2\); the mesh of .* is \(1, 4\)"):
        jaxpipe.make_mesh(stage=4, devices=devices)
