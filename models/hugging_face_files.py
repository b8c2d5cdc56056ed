"""The files of a Hugging Face folder: weights in one file or several, and JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpipe import files
from jaxpipe.errors import ArgumentError, refuse

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""The library's names for the files that an index lists."""


def library():
    """Imports the package; raises ValueError if it is not installed."""
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ValueError(
            "Hugging Face folders need the safetensors package: pip install 'jaxpipe[huggingface]'."
        ) from error
    return safetensors


_DTYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint"))
       for bits in (8, 16, 32, 64)},
    "BF16": "bfloat16",
    "BOOL": "bool",
}  # fmt: skip
"""Numpy's names for the kinds of numbers; a kind without one keeps the name of the file format."""


def shortened_list(names: Sequence[str]) -> str:
    """Writes the first of some names, and how many more there are."""
    return f"{', '.join(names[:8])}{f' and {len(names) - 8} more' * (len(names) > 8)}"


class Tensor(NamedTuple):
    """A tensor of a file, under its name there; its numbers are only read when asked for."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    opened: Any

    @property
    def stored(self) -> Tensor:
        """The tensor of the file."""
        return self

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the file's tensor has where this one has the given shape."""
        return shape

    def read(self) -> np.ndarray:
        """Reads the numbers."""
        values: np.ndarray = self.opened.get_tensor(self.name)
        return values


Joined = tuple[tuple[str, tuple[str, ...]], ...]
"""Endings of tensors, each with those of the parts that it holds."""


class Part(NamedTuple):
    """Every ``step``-th column of a tensor from ``first`` on, under a name of its own.

    Matrices of experts, [experts, in, out], are read as [out, in, experts], like a convolution's.
    """

    tensor: Tensor
    name: str
    first: int
    step: int

    @property
    def stored(self) -> Tensor:
        """The tensor of the file."""
        return self.tensor

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the file's tensor has where this part has the given shape."""
        *dims, columns = shape[::-1] if len(shape) == 3 else shape
        return *dims, columns * self.step

    @property
    def file(self) -> Path:
        return self.tensor.file

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        *dims, columns = self.tensor.shape
        shape = *dims, len(range(self.first, columns, self.step))
        return shape[::-1] if len(shape) == 3 else shape

    def read(self) -> np.ndarray:
        """Reads the numbers."""
        return _turned(self.tensor.read()[..., self.first :: self.step])


def _turned(values: np.ndarray) -> np.ndarray:
    return values.T if values.ndim == 3 else values


def apart(tensor: Tensor, joined: Joined) -> list[Tensor | Part]:
    """Lists the parts of a tensor, by the endings of its name and of theirs; itself if none fits.

    A tensor without dimensions, or with less columns than parts, is damaged, and stays whole.
    """
    for ending, names in joined:
        if tensor.name.endswith(ending) and tensor.shape and tensor.shape[-1] >= len(names):
            stem = tensor.name.removesuffix(ending)
            return [Part(tensor, stem + name, n, len(names)) for n, name in enumerate(names)]
    return [tensor]


def stored_name(name: str, joined: Joined) -> str:
    """Returns the name of the tensor that holds a part."""
    for ending, names in joined:
        for part in names:
            if name.endswith(part):
                return name.removesuffix(part) + ending
    return name


def together(tensors: dict[str, np.ndarray], joined: Joined) -> dict[str, np.ndarray]:
    """Undoes `apart`."""
    tensors = dict(tensors)
    for ending, names in joined:
        for stem in [n.removesuffix(names[0]) for n in tensors if n.endswith(names[0])]:
            parts = [_turned(tensors.pop(stem + name)) for name in names]
            values = np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
            tensors[stem + ending] = np.ascontiguousarray(values)
    return tensors


def find_tensors(folder: Path, *, unread: tuple[str, ...]) -> list[Tensor]:
    """Lists all tensors of a folder, without reading any.

    Args:
      folder: the folder.
      unread: endings of names that an index may list though no file has them, as of tied tables.
    """
    # As in the library, one file comes before an index.
    sharded = (folder / INDEX).exists() and not (folder / WEIGHTS).exists()
    tensors = []
    for name in _listed(folder) if sharded else [WEIGHTS]:
        file = folder / name
        if not file.is_file():
            refuse([f"{folder} holds no {name}; it must hold {WEIGHTS} or {INDEX}."])
        try:
            opened = library().safe_open(file, framework="numpy")
        except library().SafetensorError as error:
            raise ArgumentError([f"{file} is damaged: {error}."]) from error
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror or error}.") from error
        for tensor in opened.keys():  # noqa: SIM118, a handle is no mapping: it cannot be iterated
            part = opened.get_slice(tensor)
            dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())
            tensors.append(Tensor(file, tensor, tuple(part.get_shape()), dtype, opened))
    if sharded:
        _check_listed(folder, tensors, unread)
    return tensors


def _check_listed(folder: Path, tensors: list[Tensor], unread: tuple[str, ...]) -> None:
    """Raises ValueError unless every tensor is in the file that the index says, and only there."""
    files_of: dict[str, list[Path]] = {}
    for tensor in tensors:
        files_of.setdefault(tensor.name, []).append(tensor.file)
    lacking: dict[Path, list[str]] = {}
    weight_map = read_json(folder / INDEX)["weight_map"]
    paths = {name: folder / name for name in set(weight_map.values())}
    for name, file in weight_map.items():
        is_there = paths[file] in files_of.get(name, ())
        if not is_there and (name in files_of or not name.endswith(unread)):
            lacking.setdefault(paths[file], []).append(name)
    failures = [
        f"{file} lacks {shortened_list(names)}, which {INDEX} says it holds."
        for file, names in lacking.items()
    ]
    failures += [
        f"{' and '.join(map(str, files))} both hold {name}."
        for name, files in files_of.items()
        if len(files) > 1
    ]
    refuse(failures)


def _listed(folder: Path) -> list[str]:
    """Lists the files in an index; raises ValueError if one of them lies outside the folder."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    values: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    if not all(map(_is_name, values)):
        raise ValueError(
            f"{folder / INDEX} is damaged: it must have a weight_map from tensors to file names."
        )
    names = sorted(set(values))
    root = folder.resolve()
    inside = [root]
    if root.parent.name == "snapshots":  # the Hub's cache, whose snapshots are links to its blobs
        inside.append(root.parents[1] / "blobs")

    def leads_out(name: str) -> bool:
        if os.path.isabs(name) or ".." in name.split("/"):
            return True
        file = os.path.join(root, name)
        if not os.path.lexists(file):
            return False
        return not any(Path(os.path.realpath(file)).is_relative_to(place) for place in inside)

    out = [name for name in names if leads_out(name)]
    failures = [
        f"{folder / INDEX} names {name!r}, which leads out of the folder. Nearest valid: a file in "
        f"it, such as {WEIGHTS if Path(name).name == '..' else Path(name).name!r}."
        for name in out[:8]
    ]
    if len(out) > 8:
        failures.append(f"{folder / INDEX} names {len(out) - 8} more files that lead out of it.")
    refuse(failures)
    return names


def _is_name(name: Any) -> bool:
    """Says whether a file can have this name; file systems take at most 255 bytes."""
    try:
        return 1 <= len(os.fsencode(name)) <= 255 and "\0" not in name
    except (TypeError, UnicodeEncodeError):
        return False


def replace_model(folder: Path, partial: Path) -> None:
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


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a file; raises ValueError if there is none."""
    if not path.exists():
        raise ValueError(f"{path.parent} holds no {path.name}; give a Hugging Face model folder.")
    try:
        fields = files.read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object.")
    return fields
