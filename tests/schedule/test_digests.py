"""Schedules are the same on every supported Python and platform: digests pin a set of them.

A change that means to alter schedules writes the digests anew, and its commit says why they differ.

    python tests/schedule/test_digests.py
"""

import builtins
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Schedule
from jaxpipe.schedule.lowering.lower import forward_only, lower
from jaxpipe.schedule.lowering.table import Outer
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from jaxpipe.schedule.simulate import Costs

NEWER = (
    "overlapped", "num_slices", "carry", "carry_gradient", "number", "ticks", "moved",
    "residual_parts", "within",
)  # fmt: skip
"""Fields that are left out where they have their default."""

DIGESTS = Path(__file__).with_name("digests.json")

DECIMALS, TENTHS, MESSAGES = Costs(1, 1.2, 0.8), Costs(0.1, 0.7, 0.3), Costs(1.75, 2.7, 2.01, 0.5)
"""Binary fractions only come close to most of them, so rounding decides between equal choices."""

SHAPES = ((2, 3, 2), (3, 8, 4), (4, 6, 2), (8, 20, 4))
"""p, m and, where a schedule lets one choose, v."""

AUTO = ((2, 5, None, TENTHS), (3, 4, 2, DECIMALS), (2, 6, 1.5, MESSAGES))
CONTROLLABLE_MEMORY = ((2, 5, 2, TENTHS), (3, 4, 2.5, DECIMALS), (4, 6, None, MESSAGES))
"""p, m, memory limit and costs."""


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of every digest, and what makes the thing that it is of."""
    # `catalog.entries` also has what other tests have registered.
    for entry in catalog.BUILT_IN:
        for p, m, v in SHAPES[:2] if entry.name == "auto" else SHAPES:
            chunks = {"chunks": v} if "num_chunks" in entry.defaults else {}
            make = partial(catalog.build, entry.name, stages=p, microbatches=m, **chunks)
            yield f"{entry.name} p={p} m={m} {chunks or ''}".rstrip(), partial(built, make)
    for p, m, limit, costs in AUTO:
        make = partial(auto, p, m, memory_limit=limit, costs=costs)
        yield f"auto p={p} m={m} memory_limit={limit} {costs}", partial(built, make, layers=3)
    for p, m, limit, costs in CONTROLLABLE_MEMORY:
        make = partial(controllable_memory, p, m, memory_limit=limit, costs=costs)
        case = f"p={p} m={m} memory_limit={limit} {costs}"
        yield f"controllable-memory {case}", partial(built, make)
    costs = [0.1 * (1 + layer % 7) for layer in range(24)]
    for placement in (linear(5), looped(3, num_chunks=2), wave(4)):
        yield f"partition over {placement.stages}", partial(partition, costs, placement)


def built(make: Callable[[], Schedule], *, layers: int = 4) -> Any:
    """A schedule and its tables."""
    schedule = make()
    return schedule, tables(schedule, [layers] * schedule.placement.num_virtual_stages)


def tables(schedule: Schedule, layers: Sequence[int]) -> Any:
    return [
        lower(schedule, layers),
        lower(schedule, layers, weight_slots=2, own_slots=True),
        lower(forward_only(schedule), layers),
    ]


def plain(value: Any) -> Any:
    """A value as lists and words, in an order that depends on nothing else."""
    if isinstance(value, Action):
        return str(value)
    if isinstance(value, Placement):
        return [list(value.stages), 1]  # of copies of the model, when digests were written
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if dataclasses.is_dataclass(value):
        # Most schedules overlap and slice nothing, and have the digests from before any did.
        fields = [(getattr(value, f.name), f) for f in dataclasses.fields(value)]
        fields = [(v, f) for v, f in fields if f.name not in NEWER or v != f.default]
        # Columns of embedding and head were fields of a table, when digests were written.
        return [plain(w) for v, _ in fields for w in (v if isinstance(v, Outer) else [v])]
    if isinstance(value, dict):
        return sorted([key, plain(item)] for key, item in value.items())
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()[:16]


@pytest.fixture
def _no_sums_of_floats(monkeypatch):
    """Refuses what Python 3.12 adds up in another way than 3.11."""

    def sum_of_integers(items: Iterable[Any], start: int = 0) -> Any:
        numbers = list(items)
        assert all(isinstance(number, Integral) for number in numbers), "a sum of floats"
        return builtins.sum(numbers, start)

    for name, module in list(sys.modules.items()):
        if name.startswith("jaxpipe.schedule."):
            monkeypatch.setattr(module, "sum", sum_of_integers, raising=False)


CASES = dict(cases())
LONG = "p=8 m=20", "auto p=2 m=5 memory_limit=None"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * any(map(n.__contains__, LONG))) for n in CASES],
)
@pytest.mark.usefixtures("_no_sums_of_floats")
def test_schedules_are_the_same_everywhere(name):
    assert digest(CASES[name]()) == json.loads(DIGESTS.read_text()).get(name)


def test_every_digest_is_of_a_case():
    assert json.loads(DIGESTS.read_text()).keys() == CASES.keys()


if __name__ == "__main__":
    found = {name: digest(make()) for name, make in CASES.items()}
    DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
