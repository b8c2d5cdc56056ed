"""Bubbles and peaks in the table of docs/schedules.md are true, row by row."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from jaxpipe.schedule import Costs, build, simulate
from jaxpipe.schedule.catalog import BUILT_IN

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
TABLE = [
    (name, *cells[1:])
    for cells in re.findall(r"^\| (`.*?) \| (.*?) \|(.*?)\| (.*?) \| (.*?) \|$", PAGE, re.M)
    for name in re.findall("`(.*?)`", cells[0])
]
SEARCHED = {"auto", "controllable-memory"}
"""Theirs is a frontier over limits, which other tests compute."""
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
    kept = {e.name.removesuffix("-fused") for e in BUILT_IN}
    assert {name for name, *_ in TABLE} == kept - {"breadth-first-descending"}


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row[0] not in SEARCHED], ids=lambda r: r[0]
)
def test_bubble_and_peak_of_the_row(row):
    name, bubble, condition, peak, chunks = row
    condition, _, exception = re.fullmatch(r"(.*?)( \((.*)\))?", condition.strip()).groups()
    bubble, at_most = bubble.removeprefix("at most ").split(", less")[0], "at most" in bubble
    peak, _, where = peak.partition(", if ")
    seen = 0
    for p, m, options in shapes(chunks):
        schedule = build(name, stages=p, microbatches=m, **options)
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
                expected, if_so = exception.split(" if ")
                if value(if_so, **numbers):
                    assert excess == pytest.approx(value(expected))
    assert seen > 1
