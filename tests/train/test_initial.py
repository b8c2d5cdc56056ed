"""Which weights a run begins with: what is meant, and what is refused before anything compiles."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from models import gpt, hugging_face
from train import command_line, initial

pytest.importorskip("safetensors", reason="safetensors is not installed")


@pytest.fixture
def model(tmp_path):
    """A Llama in a Hugging Face folder; its weights are those of broadcast numbers."""
    config = gpt.GPTConfig(
        vocab_size=310, sequence_length=16, num_layers=4, width=16, num_heads=2, num_kv_heads=1,
        mlp_width=24, tied=False, norm_epsilon=1e-6,
    )  # fmt: skip
    shapes = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    hugging_face.save(tmp_path / "model", config, params)
    return tmp_path / "model"


def _failures(config):
    return [failure.message for failure in initial.failures(config, resume=False)]


@pytest.mark.parametrize(
    ("text", "folder", "which", "averaged"),
    [
        ("runs/a", "runs/a", "latest", False),
        ("runs/a@best", "runs/a", "best", False),
        ("runs/a@12", "runs/a", "12", False),
        ("runs/a@b", "runs/a@b", "latest", False),
        ("@3", "@3", "latest", False),
        ("@ema", "@ema", "latest", False),
        ("runs/a@ema", "runs/a", "latest", True),
        ("runs/a@best@ema", "runs/a", "best", True),
        ("runs/a@3@ema", "runs/a", "3", True),
    ],
)
def test_what_is_meant(text, folder, which, averaged):
    assert initial.parse(text) == initial.Source(Path(folder), which, averaged)


def test_a_folder_may_have_such_a_name(tmp_path):
    (tmp_path / "a@7").mkdir()
    assert initial.parse(str(tmp_path / "a@7")).folder == tmp_path / "a@7"


def test_weights_that_are_no_run_have_no_checkpoints(model):
    for which in ("ema", "best"):
        with pytest.raises(ValueError, match=f"{model} is not a run: it has no checkpoints"):
            initial.described(initial.parse(f"{model}@{which}"))


@pytest.mark.parametrize("in_file", [False, True])
def test_the_model_follows_from_the_weights(tmp_path, model, in_file):
    path = tmp_path / "a.yaml"
    given = "model: {dropout: 0.5, dtype: bfloat16}\n"
    path.write_text(given + (f"init_from: {model}\n" if in_file else ""))
    options = ["--config", str(path), *([] if in_file else ["--init-from", str(model)])]
    found = command_line.parse([*options, "--model.sequence-length", "8"])
    assert not found.failures
    shape = found.config.model
    assert (shape.width, shape.num_kv_heads, shape.norm_epsilon) == (16, 1, 1e-6)
    assert (shape.dropout, shape.dtype, shape.sequence_length) == (0.5, "bfloat16", 8)
    assert _failures(found.config) == []


def test_another_model_is_refused_by_its_fields(model):
    options = ["--init-from", str(model), "--model.width", "32", "--model.tied"]
    assert _failures(command_line.parse(options).config) == [
        f"model.{field} is not that of the weights of init_from={model}. Nearest valid: {value}."
        for field, value in (("width=32", 16), ("tied=True", False))
    ]
    other = command_line.parse(["--init-from", str(model), "--task", "bert"]).config
    assert _failures(other) == [
        f"task=bert does not train the model of init_from={model}. Nearest valid: gpt."
    ]


def test_weights_that_are_not_there(tmp_path, model):
    missing = command_line.parse(["--init-from", str(tmp_path / "no")]).config
    assert _failures(missing) == [f"init_from={tmp_path / 'no'}: there is no such folder."]
    for options in (["--evaluate"], ["--evaluate", "--resume"]):
        run = command_line.parse([*options, "--run-dir", str(tmp_path / "gone")]).config
        assert _failures(run) == [f"run_dir={tmp_path / 'gone'}: there is no such folder."]
    (model / "model.safetensors").write_bytes(b"x")
    (message,) = _failures(command_line.parse(["--init-from", str(model)]).config)
    assert message.startswith(f"init_from={model}: {model}/model.safetensors is damaged")


def test_another_tokenizer_is_refused(make, folder, model):
    (model / "tokenizer.json").write_text("{}")
    assert not [m for m in _failures(make({"init_from": str(model)})) if "was prepared with" in m]
    (model / "tokenizer.json").write_text(json.dumps({"other": 1}))
    found = _failures(make({"init_from": str(model)}))
    assert found[-1].startswith(f"data.path={folder} was prepared with another tokenizer")
    assert found[-1].endswith(f"python -m train.prepare --tokenizer {model} --out {folder}")


def test_a_run_that_has_begun_does_not_need_them(make, tmp_path):
    config = make({"init_from": str(tmp_path / "no")})
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    assert _failures(config)
    assert not list(initial.failures(config, resume=True))
