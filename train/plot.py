"""Draws runs as one SVG: ``python -m train.plot runs/one runs/two --out runs.svg``.

Loss, held-out loss, speed and bubble by step. A run draws its own as ``run.svg`` when it ends.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Annotated

import tyro

from jaxpipe.files import write_whole
from train.runs import run_folder
from train.watch import metrics

FILE = "run.svg"
_WIDTH, _HEIGHT, _LEFT, _GAP = 640, 150, 70, 46
_COLORS = ("#2563a8", "#c4561e", "#2a8a57", "#8445a8", "#9a7b12", "#5b6570")

Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Draws loss, held-out loss, speed and bubble of runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: Path = Path("runs.svg")
    """File to write."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 2 after a message when a run has no records."""
    options = tyro.cli(Options, args=arguments, prog="python -m train.plot")
    try:
        if not options.runs:
            raise ValueError("there is nothing to draw. Name the folder of a run.")
        write_whole(options.out, draw(options.runs).encode())
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


def write(folder: Path) -> None:
    """Draws a run into its folder."""
    write_whole(folder / FILE, draw([folder]).encode())


def draw(folders: Sequence[Path]) -> str:
    """Draws the runs in these folders.

    Raises:
      ValueError: a folder without records of steps.
    """
    runs = {folder.name: _panels(folder) for folder in folders}
    names = list(dict.fromkeys(name for panels in runs.values() for name in panels))
    height = (_HEIGHT + _GAP) * len(names) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for n, name in enumerate(names):
        of_runs = {run: panels.get(name, []) for run, panels in runs.items()}
        lines += _panel(name, of_runs, 24 + n * (_HEIGHT + _GAP))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panels(folder: Path) -> dict[str, Points]:
    """Reads the points of each panel that a run has; a step that ran twice counts once."""
    path = folder / run_folder.METRICS_FILE
    by_step = {record["step"]: record for _, record in metrics.records(path)}
    speeds = {key for record in by_step.values() for key in record.get("speed", {})}
    rate = next((key for key in sorted(speeds) if key.endswith("_per_second")), "")
    panels: dict[str, Points] = {}
    for step, record in sorted(by_step.items()):
        values = {
            "loss": record.get("loss"),
            "held-out loss": record.get("eval_loss"),
            rate.replace("_", " "): record.get("speed", {}).get(rate),
            "bubble, predicted": record.get("speed", {}).get("bubble"),
        }
        for name, value in values.items():
            if name and value is not None:
                panels.setdefault(name, []).append((step, value))
    if not panels:
        raise ValueError(f"{path} has no records of steps to draw.")
    return panels


def _panel(name: str, of_runs: Mapping[str, Points], top: float) -> list[str]:
    points = [point for run in of_runs.values() for point in run]
    (first, last), (low, high) = (
        (min(values), max(values)) for values in zip(*points, strict=True)
    )
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    right, bottom = _WIDTH - 20, top + _HEIGHT

    def place(step: float, value: float) -> str:
        x = _LEFT + (right - _LEFT) * (step - first) / max(last - first, 1)
        return f"{x:.1f},{bottom - _HEIGHT * (value - low) / (high - low):.1f}"

    lines = [
        f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{escape(name)}</text>',
        f'<path d="M{_LEFT},{top}V{bottom}H{right}" fill="none" stroke="#888"/>',
    ]
    for value, y in ((high, top + 4), (low, bottom)):
        lines.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{_short(value)}</text>')
    for step, x, anchor in ((first, _LEFT, "start"), (last, right, "end")):
        text = f'<text x="{x}" y="{bottom + 16}" text-anchor="{anchor}">step {step}</text>'
        lines.append(text)
    for n, (run, own) in enumerate(of_runs.items()):
        color = _COLORS[n % len(_COLORS)]
        drawn = " ".join(place(*point) for point in own)
        lines.append(
            f'<polyline points="{drawn}" fill="none" stroke="{color}"><title>{escape(run)}</title>'
            "</polyline>"
        )
        if len(own) == 1:
            at_x, at_y = drawn.split(",")
            lines.append(f'<circle cx="{at_x}" cy="{at_y}" r="2" fill="{color}"/>')
        if len(of_runs) > 1:
            x = right - 110 * (len(of_runs) - n - 1)
            lines.append(
                f'<text x="{x}" y="{top - 8}" fill="{color}" text-anchor="end">{escape(run)}</text>'
            )
    return lines


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 or math.isinf(value) else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
