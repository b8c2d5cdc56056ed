"""Every registered schedule: complete, in order, with the bubble and peak that the docs state."""

import collections
import itertools
import math
import re
from pathlib import Path

import pytest
from any_schedule import built
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Kind, split_backwards
from jaxpipe.schedule.check import validate
from jaxpipe.schedule.show.draw import exchanges
from jaxpipe.schedule.simulate import UNIT, Costs, simulate


@given(built())
@settings(max_examples=100)
def test_every_virtual_stage_and_microbatch_once_within_the_promised_memory(schedule):
    validate(schedule)
    if schedule.mixes_backwards:
        schedule = split_backwards(schedule)
    is_fused = any(action.kind is Kind.BW for action in schedule.orders[0])
    stages, num_microbatches = schedule.placement.stages, schedule.num_microbatches
    kinds = Kind.F, *([Kind.BW] if is_fused else [Kind.B, Kind.W])
    assert sorted(
        (d, action.virtual_stage, action.kind, action.microbatch)
        for d, order in enumerate(schedule.orders)
        for action in order
    ) == sorted(
        (d, *rest)
        for d, s in zip(stages, range(len(stages)), strict=True)
        for rest in itertools.product([s], kinds, range(num_microbatches))
    )
    assert schedule.peak_in_flight is not None


@given(built())
def test_messages_cross_every_boundary_between_stages_once_a_microbatch_and_direction(schedule):
    placement, expected = schedule.placement, collections.Counter()
    for here, there in itertools.pairwise(placement.stages):
        if here != there:
            expected[here, there] += schedule.num_microbatches
            expected[there, here] += schedule.num_microbatches
    sent = exchanges(simulate(schedule, UNIT))
    assert collections.Counter((message.sender, message.receiver) for message in sent) == expected


@pytest.mark.parametrize(("waves", "ratio"), [(1, 0.368), (2, 0.238), (4, 0.135)])
def test_bubble_of_hanayo(waves, ratio):
    schedule = catalog.build("hanayo-fused", stages=8, microbatches=8, chunks=2 * waves)
    timeline = simulate(schedule, UNIT)
    assert timeline.bubble_ratio == pytest.approx(ratio, abs=5e-4)
    assert max(timeline.peak_in_flight) == 2 * waves * 8


@given(
    *(st.integers(1, 9), st.integers(1, 14), st.integers(1, 3)),
    *(st.sampled_from([1, 1.5, 2, 5]), st.booleans()),
)
def test_hanayo_runs_under_any_cap_that_holds_a_microbatch(p, m, waves, memory_limit, is_fused):
    name = "hanayo" + "-fused" * is_fused
    shape = {"stages": p, "microbatches": m, "chunks": 2 * waves}
    schedule = catalog.build(name, **shape, memory_limit=memory_limit)
    validate(schedule)
    assert schedule.peak_in_flight == (int(2 * waves * min(memory_limit, m)),) * p


# The table of docs/schedules.md, row by row.

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
TABLE = [
    (name, *cells[1:])
    for cells in re.findall(r"^\| (`.*?) \| (.*?) \|(.*?)\| (.*?) \| (.*?) \|$", PAGE, re.M)
    for name in re.findall("`(.*?)`", cells[0])
]
BUILT_IN = {entry.name for entry in catalog.BUILT_IN}
ROWS = [row for row in TABLE if row[0] not in ("auto", "controllable-memory")]
"""Without searches, which are a frontier over limits."""
ROWS += [
    (f"{name}-fused", bubble.replace("(F+B)", "(F+B+W)"), condition, "m", chunks)
    for name, bubble, condition, _, chunks in ROWS
    if "(F+B)" in bubble and f"{name}-fused" in BUILT_IN
]
COSTS = [(1, 1, 1), (3, 2, 1), (1.5, 2.5, 1.25)]


def python(text: str) -> str:
    """A formula or a condition, as the page writes it, as an expression of Python."""
    for said, meant in (
        ("always", "True"),
        ("equal costs", "F == B == W"),
        ("if p is odd", "if p % 2"),
        (r"(\w) divides (\w)", r"\2 % \1 == 0"),
        (r"(.*), or (.*) if (.*)", r"(\2) if \3 else (\1)"),
        (" = ", " == "),
        (r"\) max", ")max"),
        (r"(?<=[0-9)])(?=[a-zA-Z(])|(?<=[pv])(?=\()", "*"),
    ):
        text = re.sub(said, meant, text)
    return text.replace(", ", " and ") if " >" in text or " <" in text or "==" in text else text


def value(text: str, **numbers: float) -> float:
    return eval(python(text), {"max": max, "floor": math.floor}, numbers)


def shapes(chunks: str):
    for p, few in itertools.product((1, 2, 3, 6), (-1, 0, 1, 4)):
        waves = (2, 4) if "waves" in chunks else (1, 3) if "any" in chunks else (None,)
        for v in waves:
            for m in {max(p + few, 1), 2 * p}:
                yield p, m, {} if v is None else {"chunks": v}


def test_the_table_names_every_schedule():
    kept = {name.removesuffix("-fused") for name in BUILT_IN}
    assert {name for name, *_ in TABLE} == kept - {"breadth-first-descending"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bubble_and_peak_of_the_row(row):
    name, bubble, condition, peak, chunks = row
    condition, _, exception = re.fullmatch(r"(.*?)( \((.*)\))?", condition.strip()).groups()
    bubble, at_most = bubble.removeprefix("at most ").split(", less")[0], "at most" in bubble
    peak, _, where = peak.partition(", if ")
    seen = 0
    for p, m, options in shapes(chunks):
        schedule = catalog.build(name, stages=p, microbatches=m, **options)
        v = schedule.num_chunks
        for d, kept in enumerate(schedule.peak_in_flight):
            if value(where or "always", p=p, m=m):
                assert kept / v <= min(m, value(peak, p=p, d=d, v=v, m=m))
        for F, B, W in COSTS:
            numbers = {"p": p, "m": m, "v": v, "F": F, "B": B, "W": W}
            excess = simulate(schedule, Costs(F / v, B / v, W / v)).makespan - m * (F + B + W)
            if p == 1:
                assert excess == pytest.approx(0)
            elif value(condition, **numbers):
                expected = value(bubble, **numbers)
                assert excess <= expected + 1e-9 if at_most else excess == pytest.approx(expected)
                seen += 1
            elif exception and F == B == W:
                expected, if_so = exception.removeprefix("bubble time ").split(" if ")
                if value(if_so, **numbers):
                    assert excess == pytest.approx(value(expected))
    assert seen > 1
