"""Building blocks: what the published schedules keep follows from their blocks alone."""

import itertools

import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.check import peak_in_flight, validate
from jaxpipe.schedule.generators.blocks import Block, BlockPlan, closest_block, split_block
from jaxpipe.schedule.generators.v_schedules import (
    one_f_one_b_v_block,
    v_half_block,
    v_min_block,
    v_zb_block,
)
from jaxpipe.schedule.placement import linear, looped, wave

M = 3
"""Microbatches of GPipe, whose block is as long as there are microbatches."""


def linear_block(p: int, down: int, up: int, *, delay: int = 0, wait: int = 0, fused: bool = False):
    """A block of one chunk per stage: units per hop of F and B, and microbatches by which W follows
    its B later on each stage than on the one before, and for which the last stage waits."""
    rows = []
    for d in range(p):
        b = down * (p - 1) + 1 + 3 * wait + up * (p - 1 - d)
        rows.append((down * d, b, b + 1 + 3 * delay * d))
    return Block(linear(p), tuple(rows), fused)


BLOCKS = {
    "gpipe": (lambda p: linear_block(p, 1, 2, wait=M - 1), lambda p, d: M),
    "1f1b-fused": (lambda p: linear_block(p, 1, 2, fused=True), lambda p, d: p - d),
    "eager-1f1b-fused": (
        lambda p: linear_block(p, 3, 3, fused=True),
        lambda p, d: 2 * (p - d) - 1,
    ),
    "zb-h1": (lambda p: linear_block(p, 1, 2, delay=1), lambda p, d: p),
    "zb-h2": (lambda p: linear_block(p, 3, 3, delay=2), lambda p, d: 2 * p - 1),
    "v-min": (v_min_block, lambda p, d: 2 * ((p + 4) // 3)),
    "v-half": (v_half_block, lambda p, d: 2 * ((p + 2) // 2)),
    "v-zb": (v_zb_block, lambda p, d: 2 * p),
    "1f1b-v": (one_f_one_b_v_block, lambda p, d: 2 * (2 * p // 3 + 1)),
}
"""What the papers say that a stage keeps, in chunks; on a V, of the stage that keeps the most."""


@pytest.mark.parametrize("name", BLOCKS)
def test_published_peaks_follow_from_the_blocks(name):
    make, published = BLOCKS[name]
    for p in range(2, 17):
        block = make(p)
        most = M if name == "gpipe" else max(block.peaks)
        peaks = [min(peak, most) for peak in block.peaks]
        if block.placement == wave(p):
            assert max(peaks) == published(p, 0)
        else:
            assert peaks == [published(p, d) for d in range(p)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b-fused", "eager-1f1b-fused", "zb-h1", "zb-h2"])
def test_schedules_of_one_chunk_are_their_blocks_repeated(name):
    """To the action: the block says all about the order."""
    for p in (2, 3, 5):
        m = M if name == "gpipe" else 3 * p
        named = catalog.build(name, stages=p, microbatches=m)
        assert BLOCKS[name][0](p).repeated("mine", m).orders == named.orders


PLACEMENTS = [wave(p, num_waves=n) for p in (1, 3, 8) for n in (1, 2, 3)]
PLACEMENTS += [linear(5), looped(4, num_chunks=3)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("fused", [False, True])
def test_blocks_of_any_number_of_chunks_repeat_into_valid_schedules(placement, fused):
    block = closest_block(placement, fused=fused)
    schedule = block.repeated("mine", 4 * placement.num_stages)
    validate(schedule)
    assert peak_in_flight(schedule) == block.peaks
    if not fused:
        squeezed = BlockPlan(block, block.peaks).schedule("squeezed", 9)
        assert squeezed is not None
        validate(squeezed)
        for order in squeezed.orders:  # the W's that end it, one chunk after the other
            last = itertools.takewhile(lambda action: action.kind is Kind.W, reversed(order))
            stages = [stage for stage, _ in itertools.groupby(last, lambda w: w.virtual_stage)]
            assert len(set(stages)) == len(stages)


def test_even_strides_on_two_waves():
    gaps = itertools.product((1, 2, 3), repeat=7)
    blocks = [block for gap in gaps if (block := split_block((4,) * 3, gap)) is not None]
    assert blocks
    for block in blocks:
        assert block.placement == wave(4, num_waves=2)
        validate(block.repeated("mine", 8))


def test_a_block_starts_every_pass_of_every_stage():
    with pytest.raises(ValueError, match=r"start \[2\] passes: each of 1 must start 3, F, B and W"):
        Block(linear(1), ((0, 1),))
