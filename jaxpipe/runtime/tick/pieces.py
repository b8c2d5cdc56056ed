"""Pieces of chunks, and shares of them, that move over data while layers run."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxpipe.runtime.layout.shares import Share
from jaxpipe.runtime.types import Span
from jaxpipe.schedule.lowering.table import NONE, Transfer, Transfers


class Piece(NamedTuple):
    """What moves: a span of one piece, or of none, and which share of it, if not all."""

    span: Span
    share: Share | None


def pieces_of(transfers: Transfers, transfer: Transfer) -> list[Piece]:
    """What a stage moves in a tick.

    All stages take part in a transfer, since a loop would keep it from running beside layers; one
    that has nothing to move reads zeros, and writes nothing.
    """
    count, of = jnp.where(transfer.chunk == NONE, 0, 1), transfers.shares
    chunk = jnp.maximum(transfer.chunk, 0)
    found = []
    for first in (transfer.piece + n for n in range(transfers.group)):
        number = first // of
        share = None if of == 1 else Share(first % of, of)
        found.append(Piece((chunk, number, number + count), share))
    return found
