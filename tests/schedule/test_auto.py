"""The search for the lock-step clock: under its bars and its memory limit, and never beaten."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.check.validate import peak_in_flight, validate
from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
from jaxpipe.schedule.generators.v_schedules import v_half, v_min, zb_v
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.partition import partition
from jaxpipe.schedule.placement import linear, looped, wave
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.auto_placed import auto_placed
from jaxpipe.schedule.search.bounds import lower_bound
from jaxpipe.schedule.search.candidates import named
from jaxpipe.schedule.search.cuts import cuts
from jaxpipe.schedule.search.slices import FIRST_TRIAL, OTHER_TRIALS, Uncut, slice_all, slice_ticks
from jaxpipe.schedule.simulate import Costs, lock_step

# No test may depend on how fast the machine is.
settings.register_profile("jaxpipe", deadline=None)
settings.load_profile("jaxpipe")

COSTS = Costs(1, 1.2, 0.8)


@functools.cache
def searched(p, memory_limit, layers):
    """For 4p microbatches; several tests look at one result."""
    return auto(p, 4 * p, costs=COSTS, memory_limit=memory_limit, layers_per_chunk=layers)


@pytest.mark.parametrize(
    ("p", "memory_limit", "layers", "bar"),
    [(4, 4, 4, 0.044), (4, 4, 2, 0.042), (4, 3, 4, 0.103), (4, 3, 2, 0.113), (8, 8, 2, 0.055)],
)
def test_bubble_in_lock_step(p, memory_limit, layers, bar):
    found = searched(p, memory_limit, layers)
    validate(found)
    assert lock_step(found, COSTS).bubble_ratio <= bar
    assert max(peak_in_flight(found)) <= 2 * memory_limit


@settings(max_examples=20)
@given(
    p=st.integers(1, 3),
    m=st.integers(1, 4),
    chunks=st.integers(1, 3),
    shape=st.sampled_from(["linear", "looped", "wave"]),
    limit=st.sampled_from([1, 1.5, 2, 3.5, None]),
    layers=st.integers(1, 3),
    prices=st.sampled_from([COSTS, Costs(1, 1, 1), Costs(1, 3, 0.5, 0.2)]),
)
def test_any_placement_and_limit_gives_a_schedule_that_runs(
    p, m, chunks, shape, limit, layers, prices
):
    placement = {
        "linear": linear(p),
        "looped": looped(p, num_chunks=chunks),
        "wave": wave(p, num_waves=chunks),
    }[shape]
    found = auto(
        p, m, costs=prices, memory_limit=limit, layers_per_chunk=layers, placement=placement
    )
    validate(found)
    assert found.name == "auto"
    assert found.peak_in_flight == peak_in_flight(found)
    assert max(peak_in_flight(found)) <= (limit or p) * placement.num_chunks
    lower(found, [layers] * placement.num_virtual_stages)


@pytest.mark.parametrize("generate", [zb_v, v_half, v_min])
def test_no_named_schedule_under_the_same_limit_ends_before(generate):
    ends = lock_step(searched(4, 4, 2), COSTS).makespan
    assert lock_step(slice_ticks(generate(4, 16), COSTS, [2] * 8), COSTS).makespan >= ends - 1e-9


def test_schedules_ordered_for_the_costs_of_users_are_not_ahead():
    layers, costs = [Costs(2.5, 3, 2, 0.25)] * 20, Costs(5, 6, 4, 0.25)
    theirs = catalog.build("hanayo", stages=5, microbatches=23, costs=costs, memory_limit=9)
    found = auto_placed(5, 23, layer_costs=layers, memory_limit=9)
    [price] = [cut.costs for cut in cuts(5, layers) if cut.placement == found.placement]
    first = lock_step(slice_ticks(theirs, costs, [2] * 10), costs).makespan
    assert lock_step(found, price).makespan <= first


def test_uneven_layers_and_own_candidates():
    counts = (3, 2, 2)
    candidate = one_f_one_b(3, 5)
    found = auto(
        3, 5, costs=COSTS, layer_counts=counts, placement=linear(3), candidates=[candidate]
    )
    validate(found)
    lower(found, counts)
    sliced = slice_ticks(candidate, COSTS, counts)
    assert lock_step(found, COSTS).makespan <= lock_step(sliced, COSTS).makespan + 1e-9


@settings(max_examples=10)
@given(
    p=st.integers(1, 3),
    m=st.integers(1, 4),
    layers=st.lists(st.sampled_from([0.5, 1, 1.75]), min_size=3, max_size=6),
    message=st.sampled_from([0, 0.1, 1]),
    limit=st.sampled_from([1, 1.5, 3]),
)
def test_no_lock_step_of_unlike_layers_ends_before_the_bound(p, m, layers, message, limit):
    layer_costs = [Costs(f, 1.2, 2 - f, message) for f in layers]
    found = auto_placed(p, m, layer_costs=layer_costs, memory_limit=limit)
    validate(found)
    # On one stage a loop is a wave, too.
    cut = next(each for each in cuts(p, layer_costs) if each.placement == found.placement)
    peak, ends = max(peak_in_flight(found)), lock_step(found, cut.costs).makespan
    assert peak <= limit * found.num_chunks
    for bound in (cut.bound_at(m, peak), lower_bound(cut.placement, m, cut.costs, cap=peak)):
        assert bound <= ends + 1e-9


@pytest.mark.parametrize("kind", ["f", "b", "w"])
def test_costs_so_far_apart_that_short_actions_are_lost_in_sums(kind):
    validate(auto(4, 8, costs=Costs(**({"f": 1, "b": 1, "w": 1} | {kind: 2.0**63}))))


def test_the_same_arguments_give_the_same_schedule():
    arguments = {"costs": COSTS, "memory_limit": 1.5, "layers_per_chunk": 2}
    assert auto(2, 4, **arguments) == auto(2, 4, **arguments)


def test_no_candidate_has_to_fit():
    candidate = zb_v(2, 4)
    validate(auto(2, 4, costs=COSTS, memory_limit=1, candidates=[candidate]))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"memory_limit=0\.5 .*\nNearest valid: 1\."):
        auto(2, 4, memory_limit=0.5)
    with pytest.raises(ValueError, match=r"(?s)num_stages=3\..*memory_limit=0 does"):
        auto(3, 4, memory_limit=0, placement=linear(2))
    with pytest.raises(ValueError, match="does not fit 4 virtual stages"):
        auto(2, 4, layer_counts=[1, 1])
    with pytest.raises(ValueError, match="not all on its placement"):
        auto(2, 4, candidates=[one_f_one_b(2, 4)])


def test_costs_of_every_virtual_stage_are_planned_with():
    costs = [Costs(1, 1.2, 0.8)] * 3 + [Costs(3, 3.6, 2.4)] * 3
    counts = (1, 1, 1, 3, 3, 3)
    arguments = {"memory_limit": 2, "placement": wave(3), "layer_counts": counts}
    found, blind = (auto(3, 5, costs=c, **arguments) for c in (costs, costs[0]))
    validate(found)
    lower(found, counts)
    assert max(peak_in_flight(found)) <= 4
    assert lock_step(found, costs).makespan <= lock_step(blind, costs).makespan


@pytest.mark.parametrize(("message", "interleaves"), [(0, True), (5, False)])
def test_the_placement_depends_on_the_time_of_messages(message, interleaves):
    layers = [Costs(1, 1.2, 0.8, message)] * 4
    found = auto_placed(2, 4, layer_costs=layers)
    validate(found)
    assert (found.num_chunks > 1) == interleaves
    assert max(peak_in_flight(found)) <= 2 * found.num_chunks
    lower(found, partition([1] * 4, found.placement))


@pytest.mark.parametrize(
    ("p", "m", "layers", "message", "limit"),
    [(2, 5, 4, 0.1, 1.5), (3, 4, 6, 0, 3), (2, 6, 4, 0.5, 4), (4, 5, 8, 0.1, 2.5), (3, 7, 3, 0, 3)],
)
def test_no_named_schedule_of_the_same_model_in_the_same_memory_ends_before(
    p, m, layers, message, limit
):
    layer_costs = [Costs(1, 1.2, 0.8, message)] * layers
    found = auto_placed(p, m, layer_costs=layer_costs, memory_limit=limit)
    validate(found)
    ways = [cut for cut in cuts(p, layer_costs) if len(set(cut.layer_counts)) == 1]
    [ends] = (
        lock_step(found, cut.costs).makespan
        for cut in cuts(p, layer_costs)
        if cut.placement == found.placement
    )
    fitting = [
        Uncut(schedule, cut.costs, cut.layer_counts)
        for cut in ways
        for schedule in named(cut.placement, m, cap=cut.cap(m, limit), costs=cut.costs[0])
    ]
    assert fitting
    sliced = slice_all(fitting, FIRST_TRIAL + OTHER_TRIALS)
    assert ends <= min(timeline.makespan for timeline in sliced) + 1e-9


def test_a_model_of_fewer_layers_than_stages_is_refused():
    with pytest.raises(ValueError, match="2 layers cannot fill num_stages=3: each needs a layer"):
        auto_placed(3, 4, layer_costs=[Costs(1, 1, 1)] * 2)
