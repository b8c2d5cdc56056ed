"""The command line: ``python -m train.prepare [text | images | translation] --out FOLDER``."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from train.data.folder import KINDS
from train.prepare import images, text, translation

_COMMANDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "text": (text.PrepareOptions, text.prepare),
    "images": (images.ImageOptions, images.prepare),
    "translation": (translation.TranslationOptions, translation.prepare),
}
assert tuple(_COMMANDS) == KINDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 2 after a message when the input or the disk is at fault."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    kind = KINDS[0] if not arguments or arguments[0].startswith("-") else arguments.pop(0)
    if kind not in _COMMANDS:
        near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]
        known = ", ".join(KINDS)
        print(
            f"error: {kind!r} is not a kind of data: there are {known} (the default is "
            f"{KINDS[0]}). Nearest valid: {near}.",
            file=sys.stderr,
        )
        return 2
    options_type, prepare = _COMMANDS[kind]
    program = "python -m train.prepare [text | images | translation]"
    options = tyro.cli(options_type, args=arguments, prog=program)
    try:
        prepare(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: --out={options.out}: cannot write: {error.strerror or error}.", file=sys.stderr
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
