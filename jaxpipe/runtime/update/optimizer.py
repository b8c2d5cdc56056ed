"""An optax transformation on placed parameters: it does what it does without a pipeline.

The transformation is traced on parameters with one tree per layer, so that names, shapes and
numbers of dimensions are those of a layer's own parameters, however layers lie on the devices.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import optax

from jaxpipe.runtime import host
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.layout.placing import Placing
from jaxpipe.runtime.layout.whole_model import Layout, TreeLayout, layer_by_layer
from jaxpipe.runtime.trees import mismatches, strongly_typed
from jaxpipe.runtime.types import Gradients, OptimizerState, Params, Shapes, Shardings, Tree
from jaxpipe.runtime.update.per_unit import PerUnit, with_stages, without_stages
from jaxpipe.runtime.update.units import UnitsMeetError
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule.problems import refuse

PARTS = ("layers", "embed", "head")
"""Groups of parameters that may be updated at different times."""


class PlacedOptimizer:
    """An optax transformation, cut into what each layer, the embedding and the head need.

    Args:
      scaled: whether `step` takes a factor for the updates.
      extra: shapes of further arguments of ``optimizer.update``, by name.

    Attributes:
      state: where the optimizer's state lies.
      on_host: whether it is kept on the host.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        params: Layout,
        *,
        zero: Zero,
        scaled: bool = False,
        extra: Shapes = None,
    ) -> None:
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise ValueError(
                f"optimizer is {optimizer!r}; it must be an optax transformation, such as "
                "optax.adam(1e-3)."
            )
        self._optimizer, self._zero, self._scaled, self._extra = optimizer, zero, scaled, extra
        self.on_host = isinstance(optimizer, host.OnHost)
        if self.on_host:
            refuse(host.problems("optimizer", "on_host", params.mesh))
        self._params, self._shapes = params, layer_by_layer(params)
        with _explained():
            self._state_shapes = jax.eval_shape(optimizer.init, self._shapes)
            self.state = TreeLayout(self._state_shapes, params)

    def _cut(self, function: Callable[..., Tree], args: dict[str, Shapes]) -> PerUnit:
        # From ZeRO-1 to 2 data shards have whole the weights that they update in part.
        sharded = self._zero.shards_state
        whole = sharded and not self._zero.shards_weights
        replicated = [list(args).index("params")] if whole else []
        with _explained():
            return PerUnit(function, args, self._params, sharded=sharded, replicated=replicated)

    @cached_property
    def step(self) -> PerUnit:
        """``(grads, params, state, scale, extra) -> (params, state)``, unit by unit."""

        def step(
            grads: Gradients,
            params: Params,
            state: OptimizerState,
            scale: jax.Array | None,
            extra: Tree,
        ) -> tuple[Params, OptimizerState]:
            updates, state = self._optimizer.update(grads, state, params, **(extra or {}))
            if scale is not None:
                updates = jax.tree.map(lambda u: u * scale.astype(u.dtype), updates)
            return optax.apply_updates(params, updates), state

        args = {
            "grads": self._shapes,
            "params": self._shapes,
            "state": self._state_shapes,
            "scale": jax.ShapeDtypeStruct((), "float32") if self._scaled else None,
            "extra": self._extra,
        }
        made = self._cut(step, args)
        if changed := mismatches("state", made.result_shapes[1], args["state"], dtypes=False):
            raise ValueError("\n".join(["This optimizer changes its state's shapes:", *changed]))
        return made

    @cached_property
    def placing(self) -> Placing:
        sharded = self._zero.shards_state
        return Placing(self.state, sharded=sharded, name="state", on_host=self.on_host)

    @cached_property
    def shardings(self) -> Shardings:
        """Shardings of the state while it is updated."""
        return self.state.shardings(sharded=self._zero.shards_state)

    @cached_property
    def program(self) -> Callable[..., Tree]:
        """`update`, jitted as `Assembly.make_program` says."""
        return jax.jit(self._update, inline=True)

    # On placed trees.

    def init(self, params: Placed) -> OptimizerState:
        shapes, _ = self.state.split(self._state_shapes)

        def init(params: Params, components: list[Tree]) -> OptimizerState:
            return self._optimizer.init(params)

        made = self._cut(init, {"params": self._shapes, "components": shapes})
        placed = [layout.placed_shapes() for layout in self.state.components]
        empty = jax.tree.map(jnp.zeros_like, placed)
        return strongly_typed(self.state.join(*made.run([params, *empty], [])))

    def _update(
        self, grads: Gradients, state: OptimizerState, params: Placed, extra: Tree
    ) -> tuple[Placed, OptimizerState]:
        """The parameters and the state after a step."""
        components, rest = self.state.split(state)
        given = [grads, params, *components], [*rest, *jax.tree.leaves(extra)]
        (new, *components), rest = self.step.run(*given)
        return strongly_typed((new, self.state.join(components, rest)))

    # The state part by part, as an asynchronous pipeline carries it.

    def by_part(self, leaves: Sequence[jax.Array]) -> dict[str, list[Tree]]:
        """The components by part, from a device's leaves of all of them; `flat` undoes it."""
        own = list(map(without_stages, self.components(leaves)))
        return {name: [component[name] for component in own] for name in PARTS}

    def flat(self, states: dict[str, list[Tree]]) -> list[jax.Array]:
        parts = zip(*states.values(), strict=True)
        return jax.tree.leaves(
            [with_stages(dict(zip(states, part, strict=True))) for part in parts]
        )

    def components(self, leaves: Sequence[jax.Array]) -> list[Tree]:
        """The state's components, placed, from their leaves."""
        shapes = [layout.placed_shapes() for layout in self.state.components]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def check_parts(self) -> None:
        """Raises ValueError if parts cannot be updated at different times."""
        if self.on_host:
            raise ValueError(
                "jaxpipe.on_host brings the whole state to the devices when all gradients are "
                "there; parts that are updated at different times need it before. Leave it out, or "
                "update after the backward: Pipeline.train_step(optimizer, update='step')."
            )
        if self.step.mixes is not None:
            raise ValueError(
                "This optimizer cannot update a model part by part, as soon as a part's gradient "
                f"is finished: {self.step.mixes} together.\n"
                "AsyncPipeline clips by itself, with clip_norm=...; otherwise update after "
                "the backward: Pipeline.train_step(optimizer, update='step')."
            )


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Says what masks and labels see, if a transformation cannot be traced."""
    try:
        yield
    except UnitsMeetError:
        raise
    except NameError as error:  # of an axis that is not bound
        raise ValueError(
            f"This optimizer communicates between devices ({error}). It is given whole gradients "
            "of all data shards: leave collectives to the pipeline."
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if "required keyword-only argument" in str(error):
            raise ValueError(
                f"This optimizer needs further arguments: {error}. Give them to `pipe.update`, "
                "such as value=loss. They must be arrays: a line search, as of optax.lbfgs, which "
                "evaluates the loss itself, cannot run in a pipeline."
            ) from error
        raise ValueError(
            f"The optimizer cannot be used: {error}\nMasks and labels must fit parameters whose "
            "'layers' are a tuple of one tree per layer; a function of the parameters fits any."
        ) from error
