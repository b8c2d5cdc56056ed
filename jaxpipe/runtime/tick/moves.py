"""Moves of chunks over data while layers run.

XLA for GPUs runs a collective beside a loop over layers if it starts before the loop and ends after
it. A chunk that moves under the layers of others does so beside all layers of a tick. The chunk
that a stage begins with, or ends with, has no other chunk's layers beside it: its layers run one by
one in the first tick, or the last, and each of its pieces moves beside one of them.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.barriers import after, tie
from jaxpipe.runtime.tick.chunk_pieces import MovedPiece, pieces_of
from jaxpipe.runtime.tick.fixed import Fixed
from jaxpipe.runtime.tick.layer_passes import run_cells
from jaxpipe.runtime.tick.microbatches import Microbatches
from jaxpipe.runtime.tick.values import Carried
from jaxpipe.runtime.types import Tree
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import BodyParts, Row, Transfers

Run = Callable[..., Carried]
"""Runs a row's layers: ``run(carried, row, layers=None)``, as `run_cells`."""


def run_and_move(
    fixed: Fixed, batch: Microbatches, carried: Carried, row: Row, parts: BodyParts
) -> Carried:
    """Runs a row's layers, and moves meanwhile what all stages move in this tick."""
    table, run = fixed.table, partial(run_cells, fixed, batch, parts=parts)
    beside = partial(
        _run_beside,
        fixed,
        row=row,
        gathering=pieces_of(table.gathers, row.gather) if parts.gather else (),
        reducing=pieces_of(table.reduces, row.reduce) if parts.reduce else (),
    )
    if parts.first:
        return _first_tick(fixed, carried, row, run, beside)
    if parts.last:
        return _last_tick(fixed, carried, row, run, beside, parts)
    return beside(run, carried)


def _first_tick(fixed: Fixed, carried: Carried, row: Row, run: Run, beside: Run) -> Carried:
    """Gathers all but the first piece of the chunk that the layers read."""
    last = fixed.params.num_pieces - 1
    for number in range(last):
        # No two pieces become one collective: the next is gathered when this one is stored.
        piece = _edge_piece(fixed, fixed.table.gathers, number + 1)
        state = carried.messages, carried.weights
        slot, (messages, weights) = tie(piece.slot, state)
        carried = _run_beside(
            fixed,
            partial(run, layers={Kind.F: number}),
            carried.but(messages=messages, weights=weights),
            row,
            gathering=[piece._replace(slot=slot)],
        )
    return beside(partial(run, layers={Kind.F: last}), carried)


def _last_tick(
    fixed: Fixed, carried: Carried, row: Row, run: Run, beside: Run, parts: BodyParts
) -> Carried:
    """Reduces all but the last piece of the chunk whose gradients the layers complete."""
    kind, (first, *others) = fixed.table.last_kind, _completed(fixed)
    actions = dict.fromkeys(filter(parts.has, fixed.table.passes))
    carried = beside(partial(run, layers=actions | {kind: first}), carried)
    for done, number in itertools.pairwise([first, *others]):
        piece = _edge_piece(fixed, fixed.table.reduces, done)
        slot, finished = tie(piece.slot, carried.finished)
        carried = _run_beside(
            fixed,
            partial(run, layers={kind: number}),
            carried.but(finished=finished),
            row,
            reducing=[piece._replace(slot=slot)],
        )
    return carried


def _run_beside(
    fixed: Fixed,
    run: Run,
    carried: Carried,
    row: Row,
    *,
    gathering: Sequence[MovedPiece] = (),
    reducing: Sequence[MovedPiece] = (),
) -> Carried:
    """Runs layers, and gathers and reduces pieces meanwhile."""
    weights, sink = fixed.weights, fixed.gradients
    gathered = weights.start(fixed, carried.weights, gathering) if gathering else []
    reduced: Tree = []
    if reducing:
        assert sink is not None
        carried, sums = sink.take(fixed, carried, reducing)
        reduced = sink.start(fixed, sums)
        # Layers come after what reads the sums that they write, or XLA copies the sums.
        device = lax.axis_index(fixed.axes.names)
        row = row._replace(cells=after(sums, row.cells, device))
    carried = run(carried, row)
    # The pieces are there when the layers are done.
    (gathered, reduced), messages = tie((gathered, reduced), carried.messages)
    carried = carried.but(messages=messages)
    if gathering:
        held = weights.finish(fixed, carried.weights, gathered, gathering)
        carried = carried.but(weights=held)
    if reducing:
        assert sink is not None
        carried = sink.finish(fixed, carried, reduced, reducing)
    return carried


def gather_first(fixed: Fixed, held: Tree) -> Tree:
    """Gathers the piece that the first tick does not gather."""
    piece = [_edge_piece(fixed, fixed.table.gathers, 0)]
    return fixed.weights.finish(fixed, held, fixed.weights.start(fixed, held, piece), piece)


def reduce_last(fixed: Fixed, carried: Carried) -> Carried:
    """Reduces the piece that the last tick does not reduce."""
    sink = fixed.gradients
    assert sink is not None
    piece = [_edge_piece(fixed, fixed.table.reduces, _completed(fixed)[-1])]
    carried, sums = sink.take(fixed, carried, piece)
    return sink.finish(fixed, carried, sink.start(fixed, sums), piece)


def _completed(fixed: Fixed) -> list[int]:
    """The layers of a chunk in the order in which their gradients are complete."""
    numbers = list(range(fixed.params.num_pieces))
    return numbers if fixed.table.last_kind is Kind.W else numbers[::-1]


def _edge_piece(fixed: Fixed, transfers: Transfers, number: int) -> MovedPiece:
    slot = jnp.asarray(transfers.edge.slot[0])[fixed.stage]
    return MovedPiece(int(transfers.edge.chunk[0, 0]), slot, number, at_edge=True)
