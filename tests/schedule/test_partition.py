"""Layers into chunks: optimal against brute force, and even for equal costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.schedule.partition import Memory, chunk_shares, partition
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


@given(costs_of_layers, st.sampled_from(PLACEMENTS), st.data())
def test_the_memory_limit_is_kept_by_the_best_split_that_keeps_it(costs, placement, data):
    sizes = st.lists(st.integers(0, 5), min_size=len(costs), max_size=len(costs))
    parameters, residuals = data.draw(sizes), data.draw(sizes)
    in_flight, limit = data.draw(st.integers(1, 4)), data.draw(st.integers(10, 80))
    memory = Memory(parameters, residuals, in_flight, limit)
    room = [
        placement.num_chunks * parameter + in_flight * residual
        for parameter, residual in zip(parameters, residuals, strict=True)
    ]
    every = list(splits(len(costs), placement.num_virtual_stages))
    fitting = [split for split in every if max(loads(room, split)) <= limit]
    if not fitting:
        least = min(max(loads(room, split)) for split in every)
        with pytest.raises(ValueError, match=rf"limit_bytes={limit} .*\n.*valid: {least}\."):
            partition(costs, placement, memory=memory)
        return
    counts = partition(costs, placement, memory=memory)
    assert counts in fitting
    assert max(loads(costs, counts)) == min(max(loads(costs, split)) for split in fitting)


@given(st.integers(1, 40), st.sampled_from(PLACEMENTS), st.sampled_from([1, 0.1, 7.3]))
def test_layers_that_are_alike_give_chunks_that_are_alike(extra, placement, cost):
    num_parts = placement.num_virtual_stages
    share, longer = divmod(num_parts + extra, num_parts)
    even = (share + 1,) * longer + (share,) * (num_parts - longer)
    alike = [cost] * (num_parts + extra)
    assert partition(alike, placement) == even
    # A limit that excludes nothing takes the general way.
    unlimited = Memory([0] * len(alike), [0] * len(alike), 1, 0)
    assert partition(alike, placement, memory=unlimited) == even


def test_the_shares_say_what_every_chunk_holds():
    rows = chunk_shares([1, 1, 2, 3, 1], (2, 1, 1, 1), wave(2))
    assert [(r.virtual_stage, r.stage, r.chunk) for r in rows] == [
        (0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 0, 1),
    ]  # fmt: skip
    assert [(r.first_layer, r.num_layers) for r in rows] == [(0, 2), (2, 1), (3, 1), (4, 1)]
    assert [r.share for r in rows] == [0.25, 0.25, 0.375, 0.125]


@pytest.mark.parametrize(
    ("layer_costs", "placement", "memory", "message"),
    [
        ([1] * 3, linear(4), None, r"layer_costs of 3 layers .*Nearest valid: 4 layers\."),
        ([1, 0, -1], linear(2), None, r"(?s)layer_costs\[1\]=0 .*layer_costs\[2\]=-1 .* above 0"),
        ([1, float("nan")], linear(2), None, r"layer_costs\[1\]=nan "),
        ([1] * 2, linear(2), Memory([1], [1, -1], 1, 9), r"(?s)parameter_bytes=.*residual_bytes="),
    ],
)
def test_what_cannot_be_split_is_refused(layer_costs, placement, memory, message):
    with pytest.raises(ValueError, match=message):
        partition(layer_costs, placement, memory=memory)
