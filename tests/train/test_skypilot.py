"""The SkyPilot task starts what the trainer accepts, and restarts what can be restarted."""

import os
import subprocess
from pathlib import Path

import yaml

from train import command_line, distributed, watchdog

TOP = Path(__file__).resolve().parents[2]
TASK = TOP / "configs" / "skypilot" / "train.yaml"


def test_the_task_starts_every_process_of_the_mesh(monkeypatch, tmp_path):
    task = yaml.safe_load(TASK.read_text())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(TOP)
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    for number in range(task["num_nodes"]):
        variables = {
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_NODE_RANK": str(number),
        }
        done = subprocess.run(
            ["bash", "-c", task["run"]],
            env=os.environ | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        script, *options = done.stdout.splitlines()
        assert script == "train/train.py"
        found = command_line.parse(options)
        assert found.resume
        assert not found.failures
        processes = distributed.find_processes(found.config, {})
        assert processes == distributed.Processes(task["num_nodes"], number, "10.0.0.1:8476")
        assert found.config.mesh.stage * found.config.mesh.data == gpus * processes.count
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [watchdog.RESTART]}
