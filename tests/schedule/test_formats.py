"""Schedules survive trips through PyTorch's CSV and JSON; anything else is refused."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule, dependencies, split_action
from jaxpipe.schedule.check import ScheduleError
from jaxpipe.schedule.formats import from_json, parse_csv, read_csv, to_json, write_csv
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.problems import ArgumentError

NAMES = ["1f1b", "interleaved-fused", "zb-v", "dualpipe-v-published"]
"""One of every kind: whole and split backwards, one and several chunks, pairs."""


@st.composite
def valid_schedules(draw) -> Schedule:
    """Any placement, any order in which every action comes after what it reads."""
    p, v, m = (draw(st.integers(1, 3)) for _ in range(3))
    stages = draw(st.permutations([d for d in range(p) for _ in range(v)]))
    fused = draw(st.booleans())
    backward = [Kind.BW] if fused else [Kind.B, Kind.W]
    waiting = {
        Action(s, kind, i) for s in range(p * v) for kind in (Kind.F, *backward) for i in range(m)
    }
    orders: list[list[Action]] = [[] for _ in range(p)]
    done: set[Action] = set()
    while waiting:
        ready = sorted(
            action
            for action in waiting
            if done.issuperset(dependencies(action, num_virtual_stages=p * v))
        )
        action = draw(st.sampled_from(ready))
        waiting.remove(action)
        done.add(split_action(action)[0])
        orders[stages[action.virtual_stage]].append(action)
    return Schedule("any", Placement(tuple(stages)), m, tuple(tuple(row) for row in orders))


@given(valid_schedules())
def test_any_valid_order_survives_the_round_trip(schedule):
    assert parse_csv(write_csv(schedule), name="any") == schedule
    assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule


@settings(max_examples=50)
@given(name=st.sampled_from(NAMES), p=st.integers(1, 6), m=st.sampled_from([2, 4, 8]))
def test_schedules_survive_the_round_trip(name, p, m):
    schedule = catalog.build(name, stages=p, microbatches=m)
    read = parse_csv(write_csv(schedule), name=name)
    assert read == dataclasses.replace(schedule, peak_in_flight=None)
    assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule


def test_kinds_have_the_names_of_pytorch():
    read = parse_csv("0F0,0F1,0I0,0W0,0B1\n")
    assert [str(action) for action in read.orders[0]] == ["0F0", "0F1", "0B0", "0W0", "0BW1"]
    assert write_csv(read) == "0F0,0F1,0I0,0W0,0B1\n"


@pytest.mark.parametrize("text", ["0F0,0B0", "\r\n".join([" 0F0 ,,0B0 ,", "", ""])])
def test_idle_cells_blanks_and_line_ends_do_not_matter(text):
    assert parse_csv(text).orders == (parse_csv("0F0,0B0\n").orders[0],)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0B0\n1F0,1X0", r"csv, row 2, cell 2: '1X0' is not an action.*'2F0'"),
        ("0F0,2BW0", r"row 1, cell 2: '2BW0' is not an action"),
        ("0F0,-1B0", r"'-1B0' is not an action"),
        ("0F\u0663", r"is not an action"),
        ("0F0,0F" + "9" * 5000, r"cell 2: '0F9{38}\.\.\.' is not an action"),
        ("0UNSHARD,0F0,0B0", r"cell 1: '0UNSHARD' is communication"),
        ("0F0,0SEND_F0,0B0", r"cell 2: '0SEND_F0' is communication"),
        ("", "csv has no action"),
        (",,\n,", "csv has no action"),
        ("0F999999999,0B0", r"(?s)has no microbatch: they run from 0 to 0.*>0F999999999< 0B0"),
        ("7F0,7B0", r"(?s)7F0 on stage 0 has no virtual stage.*0F0 is missing.*>7F0<>7B0<"),
        ("0F0,0B0,2F0,2B0", r"(?s)they run from 0 to 0\..* 0B0 +>2F0<>2B0<"),
        ("0F0,,0B0\n,1F0,1B0,1F7,1B7", r"stage 1 +\. +1F0  1B0 +>1F7<>1B7<"),
        ("0F0,3F0,0B0\n,1F0,1B0", r"(?s)3F0 on stage 0 has no virt.*stage 0 +0F0 +>3F0< 0B0"),
        ("0F0,0B0\n1F0,1B0,1F3", r"run:\n  1F3 on stage 1 has no microbatch: [^\n]*\ntick"),
        ("0F0,0B0\n5F0,5B0", r"(?s)stage 1 holds 0, stage 0 holds 1.*stage 1 +>5F0<>5B0<"),
        ("0F0,0B0\n\n1F0,1B0", r"virtual stages: stage 1 holds 0, stage 0 holds 1\."),
        ("0F0,0B0,0W0", r"mixes split and fused.*: 0I0 is for the input alone, 0B0 for both"),
        ("0B0,0F0", r"(?s)0B0 on stage 0 comes before its own F, 0F0\..*>0B0< 0F0"),
        ("0F0,0W0,0I0", r"(?s)0W0 on stage 0 comes before its own I, 0I0\..*>0W0< 0I0"),
        ("0F0,0F1,0B0", r"(?s)0B1 is missing from stage 0\.\ntick.*0B0 +>0B1\? +\."),
        ("0F0,0F1,0I0,0W0", r"(?s)0I1 is missing .*and so is 0B1.*>0I1\?>0W1\?"),
        ("0F0,0B0,1F0,1B0", r"waits for the result of 1B0"),
        ("0F0,(0F1;0F2)OVERLAP_F_B", r"cell 2: '\(0F1;0F2\)OVERLAP_F_B' overlaps other actions"),
        ("0F0,(0B0;0F1)OVERLAP_F_B", r"overlaps other actions than an F and then a backward"),
        ("0F0,(0F1;0B0)OVERLAP", r"is not an action"),
        ("0F0,(0F1;0X0)OVERLAP_F_B", r"cell 2: '0X0' is not an action"),
        ("0F0,(0F1;0B1)OVERLAP_F_B,0B0", r"backward of another microbatch.*: 0B1 follows\."),
        # The backward waits for the F beside it, by way of stage 1.
        ("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2", "Deadlock: stage 0"),
    ],
)
def test_what_is_no_schedule_is_refused_where_it_stands(text, expected):
    with pytest.raises(ScheduleError, match=expected):
        parse_csv(text)


@given(st.text(alphabet='0123FIWB,\n\r" x', max_size=60))
def test_any_text_ends_with_an_answer(text):
    try:
        parse_csv(text)
    except ScheduleError as error:
        assert str(error)  # noqa: PT017


ZB_H1 = write_csv(catalog.build("zb-h1", stages=2, microbatches=4))


def test_a_file_gives_its_name_and_may_start_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(ZB_H1.replace("\n", "\r\n").encode("utf-8-sig"))
    read = catalog.build(str(path), stages=2, microbatches=4)
    assert read == read_csv(path) == parse_csv(ZB_H1, name="mine")


@pytest.mark.parametrize(
    ("name", "numbers", "text"),
    [
        ("mine.csv", {"stages": 3}, " for stages=3 and microbatches=4.\nNearest valid: stages=2"),
        ("mine.csv", {"chunks": 1}, "is a schedule as it stands: leave out chunks."),
        ("mine.csv", {"microbatches": 0}, "microbatches=0 must be at least 1."),
        ("absent.csv", {}, "absent.csv' cannot be read: No such file"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_the_names_of_build(tmp_path, name, numbers, text):
    (tmp_path / "mine.csv").write_text(ZB_H1)
    with pytest.raises(ArgumentError) as caught:
        catalog.build(str(tmp_path / name), **{"stages": 2, "microbatches": 4} | numbers)
    assert text in str(caught.value)


def test_csv_of_slices_is_refused():
    sliced = catalog.build("1f1b", stages=2, microbatches=2, slices=4)
    with pytest.raises(ScheduleError, match="cuts sequences into 4 slices, and PyTorch's format"):
        write_csv(sliced)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("orders", ["0F0", "0F0"], "cannot run"),
        ("orders", ["0F0 zero", ""], "'zero' is not an action"),
        ("orders", "0F0", "is not an action"),
        ("orders", None, "not a schedule in JSON"),
        ("orders", [3], "not a schedule in JSON"),
        ("stages", [0, 7], "same number of virtual stages"),
        ("stages", ["0", "1"], "nothing but int"),
        ("stages", 2, "not a schedule in JSON"),
        ("num_microbatches", "4", "num_microbatches"),
        ("num_microbatches", 5, "cannot run"),
        ("peak_in_flight", [1, 1], "cannot run"),
    ],
)
def test_json_that_is_damaged_is_refused(field, value, expected):
    whole = to_json(catalog.build("1f1b", stages=2, microbatches=4))
    with pytest.raises(ScheduleError, match=expected):
        from_json(whole | {field: value})


def test_what_json_lacks_is_named_and_anything_else_is_refused():
    whole = to_json(catalog.build("1f1b", stages=2, microbatches=4))
    for field in whole:
        with pytest.raises(ScheduleError, match=f"needs '{field}'"):
            from_json({name: value for name, value in whole.items() if name != field})
    for data in (None, 3, "text", [], [1]):
        with pytest.raises(ScheduleError, match="not a schedule in JSON"):
            from_json(data)
