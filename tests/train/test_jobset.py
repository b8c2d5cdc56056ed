"""The Kubernetes manifest starts what the trainer accepts, and restarts what can be restarted."""

from pathlib import Path

import yaml

from train import command_line, distributed, watchdog

TOP = Path(__file__).resolve().parents[2]


def test_the_manifest_starts_every_process_of_the_mesh(monkeypatch):
    monkeypatch.chdir(TOP)
    manifest = yaml.safe_load((TOP / "configs" / "kubernetes" / "jobset.yaml").read_text())
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    program, script, *options = container["command"]
    assert (program, script) == (".venv/bin/python", "train/train.py")
    own = manifest["metadata"]["name"]
    for number in range(job["completions"]):
        given = [option.replace("$(JOB_COMPLETION_INDEX)", str(number)) for option in options]
        found = command_line.parse(given)
        assert found.resume
        assert not found.failures
        processes = distributed.find_processes(found.config, {})
        assert (processes.count, processes.number) == (job["parallelism"], number)
        # A pod's name is that of its job set, job, replica and index; its domain is the job set.
        first = f"{own}-{replicated['name']}-0-0.{own}"
        assert processes.coordinator == f"{first}:{container['ports'][0]['containerPort']}"
        gpus = container["resources"]["limits"]["nvidia.com/gpu"] * processes.count
        assert found.config.mesh.stage * found.config.mesh.data == gpus
    (rule,) = job["podFailurePolicy"]["rules"]
    assert watchdog.RESTART not in rule["onExitCodes"]["values"]
    assert rule["onExitCodes"]["values"] == [2]
