"""Layers into chunks: optimal against brute force, and even for equal costs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.placement import linear, looped, wave

PLACEMENTS = [linear(1), linear(3), linear(4), looped(2, num_chunks=2), wave(2), wave(3)]
PLACEMENTS += [looped(1, num_chunks=3), wave(2, num_waves=2)]
UNITS = [1, 0.125, 2.0**-1000, 2.0**1000]
costs_of_layers = st.lists(st.integers(1, 6), min_size=8, max_size=10)


def loads(layer_costs, counts):
    ends = [0, *itertools.accumulate(counts)]
    return [sum(layer_costs[a:b]) for a, b in itertools.pairwise(ends)]


def splits(num_layers, num_parts):
    for cuts in itertools.combinations(range(1, num_layers), num_parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))


def stage_loads(chunk_loads, placement):
    return [sum(chunk_loads[s] for s in held) for held in placement.virtual_stages]


def squares(values):
    return sum(value**2 for value in values)


@given(costs_of_layers, st.sampled_from(PLACEMENTS), st.sampled_from(UNITS))
def test_no_split_has_a_smaller_largest_chunk_and_no_move_evens_the_stages(costs, placement, unit):
    counts = partition([cost * unit for cost in costs], placement)
    every = list(splits(len(costs), placement.num_virtual_stages))
    assert counts in every
    mine = loads(costs, counts)
    largest = min(max(loads(costs, split)) for split in every)
    assert max(mine) == largest
    within = [split for split in every if max(loads(costs, split)) == largest]
    evenest = min(squares(loads(costs, split)) for split in within)
    on_stages = squares(stage_loads(mine, placement))
    assert on_stages <= max(
        squares(stage_loads(loads(costs, split), placement))
        for split in within
        if squares(loads(costs, split)) == evenest
    )
    for chunk, step in itertools.product(range(len(counts) - 1), (-1, 1)):
        split = list(counts)
        split[chunk] += step
        split[chunk + 1] -= step
        if tuple(split) in within:
            assert squares(stage_loads(loads(costs, split), placement)) >= on_stages


@given(st.integers(1, 40), st.sampled_from(PLACEMENTS), st.sampled_from([1, 0.1, 7.3]))
def test_layers_that_are_alike_give_chunks_that_are_alike(extra, placement, cost):
    num_parts = placement.num_virtual_stages
    share, longer = divmod(num_parts + extra, num_parts)
    even = (share + 1,) * longer + (share,) * (num_parts - longer)
    alike = [cost] * (num_parts + extra)
    assert partition(alike, placement) == even


@pytest.mark.parametrize(
    ("layer_costs", "placement", "message"),
    [
        ([1] * 3, linear(4), r"layer_costs of 3 layers .*Nearest valid: 4 layers\."),
        ([1, 0, -1], linear(2), r"(?s)layer_costs\[1\]=0 .*layer_costs\[2\]=-1 .* above 0"),
        ([1, float("nan")], linear(2), r"layer_costs\[1\]=nan "),
    ],
)
def test_what_cannot_be_split_is_refused(layer_costs, placement, message):
    with pytest.raises(ValueError, match=message):
        partition(layer_costs, placement)
