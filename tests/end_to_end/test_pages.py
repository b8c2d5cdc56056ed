"""The pages "Schedules" and "Your own model in the trainer", followed literally."""

import re

import pytest
from command import saved, steps
from pages import blocks, run, write_files

pytestmark = pytest.mark.end_to_end

SCHEDULE, MODEL = "schedules.md", "your-model-in-the-trainer.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of both pages."""
    folder = tmp_path_factory.mktemp("pages")
    for page in (SCHEDULE, MODEL):
        write_files(page, folder)
    return folder


def test_a_schedule_is_shown_written_read_and_timed(folder):
    done = run(folder, "".join(blocks(SCHEDULE, "sh")))
    assert "mine:late_weights, p=4 v=1 m=8" in done.stdout
    assert "\nlate, p=4 v=1 m=8" in done.stdout
    assert (folder / "late.svg").read_text().startswith("<?xml")
    program, derived = (block for block in blocks(SCHEDULE, "python") if "# mine.py" not in block)
    done = run(folder, f"python -c '{program}'")
    free, ticked, *held = re.findall(r"[\d.]+", done.stdout)
    assert 0 < float(free) <= float(ticked) < 1
    assert held == ["8"] * 4  # W frees what F keeps, and all of them come last
    assert run(folder, f"python -c '{derived}'").stdout == "3 (2, 2)\n"


def test_a_model_is_trained_and_goes_on_with_that_schedule(folder):
    done = run(folder, "".join(blocks(MODEL, "sh")))
    records = steps(folder / "runs" / "curves")
    assert len(records) == saved(folder / "runs" / "curves")[-1] == 60
    assert records[-1]["eval_loss"] < 0.1 < 0.4 < records[0]["loss"]
    assert "changed since: pipeline.schedule 1f1b -> mine:late_weights" in done.stdout
    assert "nats" not in done.stdout
    first, second = re.findall(r"mean squared error ([\d.]+), of which", done.stdout)
    assert float(second) == pytest.approx(records[-1]["eval_loss"], abs=0.02)
    assert float(second) < 1.5 * float(first)
