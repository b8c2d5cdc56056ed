"""A thousand steps: memory, open files and threads stay as they were after the first few hundred.

JAXPIPE_STEPS=5000 python -m pytest -n 0 -s tests/faults/test_long_runs.py    # a longer run
"""

import os
import statistics
import time
from pathlib import Path

import pytest
from command import finish, num_lines

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

STEPS = int(os.environ.get("JAXPIPE_STEPS", "1000"))
SAVES = 20
MOST_MB = 4
"""Of 355; the memory of a run goes up and down by that."""


def _used(process):
    """Resident MB, open files and threads of a process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    files = len(os.listdir(f"/proc/{process.pid}/fd"))
    return int(status["VmRSS"].split()[0]) / 1024, files, int(status["Threads"])


@pytest.mark.parametrize("kind", ["1f1b", "pipemare"])
def test_nothing_grows(toy_trainer, tmp_path, kind):
    """Steps with a save and an evaluation every twenty: medians of the second and last third."""
    run, found = tmp_path / "run", {}
    options = ("--run-dir", run, "--train.steps", STEPS, "--pipeline.schedule", kind)
    often = ("--train.checkpoint-every", SAVES, "--train.eval-every", SAVES)
    calm = ("--train.log-every", SAVES, "--optimizer.peak-lr", 1e-3)  # no full pipe of lines
    process = toy_trainer.start(*options, *often, *calm)
    while process.poll() is None and (step := num_lines(run)) < STEPS - SAVES:
        if step // SAVES not in found:
            found[step // SAVES] = _used(process)
        time.sleep(0.01)
    finish(process)
    third = STEPS // SAVES // 3
    middle, last = (
        [statistics.median(column) for column in zip(*part, strict=True)]
        for part in (
            [used for number, used in found.items() if first <= number < first + third]
            for first in (third, 2 * third)
        )
    )
    print(f"{kind}: {middle} and {last} MB, files and threads")
    assert last[0] - middle[0] < MOST_MB
    assert last[1] - middle[1] <= 2
    assert last[2] - middle[2] <= 2
