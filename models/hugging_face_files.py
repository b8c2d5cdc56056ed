"""The files of a Hugging Face folder: weights in one file or several, and JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jaxpipe import files
from jaxpipe.errors import ArgumentError, refuse

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""The library's names for the files that an index lists."""


def library() -> ModuleType:
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


class Fused(NamedTuple):
    """A tensor of a file that holds several of the library's modules, or one in another form.

    Args:
      ending: ending of its name.
      names: endings of the names that its parts are given.
      axis: dimension of the file's tensor along which the parts lie.
      alternate: whether they take turns there; else they follow one another.
      turn: the file's dimensions in the order of a part's: [out, in, experts], as a convolution's.
      row: whether a first dimension of 1 is left out.
    """

    ending: str
    names: tuple[str, ...]
    axis: int = 0
    alternate: bool = False
    turn: tuple[int, ...] | None = None
    row: bool = False

    def taken(self, values: np.ndarray, number: int) -> np.ndarray:
        """Takes a part."""
        if self.row:
            values = values[0]
        count, length = len(self.names), values.shape[self.axis]
        if self.alternate:
            chosen = slice(number, None, count)
        else:
            chosen = slice(number * length // count, (number + 1) * length // count)
        before = self.axis % values.ndim
        values = values[(slice(None),) * before + (chosen,)]
        return (
            values.transpose(self.turn) if self.turn and len(self.turn) == values.ndim else values
        )

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Undoes `taken`, for all parts."""
        if self.turn and len(self.turn) == parts[0].ndim:
            parts = [part.transpose(np.argsort(self.turn)) for part in parts]
        axis = self.axis % parts[0].ndim
        if self.alternate:
            shape = list(parts[0].shape)
            shape[axis] *= len(parts)
            values = np.stack(parts, axis=axis + 1).reshape(shape)
        else:
            values = np.concatenate(parts, axis=axis)
        return np.ascontiguousarray(values[None] if self.row else values)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these, and can have so many parts."""
        dims = tensor.shape[1:] if self.row else tensor.shape
        enough = dims and self.axis < len(dims) and dims[self.axis] >= len(self.names)
        return tensor.name.endswith(self.ending) and bool(enough)


class Part(NamedTuple):
    """A part of a tensor, under a name of its own."""

    tensor: Tensor
    name: str
    fused: Fused
    number: int

    @property
    def stored(self) -> Tensor:
        """The tensor of the file."""
        return self.tensor

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the file's tensor has where this part has the given shape."""
        fused, dims = self.fused, list(shape)
        if fused.turn and len(fused.turn) == len(dims):
            dims = [shape[place] for place in np.argsort(fused.turn)]
        dims[fused.axis] *= len(fused.names)
        return (1, *dims) if fused.row else tuple(dims)

    @property
    def file(self) -> Path:
        return self.tensor.file

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        # A broadcast number has a shape, and takes no memory.
        whole = np.broadcast_to(np.float32(0), self.tensor.shape)
        return self.fused.taken(whole, self.number).shape

    def read(self) -> np.ndarray:
        """Reads the numbers."""
        return self.fused.taken(self.tensor.read(), self.number)


def apart(tensor: Tensor, fused: Sequence[Fused]) -> list[Tensor | Part]:
    """Lists the parts of a tensor; itself if it has none, or is too damaged to have any."""
    for form in fused:
        if form.fits(tensor):
            stem = tensor.name.removesuffix(form.ending)
            return [Part(tensor, stem + name, form, n) for n, name in enumerate(form.names)]
    return [tensor]


def stored_name(name: str, fused: Sequence[Fused]) -> str:
    """Returns the name of the tensor that holds a part."""
    for form in fused:
        for part in form.names:
            if name.endswith(part):
                return name.removesuffix(part) + form.ending
    return name


def together(tensors: dict[str, np.ndarray], fused: Sequence[Fused]) -> dict[str, np.ndarray]:
    """Undoes `apart`."""
    tensors = dict(tensors)
    for form in fused:
        first = form.names[0]
        for stem in [name.removesuffix(first) for name in tensors if name.endswith(first)]:
            tensors[stem + form.ending] = form.joined([tensors.pop(stem + n) for n in form.names])
    return tensors


def find_tensors(folder: Path, *, unread: tuple[str, ...]) -> list[Tensor]:
    """Lists all tensors of a folder, without reading any.

    Args:
      unread: names that an index may list though no file has them, as `is_unread` has it.
    """
    # As in the library, one file comes before an index.
    sharded = (folder / INDEX).exists() and not (folder / WEIGHTS).exists()
    tensors: list[Tensor] = []
    for name in _listed(folder) if sharded else [WEIGHTS]:
        file = folder / name
        if not file.is_file():
            refuse([f"{folder} holds no {name}; it must hold {WEIGHTS} or {INDEX}."])
        tensors += tensors_in(file)
    if sharded:
        _check_listed(folder, tensors, unread)
    return tensors


def tensors_in(file: Path) -> Iterator[Tensor]:
    """Lists the tensors of a file; raises ValueError if it is damaged or not there."""
    try:
        opened = library().safe_open(file, framework="numpy")
    except library().SafetensorError as error:
        raise ArgumentError([f"{file} is damaged: {error}."]) from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}.") from error
    for name in opened.keys():  # noqa: SIM118, a handle of safetensors cannot be iterated
        part = opened.get_slice(name)
        dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())
        yield Tensor(file, name, tuple(part.get_shape()), dtype, opened)


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
        if not is_there and (name in files_of or not is_unread(name, unread)):
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


def is_unread(name: str, unread: tuple[str, ...]) -> bool:
    """Whether a name has one of some endings, or beginnings, which end with a dot."""
    return name.endswith(unread) or name.startswith(tuple(u for u in unread if u.endswith(".")))


def _listed(folder: Path) -> list[str]:
    """Lists the files in an index; raises ValueError unless all are names in the folder."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    values: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    if not all(map(_is_name, values)):
        raise ValueError(
            f"{folder / INDEX} is damaged: it must have a weight_map from tensors to the names of "
            "files in the folder."
        )
    return sorted(set(values))


def _is_name(name: Any) -> bool:
    """Says whether a file of a folder can have this name; file systems take 255 bytes at most."""
    try:
        is_plain = Path(name).name == name and name not in ("", "..")
        return is_plain and len(os.fsencode(name)) <= 255 and "\0" not in name
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
        raise ValueError(f"{path} is damaged: it is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object.")
    return fields
