"""Sentence pairs from English to other languages, as ``train.prepare translation`` writes them.

A folder holds ``{train,heldout}.jsonl``, one pair per line, a tokenizer that both sides share, and
``meta.json``. A source begins with a token that names the language to translate to (Johnson et al.
2017), such as ``<2de>``, and no source is on both sides.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from train.data import folder as prepared
from train.data.folder import TOKENIZER_FILE, require
from train.data.stream import Batch

KIND = "translation"
TRAIN_FILE = "train.jsonl"
HELDOUT_FILE = "heldout.jsonl"

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
PAD, BEGIN, END = range(3)

# sacrebleu's way to cut text into words in languages without spaces.
_BLEU_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char", "km": "char"}
_PRIVATE_USE = 0xE000  # Unicode's first private-use character


@dataclasses.dataclass(frozen=True)
class Pair:
    """A sentence and its translation.

    Args:
      locale: language of the target, such as "de" or "pt_BR".
      source: sentence in English.
      target: its translation.
    """

    locale: str
    source: str
    target: str


@dataclasses.dataclass(frozen=True)
class TranslationMeta:
    """The content of ``meta.json`` in a folder of sentence pairs.

    Args:
      vocab_size: number of tokens the tokenizer knows, special ones included.
      source_length: tokens of the longest source of both sides, special ones included.
      target_length: tokens to predict in the longest target of both sides, ``</s>`` included.
      train: number of pairs to train on.
      heldout: number of pairs held out for evaluation.
      tokenizer_sha256: hex digest of ``tokenizer.json``.
      pairs_sha256: hex digest of both files of pairs.
      messages_sha256: hex digest of all messages in the catalogues, long pairs included.
      settings: the options of ``train.prepare translation`` that determine the content.
    """

    vocab_size: int
    source_length: int
    target_length: int
    train: int
    heldout: int
    tokenizer_sha256: str
    pairs_sha256: dict[str, str]
    messages_sha256: str
    settings: dict[str, Any]


class Pairs:
    """The pairs of one side; `stream.batches` and `stream.heldout_batches` read them.

    Args:
      tokenizer: knows the special tokens and a language token for every locale.
      source_length: tokens to fill sources up to, at least that of the longest.
      target_length: tokens to predict in a filled-up target, at least that of the longest.

    Raises:
      ValueError: a length is too small.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        tokenizer: Tokenizer,
        *,
        source_length: int,
        target_length: int,
    ) -> None:
        self.pairs = list(pairs)
        locales = [pair.locale for pair in pairs]
        sources = encode_sources(tokenizer, [pair.source for pair in pairs], locales=locales)
        targets = encode_targets(tokenizer, [pair.target for pair in pairs])
        self._sources = _pad(sources, source_length, "source_length")
        self._targets = _pad(targets, target_length + 1, "target_length", extra=1)

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, numbers: np.ndarray, keys: np.ndarray) -> Batch:
        """Reads pairs; nothing is random.

        Returns:
          ``source`` int32 ``[rows, source_length]``: language token, text, ``</s>``; ``target``
          int32 ``[rows, target_length + 1]``: ``<s>``, text, ``</s>``. Both are filled up with
          ``PAD``, and hold it nowhere else.
        """
        del keys
        return {"source": self._sources[numbers], "target": self._targets[numbers]}


def language_token(locale: str) -> str:
    """Returns the token that asks for a language, such as ``<2de>``."""
    return f"<2{locale}>"


def encode_sources(
    tokenizer: Tokenizer, texts: Sequence[str], *, locales: Sequence[str]
) -> list[list[int]]:
    """Encodes sources without filling them up.

    Args:
      locales: the language to translate each text to.

    Returns:
      For each text its language token, its own tokens and ``</s>``.
    """
    vocabulary = tokenizer.get_vocab()
    encodings = tokenizer.encode_batch_fast(list(texts))
    return [
        [vocabulary[language_token(locale)], *encoding.ids, END]
        for locale, encoding in zip(locales, encodings, strict=True)
    ]


def encode_targets(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes targets without filling them up: ``<s>``, the tokens of each text, ``</s>``."""
    return [[BEGIN, *encoding.ids, END] for encoding in tokenizer.encode_batch_fast(list(texts))]


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Returns the text of a target up to its end, without special tokens.

    Args:
      tokens: with or without ``<s>``; tokens after the first ``</s>`` are left out.
    """
    tokens = list(tokens)
    end = tokens.index(END) if END in tokens else len(tokens)
    return tokenizer.decode(tokens[:end], skip_special_tokens=True).strip()


def read_meta(folder: str | Path) -> TranslationMeta:
    """Reads ``meta.json``; raises ValueError if a file is missing, damaged or not the same."""
    folder = Path(folder)
    fields = prepared.read_fields(folder, KIND)
    try:
        meta = TranslationMeta(**fields)
        digests = {TOKENIZER_FILE: meta.tokenizer_sha256} | meta.pairs_sha256
    except TypeError as error:
        raise prepared.damaged(folder, KIND, error) from error
    for name, digest in digests.items():
        content = prepared.read_file(folder, name, KIND)
        prepared.check_digest(folder, name, content, digest, kind=KIND)
    return meta


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Loads the tokenizer that both languages share; raises ValueError as `read_meta`."""
    read_meta(folder)
    return prepared.open_tokenizer(Path(folder))


def load(
    folder: str | Path, *, source_length: int | None = None, target_length: int | None = None
) -> tuple[Pairs, Pairs]:
    """Opens both sides of a folder of sentence pairs.

    Args:
      source_length: tokens to fill sources up to; None for that of the longest.
      target_length: tokens to predict in a filled-up target; None for that of the longest.

    Returns:
      The pairs to train on and the held-out ones.

    Raises:
      ValueError: a file is missing or damaged, or a length is too small.

    Example:
      >>> train, heldout = load("data/jupyterlab-de")  # doctest: +SKIP
    """
    folder = Path(folder)
    meta = read_meta(folder)
    tokenizer = prepared.open_tokenizer(folder)
    train, heldout = (
        Pairs(
            _read_pairs(folder / name),
            tokenizer,
            source_length=source_length or meta.source_length,
            target_length=target_length or meta.target_length,
        )
        for name in (TRAIN_FILE, HELDOUT_FILE)
    )
    return train, heldout


def bleu(hypotheses: Sequence[str], pairs: Sequence[Pair]) -> dict[str, float]:
    """Computes the BLEU of translations by locale, as sacrebleu does (Post 2018).

    A placeholder such as ``{0}`` counts as one word; with its braces it would count as three, and
    copying it would look like knowing a phrase.

    Returns:
      A number from 0 to 100 for each locale.

    Raises:
      ValueError: sacrebleu is not installed, or there is not one hypothesis per pair.
    """
    sacrebleu = require("sacrebleu", extra="translation", needed_by="BLEU")
    if len(hypotheses) != len(pairs):
        raise ValueError(
            f"{len(hypotheses)} hypotheses for {len(pairs)} pairs: there must be one for each."
        )
    scores = {}
    for locale in sorted({pair.locale for pair in pairs}):
        chosen = [
            (_one_word(hypothesis), _one_word(pair.target))
            for hypothesis, pair in zip(hypotheses, pairs, strict=True)
            if pair.locale == locale
        ]
        system, references = map(list, zip(*chosen, strict=True))
        # Only the language matters: zh_CN and zh_TW are cut alike.
        tokenizer = _BLEU_TOKENIZERS.get(locale.split("_")[0], "13a")
        scores[locale] = sacrebleu.corpus_bleu(system, [references], tokenize=tokenizer).score
    return scores


def copy_bleu(pairs: Sequence[Pair]) -> dict[str, float]:
    """BLEU of leaving every source as it is, by locale: what a model must beat."""
    return bleu([pair.source for pair in pairs], pairs)


def _one_word(text: str) -> str:
    """Replaces placeholders by characters that no language uses and every tokenizer keeps whole."""
    return re.sub(r"\{(\d+)\}", lambda match: chr(_PRIVATE_USE + int(match[1])), text)


def _read_pairs(path: Path) -> list[Pair]:
    with path.open(encoding="utf-8") as lines:
        return [Pair(**json.loads(line)) for line in lines]


def _pad(rows: list[list[int]], length: int, name: str, extra: int = 0) -> np.ndarray:
    longest = max(map(len, rows), default=0)
    if longest > length:
        raise ValueError(
            f"{name}={length - extra} is too short: the longest needs {longest - extra}. "
            f"Nearest valid: {longest - extra}."
        )
    out = np.full((len(rows), length), PAD, np.int32)
    for row, tokens in zip(out, rows, strict=True):
        row[: len(tokens)] = tokens
    return out
