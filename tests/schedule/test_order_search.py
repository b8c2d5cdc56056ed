"""The search for orders: against proven optima, under every limit, for chunks that differ."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule.actions import Schedule, split_backwards
from jaxpipe.schedule.check.validate import peak_in_flight, validate
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.search.auto import PlacedModel, published_schedules
from jaxpipe.schedule.search.bounds import lower_bound
from jaxpipe.schedule.search.local_search import improve
from jaxpipe.schedule.search.order_search import Rule, dispatch, search_orders
from jaxpipe.schedule.simulate import Costs, simulate

OPTIMA = json.loads((Path(__file__).parent / "optima.json").read_text())
"""By `benchmarks/proven_optima.py`."""


def known(record: dict) -> tuple[Placement, int, int, list[Costs]]:
    placement = Placement(tuple(record["placement"]))
    costs = [Costs(*record["costs"])] * placement.num_virtual_stages
    return placement, record["microbatches"], record["limit_chunks"], costs


def excess(record: dict) -> float:
    """How far what is found is above the optimum, relative to it."""
    placement, m, cap, costs = known(record)
    model = PlacedModel(placement, m, tuple(costs), cap, bound=0)
    seeds = map(split_backwards, published_schedules(model))
    found, *_ = search_orders(placement, m, costs=costs, cap=cap, seeds=seeds)
    validate(found)
    assert max(peak_in_flight(found)) <= cap
    return simulate(found, costs).makespan / record["optimum"] - 1


@pytest.mark.parametrize("step", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_close_to_proven_optima(step):
    found = [excess(record) for record in OPTIMA[::step]]
    assert min(found) > -1e-9
    assert mean(found) <= 0.02
    assert max(found) <= 0.05


def test_no_proven_optimum_is_below_the_bound():
    for record in OPTIMA:
        placement, m, cap, costs = known(record)
        assert lower_bound(placement, m, costs, cap=cap) <= record["optimum"] + 1e-9


def test_one_microbatch_at_a_time_is_not_one_after_another():
    found, *_ = search_orders(wave(8), 9, costs=[Costs(1, 1, 1)] * 16, cap=2)
    assert max(peak_in_flight(found)) == 2
    assert simulate(found, Costs(1, 1, 1)).makespan <= 193


shapes = st.sampled_from(
    [linear(1), linear(3), wave(1), wave(2), wave(4), wave(2, num_waves=2), wave(1, num_waves=3)]
    + [looped(p, num_chunks=v) for p, v in ((2, 2), (3, 2), (2, 4))]
)


@settings(max_examples=25)
@given(
    placement=shapes,
    m=st.integers(1, 7),
    extra=st.integers(0, 4),
    rule=st.builds(
        Rule,
        st.sampled_from([0.0, 0.5, 1.3]),
        st.sampled_from([0.0, 1.0, 8.0]),
        st.sampled_from([0.0, 0.5, 0.99]),
        st.booleans(),
        st.booleans(),
    ),
    data=st.data(),
)
def test_any_rule_and_limit_gives_an_order_that_runs_and_can_be_improved(
    placement, m, extra, rule, data
):
    times = st.sampled_from([0.5, 1.0, 2.7])
    costs = [
        Costs(*(data.draw(times) for _ in range(3)), data.draw(st.sampled_from([0, 0.4])))
        for _ in range(placement.num_virtual_stages)
    ]
    cap = placement.num_chunks + extra
    first = Schedule("made", placement, m, dispatch(placement, m, costs, cap, rule))
    better = improve(first, costs, cap=cap, moves=40, bound=0)
    for schedule in (first, better):
        validate(schedule)
        assert max(peak_in_flight(schedule)) <= cap
    bound = lower_bound(placement, m, costs, cap=cap)
    ends = [simulate(schedule, costs).makespan for schedule in (better, first)]
    assert bound <= ends[0] + 1e-9
    assert ends[0] <= ends[1] + 1e-9
