"""Reads and writes models in the folders of Hugging Face's transformers library.

A folder holds ``config.json`` and the weights, in ``model.safetensors`` or in several files that
``model.safetensors.index.json`` lists; where it has both, the library reads the one file, and so
does `load`. `models.hugging_face_families` maps their modules to ours; a module's
parameters follow from that. Parameters are canonical in and out, so any pipeline layout follows
from `jaxpipe.Pipeline.place` and ``unplace``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import ArgumentError, refuse, shown
from models.adapters import Adapters, columns
from models.gpt_config import GPTConfig
from models.hugging_face_families import FAMILIES, MULTIMODAL, Config
from models.hugging_face_family import Family
from models.hugging_face_fields import Fields, TokenIds, token_id_fields
from models.hugging_face_files import (
    CONFIG,
    WEIGHTS,
    Part,
    Tensor,
    apart,
    find_tensors,
    is_unread,
    library,
    read_json,
    replace_model,
    shortened_list,
    stored_name,
    tensors_in,
    together,
)
from models.types import KeyPath, PyTree
from models.vision_language import VisionLanguageConfig

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LORA = "base_model.model.{}.lora_{}.weight"

LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
"""The library's names for a module's parameters and statistics; our tables are modules there."""


PASSING = ("counts", "max_logits")
"""States by these names are 0 between steps, and not kept."""
_DEQUANTIZING = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""The library's classes that dequantize while it reads, by ``quant_method``."""
_OF_TEXT = re.compile(r"(model\.)?language_model\.|lm_head\.")
"""Names of the decoder's tensors in a model of several kinds of input, as versions write them."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Checkpoint(NamedTuple):
    """A model read from a folder.

    Attributes:
      config: its shape.
      params: canonical parameters, float32 numpy arrays.
      state: states of the layers: running statistics of a ResNet, biases that balance the use of
        experts; None for others.
      token_ids: the tokens that begin and end a text and fill it up, for `save`.
    """

    config: Any
    params: PyTree
    state: PyTree
    token_ids: TokenIds


class Folder:
    """A model in a folder, whose parts are read when they are asked for.

    ``jaxpipe.load_params(pipe, folder.read)`` reads it layer by layer into its place.

    Args:
      folder: as ``save_pretrained`` of a model of one of `FAMILIES` writes it.

    Attributes:
      config: its shape; its dropout is that of the folder's config, except on attention weights,
        which are never dropped here.
      token_ids: the tokens that begin and end a text and fill it up, for `save`.

    Raises:
      ValueError: a folder without the files, damaged files, an index that leads out of it, an
        architecture that is none of these, one with features that the models here lack, missing or
        unexpected tensors, and tensors of other shapes than the config's or of integers.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        fields = Fields(folder / CONFIG, read_json(folder / CONFIG))
        of_text = str(fields.get("model_type", None)) in MULTIMODAL
        fields = fields.part("text_config") if of_text else fields
        if (name := str(fields.get("model_type", None))) not in FAMILIES:
            raise ValueError(
                f"{folder}/config.json has model_type={shown(name)}; only {', '.join(FAMILIES)} "
                "can be read."
            )
        family = self._family = FAMILIES[name]
        stored = find_tensors(folder, unread=family.unread)
        if of_text:
            stored = [tensor for tensor in stored if _OF_TEXT.match(tensor.name)]
        tensors = [part for tensor in stored for part in apart(tensor, family.fused)]
        self._tensors = {_current_name(part.name, family): part for part in tensors}
        fields.tensors = set(self._tensors)
        try:
            config = family.read(fields)
        except ArgumentError as error:
            raise ValueError(f"{folder / CONFIG} describes no model of ours: {error}") from error
        is_gpt = isinstance(config, GPTConfig)
        self.config = dataclasses.replace(config, model_type=name) if is_gpt else config
        ids = fields.token_ids(family.token_ids) if family.token_ids else TokenIds()
        self.token_ids: TokenIds = ids
        self._names = _names(family, self.config)
        _check_tensors(folder, fields, self._names, self._tensors, family, self.config)
        self._leaves = jax.tree_util.tree_map_with_path(
            lambda path, shape: functools.partial(self._leaf, path, shape),
            _shapes(family, self.config),
        )

    def read(self, part: str, *number: int) -> PyTree:
        """Reads canonical parameters, float32 numpy arrays: those of a part, or of one layer."""
        leaves = self._leaves["params"][part]
        if number and isinstance(leaves, tuple):
            leaves, number = leaves[number[0]], ()
        return jax.tree.map(lambda leaf: leaf(*number), leaves)

    def read_params(self) -> PyTree:
        """Reads all canonical parameters."""
        return {part: self.read(part) for part in self._leaves["params"]}

    def read_state(self) -> PyTree:
        """Reads the states of layers; None for a model without."""
        leaves = self._leaves.get("state", {}).get("layers")
        return jax.tree.map(lambda leaf: leaf(), leaves)

    def _leaf(self, path: KeyPath, shape: jax.ShapeDtypeStruct, *number: int) -> np.ndarray:
        if path[-1].key in PASSING:
            return np.zeros(shape.shape, np.float32)
        names = self._names[_path(path)]
        layers = [names.layers[n] for n in number or range(len(names.layers))]
        order = _order(self._family, self.config, path)
        arrays = []
        for layer in layers:
            tensors = [self._tensors[name] for name in layer]
            numbers = [tensor.read() for tensor in tensors]
            array = _join(self._family, path, numbers, names.experts)
            arrays.append(array if order is None else array[..., order])
            # NaN is the largest number, and the smallest.
            if not (np.isfinite(arrays[-1].max()) and np.isfinite(arrays[-1].min())):
                _refuse_not_finite(tensors, numbers)
        return np.stack(arrays) if names.stacked and not number else arrays[0]


def load(folder: str | Path) -> Checkpoint:
    """Reads a whole model; see `Folder`.

    Raises:
      ValueError: as `Folder`.
    """
    model = Folder(folder)
    params, state = model.read_params(), model.read_state()
    return Checkpoint(model.config, params, state, model.token_ids)


def save(
    folder: str | Path,
    config: Config,
    params: PyTree,
    state: PyTree = None,
    *,
    token_ids: TokenIds | None = None,
) -> None:
    """Writes a model that ``from_pretrained`` of the transformers library reads.

    A model in the folder is replaced, even one in several files. If the process is killed
    meanwhile, the folder holds the old model, the new one, or no ``config.json`` and so neither.

    Args:
      folder: made if it does not exist.
      config: the model's shape. A GPT must be of one of `FAMILIES`. A ResNet
        must have style "imagenet" and norm "batch".
      state: states of the layers, for models that keep any.
      token_ids: token ids of the tokenizer, or of the model that was loaded. None writes that there
        are none; the library would otherwise take those of the family's original model.

    Raises:
      ValueError: a config that no family of the library has, parameters that are not the config's,
        a model that keeps states without them, token ids outside the vocabulary, or a folder that
        holds an adapter, with which the library would read another model.
    """
    model_type = _model_type(config)
    family = FAMILIES[model_type]
    if family.init_state is not None and state is None:
        raise ValueError(f"The layers of a {model_type} keep states: pass state.")
    folder = Path(folder)
    if (folder / ADAPTER).exists():
        raise ValueError(
            f"{folder} holds {ADAPTER}: the transformers library would read the adapter and its "
            "base model instead of what is saved here. Remove it, or name another folder."
        )
    trees = {"params": params} | ({"state": {"layers": state}} if family.init_state else {})
    _check_trees(trees, _shapes(family, config))
    fields, tensors = config_fields(config, token_ids), _tensors(family, config, trees)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as name:
        partial = Path(name)
        library().numpy.save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
        replace_model(folder, partial)


def tensors_of(config: Config, trees: PyTree, *, first_layer: int = 0) -> dict[str, np.ndarray]:
    """Lists a model's arrays, or those of some layers, under the library's names.

    Args:
      config: the model's shape, of one of `FAMILIES`.
      trees: ``{"params": ..., "state": {"layers": ...}}``, or parts of it; stacked layers may be
        some that follow one another.
      first_layer: the number of the first of these.
    """
    return _tensors(FAMILIES[_model_type(config)], config, trees, first_layer)


def config_fields(config: Config, token_ids: TokenIds | None = None) -> dict[str, Any]:
    """Makes the fields of ``config.json``; arguments as of `save`."""
    model_type = _model_type(config)
    family = FAMILIES[model_type]
    fields = {"model_type": model_type, "dtype": "float32", **family.write(config)}
    if family.token_ids is not None:
        fields |= token_id_fields(token_ids or TokenIds(), fields["vocab_size"])
    return fields


def save_adapters(folder: str | Path, config: GPTConfig, params: PyTree, *, base: str) -> None:
    """Writes the adapters of a model as the ``peft`` library reads them.

    A module of the library that holds several linear maps of ours gets the ranks of all of them.

    Args:
      folder: made if it does not exist.
      config: the model's shape, with adapters.
      base: folder of the model that is adapted.

    Raises:
      ValueError: a config that no family of the library has, a folder that holds a model, or
        adapters of MLPs beside experts, whose names ``peft`` takes for those of experts.
    """
    adapters, folder = config.adapters, Path(folder)
    assert adapters is not None
    family = FAMILIES[_model_type(dataclasses.replace(config, adapters=None))]
    if (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds a model's {CONFIG}. Remove it, or name another folder.")
    leaves = {path: np.asarray(leaf) for path, leaf in _of_adapters(params).items()}
    of_mlps = [path for path in leaves if path.endswith("/lora_b") and "/mlp/" in path]
    if config.num_experts is not None and of_mlps:
        raise ValueError(
            f"peft takes the modules of {shortened_list(of_mlps)} for experts. Write the merged "
            "model, or train adapters of attention alone."
        )
    written, wider, rank = dict[str, np.ndarray](), dict[str, int](), adapters.rank
    modules = _adapted_modules(family, config)
    for module, (num_outputs, adapted) in modules.items():
        up = np.zeros((num_outputs, rank * len(adapted)), np.float32)
        for n, own in enumerate(adapted):
            up[own.outputs, n * rank : (n + 1) * rank] = own.of(leaves, "lora_b").T[own.columns]
        down = np.concatenate([own.of(leaves, "lora_a").T for own in adapted])
        written[_LORA.format(module, "A")] = np.ascontiguousarray(down, np.float32)
        written[_LORA.format(module, "B")] = up
        if len(adapted) > 1:
            wider[module] = len(adapted)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": adapters.alpha,
        "rank_pattern": {module: count * rank for module, count in wider.items()},
        "alpha_pattern": {module: count * adapters.alpha for module, count in wider.items()},
        "lora_dropout": adapters.dropout,
        "target_modules": sorted(modules),
        "fan_in_fan_out": family.kernels_as_ours,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    library().numpy.save_file(written, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER).write_text(json.dumps(fields, indent=2) + "\n")


class Adapted(NamedTuple):
    """The shape of a model with adapters, and the parameters of these by their paths, float32."""

    config: GPTConfig
    leaves: dict[str, np.ndarray]


def load_adapters(folder: str | Path, config: GPTConfig) -> Adapted:
    """Reads adapters that the ``peft`` library has written for a model.

    Where a module of the library holds several linear maps of ours, each gets an adapter with those
    of the module's ranks that reach its outputs.

    Args:
      folder: as ``PeftModel.save_pretrained`` writes it.
      config: the model's shape, without adapters.

    Returns:
      The shape with adapters, and their parameters, such as "layers/attention/qkv/query/lora_a".

    Raises:
      ValueError: a folder without the files, damaged ones, another method than LoRA, adapters of
        experts or of other modules than the layers' linear maps, and of some layers alone.
    """
    file, weights = Path(folder) / ADAPTER, Path(folder) / ADAPTER_WEIGHTS
    fields, family = Fields(file, read_json(file)), FAMILIES[_model_type(config)]
    fields.require(peft_type=("LORA",))
    rank, alpha = fields.size("r"), fields.number("lora_alpha")
    root = math.sqrt if fields.flag("use_rslora") else float
    stored = {tensor.name: tensor.read().astype(np.float32) for tensor in tensors_in(weights)}
    modules = _adapted_modules(family, dataclasses.replace(config, adapters=Adapters(1, 1.0)))
    pairs: dict[str, list[tuple[_Reached, np.ndarray, np.ndarray] | None]] = {}
    for module, (num_outputs, reached) in modules.items():
        down, up = (stored.pop(_LORA.format(module, which), None) for which in "AB")
        for own in reached:
            of_target = pairs.setdefault(own.target, [])
            if down is None or up is None:
                of_target.append(None)
                continue
            if up.shape != (num_outputs, len(down)):
                raise ValueError(f"{weights}: lora_A and lora_B of {module} do not fit together.")
            by = _alpha(fields, module, alpha) / root(len(down)) / (alpha / root(rank))
            reaches = up[own.outputs].any(axis=0)
            ranks = np.argsort(~reaches, kind="stable")[: max(rank, reaches.sum())]
            of_target.append((own, down[ranks].T, by * up[own.outputs][:, ranks].T))
    if stored:
        raise ValueError(
            f"{weights} holds {shortened_list(sorted(stored))}; only low-rank adapters of the "
            "layers' linear maps can be read, without experts."
        )
    pairs = {target: found for target, found in pairs.items() if any(found)}
    if partial := [target for target, found in pairs.items() if not all(found)]:
        raise ValueError(f"{weights} adapts {', '.join(partial)} in some layers alone.")
    both = [pair for found in pairs.values() for pair in found if pair]
    most = max((len(up) for _, _, up in both), default=rank)
    dropout = fields.number("lora_dropout", 0.0)
    adapters = Adapters(most, alpha / root(rank) * most, tuple(pairs), dropout)
    config = dataclasses.replace(config, adapters=adapters)
    shapes = _of_adapters(_shapes(family, config)["params"])
    leaves = {path: np.zeros(leaf.shape, np.float32) for path, leaf in shapes.items()}
    for own, down, up in both:
        own.of(leaves, "lora_a")[:, : len(up)] = down
        own.of(leaves, "lora_b")[: len(up), own.columns] = up
    return Adapted(config, leaves)


def _of_adapters(params: PyTree) -> dict[str, Any]:
    """Lists the leaves of adapters by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {_path(path): leaf for path, leaf in leaves if path[-1].key in ("lora_a", "lora_b")}


def _alpha(fields: Fields, module: str, alpha: float) -> float:
    """Reads the alpha of a module, whose pattern ``peft`` compares with the end of its name."""
    patterns = fields.part("alpha_pattern")
    for pattern in fields.get("alpha_pattern", None) or ():
        if not re.fullmatch(r"[\w.]+", pattern):
            raise fields.wrong("alpha_pattern", pattern, "the names of modules, or their ends")
        if f".{module}".endswith(f".{pattern}"):
            return patterns.number(pattern)
    return alpha


class _Reached(NamedTuple):
    """An adapter of ours that adds to a module of the library.

    Args:
      path: path of its parameters.
      layer: number of the layer, if layers are stacked.
      outputs: outputs of the module that it adds to, [n].
      columns: columns of ``lora_b`` from which these are, [n].
    """

    path: str
    layer: int | None
    outputs: np.ndarray
    columns: np.ndarray

    @property
    def target(self) -> str:
        """Name of the map in a layer, as of `Adapters`."""
        return "/".join(key for key in self.path.split("/")[1:] if not key.isdecimal())

    def of(self, leaves: dict[str, np.ndarray], name: str) -> np.ndarray:
        """Returns ``lora_a`` or ``lora_b`` of the layer, of leaves by their paths."""
        leaf = leaves[f"{self.path}/{name}"]
        return leaf if self.layer is None else leaf[self.layer]


def _adapted_modules(family: Family, config: GPTConfig) -> dict[str, tuple[int, list[_Reached]]]:
    """Finds the modules of the library that adapters reach: the number of outputs, and by which.

    Numbers that are written as a model's kernels say which of our columns every output is.
    """
    plain = dataclasses.replace(config, adapters=None)
    names, leaves = _names(family, plain), _of_adapters(_shapes(family, config)["params"])
    adapted = [path.removesuffix("/lora_b") for path in leaves if path.endswith("/lora_b")]

    def numbered(path: KeyPath, kernel: jax.ShapeDtypeStruct) -> np.ndarray | None:
        if path[-1].key != "kernel":
            return None
        numbers = np.full((*kernel.shape[:-2], 3, kernel.shape[-1]), -1, np.float32)
        _, _, own = _path(path).removesuffix("/kernel").partition("/")
        for part in ("", *config.qkv_widths):
            if (name := f"{own}/{part}".removesuffix("/")) in adapted:
                numbered = numbers[..., columns(config, part)]
                numbered[..., 0, :] = adapted.index(name)
                if names[_path(path)].stacked:
                    numbered[..., 1, :] = np.arange(len(numbered))[:, None]
                numbered[..., 2, :] = np.arange(numbered.shape[-1])
        return numbers

    trees = jax.tree_util.tree_map_with_path(numbered, {"params": _shapes(family, plain)["params"]})
    found: dict[str, tuple[int, list[_Reached]]] = {}
    for name, tensor in _tensors(family, plain, trees).items():
        if tensor.ndim != 2:
            continue
        which, layers, places = (tensor if family.kernels_as_ours else tensor.T).astype(int)
        for number in sorted({*which} - {-1}):
            outputs = np.flatnonzero(which == number)
            layer = None if layers[outputs[0]] < 0 else layers[outputs[0]]
            own = _Reached(adapted[number], layer, outputs, places[outputs])
            found.setdefault(name.removesuffix(".weight"), (len(which), []))[1].append(own)
    return found


def _model_type(config: Config) -> str:
    """Finds the family of a config; raises ValueError if it is of none."""
    of_kind = {name: family for name, family in FAMILIES.items() if isinstance(config, family.kind)}
    if not of_kind or isinstance(config, VisionLanguageConfig):
        raise ValueError(f"config is a {type(config).__name__}, of which the library has no model.")
    misfits = {name: family.misfits(config) for name, family in of_kind.items()}
    own = getattr(config, "model_type", None)
    nearest = min(misfits, key=lambda name: (len(misfits[name]), name != own))
    if misfits[nearest]:
        found = ", ".join(f"{field}={getattr(config, field)!r}" for field in misfits[nearest])
        raise ValueError(
            f"The config is none of {', '.join(of_kind)} in the transformers library. The nearest, "
            f"{nearest}, has no models with {found}."
        )
    return nearest


def _tensors(
    family: Family, config: Config, trees: PyTree, first: int = 0
) -> dict[str, np.ndarray]:
    """Lists the model's arrays, or those of stacked layers from a first one, by their names."""
    names, tensors = _names(family, config), dict[str, np.ndarray]()
    for path, value in jax.tree_util.tree_leaves_with_path(trees):
        if path[-1].key in PASSING:
            continue
        theirs, array = names[_path(path)], np.asarray(value)
        layers = array if theirs.stacked else [array]
        if (order := _order(family, config, path)) is not None:
            layers = [layer[..., np.argsort(order)] for layer in layers]
        begin = first if theirs.stacked else 0
        numbered = theirs.layers[begin : begin + len(layers)]
        for layer, layer_names in zip(layers, numbered, strict=True):
            split = _split(family, config, path, layer, len(layer_names), theirs.experts)
            tensors |= {
                family.prefix + name: np.ascontiguousarray(part, np.float32)
                for name, part in zip(layer_names, split, strict=True)
            }
    tensors = together(tensors, family.fused)
    tensors |= {
        family.layer.format(n) + name: np.array(value, np.float32)
        for n in range(config.num_layers if family.constants and not first else 0)
        for name, value in family.constants
    }
    # BatchNorm there also counts batches; nothing uses the count, but reading warns without it.
    return tensors | {
        name.replace("running_mean", "num_batches_tracked"): np.zeros((), np.int64)
        for name in tensors
        if name.endswith(".running_mean")
    }


# Names and shapes.


class _Names(NamedTuple):
    """The library's names of a leaf: those of one layer, or of each layer if they are stacked."""

    layers: list[tuple[str, ...]]
    shapes: list[tuple[int, ...]]
    """Shapes of the tensors of a layer, in the order of their names."""
    stacked: bool
    experts: bool
    """Whether a layer's tensors are those of its experts; else they are joined over outputs."""


def _names(family: Family, config: Config) -> dict[str, _Names]:
    """Finds the library's names for every leaf of ours."""
    modules = family.modules(config)
    names = {}
    for path, shape in jax.tree_util.tree_leaves_with_path(_shapes(family, config)):
        if path[-1].key in PASSING:
            continue
        _, *keys = _path(path).split("/")
        numbers: list[int] | None = None
        if (match := _find(modules, keys)) is None:  # a layer of several kinds, all named alike
            part, number, *rest = keys
            match, numbers = _find(modules, [part, *rest]), [int(number)]
        assert match is not None
        theirs, suffix = match
        stacked, experts = numbers is None and "{}" in theirs[0], theirs[0].count("{}") > 1
        layer_shape = shape.shape[1:] if stacked else shape.shape
        if experts:  # the number of the layer is filled in below
            theirs = tuple(theirs[0].format("{}", n) for n in range(layer_shape[0]))
        if numbers is None:
            numbers = list(range(shape.shape[0] if stacked else 1))
        # A broadcast number has a shape, and takes no memory.
        layer = np.broadcast_to(np.float32(0), layer_shape)
        names[_path(path)] = _Names(
            [tuple(_tensor(name.format(number), suffix) for name in theirs) for number in numbers],
            [part.shape for part in _split(family, config, path, layer, len(theirs), experts)],
            stacked,
            experts,
        )
    return names


def _find(
    modules: dict[str, str | tuple[str, ...]], keys: list[str]
) -> tuple[tuple[str, ...], str] | None:
    """Finds the library's names for a table or a leaf's module, and the tensor name's ending."""
    for module, suffix in (("/".join(keys), "weight"), ("/".join(keys[:-1]), LEAVES.get(keys[-1]))):
        if module in modules and suffix is not None:
            theirs = modules[module]
            return (theirs,) if isinstance(theirs, str) else theirs, suffix
    return None


def _tensor(module: str, suffix: str) -> str:
    """Names the tensor of a module; one that begins with "=" is a tensor's already."""
    return module[1:] if module.startswith("=") else f"{module}.{suffix}"


@functools.cache
def _shapes(family: Family, config: Config) -> dict[str, PyTree]:
    # Nothing is computed: a trainer reads configurations before it chooses its devices.
    shapes = {"params": jax.eval_shape(lambda: family.init(config, jax.random.key(0)))}
    if (make := family.init_state) is not None:
        shapes["state"] = {"layers": jax.eval_shape(lambda: make(config))}
    return shapes


def _path(path: KeyPath) -> str:
    """Writes a leaf's path in words: "params/layers/attention/qkv/kernel"."""
    return "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)


def _join(family: Family, path: KeyPath, tensors: list[np.ndarray], experts: bool) -> np.ndarray:
    """Makes a leaf of ours from theirs: [out, in, *window] to [*window, in, out], joined by out."""
    if path[-1].key == "kernel" and not family.kernels_as_ours:
        tensors = [np.transpose(tensor, (*range(2, tensor.ndim), 1, 0)) for tensor in tensors]
    if experts:
        joined = np.stack(tensors)
    else:
        joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors, axis=-1)
    return np.ascontiguousarray(joined, np.float32)


def _split(
    family: Family, config: Any, path: KeyPath, array: np.ndarray, count: int, experts: bool
) -> list[np.ndarray]:
    """Undoes `_join`."""
    arrays = [array]
    if experts:
        arrays = list(array)
    elif count > 1:  # queries, keys and values
        arrays = np.split(array, np.cumsum([*config.qkv_widths.values()])[:-1], axis=-1)
    if path[-1].key == "kernel" and not family.kernels_as_ours:
        last = arrays[0].ndim - 1
        arrays = [np.transpose(part, (last, last - 1, *range(last - 1))) for part in arrays]
    return arrays


def _order(family: Family, config: Any, path: KeyPath) -> np.ndarray | None:
    """Finds, for each number in the last dimension of a leaf of ours, the place of theirs."""
    module = path[-2].key if len(path) > 1 else None
    if family.order is None or module not in ("qkv", "query_norm", "key_norm"):
        return None
    order = family.order(config)
    return order if module == "qkv" else order[: config.head_width]  # norms are those of a head


def _check_tensors(
    folder: Path,
    fields: Fields,
    names: dict[str, _Names],
    tensors: dict[str, Tensor | Part],
    family: Family,
    config: Config,
) -> None:
    """Raises ValueError with every problem, in the files' own names, before a tensor is used."""
    wanted = {
        name: shape
        for theirs in names.values()
        for layer in theirs.layers
        for name, shape in zip(layer, theirs.shapes, strict=True)
    }
    lacking = wanted.keys() - tensors.keys()
    constants = {
        name: value for name in tensors for end, value in family.constants if name.endswith(end)
    }
    wanted |= dict.fromkeys(constants, ())
    has_prefix = any(t.stored.name.startswith(family.prefix) for t in tensors.values())
    prefix = family.prefix if has_prefix else ""
    missing = sorted({prefix + stored_name(name, family.fused) for name in lacking})
    unexpected = sorted(
        {
            tensor.stored.name
            for name, tensor in tensors.items()
            if name not in wanted and not is_unread(name, family.unread)
        }
    )
    failures = [
        f"{folder} {what}: {shortened_list(some)}."
        for what, some in (("lacks tensors", missing), ("has tensors of no use", unexpected))
        if some
    ]
    for name, tensor in tensors.items():
        gives = f"{tensor.file}: {tensor.stored.name} gives"
        if tensor.shape != wanted.get(name, tensor.shape):
            failures.append(
                f"{gives} a tensor of shape {list(tensor.stored.shape)}, but config.json "
                f"asks for {list(tensor.stored_shape(wanted[name]))}."
            )
        if name in wanted and tensor.dtype not in _FLOATS:
            failures.append(
                f"{gives} {tensor.dtype} numbers; weights must be floating-point, not quantized."
            )
        elif name in constants and not tensor.shape:
            found, value = float(tensor.read()), constants[name]
            if not np.isclose(found, value, rtol=2**-8, atol=0):  # rounded to bfloat16
                failures.append(f"{gives} {found:.4g}; it can only be read with {value}.")
    if failures and (quantized := fields.part("quantization_config")).count:
        method = shown(quantized.get("quant_method", None))
        remedy = "Dequantize the model with the transformers library, then save_pretrained."
        if (kind := _DEQUANTIZING.get(method.strip("'"))) is not None:
            remedy = (
                "Dequantize it with the transformers library:\n  model = AutoModelForCausalLM."
                f"from_pretrained({str(folder)!r}, quantization_config={kind}(dequantize=True))\n"
                "  model.save_pretrained(FOLDER)"
            )
        failures = [
            f"{folder / CONFIG} has a quantization_config (quant_method={method}); only weights in "
            f"floating-point can be read. {remedy}"
        ]
    elif missing:
        failures = [*_bare(folder, fields, lacking, tensors, family.write(config)), *failures]
    refuse(dict.fromkeys(failures))


def _bare(
    folder: Path,
    fields: Fields,
    lacking: set[str],
    tensors: dict[str, Tensor | Part],
    written: dict[str, Any],
) -> list[str]:
    """Says that a model lacks its head, or has one of another kind, if that is so."""
    whole, saved = written["architectures"], fields.get("architectures", None)
    if saved in (None, whole) and not any(name.partition(".")[2] in tensors for name in lacking):
        return []
    return [
        f"{folder / CONFIG} has architectures={shown(saved)}, a model without the head of "
        f"{whole[0]}, the only one that can be read. Load the folder as {whole[0]}, which makes "
        "a new head unless it is tied, then save_pretrained."
    ]


def _refuse_not_finite(tensors: list[Tensor | Part], numbers: list[np.ndarray]) -> None:
    """Raises ValueError with the tensors that hold NaN or infinite numbers, as float32."""
    refuse(
        f"{tensor.file}: {tensor.stored.name} holds {count} numbers that are NaN or infinite in "
        "float32; weights must be finite."
        for tensor, values in zip(tensors, numbers, strict=True)
        if (count := np.count_nonzero(~np.isfinite(values.astype(np.float32))))
    )


def _check_trees(trees: PyTree, wanted: PyTree) -> None:
    """Raises ValueError with every leaf to be saved that is not the config's."""
    leaves, shapes = (
        {_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (trees, wanted)
    )
    failures = [f"{path} is missing." for path in shapes if path not in leaves]
    for path, leaf in leaves.items():
        if path not in shapes:
            failures.append(f"{path} is not a part of the model.")
        elif np.shape(leaf) != shapes[path].shape:
            failures.append(
                f"{path} has shape {list(np.shape(leaf))}, but the config asks for "
                f"{list(shapes[path].shape)}."
            )
        elif not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.floating):
            failures.append(f"{path} holds no floating-point numbers.")
    if failures:
        raise ValueError("\n".join(failures))


def _current_name(name: str, family: Family) -> str:
    """Removes prefixes, and renames gamma and beta of LayerNorms in early BERT files."""
    name = re.sub(r"^(model\.)?language_model\.", r"\1", name).removeprefix(family.prefix)
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name
