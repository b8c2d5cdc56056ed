"""Pieces of chunks, and shares of them, that move over data while layers run."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxpipe.runtime.layout.shares import Share
from jaxpipe.runtime.types import Span
from jaxpipe.schedule.lowering.table import NONE, Transfer, Transfers


class MovedPiece(NamedTuple):
    """A span of one piece that moves, or of none, and the share of it, if not all."""

    span: Span
    share: Share | None


def pieces_of(transfers: Transfers, transfer: Transfer) -> list[MovedPiece]:
    """Lists what a stage moves in a tick.

    All stages take part in a transfer, since a loop would keep it from running beside layers; one
    that has nothing to move reads zeros, and writes nothing.
    """
    count, of = jnp.where(transfer.chunk == NONE, 0, 1), transfers.shares
    chunk = jnp.maximum(transfer.chunk, 0)
    found = []
    for first in (transfer.piece + n for n in range(transfers.group)):
        number = first // of
        share = None if of == 1 else Share(first % of, of)
        found.append(MovedPiece((chunk, number, number + count), share))
    return found
