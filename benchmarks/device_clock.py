"""How early does the best schedule end on devices, and was it earlier in time slices?

`auto` over the grid p = 2, 4, 8; m = p, 2p, 4p; four costs; three message times; half, one and two
times 1F1B's memory. Commit 4358b42 could cut actions into slices of layers (8 layers per stage);
its results, on the clock of that time, are read from ``results/device_clock_before.jsonl``, one
object per line with ``key``, ``sliced`` and ``whole``. Rows that are not there are left out.

    python -m benchmarks.device_clock

Every row is written to ``results/device_clock.jsonl`` as soon as it is known, and a run goes on
where the last one stopped: delete the file to start over.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import harness
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.simulate import Costs

COSTS = (1, 1, 1), (1, 1.2, 0.8), (0.75, 1.5, 0.75), (0.8, 1.3, 0.9)
"""F, B, W of a full stage."""
MESSAGES = 0, 0.05, 0.1
_ROUNDING = 1e-9


class Case(NamedTuple):
    """One row of the grid."""

    p: int
    m: int
    costs: tuple[float, float, float]
    message: float
    limit: float

    @property
    def key(self) -> str:
        return f"{self.p} {self.m} {self.costs} {self.message} {self.limit}"

    def makespan(self) -> float:
        """When the best schedule ends on devices."""
        half = Costs(*(cost / 2 for cost in self.costs), message=self.message)
        found = auto(self.p, self.m, costs=half, memory_limit=self.limit)
        costs = cut_layers([half] * (2 * self.p), found.placement)[1]
        return device_clock(found, costs).makespan


def cases() -> Iterator[Case]:
    """The grid."""
    for p, rounds, costs, message, share in itertools.product(
        (2, 4, 8), (1, 2, 4), COSTS, MESSAGES, (0.5, 1, 2)
    ):
        yield Case(p, rounds * p, costs, message, share * p)


def known(name: str) -> dict[str, dict[str, float]]:
    """The rows of a file of results, by key."""
    path = harness.RESULTS / name
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def main() -> None:
    """Prints the table by p and m, and every row that ends later than in slices."""
    path = harness.RESULTS / "device_clock.jsonl"
    path.parent.mkdir(exist_ok=True)
    before, now = known("device_clock_before.jsonl"), known(path.name)
    changes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for case in cases():
        if (row := before.get(case.key)) is None:
            continue
        if case.key not in now:
            now[case.key] = {"makespan": case.makespan()}
            with path.open("a") as file:
                file.write(json.dumps({"key": case.key} | now[case.key]) + "\n")
        ends = now[case.key]["makespan"]
        change = 100 * (ends / row["sliced"] - 1), 100 * (ends / row["whole"] - 1)
        changes.setdefault((case.p, case.m), []).append(change)
        if change[0] > _ROUNDING:
            harness.note(f"later: {case.key}: {ends:.4g}, {change[0]:+.2f}%")
    table: list[dict[str, str | float]] = []
    for (p, m), rows in changes.items():
        sliced, whole = zip(*rows, strict=True)
        table.append(
            {
                "p": p,
                "m": m,
                "rows": len(rows),
                "mean change %": statistics.mean(sliced),
                "worst %": max(sliced),
                "best %": min(sliced),
                "mean change from whole actions %": statistics.mean(whole),
            }
        )
    harness.report(
        "device_clock",
        table,
        title="auto on the device clock, and the best schedule in time slices before",
        label=("p", "m"),
        bars=("mean change %",),
        axis="change of the makespan, %",
    )


if __name__ == "__main__":
    main()
