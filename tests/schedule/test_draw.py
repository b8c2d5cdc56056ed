"""Drawings show every action and message, at its time, and nothing else."""

import re
from xml.etree import ElementTree

import pytest

from jaxpipe.schedule.actions import Action, Schedule
from jaxpipe.schedule.catalog import build
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.show import draw
from jaxpipe.schedule.show.draw import exchanges
from jaxpipe.schedule.simulate import UNIT, Costs, simulate

FAR_APART = [Costs(1e-9, 1, 1), Costs(1e-90, 1, 1), Costs(1, 1, 1, 1e100), Costs(1e100, 1e-100, 1)]


def timeline(name: str = "1f1b", *, p: int = 3, m: int = 4, costs: Costs = UNIT):
    return simulate(build(name, stages=p, microbatches=m), costs)


def stage_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("stage ")]


@pytest.fixture(scope="module")
def ticked():
    """Late messages and gathers."""
    costs = Costs(1, 1.2, 0.8)
    return device_clock(build("zb-v", stages=3, microbatches=6, costs=costs), costs)


@pytest.fixture
def v_shape():
    rows = ("0F0 3F0 3BW0 0BW0", "1F0 2F0 2BW0 1BW0")
    orders = tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)
    return simulate(Schedule("v", Placement((0, 1, 1, 0)), 1, orders), UNIT)


# Text.


def test_text_of_a_small_schedule():
    assert draw.text(timeline("1f1b", p=2, m=2)).splitlines() == [
        "stage 0 |F0 F1 ...B0 W0 ...B1 W1 |",
        "stage 1 |...F0 B0 W0 F1 B1 W1 ...|",
    ]


@pytest.mark.parametrize("clock", [simulate, device_clock])
@pytest.mark.parametrize("costs", [UNIT, Costs(1, 1.2, 0.8), Costs(3, 7.1, 2.6, 0.5)])
@pytest.mark.parametrize("name", ["1f1b", "gpipe-fused"])
def test_text_shows_every_action_in_order_and_rows_end_together(name, costs, clock):
    drawn = clock(build(name, stages=3, microbatches=12), costs)
    lines = stage_lines(draw.text(drawn))
    assert len({len(line) for line in lines}) == 1
    for line, row in zip(lines, drawn.rows, strict=True):
        labels = [f"{timed.action.kind}{timed.action.microbatch}" for timed in row]
        assert re.findall(r"[FBW]+\d+", line) == labels


def test_colour_only_where_asked():
    plain, coloured = draw.text(timeline()), draw.text(timeline(), colour=True)
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_text_marks_every_exchange(ticked):
    text, found = draw.text(ticked), exchanges(ticked)
    marks = "".join(line for line in text.splitlines() if line.startswith("        |"))
    late = sum(message.late for message in found)
    assert late
    assert marks.count("}") + marks.count("{") == late
    assert marks.count(">") + marks.count("<") == len(found) - late
    assert text.splitlines()[-1].endswith("which receives it a tick late")


@pytest.mark.parametrize("width", [40, 80, 133])
def test_text_breaks_rows_at_a_terminals_width_but_never_a_name(ticked, width):
    whole, broken = draw.text(ticked), draw.text(ticked, width=width)
    assert max(map(len, broken.splitlines())) <= width
    rows, pieces = (
        [line.split("|")[1] for line in text.splitlines() if "|" in line]
        for text in (whole, broken)
    )
    assert ["".join(pieces[row :: len(rows)]) for row in range(len(rows))] == rows
    names = re.findall(r"\d+[FBW]\d+", "\n".join(stage_lines(broken)))
    assert sorted(names) == sorted(str(t.action) for row in ticked.rows for t in row)


@pytest.mark.parametrize("costs", [Costs(1, 1000, 1), Costs(1, 1, 1, 900), Costs(500, 1, 1)])
@pytest.mark.parametrize("clock", [simulate, device_clock])
def test_text_cuts_short_what_is_much_longer_than_the_rest(costs, clock):
    drawn = clock(build("zb-h1", stages=4, microbatches=8), costs)
    text = draw.text(drawn)
    assert text.splitlines()[-1] == "not to scale: long waits and actions are cut short"
    lines = stage_lines(text)
    assert max(map(len, lines)) < 4000
    assert len({len(line) for line in lines}) == 1
    for line, row in zip(lines, drawn.rows, strict=True):
        labels = [f"{timed.action.kind}{timed.action.microbatch}" for timed in row]
        assert re.findall(r"[FBW]+\d+", line) == labels


@pytest.mark.parametrize("costs", FAR_APART)
def test_costs_that_are_far_apart_fit_figures_but_no_terminal(costs):
    with pytest.raises(draw.TooWideError, match=r"needs .* columns, beyond .* picture"):
        draw.text(timeline(costs=costs))
    assert shapes(draw.figure(timeline(p=2, m=2, costs=costs)), "rect")


# Figures.


def shapes(drawn: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(drawn.encode()).findall(f".//{{*}}{tag}")


def numbers(drawn: str) -> list[ElementTree.Element]:
    """The microbatches in boxes."""
    return [one for group in shapes(drawn, "g") for one in group if (one.text or "").isdigit()]


def times(drawn: str) -> list[tuple[float, float]]:
    """The numbers on the axis of time, and where they are."""
    middle = (
        one
        for one in ElementTree.fromstring(drawn.encode()).findall("{*}text")
        if one.get("text-anchor") == "middle"
    )
    return [
        (float((one.text or "").removeprefix("time ")), float(one.get("x", ""))) for one in middle
    ]


def boxes(drawn: str) -> list[ElementTree.Element]:
    return [one for one in shapes(drawn, "rect") if one.get("stroke") == "white"]


def test_a_figure_has_boxes_to_scale_with_their_microbatches():
    timed = timeline(p=3, m=4)
    drawn = draw.figure(timed)
    assert len(boxes(drawn)) == len(numbers(drawn)) == 3 * 4 * 3
    lefts = [float(box.get("x")) for box in boxes(drawn)]
    starts = [part.start for row in timed.rows for part in row]
    width = lefts[-1] / starts[-1]
    (first, place), *others = times(drawn)
    assert first == 0
    assert len(others) > 2
    assert [x - place for _, x in others] == pytest.approx([t * width for t, _ in others], abs=0.01)
    assert lefts == pytest.approx([start * width for start in starts], abs=0.01)
    assert [number.text for number in numbers(drawn)] == [
        str(part.action.microbatch) for row in timed.rows for part in row
    ]
    texts = [one.text for one in shapes(drawn, "text")]
    assert texts[:4] == [draw.caption(timed), "stage 0", "stage 1", "stage 2"]
    assert str(max(timed.peak_in_flight)) in texts


def test_long_timelines_continue_in_rows_instead_of_growing_wider():
    drawn = draw.figure(timeline("1f1b", p=2, m=64))
    picture = ElementTree.fromstring(drawn.encode())
    assert float(picture.get("width", "")) <= 1120
    assert float(picture.get("height", "")) <= 2200
    assert sum(one.text == "in flight" for one in shapes(drawn, "text")) > 2
    assert len(numbers(drawn)) >= 2 * 64 * 3


def test_chunks_are_told_apart(v_shape):
    named = re.findall(r"\w+", draw.text(v_shape).splitlines()[1].split("|")[1])
    assert named == ["1F0", "2F0", "2BW0", "1BW0"]
    drawn = draw.figure(v_shape)
    assert {number.get("fill") for number in numbers(drawn)} == {"black", "white"}
    assert len({box.get("fill") for box in boxes(drawn)}) == 4
    # Two half stages in flight are one full stage.
    assert "1" in [one.text for one in shapes(drawn, "text") if one.get("text-anchor") == "end"]


def test_figures_of_ticks_are_pictures_in_notebooks_and_files(ticked):
    """A dot for every message, and the same picture twice."""
    figure = draw.figure(ticked)
    assert len(shapes(figure, "circle")) >= len(exchanges(ticked))
    assert ElementTree.fromstring(figure._repr_svg_()).tag.endswith("svg")
    assert "<rect" not in repr(figure)
    assert figure.startswith("<?xml")
    assert draw.figure(ticked) == figure
