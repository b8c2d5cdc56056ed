"""The jaxpipe command: what it prints and writes, and what bad input gets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.schedule import catalog

SHAPE = ["--stages", "4", "--microbatches", "8"]


def test_show_draws_and_reports_every_clock(capsys):
    assert main(["show", "1f1b-fused", *SHAPE]) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("stage ")]) == 4
    assert "free-running: makespan 33, bubble 27.3%" in out
    assert "device: makespan 33, bubble 27.3%" in out
    assert "peak in flight, per stage: 4, 3, 2, 1" in out
    assert "\x1b" not in out


def test_show_says_which_clock_it_draws(capsys):
    for clock, makespan in (("free", 33), ("device", 33)):
        assert main(["show", "1f1b-fused", *SHAPE, "--clock", clock]) == 0
        title, *lines = capsys.readouterr().out.splitlines()
        assert f"{clock}" in title
        assert f"makespan {makespan}" in title
        assert sum(line.startswith("also 1f1b-fused, ") for line in lines) == 1


def test_the_ending_of_the_file_or_the_option_says_the_format(tmp_path, capsys):
    for file, arguments, start in (
        ("a.svg", [], "<?xml"),
        ("a.SVG", [], "<?xml"),
        ("a.csv", [], "0F0,"),
        ("a.html", [], "<!doctype html>"),
        ("a.json", [], '{"traceEvents"'),
        ("a.txt", [], "gpipe, p=4 "),
        ("a", [], "gpipe, p=4 "),
        ("a.txt", ["--format", "csv"], "0F0,"),
    ):
        out = tmp_path / file
        assert main(["show", "gpipe", *SHAPE, *arguments, "--out", str(out)]) == 0
        assert out.read_text().startswith(start)
        assert capsys.readouterr() == ("", f"{out} is written\n")


def test_schedules_lists_every_row(capsys):
    assert main(["schedules"]) == 0
    out = capsys.readouterr().out
    last = " ".join(out.split("Asynchronous")[1].split())
    assert "pipemare, pipedream and 2bw" in last
    assert "`jaxpipe show pipemare " in last
    assert "train.py" in last
    for entry in catalog.entries():
        for cell in (entry.name, entry.summary, entry.source):
            assert cell in out


def test_compare_shows_every_schedule(capsys):
    assert main(["compare", *SHAPE]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "1f1b-fused" in line)
    assert row.split() == ["1f1b-fused", "1", "4", "27.3%", "27.3%", "33"]
    assert all(entry.name in out for entry in catalog.entries())


def test_compare_is_of_equal_models(capsys):
    """Without a bubble all schedules would take as long."""
    options = "--stages", "2", "--microbatches", "4", "--layers", "4", "--layer-costs", "2,3,1,.5"
    assert main(["compare", *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    work = {}
    for name, chunks, _, _, bubble, time in rows:
        work[name, int(chunks)] = float(time) * (1 - float(bubble.rstrip("%")) / 100)
    assert {chunks for _, chunks in work} == {1, 2}
    # Two layers of a stage, four microbatches; bubbles are rounded.
    assert list(work.values()) == pytest.approx([2 * 4 * (2 + 3 + 1)] * len(work), rel=1e-3)


@pytest.mark.parametrize("width", [40, 80])
def test_tables_fit_the_terminal_and_cut_nothing_short(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["schedules"]) == 0
    listed = capsys.readouterr().out
    assert main(["compare", "--stages", "2", "--microbatches", "2"]) == 0
    compared = capsys.readouterr().out
    for out in (listed, compared):
        assert "…" not in out
        assert all(entry.name in out for entry in catalog.entries())
        assert max(map(len, out.splitlines())) <= width
    # A line of its own for every schedule from 80 columns on, or for every number.
    words = compared.split()
    for at, name in enumerate(words):
        if name in {entry.name for entry in catalog.entries()} and width >= 80:
            assert [word[-1] for word in words[at + 3 : at + 5]] == ["%"] * 2
    assert len(re.findall(r"device: +[\d.]+%", compared)) == (25 if width < 60 else 0)


def test_compare_takes_chunks_for_schedules_that_let_one_choose(capsys):
    """The model has layers for them."""
    arguments = ["compare", "interleaved", "zb-v", *SHAPE, "--chunks", "3"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"interleaved +3 ", printed)
    assert re.search(r"zb-v +2 ", printed)


def test_compare_cuts_the_sequences_of_schedules_that_can(capsys):
    """Slices share the work of the same model, and its memory."""
    assert main(["compare", "1f1b-fused", "zb-v", *SHAPE, "--slices", "4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert rows[0] == ["1f1b-fused", "1", "4", "1.75", "8.6%", "8.6%", "26.25"]
    assert rows[1][:4] == ["zb-v", "2", "1", "4"]


def test_compare_says_why_a_schedule_does_not_fit(capsys, monkeypatch):
    build, refused = catalog.build, {"1f1b"}

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
    assert out.startswith("1f1b, p=4 v=1 m=8, (F, B, W)=(1e-06, 1, 1), device")
    assert "\nValid, but not drawn. A drawing in text needs " in out
    assert "peak in flight, per stage: 4, 3, 2, 1" in out
    assert main(["show", str(file), "--costs", "1e-6,1,1"]) == 2
    assert "columns, beyond" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["mine.csv", "mine.CSV"])
def test_show_takes_a_users_own_file(tmp_path, capsys, file):
    path = tmp_path / file
    path.write_text("0F0,0B0\n")
    assert main(["show", str(path)]) == 0
    assert "mine, p=1 v=1 m=1" in capsys.readouterr().out
    assert main(["show", str(path), "--stages", "1", "--chunks", "1"]) == 2
    assert "leave out --chunks" in capsys.readouterr().err
    assert main(["show", str(path), "--stages", "2"]) == 2
    assert (
        "is not a schedule for --stages 2.\nNearest valid: --stages 1." in capsys.readouterr().err
    )


def test_show_takes_a_users_own_function(tmp_path, capsys, monkeypatch):

    (tmp_path / "their_schedules.py").write_text(
        "import dataclasses\n"
        "from jaxpipe.schedule.generators.breadth_first import gpipe\n"
        "def good(p, m): return gpipe(p, m)\n"
        "def bad(p, m): return dataclasses.replace(gpipe(p, m), num_microbatches=m + 1)\n"
        "def odd(p, m): return p * m\n"
        "def priced(p, m, *, costs): return gpipe(p, m, fused=costs.f == 7)\n"
        "def any_options(p, m, **options): return gpipe(p, m, fused=options == {'num_chunks': 1})\n"
        "def needy(p, m, *, memory_limit): return gpipe(p, m)\n"
        "def strings(p, m): return dataclasses.replace(gpipe(p, m), orders=(('0F0',),) * p)\n"
        "def raises(p, m):\n"
        "    raise KeyError('no luck')\n"
        "def refused(p, m): return catalog.build('hanayo', stages=p, microbatches=m, chunks=3)\n"
        "from jaxpipe.schedule import catalog\n"
        "number = 3\n"
    )
    (tmp_path / "no_syntax.py").write_text("\ndef f(:\n")
    (tmp_path / "no_import.py").write_text("import no_such_module_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["show", "their_schedules:good", *SHAPE]) == 0
    assert "their_schedules:good, p=4 v=1 m=8" in capsys.readouterr().out
    assert main(["show", "their_schedules:priced", *SHAPE, "--costs", "7,1,1"]) == 0
    assert "BW0" in capsys.readouterr().out
    assert main(["show", "their_schedules:any_options", *SHAPE, "--chunks", "1"]) == 0
    assert "BW0" in capsys.readouterr().out
    for name, expected in (
        ("their_schedules:bad", "0F8 is missing"),
        ("their_schedules:odd", "returned int, and must return a Schedule"),
        ("their_schedules:number", "not a function but int"),
        ("their_schedules:nothing", "has no attribute 'nothing'"),
        ("their_schedules:needy", "missing a required"),
        ("their_schedules:strings", "'0F0' on stage 0 is str, and must be an Action"),
        ("their_schedules:raises", "their_schedules.py:11: 'no luck'"),
        ("their_schedules:refused", "raised ArgumentError at"),
        ("their_schedules:refused", "their_schedules.py:12: "),
        ("no_syntax:f", "no_syntax.py:2: invalid syntax"),
        ("no_import:f", f"raised ModuleNotFoundError at {tmp_path / 'no_import.py'}:1: No module"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("builtins:max", "does not say what parameters it has"),
        (":", "is no function Python can import"),
    ):
        assert main(["show", name, *SHAPE]) == 2
        assert expected in capsys.readouterr().err
    assert main(["show", "their_schedules:good", *SHAPE, "--chunks", "2"]) == 2
    assert "it has no parameter num_chunks.\nNearest valid: leave it out." in (
        capsys.readouterr().err
    )
    assert main(["show", "their_schedules:good"]) == 2
    assert "needs --stages and --microbatches" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--stages", "0", "--microbatches", "8"], "--stages 0 must be at least 1"),
        (["--stages", "4", "--microbatches", "1000000000"], "forward passes, beyond 5000000"),
        ([*SHAPE, "--memory-limit", "0"], "--memory-limit 0.0 must be above 0"),
    ],
)
def test_a_users_function_is_not_called_with_numbers_that_cannot_be(capsys, arguments, expected):
    # It has no attribute f; nobody looks.
    assert main(["show", "json:f", *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"0F0,0B0\n1F0,1B0,1B1\n", "1F1 is missing"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
        (b"0F0," + b"9" * 200_000, "row 1: field larger than field limit"),
        (None, "No such file"),
        (b"\0" * 20_000_001, "is larger than 20 MB, and no schedule is"),
    ],
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["show", "1f1b", "--stages", "1000", "--microbatches", "1000000000"],
            "does not fit in memory.\nNearest valid: a product of 5000000.",
        ),
        (
            ["show", "1f1b", "--stages", "5000000", "--microbatches", "1"],
            "Nearest valid: --stages 4096.",
        ),
        (["show", "1f1b"], "needs --stages and --microbatches"),
        (["show", "gpipe", *SHAPE, "--chunks", "2"], "--chunks 2 does not fit"),
        (["show", "gpipe", *SHAPE, "--costs", "1,1"], "--costs 1,1 must be three to six numbers"),
        (["compare", *SHAPE, "--stage-costs", "1,0,1"], "costs.b=0.0 must be"),
        (["compare", *SHAPE, "--layer-costs", "1,1,1"], "needs --layers, the layers of the whole"),
        (["compare", "1f1b", "zb-v", *SHAPE, "--chunks", "4"], "none of 1f1b, zb-v lets one"),
        (["compare", "zb-v", "hanayo", *SHAPE, "--slices", "4"], "none of zb-v, hanayo lets one"),
        (["compare", *SHAPE, "--slices", "0"], "--slices 0 must be at least 1"),
        (["compare", *SHAPE, "--layers", "3"], "--layers 3 is too few for --stages 4"),
        (
            ["show", "zb-v", *SHAPE, "--layers", "1000000000", "--layer-costs", "1,1,1"],
            "--layers 1000000000 is more than any model has.\nNearest valid: 10000.",
        ),
        (["show", "zb-v", *SHAPE, "--layers", "8"], "--layers 8 needs --layer-costs"),
        (
            ["show", "zb-v", *SHAPE, "--layers", "8", "--layer-costs", "1,1,1", "--costs", "1,2,1"],
            "--costs 1,2,1 is of a chunk: --layers and --layer-costs say it of the model",
        ),
        (["show", "gpipe", *SHAPE, "--out", "a.pdf"], "--out a.pdf ends in .pdf, which is no"),
        (["show", "gpipe", *SHAPE, "--costs", "0,1,1"], "--costs 0,1,1 is out of range: costs.f=0"),
        (["show", "qqq", *SHAPE], "'qqq' is not a known schedule. All: gpipe, "),
        (["compare", *SHAPE, "--out", "picture.gif"], "Nearest valid: 'picture.html'"),
        (["show", "gpipe", *SHAPE, "--format", "text", "--out", "a.svg"], "--out a.txt"),
        (["show", "gpipe", *SHAPE, "--out", "/no/such/folder/a.txt"], "/no/such/folder/a.txt"),
        (["validate", "no.csv"], "no.csv cannot be used: No such file or directory."),
        (
            ["plan", "--sizes", "/dev/zero", "--devices", "2", "--device", "h100"],
            "/dev/zero cannot be used: it is no regular file.",
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
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("rows", "microbatches", "expected"),
    [
        (4000, 1, "'mine' has 8000 ticks and 4000 stages, a product beyond 10000000"),
        (1, 30_000, "'mine' has 60000 ticks and 30000 microbatches of a chunk in flight"),
    ],
)
def test_schedules_that_no_clock_can_hold_are_refused(
    tmp_path, capsys, rows, microbatches, expected
):
    file = tmp_path / "mine.csv"
    cells = ([f"{d}{kind}{i}" for kind in "FB" for i in range(microbatches)] for d in range(rows))
    file.write_text("\n".join(map(",".join, cells)))
    for command in ("show", "validate"):
        assert main([command, str(file)]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("module", ["jaxpipe", "jaxpipe.cli"])
def test_the_module_runs_as_a_program(module):
    command = [sys.executable, "-m", module, "show", "nope", *SHAPE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'nope' is not a known schedule" in done.stderr
