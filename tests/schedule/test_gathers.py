"""How often a stage gathers weights and reduces gradients: the published counts, and ours."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.lowering.lower import NONE, lower


def gathers_and_reduces(name: str, *, slots: int, **shape: int) -> tuple[list[int], list[int]]:
    """Per stage, how many chunks are gathered and how many gradient sums reduced."""
    schedule = catalog.build(name, **shape)
    layers = [1] * schedule.placement.num_virtual_stages
    table = lower(schedule, layers, weight_slots=slots)
    gathers, reduces = (
        (t.chunk != NONE).sum(axis=0).tolist() for t in (table.gathers, table.reduces)
    )
    return gathers, reduces


@pytest.mark.parametrize("v", [3, 4])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_gathers_and_reductions_of_the_published_table(v, k):
    p = 4
    shape = {"stages": p, "microbatches": k * p, "chunks": v}
    for name in ("breadth-first", "breadth-first-fused", "modular-fused"):
        assert gathers_and_reduces(name, slots=1, **shape) == ([2 * v - 1] * p, [v] * p)
        assert gathers_and_reduces(name, slots=2, **shape)[0] == [2 * v - 2] * p
    grouped = {"name": "breadth-first-fused", "group": p, **shape}
    assert gathers_and_reduces(slots=1, **grouped)[1] == [v * k] * p
    assert gathers_and_reduces("interleaved-fused", slots=1, **shape)[1] == [v * k] * p


def chunks_used(name: str, **shape: int) -> list[list[int]]:
    """Per stage, the chunk of every action in order."""
    schedule = catalog.build(name, **shape)
    chunks = schedule.placement.chunks
    return [[chunks[action.virtual_stage] for action in order] for order in schedule.orders]


def least_recently_used(chunks: Sequence[int], *, slots: int) -> int:
    """Gathers when the chunk that was used longest ago makes room: another rule than ours."""
    held: list[int] = []
    gathers = 0
    for chunk in chunks:
        if chunk in held:
            held.remove(chunk)
        else:
            gathers += 1
        held = [*held, chunk][-slots:]
    return gathers


@pytest.mark.parametrize(("v", "k"), [(3, 2), (4, 2), (4, 4)])
def test_two_slots_gather_less_than_the_published_table(v, k):
    p = 4
    shape = {"stages": p, "microbatches": k * p, "chunks": v}
    # Groups: the published count empties the slots between groups; ours keep two chunks there.
    groups = chunks_used("breadth-first-fused", group=p, **shape)
    per_group = len(groups[0]) // k
    for chunks in groups:
        parts = [chunks[i * per_group :][:per_group] for i in range(k)]
        assert sum(least_recently_used(part, slots=2) for part in parts) == k * (2 * v - 2)
    ours = gathers_and_reduces("breadth-first-fused", slots=2, group=p, **shape)[0]
    assert ours == [k * (2 * v - 2) - 2 * (k - 1)] * p
    # Depth-first: the published count evicts the least recently used, ours the one needed last.
    # An odd v is cheaper still: there a forward and a backward alternate on one chunk.
    used = chunks_used("interleaved-fused", **shape)
    recent = [least_recently_used(chunks, slots=2) for chunks in used]
    ours = gathers_and_reduces("interleaved-fused", slots=2, **shape)[0]
    assert ours == [count - 2 for count in recent]
    if v % 2 == 0:
        assert recent == [k * (2 * v - 4) + 4] * p
    if v == 4:  # where it is the published v (k + 1)
        assert recent == [v * (k + 1)] * p
