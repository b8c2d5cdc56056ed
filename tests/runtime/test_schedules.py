"""Every registered schedule, executed, gives the unpipelined model's loss and gradients."""

from __future__ import annotations

import itertools

import pytest
from test_equivalence import check

from jaxpipe.schedule import catalog

pytestmark = pytest.mark.pipeline
NAMES = [entry.name for entry in catalog.entries() if not entry.name.startswith("chimera")]
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
