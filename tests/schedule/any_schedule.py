"""Any schedule of the registry, at any shape that fits it, as a strategy of hypothesis."""

import inspect

from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule

ENTRIES = {
    entry.name: entry
    for entry in catalog.entries()
    if entry.name not in ("auto", "controllable-memory")
}
"""Searches take a second or more, and have tests of their own."""


@st.composite
def built(draw, *, stages: int = 9, microbatches: int = 14) -> Schedule:
    """A schedule of at most so many stages and microbatches."""
    entry = ENTRIES[draw(st.sampled_from([*ENTRIES]))]
    numbers = {
        "stages": draw(st.integers(1, stages)),
        "microbatches": draw(st.integers(1, microbatches)),
    }
    if "num_chunks" in entry.defaults:
        numbers["chunks"] = draw(st.integers(1, 4)) * (2 if "hanayo" in entry.name else 1)
    if "group" in entry.defaults and draw(st.booleans()):
        least = -(-numbers["stages"] // 2) if "interleaved" in entry.name else 1
        numbers["group"] = least + draw(st.integers(0, 8))
    needed = entry.defaults.get("memory_limit") is inspect.Parameter.empty
    if needed or ("memory_limit" in entry.defaults and draw(st.booleans())):
        numbers["memory_limit"] = numbers["stages"] + draw(st.integers(0, 3))
    return catalog.build(entry.name, **numbers)
