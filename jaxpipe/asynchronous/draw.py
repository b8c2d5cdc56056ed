"""One period of an asynchronous pipeline's steady state, as text."""

from __future__ import annotations

import math

from jaxpipe.asynchronous.steady import PartTicks, SteadyState
from jaxpipe.schedule.show.draw import check_width


def steady_text(steady: SteadyState) -> str:
    """Draws the N ticks in which one minibatch enters a full pipeline.

    A cell has F and B of one stage and tick, and R between them if the pipeline recomputes: the
    microbatch, numbered within its minibatch, and after @ the weight version it reads, counted from
    the first stage's newest at the start of the period. ``+`` marks the update that ends a
    minibatch. The delays follow, per stage.

    Raises:
      TooWideError: rows are longer than anyone reads.

    Example:
      >>> for line in steady_text(SteadyState(2, 2)).splitlines()[:3]:
      ...     print(line)
      tick     0           1
      stage 0  F0@0 B1@0+  F1@1 B0@1
      stage 1  F1@1 B0@1   F0@1 B1@1+
    """
    N = steady.num_microbatches
    cell = "F@0 B@0   " if steady.recompute_segment is None else "F@0 R@0 B@0   "
    check_width(N * (len(cell) + cell.count("@") * len(str(N - 1))), "draw fewer microbatches")
    # In the period of this minibatch the pipeline is first full and free of effects of its filling.
    minibatch = 2 * math.ceil(steady.num_slots / N)
    start = minibatch * N
    base = steady.newest(steady.stage(0), start)
    rows = [["tick", *(str(t) for t in range(N))]]
    parts = [steady.stage(d) for d in range(steady.num_stages)]
    for d, part in enumerate(parts):
        rows.append([f"stage {d}", *(_cell(steady, part, start + t, base) for t in range(N))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines += ["", "updates that F of microbatch j misses, j = 0, 1, ...; their mean, tau"]
    for d, part in enumerate(parts):
        delays = " ".join(str(steady.delay(part, j)) for j in range(N))
        lines.append(f"stage {d}  {delays}  {steady.mean_delay(part):g}")
    in_flight = ", ".join(str(part.backward - part.forward + 1) for part in parts)
    lines += ["", f"weight versions kept: {steady.num_versions}"]
    lines.append(f"microbatches in flight, per stage: {in_flight}")
    if steady.recompute_segment is not None:
        kept = ", ".join(str(part.backward - part.recompute + 1) for part in parts)
        lines.append(f"of them with residuals, per stage: {kept}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cell(steady: SteadyState, part: PartTicks, tick: int, base: int) -> str:
    N = steady.num_microbatches
    f, b = tick - part.forward, tick - part.backward
    runs = [f"F{f % N}@{steady.forward_version(part, f) - base}"]
    if part.recompute is not None:
        again = tick - part.recompute
        runs.append(f"R{again % N}@{steady.recompute_version(part, again) - base}")
    runs.append(f"B{b % N}@{steady.backward_version(part, b) - base}")
    return " ".join(runs) + ("+" if steady.updates(b) else "")
