"""The Slurm script continues what was started again, and queues again what can go on."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "configs" / "slurm.sh"


@pytest.mark.parametrize(
    ("status", "restarts", "is_queued"),
    [
        (0, 0, False),
        (75, 0, True),
        (70, 0, True),
        (137, 3, True),
        (75, 10, False),
        (1, 1, False),
        (2, 0, False),
    ],
)
def test_what_follows_a_status(tmp_path, status, restarts, is_queued):
    for name in ("srun", "scontrol"):
        code = status if name == "srun" else 0
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@"\nexit {code}\n')
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), "--config", "my.yaml"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, "")
    started, *after = done.stdout.splitlines()
    resumed = " --resume" if restarts else ""
    assert started.endswith(f"train/train.py --config my.yaml{resumed}")
    assert after == (["scontrol requeue 7"] if is_queued else [])
