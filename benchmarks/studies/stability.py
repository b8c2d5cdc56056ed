"""Which learning rates stay stable when weights are old? Theory and simulation after Yang et al.

On a quadratic of curvature 1, the forward reads weights that are tau steps old, the backward the
newest ones, between which the gradient sees a discrepancy of so many curvatures:
g = (1 + D) w[t - tau] - D u, with u = w[t], or with T2 u = w[t] - tau d, where d is the moving mean
of the updates. T1 divides the rate by tau. The boundary is found twice: as the rate at which an
eigenvalue of the linear recurrence reaches 1, and by running it.

    python -m benchmarks.studies.stability
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tyro

from benchmarks.studies import common

DECAY = math.exp(-2)
"""D of T2: the share of an old update that is left after tau steps, near what theory suggests."""
_STEPS, _START = 4000, 1.0
_BISECTIONS = 40


@dataclasses.dataclass(frozen=True)
class Method:
    """A line of the plots.

    Args:
      momentum: of the heavy ball.
      discrepancy: D, curvatures between forward and backward weights.
      corrected: whether T2 corrects the backward's weights.
    """

    momentum: float = 0.0
    discrepancy: float = 0.0
    corrected: bool = False


METHODS = {
    "SGD": Method(),
    "momentum .9": Method(momentum=0.9),
    "SGD, discrepancy 5": Method(discrepancy=5.0),
    "the same, T2": Method(discrepancy=5.0, corrected=True),
}


def matrix(method: Method, tau: int, rate: float) -> np.ndarray:
    """The recurrence on (w[t], ..., w[t - tau], velocity, d)."""
    size = tau + 1
    step = np.zeros((size + 2, size + 2))
    gradient = np.zeros(size + 2)
    gradient[tau] += 1 + method.discrepancy
    gradient[0] -= method.discrepancy
    if method.corrected:
        gradient[-1] += method.discrepancy * tau
    velocity = -rate * gradient
    velocity[-2] += method.momentum
    step[0, 0] = 1
    step[0] += velocity
    for age in range(1, size):
        step[age, age - 1] = 1
    step[-2] = velocity
    gamma = DECAY ** (1 / tau) if tau else 0.0
    step[-1] = (1 - gamma) * velocity
    step[-1, -1] += gamma
    return step


def by_eigenvalues(method: Method, tau: int, rate: float) -> bool:
    """Whether the recurrence contracts."""
    return float(np.abs(np.linalg.eigvals(matrix(method, tau, rate))).max()) < 1


def by_running(method: Method, tau: int, rate: float) -> bool:
    """Whether training ends nearer to the minimum than it began, step by step."""
    past, velocity, mean = [_START] * (tau + 1), 0.0, 0.0
    gamma = DECAY ** (1 / tau) if tau else 0.0
    largest = 0.0
    for step in range(_STEPS):
        backward = past[0] - (tau * mean if method.corrected else 0.0)
        gradient = (1 + method.discrepancy) * past[tau] - method.discrepancy * backward
        velocity = method.momentum * velocity - rate * gradient
        mean = gamma * mean + (1 - gamma) * velocity
        past = [past[0] + velocity, *past[:tau]]
        if abs(past[0]) > 1e6 * _START:
            return False
        if step >= _STEPS - 4 * (tau + 1):
            largest = max(largest, abs(past[0]))
    return largest < _START


def boundary(stable: Callable[[Method, int, float], bool], method: Method, tau: int) -> float:
    """The largest rate below which training is stable, for curvature 1."""
    low, high = 1e-4, 8.0
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stable(method, tau, middle) else (low, middle)
    return low


def table(delays: Sequence[int]) -> list[dict[str, Any]]:
    """A row per delay: every method's boundary, by both ways, and the formula for SGD."""
    rows = []
    for tau in delays:
        row: dict[str, Any] = {"delay": tau, "formula": 2 * math.sin(math.pi / (4 * tau + 2))}
        for name, method in METHODS.items():
            row[name] = boundary(by_eigenvalues, method, tau)
            row[f"{name}, run"] = boundary(by_running, method, tau)
        row["T1: base rate, SGD"] = max(tau, 1) * row["SGD"]
        rows.append(row)
    return rows


def picture(rows: Sequence[dict[str, Any]]) -> Any:
    """Boundaries by delay: lines by theory, points by simulation."""
    drawn, (plot, rescheduled) = common.figure(columns=2)
    delays = [row["delay"] for row in rows]
    for number, name in enumerate(METHODS):
        color = f"C{number}"
        plot.plot(delays, [row[name] for row in rows], color=color, label=name)
        plot.plot(delays, [row[f"{name}, run"] for row in rows], "o", color=color, markersize=4)
        scaled = [max(tau, 1) * row[name] for tau, row in zip(delays, rows, strict=True)]
        rescheduled.plot(delays, scaled, color=color)
    plot.plot(delays, [row["formula"] for row in rows], "k:", label="2 sin(pi / (4 tau + 2))")
    plot.set_title("largest stable rate", fontsize=9)
    rescheduled.set_title("largest stable base rate with T1", fontsize=9)
    for axes in (plot, rescheduled):
        axes.set_yscale("log")
        axes.set_xlabel("delay, optimizer steps", fontsize=8)
    plot.legend(frameon=False, fontsize=7)
    return drawn


def main(delays: tuple[int, ...] = (0, 1, 2, 3, 5, 7, 10, 14, 20)) -> None:
    """Prints the table and draws its picture.

    Args:
      delays: of the forward's weights, in optimizer steps.
    """
    rows = table(delays)
    common.publish("stability", {"largest stable rate, curvature 1": rows}, picture(rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
