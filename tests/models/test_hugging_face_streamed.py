"""Folders that are read part by part, each into its place in a pipeline."""

import jax
import numpy as np
import pytest
from hugging_face_help import DECODERS, GPT2, LLAMA, RESNET, drawn

import jaxpipe
from models import gpt, hugging_face, hugging_face_files, resnet


@pytest.mark.parametrize(
    ("config", "zero"),
    [(GPT2, 0), (LLAMA, 3), (DECODERS["gemma2"], 3)],
    ids=["gpt2", "llama", "gemma2"],
)
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
    params, state = drawn(RESNET)
    hugging_face.save(tmp_path, RESNET, params, state)
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
    assert folder.config == RESNET
    assert len(resnet.init_state(RESNET)) == len(folder.read_state())
