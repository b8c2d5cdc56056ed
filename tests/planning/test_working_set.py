"""What exists at once, by a plain count and by the order in which XLA's kernels run."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from jaxpipe.planning.working_set import Operation, most_at_once

SIZES = dict.fromkeys("ughdxy", 4.0) | {"s": 1.0}


@st.composite
def programs(draw) -> tuple[list[Operation], list[float], set[int]]:
    """Each operation makes one value, from some of those before it."""
    count = draw(st.integers(1, 8))
    operations = [
        Operation(
            (n,), frozenset(draw(st.sets(st.integers(0, n - 1)))) if n else frozenset(), False
        )
        for n in range(count)
    ]
    sizes = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    return operations, sizes, draw(st.sets(st.integers(0, count - 1)))


@given(programs())
def test_values_live_from_where_they_are_made_to_where_they_are_last_read(program):
    operations, sizes, returned = program
    end = len(operations)
    last = {
        v: end
        if v in returned
        else max((n for n, one in enumerate(operations) if v in one.reads), default=v)
        for v in range(end)
    }
    by_time = [sum(sizes[v] for v in range(n + 1) if last[v] >= n) for n in range(end)]
    assert most_at_once(operations, sizes.__getitem__, returned) == max(by_time)


def one(makes: str, reads: str, *, by_element: bool = False) -> Operation:
    return Operation(tuple(makes), frozenset(reads), by_element)


def test_results_of_common_operands_take_their_places():
    """The backward of a gated MLP: hidden values and both gradients are made in one kernel."""
    made = [one("u", ""), one("g", "")]
    hidden = [one("h", "ug", by_element=True), one("d", "")]
    gradients = [one("x", "udg", by_element=True), one("y", "dgu", by_element=True)]
    operations = [*made, *hidden, *gradients, one("s", "hxy")]
    assert most_at_once(operations, SIZES.__getitem__) == 3 * 4 + 1
    # Where the hidden values are read before, they are made before, and need a fourth place.
    read_early = [*made, *hidden, one("s", "h"), *gradients, one("z", "hxy")]
    sizes = SIZES | {"z": 0.0}
    assert most_at_once(read_early, sizes.__getitem__) == 4 * 4 + 1


def test_no_place_is_taken_of_what_is_read_later():
    kept = [one("u", ""), one("g", "u", by_element=True), one("s", "u")]
    assert most_at_once(kept, SIZES.__getitem__) == 8
    assert most_at_once(kept[:2], SIZES.__getitem__) == 4
    assert most_at_once([one("u", ""), one("g", "u")], SIZES.__getitem__) == 8


def test_what_is_stored_elsewhere_is_written_last():
    """Hidden values that go into a slot: their operands stay until then."""
    made = [one("u", ""), one("g", "")]
    store = [one("", "ug", by_element=True)]
    gradients = [one("d", ""), one("x", "udg", by_element=True), one("y", "dgu", by_element=True)]
    assert most_at_once([*made, *store, *gradients], SIZES.__getitem__, "xy") == 4 * 4
    assert most_at_once([*made, *gradients], SIZES.__getitem__, "xy") == 3 * 4
    assert most_at_once([*made, *store, one("d", "")], SIZES.__getitem__) == 3 * 4


def test_sums_are_made_as_soon_as_what_they_add():
    """So what they add need not wait for them."""
    sizes = SIZES | {"s": 0.125}
    operations = [one("u", ""), one("g", "u"), one("d", "g"), one("s", "ug", by_element=True)]
    assert most_at_once(operations, sizes.__getitem__, "s") == 2 * 4 + 0.125
    # A matmul is made where it stands.
    operations[-1] = one("s", "ug")
    assert most_at_once(operations, sizes.__getitem__, "s") == 3 * 4
