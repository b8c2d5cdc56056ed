"""The table of the built-in schedules; `docs/schedules.md` has their bubbles and peaks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.generators.breadth_first import breadth_first, modular
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
OPTIONS = ("num_chunks", "group", "num_slices", "memory_limit", *MEASURES)
"""Options of schedules beyond stages and microbatches."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule of the registry.

    Args:
      name: what users call it by.
      generate: called as ``generate(num_stages, num_microbatches, **options)``. It reads the
        `OPTIONS` that are its keyword-only parameters.
      summary: one line.
      source: the paper.
      chunks: v if the schedule does not read ``num_chunks``; None if only the schedule knows it.
      multiples: numbers that must be multiples of another, by parameter.
      reordered: whether `catalog.build` orders it anew for the costs it is given.
    """

    name: str
    generate: Generate
    summary: str
    source: str
    chunks: int | None = 1
    multiples: Mapping[str, int] = dataclasses.field(default_factory=dict)
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


def _with_fused(entry: Entry) -> tuple[Entry, Entry]:
    """Pairs an entry of split backwards with its fused variant."""
    return entry, dataclasses.replace(
        entry,
        name=f"{entry.name}-fused",
        generate=partial(entry.generate, fused=True),
        summary=f"{entry.summary}; fused backwards",
    )


def _on_v(name: str, generate: Generate, summary: str, source: str) -> Entry:
    """Makes the entry of a schedule on the V placement that is reordered for its costs."""
    return Entry(name, generate, summary, source, chunks=2, reordered=True)


_BREADTH_FIRST, _ZERO_BUBBLE = "arXiv 2211.05953", "arXiv 2401.10241"
_DUALPIPE, _CONTROLLABLE_MEMORY = "arXiv 2412.19437", "arXiv 2405.15362"

BUILT_IN = (
    *_with_fused(Entry("gpipe", gpipe, "All forwards, then all backwards", "arXiv 1811.06965")),
    *_with_fused(
        Entry("1f1b", one_f_one_b, "One forward, one backward in turn", "arXiv 2006.09503")
    ),
    *_with_fused(
        Entry("interleaved", interleaved, "1F1B over chunks, depth-first", "arXiv 2104.04473")
    ),
    *_with_fused(
        Entry("breadth-first", breadth_first, "All microbatches, chunk by chunk", _BREADTH_FIRST)
    ),
    Entry(
        "breadth-first-descending",
        partial(breadth_first, descending=True),
        "Breadth-first, last microbatch's backward first",
        _BREADTH_FIRST,
    ),
    *_with_fused(
        Entry("modular", modular, "Breadth-first, one layer per chunk", "arXiv 2106.02679")
    ),
    *_with_fused(
        Entry(
            "hanayo",
            hanayo,
            "v/2 waves down and up the stages",
            "arXiv 2308.15762",
            multiples={"num_chunks": 2},
            reordered=True,
        )
    ),
    Entry("zb-h1", zb_h1, "1F1B, W deferred until memory is level", _ZERO_BUBBLE, reordered=True),
    Entry(
        "zb-h2",
        zb_h2,
        "1F1B with twice the warm-up, W fills the cool-down",
        _ZERO_BUBBLE,
        reordered=True,
    ),
    Entry(
        "interleaved-zb",
        interleaved_zb,
        "1F1B over chunks, W deferred",
        _ZERO_BUBBLE,
        reordered=True,
    ),
    Entry(
        "dualpipe-v",
        dualpipe_v,
        "Forward of one chunk beside backward of the other",
        _DUALPIPE,
        chunks=2,
    ),
    Entry(
        "dualpipe-v-published",
        dualpipe_v_published,
        "Forward and backward in pairs, as published",
        _DUALPIPE,
        chunks=2,
    ),
    _on_v("zb-v", zb_v, "Zero bubble in a stage's span on the V placement", _ZERO_BUBBLE),
    _on_v("v-zb", v_zb, "The V block with ZB-V's strides", _CONTROLLABLE_MEMORY),
    _on_v("v-half", v_half, "Half of 1F1B's activations", _CONTROLLABLE_MEMORY),
    _on_v("v-min", v_min, "A third of 1F1B's activations", _CONTROLLABLE_MEMORY),
    _on_v(
        "1f1b-v",
        one_f_one_b_v,
        "Two thirds of 1F1B's activations; fused backwards",
        _CONTROLLABLE_MEMORY,
    ),
    Entry(
        "controllable-memory",
        cached(controllable_memory),
        "Searched V block under a memory limit",
        _CONTROLLABLE_MEMORY,
        chunks=2,
    ),
    Entry("auto", cached(auto), "Placement and order searched for devices", "jaxpipe", chunks=None),
)
