"""Looks of actions, in text and in pictures."""

from __future__ import annotations

from typing import NamedTuple

from jaxpipe.schedule.actions import Action, Kind
from jaxpipe.schedule.simulate import Timeline, kind_durations


class Look(NamedTuple):
    """Look of a kind of action: its colour on a stage's first chunk and on its last, backgrounds of
    the 256-colour palette for first and other chunks, both with dark text, and its meaning."""

    light: str
    dark: str
    shades: tuple[int, int]
    meaning: str


LOOKS = {
    Kind.F: Look("#9dbdf0", "#27518f", (111, 68), "forward"),
    Kind.B: Look("#8fdcd2", "#1b7468", (116, 73), "backward, input"),
    Kind.W: Look("#c3e2ad", "#4f7f30", (150, 107), "backward, weights"),
    Kind.BW: Look("#f2d38a", "#8f6414", (222, 179), "backward (B and W)"),
}

MESSAGE, LATE, PAIR = "#555555", "#d1661b", "#222222"
"""Colours of messages, late ones, and frames of overlapped pairs."""


def chunk_of(action: Action, timeline: Timeline) -> int:
    """Number of the chunk, on its stage, that an action runs."""
    return timeline.schedule.placement.chunks[action.virtual_stage]


def fill(action: Action, timeline: Timeline) -> str:
    """The color of an action in hexadecimal, from light on the first chunk to dark on the last."""
    depth = chunk_of(action, timeline) / max(timeline.schedule.num_chunks - 1, 1)
    return _mixed(LOOKS[action.kind].light, LOOKS[action.kind].dark, depth)


def _mixed(light: str, dark: str, depth: float) -> str:
    channels = (
        [int(colour[place : place + 2], 16) for colour in (light, dark)] for place in (1, 3, 5)
    )
    return "#" + "".join(f"{round(x + depth * (y - x)):02x}" for x, y in channels)


def pairs(timeline: Timeline, stage: int) -> list[tuple[float, float]]:
    """Finds start and end of a stage's overlapped pairs: a forward, and the part that follows it,
    or all of its tick, where our program runs a full backward as B and W."""
    together, row = frozenset(timeline.schedule.overlapped), timeline.rows[stage]
    spans = []
    for k, forward in enumerate(row):
        if forward.action not in together:
            continue
        last, tick = k + 1, forward.tick
        while tick is not None and last + 1 < len(row) and row[last + 1].tick == tick:
            last += 1
        spans.append((forward.start, row[last].end))
    return spans


def stage_colors(num_stages: int) -> list[str]:
    """The colors of the stages' curves of memory, from violet over green to ochre."""
    low, middle, high = "#46327e", "#1fa187", "#d0b400"
    places = (2 * d / num_stages for d in range(num_stages))
    return [_mixed(low, middle, x) if x < 1 else _mixed(middle, high, x - 1) for x in places]


def shortest(timeline: Timeline) -> float:
    """A time that no action of a timeline undercuts, and the shortest takes or nearly takes."""
    # Late in a long timeline an action's end minus its start may round to nothing.
    durations = kind_durations(timeline.costs)
    actions = (timed.action for row in timeline.rows for timed in row)
    least = min(durations[action.virtual_stage][action.kind] for action in actions)
    # Those of a pair that saves time take at least half as long.
    return least / 2 if timeline.schedule.overlapped else least


def caption(timeline: Timeline) -> str:
    """One line that describes a timeline and names its clock.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> from jaxpipe.schedule.simulate import Costs, simulate
      >>> caption(simulate(gpipe(2, 2), Costs(1, 1, 1)))
      'gpipe, p=2 v=1 m=2, (F, B, W)=(1, 1, 1), free-running: makespan 8, bubble 25.0%'
    """
    schedule = timeline.schedule
    chunks = "chunks that differ"
    if len(set(timeline.costs)) == 1:
        costs = timeline.costs[0]
        message = f", message {costs.message:g}" if costs.message else ""
        attention = f", attention {costs.attention:g}" if costs.attention else ""
        chunks = f"(F, B, W)=({costs.f:g}, {costs.b:g}, {costs.w:g}){message}{attention}"
    slices = f" k={schedule.num_slices}" if schedule.num_slices > 1 else ""
    return (
        f"{schedule.name}, p={schedule.num_stages} v={schedule.num_chunks} "
        f"m={schedule.num_microbatches}{slices}, {chunks}, "
        f"{timeline.clock}: makespan {timeline.makespan:g}, bubble {timeline.bubble_ratio:.1%}"
    )
