"""Existing tokenizers: those of a Hugging Face folder, or of other prepared data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from jaxpipe.files import read_bytes, read_json
from train.data import folder as prepared
from train.data import text

_CONFIG, _SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
FILES = (prepared.TOKENIZER_FILE, _CONFIG, _SPECIAL, _TEMPLATE)
"""Files of the tokenizer, and of what the transformers library keeps beside it."""

_NAMES = ("bos", "eos", "pad")


class Known(NamedTuple):
    """A tokenizer, and the meaning of its tokens.

    Attributes:
      tokenizer: a tokenizer that encodes whole texts: it neither cuts nor fills them.
      end_of_text: the token that ends a document.
      token_ids: ``bos``, ``eos`` and ``pad``, each a token, several, or None.
    """

    tokenizer: Tokenizer
    end_of_text: str
    token_ids: dict[str, Any]


def read(folder: Path) -> Known:
    """Reads the tokenizer of a folder.

    Args:
      folder: folder that holds ``tokenizer.json``, and says in ``meta.json``,
        ``tokenizer_config.json``, ``special_tokens_map.json`` or ``config.json`` which token ends a
        text.

    Raises:
      ValueError: there is no tokenizer, it cannot be read, or no token ends a text.
    """
    where = f"--tokenizer={folder}"
    if not (folder / prepared.TOKENIZER_FILE).is_file():
        raise ValueError(
            f"{where} holds no {prepared.TOKENIZER_FILE}. Name a folder of prepared text, or one "
            "that save_pretrained of a fast tokenizer of the transformers library wrote."
        )
    if (folder / prepared.META_FILE).is_file():
        meta = text.read_meta(folder)
        return Known(_whole_texts(folder), meta.end_of_text, text.token_ids(folder))
    tokenizer = _whole_texts(folder)
    names, ids = special_tokens(folder), _config_ids(folder)
    for name, token in names.items():
        ids[name] = tokenizer.token_to_id(token) if ids[name] is None else ids[name]
    known = ids["eos"] if isinstance(ids["eos"], list) else [ids["eos"]]
    end = names.get("eos", "")
    if not end and isinstance(first := next(iter(known), None), int):
        end = tokenizer.id_to_token(first) or ""
    number = tokenizer.token_to_id(end)
    if number is None:
        raise ValueError(
            f"{where} does not say which token ends a text: tokenizer_config.json must have an "
            f"eos_token that {prepared.TOKENIZER_FILE} knows, and has {end!r}."
        )
    # A model that is trained to end with this token must stop there.
    return Known(tokenizer, end, ids | ({} if number in known else {"eos": number}))


class Exported(NamedTuple):
    """A tokenizer for the transformers library.

    Attributes:
      files: contents by name.
      token_ids: as in `Known`.
      sha256: digest of the text's own tokenizer, which a run records.
    """

    files: dict[str, bytes]
    token_ids: dict[str, Any]
    sha256: str


def export(folder: Path, *, sequence_length: int) -> Exported:
    """Returns the tokenizer of prepared text as the transformers library reads it.

    Args:
      sequence_length: length for the model, written if the tokenizer came without a configuration.

    Raises:
      ValueError: the folder is no prepared text.
    """
    meta = text.read_meta(folder)
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if _CONFIG not in files:
        fields = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": meta.end_of_text,
            "eos_token": meta.end_of_text,
            "model_max_length": sequence_length,
            "clean_up_tokenization_spaces": False,
        }
        files[_CONFIG] = (json.dumps(fields, indent=2) + "\n").encode()
    return Exported(files, text.token_ids(folder), meta.tokenizer_sha256)


def _whole_texts(folder: Path) -> Tokenizer:
    tokenizer = prepared.open_tokenizer(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens(folder: Path) -> dict[str, str]:
    """Reads the special tokens, each written as text or as an object with its content."""
    names = {}
    for file in (_SPECIAL, _CONFIG):
        fields = _json(folder / file)
        for name in _NAMES:
            token = fields.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                names[name] = token
    return names


def template(folder: Path) -> str:
    """Reads the template in which the tokenizer's model reads conversations.

    Raises:
      ValueError: there is none.
    """
    if (path := folder / _TEMPLATE).is_file():
        try:
            return read_bytes(path).decode("utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}.") from error
    source = _json(folder / _CONFIG).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = (entry for entry in source if isinstance(entry, dict))
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ValueError(
            f"--tokenizer={folder} holds no chat template: neither {_TEMPLATE}, nor a "
            f"chat_template in {_CONFIG}."
        )
    return source


def _config_ids(folder: Path) -> dict[str, Any]:
    """Reads the tokens with which the model beside the tokenizer begins, ends and fills a text."""
    fields = _json(folder / "config.json")
    return {name: fields.get(f"{name}_token_id") for name in _NAMES}


def _json(path: Path) -> dict[str, Any]:
    try:
        fields = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    return fields if isinstance(fields, dict) else {}
