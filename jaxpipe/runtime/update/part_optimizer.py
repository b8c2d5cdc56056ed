"""An optax optimizer that updates one part of the parameters at a time.

In an asynchronous pipeline, and where a chunk is updated within the step, the layers of a stage,
the embedding and the head are updated in different ticks. What an optimizer keeps per
parameter (moments) belongs to that parameter; the rest (Adam's count) is kept once per part, since
parts may have seen different numbers of updates.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe.runtime.layers.dependence import dependences
from jaxpipe.runtime.types import Gradients, OptimizerState, Params, Placed, Shapes

PARTS = ("layers", "embed", "head")


def owners(state: OptimizerState, params: Shapes) -> list[int | None]:
    """The number of the parameter that each leaf of an optimizer's state belongs to, or None.

    The leaf's path ends with the parameter's, and its shape is the parameter's.
    """
    numbers = {path: n for n, (path, _) in enumerate(jax.tree.leaves_with_path(params))}
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]

    def owner(path: tuple[Any, ...], shape: tuple[int, ...]) -> int | None:
        ends = (numbers.get(path[start:]) for start in range(len(path)))  # the longest first
        return next((n for n in ends if n is not None and shapes[n] == shape), None)

    return [owner(path, leaf.shape) for path, leaf in jax.tree.leaves_with_path(state)]


class PartOptimizer:
    """Updates parts with any transformation that updates every element of a parameter by itself.

    Args:
      optimizer: the transformation, as for the whole tree of parameters.
      params: shapes of the placed parameters, ``{"layers", "embed", "head"}``.

    Attributes:
      owners: for every leaf of the optimizer's state, the number of the parameter it belongs to, or
        None.
      owned: only the numbers.
      state_shapes: shapes of the optimizer's state.

    Raises:
      ValueError: an update that mixes elements or parameters.
    """

    def __init__(self, optimizer: optax.GradientTransformation, params: Shapes) -> None:
        self._optimizer = optimizer
        self._paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        self._tree = jax.tree.structure(params)
        self.state_shapes = jax.eval_shape(optimizer.init, params)
        self.owners = owners(self.state_shapes, params)
        self.owned = [owner for owner in self.owners if owner is not None]
        self._check(params, self.state_shapes)

    def _check(self, params: Shapes, state: Shapes) -> None:
        """Raises if any result depends on another parameter, or on several elements of its own."""
        count = len(self._paths)
        owned = [2 * count + k for k, owner in enumerate(self.owners) if owner is not None]
        owner_of = [*range(count), *range(count), *self.owners]

        def update(gradients: Gradients, params: Params, state: OptimizerState) -> Any:
            return self._optimizer.update(gradients, state, params)

        found = dependences(update, params, params, state, tracked=[*range(2 * count), *owned])
        problems = []
        owners = [*range(count), *self.owners]
        for number, (owner, result) in enumerate(zip(owners, found, strict=True)):
            others = {owner_of[k] for k in result.inputs} - {owner}
            if others or result.mixes is not None:
                what = "state" if owner is None else f"params{self._name(owner)}"
                if number >= count and owner is not None:
                    what = f"the state of {what}"
                through = "" if result.mixes is None else f" through {result.mixes}"
                read = ", ".join(f"params{self._name(k)}" for k in sorted(others)[:2])
                problems.append(f"{what} reads {read or 'several of its elements'}{through}")
        if problems:
            shown = "; ".join(problems[:3]) + ("; ..." if len(problems) > 3 else "")
            raise ValueError(
                "This optimizer cannot update a model part by part: every stage updates layers as "
                "soon as their gradient is finished, and the data axis may split them, so each "
                f"element's update must follow from that element alone, but {shown}.\n"
                "AsyncPipeline clips by itself, with clip_norm=...; otherwise update after "
                "the step, from the gradients of Pipeline.value_and_grad."
            )

    def _name(self, number: int) -> str:
        return jax.tree_util.keystr(self._paths[number])

    @property
    def num_parameters(self) -> int:
        """How many arrays the parameters are."""
        return len(self._paths)

    def part_of(self, number: int) -> str:
        """The part a parameter belongs to, by its number."""
        return str(self._paths[number][0].key)

    def split(self, state: OptimizerState) -> tuple[list[Any], list[Any]]:
        """A state's leaves that belong to a parameter, and the rest."""
        leaves = list(zip(self.owners, jax.tree.leaves(state), strict=True))
        owned = [leaf for owner, leaf in leaves if owner is not None]
        return owned, [leaf for owner, leaf in leaves if owner is None]

    def join(self, owned: list[Any], rest: list[Any]) -> OptimizerState:
        """Undoes `split`."""
        sources = iter(owned), iter(rest)
        leaves = [next(sources[owner is None]) for owner in self.owners]
        return jax.tree.unflatten(jax.tree.structure(self.state_shapes), leaves)

    def update(
        self,
        part: str,
        gradients: Gradients,
        owned: list[Any],
        rest: list[Any],
        params: Placed,
    ) -> tuple[Gradients, list[Any], list[Any]]:
        """One update of a part, with ``rest`` its own copy of leaves that no parameter owns.

        Returns:
          The part's updates, and ``owned`` and ``rest`` with the part's new values.
        """
        # Other parts' results are dropped, and with them whatever they are computed from.
        everything = params | {part: gradients}
        updates, state = self._optimizer.update(everything, self.join(owned, rest), params)
        new_owned, new_rest = self.split(state)
        kept = [
            new if self.part_of(owner) == part else old
            for owner, old, new in zip(self.owned, owned, new_owned, strict=True)
        ]
        return updates[part], kept, new_rest


def apply(params: Placed, updates: Gradients) -> Placed:
    """Parameters with updates added, in the parameters' dtypes."""
    return jax.tree.map(lambda w, u: jnp.asarray(w + u, w.dtype), params, updates)
