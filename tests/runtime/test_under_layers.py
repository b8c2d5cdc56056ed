"""Transfers over data that run under layers: the same gradients, as often as the table says."""

from __future__ import annotations

import jax
import pytest
import toy
from test_equivalence import check

import jaxpipe
from benchmarks.hlo import HloProgram
from jaxpipe.runtime.measure.memory import compiled

pytestmark = pytest.mark.pipeline


@pytest.mark.parametrize(
    ("name", "stages", "zero", "layers", "options"),
    [
        ("breadth-first", 2, 3, 8, {}),
        ("breadth-first", 2, 3, 8, {"weights": "unrolled"}),
        ("breadth-first-fused", 4, 2, 15, {}),
        ("modular", 2, 1, 8, {"weights": "unrolled"}),
        ("breadth-first", 2, 0, 8, {}),
    ],
)
def test_equals_the_unpipelined_model(name, stages, zero, layers, options):
    options |= {"num_layers": layers, "weight_slots": 2}
    pipe = check(name, stages, 2, zero, "none", True, 8, **options)
    assert pipe.table.reduces.group == 1


def executed(pipe, opcode):
    """How many collectives of a kind one step executes for layers, from its compiled text."""
    program = HloProgram(compiled(pipe, toy.batch(32)).as_text())
    bodies = program.tick_bodies()
    kinds, rounds = pipe.table.runs(gathers=pipe.zero == 3, reduces=True)
    found = 0
    for moves, ticks in zip(kinds, rounds.sum(axis=0), strict=True):
        rows = program.computations[bodies[moves.name]]
        found += ticks * sum(row.opcode == opcode for row in rows)
    loops = [row for row in program.computations[program.entry] if row.opcode == "while"]
    for loop in loops:
        inside = [row.opcode for row in program.reached(loop.calls["body"], into_loops=True)]
        if not any("permute" in one for one in inside):  # over the layers of a chunk
            found += inside.count(opcode) * pipe.table.layers_per_chunk
    return found


@pytest.mark.parametrize(("zero", "gathers", "reduces"), [(3, 6, 4), (2, 0, 4)])
def test_a_step_moves_chunks_as_often_as_the_table_says_and_beside_layers(zero, gathers, reduces):
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
    assert executed(pipe, "reduce-scatter") == 2 * split * reduces
    if zero == 3:
        assert pipe.table.gathers.counts == (gathers,) * 2
        assert executed(pipe, "all-gather") == 2 * split * gathers
