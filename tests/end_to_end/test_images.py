"""The example with images as a user starts it, smaller."""

import json

import pytest
from command import TOP, Trainer

from train.prepare.images import ImageOptions, prepare

pytestmark = pytest.mark.end_to_end


def test_a_model_with_a_frozen_image_encoder_trains_and_is_scored(tmp_path):
    prepare(ImageOptions(out=tmp_path / "digits"))
    model = {"num-layers": 2, "num-encoder-layers": 1, "width": 16, "encoder-width": 16}
    options = [part for name, n in model.items() for part in (f"--model.{name}", n)]
    finished = Trainer(TOP / "configs", "vlm-tiny.yaml").run(
        *("--run-dir", tmp_path / "run", "--data.path", tmp_path / "digits", *options),
        *("--mesh.stage", 2, "--train.steps", 3, "--train.batch-size", 8),
        *("--optimizer.warmup-steps", 0, "--train.eval-batches", 2),
        *("--train.trainable", "layers/[1-9]/*", "embed/table", "head/*"),
    )
    assert "texts without a mistake in 350 held-out rows: " in finished.out
    assert "always the most frequent text is right in " in finished.out
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]
