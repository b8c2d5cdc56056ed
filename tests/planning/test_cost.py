"""The cost model against what it models: traces, tick tables, clocks, and figures of benchmarks."""

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from covering import some
from synthetic import NONE, synthetic

import jaxpipe
from jaxpipe.errors import ArgumentError
from jaxpipe.planning import cost, counting, devices, without_devices
from jaxpipe.planning.memory import device_bytes, known_residuals, least_bytes
from jaxpipe.planning.plans import Offload, PlacedPlan, Plan, Program, grown, table_of
from jaxpipe.planning.sizes import Kernel, Linear, ModelSizes, Sizes, Variant
from jaxpipe.runtime import assembly
from jaxpipe.runtime.defaults import RESIDUALS
from jaxpipe.runtime.memory import buffers, tree_bytes
from jaxpipe.runtime.tracing import traced_layers
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule import device_clock
from models.gpt import GPTConfig, init
from models.gpt import model as gpt_model

SMALL = GPTConfig(
    vocab_size=512, sequence_length=32, num_layers=8, width=32, num_heads=4, dtype="bfloat16"
)
EXPERTS = dataclasses.replace(
    SMALL, num_layers=4, num_experts=4, experts_per_token=2, capacity_factor=1.0
)
BOUNDED = dataclasses.replace(EXPERTS, width=256, capacity_factor=None, device_capacity_factor=1.25)
LONG = dataclasses.replace(SMALL, sequence_length=1024, width=64, num_kv_heads=2)
# Those of benchmarks/gpu_compile.py and benchmarks/gpu_hosts.py.
OF_ROOFLINE = GPTConfig(
    vocab_size=32768, sequence_length=1536, num_layers=16, width=2048, num_heads=16,
    dtype="bfloat16",
)  # fmt: skip
OF_52B = GPTConfig(
    vocab_size=32000, sequence_length=1024, num_layers=64, width=8192, num_heads=64,
    positions="learned", norm="layer", activation="gelu", bias=True, dtype="bfloat16",
)  # fmt: skip
KERNELS = ("*kernel",)
PLAN = Plan(
    stage=4, data=2, context=1, tensor=1, replica=1, schedule="1f1b-fused", chunks=1,
    microbatches=8, rows=2, remat="none", zero=Zero.NOTHING, weight_slots=1, weights="stacked",
)  # fmt: skip
ROOFLINE = devices.Efficiency(0.81, 0.90, attention=0.6, loads=0.0, sustained=1.0)
"""Assumptions of the roofline in benchmarks/studies/h100.md."""
OF_EXPERTS = {"stage": 2, "data": 4, "microbatches": 4, "expert": 2}
OF_SLICES = {"microbatches": 4, "remat": "full", "weights": "unrolled", "slices": 4}


def batch(config: GPTConfig, rows: int):
    shape = jax.ShapeDtypeStruct((rows, config.sequence_length), jnp.int32)
    return {"tokens": shape, "targets": shape}


def params(config: GPTConfig):
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def pipeline(config, schedule, *, data=1, tensor=1, expert=1, **options) -> jaxpipe.Pipeline:
    shared = {name: n for name, n in (("tensor", tensor), ("expert", expert)) if n > 1}
    axes = {f"{name}_axis": name for name in shared}
    mesh = jaxpipe.make_mesh(stage=schedule.num_stages, data=data, **shared)
    model = gpt_model(config, vocabulary_axis="stage", **axes)
    return jaxpipe.Pipeline(model, params(config), schedule=schedule, mesh=mesh, **options)


@functools.cache
def counted(config: GPTConfig, variant: Variant, *, gpus: bool = False, **precision: Any) -> Sizes:
    schedule = jaxpipe.schedules.build("1f1b", stages=1, microbatches=2, slices=variant.slices)
    devices = {"data": variant.expert, "expert": variant.expert, "tensor": variant.tensor}
    with without_devices.attention_of_gpus() if gpus else contextlib.nullcontext():
        pipe = pipeline(config, schedule, **devices, remat=variant.remat, **precision)
        rows, remats = functools.partial(batch, config), (variant.remat,)
        return counting.sizes(pipe, rows, compute_bytes=2, remats=remats)[variant.remat]


def placed(
    config: GPTConfig, *, gpus=False, fp8=(), recipe="tensorwise", link="nvlink:8,ib:400", **changes
) -> PlacedPlan:
    plan = PLAN._replace(**changes)
    variant = Variant(plan.context, plan.tensor, plan.remat, plan.expert, plan.slices)
    found = {variant: counted(config, variant, gpus=gpus, fp8=fp8, fp8_recipe=recipe)}
    length = config.sequence_length
    model = ModelSizes("test", length, 4, 2, 2, 64, 8 * length, found)
    return PlacedPlan(plan, model, devices.cluster("h100", plan.stage * plan.data, link=link))


def at_roofline(config: GPTConfig, **options) -> PlacedPlan:
    """A plan on devices that attain what the roofline assumes, without latency."""
    one = placed(config, gpus=True, **options)
    device = dataclasses.replace(one.cluster.device, efficiency=ROOFLINE, latency=0.0)
    return dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, device=device))


def layer_of(config: GPTConfig, **options):
    return placed(config, **options).sizes.layers[0]


def kernels_per_layer(config: GPTConfig) -> float:
    leaves = jax.tree.leaves(params(config)["layers"])
    return sum(leaf.size for leaf in leaves if leaf.ndim > 2) / config.num_layers


def test_flops_are_those_of_the_matmuls():
    found, rows = placed(SMALL).sizes, 3
    (layer,), tokens = found.layers, rows * SMALL.sequence_length
    weights = kernels_per_layer(SMALL)
    scores = 2 * 2 * tokens * SMALL.sequence_length * SMALL.width
    assert layer.f.flops(rows) == 2 * weights * tokens + scores
    assert layer.b.flops(rows) == 2 * weights * tokens + 2 * scores
    assert layer.w.flops(rows) == 2 * weights * tokens
    assert found.head.flops(rows) == 3 * 2 * SMALL.vocab_size * SMALL.width * tokens


@pytest.mark.parametrize("exposed", [0.0, 0.1])
def test_a_system_may_hide_collectives_within_layers(exposed):
    shown = placed(SMALL, tensor=2)
    cluster = dataclasses.replace(shown.cluster, exposed=exposed)
    hiding, rows = dataclasses.replace(shown, cluster=cluster), shown.plan.rows
    passes = shown.sizes.layers[0].passes
    sent = [one.sent.at(rows) for of_pass in passes for one in of_pass.collectives]
    seconds = sum(sent) / cluster.within + len(sent) * cluster.device.latency
    costs = [cost.layer_costs(one) for one in (shown, hiding)]
    more, less = (one.f + one.b + one.w for one in costs)
    assert min(sent) > 0
    assert more - less == pytest.approx((1 - exposed) * seconds)


def test_devices_that_share_a_layer_share_its_work():
    one, two = layer_of(SMALL), layer_of(SMALL, tensor=2)
    for whole, half in zip(one.passes, two.passes, strict=True):
        assert half.flops(4) == whole.flops(4) / 2
    assert {c.axis for c in two.f.collectives} == {"tensor"}
    # The sequence is gathered before attention and the MLP, and scattered after them.
    activation = 4 * SMALL.sequence_length * SMALL.width * 2
    assert sum(c.sent.at(4) for c in two.f.collectives) == pytest.approx(4 * activation / 2)
    assert not one.f.collectives


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_matmuls_in_8_bits_are_as_many_and_as_fast_as_measured_alone(recipe):
    wide, narrow = layer_of(SMALL), layer_of(SMALL, fp8=KERNELS, recipe=recipe)
    assert narrow.quantized == (kernels_per_layer(SMALL) if recipe == "tensorwise" else 0)
    for of_16, of_8 in zip(wide.passes, narrow.passes, strict=True):
        assert of_16.flops(3) == of_8.flops(3)
        kind = "fp8" if recipe == "tensorwise" else "mxfp8"
        quantized = [kernel for kernel in of_8.kernels if kernel.kind == kind]
        assert sum(k.flops.at(3) for k in quantized) == 2 * kernels_per_layer(SMALL) * 3 * 32
        assert not any("fp8" in kernel.kind for kernel in of_16.kernels)
    for name, speed in (("h100", 1402.6 / 794.5), ("a100", 1)):
        kernel, cluster = Kernel(Linear(1e15, 0), Linear(0, 0), "matmul"), devices.cluster(name, 8)
        of_16, of_8 = (
            cost.kernel_seconds(one, 1, cluster) - devices.LAUNCH_SECONDS
            for one in (kernel, kernel._replace(kind="fp8"))
        )
        assert of_16 == pytest.approx(speed * of_8)


def test_experts_are_split_and_nothing_else():
    whole, half = layer_of(EXPERTS), layer_of(EXPERTS, **OF_EXPERTS)
    experts = params(EXPERTS)["layers"]["mlp"]["experts"]
    of_experts = sum(leaf.size for leaf in jax.tree.leaves(experts)) / EXPERTS.num_layers
    assert (whole.expert_parameters, half.expert_parameters) == (0, of_experts / 2)
    assert half.parameters == whole.parameters - of_experts / 2
    assert (
        placed(EXPERTS, **OF_EXPERTS).model.num_parameters == placed(EXPERTS).model.num_parameters
    )


@pytest.mark.parametrize(("config", "expert"), [(EXPERTS, 2), (EXPERTS, 4), (BOUNDED, 4)])
def test_tokens_are_exchanged_there_and_back_and_nothing_hides_it(config, expert):
    """Every expert or device has room for its share of a device's tokens; e - 1 of e devices are
    others."""
    options = OF_EXPERTS | {"expert": expert}
    within, across = (placed(config, link=f"nvlink:{n},ib:400", **options) for n in (8, 1))
    layer, rows = within.sizes.layers[0], PLAN.rows
    chosen = rows * config.sequence_length * config.experts_per_token
    chosen *= config.device_capacity_factor or 1  # each device has one expert
    slower = 1 / across.cluster.across - 1 / within.cluster.within
    for name in "fbw":
        collectives = getattr(layer, name).collectives
        exchanges = [one for one in collectives if one.kind == "all_to_all"]
        if name != "w":
            assert {one.axis for one in exchanges} == {"expert"}
            sent = sum(one.sent.at(rows) for one in exchanges)
            there_and_back = 2 * chosen * config.width * 2 * (expert - 1) / expert
            assert sent == pytest.approx(there_and_back, rel=0.1)  # and scores
        sent = sum(one.sent.at(rows) for one in collectives)
        gained = getattr(cost.layer_costs(across), name) - getattr(cost.layer_costs(within), name)
        assert gained == pytest.approx(sent * slower)


@pytest.mark.parametrize(("factor", "expert"), [(None, 1), (1.07, 4)])
def test_one_trace_tells_what_layers_keep_at_any_number_of_rows(factor, expert):
    """Rooms of experts are rounded up: they grow with the rows, and are no multiple of them."""
    config = dataclasses.replace(BOUNDED, device_capacity_factor=factor)
    (found,) = counted(config, Variant(1, 1, "none", expert)).layers
    schedule = jaxpipe.schedules.build("1f1b", stages=1, microbatches=2)
    pipe = pipeline(config, schedule, data=expert, expert=expert, remat="none")
    for rows in (3, 16):
        layers, _ = traced_layers(pipe, batch(config, 2 * expert * rows))
        (split,) = (kind.split for kind in layers.kinds)
        for name in ("until_b", "until_w", "crossing"):
            expected = tree_bytes(list(getattr(split, name)))
            assert getattr(found, name).at(rows) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(("capacity", "expert"), [(1.0, 1), (None, 2)])
def test_a_token_costs_the_experts_it_is_sent_to(capacity, expert):
    """Two of 16 beside a dense MLP as wide as the two, with room for an even share or for all."""
    wide = {"num_experts": 16, "width": 64, "expert_width": 512, "capacity_factor": capacity}
    mixture = dataclasses.replace(EXPERTS, **wide)
    without = dict.fromkeys(("num_experts", "expert_width", "capacity_factor"))
    dense = dataclasses.replace(mixture, **without, mlp_width=1024)
    found = placed(mixture, **OF_EXPERTS | {"expert": expert}).sizes.layer_flops(PLAN.rows)
    needed = placed(dense, stage=2).sizes.layer_flops(PLAN.rows)
    assert 1 <= found / needed < 1.25


def test_slices_have_the_flops_of_their_sequence():
    whole, cut = (layer_of(LONG, gpus=True, **OF_SLICES | {"slices": k}) for k in (1, 4))
    for of_whole, of_slice in zip(whole.passes, cut.passes, strict=True):
        assert 4 * of_slice.flops(2) == pytest.approx(of_whole.flops(2))
    keys = LONG.sequence_length * LONG.num_kv_heads * (LONG.width // LONG.num_heads)
    assert cut.carry.at(2) == 2 * 2 * keys * 2  # rows, keys and values, bytes


def test_layers_whose_equations_depend_on_the_rows_are_refused():
    def layer(w, x, batch, rng):
        return jnp.tanh(x @ w) if len(x) > 2 else x @ w

    model = jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"] @ outer["embed"],
        layer=layer,
        head_loss=lambda outer, x, batch, rng: jnp.mean((x @ outer["head"]) ** 2),
    )
    square = jax.ShapeDtypeStruct((6, 6), jnp.float32)
    layers = jax.ShapeDtypeStruct((2, 6, 6), jnp.float32)
    params = {"embed": square, "layers": layers, "head": square}
    pipe = jaxpipe.Pipeline(
        model, params, schedule=jaxpipe.schedules.build("1f1b", stages=1, microbatches=2),
        mesh=jaxpipe.make_mesh(stage=1),
    )  # fmt: skip

    def rows(count):
        return {"x": jax.ShapeDtypeStruct((count, 6), jnp.float32)}

    with pytest.raises(ValueError, match="Layer 0 runs other equations for 2 rows than for"):
        counting.sizes(pipe, rows, compute_bytes=4, remats=("none",))


BREADTH_FIRST = {"schedule": "breadth-first-fused", "chunks": 2, "weight_slots": 2, "zero": Zero(3)}
UNROLLED = {"weights": "unrolled", "chunks": 2}
CASES = [
    (SMALL, (), {}),
    (SMALL, (), UNROLLED | {"schedule": "zb-v", "zero": Zero(1), "remat": "full"}),
    (SMALL, (), BREADTH_FIRST | {"remat": "full"}),
    (
        *(SMALL, KERNELS),
        UNROLLED | {"schedule": "zb-v", "weight_slots": 2, "zero": Zero(3), "remat": "dots"},
    ),
    (EXPERTS, (), OF_EXPERTS | BREADTH_FIRST),
    (LONG, (), OF_SLICES | {"schedule": "zb-h1"}),
    (SMALL, (), {"schedule": "1f1b", "zero": Zero(3), "remat": "full"}),
    (SMALL, (), UNROLLED | {"schedule": "interleaved", "weight_slots": 2, "zero": Zero(2)}),
    (EXPERTS, (), OF_EXPERTS),
    (BOUNDED, (), OF_EXPERTS | {"schedule": "1f1b", "zero": Zero(1), "expert": 4}),
    (LONG, (), OF_SLICES | {"schedule": "interleaved-fused", "chunks": 2}),
]


@pytest.mark.parametrize(("config", "fp8", "changes"), some(CASES, *CASES[:6]))
def test_bytes_are_those_of_the_tick_loops_buffers(config, fp8, changes, monkeypatch):
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)  # as on GPUs
    one = placed(config, gpus=config is LONG, fp8=fp8, **changes)
    plan, program = one.plan, cost.program_of(one, published=True)
    predicted = device_bytes(one, program)
    pipe = pipeline(
        config, table_of(program).schedule, data=plan.data, expert=plan.expert, remat=plan.remat,
        zero=plan.zero, weights=plan.weights, weight_slots=plan.weight_slots,
        compute_dtype="bfloat16", fp8=fp8,
    )  # fmt: skip
    carried = buffers(pipe, batch(config, plan.batch_rows))
    kept = {name: tree_bytes(tree) for name, tree in carried.items()}
    outer = 4 * one.outer_parameters  # embedding and head are no buffers of the tick loop
    assert predicted["residuals"] == kept["until_b"] + kept["until_w"]
    assert predicted["crossing"] == kept["crossing"]
    assert predicted["inboxes"] == kept["x"] + kept["dy"] + kept.get("messages", 0)
    assert predicted["carries"] == kept.get("carry", 0) + kept.get("carry_gradient", 0)
    assert predicted["copies"] - (outer if plan.zero.shards_weights else 0.0) == kept["weights"]
    assert predicted["gradients"] - outer == kept["gradients"] + kept.get("reduced", 0)
    assert predicted["moving"] == kept.get("moving", 0)
    assert predicted["parameters"] == sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(pipe.placed_params)
    )


@pytest.mark.parametrize(
    ("zero", "weight_slots", "weights"),
    some(
        [
            *((0, 1, "unrolled"), (2, 2, "unrolled"), (3, 1, "unrolled"), (3, 2, "stacked")),
            (3, 2, "unrolled"),
        ],
        (3, 2, "unrolled"),
    ),
)
def test_layers_that_differ_have_the_room_that_the_executor_gives_them(zero, weight_slots, weights):
    """A dense layer in front of mixtures: unrolled, in the row and the slot of its chunk."""
    config = dataclasses.replace(EXPERTS, num_layers=8, dense_layers=1)
    options = {"zero": Zero(zero), "weight_slots": weight_slots, "weights": weights}
    one = placed(config, stage=2, microbatches=4, schedule="interleaved", chunks=4, **options)
    program = cost.program_of(one, published=True)
    predicted = device_bytes(one, program)
    pipe = pipeline(
        config, table_of(program).schedule, data=2, remat="none", compute_dtype="bfloat16",
        **options,
    )  # fmt: skip
    carried = buffers(pipe, batch(config, one.plan.batch_rows))
    kept = {name: tree_bytes(tree) for name, tree in carried.items()}
    outer = 4 * one.outer_parameters
    copies = predicted["copies"] - (outer if zero == 3 else 0.0)
    assert copies == pytest.approx(kept["weights"])
    sums = kept["gradients"] + kept.get("reduced", 0)
    assert predicted["gradients"] - outer == pytest.approx(sums)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (SMALL, {"schedule": "1f1b-fused", "microbatches": 50}),
        (SMALL, {"schedule": "zb-h1", "microbatches": 50}),
        (SMALL, {"schedule": "breadth-first-fused", "chunks": 2, "microbatches": 50}),
        (LONG, OF_SLICES | {"microbatches": 30}),
    ],
)
def test_long_steps_lie_on_the_line_of_shorter_ones(config, changes):
    """Seconds are those of the device clock, where later slices take longer, by their attention."""
    one = placed(config, gpus=config is LONG, **changes)
    program, layer = cost.program_of(one, published=True), cost.layer_costs(one)
    assert len(program.shorter()) == 2
    assert (0 < layer.attention < 1) == (config is LONG)
    schedule = table_of(program).schedule
    assert schedule.num_slices == one.plan.slices
    costs = layer.times(8 // 4 // one.plan.chunks)
    whole = device_clock(schedule, costs, together=program.together).makespan
    assert grown(program, lambda short: cost.replayed(short, layer)) == pytest.approx(whole)
    slots = table_of(program).num_slots
    held = slots["until_b"] * one.mean("until_b") + slots["until_w"] * one.mean("until_w")
    residuals = device_bytes(one, program)["residuals"]
    assert residuals == pytest.approx(one.layers_per_chunk * held)


BUS = 0.8 * 64e9
"""Bytes per second between an H100 and its host."""


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_the_optimizers_state_on_the_host_takes_what_activations_leave_of_it(rows):
    """And goes over the bus twice."""
    here, there = (
        placed(SMALL, rows=rows, zero=Zero.STATE, on_host=Offload(state=on_host))
        for on_host in (False, True)
    )
    program = cost.program_of(here, published=True)
    kept, moved = (device_bytes(one, program) for one in (here, there))
    state = kept["optimizer"]
    assert state == 2 * 4 * (here.stage_parameters + here.outer_parameters) / PLAN.data
    layers = sum(kept[name] for name in ("residuals", "crossing", "inboxes", "moving", "working"))
    rest = sum(kept.values()) - layers - state
    assert sum(moved.values()) == pytest.approx(rest + max(layers, state))
    assert least_bytes(there) <= sum(moved.values())
    seconds, longer = (cost.step_seconds(one, program) for one in (here, there))
    more = {name: longer[name] - seconds[name] for name in longer}
    assert more.pop("update") == pytest.approx(2 * state / BUS)
    assert not any(more.values())


@pytest.mark.parametrize("rows", [1, 64])
def test_residuals_on_the_host_leave_the_device_and_take_the_bus(rows):
    here, there = (
        placed(SMALL, rows=rows, on_host=Offload(residuals=on_host)) for on_host in (False, True)
    )
    program = cost.program_of(there, published=True)
    bytes_here, bytes_there = (device_bytes(one, program) for one in (here, there))
    kept = bytes_here.pop("residuals")
    assert bytes_there.pop("residuals") == 0 < kept
    assert bytes_here == bytes_there
    assert least_bytes(there) <= sum(bytes_there.values())
    one, other = cost.layer_costs(here), cost.layer_costs(there)
    layer = here.sizes.layers[0]
    sent = (layer.until_b.at(rows) + layer.until_w.at(rows)) / BUS
    assert other.f == pytest.approx(one.f + sent)
    assert other.b == pytest.approx(one.b + sent)
    assert other.w == one.w  # nothing is kept for W
    found, longer = (cost.step_seconds(one, program)["transfers"] for one in (here, there))
    assert longer - found == pytest.approx(kept / BUS)


def test_slices_fill_the_pipeline_of_few_sequences():
    cut, whole = (placed(LONG, gpus=True, **OF_SLICES | {"slices": k}) for k in (4, 1))
    steps = [cost.step_seconds(one, cost.program_of(one, published=True)) for one in (cut, whole)]
    shares = [step["waits"] / (step["waits"] + step["layers"]) for step in steps]
    assert shares[0] < shares[1]
    assert cost.least_seconds(cut) <= sum(steps[0].values())


@pytest.mark.parametrize(
    ("schedule", "remat", "weights", "milliseconds"),
    [
        ("1f1b", "none", "unrolled", 1.808),
        ("1f1b", "dots", "unrolled", 1.798),
        ("1f1b-fused", "full", "unrolled", 2.228),
        ("1f1b-fused", "dots", "stacked", 2.36),
    ],
)
def test_layers_take_what_the_roofline_of_compiled_programs_says(
    schedule, remat, weights, milliseconds
):
    """The table of layers in benchmarks/studies/h100.md, of ``make gpu-roofline``, within 5%."""
    one = at_roofline(OF_ROOFLINE, schedule=schedule, remat=remat, weights=weights)
    costs = cost.layer_costs(one, cost.program_of(one, published=True))
    assert 1e3 * (costs.f + costs.b + costs.w) == pytest.approx(milliseconds, rel=0.05)


def test_a_program_with_too_many_layers_in_its_loops_copies_values_into_slots():
    """zb-v on 8 stages knows 16 slots of 2 layers, but not 64 of 8."""
    shape = {"stage": 8, "schedule": "zb-v", "chunks": 2, "microbatches": 32, "remat": "dots"}
    short, long = (
        placed(dataclasses.replace(SMALL, num_layers=16 * n), weights="unrolled", **shape)
        for n in (2, 16)
    )
    programs = [cost.program_of(one, published=True) for one in (short, long)]
    known = [known_residuals(*one) for one in zip((short, long), programs, strict=True)]
    assert known == [RESIDUALS, ()]
    layer = long.sizes.layers[0]
    copied = sum(one.values.at(2) + one.crossing.at(2) for one in layer.passes)
    few, many = (cost.layer_costs(*one) for one in zip((short, long), programs, strict=True))
    more = many.f + many.b + many.w - few.f - few.b - few.w
    assert more == pytest.approx(copied / long.cluster.bandwidth)


@pytest.mark.parametrize(("microbatches", "milliseconds"), [(16, 2219), (32, 4196)])
def test_a_large_model_takes_what_its_compiled_program_does(microbatches, milliseconds):
    """gpt-52b on 64 H100s in benchmarks/studies/h100.md, shards within hosts, within 6%.

    About 0.12 s of each step are not predicted, of 1.25 s with 8 microbatches.
    """
    shape = {"stage": 8, "data": 8, "chunks": 8, "microbatches": microbatches, "rows": 1}
    one = at_roofline(OF_52B, **BREADTH_FIRST | shape, remat="full")
    found = cost.step_seconds(one, cost.program_of(one, published=True)) | {"stragglers": 0.0}
    assert 1e3 * sum(found.values()) == pytest.approx(milliseconds, rel=0.06)


def test_pairs_hide_what_layers_communicate():
    def predicted(schedule: str) -> tuple[PlacedPlan, Program, dict[str, float]]:
        shape = {"chunks": 2, "tensor": 2, "microbatches": 16, "ends": True}
        one = placed(SMALL, schedule=schedule, **shape)
        program = cost.program_of(one, published=True)
        return one, program, cost.step_seconds(one, program)

    pairs, program, step = predicted("dualpipe-v-published")
    apart, _, longer = predicted("dualpipe-v")
    assert cost.hidden_in_pairs(apart) == 0 < cost.hidden_in_pairs(pairs)
    of_stage = grown(program, lambda short: float(cost.paired_layers(short).sum(axis=0).mean()))
    # A stage runs its 2 layers for 16 microbatches; those that fill and drain have no pair.
    assert 20 < of_stage < 32
    saved = of_stage * cost.hidden_in_pairs(pairs)
    assert longer["layers"] - step["layers"] == pytest.approx(saved)
    assert cost.least_seconds(pairs) <= sum(step.values())


@pytest.mark.parametrize(("zero", "depth"), [(Zero.NOTHING, 20), (Zero.STATE, 20), (Zero.STATE, 4)])
def test_an_update_of_whole_matrices_is_spread_and_exchanged(zero, depth):
    """8 data shards take turns at 20 layers of a stage: each multiplies 3 of them; or 2 have one
    of 4 layers, one of them two of its matrices, and the other the third."""
    plain = synthetic(NONE, layers=2 * depth)
    muon = dataclasses.replace(plain, update_flops=(3e11, 5e11, 2e11))
    plan = PLAN._replace(stage=2, data=8, zero=zero)
    cluster = devices.cluster("h100", 16)
    found, without = (PlacedPlan(plan, model, cluster) for model in (muon, plain))
    update, less = (
        cost.step_seconds(one, cost.program_of(one))["update"] for one in (found, without)
    )
    layer = 4 * 12 * 4096**2
    # With ZeRO, 7/8 of a layer leave the device and come back; without, the results of 7 come.
    moved = layer * (2 * 7 / 8 if zero.shards_state else 7)
    flops, trips = {20: (1e12, 3), 4: (5e11, 1)}[depth]
    seconds = flops / (0.5 * cluster.flops) + moved / found.data_link
    assert update - less == pytest.approx(trips * seconds)
    assert cost.least_seconds(found) > cost.least_seconds(without)


def test_sizes_survive_a_file():
    for options in ({"config": SMALL}, {"config": EXPERTS} | OF_EXPERTS):
        model = placed(**options).model
        read = ModelSizes.from_json(model.to_json(), source="sizes.json")
        assert dataclasses.asdict(read) == dataclasses.asdict(model)
    for text in ('{"name": 3}', "[" * 100_000):
        with pytest.raises(ArgumentError, match="holds no sizes of a model"):
            ModelSizes.from_json(text, source="sizes.json")


def test_clusters_by_name():
    found = devices.cluster("v100", 64, link="pcie:4,eth:100")
    assert (found.per_host, found.link(4), found.link(8)) == (4, found.within, found.across)
    wrong = {"device": "h10", "devices": 0, "link": "ib:400", "memory": -1.0}
    with pytest.raises(ArgumentError) as refused:
        devices.cluster(**wrong)
    for text in ("choose one of v100", "Nearest valid: 'h100'", "devices=0", "WITHIN", "memory=-1"):
        assert text in str(refused.value)
