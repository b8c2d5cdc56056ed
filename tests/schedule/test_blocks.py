"""Building blocks: what the published schedules keep follows from their blocks alone."""

from __future__ import annotations

import itertools

import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.check.validate import peak_in_flight, validate
from jaxpipe.schedule.generators import block_orders
from jaxpipe.schedule.generators.blocks import Block, closest_block, split_block
from jaxpipe.schedule.placement import linear, looped, wave
from jaxpipe.schedule.show import gallery
from jaxpipe.schedule.show.gallery import BLOCKS, GPIPE_MICROBATCHES
from jaxpipe.schedule.simulate import UNIT

PEAKS = {
    "gpipe": lambda p, d: GPIPE_MICROBATCHES,
    "1f1b-fused": lambda p, d: p - d,
    "zb-h1": lambda p, d: p,
    "zb-h2": lambda p, d: 2 * p - 1,
    "interleaved-fused": lambda p, d: 2 * (p - d - 1) + p + 1,
    "interleaved-zb": lambda p, d: 2 * p,
    "v-min": lambda p, d: 2 * ((p + 4) // 3),
    "v-half": lambda p, d: 2 * ((p + 2) // 2),
    "v-zb": lambda p, d: 2 * p,
    "1f1b-v": lambda p, d: 2 * (2 * p // 3 + 1),
}
"""What the papers say that a stage keeps, in chunks; on a V, of the stage that keeps the most."""


def repeated(block: Block, num_microbatches: int, name: str = "repeated"):
    orders = block_orders.repeated(block, num_microbatches)
    return block_orders.to_schedule(name, block.placement, orders, num_microbatches, block.peaks)


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.parametrize("p", range(2, 17))
def test_published_peaks_follow_from_the_blocks(name, p):
    block = BLOCKS[name](p)
    assert not list(block.faults())
    most = GPIPE_MICROBATCHES if name == "gpipe" else max(block.peaks)
    peaks = [min(peak, most) for peak in block.peaks]
    if block.placement == wave(p):
        assert max(peaks) == PEAKS[name](p, 0)
    else:
        assert peaks == [PEAKS[name](p, d) for d in range(p)]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_stage_keeps_no_more_than_the_lifespans_of_its_chunks_allow(name):
    """The paper's bound, for blocks that repeat microbatch by microbatch."""
    block = BLOCKS[name](6)
    bounds = [0] * 6
    for s, start, end in block.lifespans:
        bounds[block.placement.stages[s]] += -(-(end - start) // block.period)
    if block.group == 1:
        assert all(peak <= bound for peak, bound in zip(block.peaks, bounds, strict=True))
        assert block.placement.num_chunks > 1 or list(block.peaks) == bounds


@pytest.mark.parametrize("name", [name for name in PEAKS if "v" not in name.split("-")])
@pytest.mark.parametrize("p", [2, 3, 5])
def test_depth_first_schedules_are_their_blocks_repeated(name, p):
    """To the action: the block says all about the order."""
    block = BLOCKS[name](p)
    m = GPIPE_MICROBATCHES if name == "gpipe" else 3 * p
    named = catalog.build(name, stages=p, microbatches=m)
    assert repeated(block, m).orders == named.orders


PLACEMENTS = [wave(p, num_waves=n) for p in (1, 2, 3, 5, 8) for n in (1, 2, 3)]
PLACEMENTS += [linear(5), looped(4, num_chunks=3)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("fused", [False, True])
def test_blocks_of_any_number_of_chunks_repeat_into_valid_schedules(placement, fused):
    block = closest_block(placement, fused=fused)
    assert not list(block.faults())
    schedule = repeated(block, 4 * placement.num_stages)
    validate(schedule)
    assert peak_in_flight(schedule) == block.peaks
    if not fused:
        timed = block_orders.eager(block, 9, caps=block.peaks, costs=UNIT)
        assert timed is not None
        validate(block_orders.to_schedule("eager", placement, timed.orders, 9, block.peaks))


def test_even_strides_on_two_waves():
    gaps = itertools.product((1, 2, 3), repeat=7)
    blocks = [block for gap in gaps if (block := split_block((4,) * 3, gap)) is not None]
    assert blocks
    for block in blocks:
        assert block.placement == wave(4, num_waves=2)
        assert not list(block.faults())
        validate(repeated(block, 8))


def test_what_cannot_be_repeated_says_why():
    block = Block(linear(2), ((0, 3, 6), (1, 1, 3)))
    assert list(block.faults()) == [
        "Passes of stage 0 meet in slot 0 of 3.",
        "Passes of stage 1 meet in slot 1 of 3.",
        "B of virtual stage 1 starts before F of 1 has ended.",
    ]
    with pytest.raises(ValueError, match=r"start \[2\] passes: each of 1 must start 3, F, B and W"):
        Block(linear(1), ((0, 1),))


def test_the_gallery_draws_every_block():
    titles = [axes.get_title(loc="left") for axes in gallery.figure(3).axes]
    assert [title.partition(":")[0] for title in titles if title] == list(BLOCKS)
    assert "zb-h1: T = 3, in flight at most 3, 3, 3, or m" in titles
