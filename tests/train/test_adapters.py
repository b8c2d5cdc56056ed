"""Adapters in the trainer: begun with a folder, trained alone, exported; frozen parts without."""

import jax
import numpy as np
import optax
import pytest
from rich.console import Console
from tiny_tasks import TINY, config, rows

from jaxpipe import unpipelined
from models import gpt, hugging_face
from train import initial
from train.prepare import __main__ as prepare
from train.runs import checkpoint
from train.step import Setup

pytest.importorskip("safetensors", reason="safetensors is not installed")


def _is_none(leaf):
    return leaf is None


@pytest.mark.pipeline
def test_a_step_trains_adapters_and_what_is_named(tmp_path):
    """The others stay as they are in the folder, and have no optimizer state."""
    shape = gpt.GPTConfig(**TINY["gpt"] | {"num_layers": 4, "tied": False})
    params = gpt.init(shape, jax.random.key(5))
    hugging_face.save(tmp_path / "model", shape, params)
    given = config(
        "gpt", model={"num_layers": 4, "tied": False}, lora={"rank": 2, "targets": ["q*", "mlp/*"]},
        train={"trainable": ["head/*"]}, optimizer={"weight_decay": 0.0},
        pipeline={"schedule": "zb-v", "zero": 3},
    ).model_copy(update={"init_from": str(tmp_path / "model")})  # fmt: skip
    setup = Setup(given)
    state = initial.state(setup, Console(quiet=True))
    before, batch = jax.device_get(setup.pipe.unplace(state.params)), rows(setup)
    plain = jax.tree.leaves_with_path(params)
    found = dict(jax.tree.leaves_with_path(before))
    assert all(np.array_equal(found.pop(path), leaf) for path, leaf in plain)
    assert {path[-1].key for path in found} == {"lora_a", "lora_b"}

    def loss(trained):
        both = jax.tree.map(
            lambda new, old: old if new is None else new, trained, before, is_leaf=_is_none
        )
        return unpipelined.loss(gpt.model(setup.task.shape), both, batch)

    trained = jax.tree.map_with_path(
        lambda path, leaf: leaf if path[0].key == "head" or "lora" in path[-1].key else None, before
    )
    value, grads = jax.jit(jax.value_and_grad(loss))(trained)
    sizes = sum(leaf.size for leaf in jax.tree.leaves(setup.canonical_shapes.optimizer))
    assert 0 <= sizes - 2 * sum(leaf.size for leaf in jax.tree.leaves(trained)) <= 2
    state, values = setup.train_step(state, batch, None)
    np.testing.assert_allclose(values["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(values["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    after = jax.device_get(setup.pipe.unplace(state.params))
    moved = {
        jax.tree_util.keystr(path): not np.array_equal(old, new)
        for (path, old), new in zip(
            jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
    }
    # lora_a waits for lora_b, which begins at zero.
    assert all(has == ("lora_b" in name or "'head'" in name) for name, has in moved.items())
    other = given.model_copy(update={"lora": given.lora.model_copy(update={"rank": 4})})
    saved = checkpoint.describe(given, data_sha256="")
    messages = [f.message for f in checkpoint.other_model(saved, other, data_sha256="")]
    assert messages == [
        f"lora.rank=4 is not that of the checkpoint in run_dir={given.run_dir}. Nearest valid: 2; "
        "or write its model with python -m train.export, and begin with that folder."
    ]


def test_data_is_prepared_with_the_tokenizer_of_the_weights(tmp_path, monkeypatch):
    """As ``make train ARGS="--init-from FOLDER"`` asks for it."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tokenizer.json").write_text("{}")
    (tmp_path / "lora.yaml").write_text("data: {path: there, prepare: text --max-megabytes 1}")
    seen = []
    monkeypatch.setitem(prepare._COMMANDS, "text", (prepare._COMMANDS["text"][0], seen.append))
    command = ["--config", str(tmp_path / "lora.yaml"), "--train.steps", "3"]
    for options in ([], ["--init-from", str(tmp_path / "weights"), "--data.path", "here"]):
        assert prepare.main([*command, *options]) == 0
    assert [(str(found.out), found.tokenizer) for found in seen] == [
        ("there", None), ("here", tmp_path / "weights"),
    ]  # fmt: skip
