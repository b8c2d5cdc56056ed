"""Text as token files of ``train.prepare``, read as batches with exact resume.

A data folder holds ``tokenizer.json``, ``train.tokens``, ``heldout.tokens`` and ``meta.json``. A
token file is a 24-byte header (magic, version, bytes per token, number of tokens) and the tokens,
all little-endian, so a truncated copy is noticed before training starts. Token files are read by
calls and not mapped into memory: where a mapped file is cut short, the operating system ends the
process without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jaxpipe.files import read_json
from train.data import folder as prepared
from train.data import stream
from train.data.folder import ANSWER, END_OF_TEXT, TOKENIZER_FILE, prepare_hint
from train.data.stream import Batch
from train.errors import refused

KIND = "text"
TRAIN_FILE = "train.tokens"
HELDOUT_FILE = "heldout.tokens"
ROLE_FILES = {TRAIN_FILE: "train.roles", HELDOUT_FILE: "heldout.roles"}
"""Token files that hold, in place of tokens, the roles of a token file's tokens."""

_HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes per token, number of tokens
_MAGIC = b"JPTOKENS"
_VERSION = 1
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
# Tokens read at a time, so that memory stays flat however long the file is.
BLOCK = 1 << 22


@dataclasses.dataclass(frozen=True)
class SplitMeta:
    """Size of one side of the data: its documents, their UTF-8 bytes, and their tokens."""

    documents: int
    bytes: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class DataMeta:
    """The content of ``meta.json`` in a data folder.

    Args:
      vocab_size: number of tokens the tokenizer knows; every token is below it.
      tokenizer_sha256: hex digest of ``tokenizer.json``.
      documents_sha256: hex digest of the names and contents of all documents, or any text.
      train: size of the text to train on.
      heldout: size of the text held out for evaluation.
      settings: the options of ``train.prepare`` that determine the content, or any object.
      end_of_text: the token after every document, as ``tokenizer.json`` names it.
      token_ids: the tokens that begin (``bos``), end (``eos``) and fill up (``pad``) a text for a
        tokenizer that existed before, each a token, a list of tokens, or None; None if
        ``end_of_text`` both begins and ends one.
      conversations: whether only some tokens are predicted, as their roles say.
    """

    vocab_size: int
    tokenizer_sha256: str
    documents_sha256: str
    train: SplitMeta
    heldout: SplitMeta
    settings: dict[str, Any]
    end_of_text: str = END_OF_TEXT
    token_ids: dict[str, Any] | None = None
    conversations: bool = False


class TokenFile:
    """Integers ``[num_tokens]`` in a file, of which slices can be read.

    The file stays open, so that one that is deleted meanwhile can still be read.

    Raises:
      ConfigError: on reading, the file has been cut short.
    """

    def __init__(self, path: Path, *, dtype: np.dtype[Any], offset: int, count: int) -> None:
        self._path, self.dtype, self._offset, self._count = path, dtype, offset, count
        self._file = path.open("rb", buffering=0)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(self._count)
        assert step == 1
        size = max(stop - start, 0) * self.dtype.itemsize
        parts, position = [], self._offset + start * self.dtype.itemsize
        while size:
            read = self._read(size, position)
            parts.append(read)
            position, size = position + len(read), size - len(read)
        return np.frombuffer(b"".join(parts), self.dtype)

    def _read(self, size: int, position: int) -> bytes:
        try:
            content = os.pread(self._file.fileno(), size, position)
            reason = "it has been cut short"
        except OSError as error:
            content, reason = b"", str(error.strerror)
        if not content:
            raise refused(
                f"data.path={self._path.parent}: {self._path.name} can no longer be read: {reason} "
                "since the run began. Put the data back as it was and continue with --resume.",
                "data.path",
            )
        return content


Tokens = np.ndarray | TokenFile


def write_tokens(path: Path, tokens: np.ndarray, *, vocab_size: int, append: bool = False) -> None:
    """Writes a token file, or further tokens of one, and waits until they are on disk.

    Args:
      tokens: integers ``[num_tokens]``, each below ``vocab_size``.
      vocab_size: determines the width of a token: 2 bytes up to 65536, else 4.
      append: whether to keep the tokens that the file holds.
    """
    assert tokens.size == 0 or int(tokens.max()) < vocab_size
    dtype = _DTYPES[2 if vocab_size <= 1 << 16 else 4]
    count = len(read_tokens(path)) if append else 0
    with path.open("r+b" if append else "wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, dtype.itemsize, count + len(tokens)))
        file.seek(count * dtype.itemsize, os.SEEK_CUR)
        file.write(tokens.astype(dtype).tobytes())
        file.flush()
        os.fsync(file.fileno())


def read_tokens(path: str | Path) -> TokenFile:
    """Opens a token file, after checking that it is whole.

    Returns:
      Tokens ``[num_tokens]``, uint16 or uint32, of which slices can be read.

    Raises:
      ValueError: the file is missing, unreadable, not a token file, or not as long as its header
        says.

    Example:
      >>> tokens = read_tokens("data/stdlib/train.tokens")  # doctest: +SKIP
    """
    path = Path(path)
    where, hint = f"data.path={path.parent}", prepare_hint(path.parent)
    try:
        with path.open("rb") as file:
            header, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise ValueError(f"{where}: there is no {path.name}. {hint}") from None
    except OSError as error:
        raise ValueError(f"{where}: cannot read {path}: {error.strerror}.") from error
    if problem := _problem(header, size):
        raise ValueError(f"{where}: {path.name} {problem}. {hint}")
    *_, itemsize, count = _HEADER.unpack(header)
    return TokenFile(path, dtype=_DTYPES[itemsize], offset=_HEADER.size, count=count)


def _problem(header: bytes, size: int) -> str:
    """Says why a file of so many bytes is no whole token file; empty if it is one."""
    if len(header) < _HEADER.size:
        least = f"at least the {_HEADER.size} bytes of a header"
        return f"is truncated: expected {least}, found {size} bytes"
    magic, version, itemsize, count = _HEADER.unpack(header)
    if magic != _MAGIC:
        starts = f"expected it to start with {_MAGIC!r}, found {magic!r}"
        return f"is not a jaxpipe token file: {starts} ({size} bytes in all)"
    if version != _VERSION or itemsize not in _DTYPES:
        rule = f"this program reads version {_VERSION} with 2 or 4"
        return f"has format version {version} with {itemsize} bytes per token; {rule}"
    if size != (expected := _HEADER.size + itemsize * count):
        kind = "truncated" if size < expected else "longer than it says"
        return f"is {kind}: expected {expected} bytes ({count} tokens), found {size} bytes"
    return "" if count else "holds no tokens"


def read_roles(folder: str | Path, name: str) -> TokenFile | None:
    """Opens the roles of a token file's tokens; None if all of them are predicted.

    Raises:
      ValueError: as `read_tokens`, or there are not as many roles as tokens.
    """
    if not read_meta(folder).conversations:
        return None
    tokens, roles = (read_tokens(Path(folder) / file) for file in (name, ROLE_FILES[name]))
    if len(tokens) != len(roles):
        raise ValueError(
            f"data.path={folder}: {name} holds {len(tokens)} tokens and {ROLE_FILES[name]} "
            f"{len(roles)} roles: they are not from one preparation. Prepare the folder again."
        )
    return roles


def predicted(folder: str | Path, name: str) -> Tokens:
    """Returns the tokens of a file that are predicted; raises ValueError as `read_roles`."""
    tokens, roles = read_tokens(Path(folder) / name), read_roles(folder, name)
    return tokens if roles is None else tokens[:][roles[:] == ANSWER]


def record_of(name: str) -> str:
    """Names the file beside a token file that records its check."""
    return f".{name}.checked"


def check_tokens(path: Path, tokens: TokenFile, *, vocab_size: int) -> None:
    """Raises ValueError if a token is not below ``vocab_size``.

    The file is read once: its largest token is kept beside it, with the size and the time of
    change by which a later run knows that it is the same file.
    """
    record = path.with_name(record_of(path.name))
    status = path.stat()
    identity = {"bytes": status.st_size, "changed_ns": status.st_mtime_ns}
    largest = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = read_json(record)
        if {name: kept[name] for name in identity} == identity:
            largest = int(kept["largest"])
    if largest is None:
        blocks = range(0, len(tokens), BLOCK)
        largest = max(int(tokens[start : start + BLOCK].max()) for start in blocks)
        # A folder that cannot be written is checked by every run.
        with contextlib.suppress(OSError):
            partial = record.with_name(f"{record.name}.{os.getpid()}")
            partial.write_text(json.dumps({**identity, "largest": largest}) + "\n")
            os.replace(partial, record)
    if largest >= vocab_size:
        raise ValueError(
            f"data.path={path.parent}: {path.name} holds token {largest}, but its tokenizer knows "
            f"{vocab_size} tokens, 0 to {vocab_size - 1}: the files are not from one preparation. "
            "Prepare the folder again."
        )


def read_meta(folder: str | Path) -> DataMeta:
    """Reads ``meta.json`` of a data folder and checks that the tokenizer is the one it describes.

    Returns:
      The sizes, digests and settings.

    Raises:
      ValueError: a file is missing or unreadable, or it is not the same tokenizer.
    """
    folder = Path(folder)
    fields = prepared.read_fields(folder, KIND)
    tokenizer = prepared.read_file(folder, TOKENIZER_FILE, KIND)
    try:
        fields["train"] = SplitMeta(**fields["train"])
        fields["heldout"] = SplitMeta(**fields["heldout"])
        meta = DataMeta(**fields)
    except (TypeError, KeyError) as error:
        raise prepared.damaged(folder, KIND, error) from error
    prepared.check_digest(folder, TOKENIZER_FILE, tokenizer, meta.tokenizer_sha256, kind=KIND)
    return meta


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Loads the tokenizer that made the token files of a folder.

    The text ``<|endoftext|>`` inside a prompt is encoded as ordinary text, as in preparation.

    Returns:
      A tokenizer with ``encode(text).ids`` and ``decode(ids)``; `end_of_text` is the end of a
      document.

    Raises:
      ValueError: as ``read_meta``.
    """
    read_meta(folder)
    return prepared.open_tokenizer(Path(folder))


def end_of_text(folder: str | Path) -> int:
    """Returns the token after every document of a folder."""
    token = load_tokenizer(folder).token_to_id(read_meta(folder).end_of_text)
    assert token is not None
    return token


def token_ids(folder: str | Path) -> dict[str, Any]:
    """Returns the tokens that begin, end and fill up a text: ``bos``, ``eos`` and ``pad``."""
    ids = read_meta(folder).token_ids
    return ids or {"bos": end_of_text(folder), "eos": end_of_text(folder), "pad": None}


class Windows:
    """A text cut into windows that overlap by one token, so that all but the first are predicted.

    The tokens after the last whole window, fewer than its number of predictions, are not used.

    Args:
      tokens: integers ``[num_tokens]``.
      sequence_length: number of predictions a window holds, at least 1.
      end_of_text: the token after every document, for windows that number their documents.
      with_targets: whether inputs and targets are arrays of equal length, which slices of sequences
        cut alike.

    Example:
      >>> Windows(np.arange(9), 4).read(np.array([1]), np.zeros((1, 3)))["tokens"]
      array([[4, 5, 6, 7, 8]], dtype=int32)
      >>> Windows(np.arange(9), 4, end_of_text=5).read(np.array([1]), np.zeros((1, 3)))["documents"]
      array([[0, 0, 1, 1]], dtype=int32)
    """

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        *,
        end_of_text: int | None = None,
        with_targets: bool = False,
    ) -> None:
        stream.check_sizes(sequence_length=sequence_length)
        self._tokens, self._sequence_length = tokens, sequence_length
        self._end_of_text, self._with_targets = end_of_text, with_targets

    def __len__(self) -> int:
        return max(len(self._tokens) - 1, 0) // self._sequence_length

    def read(self, numbers: np.ndarray, keys: np.ndarray) -> Batch:
        """Reads windows; nothing is random.

        Returns:
          ``tokens`` int32 ``[rows, sequence_length + 1]``; or, with targets, ``tokens``,
          ``targets`` and ``positions``, int32 ``[rows, sequence_length]``. With ``end_of_text``
          also ``documents``, of that shape: number of documents that have ended before a token.
          Positions count from the beginning of a window, or of a document if these are numbered.
        """
        del keys
        out = np.empty((len(numbers), self._sequence_length + 1), np.int32)
        for row, start in enumerate(numbers.astype(np.int64) * self._sequence_length):
            out[row] = self._tokens[start : start + self._sequence_length + 1]
        batch, inputs = {"tokens": out}, out[:, :-1]
        if self._end_of_text is not None:
            ends = (inputs == self._end_of_text).astype(np.int32)
            batch["documents"] = np.cumsum(ends, axis=1, dtype=np.int32) - ends
        if not self._with_targets:
            return batch
        positions = np.broadcast_to(np.arange(self._sequence_length, dtype=np.int32), inputs.shape)
        if "documents" in batch:
            begins = np.diff(batch["documents"], axis=1, prepend=-1) > 0
            positions = positions - np.maximum.accumulate(positions * begins, axis=1)
        return batch | {"tokens": inputs, "targets": out[:, 1:], "positions": positions}


def unigram_loss(train_tokens: Tokens, heldout_tokens: Tokens, vocab_size: int) -> float:
    """Cross-entropy of held-out text under token frequencies alone: what a model must beat.

    With add-one smoothing, ``p(t) = (count(t) + 1) / (num_train_tokens + vocab_size)``.

    Args:
      train_tokens: integers ``[num_train_tokens]`` to count.
      heldout_tokens: integers ``[num_heldout_tokens]`` to predict, at least one.
      vocab_size: number of tokens that exist.

    Returns:
      Mean of ``-log p`` over the held-out tokens, in nats per token.

    Raises:
      ValueError: a token is not below ``vocab_size``, or there is no held-out token.

    Example:
      >>> round(unigram_loss(np.array([0, 0, 1]), np.array([0, 1]), 2), 4)  # -log(3/5 * 2/5) / 2
      0.7136
    """
    if len(heldout_tokens) == 0:
        raise ValueError("heldout_tokens is empty: there is nothing to predict.")
    train_counts = count_tokens(train_tokens, vocab_size, "train_tokens")
    heldout_counts = count_tokens(heldout_tokens, vocab_size, "heldout_tokens")
    log_p = np.log(train_counts + 1.0) - np.log(len(train_tokens) + vocab_size)
    return float(-(heldout_counts @ log_p) / len(heldout_tokens))


def count_tokens(tokens: Tokens, vocab_size: int, name: str) -> np.ndarray:
    """Counts how often each token occurs, int64 ``[vocab_size]``; ``name`` is for the message."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), BLOCK):
        block = np.asarray(tokens[start : start + BLOCK], dtype=np.int64)
        if int(block.max()) >= vocab_size:
            raise ValueError(
                f"{name} holds token {int(block.max())}, but vocab_size={vocab_size}: "
                f"every token must be below it."
            )
        counts += np.bincount(block, minlength=vocab_size)
    return counts
