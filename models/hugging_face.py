"""Reads and writes models in the folders of Hugging Face's transformers library.

A folder holds ``config.json`` and the weights in one ``model.safetensors`` or in several, listed in
``model.safetensors.index.json``. `models.hugging_face_families` says which of their modules is
which of ours; a module's parameters follow from that. Parameters are canonical in and out, so any
pipeline layout follows from `jaxpipe.Pipeline.place` and ``unplace``.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from models.hugging_face_families import FAMILIES, Config, Family

PyTree = Any

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
"""What a module's parameters and statistics are called there; our tables are modules there."""


class Checkpoint(NamedTuple):
    """A model read from a folder.

    Attributes:
      config: its shape.
      params: canonical parameters, float32 numpy arrays.
      state: running statistics for a ResNet, None for the others.
    """

    config: Any
    params: PyTree
    state: PyTree


def load(folder: str | Path) -> Checkpoint:
    """Reads a model.

    Args:
      folder: as ``save_pretrained`` of GPT-2, Llama, BERT and ResNet models writes it.

    Returns:
      The model; its dropout is that of the folder's config, except on attention weights, which are
      never dropped here.

    Raises:
      ValueError: a folder without the files, an architecture that is none of these, one with
        features that the models here lack, and missing or unexpected tensors.
    """
    folder = Path(folder)
    fields = _read_json(folder / "config.json")
    if (name := fields.get("model_type")) not in FAMILIES:
        raise ValueError(
            f"{folder}/config.json has model_type={name!r}; only {', '.join(FAMILIES)} can be read."
        )
    family = FAMILIES[name]
    tensors = {_current_name(name, family): tensor for name, tensor in _tensors(folder).items()}
    config = family.read(fields, set(tensors))
    names = _names(family, config)
    _check_names(folder, names, set(tensors), family)

    def leaf(path, shape):
        parts, stacked = names[_path(path)]
        layers = [_join(family, path, [tensors[name] for name in layer]) for layer in parts]
        value = np.stack(layers) if stacked else layers[0]
        if value.shape != shape.shape:
            raise ValueError(
                f"{folder}: {parts[0][0]} gives {_path(path)} the shape {list(value.shape)}, but "
                f"config.json asks for {list(shape.shape)}."
            )
        return value

    trees = jax.tree_util.tree_map_with_path(leaf, _shapes(family, config))
    return Checkpoint(config, trees["params"], trees.get("state", {}).get("layers"))


def save(folder: str | Path, config: Config, params: PyTree, state: PyTree = None) -> None:
    """Writes a model that ``from_pretrained`` of the transformers library reads.

    Args:
      folder: made if it does not exist; files of the same names are replaced.
      config: the model's shape. A GPT must be one that GPT-2 or Llama is: learned positions,
        LayerNorm, GELU and biases, or rotary positions, RMSNorm and SwiGLU. A ResNet must have
        style "imagenet" and norm "batch".
      params: canonical parameters.
      state: a ResNet's running statistics.

    Raises:
      ValueError: a config that no family of the library has, or a ResNet without state.
    """
    found = [(name, family) for name, family in FAMILIES.items() if family.holds(config)]
    if not found:
        raise ValueError(f"{config} is none of {', '.join(FAMILIES)} in the transformers library.")
    ((model_type, family),) = found
    if family.init_state is not None and state is None:
        raise ValueError(f"A {model_type} has running statistics: pass state.")
    names = _names(family, config)
    trees = {"params": params} | ({"state": {"layers": state}} if family.init_state else {})
    tensors: dict[str, np.ndarray] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(trees):
        (parts, stacked), array = names[_path(path)], np.asarray(value)
        layers = array if stacked else [array]
        for layer, layer_names in zip(layers, parts, strict=True):
            split = _split(family, config, path, layer, len(layer_names))
            tensors |= {
                family.prefix + name: part for name, part in zip(layer_names, split, strict=True)
            }
    # BatchNorm there also counts batches; nothing uses the count, but reading warns without it.
    tensors |= {
        name.replace("running_mean", "num_batches_tracked"): np.zeros((), np.int64)
        for name in tensors
        if name.endswith(".running_mean")
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _safetensors().numpy.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    fields = {"model_type": model_type, "dtype": "float32", **family.write(config)}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


# Names and shapes.


class _Names(NamedTuple):
    """What a leaf of ours is there: names for one layer, or for each layer if they are stacked."""

    layers: list[tuple[str, ...]]
    stacked: bool


def _names(family: Family, config: Config) -> dict[str, _Names]:
    """Their names of every leaf of ours."""
    modules = family.modules(config)
    names = {}
    for path, shape in jax.tree_util.tree_leaves_with_path(_shapes(family, config)):
        _, *keys = _path(path).split("/")
        if (table := "/".join(keys)) in modules:
            found, suffix = modules[table], "weight"
        else:
            found, suffix = modules["/".join(keys[:-1])], LEAVES[keys[-1]]
        theirs = (found,) if isinstance(found, str) else found
        stacked = "{}" in theirs[0]
        names[_path(path)] = _Names(
            [
                tuple(f"{name.format(layer)}.{suffix}" for name in theirs)
                for layer in range(shape.shape[0] if stacked else 1)
            ],
            stacked,
        )
    return names


@functools.cache
def _shapes(family: Family, config: Config) -> dict[str, PyTree]:
    shapes = {"params": jax.eval_shape(lambda key: family.init(config, key), jax.random.key(0))}
    if family.init_state is not None:
        shapes["state"] = {"layers": family.init_state(config)}
    return shapes


def _path(path) -> str:
    """A leaf's place as words: "params/layers/attention/qkv/kernel"."""
    return "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)


def _join(family: Family, path, tensors: list[np.ndarray]) -> np.ndarray:
    """One leaf of ours from theirs: [out, in, *window] to [*window, in, out], joined over out."""
    if path[-1].key == "kernel" and not family.kernels_as_ours:
        tensors = [np.transpose(tensor, (*range(2, tensor.ndim), 1, 0)) for tensor in tensors]
    joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors, axis=-1)
    return np.ascontiguousarray(joined, np.float32)


def _split(family: Family, config, path, array: np.ndarray, count: int) -> list[np.ndarray]:
    """Undoes `_join`."""
    arrays = [array]
    if count > 1:  # queries, keys and values
        cuts = np.array([config.num_heads, config.num_heads + config.kv_heads]) * config.head_width
        arrays = np.split(array, cuts, axis=-1)
    if path[-1].key == "kernel" and not family.kernels_as_ours:
        last = array.ndim - 1
        arrays = [np.transpose(part, (last, last - 1, *range(last - 1))) for part in arrays]
    return [np.ascontiguousarray(part, np.float32) for part in arrays]


def _check_names(folder, names, found: set[str], family: Family) -> None:
    wanted = {name for parts in names.values() for layer in parts.layers for name in layer}
    missing = sorted(wanted - found)
    unexpected = sorted(name for name in found - wanted if not name.endswith(family.unread))
    failures = [
        f"{folder} {what}: {', '.join(some[:8])}{f' and {len(some) - 8} more' * (len(some) > 8)}."
        for what, some in (("lacks tensors", missing), ("has tensors of no use", unexpected))
        if some
    ]
    if failures:
        raise ValueError("\n".join(failures))


# Files.


def _safetensors():
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ValueError(
            "Hugging Face folders need the safetensors package: pip install 'jaxpipe[huggingface]'."
        ) from error
    return safetensors


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    if (folder / INDEX).exists():
        files = sorted(set(_read_json(folder / INDEX)["weight_map"].values()))
    else:
        files = [WEIGHTS]
    tensors: dict[str, np.ndarray] = {}
    for name in files:
        if not (folder / name).exists():
            raise ValueError(f"{folder} holds no {name}; it must hold {WEIGHTS} or {INDEX}.")
        tensors |= _safetensors().numpy.load_file(folder / name)
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path.parent} holds no {path.name}; give a Hugging Face model folder.")
    return json.loads(path.read_text())


def _current_name(name: str, family: Family) -> str:
    """Without the head's prefix; LayerNorms of early BERT files have gamma and beta."""
    name = name.removeprefix(family.prefix)
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name
