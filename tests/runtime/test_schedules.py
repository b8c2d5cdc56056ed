"""Every registered schedule, executed, gives the unpipelined model's loss and gradients."""

from __future__ import annotations

import itertools

import asynchronous_toy
import jax
import pytest
from asynchronous_reference import Settings
from asynchronous_toy import minibatches
from test_equivalence import check

from jaxpipe.runtime import tables
from jaxpipe.schedule import catalog

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


@pytest.mark.parametrize(("zero", "weights"), [(2, "stacked"), (3, "unrolled")])
def test_a_slot_for_every_chunk_moves_each_once(zero, weights):
    options = {"weights": weights, "weight_slots": 2}
    pipe = check("zb-v", 4, 2, zero, "none", True, 6, num_layers=9, **options)
    assert pipe.table.gathers.counts == pipe.table.reduces.counts == (2,) * 4


def test_no_slot_is_refused():
    with pytest.raises(ValueError, match=r"weight_slots=0 holds no chunk.\nNearest valid: 1"):
        check("zb-v", 4, 2, 3, "none", True, 6, num_layers=9, weight_slots=0)


@pytest.mark.parametrize(
    ("name", "zero", "axis"), [("zb-v", 3, "stage"), ("interleaved", 2, None), ("1f1b", 0, None)]
)
def test_executes_with_late_messages_as_on_gpus(name, zero, axis, monkeypatch):
    monkeypatch.setattr(tables, "transfers_overlap", lambda mesh: True)
    options = {"num_layers": 9, "weight_slots": 2, "axis": axis}
    pipe = check(name, 4, 1 + zero // 2, zero, "none", True, 16, **options)
    assert any(channel.late_edges for channel in pipe.table.channels)


def test_messages_of_an_asynchronous_pipeline_are_never_late(monkeypatch):
    start, (batch,) = asynchronous_toy.params(layers=3, tied=True), minibatches(1, 4)

    def program() -> str:
        training = asynchronous_toy.pipeline(Settings(3, 2), start)
        placed = training.pipe.place(start)
        state = training.init(placed, training.optimizer.init(placed), batch)
        return jax.jit(training.step).lower(state, batch).as_text()

    expected = program()
    monkeypatch.setattr(tables, "transfers_overlap", lambda mesh: True)
    assert program() == expected
