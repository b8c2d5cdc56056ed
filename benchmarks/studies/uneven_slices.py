"""How much would slices of equal cost gain over slices of equal length? Needs no device.

Layers of Llama 3 8B on 8 stages with 8 sequences, in matmuls of a token: F takes 1, B 1 and W 1,
and attention adds to F what grows with the keys that a token sees, to B 2.5 times as much. Slices
of equal cost are longer at the start of a sequence. Those of a run are made of equal, shorter
slices that a stage runs one after the other: so `Pipeline` can run them, for it has one program.

    python -m benchmarks.studies.uneven_slices
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from jaxpipe.schedule import Action, Costs, Kind, Schedule, build, device_clock, simulate
from jaxpipe.schedule.check import peak_in_flight, walk

STAGES = MICROBATCHES = 8
TOKENS_OF_A_MATMUL = 53_248
"""Tokens of a causal sequence whose attention has the FLOPs of the matmuls of a layer's F: 436
million per token in the matmuls, and 8,192 for each token of the sequence."""
BACKWARD = 2.5
"""Times the FLOPs of attention in F."""


def costs(length: int) -> Costs:
    """Costs of the average token of a sequence."""
    share = length / TOKENS_OF_A_MATMUL
    f, b = 1 + share, 1 + BACKWARD * share
    return Costs(f, b, 1.0, attention=(1 + BACKWARD) * share / (f + b))


def ends(cost: Costs, slices: int) -> list[float]:
    """The shares of a sequence at which slices of equal cost end, from 0 to 1."""
    total = cost.f + cost.b + cost.w
    grows = cost.attention * (cost.f + cost.b)
    even = total - grows  # even x + grows x^2 is the cost up to x
    parts = (j / slices * total for j in range(slices + 1))
    return [(math.sqrt(even**2 + 4 * grows * part) - even) / (2 * grows) for part in parts]


def equal_cost_bubble(schedule: Schedule, length: int) -> float:
    """The free-running bubble of a schedule, in its work, with slices of equal cost."""
    share, k = length / TOKENS_OF_A_MATMUL, schedule.num_slices
    bounds = ends(costs(length), k)

    def durations(unit: Sequence[Action]) -> list[float]:
        (action,) = unit
        low, high = bounds[action.microbatch % k :][:2]
        matmul, attention = high - low, share * (high**2 - low**2)
        backward = matmul + BACKWARD * attention
        times = {Kind.F: matmul + attention, Kind.B: backward, Kind.W: matmul}
        return [times.get(action.kind, backward + matmul)]

    cost = costs(length)
    work = schedule.num_microbatches * (cost.f + cost.b + cost.w)
    return max(row[-1] for row in walk(schedule, durations=durations).ends) / work - 1


def in_runs(schedule: Schedule, bounds: Sequence[int]) -> Schedule:
    """Runs every slice of a schedule as the shorter, equal slices between two of these bounds."""
    k, shorter = schedule.num_slices, bounds[-1]

    def run(action: Action) -> list[Action]:
        sequence, j = divmod(action.microbatch, k)
        numbers = range(sequence * shorter + bounds[j], sequence * shorter + bounds[j + 1])
        in_order = numbers if action.kind is Kind.F else numbers[::-1]
        return [dataclasses.replace(action, microbatch=number) for number in in_order]

    orders = tuple(
        tuple(itertools.chain.from_iterable(map(run, order))) for order in schedule.orders
    )
    return dataclasses.replace(schedule, orders=orders, num_slices=shorter, peak_in_flight=None)


def main() -> None:
    """Prints bubbles as shares of the work, and peaks in microbatches."""
    print("| schedule | tokens | slices | free-running | device clock | in flight |")
    print("|---|---|---|---|---|---|")
    for name, k, shorter in (("1f1b-fused", 8, 32), ("1f1b-fused", 8, 64), ("zb-h2", 16, 64)):
        for length in (8192, 131_072, 1_048_576):
            cost = costs(length)
            shape = {"stages": STAGES, "microbatches": MICROBATCHES}
            few, many = (build(name, **shape, slices=slices) for slices in (k, shorter))
            bounds = [round(shorter * end) for end in ends(cost, k)]
            rows = {
                f"{k} of equal length": few,
                f"{shorter} of equal length": many,
                f"{k} runs of {shorter}": in_runs(few, bounds),
            }
            equal = equal_cost_bubble(few, length)
            peak = max(peak_in_flight(few)) / k
            print(f"| {name} | {length} | {k} of equal cost | {equal:.3f} | | {peak:.2f} |")
            for label, schedule in rows.items():
                work = (cost.f + cost.b + cost.w) * schedule.num_passes
                bubbles = (
                    clock(schedule, cost).makespan / work - 1 for clock in (simulate, device_clock)
                )
                peak = max(peak_in_flight(schedule)) / schedule.num_slices
                cells = [name, str(length), label, *(f"{b:.3f}" for b in bubbles), f"{peak:.2f}"]
                print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
