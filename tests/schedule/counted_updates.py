"""Weight versions and updates of a schedule of several minibatches, counted from its ticks.

A stage updates its layers at the end of the tick of a minibatch's last W; the embedding is updated
when its last gradient is there, the head when its last microbatch has left. Every action reads the
version that its method says: the newest, its forward's, or the one before its minibatch's.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE, Cell, Reads, Row, TickTable, Update, Updates


def counted_rows(table: TickTable) -> Row:
    """The rows of a table, with updates and the versions that are read."""
    minibatches = table.schedule.minibatches
    size, stage = minibatches.size, np.arange(table.schedule.num_stages)
    ends = table.passes[Kind.BW if Kind.BW in table.passes else Kind.W]
    layers = _update(np.where(ends.layers > 0, ends.microbatch, NONE), size)
    [back] = table.embed_gradient.T  # slices go through the embedding one by one
    embed, head = _update(back, size), _update(table.head, size)
    found = _found_by_forward(table.passes[Kind.F], layers)
    entered = np.zeros(table.schedule.num_microbatches, np.int32)
    entered[table.embed[table.embed != NONE]] = embed.version[table.embed != NONE]

    def version(
        microbatch: np.ndarray, newest: np.ndarray, read_by_forward: np.ndarray
    ) -> np.ndarray:
        read = {
            "pipemare": newest,
            "2bw": np.maximum(microbatch // size - 1, 0),
            "pipedream": read_by_forward,
        }[minibatches.method]
        return (read % minibatches.num_versions).astype(np.int32)

    passes = {
        kind: dataclasses.replace(
            cell,
            weights=version(cell.microbatch, layers.version, found[stage, cell.microbatch]),
        )
        for kind, cell in table.passes.items()
    }
    enter = version(table.embed, embed.version, embed.version)
    leave = [version(table.head, part.version, part.version) for part in (embed, head)]
    back = version(back, embed.version, entered[back])
    reads = {
        "enter": Reads(enter, enter),
        "leave": Reads(*leave),
        "embed_gradient": Reads(back, back),
    }
    any_stage = (layers.minibatch != NONE).any(axis=1) | (head.minibatch != NONE)
    return table.rows._replace(
        cells=passes,
        outer=table.rows.outer._replace(reads=reads),
        updates=Updates(layers, embed, head, any_stage.astype(np.int32)),
    )


def _found_by_forward(forward: Cell, layers: Update) -> np.ndarray:
    """The newest version in the tick of each F, ``[stages, microbatches]``."""
    tick, stage = np.nonzero(forward.layers > 0)
    found = np.zeros((forward.layers.shape[1], 1 + int(forward.microbatch.max())), np.int32)
    found[stage, forward.microbatch[tick, stage]] = layers.version[tick, stage]
    return found


def _update(microbatch: np.ndarray, size: int) -> Update:
    """Updates from the microbatches whose gradient is complete, ``[ticks]`` or ``[ticks, stages]``,
    and how many came before each tick."""
    due = (microbatch != NONE) & (microbatch % size == size - 1)
    before = np.cumsum(due, axis=0, dtype=np.int32) - due
    return Update(np.where(due, microbatch // size, NONE).astype(np.int32), before.astype(np.int32))
