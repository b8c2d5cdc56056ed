"""Some of the parameters, chosen by path or by a function: those that are trained, for example."""

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxpipe.runtime.trees import describe, describe_leaf, divide, is_sequence, shape_of
from jaxpipe.runtime.types import Params, Path, Tree

Filter: TypeAlias = str | Sequence[str] | Callable[[str, jax.ShapeDtypeStruct], bool]
"""Patterns of paths such as ``"layers/*/lora_*"``, in which ``*`` stands for any text, or
``chosen(path, shape) -> bool``. Shapes are those of canonical parameters: of stacked layers, with
the dimension of layers."""


OVERWRITE = "_overwrite_with_gradient"
"""Flax's collection of state whose gradient is its new value: scales and histories of the largest
values, for matmuls in 8-bit floats."""
_OVERWRITTEN = re.compile(OVERWRITE + r"|amax_history|Fp8\w*DotGeneralOp_\d")
"""Paths of such state: its collection, or what flax names in it."""
OVERWRITE_RULE = (
    "is overwritten with its gradient by flax, and a pipeline sums gradients over microbatches and "
    "data shards"
)


_STACKED = (
    "The layers are stacked, so that a path holds an array of all of them. To choose single "
    "layers, give params['layers'] as a tuple of one tree per layer, and Model.layer as a tuple of "
    "functions."
)


def choose(params: Params, chosen: Filter) -> Params:
    """The parameters that a filter chooses, None in place of the others.

    Args:
      params: canonical parameters, or their shapes. A path joins names with slashes,
        ``"layers/attention/lora_a"``; where every layer has a tree of its own, the layer's number
        comes second, ``"layers/3/attention/lora_a"``.
      chosen: the filter.

    Example:
      >>> params = {"embed": 1.0, "layers": {"w": 2.0, "lora_a": 3.0}, "head": 4.0}
      >>> choose(params, ["*lora_*", "head"])
      {'embed': None, 'head': 4.0, 'layers': {'lora_a': 3.0, 'w': None}}
    """
    return jax.tree.map_with_path(
        lambda path, leaf: leaf if is_chosen(name_of(path), leaf, chosen) else None, params
    )


def is_chosen(name: str, leaf: jax.ShapeDtypeStruct, chosen: Filter) -> bool:
    """Whether a filter chooses the parameter of that path."""
    if callable(chosen):
        return bool(chosen(name, leaf))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _patterns(chosen))


def split_trainable(params: Params, trainable: Filter | None) -> tuple[Params, Params]:
    """Divides parameters into those that are trained, by default all, and the others."""
    if trainable is None:
        return params, jax.tree.map(lambda _: None, params)
    trained = choose(params, trainable)
    return trained, divide(params, trained)[0]


def problems(name: str, chosen: Filter, params: Params) -> Iterator[str]:
    """Lists problems of a filter, an argument of that name, for these parameters."""
    names = [name_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    if not (callable(chosen) or _are_patterns(chosen)):
        yield (
            f"{name} is {chosen!r}; give a pattern of paths such as 'layers/*/lora_*', several in "
            "a list, or a function of a path and a shape."
        )
    elif callable(chosen):
        for path, leaf in jax.tree.leaves_with_path(params):
            try:
                is_chosen(name_of(path), leaf, chosen)
            except Exception as error:  # a user's function may raise anything
                given = f"{name_of(path)!r}, {describe_leaf(leaf)}"
                yield f"{name}({given}) raised {type(error).__name__}: {error}."
                return
    else:
        for pattern in _patterns(chosen):
            if not any(fnmatch.fnmatchcase(path, pattern) for path in names):
                yield f"{name}: {pattern!r} is the path of no parameter.\n{_examples(names)}"
                if re.match(r"layers/\d", pattern) and not is_sequence(params["layers"]):
                    yield _STACKED


def untrainable(trainable: Filter | None, params: Params) -> Iterator[str]:
    """Yields problems of the parameters that are to be trained."""
    if trainable is not None:
        wrong = list(problems("trainable", trainable, params))
        yield from wrong
        if wrong:
            return
    trained = split_trainable(params, trainable)[0]
    yield from overwritten("params", trained)
    leaves = jax.tree.leaves_with_path(trained)
    if not leaves and jax.tree.leaves(params):
        yield f"trainable={trainable!r} chooses none of the parameters."
    for path, leaf in leaves:
        shape = shape_of(leaf)
        if shape is not None and not jnp.issubdtype(shape.dtype, jnp.inexact):
            yield (
                f"params{jax.tree_util.keystr(path)} is {describe(shape)}; parameters that are "
                "trained must be floating point. Choose the others with `trainable`, or let the "
                "model's functions close over constants."
            )


def overwritten(name: str, tree: Tree) -> Iterator[str]:
    """Says that a tree has leaves whose gradient is their new value."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    found = [path for path in paths if _OVERWRITTEN.search(path)]
    if found:
        others = f" ({len(found)} such arrays)" if len(found) > 1 else ""
        yield (
            f"{name}{found[0]} {OVERWRITE_RULE}{others}. Keep it constant, as a parameter that "
            "`trainable` leaves out, or use matmuls without such state."
        )


def name_of(path: Path) -> str:
    """A path as filters see it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _patterns(chosen: str | Sequence[str]) -> Sequence[str]:
    return [chosen] if isinstance(chosen, str) else list(chosen)


def _are_patterns(chosen: object) -> bool:
    if not isinstance(chosen, (str, list, tuple)):
        return False
    return all(isinstance(pattern, str) for pattern in chosen)


def _examples(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"Paths: {shown}{', ...' if len(names) > 8 else '.'}"
