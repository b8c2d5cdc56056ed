"""Experts over data shards in plans: what is counted, moved, kept, and written."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
import yaml

import jaxpipe
from jaxpipe.planning import cost, counting, devices, plans
from jaxpipe.planning.plans import PlacedPlan, Plan, table_of
from jaxpipe.planning.sizes import ModelSizes, Variant
from jaxpipe.runtime.measure.memory import tree_bytes
from jaxpipe.runtime.measure.traced import buffers
from jaxpipe.schedule import Costs
from models import gpt
from train import checks
from train.config import Config
from train.plan import Planned

CONFIG = gpt.GPTConfig(
    vocab_size=512, sequence_length=32, num_layers=4, width=32, num_heads=4, num_experts=4,
    experts_per_token=2, capacity_factor=1.0, dtype="bfloat16",
)  # fmt: skip
PLAN = Plan(2, 4, 1, 1, 1, "1f1b-fused", 1, 4, 2, "none", 3, 1, "stacked", expert=2)


def batch(rows: int):
    return {"tokens": jax.ShapeDtypeStruct((rows, CONFIG.sequence_length + 1), jnp.int32)}


def pipeline(
    *, config=CONFIG, schedule="1f1b", stage=1, data=1, expert=1, **options
) -> jaxpipe.Pipeline:
    shared = {"expert": expert} if expert > 1 else {}
    if isinstance(schedule, str):
        options["microbatches"] = 2
    return jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage", expert_axis="expert" if shared else None),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        mesh=jaxpipe.make_mesh(stage=stage, data=data, **shared),
        schedule=schedule,
        **options,
    )


@functools.cache
def model() -> ModelSizes:
    found = {
        Variant(1, 1, "none", expert): counting.sizes(
            pipeline(data=expert, expert=expert), batch, compute_bytes=2
        )
        for expert in (1, 2, 4)
    }
    return ModelSizes("experts", CONFIG.sequence_length, 4, 2, 2, 32, 132, found)


def placed(**changes) -> PlacedPlan:
    plan = dataclasses.replace(PLAN, **changes)
    return PlacedPlan(plan, model(), devices.cluster("h100", plan.stage * plan.data))


def test_experts_are_split_and_nothing_else():
    whole, half = (model().variants[Variant(1, 1, "none", n)].layers[0] for n in (1, 2))
    params = jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0)))
    experts = params["layers"]["mlp"]["experts"]
    of_experts = sum(leaf.size for leaf in jax.tree.leaves(experts)) // CONFIG.num_layers
    assert whole.expert_parameters == 0
    assert half.expert_parameters == of_experts / 2
    assert half.parameters == whole.parameters - of_experts / 2
    alone = dataclasses.replace(
        model(),
        variants={key: one for key, one in model().variants.items() if key.expert == 4},
    )
    assert alone.num_parameters == model().num_parameters


def test_tokens_are_exchanged_there_and_back():
    """Every expert has room for its share of a device's tokens; e - 1 of e devices are others."""
    rows = 3
    chosen = rows * CONFIG.sequence_length * CONFIG.experts_per_token
    for expert in (2, 4):
        layer = model().variants[Variant(1, 1, "none", expert)].layers[0]
        for name in ("f", "b"):
            exchanges = [
                one for one in getattr(layer, name).collectives if one.kind == "all_to_all"
            ]
            assert {one.axis for one in exchanges} == {"expert"}
            sent = sum(one.sent.at(rows) for one in exchanges)
            there_and_back = 2 * chosen * CONFIG.width * 2 * (expert - 1) / expert
            assert sent == pytest.approx(there_and_back, rel=0.1)  # and scores


def test_what_drops_nothing_costs_the_matmuls_of_chosen_experts_too():
    """As many FLOPs as with room for an even share, on one device and on two."""
    config = dataclasses.replace(CONFIG, capacity_factor=None)
    for expert in (1, 2):
        pipe = pipeline(config=config, data=expert, expert=expert)
        (found, *_), (with_room, *_) = (
            sizes.layers
            for sizes in (
                counting.sizes(pipe, batch, compute_bytes=2),
                model().variants[Variant(1, 1, "none", expert)],
            )
        )
        flops, expected = (
            sum(kernel.flops.at(PLAN.rows) for part in parts for kernel in part.kernels)
            for parts in ((layer.f, layer.b, layer.w) for layer in (found, with_room))
        )
        assert flops == pytest.approx(expected)


def test_nothing_hides_what_experts_exchange():
    within, across = (
        PlacedPlan(PLAN, model(), devices.cluster("h100", 8, link=f"nvlink:{n},ib:400"))
        for n in (8, 1)
    )
    layer = model().variants[within.variant].layers[0]
    slower = 1 / across.cluster.across - 1 / within.cluster.within
    for name in "fbw":
        sent = sum(one.sent.at(PLAN.rows) for one in getattr(layer, name).collectives)
        gained = getattr(cost.layer_costs(across), name) - getattr(cost.layer_costs(within), name)
        assert gained == pytest.approx(sent * slower)


@pytest.mark.parametrize(
    ("zero", "schedule", "chunks", "slots", "expert"),
    [
        (0, "1f1b-fused", 1, 1, 2),
        (1, "1f1b", 1, 1, 2),
        (1, "1f1b", 1, 1, 4),
        (3, "breadth-first-fused", 2, 2, 2),
    ],
)
def test_bytes_are_those_of_the_tick_loops_buffers(zero, schedule, chunks, slots, expert):
    one = placed(zero=zero, schedule=schedule, chunks=chunks, weight_slots=slots, expert=expert)
    program = cost.program_of(one, published=True)
    predicted = cost.device_bytes(one, program)
    pipe = pipeline(
        schedule=table_of(program).schedule, stage=2, data=4, expert=expert, zero=zero,
        weight_slots=slots, compute_dtype="bfloat16",
    )  # fmt: skip
    carried = buffers(pipe, batch(PLAN.batch_rows))
    kept = {name: tree_bytes(tree) for name, tree in carried.items()}
    outer = 4 * one.outer_parameters
    assert predicted["residuals"] == kept["until_b"] + kept["until_w"]
    assert predicted["copies"] - (outer if zero == 3 else 0.0) == kept["weights"]
    assert predicted["gradients"] - outer == kept["gradients"] + kept.get("reduced", 0)
    assert predicted["moving"] == kept.get("moving", 0)
    placed_bytes = sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(pipe.placed_params)
    )
    assert predicted["parameters"] == placed_bytes


def test_plans_have_meshes_that_the_trainer_accepts():
    cluster = devices.cluster("h100", 16)
    families = plans.families(model(), cluster, (32,), Counter())
    found = [one.plan for family in families for one in family]
    assert {plan.expert for plan in found} == {1, 2, 4}
    shape = dataclasses.asdict(CONFIG)
    small = {key: shape[key] for key in ("vocab_size", "num_layers", "width", "num_experts")}
    planned = Planned(Config(model=small), "experts")
    meshes = {(p.stage, p.data, p.expert, p.replica): p for p in found}
    for plan in meshes.values():
        written = yaml.safe_load(planned.write(plan, Costs(1, 1, 1), None))
        config = Config(model=small, mesh=written["mesh"])
        assert not [*checks.replicas(config), *checks.shared_axes(config)]
        assert config.mesh.expert == plan.expert


def test_a_file_of_sizes_says_what_experts_split():
    read = ModelSizes.from_json(model().to_json(), source="test")
    assert read.variants == model().variants


def test_only_a_model_with_experts_is_counted_with_them():
    for experts, expected in ((None, {1}), (4, {1, 2, 4})):
        small = {"vocab_size": 64, "num_layers": 1, "width": 8, "num_heads": 1}
        planned = Planned(Config(model=small | {"num_experts": experts}), "small")
        assert {expert for expert in (1, 2, 4, 8) if planned._may_share(1, 1, expert)} == expected
