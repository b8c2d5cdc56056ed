"""Meshes that people already have: axes of other names, several of data, others of one device."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
import toys
from compilations import refusal
from covering import some
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.runtime import memory
from jaxpipe.runtime import mesh as meshes

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
DATA_FIRST = {"dp": 2, "fsdp": 2, "pp": 2}
TOY, BATCH = toys.named("tied", 4), toys.named("tied", 4).batch(16)


def make_mesh(sizes, kind=AUTO) -> Mesh:
    """A mesh of the axes and sizes of a dictionary."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def pipeline(mesh, stage="pp", data=("dp", "fsdp"), **options) -> jaxpipe.Pipeline:
    """The toy on a mesh, its vocabulary split over the stages."""
    given = {"schedule": "1f1b", "mesh": mesh, "stage_axis": stage, "data_axes": data}
    return jaxpipe.Pipeline(toy.model(tied=True, axis=stage), TOY.params, **given, **options)


def gradients(pipe):
    step = jax.jit(pipe.value_and_grad)
    loss, grads = step(pipe.place(TOY.params), BATCH, jax.random.key(2))
    return loss, pipe.unplace(grads)


def usual(data: int, **options) -> jaxpipe.Pipeline:
    """On a mesh of our own."""
    return pipeline(jaxpipe.make_mesh(stage=2, data=data), "stage", ("data",), **options)


@functools.cache
def expected(data: int):
    return gradients(usual(data))


@pytest.mark.parametrize(
    ("sizes", "data", "zero"),
    some(
        [
            *((DATA_FIRST, ("dp", "fsdp"), zero) for zero in (0, 1, 2)),
            ({"pp": 2, "fsdp": 2, "dp": 2}, ("dp", "fsdp"), 3),
            ({"dp": 4, "tensor": 1, "pp": 2, "expert": 1}, ("dp", "tensor"), 3),
            ({"pp": 2}, (), 3),
        ],
        ({"pp": 2, "fsdp": 2, "dp": 2}, ("dp", "fsdp"), 3),
    ),
)
def test_axes_of_any_name_and_number_give_the_gradients_of_one(sizes, data, zero):
    actual = gradients(pipeline(make_mesh(sizes), data=data, zero=zero))
    chex.assert_trees_all_close(actual, expected(4 if data else 1), rtol=1e-5, atol=1e-6)


def test_shapes_and_the_program_that_predicts_memory_are_those_of_any_axes():
    own, same = pipeline(make_mesh(DATA_FIRST), zero=3), usual(4, zero=3)
    found = [jax.eval_shape(p.value_and_grad, p.placed_params, BATCH) for p in (own, same)]
    chex.assert_trees_all_equal_shapes(*found)
    assert memory._smallest(own).axes == own.axes


def test_a_step_compiles_once_and_takes_batches_that_lie_on_the_mesh():
    data, mesh = ("dp", "tensor"), make_mesh({"dp": 4, "tensor": 1, "pp": 2}, EXPLICIT)
    pipe, adam = pipeline(mesh, data=data, zero=3), optax.adam(0.1)
    batch = jax.device_put(BATCH, NamedSharding(mesh, P(data)))
    params = pipe.place(TOY.params)
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
    assert leaf.addressable_shards[0].data.size == leaf.size // 8


def test_inside_explicit_axes_nothing_runs_and_the_mesh_of_the_pipeline_is_named():
    mesh = make_mesh(DATA_FIRST, EXPLICIT)
    pipe = pipeline(mesh)
    assert np.array_equal(pipe.mesh.devices, mesh.devices)
    placed = pipe.place(TOY.params)
    with jax.set_mesh(mesh):
        for call in (
            lambda: pipe.place(TOY.params),
            lambda: pipe.unplace(placed),
            lambda: pipe.init(optax.sgd(0.1), placed),
            lambda: jax.jit(pipe.loss)(placed, BATCH),
        ):
            with pytest.raises(ValueError, match=r"explicit axes.* Set `pipe\.mesh`, or no mesh\."):
                call()
    with jax.set_mesh(pipe.mesh):
        assert jnp.isfinite(jax.jit(pipe.loss)(pipe.place(TOY.params), BATCH))


def test_updates_within_the_step_and_asynchronous_steps_know_the_axes():
    """An axis of another name fails where it is traced."""
    sgd, pipe = optax.sgd(0.1), pipeline(make_mesh(DATA_FIRST), zero=2)
    placed, state = pipe.placed_params, pipe.optimizer_placing(sgd).placed
    jax.eval_shape(pipe.train_step(sgd, update="chunk"), placed, state, BATCH)
    training = jaxpipe.AsyncPipeline(pipe, sgd, clip_norm=1.0)
    flying = jax.eval_shape(training.init, placed, state, BATCH)
    jax.eval_shape(training.drain, jax.eval_shape(training.step, flying, BATCH)[0])


def test_a_mesh_without_the_axes_is_refused():
    axes = "mesh has the axes {'dp': 2, 'pp': 2}, and none is"
    for sizes, stage, data, texts in (
        (
            {"dp": 2, "pp": 2},
            *("stage", ("data",)),
            [
                f"{axes} 'stage'. Name the one of the stages: stage_axis=...",
                f"{axes} 'data'. Name those of the data shards: data_axes=(...), which is ()",
            ],
        ),
        (
            {"dp": 2, "tp": 2, "pp": 2},
            *("pp", ("dp",)),
            [
                "a pipeline would compute the same on all 2 devices along 'tp'. Name it in "
                "data_axes, or in Model.axes if the model's functions use it, or give it one device"
            ],
        ),
        ({"dp": 2, "pp": 2}, "pp", ("dp", "pp"), ["uses an axis twice"]),
    ):
        found = refusal(pipeline, make_mesh(sizes), stage, data)
        assert all(text in found for text in texts), found


@dataclasses.dataclass(frozen=True)
class Device:
    """What `make_mesh` asks of a device when it looks for its host."""

    id: int
    process_index: int
    slice_index: int
    platform: str


@pytest.mark.parametrize(
    ("sizes", "hosts", "across"),
    [
        ({"data": 8, "stage": 2}, 2, "stage"),
        ({"data": 8, "stage": 1}, 1, None),
        ({"data": 2, "stage": 4, "tensor": 4}, 4, "stage"),
        ({"replica": 2, "data": 4, "stage": 2}, 2, "replica"),
        ({"data": 16, "stage": 2}, 4, "data"),
        ({"data": 4, "stage": 2, "tensor": 4}, 4, "data"),
    ],
)
def test_shards_and_model_axes_lie_within_hosts(sizes, hosts, across):
    """Hosts, or slices of TPUs, have eight devices each, of one process or of several."""
    for of_process, platform in ((8, "gpu"), (1, "gpu"), (4, "tpu")):
        devices = [Device(n, n // of_process, n // 8, platform) for n in range(8 * hosts)]
        found = [device.slice_index for device in meshes._on_hosts(devices, sizes)]
        placed = np.reshape(found, [*sizes.values()])
        for axis, name in enumerate(sizes):
            spread = (placed != placed.take([0], axis=axis)).any()
            assert spread == (name == across), name


def test_an_array_of_devices_keeps_its_order():
    devices = np.asarray(jax.devices()[:4], object)[::-1].reshape(2, 2)
    assert (jaxpipe.make_mesh(stage=2, data=2, devices=devices).devices == devices).all()
    with pytest.raises(ValueError, match=r"array \(2, 2\); the mesh of .* is \(1, 4\)"):
        jaxpipe.make_mesh(stage=4, devices=devices)
