"""Decoders of the transformers library beside ours: logits, generation, folders and their fields.

Its models are initialised at random, so nothing is downloaded.
"""

import functools

import jax
import numpy as np
import pytest
from hugging_face_help import DECODERS, assert_equal_logits, drawn, randomise

from models import gpt, hugging_face
from models.sample import sample

pytestmark = pytest.mark.pipeline

every_family = pytest.mark.parametrize("name", DECODERS)
logits = jax.jit(gpt.logits, static_argnums=0)


@pytest.fixture(scope="module")
def transformers():
    """The library with its torch models; what follows needs both installed."""
    pytest.importorskip("torch", reason="torch is not installed: make test-parity")
    return pytest.importorskip("transformers", reason="transformers is not installed")


@functools.cache
def tokens(config):
    return np.random.default_rng(0).integers(0, config.vocab_size, (3, config.sequence_length))


@every_family
def test_theirs_is_read_and_ours_is_written(transformers, tmp_path, name):
    """Both ways the logits are equal, and so is the likeliest continuation of a text."""
    import torch

    config = DECODERS[name]
    hugging_face.save(tmp_path / "empty", config, drawn(config)[0])
    # A model of theirs with the same config, but weights of its own.
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "empty"), attn_implementation="eager"
    )
    randomise(theirs, size=8.0).save_pretrained(tmp_path / "theirs")
    read, params, *_ = hugging_face.load(tmp_path / "theirs")
    assert read == config
    ids = tokens(config)
    ours = logits(read, params, ids)
    assert_equal_logits(ours, theirs(torch.tensor(ids)).logits)

    hugging_face.save(tmp_path / "ours", read, params)
    again, notes = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    assert_equal_logits(ours, again.eval()(torch.tensor(ids)).logits)
    generated = again.generate(
        torch.tensor(ids[:, :6]), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    drawn_ids = sample(
        read, params, ids[:, :6], num_tokens=8, temperature=0.0, rng=jax.random.key(0)
    )
    np.testing.assert_array_equal(drawn_ids, generated[:, 6:])


@every_family
def test_round_trip_is_exact(tmp_path, name):
    config = DECODERS[name]
    params, _ = drawn(config)
    hugging_face.save(tmp_path, config, params)
    read = hugging_face.load(tmp_path)
    assert read.config == config
    assert jax.tree.structure(read.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, read.params, params)
