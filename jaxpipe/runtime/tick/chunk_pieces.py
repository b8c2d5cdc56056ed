"""Pieces of chunks that move over data while layers run."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.runtime.barriers import Carry
from jaxpipe.runtime.layout.layer_layout import Body, LayerLayout
from jaxpipe.runtime.layout.leaf import Share
from jaxpipe.runtime.types import Arrays, Index, Tree
from jaxpipe.schedule.lowering.table import NONE, Transfer, Transfers


class MovedPiece(NamedTuple):
    """A piece of a chunk that moves into or out of a slot, or the share of it, if not all.

    All stages take part in a transfer, since a loop would keep it from running beside layers; one
    that has nothing to move, as its chunk is `NONE`, reads zeros, and writes nothing.

    Args:
      at_edge: whether no other chunk comes into the slot in this step.
    """

    chunk: Index
    slot: Index
    number: Index
    share: Share | None = None
    at_edge: bool = False

    @property
    def num_shares(self) -> int:
        return 1 if self.share is None else self.share.of


def run_pieces(
    stage: jax.Array,
    layout: LayerLayout,
    moved: Sequence[MovedPiece],
    body: Body,
    arrays: Arrays,
    carry: Carry,
) -> tuple[Arrays, Carry]:
    """Runs ``body(n, at, arrays, carry)`` for every piece, if there is something to move."""
    for n, piece in enumerate(moved):

        def one(chunk: Index, number: Index, *through: Tree, n: int = n) -> Tree:
            return body(n, (stage, chunk, number), *through)

        if isinstance(piece.chunk, int):  # all stages move the same chunk
            arrays, carry = one(piece.chunk, piece.number, arrays, carry)
        else:
            end = piece.number + (piece.chunk != NONE).astype(jnp.int32)
            span = jnp.maximum(piece.chunk, 0), piece.number, end
            arrays, carry = layout.loop(span, one, arrays, carry)
    return arrays, carry


def pieces_of(transfers: Transfers, transfer: Transfer) -> list[MovedPiece]:
    """Lists what a stage moves in a tick."""
    found, of = [], transfers.shares
    for first in (transfer.piece + n for n in range(transfers.group)):
        share = None if of == 1 else Share(first % of, of)
        found.append(MovedPiece(transfer.chunk, transfer.slot, first // of, share))
    return found
