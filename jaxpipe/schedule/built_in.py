"""The table of the built-in schedules: how each is generated, and its row in the documentation."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.generators.breadth_first import breadth_first, modular
from jaxpipe.schedule.generators.chimera import chimera
from jaxpipe.schedule.generators.dualpipe import dualpipe_v, dualpipe_v_published
from jaxpipe.schedule.generators.gpipe import gpipe
from jaxpipe.schedule.generators.hanayo import hanayo
from jaxpipe.schedule.generators.interleaved import interleaved
from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
from jaxpipe.schedule.generators.v_schedules import one_f_one_b_v, v_half, v_min, v_zb, zb_v
from jaxpipe.schedule.generators.zero_bubble import interleaved_zb, zb_h1, zb_h2
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.cache import cached
from jaxpipe.schedule.search.controllable_memory import controllable_memory

Generate = Callable[..., Schedule]

MEASURES = ("costs", "layer_costs")
"""Options that describe the machine and the model, whatever the schedule."""
PUBLISHED = "-published"
"""Suffix of the name under which a reordered schedule keeps its own order, whatever the costs."""
OPTIONS = ("num_chunks", "group", "memory_limit", *MEASURES)
"""Options of schedules beyond stages and microbatches."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule of the registry: how to generate it, and its row in the documentation.

    Args:
      name: what users call it by.
      generate: called as ``generate(num_stages, num_microbatches, **options)``. It reads the
        `OPTIONS` that are its keyword-only parameters.
      summary: one line.
      bubble: what the schedule adds to m(F+B+W) of work, free-running; F, B, W of a full stage. A
        formula without them is for F=B=W=1. Conditions follow a semicolon.
      peak: activations in flight on stage d, in microbatches of a full stage; for m large enough.
      constraints: limits on p, m and v.
      source: the paper.
      chunks: v if the schedule does not read ``num_chunks``; None if only the schedule knows it.
      multiples: numbers that must be multiples of another, by parameter.
      executable: whether the runtime can execute it; if not, it can only be simulated.
      reordered: whether `catalog.build` orders it anew for the costs it is given.
    """

    name: str
    generate: Generate
    summary: str
    bubble: str
    peak: str
    constraints: str
    source: str
    chunks: int | None = 1
    multiples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    executable: bool = True
    reordered: bool = False

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options that ``generate`` reads, by parameter name, with their default values.

        A required option has ``inspect.Parameter.empty``.
        """
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.generate).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name in OPTIONS
        }

    @property
    def default_chunks(self) -> int:
        """The v used unless another is requested; 1 if only the schedule knows it."""
        own = self.defaults.get("num_chunks")
        return own if isinstance(own, int) else self.chunks or 1


_ANY = "p >= 1, m >= 1, v = 1"
_CHUNKS = "p >= 1, m >= 1, v >= 1"
_GROUPS = "p >= 1, m >= 1 (best: p divides m), v >= 1"
_LAYERS = "p >= 1, m >= 1, v = layers of a stage"
_WAVES = "p >= 1, m >= 1, v even"
_V = "p >= 1, m >= 1 (best from 2p), v = 2"
_AUTO = "p >= 1, m >= 1; v chosen: 1 or 2, or any where layers are given"
_COPIES = "p >= 1, m even, v = 1; simulation only"


def _with_fused(entry: Entry, bubble: str) -> tuple[Entry, Entry]:
    """An entry with split backwards and its fused variant, which has a different bubble."""
    return entry, dataclasses.replace(
        entry,
        name=f"{entry.name}-fused",
        generate=partial(entry.generate, fused=True),
        summary=f"{entry.summary}; fused backwards",
        bubble=bubble,
    )


BUILT_IN = (
    *_with_fused(
        Entry(
            *("gpipe", gpipe, "All forwards, then all backwards"),
            *("(p-1)(F+B)", "m", _ANY, "arXiv 1811.06965"),
        ),
        "(p-1)(F+B+W)",
    ),
    *_with_fused(
        Entry(
            *("1f1b", one_f_one_b, "One forward, one backward in turn"),
            *("(p-1)(F+B)", "min(m, p-d)", _ANY, "arXiv 2006.09503"),
        ),
        "(p-1)(F+B+W)",
    ),
    *_with_fused(
        Entry(
            *("interleaved", interleaved, "1F1B over chunks, depth-first"),
            *("(p-1)(F+B)/v; p divides m, W <= F", "(2(p-d-1)+(v-1)p+1)/v", _GROUPS),
            "arXiv 2104.04473",
        ),
        "(p-1)(F+B+W)/v; p divides m",
    ),
    *_with_fused(
        Entry(
            *("breadth-first", breadth_first, "All microbatches, chunk by chunk"),
            *("(p-1)(F+B)/v; m >= p", "m", _CHUNKS, "arXiv 2211.05953"),
        ),
        "(p-1)(F+B+W)/v; m >= p",
    ),
    Entry(
        *("breadth-first-descending", partial(breadth_first, descending=True)),
        *("Breadth-first, last microbatch's backward first", "(p-1)(F+B)/v; m >= p", "m", _CHUNKS),
        "arXiv 2211.05953",
    ),
    *_with_fused(
        Entry(
            *("modular", modular, "Breadth-first, one layer per chunk"),
            *("(p-1)(F+B)/v; m >= p", "m", _LAYERS, "arXiv 2106.02679"),
        ),
        "(p-1)(F+B+W)/v; m >= p",
    ),
    *_with_fused(
        Entry(
            *("hanayo", hanayo, "v/2 waves down and up the stages"),
            *("(p-1)/v; m = p", "min(m, p)", _WAVES, "arXiv 2308.15762"),
            multiples={"num_chunks": 2},
            reordered=True,
        ),
        "2(p-1); v = 2, m >= p",
    ),
    Entry(
        *("zb-h1", zb_h1, "1F1B, W deferred until memory is level"),
        *("(p-1)(F+B-W); m >= p, W <= F, W <= B", "min(m, p)", _ANY, "arXiv 2401.10241"),
        reordered=True,
    ),
    Entry(
        *("zb-h2", zb_h2, "1F1B with twice the warm-up, W fills the cool-down"),
        *("(p-1) max(F, F+B-2W); m >= 2p-1, W <= F, W <= B", "min(m, 2p-1)", _ANY),
        "arXiv 2401.10241",
        reordered=True,
    ),
    Entry(
        *("interleaved-zb", interleaved_zb, "1F1B over chunks, W deferred"),
        *("(p-1)(F+B-W)/v; p divides m, W <= F, W <= B", "p; p divides m", _GROUPS),
        "arXiv 2401.10241",
        reordered=True,
    ),
    Entry(
        *("dualpipe-v", dualpipe_v, "Forward of one chunk beside backward of the other"),
        *("(p-1)/2; m >= 2p", "p+1/2", "p >= 1, m >= 1 (best from 2p), v = 2"),
        *("arXiv 2412.19437",),
        chunks=2,
    ),
    Entry(
        *("dualpipe-v-published", dualpipe_v_published, "The two overlapped, as published"),
        *("p-1; m >= 2p", "p+1/2", "p >= 1, m >= 1 (best from 2p), v = 2", "arXiv 2412.19437"),
        chunks=2,
    ),
    Entry(
        *("zb-v", zb_v, "Zero bubble in a stage's span on the V placement", "(p-1)/2; m >= p"),
        *("p", _V, "arXiv 2401.10241"),
        chunks=2,
        reordered=True,
    ),
    Entry(
        *("v-zb", v_zb, "The V block with ZB-V's strides", "(p-1)/2; m >= p", "p", _V),
        "arXiv 2405.15362",
        chunks=2,
        reordered=True,
    ),
    Entry(
        *("v-half", v_half, "Half of 1F1B's activations"),
        *("(3p-7)/2, odd p (3p-4)/2; m >= p >= 3", "floor((p+2)/2)", _V, "arXiv 2405.15362"),
        chunks=2,
        reordered=True,
    ),
    Entry(
        *("v-min", v_min, "A third of 1F1B's activations"),
        *("(4p-5)/2, if 3 divides p (4p-7)/2; m >= p >= 3", "floor((p+4)/3)", _V),
        "arXiv 2405.15362",
        chunks=2,
        reordered=True,
    ),
    Entry(
        *("1f1b-v", one_f_one_b_v, "Two thirds of 1F1B's activations; fused backwards"),
        *("at most 5(p-1)/2; m > p/2", "floor(2p/3)+1", _V, "arXiv 2405.15362"),
        chunks=2,
        reordered=True,
    ),
    Entry(
        *("controllable-memory", cached(controllable_memory)),
        "Searched V block under a memory limit",
        *("max(6p-1-3k, 3p-1-k)/2; m >= p, limit k/2 <= p", "memory_limit", _V),
        "arXiv 2405.15362",
        chunks=2,
    ),
    Entry(
        *("auto", cached(auto), "Placement and order searched for devices"),
        *("searched", "memory_limit, p by default", _AUTO, "jaxpipe"),
        chunks=None,
    ),
    *_with_fused(
        Entry(
            *("chimera", chimera, "Two model copies, opposite directions"),
            *("about p/2-1; m >= p", "at most p+1", _COPIES, "arXiv 2107.06925"),
            multiples={"num_microbatches": 2},
            executable=False,
        ),
        "2(p-2); m = p",
    ),
)
