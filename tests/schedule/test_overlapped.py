"""Overlapped pairs: an F and a backward of another microbatch that run together."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule, split_backwards
from jaxpipe.schedule.check import ScheduleError, peak_in_flight, validate
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.formats import parse_csv, write_csv
from jaxpipe.schedule.generators.depth_first import depth_first, warm_up_forwards
from jaxpipe.schedule.lowering.lower import forward_only, lower
from jaxpipe.schedule.show import draw
from jaxpipe.schedule.simulate import UNIT, Costs, simulate

PYTORCH = Path(__file__).with_name("dualpipe_v.json")
"""What PyTorch's ScheduleDualPipeV gives: `write_pytorch`."""

SHAPES = [(p, 2 * p + extra) for p in range(1, 10) for extra in (0, 1, 5)]

TEXT = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,0B2,0I3,0W3\n"


def published(p: int, m: int) -> Schedule:
    return catalog.build("dualpipe-v-published", stages=p, microbatches=m)


def cells(text: str) -> list[list[str]]:
    """A CSV without its idle cells: the columns of PyTorch's do not count ticks."""
    return [[cell for cell in line.split(",") if cell] for line in text.splitlines()]


def digest(rows: list[list[str]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def test_dualpipe_v_runs_what_pytorchs_runs():
    """Every rank, every action, every pair."""
    stored = json.loads(PYTORCH.read_text())
    for p, m in SHAPES:
        theirs, ours = stored[f"{p},{m}"], published(p, m)
        validate(ours)
        assert digest(cells(write_csv(ours))) == theirs["digest"]
        if "rows" in theirs:
            text = "\n".join(theirs["rows"])
            assert cells(text) == cells(write_csv(ours))
            read = parse_csv(text, name=ours.name)
            assert read == dataclasses.replace(ours, peak_in_flight=None)


def test_dualpipe_v_with_few_microbatches():
    for p, m in itertools.product(range(1, 10), range(1, 18)):
        schedule = published(p, m)
        validate(schedule)
        assert max(peak_in_flight(schedule)) <= min(2 * p + 1, 2 * m)


def test_bubble_of_dualpipe_v():
    """In half-stage units. What the pairs cost is what overlap may save."""
    for p, extra in itertools.product(range(1, 9), (0, 3)):
        schedule, work = published(p, 2 * p + extra), 6 * (2 * p + extra)
        assert simulate(schedule, UNIT).makespan == work + 2 * (p - 1)
        assert simulate(split_backwards(schedule), UNIT).makespan == work + p - 1
        hidden = simulate(schedule, dataclasses.replace(UNIT, overlap=1.0))
        assert hidden.makespan <= work + p - 1 - 2 * (p > 1) * extra


@given(
    *(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 4)),
    *(st.sampled_from([0, 0.5, 1]), st.lists(st.integers(-2, 2), min_size=8, max_size=8)),
)
def test_no_other_warm_up_in_the_same_memory_ends_sooner(p, v, groups, overlap, more):
    """With more than one microbatch per stage, one that is shorter on any stage ends later."""
    m, costs = groups * p, dataclasses.replace(UNIT, overlap=overlap)
    ours = catalog.build("interleaved-overlapped-fused", stages=p, microbatches=m, chunks=v)
    warm_up = [forwards + 1 for forwards in warm_up_forwards(p, v, p, hops=2)]
    other = [min(max(n + extra, 0), warm_up[0]) for n, extra in zip(warm_up, more, strict=False)]
    options = {"group": p, "warm_ups": other, "delays": None, "overlaps": True}
    theirs = depth_first("other", ours.placement, m, **options)
    makespan = simulate(ours, costs).makespan
    # As without pairs, and what the forwards before the first pair of the last stage do not save.
    assert makespan == (m * v + p - 1) * 3 - overlap * (m * v - warm_up[-1])
    is_shorter = any(n < of_ours for n, of_ours in zip(other, warm_up, strict=True))
    with contextlib.suppress(ScheduleError):  # a backward may wait for the forward beside it
        assert simulate(theirs, costs).makespan >= makespan + (groups > 1 and is_shorter) / 4


@pytest.mark.parametrize(("overlap", "makespan"), [(0.0, 6), (0.5, 5.5), (1.0, 5)])
def test_a_pair_takes_as_long_as_both_less_what_overlap_saves(overlap, makespan):
    schedule = parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    timeline = simulate(schedule, Costs(1, 1, 1, overlap=overlap))
    assert timeline.makespan == makespan
    assert timeline.bubble_ratio == pytest.approx(0)
    # The device clock is that of a program that runs one after the other.
    assert device_clock(schedule, Costs(1, 1, 1, overlap=overlap)).makespan == 6


def test_a_pair_waits_for_both_inputs_and_gives_both_results_at_its_end():
    # Stage 1 pairs 1F1 with 1B0. 0B0 therefore starts at the end of the pair, at 5, not of 1B0.
    text = "0F0,0F1,,,,0B0,,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,,,1B1\n"
    timeline = simulate(parse_csv(text), UNIT)
    starts = {str(part.action): part.start for row in timeline.rows for part in row}
    assert (starts["1F1"], starts["1BW0"], starts["0BW0"]) == (2, 3, 5)


def test_both_run_in_one_tick_and_the_rest_as_always():
    schedule = published(3, 8)
    table = lower(schedule, [2] * 6)
    together = (table.passes[Kind.F].layers > 0) & (table.passes[Kind.B].layers > 0)
    assert together.sum() == len(schedule.overlapped)
    # B and BW become one kind: the program runs B, and W in the same tick where it was BW.
    assert table.passes.keys() == {Kind.F, Kind.B, Kind.W}
    lower(forward_only(schedule), [2] * 6)


def test_kinds_of_backward_in_a_pair():
    schedule = parse_csv("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n", name="mine")
    assert [[*map(str, unit)] for unit in schedule.units(0)] == [
        *(["0F0"], ["0F1", "0B0"], ["0W0"], ["0BW1"])
    ]
    assert parse_csv(write_csv(schedule), name="mine") == schedule


@pytest.mark.parametrize(
    ("overlapped", "expected"),
    [
        (Action(0, Kind.F, 9), "0F9 is overlapped, and must be an F of the schedule"),
        (Action(0, Kind.BW, 0), "0BW0 is overlapped, and must be an F of the schedule"),
        (Action(0, Kind.F, 0), "0F0 is overlapped.*: 0F1 follows"),
        ("0F2", "overlapped is tuple, and must be a tuple of nothing but Action"),
    ],
)
def test_what_a_schedule_may_say_of_pairs(overlapped, expected):
    with pytest.raises(ScheduleError, match=expected):
        validate(dataclasses.replace(parse_csv(TEXT), overlapped=(overlapped,)))


def test_a_pair_is_drawn_as_one():
    drawn = draw.text(simulate(parse_csv(TEXT), UNIT))
    assert re.search(r"F1-+ F2\++BW0-+ ", drawn)  # no gap between the two of a pair
    assert drawn.endswith("marks: + runs together with the backward that follows")
    assert ">overlapped pair<" in draw.figure(simulate(parse_csv(TEXT), UNIT))


def write_pytorch() -> None:
    """Asks PyTorch itself; needs torch (2.13.0 wrote what is stored)."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    found = {}
    for p, m in SHAPES:
        asked = object.__new__(ScheduleDualPipeV)
        asked.pp_group_size, asked._n_microbatches = p, m
        rows = [[*map(str, asked._calculate_single_rank_operations(d))] for d in range(p)]
        found[f"{p},{m}"] = {"digest": digest(rows)}
        if p <= 3:
            found[f"{p},{m}"]["rows"] = [",".join(row) for row in rows]
    PYTORCH.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write_pytorch()
