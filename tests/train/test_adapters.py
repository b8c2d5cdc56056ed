"""Adapters in the trainer: begun with a folder, trained alone, exported; frozen parts without."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
from rich.console import Console
from tiny_tasks import TINY, config, rows

from jaxpipe import unpipelined
from models import gpt, hugging_face
from train import initial, tasks
from train.prepare import __main__ as prepare
from train.runs import checkpoint
from train.step import Setup

pytest.importorskip("safetensors", reason="safetensors is not installed")


def _is_none(leaf):
    return leaf is None


@pytest.mark.pipeline
def test_a_step_trains_adapters_and_what_is_named(tmp_path):
    """The others stay as they are in the folder, and have no optimizer state."""
    shape = gpt.GPTConfig(**TINY["gpt"] | {"num_layers": 2, "tied": False})
    params = jax.jit(gpt.init, static_argnums=0)(shape, jax.random.key(5))
    hugging_face.save(tmp_path / "model", shape, params)
    given = config(
        "gpt", model={"num_layers": 2, "tied": False}, lora={"rank": 2, "targets": ["q*", "mlp/*"]},
        train={"trainable": ["head/*"]}, optimizer={"weight_decay": 0.0},
        pipeline={"schedule": "1f1b-fused", "zero": 3},
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
    np.testing.assert_allclose(values["grad_norm"], jax.jit(optax.tree.norm)(grads), rtol=1e-5)
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


def test_a_run_begins_with_adapters_of_a_folder(tmp_path):
    model, own = tmp_path / "model", tmp_path / "own"
    shape = gpt.GPTConfig(**TINY["gpt"] | {"num_layers": 4, "tied": False})
    init = jax.jit(gpt.init, static_argnums=0)
    hugging_face.save(model, shape, init(shape, jax.random.key(5)))
    _, fields = initial.described(initial.parse(str(model)))
    given = config(
        "gpt", model=fields, lora={"rank": 2, "alpha": 6.0, "targets": ["v_proj", "up_proj"],
                                   "base": "int8"},
    )  # fmt: skip
    whole = tasks.make(given).shape

    def drawn(path, w):
        return np.float32(np.random.default_rng(len(str(path))).normal(size=w.shape))

    unrounded = dataclasses.replace(whole.adapters, base="float32")
    params = init(dataclasses.replace(whole, adapters=unrounded), jax.random.key(6))
    params = jax.tree.map_with_path(drawn, params)
    hugging_face.save_adapters(own, dataclasses.replace(whole, adapters=unrounded), params,
                               base=str(model))  # fmt: skip

    def began(**lora):
        of_lora = given.lora.model_copy(update={"init_from": str(own)} | lora)
        return given.model_copy(update={"init_from": str(model), "lora": of_lora})

    setup = Setup(began())
    assert not [*initial.failures(setup.config, resume=False)]
    found = jax.device_get(setup.pipe.unplace(initial.state(setup, Console(quiet=True)).params))
    expected = dict(jax.tree.leaves_with_path(params))
    read = {path: w for path, w in jax.tree.leaves_with_path(found) if "lora" in path[-1].key}
    assert len(read) == 4
    for path, leaf in read.items():
        np.testing.assert_array_equal(leaf, expected[path])
    for wrong, nearest in (
        (began(rank=3), "valid: 2"), (began(alpha=2.0), "valid: 6.0"),
        (began(targets=["v_proj"]), "'attention/qkv/value'.*, 'mlp/up'"),
        (began(init_from=str(model)), "adapter_config.json"),
        (began().model_copy(update={"init_from": None}), "init_from=FOLDER"),
    ):  # fmt: skip
        (failure,) = initial.failures(wrong, resume=False)
        assert re.search(nearest, failure.message)


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
