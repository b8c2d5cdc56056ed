"""Every registered schedule, executed, gives the unpipelined model's loss and gradients."""

from __future__ import annotations

import itertools

import pytest
from test_equivalence import check

from jaxpipe.runtime import tables
from jaxpipe.schedule import catalog
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.search.slices import slice_ticks
from jaxpipe.schedule.simulate import Costs

pytestmark = pytest.mark.pipeline
NAMES = [entry.name for entry in catalog.executable()]
CASES = [
    case
    for case in itertools.product(NAMES, (2, 4), (1, 4, 7), ((1, 0), (2, 3)))
    if case[1:] != (4, 7, (2, 3))
]


@pytest.mark.parametrize("name", NAMES)
def test_executes_with_sharded_weights_and_uneven_chunks(name):
    check(name, 4, 2, 3, "none", True, 7, num_layers=9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "microbatches", "sharding"), CASES)
def test_executes_everywhere(name, stages, microbatches, sharding):
    check(name, stages, *sharding, "full", False, microbatches, num_layers=9)


@pytest.mark.parametrize(
    ("name", "chunks", "stages", "data", "zero", "microbatches", "num_layers"),
    [
        ("1f1b", None, 4, 2, 3, 6, 14),
        ("zb-v", None, 4, 2, 3, 5, 18),
        ("1f1b-fused", None, 4, 1, 0, 6, 12),
        ("breadth-first", None, 2, 2, 2, 4, 11),
        ("interleaved-zb", 4, 2, 2, 3, 8, 16),
    ],
)
def test_executes_in_slices(name, chunks, stages, data, zero, microbatches, num_layers):
    schedule = catalog.build(name, stages=stages, microbatches=microbatches, chunks=chunks)
    counts = partition([1] * num_layers, schedule.placement)
    sliced = slice_ticks(schedule, Costs(1, 1.2, 0.8), counts)
    assert any(part.lo > 0 for row in sliced.slices for part in row)
    check(sliced, stages, data, zero, "none", True, microbatches, num_layers=num_layers)


@pytest.mark.parametrize(("zero", "weights"), [(2, "stacked"), (3, "unrolled")])
def test_a_slot_for_every_chunk_moves_each_once(zero, weights):
    options = {"weights": weights, "weight_slots": 2}
    pipe = check("zb-v", 4, 2, zero, "none", True, 6, num_layers=9, **options)
    assert pipe.table.gathers.counts == pipe.table.reduces.counts == (2,) * 4


def test_no_slot_is_refused():
    with pytest.raises(ValueError, match=r"weight_slots=0 holds no chunk.\nNearest valid: 1"):
        check("zb-v", 4, 2, 3, "none", True, 6, num_layers=9, weight_slots=0)


@pytest.mark.parametrize(("name", "zero"), [("zb-v", 3), ("hanayo", 0)])
def test_executes_with_late_messages(name, zero):
    schedule = catalog.build(name, stages=4, microbatches=16)
    table = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    assert any(channel.late for channel in table.channels)
    check(schedule, 4, 1 + zero // 3, zero, "none", True, 16, num_layers=9)


@pytest.mark.parametrize(("name", "zero"), [("zb-v", 3), ("interleaved", 2), ("1f1b", 0)])
def test_executes_in_the_ticks_of_gpus(name, zero, monkeypatch):
    monkeypatch.setattr(tables, "clock_of", lambda mesh: "neighbor")
    schedule = catalog.build(name, stages=4, microbatches=16)
    soon = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    pipe = check(schedule, 4, 1 + zero // 2, zero, "none", True, 16, num_layers=9, weight_slots=2)
    assert pipe.table.num_ticks == soon.num_ticks
    assert pipe.table.meets.sum() < soon.meets.sum()
