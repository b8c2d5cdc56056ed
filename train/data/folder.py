"""A prepared folder: ``meta.json``, which names its kind, and the files that it describes."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

META_FILE = "meta.json"
TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
PROMPT, ANSWER, BEGIN = range(3)
"""Roles of a token: it is read alone, it is also predicted, or it begins a document."""
KINDS = ("text", "images", "translation")
_TEXT = "text"


def prepare_hint(folder: Path, kind: str = _TEXT) -> str:
    """Says how to prepare a folder; ``train.prepare`` prepares text by default."""
    command = "train.prepare" if kind == _TEXT else f"train.prepare {kind}"
    return f"Prepare it with: python -m {command} --out {folder}"


def read_fields(folder: str | Path, kind: str) -> dict[str, Any]:
    """Reads ``meta.json`` and checks that the folder is of the wanted kind.

    Returns:
      The fields without the kind.

    Raises:
      ValueError: the file is missing, unreadable or damaged, or the folder is of another kind.
    """
    folder = Path(folder)
    text = read_file(folder, META_FILE, kind)
    try:
        fields = json.loads(text)
        actual = fields.pop("kind", _TEXT)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise damaged(folder, kind, error) from error
    if actual != kind:
        hint = prepare_hint(Path("FOLDER"), kind)
        raise ValueError(f"data.path={folder} holds {actual}, not {kind}. {hint}")
    return fields


def damaged(folder: Path, kind: str, error: Exception) -> ValueError:
    """Makes the error for a ``meta.json`` that this program did not write."""
    return ValueError(
        f"data.path={folder}: {META_FILE} is damaged or foreign ({error}). "
        f"{prepare_hint(folder, kind)}"
    )


def read_file(folder: Path, name: str, kind: str) -> bytes:
    """Reads a file of a prepared folder; raises ValueError with the remedy if it cannot."""
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"data.path={folder}: there is no {name}. {prepare_hint(folder, kind)}"
        ) from None
    except OSError as error:
        raise ValueError(
            f"data.path={folder}: cannot read {folder / name}: {error.strerror}."
        ) from error


def check_digest(folder: Path, name: str, content: bytes, expected: str, *, kind: str) -> None:
    """Raises ValueError unless a file is the one that ``meta.json`` describes."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        is_tokenizer = name == TOKENIZER_FILE
        what = "the tokenizer these tokens were" if is_tokenizer else "the file this data was"
        raise ValueError(
            f"data.path={folder}: {name} is not {what} made with: expected sha256 "
            f"{expected[:12]}..., found {digest[:12]}.... {prepare_hint(folder, kind)}"
        )


def open_tokenizer(folder: Path) -> Tokenizer:
    """Opens ``tokenizer.json``; a special token written inside a text is ordinary text.

    Raises:
      ValueError: the file is no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:  # tokenizers raises `Exception` itself for a file it cannot read
        rule = "is not a tokenizer that can be read"
        raise ValueError(f"{folder / TOKENIZER_FILE} {rule}: {error}.") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def require(module: str, *, extra: str, needed_by: str) -> Any:
    """Imports a module of an optional package.

    Args:
      extra: the extra of this project that installs it.
      needed_by: the option or feature that needs it, for the message.

    Raises:
      ValueError: the package is not installed; says how to install it.

    Example:
      >>> require("json", extra="images", needed_by="--source=digits").loads("1")
      1
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{needed_by} needs {error.name}, which is not installed. "
            f"Install it with: pip install -e '.[{extra}]'"
        ) from error
