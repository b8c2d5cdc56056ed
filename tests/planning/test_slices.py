"""Slices of sequences in plans: what is counted, kept and waited for."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jaxpipe
from jaxpipe.planning import cost, counting, devices, plans, without_devices
from jaxpipe.planning.plans import PlacedPlan, Plan, grown, table_of
from jaxpipe.planning.sizes import ModelSizes, Variant
from jaxpipe.runtime import assembly
from jaxpipe.runtime.measure.memory import tree_bytes
from jaxpipe.runtime.measure.traced import buffers
from jaxpipe.schedule import device_clock
from models import gpt
from train.config import Config
from train.plan import Planned

SLICES = 4
CONFIG = gpt.GPTConfig(
    vocab_size=512, sequence_length=1024, num_layers=8, width=64, num_heads=4, num_kv_heads=2,
    dtype="bfloat16",
)  # fmt: skip
PLAN = Plan(
    stage=4, data=2, context=1, tensor=1, replica=1, schedule="1f1b-fused", chunks=1,
    microbatches=4, rows=2, remat="full", zero=0, weight_slots=1, weights="unrolled",
    slices=SLICES,
)  # fmt: skip


def batch(rows: int):
    shape = jax.ShapeDtypeStruct((rows, CONFIG.sequence_length), jnp.int32)
    return {"tokens": shape, "targets": shape}


def pipeline(schedule: jaxpipe.Schedule, **options) -> jaxpipe.Pipeline:
    return jaxpipe.Pipeline(
        gpt.model(CONFIG, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0))),
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=schedule.num_stages, data=options.pop("data", 1)),
        **options,
    )


@functools.cache
def model() -> ModelSizes:
    with without_devices.attention_of_gpus():
        found = {
            Variant(1, 1, "full", 1, slices): counting.sizes(
                pipeline(
                    jaxpipe.schedules.build("1f1b", stages=1, microbatches=2, slices=slices),
                    remat="full",
                ),
                batch,
                compute_bytes=2,
            )
            for slices in (1, SLICES)
        }
    return ModelSizes("slices", CONFIG.sequence_length, 4, 2, 2, 32, 8192, found)


def placed(**changes) -> PlacedPlan:
    plan = dataclasses.replace(PLAN, **changes)
    return PlacedPlan(plan, model(), devices.cluster("h100", plan.stage * plan.data))


def test_slices_have_the_flops_of_their_sequence():
    (whole,), (cut,) = (model().variants[placed(slices=k).variant].layers for k in (1, SLICES))
    for of_whole, of_slice in zip(whole.passes, cut.passes, strict=True):
        assert SLICES * of_slice.flops(2) == pytest.approx(of_whole.flops(2))
    keys = CONFIG.sequence_length * CONFIG.num_kv_heads * (CONFIG.width // CONFIG.num_heads)
    assert cut.carry.at(2) == 2 * 2 * keys * 2  # rows, keys and values, bytes


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b-fused", 1), ("zb-h1", 1), ("interleaved-fused", 2)]
)
def test_bytes_are_those_of_the_tick_loops_buffers(schedule, chunks, monkeypatch):
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)  # as on GPUs
    one = placed(schedule=schedule, chunks=chunks)
    program = cost.program_of(one, published=True)
    predicted = cost.device_bytes(one, program)
    pipe = pipeline(
        table_of(program).schedule, data=2, remat="full", weights="unrolled",
        compute_dtype="bfloat16",
    )  # fmt: skip
    kept = {name: tree_bytes(t) for name, t in buffers(pipe, batch(one.plan.batch_rows)).items()}
    assert predicted["residuals"] == kept["until_b"] + kept["until_w"]
    assert predicted["carries"] == kept["carry"] + kept["carry_gradient"]
    assert predicted["inboxes"] == kept["x"] + kept["dy"] + kept.get("sent", 0)


def test_steps_are_those_of_the_device_clock():
    """Later slices take longer by what attention takes; a longer step lies on the line."""
    one = placed(microbatches=30)
    program = cost.program_of(one, published=True)
    assert len(program.shorter()) == 2
    layer = cost.layer_costs(one)
    assert 0 < layer.attention < 1
    costs = layer.times(2)
    order = table_of(program).schedule
    assert order.num_slices == SLICES
    whole = device_clock(order, costs, together=program.together).makespan
    found = grown(program, lambda short: cost.replayed(short, layer))
    assert found == pytest.approx(whole)


def test_slices_fill_the_pipeline_of_few_sequences():
    cut, whole = (
        cost.step_seconds(one, cost.program_of(one, published=True))
        for one in (placed(), placed(slices=1))
    )
    shares = (step["waits"] / (step["waits"] + step["layers"]) for step in (cut, whole))
    assert next(shares) < next(shares)
    assert cost.least_seconds(placed()) <= sum(cut.values())


def test_only_schedules_with_stages_that_can_cut_sequences_do():
    cluster, excluded = devices.cluster("h100", 4), plans.Counter()
    found = {
        (one.plan.schedule, one.plan.slices)
        for family in plans.families(model(), cluster, [32], excluded)
        for one in family
        if one.plan.stage > 1
    }
    assert {("zb-v", 1), ("1f1b", 1), ("1f1b", SLICES), ("interleaved-fused", SLICES)} < found
    assert ("zb-v", SLICES) not in found


def test_the_trainer_counts_and_writes_slices():
    small = {"vocab_size": 256, "sequence_length": 64, "num_layers": 4, "width": 32, "num_heads": 2}
    planned = Planned(Config(model=small), "small")
    numbers = {variant.slices for variant in planned.sizes(1, 4, lambda share: None).variants}
    assert numbers == {1, 2, 4}
    plan = dataclasses.replace(PLAN, data=1, stage=2, zero=0)
    written = planned.write(plan, jaxpipe.schedule.Costs(1, 1.2, 0.8, attention=0.5), None)
    assert "sequence_slices: 4" in written
    assert "attention: 0.5" in written
