"""Folders that are read part by part, each into its place in a pipeline."""

import jax
import numpy as np
import pytest

import jaxpipe
from models import gpt, hugging_face, hugging_face_files, resnet
from models.gpt import GPTConfig
from models.resnet import ResNetConfig

pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

GPT2 = GPTConfig(
    vocab_size=37, sequence_length=12, num_layers=2, width=16, num_heads=4, positions="learned",
    norm="layer", activation="gelu", bias=True,
)  # fmt: skip
LLAMA = GPTConfig(
    vocab_size=37, sequence_length=12, num_layers=3, width=16, num_heads=4, num_kv_heads=2,
    mlp_width=24, tied=False,
)  # fmt: skip
SMALL_RESNET = ResNetConfig(depth=18, num_classes=7, style="imagenet", norm="batch", width=4)


def drawn(config):
    """Parameters, and statistics of a ResNet."""
    key, is_resnet = jax.random.key(0), isinstance(config, ResNetConfig)
    params = (resnet if is_resnet else gpt).init(config, key)
    return params, resnet.init_state(config) if is_resnet else None


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_parts_are_read_into_their_place(tmp_path, config, zero):
    params, _ = drawn(config)
    hugging_face.save(tmp_path, config, params)
    folder = hugging_face.Folder(tmp_path)
    pipe = jaxpipe.Pipeline(
        gpt.model(config, vocabulary_axis="stage"),
        jax.eval_shape(lambda: params),
        schedule="1f1b",
        microbatches=2,
        mesh=jaxpipe.make_mesh(stage=2, data=2),
        zero=zero,
    )
    placed = jaxpipe.load_params(pipe, folder.read)
    for one, two in zip(jax.tree.leaves(placed), jax.tree.leaves(pipe.place(params)), strict=True):
        assert one.sharding == two.sharding
        np.testing.assert_array_equal(one, two)


def test_nothing_is_read_before_it_is_asked_for(tmp_path, monkeypatch):
    """And then the tensors of one layer alone, even where layers differ."""
    params, state = drawn(SMALL_RESNET)
    hugging_face.save(tmp_path, SMALL_RESNET, params, state)
    read, original = [], hugging_face_files.Tensor.read

    def noted(tensor):
        read.append(tensor.name)
        return original(tensor)

    monkeypatch.setattr(hugging_face_files.Tensor, "read", noted)
    folder = hugging_face.Folder(tmp_path)
    assert not read
    found = folder.read("layers", 3)
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, params["layers"][3])
    assert read
    assert all(name.startswith("resnet.encoder.stages.1.layers.0") for name in read)
    assert folder.config == SMALL_RESNET
    assert len(resnet.init_state(SMALL_RESNET)) == len(folder.read_state())
