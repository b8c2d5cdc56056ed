"""A file of a run's configuration: how YAML is read, and what is wrong with names and types."""

from __future__ import annotations

import copy
import difflib
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from jaxpipe.errors import shortened, shown
from train.config import Config, remove, upgraded
from train.errors import Failure, refused


def load_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping; an empty file gives an empty one.

    Raises:
      ConfigError: the file is missing, unreadable, not YAML, or names a key twice.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError as error:
        near = sorted(path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        listed = ", ".join(map(str, near)) or "none in its folder"
        raise refused(f"--config={path} does not exist. Files there: {listed}.") from error
    except RecursionError:
        raise refused(f"--config={path} cannot be read as YAML: it nests too deeply.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        if isinstance(error, yaml.MarkedYAMLError):
            error.problem = shortened(error.problem or "")
        raise refused(f"--config={path} cannot be read as YAML: {error}") from error
    if raw is not None and not isinstance(raw, dict):
        raise refused(f"--config={path} must hold sections such as 'mesh:', not {shown(raw)}.")
    return raw or {}


def validate(raw: dict[str, Any], *, source: str) -> tuple[Config, tuple[Failure, ...]]:
    """Checks names and types of a file's content.

    Returns:
      The configuration with defaults in place of what is wrong, and one failure per mistake.
    """
    raw = upgraded(raw)
    try:
        return Config.model_validate(raw), ()
    except pydantic.ValidationError as error:
        problems = error.errors()
    # A value that may be of several types has a problem with each of them.
    places: dict[tuple[int | str, ...], list[Any]] = {}
    for problem in problems:
        places.setdefault(_place(raw, problem["loc"]), []).append(problem)
    cleaned = copy.deepcopy(raw)
    for place in places:
        remove(cleaned, place)
    if ("task",) in places:
        cleaned.pop("model", None)  # whose fields these are is unknown
    config = Config.model_validate(cleaned)
    return config, tuple(_explain(found, place, config, source) for place, found in places.items())


def _place(raw: Any, keys: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Cuts a path to the part that exists; the keys behind it name one of several types."""
    for depth, key in enumerate(keys):
        if not isinstance(raw, dict) or key not in raw:
            return keys[:depth]
        raw = raw[key]
    return keys


_RULES = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "model_type": "must be a section with fields",
    "none_required": "must be null",
}


def _explain(
    problems: Sequence[Any], place: tuple[int | str, ...], config: Config, source: str
) -> Failure:
    problem = problems[0]
    path, value = ".".join(shortened(str(key)) for key in place), problem["input"]
    value = "null" if value is None else shown(value)
    if problem["type"] == "extra_forbidden":
        known = [*Config.model_fields, *config.flat()]
        # The whole path is compared, so that a field in the wrong section is found as well.
        near = difflib.get_close_matches(path, known, n=2, cutoff=0.5) or [
            name for name in known if name.split(".")[-1] == path.split(".")[-1]
        ]
        nearest = f" Nearest valid: {', '.join(near)}." if near else ""
        return Failure(f"{path} in {source} is not a field.{nearest}", (path,))
    first, *others = dict.fromkeys(map(_rule, problems))
    rule = ", or ".join([first, *(other.removeprefix("must be ") for other in others)])
    if words := re.findall(r"'([^']+)'", rule):
        near = difflib.get_close_matches(value, words, n=1, cutoff=0.0)
        rule += f". Nearest valid: {near[0]}" if near else ""
    return Failure(f"{path}={value} in {source}: {rule}.", (path,))


def _rule(problem: Any) -> str:
    if problem["type"] == "literal_error":
        return f"must be one of {problem['ctx']['expected']}"
    if problem["type"] == "string_type" and isinstance(problem["input"], list):
        return f'must be text, such as "{",".join(map(str, problem["input"]))}"'
    return _RULES.get(problem["type"], problem["msg"][:1].lower() + problem["msg"][1:])


class _Loader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 does, and refuses repeated keys."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int | str):
                # Python prints no numbers of thousands of digits, and writes no half characters.
                str(value).encode()
            return value
        # The constructors of scalars raise whatever Python raises: ValueError, KeyError, ...
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown(node.value)} is not a valid {kind}", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for key in keys:
            is_text = key.tag in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
            if not (is_text and isinstance(key, yaml.ScalarNode)):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be text, such as 'mesh'", key.start_mark
                )
        twice = sorted(k for k, count in Counter(key.value for key in keys).items() if count > 1)
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"{', '.join(twice)} is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


# In YAML 1.1, 3e-4 is text, 1:30 is 90, 010 is 8, and 2026-11-30 is a date.
_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)",
    "float": r"[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d+(?=[eE]))(?:[eE][-+]?\d+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_OTHERS = tuple(f"tag:yaml.org,2002:{name}" for name in ("bool", "null", "merge"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag in _OTHERS]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _form in _NUMBERS.items():
    _tag, _pattern = f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_form})$")
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
