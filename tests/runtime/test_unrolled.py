"""Weights in an array per layer: programs copy none. Their results are in `test_equivalence`."""

from __future__ import annotations

import functools

import chex
import jax
import optax
import pytest
import toy
import toys
from compilations import AS_USED
from covering import some

import jaxpipe
from benchmarks import gpu_compile
from benchmarks.hlo import HloProgram
from jaxpipe.runtime.measure import memory
from jaxpipe.testing import assert_matches_unpipelined
from models import gpt


def pipeline(weights: str, schedule, data: int, zero: int, num_layers: int, remat: str, **options):
    params = toy.params(tied=True, num_layers=num_layers)
    pipe = jaxpipe.Pipeline(
        toy.model(tied=True, axis="stage"),
        params,
        schedule=jaxpipe.schedules.build(schedule, stages=4, microbatches=4),
        mesh=jaxpipe.make_mesh(stage=4, data=data),
        remat=remat,
        zero=zero,
        weights=weights,
        poison=True,
        **options,
    )
    return pipe, params


def test_placed_arrays_are_one_a_row_and_an_optimizer_state_is_converted_like_parameters():
    pipe, params = pipeline("unrolled", "interleaved", 2, 3, 10, "none")
    placed = pipe.place(params)
    rows = pipe.schedule.num_chunks * pipe.table.layers_per_chunk
    assert len(placed["layers"]) == rows
    assert {w.shape[0] for w in jax.tree.leaves(placed["layers"])} == {4}
    adam = optax.adam(0.1)
    state = pipe.init(adam, placed)
    moments = jax.tree.map(lambda w: w + 1, state)
    canonical = pipe.optimizer_placing(adam).unplace(moments)
    back = pipe.optimizer_placing(adam).place(canonical)
    expected = adam.init(params)
    assert jax.tree.structure(canonical) == jax.tree.structure(expected)
    again = pipe.optimizer_placing(adam).unplace(back)
    chex.assert_trees_all_equal(again, canonical)
    jax.tree.map(
        lambda leaf, sharding: leaf.shape == () or sharding.shard_shape(leaf.shape),
        state,
        pipe.optimizer_placing(adam).shardings,
    )


@pytest.mark.pipeline
def test_two_slots_of_three_chunks_are_read_where_they_lie():
    model, reference, params, batch_of, _ = toys.named("tied", 8)
    (pipe,) = assert_matches_unpipelined(
        model,
        params,
        batch_of(16),
        schedules=[jaxpipe.schedules.build("interleaved", stages=2, microbatches=4, chunks=3)],
        meshes=[jaxpipe.make_mesh(stage=2, data=2)],
        reference=reference,
        zero=3,
        weights="unrolled",
        weight_slots=2,
    )
    assert pipe.table.gathers.num_slots == 2


# The compiled program.

STAGES, DATA, MICROBATCHES = 4, 2, 6
# 40 tokens a microbatch: no activation has a weight's shape.
CONFIG = gpt.GPTConfig(
    vocab_size=96, sequence_length=20, num_layers=10, width=32, num_heads=2, dtype="float32"
)
FEW = [("1f1b", "none", 0), ("1f1b-fused", "full", 3)]
MANY = [("zb-v", "dots", 1), ("zb-v", "none", 2), ("zb-v", "none", 3)]
cases = pytest.mark.parametrize("case", some(zip([*FEW, *MANY]), *zip(FEW)))


def gpt_pipeline(weights: str, schedule: str, remat: str, zero: int) -> jaxpipe.Pipeline:
    return jaxpipe.Pipeline(
        gpt.model(CONFIG, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0))),
        schedule=jaxpipe.schedules.build(schedule, stages=STAGES, microbatches=MICROBATCHES),
        mesh=jaxpipe.make_mesh(stage=STAGES, data=DATA),
        remat=remat,
        zero=zero,
        weights=weights,
    )


def batch() -> dict:
    rows, columns = 2 * DATA * MICROBATCHES, CONFIG.sequence_length + 1
    return {"tokens": jax.ShapeDtypeStruct((rows, columns), "int32")}


@functools.cache
def compiled(weights: str, *case) -> tuple[HloProgram, int]:
    """A step's program, and the bytes of its temporaries."""
    step = memory.compiled(gpt_pipeline(weights, *case), batch(), options=AS_USED)
    return HloProgram(step.as_text()), step.memory_analysis().temp_size_in_bytes


def copied_bytes(weights: str, case: tuple) -> list[int]:
    """What a layer copies of its weights and gradient sums in F, B and W, or F and BW."""
    pipe = gpt_pipeline(weights, *case)
    leaves = jax.tree.leaves(pipe.layout.layers.piece)
    shapes = {tuple(sorted(leaf.shape)) for leaf in leaves if len(leaf.shape) > 1}
    found = gpu_compile.weight_traffic(compiled(weights, *case)[0], shapes)
    assert len(found) == len(pipe.table.passes)
    return [one.copied for one in found]


@pytest.mark.pipeline
@cases
def test_no_layer_copies_a_weight_or_a_gradient_sum(case):
    assert not any(copied_bytes("unrolled", case))
    stacked = copied_bytes("stacked", case)
    assert all(stacked[:2])  # what this test would find
    assert not any(stacked[2:])  # W reads a stack of sums in the kernel that writes it


@pytest.mark.pipeline
@cases
def test_idle_ticks_run_no_matmul_and_no_collective_but_the_messages(case):
    program, _ = compiled("unrolled", *case)
    always = {i.opcode for i in program.reached(program.tick_loop(), into_loops=False)}
    assert not always & {"dot", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    gated = {i.opcode for i in program.reached(program.tick_loop(), into_loops=True)}
    assert ("all-gather" in gated) == (case[2] == 3)  # nor are chunks gathered ahead of the ticks
    assert ("reduce-scatter" in gated) == (case[2] >= 2)


@pytest.mark.pipeline
@cases
def test_temporaries_are_no_more_than_those_of_stacked_weights(case):
    assert compiled("unrolled", *case)[1] <= 1.01 * compiled("stacked", *case)[1]


@pytest.mark.pipeline
@pytest.mark.parametrize("zero", some([(0,), (1,), (3,)], (3,)))
def test_a_step_copies_no_more_of_what_it_is_given_than_with_stacked_weights(zero):
    """The optimizer writes where parameters and moments lie."""
    optimizer, copied = optax.adam(1e-2), {}
    for weights in ("stacked", "unrolled"):
        pipe, _ = pipeline(weights, "1f1b", 2, zero, 8, "none")
        state = pipe.optimizer_placing(optimizer).placed
        step = pipe.train_step(optimizer).lower(pipe.placed_params, state, toy.batch(16))
        text = step.compile(AS_USED).as_text()
        copied[weights] = text[text.index("ENTRY") :].count("copy(%param")
    assert copied["unrolled"] <= copied["stacked"]


# What does not fit.


@pytest.mark.parametrize(
    "training",
    [jaxpipe.AsyncPipeline, functools.partial(jaxpipe.Pipeline.train_step, update="chunk")],
)
def test_updates_within_the_step_are_refused(training):
    pipe, _ = pipeline("unrolled", "1f1b", 1, 0, 8, "none")
    with pytest.raises(ValueError, match="Nearest valid: weights='stacked'"):
        training(pipe, optax.sgd(0.1))
