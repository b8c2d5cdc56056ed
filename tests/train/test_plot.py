"""The picture of a run, and what it is drawn from: records of steps and of domains."""

import json
import re
import xml.etree.ElementTree as ElementTree

from train import checks, evaluation, plot, tasks
from train.runs.run_folder import METRICS_FILE


def _run(folder, losses):
    folder.mkdir()
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    lines[-1] |= {"eval_loss": 2.5, "speed": {"tokens_per_second": 4096.0, "bubble": 0.25}}
    again = [lines[0] | {"loss": 99.0}, *lines]  # step 1 ran twice
    text = "".join(f"{json.dumps(line)}\n" for line in again)
    (folder / METRICS_FILE).write_text(f'{text}{{"step": 9, "lo')  # it was killed while it wrote


def test_runs_are_drawn_in_one_picture(tmp_path, capsys):
    _run(tmp_path / "one", [4.0, None, 3.0])
    _run(tmp_path / "a<b", [5.0, 4.5])
    out = tmp_path / "runs.svg"
    assert plot.main([str(tmp_path / "one"), str(tmp_path / "a<b"), "--out", str(out)]) == 0
    root = ElementTree.fromstring(out.read_text())
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"loss", "held-out loss", "tokens per second", "bubble, predicted"} <= {*texts}
    assert {"5", "3", "a<b", "one"} <= {*texts}
    lines = [node.get("points") for node in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(line.split()) for line in lines[:2]] == [2, 2]
    # The lowest loss lies at the bottom, the highest at the top.
    heights = [float(point.split(",")[1]) for line in lines[:2] for point in line.split()]
    assert max(heights) - min(heights) == plot._HEIGHT
    (tmp_path / "empty").mkdir()
    assert plot.main([str(tmp_path / "empty")]) == 2
    assert re.search("error: .*metrics.jsonl", capsys.readouterr().err)


def test_domains_are_folders_of_the_same_tokenizer(make, folder):
    settings = {"train.eval_batches": 2, "data.domains": {"counting": str(folder)}}
    config = make(settings)
    assert checks.check(config) == []
    ((name, rows),) = tasks.make(config).load_domains().items()
    assert (name, len(rows)) == ("counting", 64)
    (message,) = evaluation.of_domains({"counting": 0.0})
    assert message == "  counting: loss 0.0000, perplexity 1"
    (message,) = evaluation.of_domains({"counting": 1000.0})
    assert message == "  counting: loss 1000.0000, perplexity inf"
    wrong = settings | {"data.domains": {"counting": str(folder / "no")}}
    (failure,) = checks.check(make(wrong))
    assert failure.message.startswith("data.domains.counting: ")
    assert "no" in failure.message


def test_other_families_have_neither_domains_nor_servers(make):
    fields = {"task": "resnet", "model": {}, "data.domains": {"a": "b"}, "publish.path": "served"}
    messages = [failure.message for failure in checks.check(make(fields), reads=False)]
    for path in ("data.domains=", "publish.path="):
        assert any(message.startswith(path) for message in messages)
