"""The jaxpipe command: what it prints and writes, and what bad input gets."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.schedule import catalog

SHAPE = ["--stages", "4", "--microbatches", "8"]


@pytest.mark.parametrize("clock", [[], ["--clock", "free"], ["--clock", "device"]])
def test_show_draws_one_clock_and_reports_every(clock, capsys):
    assert main(["show", "1f1b-fused", *SHAPE, *clock]) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("stage ")]) == 4
    if clock:
        title, *lines = out.splitlines()
        assert f"{clock[1]}" in title
        assert "makespan 33" in title
        assert sum(line.startswith("also 1f1b-fused, ") for line in lines) == 1
    for name in ("free-running", "device"):
        assert f"{name} clock: makespan 33, bubble 27.3%" in out
    assert "peak in flight, per stage: 4, 3, 2, 1" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ("1,1.4,0.8,0.3", r"also hanayo-fused-published, .* device clock: makespan"),
        ("1,1.2,0.8", "in the published order: none for these costs ends sooner on the device"),
    ],
)
def test_show_says_how_the_published_order_compares(costs, says, capsys):
    assert main(["show", "hanayo-fused", *SHAPE, "--costs", costs]) == 0
    assert re.search(says, capsys.readouterr().out)
    assert main(["show", "hanayo-fused", *SHAPE]) == 0
    assert "published" not in capsys.readouterr().out


def test_the_ending_of_the_file_or_the_option_says_the_format(tmp_path, capsys):
    for file, arguments, start in (
        ("a.svg", [], "<?xml"),
        ("a.SVG", [], "<?xml"),
        ("a.csv", [], "0F0,"),
        ("a.html", [], "<!doctype html>"),
        ("a.txt", [], "gpipe, 4 stages"),
        ("a", [], "gpipe, 4 stages"),
        ("a.txt", ["--format", "csv"], "0F0,"),
    ):
        out = tmp_path / file
        assert main(["show", "gpipe", *SHAPE, *arguments, "--out", str(out)]) == 0
        assert out.read_text().startswith(start)
        assert capsys.readouterr() == ("", f"Wrote {out}\n")


@pytest.mark.parametrize("width", [40, 80])
def test_tables_show_every_schedule_fit_the_terminal_and_cut_nothing_short(
    monkeypatch, capsys, width
):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["schedules"]) == 0
    listed = capsys.readouterr().out
    shape = SHAPE if width >= 80 else ["--stages", "2", "--microbatches", "4"]
    assert main(["compare", *shape]) == 0
    compared = capsys.readouterr().out
    names = {entry.name for entry in catalog.entries()}
    for out in (listed, compared):
        assert "…" not in out
        assert all(name in out for name in names)
        assert max(map(len, out.splitlines())) <= width
    text = " ".join(listed.split())
    for said in ("pipemare, pipedream and 2bw", "`jaxpipe show pipemare ", "train.py"):
        assert said in text.split("Asynchronous")[1]
    assert all(entry.source in text for entry in catalog.entries()) or width == 40
    # A line of its own for every schedule from 80 columns on, or for every number.
    words = compared.split()
    for at, name in enumerate(words):
        if name in names and width >= 80:
            assert [word[-1] for word in words[at + 3 : at + 5]] == ["%"] * 2
    assert len(re.findall(r"device: +[\d.]+%", compared)) == (29 if width < 60 else 0)
    rows = [line.split() for line in compared.splitlines()]
    assert (["1f1b-fused", "1", "4", "27.3%", "27.3%", "33"] in rows) == (width >= 80)


def test_compare_is_of_equal_models(capsys):
    """Without a bubble all schedules would take as long."""
    options = "--stages", "2", "--microbatches", "4", "--layers", "4", "--layer-costs", "2,3,1,.5"
    names = (entry.name for entry in catalog.entries() if entry.name != "auto")
    assert main(["compare", *names, *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    work = {}
    for name, chunks, _, _, bubble, time in rows:
        work[name, int(chunks)] = float(time) * (1 - float(bubble.rstrip("%")) / 100)
    assert {chunks for _, chunks in work} == {1, 2}
    # Two layers of a stage, four microbatches; bubbles are rounded.
    assert list(work.values()) == pytest.approx([2 * 4 * (2 + 3 + 1)] * len(work), rel=1e-3)


def test_compare_cuts_models_and_sequences_where_schedules_let_one(capsys):
    """The model has layers for the chunks; slices share the work of the same model."""
    assert main(["compare", "interleaved", "zb-v", *SHAPE, "--chunks", "3"]) == 0
    assert main(["compare", "1f1b-fused", "zb-v", *SHAPE, "--slices", "4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [row[:2] for row in rows[:2]] == [["interleaved", "3"], ["zb-v", "2"]]
    assert rows[2] == ["1f1b-fused", "1", "4", "1.75", "8.6%", "8.6%", "26.25"]
    assert rows[3][:4] == ["zb-v", "2", "1", "4"]


def test_compare_says_why_a_schedule_does_not_fit(capsys, monkeypatch):
    build, refused = catalog.build, {"1f1b", "auto"}

    def picky(name: str, **numbers):
        if name in refused:
            raise ValueError("mesh.stage=4 is a number it does not like.")
        return build(name, **numbers)

    monkeypatch.setattr(catalog, "build", picky)
    assert main(["compare", *SHAPE]) == 0
    assert "1f1b does not fit: mesh.stage=4 is a number" in capsys.readouterr().out
    refused.update(entry.name for entry in catalog.entries())
    assert main(["compare", *SHAPE]) == 2
    assert capsys.readouterr().err == "mesh.stage=4 is a number it does not like.\n"


def test_the_schedules_of_the_documentation_are_drawn_and_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
    # `auto` has tests of its own, and takes seconds.
    for line in re.findall("^    jaxpipe ((?:show (?!auto)|validate).*)", page, re.MULTILINE):
        assert main(line.split()) == 0


def test_csv_goes_out_and_comes_back_as_the_same_schedule(tmp_path, capsys):
    file, costs = tmp_path / "1f1b.csv", ["--costs", "1,1.2,0.8,0.1"]
    assert main(["show", "1f1b", *SHAPE, "--format", "csv", "--out", str(file)]) == 0
    assert main(["show", "1f1b", *SHAPE, *costs]) == 0
    shown = capsys.readouterr().out
    assert main(["validate", str(file), *costs]) == 0
    assert capsys.readouterr().out == shown


def test_validate_says_why_it_does_not_draw(tmp_path, capsys):
    file = tmp_path / "1f1b.csv"
    assert main(["show", "1f1b", *SHAPE, "--out", str(file)]) == 0
    assert main(["validate", str(file), "--costs", "1e-6,1,1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1f1b, 4 stages, 8 microbatches; F, B, W take 1e-06, 1, 1; device")
    assert "\nValid, but not drawn. A drawing in text needs " in out
    assert "peak in flight, per stage: 4, 3, 2, 1" in out
    assert main(["show", str(file), "--costs", "1e-6,1,1"]) == 2
    assert "columns, beyond" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["mine.csv", "mine.CSV"])
def test_show_takes_a_users_own_file(tmp_path, capsys, file):
    path = tmp_path / file
    path.write_text("0F0,0B0\n")
    assert main(["show", str(path)]) == 0
    assert "mine, 1 stage, 1 microbatch;" in capsys.readouterr().out
    for options, expected in (
        (["--stages", "1", "--chunks", "1"], "leave out --chunks"),
        (["--stages", "2"], "is not a schedule for --stages 2.\nNearest valid: --stages 1."),
    ):
        assert main(["show", str(path), *options]) == 2
        assert expected in capsys.readouterr().err


GPIPE = "jaxpipe.schedule.generators.breadth_first:gpipe"


def test_show_takes_a_users_own_function(capsys):
    assert main(["show", GPIPE, *SHAPE]) == 0
    assert f"{GPIPE}, 4 stages, 8 microbatches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"0F0,0B0\n1F0,1B0,1B1\n", "1F1 is missing"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
        (b"0F0," + b"9" * 200_000, "row 1: field larger than field limit"),
        (None, "No such file"),
        (b"\0" * 20_000_001, "is larger than 20 MB, and no schedule is"),
    ],
    ids=["invalid", "no text", "long", "missing", "large"],
)
def test_bad_csv_gets_status_2_and_one_message(tmp_path, capsys, content, expected):
    file = tmp_path / "broken.csv"
    if content is not None:
        file.write_bytes(content)
    assert main(["validate", str(file)]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert str(file) in printed.err
    assert printed.out == ""


TOO_LARGE = ["--stages", "1000", "--microbatches", "1000000000"]
MODEL = ["--layers", "8", "--layer-costs", "1,1,1"]
PIPEMARE = ["show", "pipemare", "--stages", "2", "--microbatches"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "1f1b", *TOO_LARGE], "at most 5000000.\nNearest valid: a product of 5000000."),
        (["show", "1f1b", "--stages", "5000000", "--microbatches", "1"], "valid: --stages 4096."),
        (["show", "1f1b"], "needs --stages and --microbatches"),
        # A function of a user's own; nobody looks for one where the numbers cannot be.
        (["show", GPIPE], "needs --stages and --microbatches"),
        (
            ["show", GPIPE, *SHAPE, "--chunks", "2"],
            "no parameter num_chunks.\nLeave --chunks out.",
        ),
        (["show", "json:f", *SHAPE], "has no attribute 'f'"),
        (
            ["show", "json:f", *TOO_LARGE],
            "passes, and a schedule that fits in memory has at most 50",
        ),
        (["show", "json:f", *SHAPE, "--memory-limit", "0"], "--memory-limit 0.0 must be above 0"),
        # The steady state of an asynchronous method.
        (["show", "pipemare"], "needs --stages and --microbatches"),
        ([*PIPEMARE, "0"], "--microbatches 0 must be at least"),
        ([*PIPEMARE, "2", "--chunks", "2"], "--chunks 2 does not fit 'pipemare': each of its"),
        ([*PIPEMARE, "2", "--recompute-segment", "3"], "valid: --recompute-segment 2."),
        ([*PIPEMARE, "1000000"], "columns, beyond 200000"),
        ([*PIPEMARE, "2", "--format", "csv"], "--format csv does not fit 'pipemare': it nev"),
        (["show", "1f1b", *SHAPE, "--recompute-segment", "2"], "fit '1f1b': segments are for"),
        (["show", "gpipe", *SHAPE, "--chunks", "2"], "--chunks 2 does not fit"),
        (["show", "gpipe", *SHAPE, "--costs", "1,1"], "--costs 1,1 must be three to six numbers"),
        (["show", "gpipe", *SHAPE, "--costs", "0,1,1"], "--costs 0,1,1 is out of range: costs.f=0"),
        (["show", "zb-v", *SHAPE, "--layers", "1000000000", *MODEL[2:]], "valid: 10000."),
        (["show", "zb-v", *SHAPE, "--layers", "8"], "--layers 8 needs --layer-costs"),
        (
            ["show", "zb-v", *SHAPE, *MODEL, "--costs", "1,2,1"],
            "--costs 1,2,1 is of a chunk: --lay",
        ),
        (["show", "gpipe", *SHAPE, "--out", "a.pdf"], "--out a.pdf ends in .pdf, which no format"),
        (["show", "gpipe", *SHAPE, "--format", "text", "--out", "a.svg"], "--out a.txt"),
        (["show", "gpipe", *SHAPE, "--out", "/no/such/folder/a.txt"], "/no/such/folder/a.txt"),
        (["show", "qqq", *SHAPE], "'qqq' is not a known schedule. All: gpipe, "),
        (["compare", *SHAPE, "--stage-costs", "1,0,1"], "costs.b=0.0 must be"),
        (["compare", *SHAPE, "--layer-costs", "1,1,1"], "needs --layers, the layers of the whole"),
        (["compare", *SHAPE, "--layers", "3"], "--layers 3 is too few for --stages 4"),
        (["compare", "1f1b", "zb-v", *SHAPE, "--chunks", "4"], "none of 1f1b, zb-v reads it"),
        (["compare", "zb-v", "hanayo", *SHAPE, "--slices", "4"], "none of zb-v, hanayo reads it"),
        (["compare", *SHAPE, "--slices", "0"], "--slices 0 must be at least 1"),
        (["compare", *SHAPE, "--out", "picture.gif"], "Nearest valid: 'picture.html'"),
        (["validate", "no.csv"], "no.csv cannot be used: No such file or directory."),
        (
            ["plan", "--sizes", "/dev/zero", "--devices", "2", "--device", "h100"],
            "/dev/zero cannot be used: it is not a regular file.",
        ),
    ],
)
def test_mistakes_go_to_stderr_with_status_2(capsys, arguments, expected):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("arguments", [["show", "gpipe", "--stages", "many"], ["draw"], []])
def test_mistakes_in_the_command_line_itself_exit_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("command", "rows", "microbatches", "expected"),
    [
        ("show", 4000, 1, "8000 ticks x 4000 stages = 32000000, and the limit is 10000000. Use"),
        (
            "validate",
            1,
            30_000,
            "60000 ticks x 30000 microbatches of a chunk in flight = 1800000000, and",
        ),
    ],
)
def test_schedules_that_no_clock_can_hold_are_refused(
    tmp_path, capsys, command, rows, microbatches, expected
):
    file = tmp_path / "mine.csv"
    cells = ([f"{d}{kind}{i}" for kind in "FB" for i in range(microbatches)] for d in range(rows))
    file.write_text("\n".join(map(",".join, cells)))
    assert main([command, str(file)]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("module", ["jaxpipe", "jaxpipe.cli"])
def test_the_module_runs_as_a_program(module):
    command = [sys.executable, "-m", module, "show", "nope", *SHAPE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'nope' is not a known schedule" in done.stderr
