"""Conversations for instruction tuning, laid out by the chat template of a tokenizer.

A line of the file is one conversation: ``{"messages": [{"role": "user", "content": "..."}, ...]}``.
Only what the model itself would write is predicted: the messages of the role ``assistant``, with
all that the template writes from the point at which it asks for an answer, such as the token that
ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from tokenizers import Tokenizer

from train.data.folder import ANSWER, BEGIN, PROMPT, require
from train.data.guarded import Guarded
from train.data.rows import read_lines
from train.data.tokenizer import MOST_CHARACTERS, is_whole

SECONDS = 60.0
"""Time to lay out a conversation; most take less than a thousandth of a second."""
_NUM_BYTES = 1 << 30
"""Memory to lay out a conversation."""

Messages = Sequence[Mapping[str, Any]]


class Document(NamedTuple):
    """A conversation as text, with the ranges of characters that the model writes."""

    text: str
    answers: list[tuple[int, int]]


def open_template(source: str, tokens: Mapping[str, str]) -> Guarded:
    """Starts a `ChatTemplate`, which others may have written.

    Raises:
      ValueError: the template cannot be read.
    """
    return Guarded(ChatTemplate, source, tokens, seconds=SECONDS, num_bytes=_NUM_BYTES)


class _Null:
    """JSON's null in a message: as None to a template, but nothing to write."""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __hash__(self) -> int:
        return hash(None)

    def __str__(self) -> NoReturn:
        raise TypeError("it writes null, as Python's None, where a message should have text")


class _List(list[Any]):
    """A list in a message, which a template may read, but not write."""

    def __str__(self) -> NoReturn:
        raise TypeError("it writes a list, as Python does, where a message should have text")


class _Object(dict[str, Any]):
    """An object in a message, which a template may read, but not write."""

    def __str__(self) -> NoReturn:
        raise TypeError("it writes an object, as Python does, where a message should have text")


def _in_json(value: Any) -> None:
    if not isinstance(value, _Null):
        raise TypeError(f"JSON has no {type(value).__name__}")


def _readable(value: Any) -> Any:
    """Returns a value of a message for a template."""
    if isinstance(value, list):
        return _List(value)
    if isinstance(value, dict):
        return _Object(value)
    return _Null() if value is None else value


class ChatTemplate:
    """The Jinja template in which a tokenizer's model reads conversations, run in Jinja's sandbox.

    The template knows no date, so that the same conversations always give the same text.

    Args:
      tokens: special tokens by name, such as "eos".

    Raises:
      ValueError: the template is none that Jinja reads.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        jinja2 = require("jinja2", extra="chat", needed_by="--conversations")
        sandbox = require("jinja2.sandbox", extra="chat", needed_by="--conversations")
        # As the transformers library reads templates.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, default=_in_json, **options
        )
        environment.tests["none"] = lambda value: value is None or isinstance(value, _Null)

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        # A block that marks answers, for the transformers library's own masks.
        source = re.sub(r"{%(-?)\s*generation\b", r"{%\1 if true", source)
        source = re.sub(r"{%(-?)\s*endgeneration\b", r"{%\1 endif", source)
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # Jinja computes what is constant: anything may fail
            raise ValueError(str(error)) from error
        self._tokens = {f"{name}_token": token for name, token in tokens.items()}

    def __call__(self, line: str) -> list[Document]:
        """Lays out a line of the file; raises ValueError if it is no conversation."""
        try:
            messages = json.loads(line)["messages"]
            if not all(isinstance(message["role"], str) for message in messages):
                raise TypeError("a role is not text")
            messages = [
                {name: _readable(value) for name, value in message.items()} for message in messages
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            rule = 'every line must be {"messages": [{"role": "user", "content": "..."}, ...]}'
            raise ValueError(f"{rule} ({type(error).__name__}: {error})") from error
        return self.documents(messages)

    def _text(self, messages: Messages, *, asks: bool = False) -> str:
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=asks, **self._tokens
            )
        except MemoryError:
            raise
        except Exception as error:  # a stranger's program: anything may fail
            raise ValueError(f"the chat template refuses it: {error}") from error
        if len(text) > MOST_CHARACTERS:
            raise ValueError(
                f"the chat template makes {len(text)} characters of it. At most {MOST_CHARACTERS} "
                "can be tokenized"
            )
        if not is_whole(text):
            raise ValueError("it holds half of a character (a lone surrogate)")
        return text

    def documents(self, messages: Messages) -> list[Document]:
        """Lays out a conversation.

        Returns:
          The whole conversation; or, where the template writes an earlier answer in another way
          once more messages follow, a document for each answer, which ends with it.

        Raises:
          ValueError: no message is the assistant's, or the template refuses the conversation or
            does not write an answer where it asks for one.
        """
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not numbers:
            raise ValueError('no message has the role "assistant", so that nothing is predicted')
        documents = []
        for number in numbers:
            asked = self._text(messages[:number], asks=True)
            answered = self._text(messages[: number + 1])
            if not answered.startswith(asked) or answered == asked:
                raise ValueError(
                    f"the chat template does not continue with message {number + 1} what it writes "
                    "when it asks for it (add_generation_prompt)"
                )
            documents.append(Document(answered, [(len(asked), len(answered))]))
        whole = self._text(messages)
        if all(whole.startswith(document.text) for document in documents):
            return [Document(whole, [span for _, spans in documents for span in spans])]
        return documents


def read_pairs(path: Path) -> list[tuple[int, str]]:
    """Reads pairs as lines of conversations, the chosen answer before the rejected one.

    Returns:
      The number of the line and a conversation, twice for each line.

    Raises:
      ValueError: as `read`, or a line is no pair.
    """
    pairs = []
    for number, line in read(path, option="--preferences"):
        try:
            pair = json.loads(line)
            before = _messages(pair.get("prompt", []), "user")
            for answer in ("chosen", "rejected"):
                messages = [*before, *_messages(pair[answer], "assistant")]
                pairs.append((number, json.dumps({"messages": messages})))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            rule = 'every line must be {"chosen": [messages], "rejected": [messages]}'
            raise ValueError(f"--preferences={path}: line {number}: {rule} ({error!r}).") from error
    return pairs


def _messages(given: Any, role: str) -> list[Any]:
    """Makes messages of a text, which then has this role, or leaves a list of them as it is."""
    return [{"role": role, "content": given}] if isinstance(given, str) else list(given)


def read(path: Path, *, option: str = "--conversations") -> list[tuple[int, str]]:
    """Reads the lines of a file that are not empty, each with its number from 1.

    Raises:
      ValueError: it cannot be read, or holds fewer than two, of which one is held out.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            lines = enumerate(read_lines(file), 1)
            numbered = [(number, line.removesuffix("\n")) for number, line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}={path} cannot be read: {error}.") from error
    if len(numbered) < 2:
        raise ValueError(
            f"{option}={path} holds {len(numbered)} {option[2:]}. At least 2 are needed, "
            "of which one is held out."
        )
    return numbered


class Encoder:
    """Encodes documents with the special tokens that the template writes."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer)

    def __call__(self, documents: Sequence[Document]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the tokens of each document and their roles, uint32 ``[num_tokens]`` each."""
        texts = [document.text for document in documents]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.uint32), _roles(document, encoding.offsets))
            for document, encoding in zip(documents, encodings, strict=True)
        ]


def _roles(document: Document, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    begins = np.array([first for first, _ in offsets])
    roles = np.full(len(begins), PROMPT, np.uint32)
    for first, end in document.answers:
        roles[(first <= begins) & (begins < end)] = ANSWER
    roles[:1] = BEGIN
    return roles
