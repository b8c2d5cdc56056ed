"""The byte-level BPE tokenizer, which learns from documents, and the encoding of any text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train.data.folder import END_OF_TEXT

MIN_VOCAB_SIZE = 256 + 1  # every byte, and the end of a document
MOST_TEXTS = 32
"""Texts encoded at a time, in parallel."""
MOST_CHARACTERS = 1 << 22
"""Characters encoded at a time, for each of which tokenizers needs about 250 bytes."""
_LONG_RUN = re.compile(r"(?<!\S)\S{1000,}|(?<!\s)\s{1000,}")
_RUN = 1000

T = TypeVar("T")


def train_tokenizer(
    texts: Sequence[str],
    *,
    vocab_size: int,
    progress: Progress,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
    add_prefix_space: bool = False,
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer: any text can be encoded and decodes to itself.

    Args:
      vocab_size: most tokens to learn; little text gives fewer.
      special_tokens: get the first tokens, in this order.
      add_prefix_space: a text's first word is the same token as that word after a space.

    Returns:
      The tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    # A special token written inside a text is ordinary text.
    tokenizer.encode_special_tokens = True
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tracked = progress.track(texts, total=len(texts), description="train tokenizer")
    tokenizer.train_from_iterator(map(_short_runs, tracked), trainer, length=len(texts))
    return tokenizer


def _short_runs(text: str) -> list[str]:
    """Cuts a text wherever it goes on for `_RUN` characters without a space, or with spaces alone.

    The time to learn from a word grows with the square of its length.
    """
    cuts = [0]
    for run in _LONG_RUN.finditer(text):
        cuts += range(run.start() + _RUN, run.end(), _RUN)
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def is_whole(text: str) -> bool:
    """Says whether a text can be encoded: JSON may hold halves of characters (lone surrogates)."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def pieces(text: str) -> Iterator[str]:
    """Yields a text in pieces of at most `MOST_CHARACTERS`, cut at line ends if there are any."""
    start = 0
    while len(text) - start > MOST_CHARACTERS:
        most = start + MOST_CHARACTERS
        end = text.rfind("\n", start, most) + 1 or most
        yield text[start:end]
        start = end
    yield text[start:]


def encoding_groups(items: Iterable[T], text: Callable[[T], str]) -> Iterator[list[T]]:
    """Yields items in groups whose texts can be encoded at a time.

    Args:
      text: returns the text of an item, of at most `MOST_CHARACTERS`.
    """
    group, size = list[T](), 0
    for item in items:
        length = len(text(item))
        if len(group) == MOST_TEXTS or (group and size + length > MOST_CHARACTERS):
            yield group
            group, size = [], 0
        group.append(item)
        size += length
    if group:
        yield group


class Encoder:
    """Encodes texts in parallel, each followed by the token that ends it.

    Args:
      tokenizer: content of ``tokenizer.json``; the tokenizer may add special tokens to every text.
      end: the token after every text, unless the tokenizer adds it.
    """

    def __init__(self, tokenizer: str, end: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer)
        # A special token written inside a text is ordinary text.
        self._tokenizer.encode_special_tokens = True
        self._last = [self._tokenizer.token_to_id(end)]

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each text, uint32 ``[num_tokens]``."""
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]
        return [
            np.array(ids if ids[-1:] == self._last else ids + self._last, np.uint32)
            for ids in encoded
        ]
