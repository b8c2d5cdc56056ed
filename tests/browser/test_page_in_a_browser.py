"""Pages as a person sees and uses them, in a headless Chromium: `make test-browser`."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from jaxpipe.schedule.catalog import build
from jaxpipe.schedule.device_clock import timelines
from jaxpipe.schedule.show.draw import fill
from jaxpipe.schedule.show.page import page as write_page
from jaxpipe.schedule.simulate import Costs, in_flight

COSTS = Costs(1, 1.2, 0.8)
EVIL = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        names = "chromium", "chromium-browser", "google-chrome"
        found = own if Path(own).exists() else next(filter(None, map(shutil.which, names)), None)
        if found is None:
            pytest.fail(
                "There is no browser. Install Debian's package (apt-get install chromium), "
                "or run `playwright install chromium`."
            )
        # As root, in a container, Chromium has no sandbox of its own.
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def look(browser, tmp_path):
    """Opens schedules as a page that may load nothing, and must not complain."""
    opened, wrong = [], []

    def open_page(*compared):
        file = tmp_path / "page.html"
        file.write_text(write_page(compared), encoding="utf-8")
        seen = browser.new_page(viewport={"width": 1400, "height": 3000})
        seen.on("pageerror", lambda error: wrong.append(str(error)))
        seen.on("console", lambda said: wrong.extend([said.text] * (said.type == "error")))
        seen.on("request", lambda request: opened.append(request.url))
        seen.goto(file.as_uri())
        return seen

    yield open_page
    assert wrong == []
    assert [url for url in opened if not url.endswith("/page.html")] == []


def clocks_of(name: str, *, p: int = 4, m: int = 8):
    schedule = build(name, stages=p, microbatches=m)
    return timelines(schedule, COSTS)


def place(page, panel: int, stage: int, time: float) -> tuple[float, float]:
    """Where a stage's row is at a time, in the window."""
    x, y = page.evaluate(
        f"[placeOf(panels[{panel}], {time}), ({stage} + 0.5) * panels[{panel}].row]"
    )
    box = page.locator("canvas").nth(panel).bounding_box()
    return box["x"] + x, box["y"] + y


def span(page) -> list[float]:
    return page.evaluate("[view.first, view.end]")


def color_at(page, panel: int, stage: int, time: float, *, right=0.0, down=3.0) -> str:
    """The color that many pixels right of a time, and below the top of a stage's row."""
    r, g, b = page.evaluate(
        """([k, stage, time, right, down]) => {
          draw();
          const panel = panels[k], scale = window.devicePixelRatio;
          const x = (placeOf(panel, time) + right) * scale, y = (stage * panel.row + down) * scale;
          return [...panel.canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
        }""",
        [panel, stage, time, right, down],
    )
    return f"#{r:02x}{g:02x}{b:02x}"


def test_every_clock_has_a_panel_and_names_are_only_text(look):
    clocks = clocks_of("zb-v")
    named = (
        clock
        and dataclasses.replace(clock, schedule=dataclasses.replace(clock.schedule, name=EVIL))
        for clock in clocks
    )
    page = look(type(clocks)(*named))
    titles = page.locator("h2").all_text_contents()
    assert [text.partition(", ")[0] for text in titles] == [EVIL] * 2
    page.keyboard.press("ArrowRight")
    assert EVIL in page.locator("#now").inner_text()
    assert page.evaluate("window.broken") is None


def test_the_pointer_finds_what_the_simulator_put_there_in_the_pictures_color(look):
    clocks = clocks_of("zb-v")
    page = look(clocks)
    for panel, clock in enumerate(filter(None, clocks)):
        for stage, row in enumerate(clock.rows):
            for part in row[3::9]:
                # Away from lines of messages, which start at the ends of boxes.
                middle = part.start + 0.4 * (part.end - part.start)
                page.mouse.move(*place(page, panel, stage, middle))
                tip = page.locator("#tip").inner_text()
                action = part.action
                chunk = clock.schedule.placement.chunks[action.virtual_stage]
                assert tip.startswith(f"{action}, ")
                assert f"microbatch {action.microbatch}\n" in tip
                assert f"stage {stage}, chunk {chunk}" in tip
                assert f"time {part.start:.6g} to {part.end:.6g}" in tip
                held = [count for time, count in in_flight(clock.rows[stage]) if time <= middle][-1]
                assert f"\n{clock.in_full_stages(held):g} microbatches of a full stage" in tip
                page.mouse.move(1, 1)
                assert color_at(page, panel, stage, middle) == fill(action, clock)
    assert not page.locator("#tip").is_visible()


def test_keys_and_buttons_step_through_the_ticks(look):
    clocks = clocks_of("1f1b")
    page = look(clocks)
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    page.click("#forward")
    page.keyboard.press("ArrowLeft")
    shown = page.locator("#now tr").nth(1).locator("td").all_text_contents()[1:]
    for cell, row in zip(shown, clocks.device.rows, strict=True):
        names = [str(part.action) for part in row if part.tick == 6]
        assert cell == (" ".join(names) or "idle")
    # The last tick is the end, and it comes into view however far one has zoomed in.
    for _ in range(4):
        page.keyboard.press("+")
    page.keyboard.press("0")
    page.keyboard.press("+")
    last = len(clocks.device.ticks) - 2
    for _ in range(last + 3):
        page.keyboard.press("ArrowRight")
    assert page.locator("#tick").inner_text() == f"{last} of 0 to {last}"
    first, end = span(page)
    assert first <= clocks.device.ticks[last][0] <= end


def test_zoom_and_pan_keep_the_time_under_the_pointer(look):
    clocks = clocks_of("zb-v")
    page = look(clocks)
    whole = [0, max(clock.makespan for clock in clocks if clock)]
    assert span(page) == whole
    x, y = map(round, place(page, 0, 1, 5.0))  # the browser tells whole pixels
    begin, one = (place(page, 0, 1, time)[0] for time in (0.0, 1.0))
    under = (x - begin) / (one - begin)
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -400)
    page.keyboard.up("Control")
    page.wait_for_function("view.end - view.first < longest / 3.9")
    assert place(page, 1, 1, under)[0] == pytest.approx(x, abs=1)
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=4)
    page.mouse.up()
    assert place(page, 0, 1, under)[0] == pytest.approx(x - 100, abs=1)
    for _ in range(3):
        page.click("#out")
    assert span(page) == pytest.approx(whole)
    page.click("#in")
    assert span(page)[1] - span(page)[0] == pytest.approx(whole[1] / 2)
    page.click("#all")
    assert span(page) == whole


def test_two_schedules_lie_one_above_the_other_and_can_be_hidden(look):
    both = clocks_of("zb-v"), clocks_of("1f1b")
    page = look(*both)
    titles = page.locator("h2").all_text_contents()
    assert [title.partition(",")[0] for title in titles] == ["zb-v", "1f1b"] * 2
    page.get_by_label("device").uncheck()
    page.get_by_label("1f1b").uncheck()
    shown = [title for title in page.locator("h2").all() if title.is_visible()]
    assert ["zb-v" in title.inner_text() for title in shown] == [True]
    page.get_by_label("1f1b").check()
    assert sum(title.is_visible() for title in page.locator("h2").all()) == 2


def test_pairs_have_a_frame_and_the_pointer_says_so(look):
    schedule = build("dualpipe-v-published", stages=3, microbatches=7)
    clocks = timelines(schedule, Costs(1, 1, 1, overlap=0.5))
    page = look(clocks)
    assert "forward and backward together" in page.locator("#legend").inner_text()
    parts = clocks[0].rows[0]
    forward = next(part for part in parts if part.action in schedule.overlapped)
    page.mouse.move(*place(page, 0, 0, (forward.start + forward.end) / 2))
    assert "in an overlapped pair, " in page.locator("#tip").inner_text()
    page.mouse.move(*place(page, 0, 0, parts[0].end / 2))
    assert "pair" not in page.locator("#tip").inner_text()
    page.mouse.move(1, 1)
    row = page.evaluate("panels[0].row")
    frame = color_at(page, 0, 0, forward.start, right=0.5, down=row / 2)
    assert max(bytes.fromhex(frame[1:])) < 100


def test_what_was_measured_has_a_panel_on_the_same_time_axis(look):
    clocks = clocks_of("zb-v")
    device = clocks.device
    late = (
        tuple(dataclasses.replace(p, start=p.start + 1, end=p.end + 1, tick=None) for p in row)
        for row in device.rows
    )
    changes = {"clock": "measured", "rows": tuple(late), "makespan": device.makespan + 1}
    ran = dataclasses.replace(device, **changes, ticks=())
    page = look(clocks._replace(measured=ran))
    assert "measured: makespan" in page.locator("h2").nth(2).inner_text()
    assert span(page) == [0, max(ran.makespan, *(clock.makespan for clock in clocks if clock))]
    part = ran.rows[2][5]
    page.mouse.move(*place(page, 2, 2, (part.start + part.end) / 2))
    assert page.locator("#tip").inner_text().startswith(f"{part.action}, ")
    # The tick that is stepped through is that of the device clock.
    page.keyboard.press("ArrowRight")
    assert page.locator("#now td").nth(ran.schedule.num_stages + 2).inner_text() == "0F0"
    page.get_by_label("measured").uncheck()
    assert not page.locator("h2").nth(2).is_visible()
