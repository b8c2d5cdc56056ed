"""The fields of a ``config.json``, each checked for its type and named if it is wrong."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxpipe.errors import shown

_LARGEST = 10**7
"""Largest size: a larger one is a mistake, and would take long to refuse by its tensors."""
_MOST_LAYERS = 10**4
_MISSING = object()
NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
"""Names of the number of layers."""

Id = int | list[int] | None


class TokenIds(NamedTuple):
    """The tokens with a meaning; None where a model has none, and a list for several ends."""

    bos: Id = None
    eos: Id = None
    pad: Id = None


class Fields:
    """Fields of ``config.json``, or of a part of it.

    Args:
      file: the file from which they were read, for messages.
      values: values by name.
      tensors: names of the model's tensors, which say what a config does not.
    """

    def __init__(
        self, file: Path, values: Mapping[str, Any], tensors: Collection[str] = ()
    ) -> None:
        self._file, self._values, self.tensors = file, values, tensors

    def get(self, name: str, default: Any = _MISSING) -> Any:
        """Returns the value as it is; raises ValueError if it is missing and has no default."""
        value = self._values.get(name, default)
        if value is _MISSING:
            raise ValueError(f"{self._file} lacks {name!r}.")
        return value

    def part(self, name: str) -> Fields:
        """Returns an object among the values; an empty one if it is missing or null."""
        value = self.get(name, None)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(self._file, value or {}, self.tensors)

    def extended(self, **values: Any) -> Fields:
        """Adds further fields, which lie deeper in the file."""
        return Fields(self._file, {**self._values, **values}, self.tensors)

    def completed(self, **values: Any) -> Fields:
        """Adds values for fields that are missing."""
        return Fields(self._file, {**values, **self._values}, self.tensors)

    @property
    def count(self) -> int:
        """Number of fields."""
        return len(self._values)

    def layers(self, name: str) -> int:
        """Reads a number of layers."""
        return self._whole(name, self.get(name), most=_MOST_LAYERS)

    @property
    def num_layers(self) -> int:
        """The number of layers, by the first of its names that is there."""
        return next(self.layers(n) for n in NUM_LAYERS if self.get(n, None) is not None)

    def size(self, name: str) -> int:
        """Reads a size that must be there."""
        return self._whole(name, self.get(name), most=_LARGEST)

    def count_or_none(self, name: str) -> int | None:
        """Reads a number of things; None if it is 0, missing or null."""
        return None if self.get(name, None) in (0, None) else self.size(name)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Reads a list of finite numbers."""
        values = self.get(name)
        if not isinstance(values, list):
            raise self.wrong(name, values, "a list of numbers")
        one = Fields(self._file, {f"{name}[{n}]": value for n, value in enumerate(values)})
        return tuple(one.number(name) for name in one._values)

    def choices(self, name: str, allowed: Collection[Any], length: int) -> list[Any]:
        """Reads a list of so many values, each one of some."""
        values = self.get(name)
        is_list = isinstance(values, list) and len(values) == length
        if not is_list or not all(value in allowed for value in values):
            rule = f"a list of {length}, each {' or '.join(map(repr, allowed))}"
            raise self.wrong(name, values, rule)
        return list(values)

    def size_or_none(self, name: str) -> int | None:
        """Reads a size that may be missing or null."""
        return None if self.get(name, None) is None else self.size(name)

    def number(self, name: str, default: Any = _MISSING) -> float:
        """Reads a finite number, whole or not."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, value, "a number")
        if not abs(value) <= sys.float_info.max:
            raise self.wrong(name, value, "a finite number")
        return value

    def flag(self, name: str) -> bool:
        """Reads true or false; false if the field is missing."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def require(self, **allowed: tuple[Any, ...]) -> None:
        """Raises ValueError unless every field has an allowed value, the first by default."""
        failures = [
            f"{self._file} has {name}={shown(self._values[name])}; it can only be read with "
            f"{' or '.join(map(repr, values))}."
            for name, values in allowed.items()
            if self._values.get(name, values[0]) not in values
        ]
        if failures:
            raise ValueError("\n".join(failures))

    def token_ids(self, defaults: TokenIds) -> TokenIds:
        """Reads the tokens with a meaning; an id outside the vocabulary means none.

        Args:
          defaults: the library's ids for fields that are missing.
        """
        vocab_size = self.size("vocab_size")
        fields = {f"{name}_token_id": ids for name, ids in defaults._asdict().items()}
        ids_of = {name: self.get(name, ids) for name, ids in fields.items()}
        for name, ids in ids_of.items():
            numbers = ids if isinstance(ids, list) else [] if ids is None else [ids]
            if not all(type(number) is int for number in numbers):
                raise self.wrong(name, ids, "a whole number, a list of them, or null")
        return TokenIds(*(_within(ids, vocab_size) for ids in ids_of.values()))

    def _whole(self, name: str, value: Any, *, most: int) -> int:
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(name, value, f"a whole number from 1 to {most}")
        return value

    def wrong(self, name: str, value: Any, rule: str) -> ValueError:
        """Makes the error that a field has a wrong value."""
        return ValueError(f"{self._file} has {name}={shown(value)}; it must be {rule}.")


def _within(ids: Any, vocab_size: int) -> Id:
    if isinstance(ids, list):
        return [token for token in ids if _within(token, vocab_size) is not None] or None
    return ids if type(ids) is int and 0 <= ids < vocab_size else None


def token_id_fields(ids: TokenIds, vocab_size: int) -> dict[str, Id]:
    """Makes the fields to write; null where there is no id, as the library has its own defaults.

    Raises:
      ValueError: an id outside the vocabulary.
    """
    wrong = [
        f"token_ids.{name}={value!r} must lie below vocab_size={vocab_size}, each at least 0."
        for name, value in ids._asdict().items()
        if value != _within(value, vocab_size)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    return {f"{name}_token_id": value for name, value in ids._asdict().items()}
