"""Conversations for instruction tuning, laid out by the chat template of a tokenizer.

A line of the file is one conversation: ``{"messages": [{"role": "user", "content": "..."}, ...]}``.
Only what the model itself would write is predicted: the messages of the role ``assistant``, with
all that the template writes from the point at which it asks for an answer, such as the token that
ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from train.data import tokenizer_files
from train.data.folder import require
from train.data.text import ANSWER, BEGIN, PROMPT

_GROUP = 32
"""Conversations encoded at a time, in parallel."""

Messages = Sequence[Mapping[str, Any]]


class Document(NamedTuple):
    """A conversation as text, with the ranges of characters that the model writes."""

    text: str
    answers: list[tuple[int, int]]


class ChatTemplate:
    """The Jinja template in which a tokenizer's model reads conversations, run in Jinja's sandbox.

    The template knows no date, so that the same conversations always give the same text.

    Args:
      folder: holds ``chat_template.jinja``, or ``tokenizer_config.json`` with a ``chat_template``.

    Raises:
      ValueError: there is no template, or it is none that Jinja reads.
    """

    def __init__(self, folder: Path) -> None:
        jinja2 = require("jinja2", extra="chat", needed_by="--conversations")
        sandbox = require("jinja2.sandbox", extra="chat", needed_by="--conversations")
        # As the transformers library reads templates.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        # A block that marks answers, for the transformers library's own masks.
        source = re.sub(r"{%(-?)\s*generation\b", r"{%\1 if true", tokenizer_files.template(folder))
        source = re.sub(r"{%(-?)\s*endgeneration\b", r"{%\1 endif", source)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"The chat template of {folder} cannot be read: {error}.") from error
        names = tokenizer_files.special_tokens(folder)
        self._tokens = {f"{name}_token": token for name, token in names.items()}
        self._errors = (jinja2.TemplateError, TypeError)

    def _text(self, messages: Messages, *, asks: bool = False) -> str:
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=asks, **self._tokens
            )
        except self._errors as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
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


def read(path: Path) -> dict[int, str]:
    """Reads the lines of a file that are not empty, by number from 1.

    Raises:
      ValueError: it cannot be read, or holds fewer than two, of which one is held out.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--conversations={path} cannot be read: {error}.") from error
    numbered = {number: line for number, line in enumerate(lines, 1) if line.strip()}
    if len(numbered) < 2:
        raise ValueError(
            f"--conversations={path} holds {len(numbered)} conversations. At least 2 are needed, "
            "of which one is held out."
        )
    return numbered


def laid_out(template: ChatTemplate, line: str) -> list[Document]:
    """Lays out a line of the file; raises ValueError if it is no conversation."""
    try:
        messages = json.loads(line)["messages"]
        if not all(isinstance(message["role"], str) for message in messages):
            raise TypeError("a role is no text")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        rule = 'every line must be {"messages": [{"role": "user", "content": "..."}, ...]}'
        raise ValueError(f"{rule} ({type(error).__name__}: {error})") from error
    return template.documents(messages)


def encode(
    tokenizer: Tokenizer, documents: Sequence[Document], *, advance: Callable[[int], object]
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes documents one after the other, with the special tokens that the template writes.

    Args:
      tokenizer: the tokenizer.
      documents: at least one.
      advance: told how many further documents are done.

    Returns:
      Tokens and their roles, uint32 ``[num_tokens]`` each.
    """
    tokenizer.encode_special_tokens = False
    tokens, roles = [], []
    for start in range(0, len(documents), _GROUP):
        group = documents[start : start + _GROUP]
        texts = [document.text for document in group]
        for document, encoding in zip(
            group, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            begins = np.array([first for first, _ in encoding.offsets])
            role = np.full(len(begins), PROMPT, np.uint32)
            for first, end in document.answers:
                role[(first <= begins) & (begins < end)] = ANSWER
            role[0] = BEGIN
            tokens.append(np.array(encoding.ids, np.uint32))
            roles.append(role)
        advance(len(group))
    return np.concatenate(tokens), np.concatenate(roles)
