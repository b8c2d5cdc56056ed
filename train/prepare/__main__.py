"""The command line: ``python -m train.prepare [text | images | translation] --out FOLDER``.

``python -m train.prepare --config FILE`` prepares what ``data.prepare`` and ``data.path`` of a
configuration say, if they say anything; for a text with the tokenizer of ``init_from``, if it has
one. Of the trainer's options behind it, ``--data.path`` and ``--init-from`` are read.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from jaxpipe.errors import printable
from train.config_file import load_yaml, validate
from train.data.folder import KINDS, TOKENIZER_FILE
from train.errors import ConfigError
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
    if arguments[:1] == ["--config"] and len(arguments) > 1:
        try:
            of_config = _arguments(arguments)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if of_config is None:
            print(f"{arguments[1]} names no data.prepare: its data is yours to prepare")
            return 0
        arguments = of_config
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
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: --out={options.out}: cannot write: {error.strerror or error}.", file=sys.stderr
        )
        return 2
    return 0


def _arguments(given: Sequence[str]) -> list[str] | None:
    """Makes the arguments that a configuration names, if any; training checks its other sections.

    Raises:
      ConfigError: the file cannot be read, or its data section is wrong.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--config", "--init-from", "--data.path"):
        finder.add_argument(option)
    options = vars(finder.parse_known_args(given)[0])
    raw = load_yaml(Path(options["config"]))
    config, failures = validate({"data": raw.get("data", {})}, source=options["config"])
    if failures:
        raise ConfigError(failures)
    if config.data.prepare is None:
        return None
    arguments = [
        *shlex.split(config.data.prepare),
        "--out",
        options["data.path"] or config.data.path,
    ]
    weights = Path(str(options["init_from"] or raw.get("init_from")))
    if arguments[0] == KINDS[0] and (weights / TOKENIZER_FILE).is_file():
        arguments += ["--tokenizer", str(weights)]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
