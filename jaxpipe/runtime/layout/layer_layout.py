"""The layout of layers as the executor uses it: `LayerLayout`.

A layer's parameters are *stored* as a tree of leaves that the data axis may split; `pack` and
`unpack` turn the user's tree into it and back. A *place* says where something stored lies: among
the stage's own layers, or in one of a few slots that hold a chunk each, as gathered weights and
gradient sums do. The places that a program can name decide how it runs a cell: `loop` is one loop
over layers, or one loop per row that runs once or never.
"""

import abc
import copy
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import ClassVar, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import DictKey
from jax.typing import DTypeLike

from jaxpipe.runtime.barriers import Carry
from jaxpipe.runtime.filters import name_of
from jaxpipe.runtime.float8 import E4M3, rounded_to
from jaxpipe.runtime.indices import repeat
from jaxpipe.runtime.layout.leaf import AxisSplit, Cut, DevicePart, Leaf, Share, share_of
from jaxpipe.runtime.layout.placed import Order
from jaxpipe.runtime.layout.splits import Splits
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.trees import widened
from jaxpipe.runtime.types import (
    Arrays,
    At,
    Index,
    LayerParams,
    Leaves,
    Shapes,
    Slot,
    Span,
    Stored,
    Tree,
)
from jaxpipe.schedule.lowering.table import NONE, Chunk

Body: TypeAlias = Callable[..., Tree]
"""Body of a loop: it takes a chunk, a number within it and the carry, and returns the carry."""

ChunkSpan: TypeAlias = tuple[Index, Index]
"""A chunk, and the number of its layers."""

Combine: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
DeviceParts: TypeAlias = Sequence[jax.Array]
"""A device's parts of a layer's arrays, in the order of its tree."""


class Piece:
    """Arrays that are stored together, of a layer or of the embedding, as devices share them."""

    def __init__(self, piece: Leaves) -> None:
        self.piece = piece

    def leaves_of(self, example: int) -> Leaves:
        """The stored arrays of a layer, each a `Leaf`; ``example`` is one of its kind."""
        return self.of_layer(self.piece, example)

    def of_layer(self, trees: Tree, example: int) -> Tree:
        """Selects what belongs to a layer, from something like `piece`: here all are alike."""
        return trees

    def parts(self, stored: Stored, example: int, axes: Axes, *, sharded: bool) -> list[DevicePart]:
        """Lists this device's parts of the arrays of the user's tree; ``sharded`` says whether data
        shards split them."""
        cuts = self._cuts(example, axes, sharded=sharded)
        return list(map(DevicePart, jax.tree.leaves(stored), cuts))

    def of_parts(
        self, parts: DeviceParts, stored: Stored, example: int, axes: Axes, *, sharded: bool
    ) -> Stored:
        """Replaces the parts; elements that only pad an array become 0."""
        padded = map(Cut.with_padding, self._cuts(example, axes, sharded=sharded), parts)
        return jax.tree.unflatten(jax.tree.structure(stored), padded)

    def _cuts(self, example: int, axes: Axes, *, sharded: bool) -> Sequence[Cut]:
        """The cuts of a layer's arrays, in the order of the user's tree."""
        leaves = jax.tree.leaves(self.leaves_of(example))
        return [leaf.cut(axes, sharded=sharded) for leaf in leaves]


class LayerLayout(Piece, abc.ABC):
    """Layout on a device of arrays that every layer has.

    Unless a layout overrides it, a layer is stored as it is and cells run one loop.

    Attributes:
      rows: canonical layer of every row of every stage, ``[stages, chunks, layers]``, -1 where a
        chunk has fewer layers than the largest.
      canonical: the user's tree, every array a `Leaf`.
      placed: the arrays of one stage, every one a `Leaf`.
      piece: the arrays that are gathered or reduced at once, every one a `Leaf`; where pieces
        differ, those of all layers.
      in_shares: whether a piece may move in shares.
      in_rows: whether layers are rows, which are alike.
      own_arrays: whether every row has arrays of its own.
      slot_dim: if not, the dimension of a stage's arrays along which slots follow each other.
    """

    in_rows: ClassVar[bool] = False
    own_arrays: ClassVar[bool] = False
    in_shares: ClassVar[bool] = True
    slot_dim: ClassVar[int] = 0
    rows: np.ndarray
    canonical: Leaves
    placed: Leaves
    num_chunks: int
    num_pieces: int

    @abc.abstractmethod
    def __init__(self, layers: Tree, rows: np.ndarray, splits: Splits) -> None:
        """Lays out layers.

        Args:
          splits: splits of the arrays, by path in a layer, or in a sequence of layers.
        """

    @abc.abstractmethod
    def slot_shapes(self, count: int) -> Shapes:
        """Shapes of arrays with room for ``count`` whole chunks."""

    def sum_shapes(self, count: int) -> Shapes:
        """Shapes of arrays with room for the gradient sums of ``count`` whole chunks."""
        return jax.eval_shape(widened, self.slot_shapes(count))

    @cached_property
    def order(self) -> Order:
        """The order in which stages hold the layers."""
        return Order.of_rows(self.rows, self.canonical, self._moves)

    @staticmethod
    def _moves(split: AxisSplit) -> bool:
        """Whether the number of devices along a split changes where elements of an array lie."""
        return bool(split.joined)

    @property
    def local(self) -> Self:
        """The layout of a device's parts of arrays that model axes split."""
        own = copy.copy(self)
        own.order = self.order  # that of the whole arrays
        for name in ("canonical", "placed", "piece"):
            setattr(own, name, jax.tree.map(lambda leaf: leaf.local, getattr(self, name)))
        return own

    # One layer.

    def canonical_of(self, layer: int) -> Leaves:
        """One layer's parameters, every array a `Leaf`."""
        return self.leaves_of(layer)

    def shape_of(self, layer: int) -> Shapes:
        return jax.tree.map(Leaf.struct, self.canonical_of(layer))

    def pack(self, params: LayerParams, example: int) -> Stored:
        """Brings a layer's parameters into the form in which they are stored."""
        return params

    def unpack(self, stored: Stored, example: int) -> LayerParams:
        """Undoes `pack`."""
        return stored

    def of_piece(self, trees: Tree, at: At) -> Tree:
        """Selects what belongs to a piece, from something like `piece`: here all are alike."""
        return trees

    @property
    def differing(self) -> Sequence[At]:
        """Places of pieces that differ, or of the one that all are like."""
        return [(0, 0, 0)]

    def leaves_at(self, at: At, shares: int = 1) -> Leaves:
        """The arrays of a piece, or of one of so many shares of it, every one a `Leaf`."""
        return share_of(self.of_piece(self.piece, at), shares)

    @property
    def pieces(self) -> Sequence[Leaves]:
        """The pieces that differ, or the one that all are like."""
        return list(map(self.leaves_at, self.differing))

    # Copies of weights in the dtypes that layers compute in, trees like `piece`.

    def compute_dtypes(self, dtype_of: Callable[[str, jax.ShapeDtypeStruct], DTypeLike]) -> Tree:
        """Finds the dtypes by ``dtype_of(path, shape)`` of canonical parameters."""
        return jax.tree.map_with_path(
            lambda path, leaf: dtype_of(name_of((DictKey("layers"), *path)), leaf.struct()),
            self.canonical,
        )

    def cast(self, arrays: Arrays, dtypes: Tree, scales: Tree = None) -> Arrays:
        """Converts a stage's arrays, or those of slots, to other dtypes, as `cast`."""
        return cast(arrays, dtypes, scales)

    def largest(self, arrays: Arrays, dtypes: Tree) -> Tree:
        """Finds the largest absolute value of every layer's weights in `E4M3`, trees like a stage's
        arrays, with None for other weights."""
        return largest(arrays, dtypes, layer_dims=1)

    # Places.

    def layer_at(self, at: At, example: int, *, slot: Slot = None) -> Tree:
        """The place of a layer: among the stage's own layers, or in the chunk of a ``slot``."""
        return self.piece_at(at, slot=slot)

    @abc.abstractmethod
    def piece_at(self, at: At, *, slot: Slot = None, share: Share | None = None) -> Tree:
        """The place of a chunk's piece, or of a share of it, as for `layer_at`."""

    @abc.abstractmethod
    def read(self, arrays: Arrays, place: Tree) -> Stored:
        """Reads what is stored at a place."""

    @abc.abstractmethod
    def write(self, arrays: Arrays, place: Tree, values: Stored) -> Arrays:
        """Stores other values at a place, and returns the arrays."""

    def update(
        self, arrays: Arrays, place: Tree, values: Stored, combine: Combine = jnp.add
    ) -> Arrays:
        """Combines the values stored at a place with others, element by element."""
        return self.write(arrays, place, jax.tree.map(combine, self.read(arrays, place), values))

    # Loops.

    def loop(
        self, span: Span, body: Body, arrays: Arrays, carry: Carry, *, down: bool = False
    ) -> tuple[Arrays, Carry]:
        """Runs a span of layers, last first if ``down``.

        ``body(chunk, layer, arrays, carry)`` returns arrays and carry; it sees at least the arrays
        of its layer.
        """
        chunk, lo, hi = span

        def step(i: Index, through: tuple[Arrays, Carry]) -> tuple[Arrays, Carry]:
            return body(chunk, lo + hi - 1 - i if down else i, *through)

        return lax.fori_loop(lo, hi, step, (arrays, carry))

    def part(self, arrays: Arrays, chunks: Collection[Chunk]) -> Arrays:
        """Selects the arrays in which some chunks lie: here all."""
        return arrays

    def with_part(self, arrays: Arrays, part: Arrays) -> Arrays:
        """Replaces such a part."""
        return part

    def run_chunk(
        self,
        chunk: int,
        layers: range,
        body: Body,
        arrays: Arrays,
        carry: Carry,
        *,
        down: bool = False,
    ) -> tuple[Arrays, Carry]:
        """Runs layers of a chunk, which the program knows: in a loop whose trips it knows, or,
        where every row has arrays of its own, without one. Arguments are as for `loop`."""
        return self.loop((chunk, layers.start, layers.stop), body, arrays, carry, down=down)

    def loop_pairs(
        self,
        backward: ChunkSpan,
        forward: ChunkSpan,
        pairs: Collection[tuple[Chunk, Chunk]],
        body: Body,
        arrays: Arrays,
        carry: Carry,
    ) -> tuple[Arrays, Carry, Index]:
        """Runs a layer of each of two chunks per turn, as long as both have one.

        Args:
          backward: chunk and number of layers; its last layer runs first.
          forward: chunk and number of layers; its first layer runs first.
          pairs: all that these two may be.
          body: ``body(backward, forward, arrays, carry)``, with chunk and layer of each; returns
            arrays and carry.
        """
        turns = jnp.minimum(backward[1], forward[1])

        def step(i: Index, through: tuple[Arrays, Carry]) -> tuple[Arrays, Carry]:
            return body((backward[0], backward[1] - 1 - i), (forward[0], i), *through)

        return *lax.fori_loop(0, turns, step, (arrays, carry)), turns

    def loop_pieces(self, chunk: Index, body: Body, carry: Carry) -> Carry:
        """Runs ``body(chunk, number, carry)`` for all pieces of a chunk, for none if `NONE`."""
        trips = jnp.where(chunk == NONE, jnp.int32(0), self.num_pieces)
        return lax.fori_loop(0, trips, lambda number, carry: body(chunk, number, carry), carry)

    def every_layer(self, count: int, body: Body, carry: Carry) -> Carry:
        """Runs ``body(chunk, layer, carry)`` for ``count`` layers of every chunk."""
        return repeat(
            self.num_chunks * count, lambda i, carry: body(i // count, i % count, carry), carry
        )


def cast(arrays: Arrays, dtypes: Tree, scales: Tree = None) -> Arrays:
    """Converts arrays to other dtypes; those that have scales are divided by them."""

    def convert(w: jax.Array, dtype: DTypeLike, scale: jax.Array | None = None) -> jax.Array:
        return w.astype(dtype) if scale is None else rounded_to(w, dtype, scale)

    return jax.tree.map(convert, arrays, dtypes, *([] if scales is None else [scales]))


def largest(arrays: Arrays, dtypes: Tree, *, layer_dims: int) -> Tree:
    """Finds the largest absolute values of arrays that become `E4M3`, None for others; so many
    dimensions come before those of one layer."""

    def of(w: jax.Array, dtype: DTypeLike) -> jax.Array | None:
        return jnp.abs(w).max(tuple(range(layer_dims, w.ndim))) if dtype == E4M3 else None

    return jax.tree.map(of, arrays, dtypes)
