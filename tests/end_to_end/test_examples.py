"""The examples run as scripts, which is how a newcomer starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import limits
import pytest
from command import QUICK_COMPILE

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
AROUND_MODELS = [path for path in EXAMPLES if path.name != "first_pipeline.py"]


def run(path: Path) -> str:
    """What an example prints."""
    # The tests' own devices are not the user's.
    variables = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_COMPILE}
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=limits.hang(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.end_to_end
def test_the_first_pipeline_draws_its_schedule_and_trains():
    printed = run(ROOT / "examples" / "first_pipeline.py")
    assert "   3  F3       F2       F1       F0       \n" in printed
    assert "free-running: makespan 22.2" in printed
    assert ", device: makespan 22.2" in printed
    alone, pipelined = re.search(r"without a pipeline (.*), with it (.*)", printed).groups()
    assert float(alone) == pytest.approx(float(pipelined), abs=2e-6)
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss (.*)", printed)]
    assert len(losses) == 4
    assert losses[-1] < 0.1 * float(alone)


@pytest.mark.end_to_end
@pytest.mark.parametrize("path", AROUND_MODELS, ids=lambda path: path.stem)
def test_a_model_of_somebody_else_s_is_compared_and_trains(path):
    printed = run(path)
    assert printed.startswith("the pipeline gives what the model gives\n")
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("path", AROUND_MODELS, ids=lambda path: path.stem)
def test_an_example_is_short_and_its_model_knows_nothing_of_pipelines(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    (module,) = set(re.findall(r"^from third_party\.(\w+) import", text, re.MULTILINE))
    model = (ROOT / "examples" / "third_party" / f"{module}.py").read_text(encoding="utf-8")
    assert "jaxpipe" not in model
    # It compares with the model itself, by default on two meshes.
    assert re.search(r"assert_matches_unpipelined\((.|\n)*?reference=reference", text)
    assert "meshes=" not in text
