"""Documents packed whole into rows, so that rows cost about equally much attention.

A token attends to its own document alone, so that a row costs the sum of its documents' squared
lengths. Documents go into rows from the longest to the shortest, each into the row that costs least
so far among those that have room for it. Which documents share a row is decided once, for all
epochs: rows are numbered, and drawn like any other examples. (grain packs streams of documents as
they come, first fit or best fit; it neither balances nor numbers rows.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from train.data import stream
from train.data.folder import ANSWER, BEGIN
from train.data.stream import Batch
from train.data.text import Tokens

_TOGETHER = 8192
"""Most documents that are packed at once; of each such group one row or so is not full."""
_READ = 1 << 20
"""Tokens that are read at once."""


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items into rows.

    Args:
      lengths: of the items, each at most the capacity.
      capacity: the most that a row's lengths add up to.

    Returns:
      The numbers of each row's items.

    Example:
      >>> pack([5, 4, 3, 2, 2], 8)
      [[0, 3], [1, 2], [4]]
    """
    sizes, rows = np.asarray(lengths, np.int64), list[list[int]]()
    for first in range(0, len(sizes), _TOGETHER):
        group = sizes[first : first + _TOGETHER]
        count = -(-int(group.sum()) // capacity)
        # Rows may have to be added: at most one for each item.
        room, cost = np.full(len(group) + count, capacity), np.zeros(len(group) + count)
        members: list[list[int]] = [[] for _ in range(count)]
        for item in np.argsort(-group, kind="stable"):
            fits = np.flatnonzero(room[:count] >= group[item])
            if not len(fits):
                fits, count = np.array([count]), count + 1
                members.append([])
            row = fits[np.argmin(cost[fits])]
            room[row] -= group[item]
            cost[row] += float(group[item]) ** 2
            members[row].append(first + int(item))
        rows += [sorted(row) for row in members if row]
    return rows


def occurrences(tokens: Tokens, token: int) -> np.ndarray:
    """Finds a token, int64 ``[occurrences]``, reading the text part by part."""
    starts = range(0, len(tokens), _READ)
    parts = (np.flatnonzero(tokens[start : start + _READ] == token) + start for start in starts)
    return np.concatenate([np.zeros(0, np.int64), *parts])


class Packed:
    """A text as rows of whole documents; those longer than a row are cut into several.

    Args:
      tokens: integers ``[num_tokens]``.
      sequence_length: number of predictions of a row, at least 1.
      end_of_text: the token after every document, which fills up rows.
      roles: of the tokens, integers ``[num_tokens]``: only answers are predicted, and documents
        begin as they say. None if all tokens are predicted.

    Example:
      >>> rows = Packed(np.array([5, 6, 0, 7, 8, 9, 0]), 6, end_of_text=0)
      >>> {name: row[0].tolist() for name, row in rows.read(np.array([0]), np.zeros(1)).items()}
      ... # doctest: +NORMALIZE_WHITESPACE
      {'tokens': [5, 6, 7, 8, 9, 0], 'targets': [6, 0, 8, 9, 0, -1],
       'documents': [0, 0, 1, 1, 1, 2], 'positions': [0, 1, 0, 1, 2, 0]}
    """

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        *,
        end_of_text: int,
        roles: Tokens | None = None,
    ) -> None:
        stream.check_sizes(sequence_length=sequence_length)
        self._tokens, self._length, self._end = tokens, sequence_length, end_of_text
        self._roles = roles
        if roles is None:
            starts = np.concatenate(([0], occurrences(tokens, end_of_text) + 1))
        else:
            starts = occurrences(roles, BEGIN)
        predictions = np.append(starts[1:], len(tokens)) - starts - 1
        # Pieces of a document overlap by one token, so that all but its first are predicted.
        pieces = [
            (start + at, min(sequence_length, count - at))
            for start, count in zip(starts.tolist(), predictions.tolist(), strict=True)
            for at in range(0, count, sequence_length)
        ]
        self._pieces = np.array(pieces, np.int64).reshape(-1, 2)
        self._rows = pack(self._pieces[:, 1].tolist(), sequence_length)
        squares = np.square(self._pieces[:, 1], dtype=np.float64)
        self.costs = np.array([squares[row].sum() for row in self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, numbers: np.ndarray, keys: np.ndarray) -> Batch:
        """Reads rows; nothing is random.

        Returns:
          int32 ``[rows, sequence_length]`` each: ``tokens``; ``targets``, -1 where nothing is
          predicted; ``documents``, their numbers within the row, and a last one for what fills it
          up; ``positions`` within documents.
        """
        del keys
        shape = len(numbers), self._length
        batch = {
            "tokens": np.full(shape, self._end, np.int32),
            "targets": np.full(shape, -1, np.int32),
            "documents": np.zeros(shape, np.int32),
            "positions": np.zeros(shape, np.int32),
        }
        for row, number in enumerate(numbers):
            at = 0
            for document, piece in enumerate(self._rows[number]):
                start, count = self._pieces[piece]
                part, read = slice(at, at + count), self._tokens[start : start + count + 1]
                batch["tokens"][row, part], batch["targets"][row, part] = read[:-1], read[1:]
                if self._roles is not None:
                    is_prompt = self._roles[start + 1 : start + count + 1] != ANSWER
                    batch["targets"][row, part][is_prompt] = -1
                batch["documents"][row, part] = document
                batch["positions"][row, part] = np.arange(count)
                at += count
            batch["documents"][row, at:] = len(self._rows[number])
            batch["positions"][row, at:] = np.arange(self._length - at)
        return batch
