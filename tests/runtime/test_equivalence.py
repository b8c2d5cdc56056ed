"""Every schedule, mesh, option and kind of layers gives the unpipelined loss and gradients.

Of the schedules, eight of different structure are compiled; the tables of all are replayed in
`test_schedules`. Every option meets two or three of them, and every pair of values in a slow test.
"""

from __future__ import annotations

import itertools
import math

import jax
import optax
import pytest
import toys
from covering import covering

from jaxpipe.schedule import catalog

STAGES, DATA, ZERO = (1, 2, 4), (1, 2), (0, 1, 2, 3)
REMAT, MICROBATCHES = ("none", "dots", "full"), (1, 3, 8)
REPLICAS = {"stage": 2, "data": 4, "replica": 2}

# fmt: off
CASES = [
    ("tied", "1f1b", {"stage": 4, "data": 2},
     {"zero": 3, "microbatches": 3, "keyed": True}),
    ("untied", "1f1b-fused", {"stage": 1}, {"remat": "dots", "microbatches": 1}),
    ("tied", "1f1b-fused", REPLICAS,
     {"zero": 1, "remat": "full", "weights": "unrolled", "residuals": "host"}),
    ("tied", "zb-v", {"stage": 2, "data": 2},
     {"zero": 2, "remat": "dots", "weights": "unrolled", "num_layers": 4, "weight_slots": 2}),
    ("untied", "dualpipe-v", {"stage": 2, "data": 2}, {"zero": 3, "remat": "full"}),
    ("untied", "hanayo", {"stage": 2, "data": 2}, {"zero": 1, "residuals": "host"}),
    ("ends", "interleaved", {"stage": 2, "data": 2},
     {"zero": 2, "remat": "dots", "weights": "unrolled"}),
    ("ends", "breadth-first", {"stage": 4, "data": 2},
     {"zero": 3, "microbatches": 3, "keyed": True}),
    ("uneven", "1f1b", {"stage": 4, "data": 2},
     {"zero": 3, "layer_counts": (1, 4, 2, 1), "keyed": True, "residuals": "host"}),
    ("stateful", "zb-v", REPLICAS, {"zero": 3, "remat": "full"}),
    ("adapted", "zb-v", {"stage": 2, "data": 2}, {"zero": 1, "remat": "dots"}),
    ("adapted tuple", "1f1b-fused", {"stage": 2, "data": 2},
     {"zero": 3, "remat": "full", "keyed": True}),
    ("mixture", "gpipe", {"stage": 4, "data": 2},
     {"zero": 3, "remat": "dots", "microbatches": 3}),
    ("mixture stateful", "breadth-first-fused", {"stage": 2},
     {"microbatches": 3, "together": True}),
    ("split", "zb-v", {"stage": 2, "data": 2}, {"zero": 3, "weights": "unrolled"}),
    ("split tuple", "1f1b", {"stage": 2, "data": 2}, {"zero": 2, "remat": "full", "keyed": True}),
    ("split ends", "1f1b-fused", {"stage": 2}, {}),
]
# fmt: on


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("name", "schedule", "sizes", "options"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in CASES],
)
def test_results_equal_those_of_the_unpipelined_model(name, schedule, sizes, options, monkeypatch):
    options = dict(options)
    if options.pop("together", False):
        toys.compute_together(monkeypatch)
    pipe = toys.check(name, schedule, sizes, **options)
    assert pipe.table.together == (name in ("tied", "untied", "split", "split tuple")) or (
        name == "mixture stateful"
    )
    if name == "ends":
        no_stage_keeps_a_whole_table(pipe)


def no_stage_keeps_a_whole_table(pipe) -> None:
    """Nor its moments, between steps."""
    state = pipe.optimizer_placing(optax.adam(1e-3)).placed
    for tree in (pipe.placed_params, state[0].mu, state[0].nu):
        for w in jax.tree.leaves({name: tree[name] for name in ("embed", "head")}):
            kept = math.prod(w.sharding.shard_shape(w.shape))
            divides = any(n % pipe.mesh.size == 0 for n in w.shape)
            assert not divides or w.ndim < 2 or kept * pipe.mesh.shape["stage"] <= w.size


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "gpipe-fused", "1f1b", "1f1b-fused"])
def test_the_toy_everywhere(schedule):
    grid = itertools.product(("tied", "untied"), STAGES, DATA, ZERO, REMAT, MICROBATCHES)
    for name, stages, data, zero, remat, microbatches in grid:
        if data > 1 or zero == 0:  # one data shard has nothing to shard
            sizes = {"stage": stages, "data": data}
            options = {"remat": remat, "microbatches": microbatches, "num_layers": 6}
            toys.check(name, schedule, sizes, zero=zero, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", toys.NAMES)
def test_every_pair_of_values(name):
    """All schedules, on meshes that eight devices make."""
    stages, shards = (2,) if name.startswith("split") else (2, 4), ((1, 1), (2, 1), (2, 2))
    one_tree = toys.named(name).model.layers_are_alike
    weights = ("stacked", "unrolled") if one_tree else ("stacked",)
    schedules = [entry.name for entry in catalog.executable()]
    grid = itertools.product(schedules, stages, shards, ZERO, REMAT, weights, (False, True))
    cases = [case for case in grid if case[2] != (1, 1) or case[3] == 0]
    for schedule, stage, (data, replica), zero, remat, layout, keyed in covering(cases):
        sizes = {"stage": stage, "data": data, "replica": replica}
        options = {"zero": zero, "remat": remat, "weights": layout, "keyed": keyed}
        toys.check(name, schedule, sizes, **options)
