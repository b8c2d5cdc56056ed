"""The registry: every schedule by the name that configurations and the command line use."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from functools import partial

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.gpipe import gpipe
from jaxpipe.schedule.one_f_one_b import one_f_one_b


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule of the registry: how to generate it, and its row in the documentation.

    Args:
      name: what users write in ``pipeline.schedule``.
      generate: called as ``generate(num_stages, num_microbatches)``.
      summary: one line.
      bubble: what the schedule adds to m(F+B+W) of work, free-running, F, B, W of one stage.
      peak: activations in flight on stage d.
      constraints: on p, m and v.
      source: the paper.
    """

    name: str
    generate: Callable[[int, int], Schedule]
    summary: str
    bubble: str
    peak: str
    constraints: str
    source: str


_ANY = "p >= 1, m >= 1, v = 1"
_GPIPE = "arXiv 1811.06965"
_1F1B = "arXiv 2006.09503"
_ENTRIES = (
    Entry("gpipe", gpipe, "All forwards, then all B, W", "(p-1)(F+B)", "m", _ANY, _GPIPE),
    Entry(
        *("gpipe-fused", partial(gpipe, fused=True), "All forwards, then all fused backwards"),
        *("(p-1)(F+B+W)", "m", _ANY, _GPIPE),
    ),
    Entry("1f1b", one_f_one_b, "One F, one B, W in turn", "(p-1)(F+B)", "min(m, p-d)", _ANY, _1F1B),
    Entry(
        *("1f1b-fused", partial(one_f_one_b, fused=True), "One F, one fused backward in turn"),
        *("(p-1)(F+B+W)", "min(m, p-d)", _ANY, _1F1B),
    ),
)


def entries() -> tuple[Entry, ...]:
    """Returns every registered schedule, in the order the documentation lists them."""
    return _ENTRIES


def build(name: str, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Builds a schedule by name.

    Args:
      name: a registered name, such as "1f1b" (``pipeline.schedule``).
      stages: p, at least 1 (``mesh.stage``).
      microbatches: m, at least 1 (``pipeline.microbatches``).
      chunks: v, the chunks a stage holds (``pipeline.chunks``); 1 for a linear schedule.

    Returns:
      The schedule.

    Raises:
      ValueError: the name is unknown or a number does not fit it; all failures in one message.

    Example:
      >>> build("1f1b", stages=4, microbatches=8).peak_in_flight
      (4, 3, 2, 1)
    """
    found = {entry.name: entry for entry in _ENTRIES}.get(name)
    problems = []
    if found is None:
        problems.append(_unknown(name))
    for path, count in (("mesh.stage", stages), ("pipeline.microbatches", microbatches)):
        if count < 1:
            problems.append(f"{path}={count} must be at least 1.\nNearest valid: 1.")
    if chunks != 1 and (found is not None or chunks < 1):
        problems.append(
            f"pipeline.chunks={chunks} does not fit schedule {name!r}: each of its stages holds "
            "one run of layers.\nNearest valid: 1."
        )
    if found is None or problems:
        raise ValueError("\n".join(problems))
    return found.generate(stages, microbatches)


def _unknown(name: str) -> str:
    names = [entry.name for entry in _ENTRIES]
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)
    return (
        f"pipeline.schedule={name!r} is not a known schedule.\n"
        f"Nearest valid: {near[0]!r}. All: {', '.join(names)}."
    )
