"""The page holds what the simulator says, and nothing from elsewhere."""

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.schedule.catalog import build
from jaxpipe.schedule.device_clock import device_clock, timelines
from jaxpipe.schedule.show.draw import exchanges
from jaxpipe.schedule.show.page import page
from jaxpipe.schedule.simulate import Costs, in_flight, simulate

COSTS = Costs(1, 1.2, 0.8, 0.1)
EVIL = '</script><img src="x" onerror="alert(1)"><!-- \' \\ {{page.js}} {{data}} é'


class Elements(HTMLParser):
    """The elements of a page, and what its script elements hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.lasttag == "script" and data.strip():
            self.scripts.append(data)


def schedules_of(text: str):
    return json.loads(Elements(text).scripts[0])["schedules"]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-fused"])
def test_the_page_holds_every_action_once_at_the_times_of_every_clock(name):
    schedule = build(name, stages=4, microbatches=8)
    (shown,) = schedules_of(page([timelines(schedule, COSTS)]))
    clocks = simulate(schedule, COSTS), device_clock(schedule, COSTS)
    expected = {clock.clock: clock for clock in clocks}
    for timeline in shown["timelines"]:
        clock = expected.pop(timeline["clock"])
        assert timeline["makespan"] == clock.makespan
        assert timeline["ticks"] == [list(tick) for tick in clock.ticks]
        assert len(timeline["messages"]) == len(exchanges(clock))
        for d, (row, order) in enumerate(zip(timeline["parts"], schedule.orders, strict=True)):
            assert [part[0] for part in row] == list(map(str, order))
            assert [(*part[1:3], *part[5:]) for part in row] == [
                (timed.action.kind, timed.action.virtual_stage, timed.start, timed.end, timed.tick)
                for timed in clock.rows[d]
            ]
            held = [[t, count / schedule.num_chunks] for t, count in in_flight(clock.rows[d])]
            assert timeline["memory"][d] == held
    assert not expected


def test_the_page_frames_every_pair_from_its_forward_to_its_backward():
    costs = dataclasses.replace(COSTS, message=0.2, overlap=0.5)
    schedule = build("dualpipe-v-published", stages=3, microbatches=7)
    (shown,) = schedules_of(page([timelines(schedule, costs)]))
    for timeline in shown["timelines"]:
        framed = []
        for row, pairs in zip(timeline["parts"], timeline["pairs"], strict=True):
            for start, end in pairs:
                forward, *backward = (part for part in row if start <= part[5] < end)
                assert backward[-1][6] == end
                of_backward = {part[1]: part[4] for part in backward}
                assert "".join(of_backward) == "BW"  # one, or B and W
                assert len({*of_backward.values(), forward[4]}) == 2
                framed.append(forward[0])
        assert sorted(framed) == sorted(map(str, schedule.overlapped))


def test_no_name_breaks_out_of_the_data_and_nothing_is_loaded():
    schedule = dataclasses.replace(build("gpipe", stages=2, microbatches=2), name=EVIL)
    text = page([timelines(schedule, COSTS)])
    elements = Elements(text)
    assert not [word for word in ("http", "import", "url(") if word in text]
    assert [tag for tag, _ in elements.tags].count("script") == 3
    assert not {"img", "link", "iframe", "object"} & {tag for tag, _ in elements.tags}
    assert not {"src", "href"} & {name for _, attributes in elements.tags for name in attributes}
    (shown,) = schedules_of(text)
    assert shown["name"] == EVIL
    assert EVIL in shown["timelines"][0]["caption"]


def test_compare_writes_named_schedules_of_one_model_as_a_page(tmp_path, capsys):
    out, own = tmp_path / "two.html", tmp_path / "own.csv"
    size = ["--stages", "4", "--microbatches", "8"]
    assert main(["show", "1f1b", *size, "--out", str(own)]) == 0
    shape = [*size, "--layers", "16"]
    costs = ["--stage-costs", "1,1.2,0.8"]
    assert main(["compare", "zb-v", str(own), *shape, *costs, "--out", str(out)]) == 0
    shown = schedules_of(out.read_text(encoding="utf-8"))
    assert [schedule["name"] for schedule in shown] == ["zb-v", "own"]
    busy = [
        sum(part[6] - part[5] for row in schedule["timelines"][-1]["parts"] for part in row)
        for schedule in shown
    ]
    assert busy == [pytest.approx(4 * 8 * 3)] * 2
    printed = capsys.readouterr().out
    assert "zb-v" in printed
    assert "gpipe" not in printed


def test_the_page_in_the_docs_has_the_present_scripts():
    """`make figures` writes it."""
    folder = Path(__file__).resolve().parents[2]
    shown = (folder / "docs/images/zb-v-and-1f1b.html").read_text(encoding="utf-8")
    for script in ("page_draw.js", "page.js"):
        source = folder / "jaxpipe/schedule/show" / script
        assert source.read_text(encoding="utf-8") in shown
