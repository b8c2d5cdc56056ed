"""Which parameters are trained: chosen by path, or by a function."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxpipe.runtime.trees import describe, shape_of
from jaxpipe.runtime.types import Params

Trainable: TypeAlias = str | Sequence[str] | Callable[[str, jax.ShapeDtypeStruct], bool] | None
"""Patterns of paths such as ``"layers/*/lora_*"``, in which ``*`` stands for any text; or
``trainable(path, shape) -> bool``; or None for all parameters."""


def partition(params: Params, trainable: Trainable) -> tuple[Params, Params]:
    """The parameters that are trained and the others, each with None in place of the rest.

    Args:
      params: canonical parameters, or their shapes. A path joins names with slashes,
        ``"layers/attention/lora_a"``; where every layer has a tree of its own, the layer's number
        comes second, ``"layers/3/attention/lora_a"``.
      trainable: which are trained.

    Example:
      >>> params = {"embed": 1.0, "layers": {"w": 2.0, "lora_a": 3.0}, "head": 4.0}
      >>> trained, frozen = partition(params, ["*lora_*", "head"])
      >>> trained
      {'embed': None, 'head': 4.0, 'layers': {'lora_a': 3.0, 'w': None}}
      >>> frozen
      {'embed': 1.0, 'head': None, 'layers': {'lora_a': None, 'w': 2.0}}
    """
    chosen = jax.tree.map_with_path(
        lambda path, leaf: _is_chosen(_name(path), leaf, trainable), params
    )
    trained = jax.tree.map(lambda yes, leaf: leaf if yes else None, chosen, params)
    frozen = jax.tree.map(lambda yes, leaf: None if yes else leaf, chosen, params)
    return trained, frozen


def problems(params: Params, trainable: Trainable) -> Iterator[str]:
    """What is wrong with the choice for these parameters."""
    if not (trainable is None or callable(trainable) or _are_patterns(trainable)):
        yield (
            f"trainable is {trainable!r}; give a pattern of paths such as 'layers/*/lora_*', "
            "several in a list, or a function of a path and a shape."
        )
        return
    trained, _ = partition(params, trainable)
    leaves = jax.tree.leaves_with_path(trained)
    names = [_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    if not leaves and names:
        yield f"trainable={trainable!r} chooses none of the parameters.\n{_examples(names)}"
    elif not callable(trainable):
        for pattern in _patterns(trainable or ()):
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                yield f"trainable: {pattern!r} is the path of no parameter.\n{_examples(names)}"
    for path, leaf in leaves:
        shape = shape_of(leaf)
        if shape is not None and not jnp.issubdtype(shape.dtype, jnp.inexact):
            yield (
                f"params{jax.tree_util.keystr(path)} is {describe(shape)}; parameters that are "
                "trained must be floating point. Choose the others with `trainable`, or let the "
                "model's functions close over constants."
            )


def _is_chosen(name: str, leaf: Any, trainable: Trainable) -> bool:
    if trainable is None:
        return True
    if callable(trainable):
        return bool(trainable(name, leaf))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _patterns(trainable))


def _patterns(trainable: Any) -> Sequence[Any]:
    return [trainable] if isinstance(trainable, str) else list(trainable)


def _are_patterns(trainable: Any) -> bool:
    is_sequence = isinstance(trainable, (str, list, tuple))
    return is_sequence and all(isinstance(pattern, str) for pattern in trainable)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _examples(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"Paths: {shown}{', ...' if len(names) > 8 else '.'}"
