"""The command line: ``python -m train.prepare [text | images | translation] --out FOLDER``.

``python -m train.prepare --config FILE`` prepares what ``data.prepare`` and ``data.path`` of a
configuration say, if they say anything.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from jaxpipe.errors import printable
from train.config import DataConfig
from train.config_file import load_yaml, validate
from train.data.folder import KINDS
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
    if arguments[:1] == ["--config"] and len(arguments) == 2:
        try:
            data = _data_section(Path(arguments[1]))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if data.prepare is None:
            print(f"{arguments[1]} names no data.prepare: its data is yours to prepare")
            return 0
        arguments = [*shlex.split(data.prepare), "--out", data.path]
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


def _data_section(path: Path) -> DataConfig:
    """The section of a file that says how to prepare its data; training checks the others."""
    config, failures = validate({"data": load_yaml(path).get("data", {})}, source=str(path))
    if failures:
        raise ConfigError(failures)
    return config.data


if __name__ == "__main__":
    sys.exit(main())
