"""The cost model against what it models: traces, tick tables, clocks, and figures of benchmarks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jaxpipe
from jaxpipe.errors import ArgumentError
from jaxpipe.planning import cost, counting, devices, sizes, without_devices
from jaxpipe.planning.plans import PlacedPlan, Plan, Program, grown, table_of
from jaxpipe.runtime import assembly
from jaxpipe.runtime.measure.memory import tree_bytes
from jaxpipe.runtime.measure.traced import buffers
from jaxpipe.schedule import device_clock
from models import gpt

SMALL = gpt.GPTConfig(
    vocab_size=512, sequence_length=32, num_layers=8, width=32, num_heads=4, dtype="bfloat16"
)
# Those of benchmarks/gpu_compile.py and benchmarks/gpu_hosts.py.
OF_ROOFLINE = gpt.GPTConfig(
    vocab_size=32768, sequence_length=1536, num_layers=16, width=2048, num_heads=16,
    dtype="bfloat16",
)  # fmt: skip
OF_52B = gpt.GPTConfig(
    vocab_size=32000, sequence_length=1024, num_layers=64, width=8192, num_heads=64,
    positions="learned", norm="layer", activation="gelu", bias=True, dtype="bfloat16",
)  # fmt: skip


def batch(config: gpt.GPTConfig, rows: int):
    return {"tokens": jax.ShapeDtypeStruct((rows, config.sequence_length + 1), jnp.int32)}


def pipeline(config: gpt.GPTConfig, *, tensor: int = 1, **options) -> jaxpipe.Pipeline:
    split = None if tensor == 1 else "tensor"
    axes = {} if tensor == 1 else {"tensor": tensor}
    data = options.pop("data", 1)
    given = {"schedule": "1f1b", "microbatches": 2} | options
    stages = 1 if isinstance(given["schedule"], str) else given["schedule"].num_stages
    if stages > 1:
        del given["microbatches"]
    return jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage", tensor_axis=split),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        mesh=jaxpipe.make_mesh(stage=stages, data=data, **axes),
        **given,
    )


@functools.cache
def counted(
    config: gpt.GPTConfig,
    remat: str = "none",
    tensor: int = 1,
    gpus: bool = False,
    fp8: tuple[str, ...] = (),
) -> sizes.Sizes:
    def count():
        pipe = pipeline(config, tensor=tensor, remat=remat, fp8=fp8)
        return counting.sizes(pipe, functools.partial(batch, config), compute_bytes=2)

    if not gpus:
        return count()
    with without_devices.attention_of_gpus():
        return count()


def placed(config: gpt.GPTConfig, plan: Plan, found: sizes.Sizes) -> PlacedPlan:
    length = config.sequence_length
    model = sizes.ModelSizes(
        "test",
        length,
        4,
        2,
        2,
        64,
        4 * (length + 1),
        {sizes.Variant(1, plan.tensor, plan.remat): found},
    )
    return PlacedPlan(
        model=model, plan=plan, cluster=devices.cluster("h100", plan.stage * plan.data)
    )


PLAN = Plan(
    stage=4, data=2, context=1, tensor=1, replica=1, schedule="1f1b-fused", chunks=1,
    microbatches=8, rows=2, remat="none", zero=0, weight_slots=1, weights="stacked",
)  # fmt: skip


def test_flops_are_those_of_the_matmuls():
    (layer,), rows = counted(SMALL).layers, 3
    width, tokens = SMALL.width, rows * SMALL.sequence_length
    params = jax.eval_shape(lambda: gpt.init(SMALL, jax.random.key(0)))
    leaves = jax.tree.leaves(params["layers"])
    weights = sum(leaf.size for leaf in leaves if leaf.ndim > 2) / SMALL.num_layers
    scores = 2 * 2 * tokens * SMALL.sequence_length * width
    assert layer.f.flops(rows) == 2 * weights * tokens + scores
    assert layer.b.flops(rows) == 2 * weights * tokens + 2 * scores
    assert layer.w.flops(rows) == 2 * weights * tokens
    head = 2 * SMALL.vocab_size * width * tokens
    assert counted(SMALL).head.flops(rows) == 3 * head


def test_devices_that_share_a_layer_share_its_work():
    one, two = counted(SMALL).layers[0], counted(SMALL, tensor=2).layers[0]
    for name in "fbw":
        assert getattr(two, name).flops(4) == getattr(one, name).flops(4) / 2
    assert {c.axis for c in two.f.collectives} == {"tensor"}
    # The sequence is gathered before attention and the MLP, and scattered after them.
    activation = 4 * SMALL.sequence_length * SMALL.width * 2
    assert sum(c.sent.at(4) for c in two.f.collectives) == pytest.approx(4 * activation / 2)
    assert not one.f.collectives


def test_matmuls_in_8_bits_are_as_many_and_twice_as_fast():
    (wide,), (narrow,) = counted(SMALL).layers, counted(SMALL, fp8=KERNELS).layers
    params = jax.eval_shape(lambda: gpt.init(SMALL, jax.random.key(0)))
    kernels = [leaf for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2]
    assert narrow.quantized == sum(leaf.size for leaf in kernels) / SMALL.num_layers
    h100, a100 = (devices.cluster(name, 8) for name in ("h100", "a100"))
    for of_16, of_8 in zip(wide.passes, narrow.passes, strict=True):
        assert of_16.flops(3) == of_8.flops(3)
        quantized = [kernel for kernel in of_8.kernels if kernel.kind == "fp8"]
        assert sum(k.flops.at(3) for k in quantized) == 2 * narrow.quantized * 3 * 32
        assert not any(kernel.kind == "fp8" for kernel in of_16.kernels)
    for cluster, speed in ((h100, 2), (a100, 1)):
        kernel = sizes.Kernel(sizes.Linear(1e15, 0), sizes.Linear(0, 0), "matmul")
        times = (
            cost.kernel_seconds(one, 1, cluster) - devices.LAUNCH_SECONDS
            for one in (kernel, kernel._replace(kind="fp8"))
        )
        assert next(times) == pytest.approx(speed * next(times))


KERNELS = ("*kernel",)
CASES = [
    ("1f1b-fused", 1, "stacked", 1, 0, "none", ()),
    ("zb-v", 2, "unrolled", 1, 1, "full", ()),
    ("1f1b", 1, "stacked", 1, 3, "full", ()),
    ("breadth-first-fused", 2, "stacked", 2, 3, "full", ()),
    ("interleaved", 2, "unrolled", 2, 2, "none", ()),
    ("zb-v", 2, "stacked", 2, 2, "none", ()),
    ("zb-v", 2, "unrolled", 2, 3, "dots", KERNELS),
]


@pytest.mark.parametrize(("schedule", "chunks", "weights", "slots", "zero", "remat", "fp8"), CASES)
def test_bytes_are_those_of_the_tick_loops_buffers(
    schedule, chunks, weights, slots, zero, remat, fp8, monkeypatch
):
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)  # as on GPUs
    plan = dataclasses.replace(
        PLAN, schedule=schedule, chunks=chunks, weights=weights, weight_slots=slots, zero=zero,
        remat=remat,
    )  # fmt: skip
    one = placed(SMALL, plan, counted(SMALL, remat, fp8=fp8))
    program = cost.program_of(one, published=True)
    predicted = cost.device_bytes(one, program)
    pipe = pipeline(
        SMALL, data=2, schedule=table_of(program).schedule, remat=remat, zero=zero,
        weights=weights, weight_slots=slots, compute_dtype="bfloat16", fp8=fp8,
    )  # fmt: skip
    carried = buffers(pipe, batch(SMALL, plan.batch_rows))
    kept = {name: tree_bytes(tree) for name, tree in carried.items()}
    outer = 4 * one.outer_parameters  # embedding and head are no buffers of the tick loop
    assert predicted["residuals"] == kept["until_b"] + kept["until_w"]
    assert predicted["crossing"] == kept["crossing"]
    assert predicted["inboxes"] == kept["x"] + kept["dy"] + kept.get("sent", 0)
    assert predicted["copies"] - (outer if zero == 3 else 0.0) == kept["weights"]
    assert predicted["gradients"] - outer == kept["gradients"] + kept.get("reduced", 0)
    assert predicted["moving"] == kept.get("moving", 0)
    placed_bytes = sum(
        leaf.dtype.itemsize * jnp.prod(jnp.array(leaf.sharding.shard_shape(leaf.shape)))
        for leaf in jax.tree.leaves(pipe.placed_params)
    )
    assert predicted["parameters"] == placed_bytes


@pytest.mark.parametrize("schedule", ["1f1b-fused", "zb-h1", "breadth-first-fused"])
def test_long_steps_lie_on_the_line_of_shorter_ones(schedule):
    chunks = 2 if schedule.startswith("breadth") else 1
    plan = dataclasses.replace(PLAN, schedule=schedule, chunks=chunks, microbatches=50)
    one = placed(SMALL, plan, counted(SMALL))
    program = cost.program_of(one, published=True)
    assert len(program.shorter()) == 2
    layer = cost.layer_costs(one)
    costs = layer.times(8 // 4 // chunks)
    schedule = table_of(program).schedule
    whole = device_clock(schedule, costs, together=program.together).makespan
    assert grown(program, lambda short: cost.replayed(short, layer)) == pytest.approx(whole)
    slots = table_of(program).num_slots
    residuals = cost.device_bytes(one, program)["residuals"]
    held = slots["until_b"] * one.mean("until_b") + slots["until_w"] * one.mean("until_w")
    assert residuals == pytest.approx(one.layers_per_chunk * held)


@pytest.mark.parametrize(
    ("remat", "milliseconds"),
    [("none", 2.67), ("full", 2.50)],
)
def test_layers_take_what_the_roofline_of_compiled_programs_says(remat, milliseconds):
    """Rows "1f1b, unrolled" of benchmarks/studies/h100.md, within 10%."""
    plan = dataclasses.replace(PLAN, remat=remat, weights="unrolled")
    one = placed(OF_ROOFLINE, plan, counted(OF_ROOFLINE, remat, gpus=True))
    costs = cost.layer_costs(one)
    assert 1e3 * (costs.f + costs.b + costs.w) == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(("microbatches", "milliseconds"), [(8, 1360), (32, 4869)])
def test_a_large_model_takes_what_its_compiled_program_does(microbatches, milliseconds):
    """gpt-52b on 64 H100s in benchmarks/studies/h100.md, shards within hosts, within 6%."""
    plan = Plan(
        stage=8, data=8, context=1, tensor=1, replica=1, schedule="breadth-first-fused",
        chunks=8, microbatches=microbatches, rows=1, remat="full", zero=3, weight_slots=2,
        weights="stacked",
    )  # fmt: skip
    one = placed(OF_52B, plan, counted(OF_52B, "full", gpus=True))
    found = cost.step_seconds(one, cost.program_of(one, published=True))
    assert 1e3 * sum(found.values()) == pytest.approx(milliseconds, rel=0.06)


def test_pairs_hide_what_layers_communicate():
    shape = {"chunks": 2, "tensor": 2, "microbatches": 16, "ends": True}
    sizes_of_two = counted(SMALL, tensor=2)

    def predicted(schedule: str) -> tuple[PlacedPlan, Program, dict[str, float]]:
        plan = dataclasses.replace(PLAN, schedule=schedule, **shape)
        on_devices = placed(SMALL, plan, sizes_of_two)
        program = cost.program_of(on_devices, published=True)
        return on_devices, program, cost.step_seconds(on_devices, program)

    pairs, program, step = predicted("dualpipe-v-published")
    apart, _, longer = predicted("dualpipe-v")
    assert cost.hidden_in_pairs(apart) == 0 < cost.hidden_in_pairs(pairs)
    of_stage = grown(program, lambda short: float(cost.paired_layers(short).sum(axis=0).mean()))
    # A stage runs its 2 layers for 16 microbatches; those that fill and drain have no pair.
    assert 20 < of_stage < 32
    saved = of_stage * cost.hidden_in_pairs(pairs)
    assert longer["layers"] - step["layers"] == pytest.approx(saved)
    assert cost.least_seconds(pairs) <= sum(step.values())


def test_sizes_survive_a_file():
    found = placed(SMALL, PLAN, counted(SMALL)).model
    read = sizes.ModelSizes.from_json(found.to_json(), source="sizes.json")
    assert dataclasses.asdict(read) == dataclasses.asdict(found)
    for text in ('{"name": 3}', "[" * 100_000):
        with pytest.raises(ArgumentError, match="holds no sizes of a model"):
            sizes.ModelSizes.from_json(text, source="sizes.json")


def test_clusters_by_name():
    found = devices.cluster("v100", 64, link="pcie:4,eth:100")
    assert (found.per_host, found.link(4), found.link(8)) == (4, found.within, found.across)
    wrong = {"device": "h10", "devices": 0, "link": "ib:400", "memory": -1.0}
    with pytest.raises(ArgumentError) as refused:
        devices.cluster(**wrong)
    for text in ("choose one of v100", "Nearest valid: 'h100'", "devices=0", "WITHIN", "memory=-1"):
        assert text in str(refused.value)
