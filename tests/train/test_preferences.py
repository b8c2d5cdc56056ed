"""Preferences: pairs of answers as they are prepared, and DPO's loss against its definition."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from tiny_tasks import config

from models import gpt
from models.adapters import Adapters, merged
from train import checks, tasks
from train.prepare.__main__ import main
from train.step import Setup

TEMPLATE = """\
{%- for message in messages %}{{ '<s>' + message.role[0] + message.content + '</s>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<s>a' }}{% endif %}"""
PAIRS = [
    {"prompt": "why?", "chosen": "so", "rejected": "because not"},
    *(
        {
            "chosen": [{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y"}],
            "rejected": [
                {"role": "user", "content": "x" * n},
                {"role": "assistant", "content": "z"},
            ],
        }
        for n in range(1, 40)
    ),
]
MODEL = {"vocab_size": 259, "sequence_length": 24, "num_layers": 2, "width": 8, "num_heads": 2}


@pytest.fixture
def pairs(tmp_path):
    """A folder of pairs."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    byte_tokenizer(begins=False).save(str(tokenizer / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(fields))
    file, out = tmp_path / "pairs.jsonl", tmp_path / "pairs"
    file.write_text("".join(f"{json.dumps(pair)}\n" for pair in PAIRS))
    command = ["--preferences", str(file), "--tokenizer", str(tokenizer), "--out", str(out)]
    assert main([*command, "--heldout-fraction", "0.3"]) == 0
    return out


def _config(folder, **sections):
    base = {"data": {"path": str(folder)}, "lora": {"rank": 2}, "model": MODEL}
    made = config("gpt", **base | sections)
    return made.model_copy(update={"task": "train.preferences:DPO"})


@pytest.mark.pipeline
def test_the_loss_compares_with_the_model_without_adapters(pairs):
    given = _config(pairs, pipeline={"schedule": "1f1b-fused"}, train={"dpo_beta": 0.5})
    assert checks.check(given) == []
    setup = Setup(given)
    train, heldout = setup.task.load()
    assert len(train) + len(heldout) == len(PAIRS)
    batch = train.read(np.arange(8), np.zeros((8, 3)))
    counts = (batch["targets"] >= 0).sum(axis=-1)
    assert set(map(tuple, counts.tolist())) <= {(2, 2), (3, 12)}  # an answer, and its end
    assert batch["targets"].max() < MODEL["vocab_size"]
    params = jax.jit(setup.task.init)(jax.random.key(0))
    state = setup.init()
    _, values = setup.train_step(state, batch, None)
    np.testing.assert_allclose(values["loss"], np.log(2), rtol=1e-6)
    assert values["metrics"]["reward"] == 0

    def leaf(path, w):
        return (
            0.5 * jax.random.normal(jax.random.key(2), w.shape) if path[-1].key == "lora_b" else w
        )

    params = jax.tree_util.tree_map_with_path(leaf, params)
    state = setup.init()
    state = type(state)(setup.pipe.place(params), state.optimizer)
    evaluated = setup.evaluate(state, batch)
    _, values = setup.train_step(state, batch, None)
    shape, plain = setup.task.shape, gpt.GPTConfig(**MODEL)
    off = merged(dataclasses.replace(shape, adapters=Adapters(2, 0.0)), params["layers"])

    @functools.partial(jax.jit, static_argnums=0)
    def margins(config, params):
        tokens, targets = (batch[name].reshape(16, -1) for name in ("tokens", "targets"))
        logs = jax.nn.log_softmax(gpt.logits(config, params, tokens))
        own = jnp.take_along_axis(logs, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        sums = jnp.where(targets >= 0, own, 0).sum(axis=1).reshape(8, 2)
        return sums[:, 0] - sums[:, 1]

    rewards = 0.5 * (margins(shape, params) - margins(plain, params | {"layers": off}))
    expected = -jax.nn.log_sigmoid(rewards).mean()
    np.testing.assert_allclose(values["loss"], expected, rtol=2e-5)
    np.testing.assert_allclose(evaluated["loss"].mean, expected, rtol=2e-5)
    np.testing.assert_allclose(values["metrics"]["accuracy"], (rewards > 0).mean())


def test_what_is_no_pair_is_refused(pairs, tmp_path, capsys):
    (tmp_path / "wrong.jsonl").write_text('{"chosen": "a"}\n{"chosen": "a", "rejected": "b"}\n')
    command = ["--preferences", str(tmp_path / "wrong.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*command, "--tokenizer", str(tmp_path / "tokenizer")]) == 2
    assert "wrong.jsonl: line 1: every line must be" in capsys.readouterr().err
    messages = [f.message for f in checks.check(_config(pairs, lora={}))]
    assert any("lora.rank=0 leaves no reference" in message for message in messages)
    assert tasks.alike("train.preferences:DPO", "gpt")
