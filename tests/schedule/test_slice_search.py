"""The search for slices: short lock-step runs, and the same slices however it is asked."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule.check.validate import validate
from jaxpipe.schedule.generators.dualpipe import dualpipe_v
from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
from jaxpipe.schedule.generators.v_schedules import one_f_one_b_v, v_half, v_min, zb_v
from jaxpipe.schedule.search.slices import FIRST_TRIAL, OTHER_TRIALS, Uncut, slice_all, slice_ticks
from jaxpipe.schedule.simulate import Costs, lock_step, simulate

# No test may depend on how fast the machine is.
settings.register_profile("jaxpipe", deadline=None)
settings.load_profile("jaxpipe")


def bubble(schedule, priced, layers) -> tuple[float, float]:
    cut = slice_ticks(schedule, priced, [layers] * schedule.placement.num_virtual_stages)
    validate(cut)
    return lock_step(cut, priced).bubble_ratio, simulate(schedule, priced).bubble_ratio


@pytest.mark.parametrize(
    ("generate", "p", "bar"),
    [
        (zb_v, 4, 0.040), (zb_v, 8, 0.052),
        (one_f_one_b, 4, 0.130), (one_f_one_b, 8, 0.150),
        (v_half, 4, 0.092), (v_half, 8, 0.135),
    ],
)  # fmt: skip
def test_sliced_bubbles(generate, p, bar):
    assert bubble(generate(p, 4 * p), Costs(1, 1.2, 0.8), 8)[0] <= bar


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("generate", [zb_v, one_f_one_b, v_half])
def test_slices_reach_the_free_running_clock_where_layers_divide_evenly(generate, p):
    locked, free = bubble(generate(p, 4 * p), Costs(1, 2, 1), 4)
    assert locked <= free + 1e-9


def test_slicing_is_deterministic_and_starts_over():
    schedule, priced = v_half(3, 4), Costs(1, 1.2, 0.8)
    once = slice_ticks(schedule, priced, [2] * 6)
    assert once == slice_ticks(schedule, priced, [2] * 6)
    validate(slice_ticks(once, priced, [1] * 6))


def test_schedules_cut_together_or_stopped_early_are_those_cut_alone():
    counts, trials = (3, 2, 3, 2, 3, 2), FIRST_TRIAL + OTHER_TRIALS
    costs = (Costs(1, 1.2, 0.8, 0.1),) * 6
    uncut = [Uncut(make(3, 5), costs, counts) for make in (zb_v, v_half, v_min, one_f_one_b_v)]
    uncut.append(Uncut(one_f_one_b(3, 4), costs[:3], (5, 4, 6)))
    alone = [slice_ticks(*each) for each in uncut]
    together = slice_all(uncut, trials)
    assert [timeline.schedule for timeline in together] == alone
    latest = sorted(timeline.makespan for timeline in together)[2]
    for stopped, whole in zip(slice_all(uncut, trials, makespan=latest), together, strict=True):
        assert stopped == whole if whole.makespan < latest else stopped.makespan >= latest - 1e-9


one_f_one_b_fused = functools.partial(one_f_one_b, fused=True)


@settings(max_examples=25)
@given(
    make=st.sampled_from([zb_v, v_half, one_f_one_b, one_f_one_b_fused, dualpipe_v]),
    p=st.integers(1, 3),
    m=st.integers(1, 4),
    layers=st.integers(1, 3),
    costs=st.builds(Costs, *[st.sampled_from([0.5, 1, 1.75])] * 3, st.sampled_from([0, 0.1, 1])),
    uneven=st.booleans(),
)
def test_no_search_stops_that_can_still_end_before(make, p, m, layers, costs, uneven):
    schedule = make(p, m)
    number = schedule.placement.num_virtual_stages
    last = dataclasses.replace(costs, f=3, w=0.25) if uneven else costs
    counts = (*(layers,) * (number - 1), layers + uneven)
    uncut = Uncut(schedule, (*(costs,) * (number - 1), last), counts)
    [whole] = slice_all([uncut], FIRST_TRIAL + OTHER_TRIALS)
    latest = whole.makespan * (1 + 1e-6)
    [stopped] = slice_all([uncut], FIRST_TRIAL + OTHER_TRIALS, makespan=latest)
    assert stopped == whole


def test_long_messages_leave_actions_whole():
    schedule = one_f_one_b(2, 2)
    assert slice_ticks(schedule, Costs(1, 1, 1, 50), [4, 4]).slices is None
