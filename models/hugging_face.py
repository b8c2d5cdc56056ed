"""Reads and writes models in the folders of Hugging Face's transformers library.

A folder holds ``config.json`` and the weights, in ``model.safetensors`` or in several files that
``model.safetensors.index.json`` lists; where it has both, the library reads the one file, and so
does `load`. `models.hugging_face_families` says which of their modules is which of ours; a module's
parameters follow from that. Parameters are canonical in and out, so any pipeline layout follows
from `jaxpipe.Pipeline.place` and ``unplace``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.hugging_face_families import FAMILIES, Config, Family

PyTree = Any

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""The library's names for the files that an index lists."""

LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
"""The library's names for a module's parameters and statistics; our tables are modules there."""


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
      ValueError: a folder without the files, damaged files, an index that leads out of it, an
        architecture that is none of these, one with features that the models here lack, missing or
        unexpected tensors, and tensors of other shapes than the config's or of integers.
    """
    folder = Path(folder)
    fields = _read_json(folder / CONFIG)
    if (name := str(fields.get("model_type"))) not in FAMILIES:
        raise ValueError(
            f"{folder}/config.json has model_type={name!r}; only {', '.join(FAMILIES)} can be read."
        )
    family = FAMILIES[name]
    tensors = {_current_name(tensor.name, family): tensor for tensor in _tensors(folder)}
    try:
        config = family.read(fields, set(tensors))
    except KeyError as error:
        raise ValueError(f"{folder / CONFIG} lacks {error}.") from error
    names = _names(family, config)
    _check_tensors(folder, names, tensors, family)

    def leaf(path, shape):
        found = names[_path(path)]
        layers = [
            _join(family, path, [tensors[name].value for name in layer]) for layer in found.layers
        ]
        value = np.stack(layers) if found.stacked else layers[0]
        assert value.shape == shape.shape
        return value

    trees = jax.tree_util.tree_map_with_path(leaf, _shapes(family, config))
    return Checkpoint(config, trees["params"], trees.get("state", {}).get("layers"))


def save(folder: str | Path, config: Config, params: PyTree, state: PyTree = None) -> None:
    """Writes a model that ``from_pretrained`` of the transformers library reads.

    A model in the folder is replaced, even one in several files. If the process is killed
    meanwhile, the folder holds the old model, the new one, or no ``config.json`` and so neither.

    Args:
      folder: made if it does not exist.
      config: the model's shape. A GPT must have the shape of GPT-2 or Llama: learned positions,
        LayerNorm, GELU and biases, or rotary positions, RMSNorm and SwiGLU. A ResNet must have
        style "imagenet" and norm "batch".
      params: canonical parameters.
      state: a ResNet's running statistics.

    Raises:
      ValueError: a config that no family of the library has, a ResNet without state, or a folder
        that holds an adapter, with which the library would read another model.
    """
    found = [(name, family) for name, family in FAMILIES.items() if family.holds(config)]
    if not found:
        raise ValueError(f"{config} is none of {', '.join(FAMILIES)} in the transformers library.")
    ((model_type, family),) = found
    if family.init_state is not None and state is None:
        raise ValueError(f"A {model_type} has running statistics: pass state.")
    folder = Path(folder)
    if (folder / ADAPTER).exists():
        raise ValueError(
            f"{folder} holds {ADAPTER}: the transformers library would read the adapter and its "
            "base model instead of what is saved here. Remove it, or name another folder."
        )
    names = _names(family, config)
    trees = {"params": params} | ({"state": {"layers": state}} if family.init_state else {})
    tensors: dict[str, np.ndarray] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(trees):
        theirs, array = names[_path(path)], np.asarray(value)
        layers = array if theirs.stacked else [array]
        for layer, layer_names in zip(layers, theirs.layers, strict=True):
            split = _split(family, config, path, layer, len(layer_names))
            tensors |= {
                family.prefix + name: np.ascontiguousarray(part, np.float32)
                for name, part in zip(layer_names, split, strict=True)
            }
    # BatchNorm there also counts batches; nothing uses the count, but reading warns without it.
    tensors |= {
        name.replace("running_mean", "num_batches_tracked"): np.zeros((), np.int64)
        for name in tensors
        if name.endswith(".running_mean")
    }
    fields = {"model_type": model_type, "dtype": "float32", **family.write(config)}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as name:
        partial = Path(name)
        _safetensors().numpy.save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
        _replace(folder, partial)


# Names and shapes.


class _Names(NamedTuple):
    """The library's names of a leaf: those of one layer, or of each layer if they are stacked."""

    layers: list[tuple[str, ...]]
    shapes: list[tuple[int, ...]]
    """Of the tensors of a layer, in the order of their names."""
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
        # A broadcast number has a shape, and takes no memory.
        layer = np.broadcast_to(np.float32(0), shape.shape[1:] if stacked else shape.shape)
        names[_path(path)] = _Names(
            [
                tuple(f"{name.format(number)}.{suffix}" for name in theirs)
                for number in range(shape.shape[0] if stacked else 1)
            ],
            [part.shape for part in _split(family, config, path, layer, len(theirs))],
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
    return arrays


def _check_tensors(
    folder: Path, names: dict[str, _Names], tensors: dict[str, _Tensor], family: Family
) -> None:
    """Raises ValueError with every problem, before any tensor is used."""
    wanted = {
        name: shape
        for theirs in names.values()
        for layer in theirs.layers
        for name, shape in zip(layer, theirs.shapes, strict=True)
    }
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(
        name for name in tensors.keys() - wanted.keys() if not name.endswith(family.unread)
    )
    failures = [
        f"{folder} {what}: {', '.join(some[:8])}{f' and {len(some) - 8} more' * (len(some) > 8)}."
        for what, some in (("lacks tensors", missing), ("has tensors of no use", unexpected))
        if some
    ]
    for name, (file, theirs, value) in tensors.items():
        if value.shape != wanted.get(name, value.shape):
            failures.append(
                f"{file}: {theirs} gives a tensor of shape {list(value.shape)}, but config.json "
                f"asks for {list(wanted[name])}."
            )
        if name in wanted and not jnp.issubdtype(value.dtype, jnp.floating):
            failures.append(
                f"{file}: {theirs} gives {value.dtype} numbers; weights must be floating-point, "
                "not quantized."
            )
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


class _Tensor(NamedTuple):
    """A tensor of a file, under its name there."""

    file: Path
    name: str
    value: np.ndarray


def _tensors(folder: Path) -> list[_Tensor]:
    """All tensors of a folder."""
    # As in the library, one file comes before an index.
    sharded = (folder / INDEX).exists() and not (folder / WEIGHTS).exists()
    tensors = []
    for name in _listed(folder) if sharded else [WEIGHTS]:
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder} holds no {name}; it must hold {WEIGHTS} or {INDEX}.")
        try:
            found = _safetensors().numpy.load_file(file)
        except _safetensors().SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}.") from error
        tensors += [_Tensor(file, tensor, value) for tensor, value in found.items()]
    return tensors


def _listed(folder: Path) -> list[str]:
    """The files that an index lists, of which none may lie outside the folder."""
    weight_map = _read_json(folder / INDEX).get("weight_map")
    found: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) and name and "\0" not in name for name in found):
        raise ValueError(
            f"{folder / INDEX} is damaged: it must have a weight_map from tensors to file names."
        )
    names = sorted(set(found))
    root = folder.resolve()
    inside = [root]
    if root.parent.name == "snapshots":  # the Hub's cache, whose snapshots are links to its blobs
        inside.append(root.parents[1] / "blobs")

    def leads_out(name: str) -> bool:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return True
        file = Path(os.path.realpath(root / name))
        return not any(file.is_relative_to(place) for place in inside)

    failures = [
        f"{folder / INDEX} names {name!r}, which leads out of the folder. Nearest valid: a file in "
        f"it, such as {WEIGHTS if Path(name).name == '..' else Path(name).name!r}."
        for name in names
        if leads_out(name)
    ]
    if failures:
        raise ValueError("\n".join(failures))
    return names


def _replace(folder: Path, partial: Path) -> None:
    """Replaces the contents of a folder by the files of a complete model."""
    for name in (WEIGHTS, CONFIG):
        with (partial / name).open("rb") as file:
            os.fsync(file.fileno())
    # Nothing reads a folder without its config: two models are never mixed.
    (folder / CONFIG).unlink(missing_ok=True)
    os.replace(partial / WEIGHTS, folder / WEIGHTS)
    for path in list(folder.iterdir()):
        if path.name == INDEX or _SHARD.fullmatch(path.name):
            path.unlink()
    os.replace(partial / CONFIG, folder / CONFIG)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path.parent} holds no {path.name}; give a Hugging Face model folder.")
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object.")
    return fields


def _current_name(name: str, family: Family) -> str:
    """Without the head's prefix; LayerNorms of early BERT files have gamma and beta."""
    name = name.removeprefix(family.prefix)
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name
