"""Weights that a run hands to a server while it goes on."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_tasks import config

from models import hugging_face
from models.adapters import merged
from train import publish
from train.errors import ConfigError
from train.step import Setup

pytest.importorskip("safetensors", reason="safetensors is not installed")
KINDS = {
    "alike": {"num_layers": 4, "tied": False},
    "different": {"num_layers": 5, "num_experts": 4, "shared_width": 8,
                  "qkv_bias": True, "expert_every": 2, "mlp_width": 8, "expert_width": 8,
                  "shared_gate": True},
}  # fmt: skip


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("alike", {"rank": 2}),
        pytest.param("different", {}, marks=pytest.mark.slow),
    ],
)
def test_published_weights_are_those_of_their_step(kind, lora, tmp_path, monkeypatch):
    """While the next step donates the state; older ones are removed, and a link is the newest."""
    settings = {"path": str(tmp_path / "served"), "every": 2, "keep": 2}
    pipeline = {"schedule": "1f1b-fused"}
    setup = Setup(config("gpt", model=KINDS[kind], lora=lora, publish=settings, pipeline=pipeline))
    monkeypatch.setattr(setup.task, "exported_tokenizer", lambda folder: None)
    publisher, state = publish.Publisher(setup), setup.init()
    next_step = jax.jit(lambda state: jax.tree.map(lambda w: w + 1, state), donate_argnums=0)
    for step in (2, 4, 6):
        expected = jax.device_get(setup.pipe.unplace(state.params))
        publisher.begin(step, state)
        state = next_step(state)
    for number, loss in ((7, np.inf), (8, 1.0)):  # neither of these is published
        params = jax.tree.map(lambda w, loss=loss: w * (np.nan if loss == 1 else 1), state.params)
        publisher.begin(
            number, dataclasses.replace(state, params=params), [jax.numpy.float32(loss)]
        )
    publisher.wait()
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == [
        "latest", "step_4", "step_6",
    ]  # fmt: skip
    read = hugging_face.load(tmp_path / "served" / "latest")
    shape = setup.task.shape
    if shape.adapters is not None:
        expected = expected | {"layers": merged(shape, expected["layers"])}
    jax.tree.map(np.testing.assert_array_equal, read.params, expected)
    (tmp_path / "file").write_text("")
    wrong = setup.config.publish.model_copy(update={"path": str(tmp_path / "file" / "served")})
    setup.config = setup.config.model_copy(update={"publish": wrong})
    with pytest.raises(ConfigError, match=r"publish\.path"):
        publish.Publisher(setup)
