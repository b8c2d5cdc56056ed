"""Calls of a model's functions, and errors that say why one of them cannot be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import jax

from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.trees import describe
from jaxpipe.runtime.types import Shapes, Tree

_ARGUMENTS = {
    "embed": ("outer", "microbatch", "rng"),
    "layer": ("layer_params", "x", "microbatch", "rng"),
    "head_loss": ("outer", "x", "microbatch", "rng"),
}


def misfits(model: Model) -> Iterator[str]:
    """Says which functions of a model cannot be called with the arguments that they are given."""
    layers = [("layer", model.layer)]
    if not model.layers_are_alike:
        layers = [(f"layer[{n}]", function) for n, function in enumerate(model.layer)]
    for name, function in (("embed", model.embed), *layers, ("head_loss", model.head_loss)):
        kind = name.partition("[")[0]
        arguments = _ARGUMENTS[kind] + (("state",) if kind == "layer" and model.stateful else ())
        call = f"{kind}({', '.join(arguments)})"
        if not callable(function):
            yield f"Model.{name} is a {type(function).__name__}; it must be a function {call}."
            continue
        try:
            inspect.signature(function).bind(*arguments)
            if kind == "layer" and model.carry is not None:
                arguments += "carry", "start"
                call = f"{kind}({', '.join(arguments)})"
                inspect.signature(function).bind(*arguments)
        except TypeError as error:
            whole = kind == "layer" and model.carry is not None and "carry" not in arguments
            note = " A layer with a carry also runs whole sequences, without one." if whole else ""
            yield f"Model.{name} cannot be called as {call}: {error}.{note}"
        except ValueError:  # some built-in functions do not say what they take
            continue


def output_shapes(
    name: str, function: Callable[..., Tree], *, giver: str | None = None, **arguments: Shapes
) -> Shapes:
    """Computes the shapes of what a function of the model returns.

    Args:
      name: name of the function in errors.
      function: takes the arguments by position, in their order.
      giver: what returned the argument ``x``, for errors.
      arguments: shapes, by the names of the documentation.

    Raises:
      ValueError: the function raised an error; the message says what it was given.
    """
    try:
        return jax.eval_shape(function, *arguments.values())
    except Exception as error:  # a user's function may raise anything
        reason = _reason(name, function, giver, arguments, error)
        labels = {"x": f"x, from {giver}"}
        given = (f"  {labels.get(k, k)}: {describe(v)}" for k, v in arguments.items())
        raise ValueError("\n".join([reason, f"{name} was given", *given])) from error


def _reason(
    name: str,
    function: Callable[..., Tree],
    giver: str | None,
    arguments: dict[str, Shapes],
    error: Exception,
) -> str:
    if arguments["rng"] is None and _runs_with_a_key(function, arguments):
        return (
            f"{name} needs a random key, but rng=None ({type(error).__name__}: {error}). Call the "
            "step with rng=jax.random.key(number of the step)."
        )
    if isinstance(error, KeyError):
        return f"{name} reads the key {error}, which is missing."
    if giver is not None and isinstance(error, (TypeError, ValueError)):
        return f"{name} cannot take what {giver} returns, {describe(arguments['x'])}: {error}"
    return f"{name} raised {type(error).__name__}: {error}"


def _runs_with_a_key(function: Callable[..., Tree], arguments: dict[str, Shapes]) -> bool:
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        jax.eval_shape(function, *(arguments | {"rng": key}).values())
    except Exception:  # whatever it is, a key does not help
        return False
    return True
