"""A resume goes on with the schedule that its run has chosen."""

import json

import pytest
from command import NUM_STEPS, steps

from jaxpipe.schedule.formats.files import to_json
from jaxpipe.schedule.generators.depth_first import zb_h1

pytestmark = pytest.mark.end_to_end


def test_a_resume_keeps_the_recorded_schedule(toy_trainer, tmp_path):
    run = tmp_path / "run"
    options = "--run-dir", run, "--pipeline.schedule", "auto"
    toy_trainer.run(*options, "--train.steps", 3)
    path = run / "schedule.json"
    record = json.loads(path.read_text())
    assert record["schedule"]["name"] == "auto"
    # As if another version of jaxpipe had chosen it: one chunk a stage instead of two.
    other = to_json(zb_h1(2, 2))
    path.write_text(json.dumps(record | {"schedule": other, "layer_counts": [3, 1]}))
    finished = toy_trainer.run(*options, "--resume")
    assert f"schedule and partition as recorded in {path}\n" in finished.out
    assert len(steps(run)) == NUM_STEPS
    kept = json.loads(path.read_text())
    assert (kept["schedule"], kept["layer_counts"]) == (other, [3, 1])
