"""Overlap: layers of a forward and a backward in one loop, transfers over data under layers."""

import collections
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import toys
from compilations import AS_USED, refusal
from covering import some

import jaxpipe
from benchmarks.hlo import HloProgram, scope_of
from jaxpipe.runtime import assembly, memory, options
from jaxpipe.runtime.layout.leaf import Leaf, most_shares, share_of
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.generators.depth_first import interleaved_overlapped
from jaxpipe.schedule.generators.dualpipe import dualpipe_v_published
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.testing import assert_matches_unpipelined
from models import gpt

pytestmark = pytest.mark.pipeline

FUSED = interleaved_overlapped(2, 6, fused=True)
SPLIT = interleaved_overlapped(2, 5, num_chunks=1)
V = dualpipe_v_published(2, 6)
ON_DATA = {"stage": 2, "data": 2}

# fmt: off
CASES = [  # with a tensor axis where the toy is split
    ("untied", SPLIT, ON_DATA,
     {"zero": 3, "weights": "unrolled", "residuals": "host", "num_layers": 3}),
    ("split", V, {"stage": 2}, {"weights": "unrolled", "weight_slots": 2}),
    ("untied", FUSED, ON_DATA, {"zero": 3, "weights": "unrolled"}),
    ("mixture", SPLIT, {"stage": 2}, {"residuals": "host"}),
    ("untied", V, {"stage": 2}, {"remat": "full"}),
    ("split", FUSED, ON_DATA, {"zero": 3, "remat": "dots"}),
    ("places", SPLIT, ON_DATA, {"zero": 2, "num_layers": 6}),
]
# fmt: on


@pytest.mark.parametrize(
    ("name", "schedule", "sizes", "given"),
    some(CASES, *CASES[:2]),
)
def test_results_equal_those_of_the_unpipelined_model(name, schedule, sizes, given):
    count = schedule.num_microbatches
    pipe = toys.check(name, schedule, sizes, microbatches=count, pair_layers=True, **given)
    assert pipe.table.pairs


@pytest.mark.slow
def test_experts_that_devices_share():
    config = gpt.GPTConfig(
        vocab_size=13, sequence_length=8, num_layers=4, width=8, num_heads=2, num_experts=4,
        expert_width=8, balance_loss=0.1, capacity_factor=1.0, dtype="float32",
    )  # fmt: skip
    assert_matches_unpipelined(
        gpt.model(config, vocabulary_axis="stage", expert_axis="expert"),
        jax.jit(functools.partial(gpt.init, config))(jax.random.key(0)),
        {"tokens": jax.random.randint(jax.random.key(1), (24, 9), 0, 13)},
        schedules=[V, FUSED],
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


def split(weights: str = "stacked", **given) -> jaxpipe.Pipeline:
    return toys.pipeline("split", **{"schedule": V, "weights": weights} | given)


@pytest.mark.parametrize("weights", ["stacked", pytest.param("unrolled", marks=pytest.mark.slow)])
def test_one_loop_has_the_matmuls_of_all_its_actions(weights):
    pipe, batch = split(weights, pair_layers=True), toys.named("split").batch(12)
    compiled = memory.compiled(pipe, batch, updates=memory.PLAIN_UPDATES, options=AS_USED)
    program, found = HloProgram(compiled.as_text()), collections.defaultdict(set)
    for body in program.tick_bodies().values():
        for loop in program.loops(body):
            if (scope := scope_of(loop)) and scope.name.isupper():
                inside = program.reached(loop.calls["body"], into_loops=True)
                found[scope.name].add(sum(one.opcode == "dot" for one in inside))
    together = found.pop("BW_F")
    assert found.keys() == {"F", "B", "W"}
    assert together == {sum(count for (count,) in found.values())}


@pytest.mark.slow
def test_predicted_memory_is_the_compiled_one():
    config = gpt.GPTConfig(
        vocab_size=96, sequence_length=16, num_layers=8, width=32, num_heads=2, dtype="float32"
    )
    pipe = jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))),
        schedule=V,
        mesh=jaxpipe.make_mesh(**ON_DATA),
        pair_layers=True,
        zero=3,
    )
    batch = {"tokens": jax.ShapeDtypeStruct((24, 17), jnp.int32)}
    predicted = sum(memory.predicted_bytes(pipe, batch).values())
    assert memory.compiled_bytes(pipe, batch) == pytest.approx(predicted, rel=0.02)


def test_pairs_are_the_default_where_matmuls_can_hide_what_layers_communicate(monkeypatch):
    assert not split().options.pair_layers  # CPUs hide nothing
    monkeypatch.setattr(options, "transfers_overlap", lambda mesh: True)
    assert split().options.pair_layers
    assert not split(schedule="1f1b").options.pair_layers
    # The layers of this toy communicate nothing.
    assert not toys.pipeline("untied", V).options.pair_layers


@pytest.mark.parametrize(
    ("name", "schedule", "pairs", "text"),
    [
        ("tied", "1f1b", True, "schedule '1f1b' overlaps no forward with a backward"),
        ("tied", V, "yes", "pair_layers='yes' is not a choice"),
        ("uneven", V, True, "cannot be combined with weights='stacked' if layers differ"),
    ],
)
def test_what_has_no_pairs_is_refused(name, schedule, pairs, text):
    refused = refusal(toys.pipeline, name, schedule, pair_layers=pairs, weights="stacked")
    assert text in refused


# Transfers.


@pytest.mark.parametrize(
    ("name", "stages", "zero", "layers", "count", "options"),
    some(
        [
            ("breadth-first-fused", 2, 3, 8, 4, {}),
            ("modular-fused", 2, 1, 8, 4, {"weights": "unrolled"}),
            ("breadth-first", 2, 3, 8, 8, {"weights": "unrolled"}),
            ("breadth-first-fused", 4, 2, 15, 1, {}),
            ("modular", 2, 0, 8, 8, {}),
            ("breadth-first", 2, 0, 8, 1, {}),
        ],
        ("breadth-first-fused", 2, 3, 8, 4, {}),
    ),
)
def test_equals_the_unpipelined_model(name, stages, zero, layers, count, options, monkeypatch):
    """Layers move in so many shares at most; of 8, one of the toy's arrays does not divide."""
    monkeypatch.setattr(assembly, "most_shares", lambda layers: count)
    options |= {"num_layers": layers, "weight_slots": 2, "zero": zero, "microbatches": 8}
    pipe = toys.check("tied", name, {"stage": stages, "data": 2}, **options)
    assert (pipe.table.reduces.group, pipe.table.reduces.shares) == (1, count)


IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
"""GPUs run the sums at the end of a step in the program's order. On CPUs, this scheduler runs those
of one program that is made for GPUs in any order, so that they meet each other; only a new process
can do without it."""


@pytest.mark.parametrize(
    ("name", "zero", "layers"),
    some([("1f1b-fused", 3, 6), ("zb-v", 2, 11), ("interleaved", 1, 8)], ("zb-v", 3, 11)),
)
def test_the_first_and_the_last_chunk_move_under_their_own_layers(
    name, zero, layers, request, monkeypatch
):
    """Of the last chunk W completes the first layer first, a fused backward the last one."""
    if (name, zero) == ("zb-v", 2) and IN_ORDER not in os.environ["XLA_FLAGS"]:
        env = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {IN_ORDER}"}
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "slow", request.node.nodeid]
        subprocess.run(command, env=env, check=True, cwd=request.config.rootpath)
        return
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)
    options = {"num_layers": layers, "weights": "unrolled", "weight_slots": 2, "microbatches": 4}
    pipe = toys.check("tied", name, {"stage": 2, "data": 2}, zero=zero, **options)
    parts = pipe.table.parts(gathers=zero == 3, reduces=True)
    assert [one.first for one in parts] == [zero == 3] + [False] * (len(parts) - 1)
    assert [one.last for one in parts] == [False] * (len(parts) - 1) + [True]
    whole = pipe.table.with_whole_edges.parts(gathers=zero == 3, reduces=True)
    assert not any(one.first or one.last for one in whole)  # of a step whose cells are measured


def test_late_messages_do_not_wait_for_what_moves_over_data(monkeypatch):
    """XLA for GPUs has a stream for them; those that end a tick need none of their own."""
    monkeypatch.setattr(assembly, "transfers_overlap", lambda mesh: True)
    options = {"zero": 2, "weights": "unrolled", "microbatches": 5}
    pipe = toys.pipeline("tied", "v-half", toys.ON_DATA, **options)
    # Activations and cotangents with the same edges leave as one message.
    late = len({c.late_edges for c in pipe.table.channels if c.late_edges})
    batch = toys.named("tied").batch(20)
    text = jax.jit(pipe.value_and_grad).lower(pipe.placed_params, batch).as_text()
    messages = [line for line in text.splitlines() if "collective_permute" in line]
    assert len(messages) > late > 0
    assert sum('_xla_gpu_collective_stream = "p2p"' in line for line in messages) == late


def test_a_share_has_enough_bytes_and_little_that_moves_in_vain():
    layer = {"w": Leaf((64, 8), "float32", None, 0, data_parts=2)}
    assert [most_shares(layer, n) for n in (2048, 1024, 513, 512)] == [1, 2, 2, 4]
    # 96 bytes of six rows, three per data shard, would move with every share.
    layer["odd"] = Leaf((6, 4), "float32", None, 0, data_parts=2)
    assert most_shares(layer, 1) == 2
    share = share_of(layer, 2)
    assert (share["w"].shape, share["odd"].shape) == ((32, 8), (6, 4))


def executed(pipe, program, opcode):
    """How many collectives of a kind one step executes for layers, from its compiled text."""
    found = 0
    bodies = program.tick_bodies()
    for parts in pipe.table.parts(gathers=pipe.options.zero == 3, reduces=True):
        found += sum(row.opcode == opcode for row in program.computations[bodies[parts.name]])
    loops = [row for row in program.computations[program.entry] if row.opcode == "while"]
    for loop in loops:
        inside = [row.opcode for row in program.reached(loop.calls["body"], into_loops=True)]
        if not any("permute" in one for one in inside):  # over the layers of a chunk
            found += inside.count(opcode) * pipe.table.layers_per_chunk
    return found


@pytest.mark.parametrize(
    ("zero", "gathers", "reduces", "count"), some([(3, 6, 4, 2), (2, 0, 4, 4)], (3, 6, 4, 2))
)
def test_a_step_moves_chunks_as_often_as_the_table_says_and_beside_layers(
    zero, gathers, reduces, count, monkeypatch
):
    monkeypatch.setattr(assembly, "most_shares", lambda layers: count)
    schedule = jaxpipe.schedules.build("breadth-first", stages=2, microbatches=8, chunks=4)
    given = {"num_layers": 16, "zero": zero, "weight_slots": 2, "poison": False}
    pipe = toys.pipeline("tied", schedule, toys.ON_DATA, **given)
    leaves = jax.tree.leaves(pipe.layout.layers.piece)
    split = sum(leaf.data_dim is not None for leaf in leaves)
    program = HloProgram(memory.compiled(pipe, toys.named("tied").batch(32)).as_text())
    assert pipe.table.reduces.counts == (reduces,) * 2
    # All chunks but the last, or the first, move in shares: the arrays of each together.
    assert executed(pipe, program, "reduce-scatter") == 2 * (split + (reduces - 1) * count)
    if zero == 3:
        assert pipe.table.gathers.counts == (gathers,) * 2
        assert executed(pipe, program, "all-gather") == 2 * (split + (gathers - 1) * count)
