"""The byte-level BPE tokenizer: learns from documents, and encodes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train.data.text import END_OF_TEXT

MIN_VOCAB_SIZE = 256 + 1  # every byte, and the end of a document
ENCODE_GROUP = 32
"""Documents encoded at a time, in parallel."""


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
      texts: documents to learn merges from.
      vocab_size: most tokens to learn; little text gives fewer.
      progress: gets a bar over the documents.
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
    tokenizer.train_from_iterator(tracked, trainer, length=len(texts))
    return tokenizer


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, end: str, advance: Callable[[int], object]
) -> np.ndarray:
    """Encodes documents one after the other, each followed by the token that ends it.

    Args:
      tokenizer: a tokenizer from ``train_tokenizer``, or one that may add special tokens to every
        document.
      texts: documents to encode.
      end: the token after every document, unless the tokenizer adds it.
      advance: told how many further documents are done.

    Returns:
      Tokens ``[num_tokens]``, uint32.
    """
    pieces: list[np.ndarray] = []
    for start in range(0, len(texts), ENCODE_GROUP):
        group = texts[start : start + ENCODE_GROUP]
        pieces += encode_group(tokenizer, group, end=end)
        advance(len(group))
    return np.concatenate(pieces)


def encode_group(tokenizer: Tokenizer, texts: Sequence[str], *, end: str) -> list[np.ndarray]:
    """Encodes some documents in parallel, as `encode` does; returns the tokens of each."""
    last = [tokenizer.token_to_id(end)]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
    return [np.array(ids if ids[-1:] == last else ids + last, np.uint32) for ids in encoded]
