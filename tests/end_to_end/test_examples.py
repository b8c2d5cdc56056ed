"""The examples run as scripts, which is how a newcomer starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import QUICK_COMPILE

ROOT = Path(__file__).parents[2]


@pytest.mark.end_to_end
def test_the_first_pipeline_draws_its_schedule_and_trains():
    # The tests' own devices are not the user's.
    variables = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_COMPILE}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "first_pipeline.py"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert "   3  F3       F2       F1       F0       \n" in printed
    assert "free-running: makespan 22.2" in printed
    assert "lock-step: makespan 24," in printed
    alone, pipelined = re.search(r"without a pipeline (.*), with it (.*)", printed).groups()
    assert float(alone) == pytest.approx(float(pipelined), abs=2e-6)
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss (.*)", printed)]
    assert len(losses) == 4
    assert losses[-1] < 0.1 * float(alone)
