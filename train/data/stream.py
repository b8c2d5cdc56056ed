"""Batches of numbered examples: shuffled endlessly with exact resume, or a fixed held-out few."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from jaxpipe.errors import shown

Batch = dict[str, np.ndarray]
Rows = Sequence[int] | np.ndarray | None

_MOST_BATCHES = 2**53
"""Largest position: more batches than any run draws; grain overflows a little above."""


class Examples(Protocol):
    """Numbered examples of one side of the data, read a batch at a time."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def read(self, numbers: np.ndarray, keys: np.ndarray) -> Batch:
        """Reads some examples.

        Args:
          numbers: int64 ``[rows]``, each below ``len(self)``.
          keys: int64 ``[rows, 3]``, the (seed, step, row) of each. Random draws for a row depend
            only on its key: the same run draws the same on any number of processes.

        Returns:
          Arrays with a leading dimension of ``rows``.
        """
        ...


@runtime_checkable
class Uneven(Examples, Protocol):
    """Examples that do not all take equally long.

    Args:
      costs: of each example, in any unit, float64 ``[examples]``.
    """

    costs: np.ndarray


@runtime_checkable
class Unnumbered(Protocol):
    """Examples that come in an order of their own, endlessly."""

    def batches(
        self, *, batch_size: int, seed: int, rows: np.ndarray
    ) -> grain.DatasetIterator[Batch]:
        """Yields what `stream.batches` does."""
        ...


class Mixture:
    """Several collections of examples as one, numbered one after another.

    Args:
      parts: at least one, none of them empty.
      weights: rates at which examples are drawn from each part, in any unit.

    Example:
      >>> from train.data.text import Windows
      >>> both = Mixture([Windows(np.arange(9), 4), Windows(np.arange(100, 105), 4)], [1, 2])
      >>> both.read(np.array([2, 0]), np.zeros((2, 3)))["tokens"][:, 0].tolist()
      [100, 0]
    """

    def __init__(self, parts: Sequence[Examples], weights: Sequence[float]) -> None:
        self._parts, self._weights = parts, weights
        self._starts = np.cumsum([0, *map(len, parts)])
        uneven = [part.costs for part in parts if isinstance(part, Uneven)]
        if len(uneven) == len(parts):
            self.costs = np.concatenate(uneven)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, numbers: np.ndarray, keys: np.ndarray) -> Batch:
        """Reads each example from the part that it lies in."""
        within = np.searchsorted(self._starts, numbers, side="right") - 1
        batch: Batch = {}
        for part, (examples, start) in enumerate(zip(self._parts, self._starts, strict=False)):
            here = within == part
            for name, leaf in examples.read(numbers[here] - start, keys[here]).items():
                whole = batch.setdefault(
                    name, np.empty((len(numbers), *leaf.shape[1:]), leaf.dtype)
                )
                whole[here] = leaf
        return batch

    def drawn(self, seed: int) -> grain.MapDataset[int]:
        """Returns endless numbers: each part's in a new order in every epoch of its own."""
        ranges = itertools.pairwise(self._starts.tolist())
        parts = [_shuffled(first, end, seed) for first, end in ranges]
        return grain.MapDataset.mix(parts, self._weights)


def batches(
    examples: Examples | Unnumbered,
    *,
    batch_size: int,
    seed: int,
    rows: Rows = None,
    parts: tuple[int, int] = (1, 1),
) -> grain.DatasetIterator[Batch]:
    """Yields shuffled batches endlessly.

    Each epoch visits all examples in a new order, which depends only on ``seed`` and the epoch. In
    a `Mixture`, each part has epochs of its own; `Unnumbered` examples have their own order.

    Args:
      batch_size: rows of the whole batch, over all processes, at least 1.
      seed: determines the order and all random draws, at least 0.
      rows: indices, in ``[0, batch_size)``, of the rows of the whole batch that this process wants;
        all by default.
      parts: data shards and microbatches of a batch, among which `Uneven` examples are dealt out.

    Returns:
      An iterator. ``get_state()`` is a small dict for JSON, and ``set_state()`` continues from it
      bit-exactly and without delay, also when the number of processes changes.

    Raises:
      ValueError: there are no examples, or a row or size is out of range.
    """
    check_sizes(batch_size=batch_size)
    if seed < 0:
        raise ValueError(f"train.seed={seed}: must be at least 0. Nearest valid: 0.")
    chosen = check_rows(rows, batch_size)
    if isinstance(examples, Unnumbered):
        return examples.batches(batch_size=batch_size, seed=seed, rows=chosen)
    if len(examples) == 0:
        raise ValueError("There are no examples to train on.")

    def read(step: int, numbers: np.ndarray) -> Batch:
        if isinstance(examples, Uneven):
            numbers = numbers[dealt(examples.costs[numbers], *parts)]
        return examples.read(numbers[chosen], _keys(seed, step, chosen))

    # Numbers are shuffled and batched, not examples: a process reads only its own rows.
    if isinstance(examples, Mixture):
        numbers = examples.drawn(seed).batch(batch_size)
    else:
        numbers = _shuffled(0, len(examples), seed).batch(batch_size)
    # Reads from memory are far faster than a training step: no reader threads.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(numbers.map_with_index(read).to_iter_dataset(options))


def dealt(costs: np.ndarray, shards: int, microbatches: int) -> np.ndarray:
    """Orders the rows of a batch so that shards, and their microbatches, cost about equally much.

    Rows are dealt out in rounds, one to every microbatch of every shard: the costliest row of a
    round goes to what costs least so far.

    Args:
      costs: of the rows, ``[rows]``; their number is a multiple of ``shards * microbatches``.
      shards: parts of the batch.
      microbatches: parts of a shard: microbatch i has rows i, i + microbatches, ...

    Returns:
      int64 ``[rows]``, the row at each place.

    Example:
      >>> dealt(np.array([9, 1, 5, 4, 3, 3, 4, 5]), 2, 2)  # 10 and 8, 8 and 8
      array([0, 3, 1, 6, 2, 7, 4, 5])
    """
    parts = shards * microbatches
    rounds = np.argsort(-costs, kind="stable").reshape(-1, parts)
    rows, totals = np.empty_like(rounds), np.zeros(parts)
    for place, dealt_out in enumerate(rounds):
        least_first = np.argsort(totals, kind="stable")
        rows[place, least_first] = dealt_out
        totals[least_first] += costs[dealt_out]
    # One row of each microbatch: every other microbatch deals to the shards backwards.
    dealt_to = rows.reshape(-1, microbatches, shards)
    dealt_to[:, 1::2] = dealt_to[:, 1::2, ::-1].copy()
    return dealt_to.transpose(2, 0, 1).ravel()


def continue_at(stream: grain.DatasetIterator[Batch], position: dict[str, Any]) -> None:
    """Continues batches from what their ``get_state`` returned, which was kept as JSON.

    Raises:
      ValueError: the position is something else.
    """
    if not _is_like(position, stream.get_state()):
        raise ValueError(f"the position in the data is {shown(position)}")
    stream.set_state(position)


def heldout_batches(
    examples: Examples, *, batch_size: int, num_batches: int, rows: Rows = None
) -> Iterator[Batch]:
    """Yields the same examples, spread evenly over all, each time it is called.

    Args:
      batch_size: rows of the whole batch, over all processes, at least 1.
      num_batches: batches to yield, at least 1.
      rows: indices, in ``[0, batch_size)``, of the rows this process wants; all by default.

    Returns:
      An iterator of ``num_batches`` batches; no example occurs twice. Random draws depend on an
      example's number alone, not on how examples are divided into batches.

    Raises:
      ValueError: there are fewer examples than asked for, or a row or size is out of range.
    """
    check_sizes(batch_size=batch_size, num_batches=num_batches)
    chosen = check_rows(rows, batch_size)
    needed = num_batches * batch_size
    if len(examples) < needed:
        fitting = len(examples) // batch_size
        nearest = f"train.eval_batches={fitting}" if fitting else f"batch_size={len(examples)}"
        raise ValueError(
            f"There are too few held-out examples: train.eval_batches={num_batches} x "
            f"train.batch_size={batch_size} need {needed}, there are {len(examples)}. "
            f"Nearest valid: {nearest}. Or prepare more with a larger --heldout-fraction."
        )
    numbers = np.arange(needed, dtype=np.int64) * len(examples) // needed
    return (
        examples.read(batch[chosen], _keys(0, 0, batch[chosen]))
        for batch in numbers.reshape(num_batches, batch_size)
    )


def check_sizes(**sizes: int) -> None:
    """Raises ValueError unless every size is at least 1."""
    wrong = [f"{name}={value}" for name, value in sizes.items() if value < 1]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: must be at least 1. Nearest valid: 1.")


def check_rows(rows: Rows, batch_size: int) -> np.ndarray:
    """Returns the rows as int64, all of them for None; raises ValueError if one is outside."""
    chosen = np.arange(batch_size) if rows is None else np.asarray(rows, dtype=np.int64)
    outside = chosen[(chosen < 0) | (chosen >= batch_size)]
    if outside.size:
        raise ValueError(
            f"rows={outside.tolist()} are outside batch_size={batch_size}. "
            f"Valid: 0 to {batch_size - 1}."
        )
    return chosen


def _is_like(position: Any, state: Any) -> bool:
    """Says whether a position has the form of a state, with lists of any length."""
    if isinstance(state, dict):
        return (
            isinstance(position, dict)
            and position.keys() == state.keys()
            and all(_is_like(position[name], state[name]) for name in state)
        )
    if isinstance(state, list):
        return isinstance(position, list) and all(_is_like(part, state[0]) for part in position)
    return type(position) is int and 0 <= position <= _MOST_BATCHES


def _shuffled(first: int, end: int, seed: int) -> grain.MapDataset[int]:
    return grain.MapDataset.range(first, end).seed(seed).shuffle().repeat()


def _keys(seed: int, step: int, rows: np.ndarray) -> np.ndarray:
    return np.stack([np.full_like(rows, seed), np.full_like(rows, step), rows], axis=1)
