"""What lies on the host: optimizer state between steps, residuals until their backward."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
import toys
from compilations import refusal
from covering import some

import jaxpipe
from jaxpipe.errors import refuse
from jaxpipe.runtime import host, measure
from jaxpipe.runtime.layout.placing import HOST_PARTS

TOY = toys.named("ends", 4)
BATCH = TOY.batch(8)


def pipeline(schedule: str = "1f1b", *, stages: int = 2, data: int = 2, **options):
    sizes = {"stage": stages, "data": data}
    return toys.pipeline("ends", schedule, sizes, num_layers=4, microbatches=2, **options)


def trained(pipe, optimizer):
    params = pipe.place(TOY.params)
    state, step = pipe.init(optimizer, params), pipe.train_step(optimizer)
    for _ in range(3):
        _, params, state = step(params, state, BATCH)
    return params, state


def updated(pipe, optimizer):
    """After one update, outside of a step."""
    params = pipe.place(TOY.params)
    return pipe.update(optimizer, params, pipe.init(optimizer, params), params)


def kinds(tree) -> set[tuple[bool, str]]:
    """Where arrays lie, and scalars."""
    return {(leaf.ndim > 0, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(tree)}


SPLIT = {(True, "pinned_host"), (False, "device")}


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("zero", "weights"),
    some([(0, "stacked"), (1, "unrolled"), (2, "stacked"), (3, "stacked")], (1, "unrolled")),
)
def test_a_run_is_bit_for_bit_that_of_a_state_on_the_devices(zero, weights):
    pipe = pipeline(zero=zero, weights=weights)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    here = trained(pipe, optimizer)
    there = trained(pipe, jaxpipe.on_host(optimizer))
    assert kinds(there[1]) == SPLIT
    assert {kind for _, kind in kinds((*here, there[0]))} == {"device"}
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (here, there)))


@pytest.mark.pipeline
def test_checkpoints_restore_with_and_without_it_and_onto_other_meshes(tmp_path):
    optimizer = optax.adam(1e-2)
    there, here = jaxpipe.on_host(optimizer), optimizer
    pipe, other = pipeline(zero=3), pipeline(stages=4, data=1)
    params, state = updated(pipe, there)
    assert kinds(state) == SPLIT
    assert kinds(pipe.optimizer_placing(there).unplace(state)) == SPLIT
    with jaxpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, pipe, there, params, state)
        same, onto = checkpoints.restore(pipe, there), checkpoints.restore(other, here)
        checkpoints.save(4, other, here, onto.params, onto.state)
        back = checkpoints.restore(pipe, there)
    assert kinds(same.state) == kinds(back.state) == SPLIT
    assert {kind for _, kind in kinds(onto.state)} == {"device"}
    for found in (same, back):
        given = (found.state, state)
        jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, given))


def test_it_comes_to_the_devices_when_all_gradients_are_there():
    """Else XLA fetches it first, and its place is taken during the whole step."""
    pipe, optimizer = pipeline(), jaxpipe.on_host(optax.adam(1e-2))
    shapes = pipe.placed_params, pipe.optimizer_placing(optimizer).placed
    step = jax.make_jaxpr(pipe.train_step(optimizer))(*shapes, BATCH).jaxpr.eqns[0]
    eqns = step.params["jaxpr"].jaxpr.eqns
    fetches = [eqn for eqn in eqns if eqn.primitive.name == "device_put"]
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    held = {v for eqn in barriers for v in eqn.outvars}
    moments = [leaf for leaf in jax.tree.leaves(shapes[1]) if leaf.ndim]
    first = fetches[: len(moments)]
    assert len(fetches) == 2 * len(moments)
    assert all(set(eqn.invars) <= held for eqn in first)
    (waits,) = [eqn for eqn in barriers if set(eqn.outvars) & set(first[0].invars)]
    assert len(waits.invars) == len(jax.tree.leaves(shapes))


def test_parts_that_are_updated_at_different_times_are_refused():
    optimizer = jaxpipe.on_host(optax.sgd(0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"update='step'"):
        pipeline("breadth-first").train_step(optimizer, update="chunk")
    with pytest.raises(ValueError, match=r"on_host brings the whole state"):
        jaxpipe.AsyncPipeline(pipeline(), optimizer)
    with pytest.raises(ValueError, match=r"residuals='host' would leave the host"):
        jaxpipe.AsyncPipeline(pipeline(residuals="host"), optax.sgd(0.1))


def test_devices_without_such_memory_are_refused():
    memory = SimpleNamespace(kind="device")
    device = SimpleNamespace(
        device_kind="other", process_index=0, addressable_memories=lambda: [memory]
    )
    mesh = SimpleNamespace(devices=np.array([device]))
    found = refusal(refuse, host.problems("residuals", "host", mesh))
    assert "needs pinned_host memory, and other has only device" in found


@pytest.mark.pipeline
def test_a_tree_goes_to_the_host_in_parts():
    """Where it is what `unplace` gives, and no part is much more than an eighth."""
    pipe, optimizer = pipeline(zero=3), optax.adam(1e-2)
    params, state = updated(pipe, optimizer)
    for placing, tree in (
        (pipe.params_placing, params),
        (pipe.optimizer_placing(optimizer), state),
    ):
        there = placing.to_host(tree)
        assert kinds(there) <= SPLIT
        given = (there, placing.unplace(tree))
        jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, given))
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(there)]
        parts = [sum(leaf.nbytes for leaf in part(tree)) for part in placing.parts]
        assert sum(parts) == sum(sizes)
        assert max(parts) <= sum(sizes) / HOST_PARTS + max(sizes)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)
            elif hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)


@pytest.mark.pipeline
def test_all_that_f_keeps_lies_on_the_host_and_nothing_else():
    here, there = (pipeline("zb-v", residuals=place) for place in ("device", "host"))
    kept = measure.buffers(here, BATCH)
    assert kept.keys() - measure.buffers(there, BATCH).keys() == {"until_b", "until_w"}
    step = jax.make_jaxpr(there.value_and_grad)(there.placed_params, BATCH)
    made = [v.aval for eqn in equations(step.jaxpr) for v in eqn.outvars]
    on_host = {(v.shape, v.dtype) for v in made if v.memory_space == jax.memory.Space.Host}
    buffers = {(v.shape, v.dtype) for v in (*kept["until_b"], *kept["until_w"])}
    rows = {(row, dtype) for (_, size), dtype in buffers for row in ((size,), (1, size))}
    assert buffers <= on_host <= buffers | rows
