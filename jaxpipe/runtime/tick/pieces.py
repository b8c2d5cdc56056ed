"""Pieces of chunks that move over data while layers run."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpipe.runtime.types import Span
from jaxpipe.schedule.lowering.table import NONE, Transfer, Transfers


def spans(transfers: Transfers, transfer: Transfer) -> list[Span]:
    """The pieces that a stage moves in a tick, each a span of one: of none if it moves nothing.

    All stages take part in a transfer, since a loop would keep it from running beside layers; one
    that has nothing to move reads zeros, and writes nothing.
    """
    count = jnp.where(transfer.chunk == NONE, 0, 1)
    chunk = jnp.maximum(transfer.chunk, 0)
    firsts = [transfer.piece + n for n in range(transfers.group)]
    return [(chunk, first, first + count) for first in firsts]
