"""The validator refuses every schedule that cannot run, says why, shows where, and always ends."""

import dataclasses

import pytest
from any_schedule import built
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check import ScheduleError, peak_in_flight, validate, walk
from jaxpipe.schedule.placement import Placement, linear


def orders(*rows: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)


def schedule(*rows: str, m: int, **fields) -> Schedule:
    return Schedule("test", fields.pop("placement", linear(len(rows))), m, orders(*rows), **fields)


def with_order(base: Schedule, stage: int, order: list[Action]) -> Schedule:
    rows = list(base.orders)
    rows[stage] = tuple(order)
    return dataclasses.replace(base, orders=tuple(rows))


@st.composite
def places(draw) -> tuple[Schedule, int, int]:
    """A valid schedule with a stage and a position in that stage's order."""
    base = draw(built(stages=5, microbatches=6))
    stage = draw(st.integers(0, base.num_stages - 1))
    return base, stage, draw(st.integers(0, len(base.orders[stage]) - 1))


def refusal(broken: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(broken)
    return str(caught.value)


@given(places())
def test_a_dropped_action_is_refused_by_name(case):
    base, d, k = case
    order = list(base.orders[d])
    dropped = order.pop(k)
    broken = with_order(base, d, order)
    text, wanted = refusal(broken), str(dropped)
    is_left = any(action.kind is Kind.BW for row in broken.orders for action in row)
    if base.mixes_backwards or not is_left:
        # Where no BW, or not only BW, is left to tell, a missing one looks like a split pair.
        wanted = wanted.replace("BW", "B")
    assert f"{wanted} is missing from stage {d}" in text
    assert f">{wanted}?" in text


@given(places())
def test_a_repeated_action_is_refused_by_name(case):
    base, d, k = case
    order = list(base.orders[d])
    order.insert(k, order[k])
    text = refusal(with_order(base, d, order))
    assert f"{order[k]} on stage {d} runs a second time." in text
    assert f">{order[k]}<" in text


@given(places(), st.integers(0, 4))
def test_an_action_on_the_wrong_stage_is_refused(case, other):
    base, d, k = case
    other %= base.num_stages
    assume(other != d)
    order = list(base.orders[d])
    moved = order.pop(k)
    broken = with_order(with_order(base, d, order), other, [*base.orders[other], moved])
    assert (
        f"{moved} on stage {other} is on the wrong stage: virtual stage {moved.virtual_stage} is "
        f"held by stage {d}."
    ) in refusal(broken)


@given(places(), st.data())
def test_any_reordering_is_either_refused_or_runs_in_dependency_order(case, data):
    base, d, _ = case
    shuffled = with_order(base, d, data.draw(st.permutations(base.orders[d])))
    # Which actions run together is another question: tests/schedule/test_overlapped.py.
    shuffled = dataclasses.replace(shuffled, peak_in_flight=None, overlapped=())
    walked = walk(shuffled)
    if walked.blockers:
        with pytest.raises(ScheduleError, match=r"Deadlock|comes before its own"):
            validate(shuffled)
    else:
        validate(shuffled)
        position = {action: k for k, action in enumerate(shuffled.orders[d])}
        for action, k in position.items():
            forward = Action(action.virtual_stage, Kind.F, action.microbatch)
            assert position[forward] <= k


@given(
    st.lists(
        st.lists(st.builds(Action, st.integers(-1, 3), st.sampled_from(Kind), st.integers(-1, 3))),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 3),
)
def test_anything_at_all_ends_with_an_answer(rows, m):
    anything = Schedule("any", linear(len(rows)), m, tuple(tuple(row) for row in rows))
    try:
        validate(anything)
    except ScheduleError as error:
        assert "cannot run" in str(error)  # noqa: PT017


def test_the_grid_marks_the_cell_where_a_cycle_stops():
    stuck = schedule("0F0 0BW0", "1BW0 1F0", m=1)
    assert refusal(stuck).splitlines() == [
        "Schedule 'test' (2 stages, 1 microbatches) cannot run:",
        "  1BW0 on stage 1 comes before its own F, 1F0.",
        "  Deadlock: stage 0 stops for good at 0BW0, which waits for the result of 1BW0.",
        "tick      0     1     2     3     4     5     6     7     8     9     10    11",
        "stage 0   0F0  >0BW0< .     .     .     .     .     .     .     .     .     .",
        "stage 1  >1BW0< 1F0   .     .     .     .     .     .     .     .     .     .",
    ]


def test_the_grid_marks_the_cells_of_a_deadlock_between_stages():
    text = refusal(schedule("0F0 0B0 0W0 0F1 0B1 0W1", "1F0 1F1 1B0 1W0 1B1 1W1", m=2))
    for said in (
        "Deadlock: stage 0 stops for good at 0B0, which waits for the result of 1B0.",
        "Deadlock: stage 1 stops for good at 1F1, which waits for the result of 0F1.",
        *(">0B0<", ">1F1<"),
    ):
        assert said in text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_microbatches": 2.0}, r"num_microbatches=2\.0 is float, and must be int\."),
        ({"num_microbatches": 0}, "num_microbatches=0 is below 1"),
        ({"orders": None}, r"orders is NoneType, and must be a tuple of one tuple for every stage"),
        ({"orders": (None,) * 2}, r"orders is tuple, and must be a tuple of one tuple"),
        ({"orders": ()}, "There are 0 orders for 2 stages"),
        ({"orders": (("0F0",), ())}, r"'0F0' on stage 0 is str, and must be an Action"),
        (
            {"orders": ((Action(0, "F", 0),), ())},
            r"kind='F'.* is Action, and must be an Action \(int,",
        ),
        ({"orders": ((Action(0.0, Kind.F, 0),), ())}, r"must be an Action \(int, Kind, int\)"),
        ({"placement": (0, 1)}, "placement is tuple, and must be a Placement"),
        ({"placement": Placement(("0", "1"))}, "stages is tuple, and must be a tuple of noth"),
        ({"placement": Placement((0, 0, 1))}, r"virtual stages: stage 1 holds 1, stage 0 holds 2"),
        ({"placement": Placement((0,))}, r"virtual stages: stage 1 holds 0, stage 0 holds 1\."),
        ({"placement": Placement((0, 7))}, r"virtual stages: stage 1 holds 0, stage 0 holds 1\."),
        ({"placement": Placement(())}, "same number of virtual stages: it is empty"),
        ({"peak_in_flight": 3}, "peak_in_flight is int, and must be a tuple"),
        ({"peak_in_flight": (1,)}, "peak_in_flight has 1 values for 2 stages"),
    ],
)
def test_malformed_schedules_are_refused(fields, expected):
    base = catalog.build("gpipe", stages=2, microbatches=2)
    with pytest.raises(ScheduleError, match=expected):
        validate(dataclasses.replace(base, **fields))


def test_large_schedules_show_only_the_surroundings_of_the_cell():
    base = catalog.build("1f1b", stages=32, microbatches=64)
    broken = dataclasses.replace(base, peak_in_flight=(*base.peak_in_flight[:20], 1, *[9] * 11))
    lines = refusal(broken).splitlines()
    assert "20F1 on stage 20 exceeds the promised peak in flight: 12 chunks against 1." in lines[1]
    assert any(line.startswith("stage 20") and ">20F1<" in line for line in lines)
    assert len(lines) < 20
    assert max(map(len, lines)) < 120


def test_memory_is_freed_by_w_not_by_b():
    late = schedule("0F0 0B0 0F1 0B1 0W0 0W1", m=2)
    assert peak_in_flight(late) == (2,)
    assert peak_in_flight(schedule("0F0 0BW0 0F1 0BW1", m=2)) == (1,)


def test_split_and_fused_may_mix_but_not_for_one_microbatch_of_a_virtual_stage():
    validate(schedule("0F0 0F1 0BW0 0B1 0W1", "1F0 1B0 1W0 1F1 1BW1", m=2))
    for row in ("0F0 0BW0 0B0 0W0", "0F0 0B0 0BW0 0W0", "0F0 0W0 0B0 0BW0"):
        with pytest.raises(ScheduleError, match="mixes split and fused backward"):
            validate(schedule(row, m=1))


def test_no_number_of_missing_actions_takes_long():
    with pytest.raises(ScheduleError, match="and at least 992 more"):
        validate(schedule("0F0 0BW0", m=10**12))
