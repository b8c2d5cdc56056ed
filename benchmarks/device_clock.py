"""How much later does a schedule end on devices than on the free-running clock?

Named schedules over the grid p = 2, 4, 8; m = p, 3p/2, 2p, 4p; four costs of a stage; messages of
0, .1 and .3 of a stage; 2 and 4 chunks where one can choose. The device clock of the published
order in its earliest ticks, and of what `build` makes of it for the costs, is given as a multiple
of the free-running one, that of either order, whichever is less.

    python -m benchmarks.device_clock [--names zb-v interleaved] [--step 4] [--most-message 0.1]
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import tyro

from benchmarks import harness
from jaxpipe.schedule import Costs, build, catalog, device_clock, simulate

COSTS = (1, 1, 1), (1, 1.2, 0.8), (0.75, 1.5, 0.75), (0.8, 1.3, 0.9)
"""F, B, W of a full stage."""
MESSAGES = 0, 0.1, 0.3
_ROUNDING = 1e-9


class Case(NamedTuple):
    """One schedule at one shape and one price."""

    v: int
    p: int
    rounds: float
    costs: tuple[float, float, float]
    message: float

    def ratios(self, entry: catalog.Entry) -> tuple[float, float]:
        """The device clock over the free-running one: of the published order in its earliest ticks,
        and of the schedule for the costs."""
        f, b, w = (cost / self.v for cost in self.costs)
        costs = Costs(f, b, w, self.message)
        shape: dict[str, Any] = {"stages": self.p, "microbatches": int(self.rounds * self.p)}
        shape |= {"chunks": self.v} if "num_chunks" in entry.defaults else {}
        published = build(entry.name + catalog.PUBLISHED * entry.reordered, **shape)
        built = build(entry.name, **shape, costs=costs)
        free = min(simulate(schedule, costs).makespan for schedule in (published, built))
        earliest, paced = (device_clock(s, costs).makespan / free for s in (published, built))
        return earliest, paced


def main(names: Sequence[str] = ("all",), step: int = 1, most_message: float = 0.3) -> None:
    """Prints the table and writes it.

    Args:
      names: the schedules; all but those that are searched.
      step: every how many rows of the grid are taken.
      most_message: the longest message.
    """
    entries = {entry.name: entry for entry in catalog.entries()}
    searched = {"auto", "controllable-memory"}
    table: list[dict[str, str | float]] = []
    for name in harness.chosen(names):
        if name in searched:
            continue
        entry = entries[name]
        chunks = (2, 4) if "num_chunks" in entry.defaults else (entry.default_chunks,)
        messages = [message for message in MESSAGES if message <= most_message]
        grid = itertools.product(chunks, (2, 4, 8), (1, 1.5, 2, 4), COSTS, messages)
        cases = [Case(*case) for case in itertools.islice(grid, 0, None, step)]
        earliest, built = zip(*(case.ratios(entry) for case in cases), strict=True)
        table.append(
            {
                "schedule": name,
                "rows": len(cases),
                "median, earliest ticks": statistics.median(earliest),
                "worst, earliest ticks": max(earliest),
                "above 1.1, earliest ticks": sum(ratio > 1.1 for ratio in earliest),
                "median": statistics.median(built),
                "worst": max(built),
                "above 1.1": sum(ratio > 1.1 for ratio in built),
                "after the published order": sum(
                    now > before + _ROUNDING for before, now in zip(earliest, built, strict=True)
                ),
                "worst case": str(cases[built.index(max(built))]),
            }
        )
        harness.note(f"{table[-1]}")
    harness.report(
        "device_clock",
        table,
        title="The device clock over the free-running clock",
        label=("schedule",),
        bars=("worst, earliest ticks", "worst"),
        axis="device clock / free-running clock",
    )


if __name__ == "__main__":
    tyro.cli(main)
