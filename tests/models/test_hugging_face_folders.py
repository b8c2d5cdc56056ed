"""What a folder held before, what an index names, and tensors of other shapes."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
from hugging_face_models import DECODERS, INDEX, LLAMA, WEIGHTS, drawn, rewrite, shard

from models import hugging_face


def rename_shard(folder, old, new):
    """Lets the index name another file."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {
        tensor: new if file == old else file for tensor, file in index["weight_map"].items()
    }
    (folder / INDEX).write_text(json.dumps(index))


def assert_holds(folder, config, params):
    read = hugging_face.load(folder)
    assert read.config.num_heads == config.num_heads
    jax.tree.map(np.testing.assert_array_equal, read.params, params)


# Saving.


@pytest.fixture
def old(tmp_path):
    """A folder that holds a model, and the parameters of the model, and of another."""
    params = drawn(LLAMA, 0)[0]
    hugging_face.save(tmp_path / "old", LLAMA, params)
    return tmp_path / "old", params, drawn(LLAMA, 1)[0]


def test_a_model_in_several_files_is_replaced(old):
    folder, before, new = old
    shard(folder)
    assert_holds(folder, LLAMA, before)
    others = ("README.md", "pytorch_model.bin", "other-00001-of-00002.safetensors")
    for name in others:
        (folder / name).write_text("not part of the model")
    hugging_face.save(folder, LLAMA, new)
    assert_holds(folder, LLAMA, new)
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, "config.json", *others}


def test_one_file_comes_before_an_index_as_in_the_library(old, tmp_path):
    """So folders are read right that were saved over an index before saving removed it."""
    folder, _, new = old
    shard(folder)
    hugging_face.save(tmp_path / "new", LLAMA, new)
    os.replace(tmp_path / "new" / WEIGHTS, folder / WEIGHTS)
    assert_holds(folder, LLAMA, new)


def test_a_link_to_the_weights_is_replaced_and_not_written_through(old, tmp_path):
    cache, before, new = old
    (tmp_path / "folder").mkdir()
    for name in (WEIGHTS, "config.json"):
        (tmp_path / "folder" / name).symlink_to(cache / name)
    hugging_face.save(tmp_path / "folder", LLAMA, new)
    assert_holds(tmp_path / "folder", LLAMA, new)
    assert_holds(cache, LLAMA, before)


def test_a_folder_with_an_adapter_is_refused(tmp_path):
    """The library would read its base model, wherever that is."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config\.json: .* name another folder"):
        hugging_face.save(tmp_path, LLAMA, drawn(LLAMA)[0])
    assert os.listdir(tmp_path) == ["adapter_config.json"]


class KilledError(BaseException):
    """Nothing catches it."""


def kill_at(patch, moment):
    """Lets the first so many changes of a file or folder happen, and raises at the next."""
    done = iter(range(moment))

    def watched(change):
        def run(*args, **kwargs):
            if next(done, None) is None:
                raise KilledError
            return change(*args, **kwargs)

        return run

    path = pathlib.Path
    for owner, name in ((os, "replace"), (path, "unlink"), (path, "write_text")):
        patch.setattr(owner, name, watched(getattr(owner, name)))
    patch.setattr(safetensors.numpy, "save_file", watched(safetensors.numpy.save_file))


def what_is_left(folder):
    """How many heads the model has that the folder holds; 0 if it refuses to be read."""
    if not (folder / "config.json").exists():
        with pytest.raises(ValueError, match=r"holds no config\.json"):
            hugging_face.load(folder)
        return 0
    return hugging_face.load(folder).config.num_heads


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_crash_never_leaves_a_mix(tmp_path, monkeypatch, in_parts):
    """Before every change of the folder; the two models have tensors of the same shapes."""
    other = dataclasses.replace(LLAMA, num_heads=2, num_kv_heads=1)
    models = {4: (LLAMA, drawn(LLAMA, 0)[0]), 2: (other, drawn(other, 1)[0])}
    left, finished = [], False
    while not finished:
        folder = tmp_path / str(len(left))
        hugging_face.save(folder, *models[4])
        if in_parts:
            shard(folder)
        with monkeypatch.context() as patch, contextlib.suppress(KilledError):
            kill_at(patch, moment=len(left))
            hugging_face.save(folder, *models[2])
            finished = True
        left.append(what_is_left(folder))
        if left[-1]:
            assert_holds(folder, *models[left[-1]])
    # First the old model, then none, at last the new one.
    assert [heads for heads, _ in itertools.groupby(left)] == [4, 0, 2]


# Files that an index names.


def test_an_index_cannot_lead_out_of_the_folder(tmp_path):
    folder, first = tmp_path / "model", "model-00001-of-00002.safetensors"
    hugging_face.save(folder, LLAMA, drawn(LLAMA)[0])
    shard(folder)
    now = first
    for name in ("../evil.safetensors", f"{folder}/{first}", "sub/evil.safetensors", ".."):
        rename_shard(folder, now, name)
        with pytest.raises(ValueError, match="to the names of files in the folder"):
            hugging_face.load(folder)
        now = name


def test_snapshots_of_the_hubs_cache_link_to_its_blobs(tmp_path):
    params, _ = drawn(LLAMA)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0a1b"
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    hugging_face.save(snapshot, LLAMA, params)
    shard(snapshot)
    for path in list(snapshot.iterdir()):
        os.replace(path, blobs / path.name)
        path.symlink_to(pathlib.Path("../../blobs", path.name))
    assert_holds(snapshot, LLAMA, params)


# Rounding.


def test_gemmas_norm_scales_are_kept_as_they_are(tmp_path):
    """As their difference from 1, of which a sum with 1 would lose bits."""
    gemma = DECODERS["gemma2"]
    hugging_face.save(tmp_path, gemma, drawn(gemma)[0])
    name, width = "model.norm.weight", gemma.width
    stored = np.random.default_rng(0).uniform(-0.5, 1, width).astype("f4")
    stored[:2] = 1e-9, 2**-20 * 1.4
    rewrite(tmp_path, lambda tensors: tensors | {name: stored})
    hugging_face.save(tmp_path, gemma, hugging_face.load(tmp_path).params)
    again = safetensors.numpy.load_file(tmp_path / WEIGHTS)[name]
    np.testing.assert_array_equal(again, stored)
