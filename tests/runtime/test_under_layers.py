"""Transfers over data that run under layers: the same gradients, as often as the table says."""

from __future__ import annotations

import jax
import pytest
import toy
import toys
from covering import some

import jaxpipe
from benchmarks.hlo import HloProgram
from jaxpipe.runtime.layout import shares
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.measure.memory import compiled

pytestmark = pytest.mark.pipeline


@pytest.fixture
def layers_in_shares(monkeypatch):
    """Layers of the toy move in so many shares at most; of 8, one of its arrays does not divide."""

    def allow(count):
        monkeypatch.setattr(shares, "most", lambda layers: count)

    return allow


@pytest.mark.parametrize(
    ("name", "stages", "zero", "layers", "shares", "options"),
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
def test_equals_the_unpipelined_model(
    name, stages, zero, layers, shares, options, layers_in_shares
):
    layers_in_shares(shares)
    options |= {"num_layers": layers, "weight_slots": 2}
    options |= {"zero": zero, "microbatches": 8}
    pipe = toys.check("tied", name, {"stage": stages, "data": 2}, **options)
    assert (pipe.table.reduces.group, pipe.table.reduces.shares) == (1, shares)


def test_a_share_has_enough_bytes_and_little_that_moves_in_vain():
    layer = {"w": Leaf((64, 8), "float32", None, 0, data_parts=2)}
    assert [shares.most(layer, n) for n in (2048, 1024, 513, 512)] == [1, 2, 2, 4]
    # 96 bytes of six rows, three per data shard, would move with every share.
    layer["odd"] = Leaf((6, 4), "float32", None, 0, data_parts=2)
    assert shares.most(layer, 1) == 2
    share = shares.share_of(layer, 2)
    assert (share["w"].shape, share["odd"].shape) == ((32, 8), (6, 4))


def executed(pipe, opcode):
    """How many collectives of a kind one step executes for layers, from its compiled text."""
    program = HloProgram(compiled(pipe, toy.batch(32)).as_text())
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
    ("zero", "gathers", "reduces", "shares"),
    some([(3, 6, 4, 2), (2, 0, 4, 4)], (3, 6, 4, 2)),
)
def test_a_step_moves_chunks_as_often_as_the_table_says_and_beside_layers(
    zero, gathers, reduces, shares, layers_in_shares
):
    layers_in_shares(shares)
    params = toy.params(tied=True, num_layers=16)
    pipe = jaxpipe.Pipeline(
        toy.model(tied=True, axis="stage"),
        params,
        schedule=jaxpipe.schedules.build("breadth-first", stages=2, microbatches=8, chunks=4),
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        zero=zero,
        weight_slots=2,
    )
    leaves = jax.tree.leaves(pipe.layout.layers.piece)
    split = sum(leaf.data_dim is not None for leaf in leaves)
    assert pipe.table.reduces.counts == (reduces,) * 2
    # All chunks but the last, or the first, move in shares.
    assert executed(pipe, "reduce-scatter") == 2 * split * (1 + (reduces - 1) * shares)
    if zero == 3:
        assert pipe.table.gathers.counts == (gathers,) * 2
        assert executed(pipe, "all-gather") == 2 * split * (1 + (gathers - 1) * shares)
