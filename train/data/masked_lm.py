"""Masked language modelling on the text of `text` (Devlin et al. 2019, section 3.1, appendix A.1).

The token files are those of a language model. Three special tokens follow the tokenizer's own, so
that one prepared folder serves both: ``[CLS]``, ``[SEP]`` and ``[MASK]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data import text
from train.data.stream import Batch

# Section 3.1, task 1: further tokens to predict stay as they are.
MASKED_SHARE = 0.15
_HIDDEN, _HIDDEN_OR_RANDOM = 0.8, 0.9
_NO_TARGET = -1


class SpecialTokens(NamedTuple):
    """The tokens that follow the vocabulary of a text."""

    cls: int
    sep: int
    mask: int


def special_tokens(text_vocab_size: int) -> SpecialTokens:
    """Returns the special tokens of a text; a model needs ``text_vocab_size + 3`` tokens.

    Example:
      >>> special_tokens(2048)
      SpecialTokens(cls=2048, sep=2049, mask=2050)
    """
    return SpecialTokens(*range(text_vocab_size, text_vocab_size + 3))


class MaskedWindows:
    """Windows of a text with a fixed number of their tokens to predict.

    A row is ``[CLS] window [SEP]``; with ``next_sentence`` it is ``[CLS] first half [SEP] second
    half [SEP]``, where every other second half, on average, is that of another window. In every
    row, 15% of a window's tokens are to be predicted, always the same number: 80% of them are
    hidden behind ``[MASK]``, 10% replaced by a random token, 10% left. Ends of documents are never
    among them. Each epoch masks anew.

    Args:
      tokens: integers ``[num_tokens]``.
      sequence_length: tokens per row, special ones included.
      vocab_size: number of tokens the text's tokenizer knows.
      end_of_text: the token that ends a document.
      next_sentence: whether rows are pairs.

    Raises:
      ValueError: a row has no room for text, or the text is shorter than the rows it takes.

    Example:
      >>> windows = MaskedWindows(
      ...     np.arange(1, 90) % 50, sequence_length=16, vocab_size=50, end_of_text=0
      ... )
      >>> batch = windows.read(np.arange(4), np.array([[0, 0, row] for row in range(4)]))
      >>> (batch["targets"] >= 0).sum(axis=1).tolist()
      [2, 2, 2, 2]
    """

    def __init__(
        self,
        tokens: text.Tokens,
        *,
        sequence_length: int,
        vocab_size: int,
        end_of_text: int,
        next_sentence: bool = False,
    ) -> None:
        self._tokens, self._next_sentence = tokens, next_sentence
        self._vocab_size, self._end_of_text = vocab_size, end_of_text
        self._special = special_tokens(vocab_size)
        num_special = 3 if next_sentence else 2
        shortest = num_special + (2 if next_sentence else 1)
        if sequence_length < shortest:
            raise ValueError(
                f"data.sequence_length={sequence_length} leaves no room for text beside "
                f"{num_special} special tokens. Nearest valid: {shortest}."
            )
        self._sequence_length = sequence_length
        self._window = sequence_length - num_special
        self._half = self._window // 2
        # A second half from another window needs another window.
        num_windows = 2 if next_sentence else 1
        if len(self) < num_windows:
            longest = len(tokens) // num_windows + num_special
            nearest = f" Nearest valid: {longest}." if longest >= shortest else ""
            raise ValueError(
                f"data.sequence_length={sequence_length} does not fit a text of {len(tokens)} "
                f"tokens: it must give at least {num_windows} rows.{nearest}"
            )

    def __len__(self) -> int:
        return len(self._tokens) // self._window

    def read(self, numbers: np.ndarray, keys: np.ndarray) -> Batch:
        """Reads and masks rows.

        Returns:
          ``tokens`` int32 ``[rows, S]``, the input; ``targets`` int32 ``[rows, S]``, the token to
          predict or -1; with ``next_sentence`` also ``segments`` int32 ``[rows, S]``, 0 up to the
          first ``[SEP]`` and then 1, and ``next_sentence`` int32 ``[rows]``, 0 if the second half
          follows the first and 1 if it does not. No row is padded.
        """
        tokens = np.empty((len(numbers), self._sequence_length), np.int32)
        targets = np.full_like(tokens, _NO_TARGET)
        is_other = np.zeros(len(numbers), np.int32)
        for row, (number, key) in enumerate(zip(numbers.tolist(), keys, strict=True)):
            rng = np.random.default_rng(key)
            if self._next_sentence:
                is_other[row] = rng.random() < 0.5
            tokens[row] = self._assemble(number, bool(is_other[row]), rng)
            self._mask(tokens[row], targets[row], rng)
        batch = {"tokens": tokens, "targets": targets}
        if not self._next_sentence:
            return batch
        segments = np.arange(self._sequence_length, dtype=np.int32) > self._half + 1
        segments = np.tile(segments.astype(np.int32), (len(numbers), 1))
        return batch | {"segments": segments, "next_sentence": is_other}

    def _assemble(self, number: int, is_other: bool, rng: np.random.Generator) -> np.ndarray:
        cls, sep, _ = self._special
        words = self._text(number)
        if not self._next_sentence:
            return np.concatenate([[cls], words, [sep]])
        second = (number + int(rng.integers(1, len(self)))) % len(self) if is_other else number
        return np.concatenate(
            [[cls], words[: self._half], [sep], self._text(second)[self._half :], [sep]]
        )

    def _text(self, number: int) -> np.ndarray:
        return self._tokens[number * self._window : (number + 1) * self._window]

    def _mask(self, tokens: np.ndarray, targets: np.ndarray, rng: np.random.Generator) -> None:
        """Chooses the tokens to predict in a row, and hides them; changes both arrays."""
        (candidates,) = np.nonzero((tokens < self._vocab_size) & (tokens != self._end_of_text))
        count = max(round(MASKED_SHARE * self._window), 1)
        chosen = rng.permutation(candidates)[:count]
        targets[chosen] = tokens[chosen]
        kind = rng.random(len(chosen))
        random = rng.integers(self._vocab_size - 1, size=len(chosen))
        random += random >= self._end_of_text  # any token but the end of a document
        tokens[chosen] = np.select(
            [kind < _HIDDEN, kind < _HIDDEN_OR_RANDOM], [self._special.mask, random], tokens[chosen]
        )


def load(
    folder: str | Path, *, sequence_length: int, next_sentence: bool = False
) -> tuple[MaskedWindows, MaskedWindows]:
    """Opens both sides of a folder of text.

    Args:
      sequence_length: tokens per row, special ones included.
      next_sentence: whether rows are pairs.

    Returns:
      The windows to train on and the held-out ones.

    Raises:
      ValueError: a file is missing or damaged, or the text is too short.

    Example:
      >>> train, heldout = load("data/stdlib", sequence_length=128)  # doctest: +SKIP
    """
    folder = Path(folder)
    end_of_text = text.end_of_text(folder)
    vocab_size = text.read_meta(folder).vocab_size
    train, heldout = (
        MaskedWindows(
            _checked(folder / name, vocab_size),
            sequence_length=sequence_length,
            vocab_size=vocab_size,
            end_of_text=end_of_text,
            next_sentence=next_sentence,
        )
        for name in (text.TRAIN_FILE, text.HELDOUT_FILE)
    )
    return train, heldout


def _checked(path: Path, vocab_size: int) -> text.Tokens:
    tokens = text.read_tokens(path)
    text.check_tokens(path, tokens, vocab_size=vocab_size)
    return tokens


def masked_accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Share of the tokens to predict that are right.

    Args:
      predictions: integers ``[rows, S]``, at every position.
      targets: integers ``[rows, S]``, below 0 where there is nothing to predict.

    Example:
      >>> masked_accuracy(np.array([[4, 5, 6]]), np.array([[4, -1, 7]]))
      0.5
    """
    counts = targets >= 0
    return float(np.mean(predictions[counts] == targets[counts]))


def unigram_accuracy(
    train_tokens: text.Tokens, batches: Iterable[Batch], *, vocab_size: int
) -> float:
    """Accuracy of always guessing the most frequent training token: what a model must beat.

    Args:
      train_tokens: integers ``[num_tokens]`` to count.
      batches: at least one, with the ``targets`` to predict.
      vocab_size: number of tokens the text's tokenizer knows.
    """
    guess = text.count_tokens(train_tokens, vocab_size, "train_tokens").argmax()
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    return masked_accuracy(np.full_like(targets, guess), targets)
