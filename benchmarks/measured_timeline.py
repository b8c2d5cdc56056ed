"""Does a measured timeline lie where it should, and what does measuring cost?

Layers sleep, so that their true times are known, on any number of cores. Each schedule runs as it
is, and with stamps, on simulated devices, which wait for each other in every tick. A page shows
what was measured beside what devices would take.

    python -m benchmarks.measured_timeline [--names 1f1b zb-v] [--stages 4] [--out step.html]
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import jaxpipe
from benchmarks import bubble, harness
from jaxpipe import measure
from jaxpipe.schedule import Costs, Timeline, build, page, timelines


def case(
    name: str, stages: int, microbatches: int, layers: int, layer: Costs
) -> tuple[dict[str, Any], list[Timeline]]:
    """One schedule: its row, and its timelines."""
    chunk = Costs(*(layers * getattr(layer, kind) for kind in "fbw"))
    schedule = build(name, stages=stages, microbatches=microbatches, costs=chunk)
    num_chunks = schedule.placement.num_virtual_stages
    model, params = bubble.sleeping_model([layer] * layers * num_chunks)
    mesh = jaxpipe.make_mesh(stage=stages)
    pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=mesh)
    placed, batch = pipe.place(params), {"x": jnp.ones((microbatches, bubble.WIDTH))}
    step = jax.jit(pipe.value_and_grad).lower(placed, batch).compile()
    executed = statistics.median(harness.seconds(lambda: step(placed, batch))[0] for _ in "ab")
    measured = measure.timeline(pipe, placed, batch)
    longer = [
        part.end - part.start - chunk.of(part.action.kind)
        for part in itertools.chain(*measured.rows)
    ]
    row = {
        "schedule": name,
        "tick by tick s": bubble.tick_by_tick(schedule, [chunk] * num_chunks),
        "executed s": executed,
        "measured s": measured.makespan,
        "tick by tick, measured costs, s": bubble.tick_by_tick(schedule, measured.costs),
        "excess ms per action, median": 1e3 * statistics.median(longer),
        "most": 1e3 * max(longer),
    }
    return row, [*timelines(measured.schedule, measured.costs), measured]


def main(
    names: tuple[str, ...] = ("1f1b", "1f1b-fused", "zb-v", "auto"),
    stages: int = 4,
    microbatches: int | None = None,
    layers_per_chunk: int = 2,
    costs: tuple[float, float, float] = (1.0, 1.2, 0.8),
    layer_seconds: float = 0.03,
    out: Path | None = None,
) -> None:
    """Prints the table and writes it.

    Args:
      names: schedules to run.
      stages: p, at most 8.
      microbatches: m; 2 p by default.
      layers_per_chunk: of every chunk.
      costs: of F, B and W of a layer, relative.
      layer_seconds: the time of one unit of the costs.
      out: a page of the schedules with what was predicted and measured.
    """
    harness.simulate(8)
    layer, m = Costs(*(layer_seconds * cost for cost in costs)), microbatches or 2 * stages
    rows, shown = [], []
    for name in names:
        harness.note(name)
        row, clocks = case(name, stages, m, layers_per_chunk, layer)
        rows.append(row)
        shown.append(clocks)
    if out is not None:
        out.write_text(page(shown), encoding="utf-8")
    harness.report(
        "measured-timeline",
        rows,
        title=f"p={stages} m={m}, chunks of {layers_per_chunk} layers, {layer_seconds:g} s",
        label=["schedule"],
        bars=["tick by tick s", "executed s", "measured s"],
        axis="s",
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
