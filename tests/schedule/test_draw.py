"""Drawings show every action, at its time, and nothing else."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from jaxpipe.schedule.actions import Action, Schedule
from jaxpipe.schedule.catalog import build
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.show import draw
from jaxpipe.schedule.show.exchanges import exchanges
from jaxpipe.schedule.simulate import Costs, simulate


def timeline(name: str = "1f1b", *, p: int = 3, m: int = 4, costs: Costs | None = None):
    return simulate(build(name, stages=p, microbatches=m), costs or Costs(1, 1, 1))


def stage_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("stage ")]


@pytest.fixture(scope="module")
def ticked():
    """Late messages and gathers."""
    costs = Costs(1, 1.2, 0.8)
    schedule = build("zb-v", stages=3, microbatches=6, costs=costs)
    return device_clock(schedule, costs)


@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
def test_text_of_pairs_names_both_and_marks_the_forward(overlap):
    schedule = build("dualpipe-v-published", stages=3, microbatches=14)
    drawn = simulate(schedule, Costs(1, 0.8, 0.3, 0.2, overlap))
    together = set(schedule.overlapped)
    for line, row in zip(stage_lines(draw.text(drawn)), drawn.rows, strict=True):
        labels = [f"{part.action}" + "+" * (part.action in together) for part in row]
        assert re.findall(r"\d+[FBW]+\d+\+?", line) == labels


@pytest.fixture
def v_shape():
    rows = ("0F0 3F0 3BW0 0BW0", "1F0 2F0 2BW0 1BW0")
    orders = tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)
    return simulate(Schedule("v", Placement((0, 1, 1, 0)), 1, orders), Costs(1, 1, 1))


def test_text_of_a_small_schedule():
    assert draw.text(timeline("1f1b", p=2, m=2)).splitlines() == [
        "stage 0 |F0 F1 ...B0 W0 ...B1 W1 |",
        "stage 1 |...F0 B0 W0 F1 B1 W1 ...|",
    ]


@pytest.mark.parametrize("clock", [simulate, device_clock])
@pytest.mark.parametrize("costs", [Costs(1, 1, 1), Costs(1, 1.2, 0.8), Costs(3, 7.1, 2.6, 0.5)])
@pytest.mark.parametrize("name", ["1f1b", "gpipe-fused"])
def test_text_shows_every_action_in_order_and_rows_end_together(name, costs, clock):
    drawn = clock(build(name, stages=3, microbatches=12), costs)
    lines = stage_lines(draw.text(drawn))
    assert len({len(line) for line in lines}) == 1
    for line, row in zip(lines, drawn.rows, strict=True):
        labels = [f"{timed.action.kind}{timed.action.microbatch}" for timed in row]
        assert re.findall(r"[FBW]+\d+", line) == labels


def test_text_names_the_virtual_stage_where_a_stage_has_several(v_shape):
    assert re.findall(r"\w+", draw.text(v_shape).splitlines()[1].split("|")[1]) == [
        "1F0", "2F0", "2BW0", "1BW0",
    ]  # fmt: skip


def test_colour_only_where_asked():
    plain, coloured = draw.text(timeline()), draw.text(timeline(), colour=True)
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_text_names_every_action_once_and_marks_every_exchange(ticked):
    text = draw.text(ticked)
    for line, row in zip(stage_lines(text), ticked.rows, strict=True):
        assert sorted(re.findall(r"\d+[FBW]\d+", line)) == sorted(str(t.action) for t in row)
    found = exchanges(ticked)
    marks = "".join(line for line in text.splitlines() if line.startswith("        |"))
    late = sum(message.late for message in found)
    assert late
    assert marks.count("}") + marks.count("{") == late
    assert marks.count(">") + marks.count("<") == len(found) - late
    assert text.splitlines()[-1].endswith("which receives it a tick late")


@pytest.mark.parametrize("width", [40, 80, 133])
def test_text_breaks_rows_at_a_terminals_width_but_never_a_name(ticked, width):
    whole, pages = (
        [[line.split("|")[1] for line in draw.text(ticked, width=w).splitlines() if "|" in line]]
        for w in (None, width)
    )
    assert max(map(len, draw.text(ticked, width=width).splitlines())) <= width
    rows = len(whole[0])
    assert ["".join(pages[0][row::rows]) for row in range(rows)] == whole[0]
    broken = draw.text(ticked, width=width)
    names = re.findall(r"\d+[FBW]\d+", "\n".join(stage_lines(broken)))
    assert sorted(names) == sorted(str(t.action) for row in ticked.rows for t in row)


def shapes(drawn: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(drawn.encode()).findall(f".//{{*}}{tag}")


def numbers(drawn: str) -> list[ElementTree.Element]:
    """The microbatches in boxes."""
    middle = (one for one in shapes(drawn, "text") if one.get("text-anchor") == "middle")
    return [one for one in middle if (one.text or "").isdigit()]


def boxes(drawn: str) -> list[ElementTree.Element]:
    return [one for one in shapes(drawn, "rect") if one.get("stroke") == "white"]


def test_a_figure_has_a_box_for_every_part_and_a_dot_for_every_message(ticked):
    drawn, exchanged = draw.figure(ticked), exchanges(ticked)
    parts = [timed for row in ticked.rows for timed in row]
    assert len(boxes(drawn)) >= len(parts)
    in_boxes = sorted(number.text for number in numbers(drawn))
    assert in_boxes[:1] == ["0"]
    assert len(in_boxes) >= len(parts)
    assert len(shapes(drawn, "circle")) >= len(exchanged)


def test_a_figure_has_boxes_to_scale_with_their_microbatches():
    timed = timeline(p=3, m=4)
    drawn = draw.figure(timed)
    assert len(boxes(drawn)) == len(numbers(drawn)) == 3 * 4 * 3
    lefts = [float(box.get("x")) for box in boxes(drawn)]
    starts = [part.start for row in timed.rows for part in row]
    width = lefts[-1] / starts[-1]
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


def test_a_figure_tells_chunks_apart(v_shape):
    drawn = draw.figure(v_shape)
    assert {number.get("fill") for number in numbers(drawn)} == {"black", "white"}
    assert len({box.get("fill") for box in boxes(drawn)}) == 4
    # Two half stages in flight are one full stage.
    assert "1" in [one.text for one in shapes(drawn, "text") if one.get("text-anchor") == "end"]


FAR_APART = [Costs(1e-9, 1, 1), Costs(1e-90, 1, 1), Costs(1, 1, 1, 1e100), Costs(1e100, 1e-100, 1)]


@pytest.mark.parametrize("costs", FAR_APART)
def test_text_that_no_terminal_could_show_is_refused(costs):
    with pytest.raises(draw.TooWideError, match=r"needs .* columns, beyond .* picture"):
        draw.text(timeline(costs=costs))


@pytest.mark.parametrize("costs", FAR_APART)
def test_figures_show_costs_that_are_far_apart(costs):
    assert shapes(draw.figure(timeline(p=2, m=2, costs=costs)), "rect")


def test_a_notebook_shows_a_figure_as_a_picture_and_prints_no_svg(ticked):
    figure = draw.figure(ticked)
    assert ElementTree.fromstring(figure._repr_svg_()).tag.endswith("svg")
    assert "<rect" not in repr(figure)


def test_save_writes_the_same_bytes_twice_and_refuses_other_endings(tmp_path):
    paths = [draw.save(draw.figure(timeline()), tmp_path / f"{i}.svg") for i in range(2)]
    assert paths[0].read_bytes().startswith(b"<?xml")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with pytest.raises(ValueError, match=r"a\.gif.*Nearest valid: \.svg"):
        draw.save(draw.figure(timeline()), tmp_path / "a.gif")
    assert len(list(tmp_path.iterdir())) == 2
