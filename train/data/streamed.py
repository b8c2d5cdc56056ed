"""Texts that a run reads and tokenizes as it trains: shuffled and sharded, with exact resume.

Readers share the shards of the data, which are dealt out to them in a new order in every epoch. A
reader puts its texts one after the other, cuts them into windows of as many tokens as 16 batches
take from it, and gives the rows of each window in a random order. A batch has as many rows of every
reader. Readers are part of a run and not of its processes, of which each runs those whose rows its
devices need: texts and order are the same on any number of them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
from grain.experimental import ThreadPrefetchDatasetIterator

from train.data import text, tokenizer_files
from train.data.guarded import Guarded
from train.data.packing import occurrences
from train.data.rows import Shard
from train.data.stream import Batch, Examples
from train.data.tokenizer import Encoder, encoding_groups, pieces
from train.errors import refused

WINDOW_BATCHES = 16
"""Batches whose rows are shuffled together; as many are read ahead."""
_MOST_EMPTY = 1000
"""Shards in a row in which a reader may find no text."""


class Place(NamedTuple):
    """The place of a reader's next row.

    Args:
      shards: number of shards that the reader has finished before its window, over all epochs.
      row: row of the next shard in which the window begins.
      token: token of the row's text with which the window begins.
      used: rows of the window that have been given.
    """

    shards: int = 0
    row: int = 0
    token: int = 0
    used: int = 0


class _Document(NamedTuple):
    shards: int
    row: int
    tokens: np.ndarray


class Streamed:
    """The rows of a data set as examples in an order of their own, as `stream.batches` gives them.

    Args:
      shards: where the texts are.
      folder: prepared text, whose tokenizer is used, and whose held-out texts are left out.
      sequence_length: tokens that a row predicts, at most.
      rows: makes the examples of a window of tokens, integers ``[num_tokens]``.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        folder: Path,
        *,
        sequence_length: int,
        rows: Callable[[np.ndarray], Examples],
    ) -> None:
        self.shards, self.sequence_length, self.rows = shards, sequence_length, rows
        known = tokenizer_files.read(folder)
        self._encode = Guarded(Encoder, known.tokenizer.to_str(), known.end_of_text)
        heldout = text.read_tokens(folder / text.HELDOUT_FILE)
        ends = occurrences(heldout, text.end_of_text(folder)) + 1
        starts = np.concatenate(([0], ends[:-1]))
        self._heldout = {_digest(heldout[a:b]) for a, b in zip(starts, ends, strict=True)}

    def batches(
        self, *, batch_size: int, seed: int, rows: np.ndarray
    ) -> grain.DatasetIterator[Batch]:
        """Yields batches endlessly; see `stream.batches`.

        The state has the place of every reader, and -1 for those of other rows.
        """
        batches = _Batches(self, batch_size, seed, rows)
        return ThreadPrefetchDatasetIterator(batches, WINDOW_BATCHES)

    def documents(self, reader: int, count: int, seed: int, place: Place) -> Iterator[_Document]:
        """Yields the texts of one of so many readers, endlessly, from a row on.

        Raises:
          ValueError: a shard cannot be read, or there is no text.
        """
        own, start, empty = len(range(reader, len(self.shards), count)), place.row, 0
        for shards in itertools.count(place.shards):
            epoch, index = divmod(shards, own)
            order = np.random.default_rng([seed, epoch]).permutation(len(self.shards))
            shard = self.shards[order[reader::count][index]]
            empty += 1
            for row, parts in itertools.groupby(self._tokenized(shard, start), itemgetter(0)):
                tokens = [part for _, part in parts if _digest(part) not in self._heldout]
                if tokens:
                    yield _Document(shards, row, np.concatenate(tokens))
                    empty = 0
            start = 0
            if empty == _MOST_EMPTY:
                raise ValueError(f"{shard.source}: {empty} shards in a row hold no text.")

    def _tokenized(self, shard: Shard, start: int) -> Iterator[tuple[int, np.ndarray]]:
        texts = (
            (row, name, part)
            for row, (name, text) in enumerate(shard.texts(start), start)
            for part in pieces(text)
            if part
        )
        for group in encoding_groups(texts, itemgetter(2)):
            try:
                encoded = self._encode([part for *_, part in group])
            except ValueError as error:
                names = f"{group[0][1]} to {group[-1][1]}"
                raise ValueError(
                    f"{shard.source}: {names} cannot be tokenized: {error}."
                ) from error
            yield from zip((row for row, *_ in group), encoded, strict=True)


class _Reader:
    """The rows of one reader.

    Args:
      length: tokens of a window, without one that the next window has as well.
    """

    def __init__(
        self, data: Streamed, number: int, count: int, *, seed: int, place: Place, length: int
    ) -> None:
        self._data, self._seed, self._length = data, [seed, number], length
        self._documents = data.documents(number, count, seed, place)
        self._last = next(self._documents)
        self.place: Place
        self._next: Place
        self._rows: Examples
        self._order: np.ndarray
        self._open(place)

    def advance(self) -> Callable[[np.ndarray], Batch]:
        """Goes on by one row; returns what reads it, with the keys of `Examples.read`."""
        while self.place.used == len(self._order):
            self._open(self._next)
        number = self._order[self.place.used]
        self.place = self.place._replace(used=self.place.used + 1)
        return functools.partial(self._rows.read, np.array([number]))

    def _open(self, place: Place) -> None:
        """Makes the window that begins in the document that was read last."""
        self.place, pieces = place, [self._last.tokens[place.token :]]
        # The last token is also the first of the next window, where its successor is predicted.
        missing = self._length + 1 - len(pieces[0])
        while missing > 0:
            self._last = next(self._documents)
            pieces.append(self._last.tokens)
            missing -= len(self._last.tokens)
        self._next = Place(self._last.shards, self._last.row, len(self._last.tokens) + missing - 1)
        self._rows = self._data.rows(np.concatenate(pieces)[: self._length + 1])
        rng = np.random.default_rng([*self._seed, *place[:3]])
        self._order = rng.permutation(len(self._rows))


class _Batches(grain.DatasetIterator[Batch]):  # type: ignore[misc]  # grain has no types
    """Batches of the readers that have some rows of the whole batch, as `Streamed.batches`."""

    def __init__(self, data: Streamed, batch_size: int, seed: int, rows: np.ndarray) -> None:
        super().__init__()
        self._data, self._batch_size, self._seed = data, batch_size, seed
        self._rows = rows.tolist()
        count = min(len(data.shards), batch_size)
        window = WINDOW_BATCHES * (batch_size // count) * data.sequence_length
        self.set_state({"step": 0, "window": window, "readers": [Place()] * count})

    def __next__(self) -> Batch:
        rows: dict[int, Any] = dict.fromkeys(self._rows)
        try:
            for row, numbers in self._turns.items():
                read = self._reader(numbers[self._step % len(numbers)]).advance()
                if row in rows:
                    rows[row] = read(np.array([[self._seed, self._step, row]]))
        except ValueError as error:
            remedy = "Put the data right and continue with --resume."
            raise refused(f"{error} {remedy}", "data.rows") from error
        self._step += 1
        names = rows[self._rows[0]]
        return {name: np.concatenate([row[name] for row in rows.values()]) for name in names}

    def _reader(self, number: int) -> _Reader:
        if number not in self._readers:
            self._readers[number] = _Reader(
                self._data,
                number,
                len(self._places),
                seed=self._seed,
                place=self._places[number],
                length=self._window,
            )
        return self._readers[number]

    def get_state(self) -> dict[str, Any]:
        places = [(-1,) * len(Place._fields)] * len(self._places)
        for number in itertools.chain.from_iterable(self._turns.values()):
            reader = self._readers.get(number)
            places[number] = self._places[number] if reader is None else reader.place
        readers = [list(place) for place in places]
        return {"step": self._step, "window": self._window, "readers": readers}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step, self._window = state["step"], state["window"]
        self._places = [Place(*place) for place in state["readers"]]
        self._readers: dict[int, _Reader] = {}
        count, size = len(self._places), self._batch_size
        if count > len(self._data.shards):
            raise ValueError(
                f"{self._data.shards[0].source} has {len(self._data.shards)} shards, and the run "
                f"began with at least {count}"
            )
        # Several rows share a reader, or a row has several that take turns.
        firsts = [row * count // size for row in range(size + 1)]
        turns = {
            row: range(firsts[row], max(firsts[row + 1], firsts[row] + 1)) for row in range(size)
        }
        # A reader also goes on where another process has the row.
        own = set(itertools.chain.from_iterable(turns[row] for row in self._rows))
        self._turns = {row: numbers for row, numbers in turns.items() if own & set(numbers)}


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens.astype(np.uint32).tobytes(), digest_size=16).digest()
