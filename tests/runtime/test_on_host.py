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
from jaxpipe.runtime import host, memory
from jaxpipe.runtime.layout import placing as placings
from jaxpipe.schedule import catalog
from jaxpipe.schedule.offload import within_limit

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
    with pytest.raises(ValueError, match=r"residuals='host' is not supported"):
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
def test_a_tree_goes_to_the_host_in_parts(monkeypatch):
    """The parts make what `unplace` gives, none is much more than an eighth, and a small tree goes
    at once."""
    pipe, optimizer = pipeline(zero=3), optax.adam(1e-2)
    assert len(pipe.params_placing.parts) == 1
    del pipe.params_placing.parts
    monkeypatch.setattr(placings, "LEAST_PART", 1)
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
        assert max(parts) <= sum(sizes) / placings.HOST_PARTS + max(sizes)


ZB_V = within_limit(catalog.build("zb-v", stages=3, microbatches=7), limit=4, parts=1)
"""With W early enough that no more is kept."""
MOVING = [
    ("1f1b-fused", 2.0, {"stage": 3}, {"weights": "unrolled", "remat": "dots"}),
    ("breadth-first", 3.0, {"stage": 2, "data": 2}, {"zero": 3, "weight_slots": 2}),
    ("1f1b", 3.0, {"stage": 4}, {"weights": "unrolled", "zero": 1}),
    (ZB_V, 2.0, {"stage": 3, "data": 2}, {"zero": 2, "weight_slots": 2}),
]


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("schedule", "kept", "sizes", "options"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (n > 1)) for n, case in enumerate(MOVING)],
)
def test_losses_and_gradients_are_to_the_bit_those_of_residuals_on_the_device(
    schedule, kept, sizes, options
):
    microbatches, toy = 7, toys.named("tied", 12)
    results, tables = [], []
    for residuals in ("device", kept):
        given = {"residuals": residuals, "microbatches": microbatches} | options
        pipe = toys.pipeline("tied", schedule, sizes, num_layers=12, **given)
        batch = toy.batch(microbatches * sizes.get("data", 1))
        step = jax.jit(pipe.value_and_grad)(pipe.place(toy.params), batch)
        results.append(jax.device_get(step))
        tables.append(pipe.table)
    jax.tree.map(np.testing.assert_array_equal, *results)
    here, there = (table.num_slots for table in tables)
    assert there["until_w"] == int(kept * pipe.schedule.num_chunks) < here["until_w"]
    assert tables[1].residual_parts > 0


def test_parts_of_what_waits_are_on_the_device_and_the_host():
    """A device has the slots of the limit, and what is on its way beside one layer."""
    pipe, few = (
        toys.pipeline("tied", "1f1b-v", {"stage": 4}, num_layers=8, microbatches=12, **given)
        for given in ({}, {"residuals": 2.5})
    )
    batch = toys.named("tied", 8).batch(12)
    whole, kept = memory.buffers(pipe, batch), memory.buffers(few, batch)
    slots, parts = few.table.num_slots, few.table.residual_parts
    assert (slots["until_w"], parts, kept.keys() - whole.keys()) == (5, 2, {"moving"})
    names = ("until_b", "until_w")
    before, after = (sum(memory.tree_bytes(all_of[n]) for n in names) for all_of in (whole, kept))
    assert after * pipe.table.num_slots["until_w"] == before * 5
    of_layer = after / 5 / few.table.layers_per_chunk
    assert of_layer / 2 <= memory.tree_bytes(kept["moving"]) <= of_layer / 2 + 64


def test_a_limit_below_two_microbatches_is_predicted_too():
    """Although the program of two microbatches that is compiled for it keeps both."""
    given = {"num_layers": 8, "microbatches": 6, "residuals": 1.5}
    pipe = toys.pipeline("tied", "1f1b-v", {"stage": 2}, **given)
    predicted = memory.predicted_bytes(pipe, toys.named("tied", 8).batch(6))
    assert predicted["working_set"] > 0


def test_what_cannot_move_is_refused():
    with pytest.raises(ValueError, match=r"residuals=0.5 does not fit schedule '1f1b'(.|\n)*2.0"):
        pipeline(residuals=0.5)
    with pytest.raises(ValueError, match=r"residuals=2.5 needs layers that are alike"):
        toys.pipeline("uneven", "1f1b", {"stage": 2}, microbatches=4, residuals=2.5)
    with pytest.raises(ValueError, match=r"residuals=-1 is not one of device, host, or a number"):
        pipeline(residuals=-1)
    with pytest.raises(ValueError, match=r"residuals=2 is not supported in an asynchronous"):
        jaxpipe.AsyncPipeline(pipeline(residuals=2), optax.sgd(0.1))


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
    kept = memory.buffers(here, BATCH)
    assert kept.keys() - memory.buffers(there, BATCH).keys() == {"until_b", "until_w"}
    step = jax.make_jaxpr(there.value_and_grad)(there.placed_params, BATCH)
    made = [v.aval for eqn in equations(step.jaxpr) for v in eqn.outvars]
    on_host = {(v.shape, v.dtype) for v in made if v.memory_space == jax.memory.Space.Host}
    buffers = {(v.shape, v.dtype) for v in (*kept["until_b"], *kept["until_w"])}
    rows = {(row, dtype) for (_, size), dtype in buffers for row in ((size,), (1, size))}
    assert buffers <= on_host <= buffers | rows
