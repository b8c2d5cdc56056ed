"""Copies of the training state in the memory of hosts, which outlive the program that took them.

A file in memory has no name and belongs to whoever has its descriptor, so a program that replaces
itself hands it on.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from models.types import PyTree


class Part(NamedTuple):
    """A part of an array in a copy.

    Args:
      leaf: number of the array in the state.
      start: where the part begins in the array, in every dimension.
      shape: shape of the part.
      offset: its first byte in the file.
      size: number of bytes.
    """

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclasses.dataclass
class Copy:
    """The parts of the state that a process's devices held after a step.

    Args:
      file: descriptor of the file in memory.
      step: optimizer steps done; -1 while the file is not whole.
      data: the position in the data, for JSON.
      sizes: bytes of every array of the state, wherever its parts are.
      parts: what is in the file.
    """

    file: int
    step: int = -1
    data: Any = None
    sizes: list[int] = dataclasses.field(default_factory=list)
    parts: list[Part] = dataclasses.field(default_factory=list)

    def read(self, offset: int, size: int) -> bytes:
        """Reads bytes of the file."""
        with mmap.mmap(self.file, 0, prot=mmap.PROT_READ) as content:
            return content[offset : offset + size]


def new_pair() -> list[Copy]:
    """Makes two copies that hold nothing: while one is written, the other is whole."""
    return [Copy(os.memfd_create(f"state {number}")) for number in range(2)]


def older(pair: Sequence[Copy]) -> Copy:
    """Returns the one of a pair that is to be written."""
    return min(pair, key=lambda copy: copy.step)


def write(copy: Copy, step: int, state: PyTree, data: Any) -> None:
    """Replaces a copy by what the devices of this process hold of a tree of global arrays."""
    leaves = jax.tree.leaves(state)
    copy.step, copy.data, copy.parts = -1, data, []
    copy.sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    with open(copy.file, "wb", closefd=False) as file:
        file.seek(0)
        for leaf, array in enumerate(leaves):
            for start, part in _parts(array):
                content = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                copy.parts.append(Part(leaf, start, part.shape, file.tell(), content.size))
                file.write(content.data)
    copy.step = step


def _parts(array: jax.Array) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yields the different parts of an array that this process's devices hold."""
    shards = {_start(shard.index): shard for shard in array.addressable_shards}
    for start, shard in shards.items():
        yield start, np.asarray(shard.data)


def _start(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)


Read = Callable[[Part], bytes]
"""Reads a part, wherever it is."""


def restore(shapes: PyTree, parts: Sequence[tuple[Part, Read]]) -> PyTree:
    """Makes a state of parts; devices may share it in another way than when it was copied.

    Args:
      shapes: the state's shapes and dtypes, with shardings.
      parts: parts of all arrays, and how each is read; of equal ones the first is.
    """
    places: dict[int, dict[tuple[int, ...], tuple[Part, Read]]] = {}
    for part, read in parts:
        places.setdefault(part.leaf, {}).setdefault(part.start, (part, read))
    leaves, tree = jax.tree.flatten(shapes)

    def made(number: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def region(index: Any) -> np.ndarray:
            bounds = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
            return _region(bounds, leaf.dtype, places[number].values())

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, region)

    return jax.tree.unflatten(tree, [made(number, leaf) for number, leaf in enumerate(leaves)])


def are_whole(copies: Sequence[Copy]) -> bool:
    """Says whether copies of one step, whose equal parts count once, hold all of the state."""
    found = [0] * len(copies[0].sizes)
    parts = {(part.leaf, part.start): part.size for copy in copies for part in copy.parts}
    for (leaf, _), size in parts.items():
        found[leaf] += size
    return found == copies[0].sizes


def _region(
    bounds: Sequence[tuple[int, int]], dtype: Any, parts: Iterable[tuple[Part, Read]]
) -> np.ndarray:
    """Reads what lies between bounds, from below the one to below the other in every dimension."""
    region = np.empty([end - start for start, end in bounds], dtype)
    for part, read in parts:
        ends = [begin + size for begin, size in zip(part.start, part.shape, strict=True)]
        inside = [
            (max(start, begin), min(end, last))
            for (start, end), begin, last in zip(bounds, part.start, ends, strict=True)
        ]
        if all(first < last for first, last in inside):
            array = np.frombuffer(read(part), dtype).reshape(part.shape)
            source = [slice(f - b, n - b) for (f, n), b in zip(inside, part.start, strict=True)]
            target = [slice(f - b, n - b) for (f, n), (b, _) in zip(inside, bounds, strict=True)]
            region[tuple(target)] = array[tuple(source)]
    return region
