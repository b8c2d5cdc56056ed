"""Every schedule, mesh, option and kind of layers gives the unpipelined loss and gradients.

Of the schedules, five of different structure are compiled; the tables of all are replayed in
`test_schedules`. Every option meets two or three of them, and every pair of values in a slow test.
"""

import functools
import itertools
import math

import jax
import optax
import pytest
import toys
from covering import covering, some

from jaxpipe.runtime import assembly, defaults
from jaxpipe.runtime.layers.model import layer_key
from jaxpipe.runtime.memory import buffers
from jaxpipe.runtime.tick import setup
from jaxpipe.runtime.trees import num_layers
from jaxpipe.schedule import Costs, catalog

ZERO, REMAT = (0, 1, 2, 3), ("none", "dots", "full")
REPLICAS = {"stage": 2, "data": 4, "replica": 2}

THREE_CHUNKS = catalog.build("interleaved", stages=2, microbatches=4, chunks=3)
"""Chunks of which two fit into slots."""
PACED = catalog.build(
    "breadth-first", stages=2, microbatches=4, chunks=2, costs=Costs(0.4, 1, 0.5, message=1.2)
)
"""Ticks are left out, so that late messages have time, and W share those of others."""

# fmt: off
CASES = [
    ("tied", "1f1b", {"stage": 4, "data": 2},
     {"zero": 3, "microbatches": 3, "keyed": True}),
    ("tied", "zb-v", {"stage": 4, "data": 2},
     {"zero": 2, "weights": "unrolled", "weight_slots": 2, "microbatches": 16, "tiles": True,
      "late": True}),
    ("ends", "interleaved", {"stage": 2, "data": 2},
     {"zero": 2, "remat": "dots", "weights": "unrolled", "late": True, "num_layers": 5}),
    ("uneven", "1f1b", {"stage": 4, "data": 2},
     {"zero": 3, "layer_counts": (1, 4, 2, 1), "keyed": True, "residuals": "host", "tiles": True}),
    ("stateful", "zb-v", REPLICAS, {"zero": 3, "remat": "full"}),
    ("adapted", "zb-v", {"stage": 2, "data": 2}, {"zero": 1, "remat": "dots"}),
    ("mixture stateful", "breadth-first-fused", {"stage": 2},
     {"microbatches": 3, "together": True}),
    ("split", "zb-v", {"stage": 2, "data": 2}, {"zero": 3, "weights": "unrolled", "late": True}),
    ("split tuple", "1f1b-fused", {"stage": 2, "data": 2},
     {"zero": 2, "weights": "unrolled", "keyed": True}),
    ("places", "zb-v", {"stage": 2, "data": 2},
     {"num_layers": 7, "layer_counts": (2, 2, 2, 1), "zero": 3, "weight_slots": 2, "late": True,
      "remat": "dots"}),
    ("places", "1f1b-fused", {"stage": 2, "data": 2},
     {"num_layers": 6, "layer_counts": (4, 2), "zero": 3, "residuals": "host", "keyed": True}),
    # Chunks that begin with either kind; two of them lie in one slot.
    ("places", THREE_CHUNKS, {"stage": 2, "data": 2},
     {"num_layers": 11, "layer_counts": (1, 2, 2, 2, 1, 3), "zero": 3, "weight_slots": 2,
      "late": True, "room": True}),
    ("places", "zb-v", {"stage": 2, "data": 2},
     {"num_layers": 7, "layer_counts": (1, 2, 1, 3), "late": True, "remat": "full"}),
    ("untied", PACED, {"stage": 2, "data": 2},
     {"zero": 3, "microbatches": 4, "late": True, "slices": True}),
]
SLOW = [
    ("tied", "1f1b-fused", REPLICAS,
     {"zero": 1, "remat": "full", "weights": "unrolled", "residuals": "host"}),
    ("untied", "1f1b-fused", {"stage": 1}, {"remat": "dots", "microbatches": 1}),
    ("untied", "dualpipe-v", {"stage": 2, "data": 2}, {"zero": 3, "remat": "full"}),
    ("mixture", "gpipe", {"stage": 4, "data": 2},
     {"zero": 3, "remat": "dots", "microbatches": 3}),
    ("split ends", "1f1b-fused", {"stage": 2}, {}),
    ("tied", THREE_CHUNKS, {"stage": 2, "data": 2},
     {"zero": 3, "weights": "unrolled", "weight_slots": 2}),
    ("untied", "hanayo", {"stage": 2, "data": 2}, {"zero": 1, "residuals": "host"}),
    ("ends", "breadth-first", {"stage": 4, "data": 2},
     {"zero": 3, "microbatches": 3, "keyed": True}),
    ("adapted tuple", "1f1b-fused", {"stage": 2, "data": 2},
     {"zero": 3, "remat": "full", "keyed": True}),
    ("adapted tuple", "1f1b", {"stage": 2, "data": 2},
     {"zero": 3, "weights": "unrolled", "weight_slots": 2, "late": True}),
    ("split tuple", "1f1b", {"stage": 2, "data": 2}, {"zero": 2, "remat": "full", "keyed": True}),
    ("uneven", "1f1b-fused", {"stage": 4, "data": 2},
     {"zero": 3, "layer_counts": (1, 4, 2, 1), "weights": "unrolled", "keyed": True, "late": True,
      "room": True}),
    ("stateful", "zb-v", REPLICAS, {"zero": 2, "weights": "unrolled"}),
]
# fmt: on


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("name", "schedule", "sizes", "options"),
    [
        *(pytest.param(*case, id=case[0]) for case in CASES),
        *(pytest.param(*case, marks=pytest.mark.slow, id=case[0]) for case in SLOW),
    ],
)
def test_results_equal_those_of_the_unpipelined_model(name, schedule, sizes, options, monkeypatch):
    """Devices with tiles keep values of one kind of layers in their shapes, as TPUs do; messages
    are late where devices transfer while they compute, as GPUs do, and there unrolled programs know
    the slots of what layers keep, and stacked ones do where XLA fuses slices. Kinds of layers share
    slots whatever room they need."""
    changes = {"together", "tiles", "late", "slices", "room"} & options.keys()
    options = {key: value for key, value in options.items() if key not in changes}
    if "together" in changes:
        toys.compute_together(monkeypatch)
    if "tiles" in changes:
        monkeypatch.setattr(assembly, "stores_tiles", lambda mesh: True)
    monkeypatch.setattr(setup, "FUSES_SLICES", "slices" in changes)
    if "room" in changes:
        monkeypatch.setattr(defaults, "MOST_EXCESS", 9)
    if "late" in changes:
        monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)
    pipe = toys.check(name, schedule, sizes, **options)
    assert any(channel.late_edges for channel in pipe.table.channels) == ("late" in changes)
    if "tiles" in changes:
        kept = buffers(pipe, toys.named(name).batch(32))
        parts = jax.tree.leaves([kept.get(part) for part in ("x", "dy", "until_b", "until_w")])
        assert (max(leaf.ndim for leaf in parts) > 2) == (name == "tied")
    together = ("tied", "untied", "split", "split tuple", "mixture stateful")
    assert pipe.table.together == (name in together)
    if name == "ends":
        no_stage_keeps_a_whole_table(pipe)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("name", "schedule", "sizes", "options"),
    some(
        [
            ("untied", "interleaved", {"stage": 2}, {"layer_counts": (0, 5, 4, 0), "zero": 3}),
            ("ends", "1f1b-fused", {"stage": 3, "data": 2}, {"layer_counts": (4, 0, 5)}),
            ("uneven", "1f1b", {"stage": 3}, {"layer_counts": (0, 8, 0), "remat": "full"}),
            ("tied", "zb-v", {"stage": 2}, {"layer_counts": (0, 0, 9, 0), "zero": 2}),
            (
                "split",
                "dualpipe-v-published",
                {"stage": 2},
                {"layer_counts": (2, 0, 1, 1), "microbatches": 6, "pair_layers": True},
            ),
        ],
        ("untied", "interleaved", {"stage": 2}, {"layer_counts": (0, 5, 4, 0), "zero": 3}),
    ),
)
def test_a_virtual_stage_without_layers_hands_its_messages_on(name, schedule, sizes, options):
    toys.check(name, schedule, sizes, **options)


def no_stage_keeps_a_whole_table(pipe) -> None:
    """Nor its moments, between steps."""
    state = pipe.optimizer_placing(optax.adam(1e-3)).placed
    for tree in (pipe.placed_params, state[0].mu, state[0].nu):
        for w in jax.tree.leaves({name: tree[name] for name in ("embed", "head")}):
            kept = math.prod(w.sharding.shard_shape(w.shape))
            divides = any(n % pipe.mesh.size == 0 for n in w.shape)
            assert not divides or w.ndim < 2 or kept * pipe.mesh.shape["stage"] <= w.size


def test_the_paced_case_leaves_ticks_out_and_shares_others():
    assert PACED.ticks is not None
    for row in PACED.ticks:
        assert len(set(row)) < min(len(row), 1 + max(row))


def test_keys_differ_by_microbatch_data_shard_and_layer():
    """The unpipelined model draws with the same function, so that no comparison would tell."""
    keys = [
        layer_key(jax.random.key(0), microbatch=microbatch, shard=shard, layer=layer)
        for microbatch, shard, layer in itertools.product(range(2), repeat=3)
    ]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 8


@functools.cache
def num_chunks(schedule: str, stages: int) -> int:
    """Number of chunks of the model, of which each needs a layer."""
    built = catalog.build(schedule, stages=stages, microbatches=4)
    return built.placement.num_virtual_stages


@pytest.mark.slow
@pytest.mark.parametrize("name", toys.NAMES)
def test_every_pair_of_values(name):
    """All schedules, on meshes that eight devices make."""
    stages, shards = (2,) if name.startswith("split") else (2, 4), ((1, 1), (2, 1), (2, 2))
    one_tree = toys.named(name).model.layers_are_alike
    weights = ("stacked", "unrolled") if one_tree else ("stacked",)
    schedules = [entry.name for entry in catalog.entries()]
    grid = itertools.product(schedules, stages, shards, ZERO, REMAT, weights, (False, True))
    cases = [case for case in grid if case[2] != (1, 1) or case[3] == 0]
    depth = num_layers(toys.named(name).params["layers"])
    cases = [case for case in cases if num_chunks(*case[:2]) <= depth]
    for schedule, stage, (data, replica), zero, remat, layout, keyed in covering(cases):
        sizes = {"stage": stage, "data": data, "replica": replica}
        options = {"zero": zero, "remat": remat, "weights": layout, "keyed": keyed}
        toys.check(name, schedule, sizes, **options)
