"""Layers of an overlapped forward and backward in one loop: the same gradients, the same loop."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
import toys
from compilations import AS_USED

import jaxpipe
from benchmarks.gpu_overlap import overlapped_one_f_one_b
from benchmarks.hlo import HloProgram, scope_of
from jaxpipe.runtime import options
from jaxpipe.runtime.measure import memory
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.generators.dualpipe import dualpipe_v_published
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.testing import assert_matches_unpipelined
from models import gpt

pytestmark = pytest.mark.pipeline
FUSED = overlapped_one_f_one_b(2, 4, fused=True)
SPLIT = overlapped_one_f_one_b(2, 5, fused=False)
V = dualpipe_v_published(2, 6)
ON_DATA = {"stage": 2, "data": 2}

# fmt: off
CASES = [  # with a tensor axis where the toy is split
    ("untied", FUSED, ON_DATA, {"zero": 3, "weights": "unrolled"}),
    ("untied", V, {"stage": 2}, {"remat": "full"}),
    ("mixture", SPLIT, {"stage": 2}, {"residuals": "host"}),
    ("split", V, {"stage": 2}, {"weights": "unrolled"}),
    ("split", FUSED, ON_DATA, {"zero": 3, "remat": "dots"}),
]
# fmt: on


@pytest.mark.parametrize(
    ("name", "schedule", "sizes", "given"),
    [pytest.param(*case, id=f"{case[0]}-{case[1].name}") for case in CASES],
)
def test_results_equal_those_of_the_unpipelined_model(name, schedule, sizes, given):
    count = schedule.num_microbatches
    pipe = toys.check(name, schedule, sizes, microbatches=count, pair_layers=True, **given)
    assert pipe.table.pairs


def test_experts_that_devices_share():
    config = gpt.GPTConfig(
        vocab_size=13, sequence_length=8, num_layers=4, width=8, num_heads=2, num_experts=4,
        expert_width=8, balance_loss=0.1, capacity_factor=1.0, dtype="float32",
    )  # fmt: skip
    assert_matches_unpipelined(
        gpt.model(config, vocabulary_axis="stage", expert_axis="expert"),
        jax.jit(functools.partial(gpt.init, config))(jax.random.key(0)),
        {"tokens": jax.random.randint(jax.random.key(1), (24, 9), 0, 13)},
        schedules=[V],
        meshes=[jaxpipe.make_mesh(stage=2, data=2, expert=2)],
        reference=functools.partial(jaxpipe.unpipelined.loss, gpt.model(config)),
        pair_layers=True,
    )


def test_tables_name_the_chunks_that_come_together():
    # Chunks of the backward, which is not split, and of the forward, each with its layers.
    first, last = {((1, 1), (0, 3)), ((0, 3), (1, 1))}, {((1, 2), (0, 2)), ((0, 2), (1, 2))}
    assert lower(V, [3, 2, 2, 1]).pairs == {Kind.BW: first | last}
    assert lower(SPLIT, [1, 2]).pairs == {Kind.B: {((0, 1), (0, 1)), ((0, 2), (0, 2))}}
    assert not lower(jaxpipe.schedules.build("1f1b", stages=2, microbatches=4), [1, 1]).pairs


CONFIG = gpt.GPTConfig(
    vocab_size=96, sequence_length=16, num_layers=8, width=32, num_heads=2, dtype="float32"
)


def pipeline(schedule, **given):
    return jaxpipe.Pipeline(
        gpt.model(CONFIG, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0))),
        schedule=schedule,
        mesh=jaxpipe.make_mesh(**ON_DATA),
        **given,
    )


def batch(schedule):
    shape = (4 * schedule.num_microbatches, CONFIG.sequence_length + 1)
    return {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}


def matmuls(weights: str) -> dict[str, set[int]]:
    """Numbers of matmuls in the loops over layers, by the actions that they run."""
    toy, mesh = toys.named("split", 4), jaxpipe.make_mesh(stage=2, tensor=2)
    pipe = jaxpipe.Pipeline(
        toy.model, toy.params, schedule=V, mesh=mesh, weights=weights, pair_layers=True
    )
    compiled = memory.compiled(pipe, toy.batch(12), options=AS_USED)
    program, found = HloProgram(compiled.as_text()), collections.defaultdict(set)
    for body in program.tick_bodies().values():
        for loop in program.loops(body):
            if (scope := scope_of(loop)) and scope.name.isupper():
                inside = program.reached(loop.calls["body"], into_loops=True)
                found[scope.name].add(sum(one.opcode == "dot" for one in inside))
    return dict(found)


@pytest.mark.parametrize("weights", ["stacked", "unrolled"])
def test_one_loop_has_the_matmuls_of_all_its_actions(weights):
    found = matmuls(weights)
    together = found.pop("BW_F")
    assert found.keys() == {"F", "B", "W"}
    assert together == {sum(count for (count,) in found.values())}


def test_predicted_memory_is_the_compiled_one():
    pipe = pipeline(V, pair_layers=True, zero=3)
    predicted = sum(memory.predicted_bytes(pipe, batch(V)).values())
    assert memory.compiled_bytes(pipe, batch(V)) == pytest.approx(predicted, rel=0.02)


def test_pairs_are_the_default_where_matmuls_can_hide_what_layers_communicate(monkeypatch):
    def pairs(schedule):
        toy, mesh = toys.named("split", 4), jaxpipe.make_mesh(stage=2, tensor=2)
        pipe = jaxpipe.Pipeline(toy.model, toy.params, schedule=schedule, mesh=mesh)
        return pipe.options.pair_layers

    assert not pairs(V)  # CPUs hide nothing
    monkeypatch.setattr(options, "transfers_overlap", lambda mesh: True)
    assert pairs(V)
    assert not pairs("1f1b")
    assert not pipeline(V).options.pair_layers  # these layers communicate nothing


def test_what_has_no_pairs_is_refused():
    with pytest.raises(ValueError, match="schedule '1f1b' overlaps no forward with a backward"):
        pipeline("1f1b", pair_layers=True)
    with pytest.raises(ValueError, match="pair_layers='yes' is no choice"):
        pipeline(V, pair_layers="yes")
    toy = toys.named("uneven", 5)
    with pytest.raises(ValueError, match="pair_layers=True runs layers that are alike"):
        jaxpipe.Pipeline(
            toy.model, toy.params, schedule=V, mesh=jaxpipe.make_mesh(stage=2), pair_layers=True
        )
