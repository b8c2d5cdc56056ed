"""A run that an older version wrote, whose configuration had one section per family.

``older/bert-pipemare.tar.xz`` holds its file, its data and its folder, as commit 104cff2 left them
after step 6 of 6 without that checkpoint: the one of step 4 is of a pipeline in mid-flight.
"""

import json
import tarfile
from pathlib import Path

import pytest
from command import Trainer

pytestmark = pytest.mark.end_to_end

_RUN = Path(__file__).with_name("older") / "bert-pipemare.tar.xz"


def test_a_run_of_an_older_version_resumes_from_its_file_as_if_nothing_had_changed(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with tarfile.open(_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "run"
    assert "\nbert: {" in (tmp_path / "bert.yaml").read_text()
    before = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    finished = Trainer(tmp_path, "bert.yaml").run("--run-dir", "run", "--resume")
    assert "resuming run at step 4" in finished.out
    assert "changed since" not in finished.out
    after = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in after] == [1, 2, 3, 4, 5, 6]
    for old, new in zip(before[4:], after[4:], strict=True):
        assert (
            new.keys() - {"speed", "goodput", "seconds", "unix_time"} == old.keys()
        )  # reported since
        for name, value in old.items():  # another machine may round otherwise
            # The old version drew the masks of a held-out row by its place in a batch.
            assert new[name] == pytest.approx(value, rel=0.05 if name == "eval_loss" else 1e-4), (
                name
            )
    text = (run / "config.yaml").read_text()
    assert "model:\n  vocab_size: 303\n" in text
    assert "bert:" not in text
