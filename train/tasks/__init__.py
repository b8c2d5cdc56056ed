"""Tasks, one per file: model families with their data and score.

A file defines one subclass of `train.task.Task`. `find` looks it up by the name of the file, and
nothing else names it, so that a new family is one new file. A class of your own in another place is
named ``module:Class``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.config import Config
    from train.task import Task


class UnknownTaskError(ValueError):
    """No family has this name.

    Args:
      expected: the valid names, in words.
    """

    def __init__(self, expected: str) -> None:
        self.expected = expected
        super().__init__(expected)


@functools.cache
def names() -> tuple[str, ...]:
    """Returns the names of the families that come with the trainer."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@functools.cache
def find(name: str) -> type[Task]:
    """Imports a family, and with it jax.

    Args:
      name: one of `names`, or ``module:Class``.

    Raises:
      UnknownTaskError: there is no such family.
    """
    module_name, _, class_name = name.partition(":")
    if class_name:
        return _own(module_name, class_name)
    if name not in names():
        *first, last = map(repr, names())
        raise UnknownTaskError(f"{', '.join(first)} or {last}, or module:Class of your own")
    module = importlib.import_module(f"{__name__}.{name}")
    (family,) = _tasks(module).values()
    return family


def alike(name: str, other: str) -> bool:
    """Says whether two families train models of the same kind."""
    return type(find(name).default) is type(find(other).default)


def make(config: Config) -> Task:
    """Makes the task of a configuration.

    Raises:
      ValueError: the model's numbers do not fit together; the message names the fields.
    """
    return find(config.task)(config)


def _own(module_name: str, class_name: str) -> type[Task]:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise  # the module is there, and imports what is not
        raise UnknownTaskError(f"a module that can be imported: {error}") from error
    if class_name not in _tasks(module):
        raise UnknownTaskError(
            f"a subclass of train.task.Task: {module_name} defines no {class_name} that is one"
        )
    return _tasks(module)[class_name]


def _tasks(module: types.ModuleType) -> dict[str, type[Task]]:
    """Lists the families that a module defines, by the names of their classes."""
    from train.task import Task

    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Task)
        and value.__module__ == module.__name__
    }
