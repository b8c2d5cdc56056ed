"""The gallery: the building blocks of the published schedules, side by side.

``python -m jaxpipe.schedule.show.gallery docs/images/blocks.svg`` writes the picture; the
documentation shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.generators.blocks import Block, closest_block, looped_block
from jaxpipe.schedule.generators.v_schedules import (
    one_f_one_b_v_block,
    v_half_block,
    v_min_block,
    v_zb_block,
)
from jaxpipe.schedule.placement import wave
from jaxpipe.schedule.show.draw import save
from jaxpipe.schedule.show.looks import LOOKS, shade_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = (Kind.F, Kind.B, Kind.W)

GPIPE_MICROBATCHES = 3
"""The block of GPipe is as long as there are microbatches."""

BLOCKS: dict[str, Callable[[int], Block]] = {
    "gpipe": lambda p: looped_block(p, strides=(1, 2), wait=GPIPE_MICROBATCHES - 1),
    "1f1b-fused": lambda p: looped_block(p, strides=(1, 2), fused=True),
    "zb-h1": lambda p: looped_block(p, strides=(1, 2), delay=1),
    "zb-h2": lambda p: looped_block(p, strides=(3, 3), delay=2),
    "interleaved-fused": lambda p: looped_block(p, num_chunks=2, strides=(3, 3), fused=True),
    "interleaved-zb": lambda p: looped_block(p, num_chunks=2, strides=(1, 2), delay=1),
    "v-min": v_min_block,
    "v-half": v_half_block,
    "v-zb": v_zb_block,
    "1f1b-v": one_f_one_b_v_block,
    "two waves": lambda p: closest_block(wave(p, num_waves=2)),
}
"""Makers of the block of p stages, by the name of its schedule; the last has no schedule."""


def figure(num_stages: int = 4) -> Figure:
    """Draws every block: stages from top to bottom, time to the right.

    Passes are coloured as in the drawings of schedules, later chunks darker; the pale ones behind
    are those of other microbatches, and fill the gaps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = 2
    rows = -(-len(BLOCKS) // columns)
    drawn = Figure(figsize=(12, 0.6 + 1.5 * rows), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(rows, columns, squeeze=False).ravel()
    for panel, (name, make) in zip(axes, BLOCKS.items(), strict=False):
        _draw(panel, name, make(num_stages))
    for panel in axes[len(BLOCKS) :]:
        panel.set_axis_off()
    drawn.legend(
        handles=[Patch(color=LOOKS[kind].light, label=LOOKS[kind].meaning) for kind in _KINDS],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return drawn


def _draw(axes: Axes, name: str, block: Block) -> None:
    first = min(map(min, block.starts))
    last = max(map(max, block.starts)) + 1
    around = range(-(last // 3) - 1, last // 3 + 2)
    chunks = block.num_chunks
    for stage, row in enumerate(block.starts):
        for number, start in enumerate(row):
            turn, place = divmod(number, chunks)
            chunk = place if turn == 0 else chunks - 1 - place
            colour = shade_of(_KINDS[turn], chunk / max(chunks - 1, 1))
            repeats = {start + block.enters(i) for i in around} - {start}
            times = [(time, 1) for time in sorted(repeats) if first <= time < last]
            for spans, alpha in ((times, 0.25), ([(start, 1)], 1.0)):
                axes.broken_barh(
                    spans,
                    (stage - 0.45, 0.9),
                    facecolors=colour,
                    edgecolors="white",
                    linewidth=0.6,
                    alpha=alpha,
                )
    axes.set_xlim(first, last)
    axes.set_ylim(len(block.starts) - 0.5, -0.5)
    axes.set_yticks(range(len(block.starts)))
    axes.tick_params(labelsize=6)
    axes.spines[["top", "right"]].set_visible(False)
    peaks = ", ".join(f"{peak / chunks:g}" for peak in block.peaks)
    title = f"{name}: T = {block.period}, in flight at most {peaks}, or m"
    axes.set_title(title, fontsize=8, loc="left")


if __name__ == "__main__":
    save(figure(), sys.argv[1])
