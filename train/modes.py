"""The two modes of training: the pipeline drains in every step, or never.

The loop knows only a `Mode`, and does not look into what its steps *carry*. A mode begins from a
`TrainState` and can be settled into one. Synchronous and asynchronous steps can therefore follow
each other (PipeMare's T3), and evaluation, samples and the last checkpoint are the same for both.
"""

from __future__ import annotations

import abc
import math
import re
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import keystr

from jaxpipe import AsyncPipeline
from models.types import PyTree
from train import pipeline_section
from train.config import Config
from train.step import Key, Leaf, Setup, TrainState, Values, named, with_sharding

_CARRIED = {
    "weights": "weights",
    "delta": "T2's mean steps",
    "owned": "optimizer state",
    "rest": "optimizer state",
    "states": "states of layers",
    "recent": "rows and keys in flight",
    "clock": "clock",
    "flight": "activations in flight",
    "flight.states": "states of layers",
    "flight.read_states": "states of layers",
    "flight.gradients": "gradient sums",
    "flight.outer_gradients": "gradient sums",
}
"""Names of the parts of an asynchronous pipeline's state, as --dry-run shows them."""


class Mode(abc.ABC):
    """A way of running training steps.

    Attributes:
      first: the number of steps done when the pipeline was last empty.
    """

    first = 0

    def __init__(self, setup: Setup) -> None:
        self.setup, self.config = setup, setup.config

    @abc.abstractmethod
    def begin(self, state: TrainState, step: int) -> PyTree:
        """Makes the carried state of the steps after this one."""

    @abc.abstractmethod
    def compile(self) -> jax.stages.Compiled:
        """Compiles ``(carried, batch, rng) -> (carried, values)``, which donates ``carried``."""

    @abc.abstractmethod
    def settle(self, carried: PyTree) -> tuple[TrainState, np.ndarray]:
        """Returns the state after every batch that has entered, and the losses that were pending.

        What is carried does not change, so that training can continue from it.
        """

    @property
    @abc.abstractmethod
    def saved_shapes(self) -> PyTree:
        """Shapes and shardings of the arrays that `to_saved` returns."""

    @abc.abstractmethod
    def to_saved(self, carried: PyTree) -> PyTree:
        """Makes the arrays that a checkpoint holds."""

    @abc.abstractmethod
    def from_saved(self, saved: PyTree, step: int) -> PyTree:
        """Undoes `to_saved`; ``step`` is the number of steps done."""

    def layout(self) -> dict[str, Any] | None:
        """Returns the only layout that can continue what is saved; None if any can."""
        return None

    def loss_step(self, step: int) -> int | None:
        """Returns the step whose loss a step yields; None while the pipeline fills."""
        return step

    @abc.abstractmethod
    def bubble(self, step: int) -> float:
        """Predicts the share of idle time in a step from the schedule and the stages' costs."""

    def metrics(self, step: int, values: dict[str, jax.Array]) -> dict[str, Any]:
        """Returns the numbers to record of a step in addition to loss and gradient norm."""
        del step, values
        return {}


class Synchronous(Mode):
    """Every step drains the pipeline. Steps carry the `TrainState`."""

    def begin(self, state: TrainState, step: int) -> TrainState:
        self.first = step
        return state

    def compile(self) -> jax.stages.Compiled:
        return self.setup.compile()

    def settle(self, carried: PyTree) -> tuple[TrainState, np.ndarray]:
        return carried, np.zeros(0)

    @property
    def saved_shapes(self) -> PyTree:
        return self.setup.canonical_shapes

    def to_saved(self, carried: PyTree) -> PyTree:
        return self.setup.to_canonical(carried)

    def from_saved(self, saved: PyTree, step: int) -> TrainState:
        return self.begin(self.setup.from_canonical(saved), step)

    def bubble(self, step: int) -> float:
        return self.setup.timeline.bubble_ratio


class Asynchronous(Mode):
    """The pipeline never drains. Steps carry everything in flight."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        steps, decay = pipeline_section.techniques(self.config)
        self.training = AsyncPipeline(
            setup.pipe,
            setup.make_optimizer(clips=False),
            method=self.config.pipeline.schedule,
            rescheduling_steps=steps,
            discrepancy_decay=decay,
            recompute_segment=self.config.asynchronous.recompute_segment,
            clip_norm=self.config.optimizer.clip_norm or None,
        )
        self.steady = self.training.steady

    def begin(self, state: TrainState, step: int) -> PyTree:
        self.first = step
        return self._fill(state, self.setup.rng(0), step - self.config.asynchronous.warmup_steps)

    def _fill(self, state: TrainState, rng: Key, step: int) -> PyTree:
        return self.training.init(
            state.params,
            state.optimizer,
            self.setup.batch_shapes,
            rng,
            states=state.layers,
            step=step,
        )

    @cached_property
    def shapes(self) -> PyTree:
        """Shapes and shardings of the carried state."""
        shapes = jax.eval_shape(self._fill, self.setup.state_shapes, self.setup.rng_shape, 0)

        def of(sharding: NamedSharding, part: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: with_sharding(leaf, sharding), part)

        return jax.tree.map(of, self.training.state_shardings, shapes)

    @property
    def _shardings(self) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.sharding, self.shapes)

    def compile(self) -> jax.stages.Compiled:
        def step(carried: PyTree, batch: PyTree, rng: Key) -> tuple[PyTree, Values]:
            carried, value = self.training.step(carried, batch, rng)
            values, _ = named(value, None)
            values["correction"] = self.training.discrepancy(carried)
            if self.config.optimizer.clip_norm:  # only then it is measured
                values["grad_norm"] = self.training.grad_norm(carried)
            return carried, values

        shardings = self._shardings, self.setup.replicated
        jitted = jax.jit(step, donate_argnums=0, out_shardings=shardings)
        return jitted.lower(self.shapes, self.setup.batch_shapes, self.setup.rng_shape).compile()

    @cached_property
    def _settle(self) -> jax.stages.Wrapped:
        def settle(carried: PyTree) -> tuple[TrainState, np.ndarray]:
            carried, value = self.training.drain(carried)
            losses = named(value, None)[0]["loss"]
            params, optimizer = self.training.finish(carried)
            return TrainState(params, optimizer, carried["states"]), losses

        shardings = self.setup.state_shardings, self.setup.replicated
        return jax.jit(settle, out_shardings=shardings)

    def settle(self, carried: PyTree) -> tuple[TrainState, np.ndarray]:
        state, losses = self._settle(carried)
        return state, np.asarray(losses)

    @cached_property
    def saved_shapes(self) -> PyTree:
        return {
            name: with_sharding(jax.eval_shape(_saved, leaf), leaf.sharding)
            for name, leaf in _by_name(self.shapes).items()
        }

    def to_saved(self, carried: PyTree) -> PyTree:
        return {name: _saved(leaf) for name, leaf in _by_name(carried).items()}

    def from_saved(self, saved: PyTree, step: int) -> PyTree:
        shapes = _by_name(self.shapes)

        def restore(saved: PyTree) -> PyTree:
            def leaf(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
                if (
                    name not in saved
                ):  # saved when states of layers had one value for all data shards
                    return jnp.broadcast_to(saved[name.removeprefix("flight.")], shape.shape)
                return jax.random.wrap_key_data(saved[name]) if _is_key(shape) else saved[name]

            leaves = [leaf(name, shape) for name, shape in shapes.items()]
            return jax.tree.unflatten(jax.tree.structure(self.shapes), leaves)

        carried = jax.jit(restore, out_shardings=self._shardings)(saved)
        self.first = step - int(carried["clock"]["entered"]) // self.steady.num_microbatches
        return carried

    def layout(self) -> dict[str, Any] | None:
        return layout_of(self.setup)

    def loss_step(self, step: int) -> int | None:
        left = step - self.steady.loss_lag
        return left if left > self.first else None

    @cached_property
    def _full_utilization(self) -> float:
        return self.steady.full_utilization(self.setup.chunk_costs)

    def _utilization(self, step: int) -> float:
        return self._full_utilization * self.steady.work_ratio(step - self.first - 1)

    def bubble(self, step: int) -> float:
        return 1 - self._utilization(step)

    def metrics(self, step: int, values: dict[str, jax.Array]) -> dict[str, Any]:
        delays = np.minimum(self.training.delays, step - self.first - 1).mean(axis=1)
        return {
            "loss_step": self.loss_step(step),
            "delays": delays.tolist(),
            "utilization": self._utilization(step),
            "correction": np.asarray(values["correction"]).tolist(),
            "weight_versions": self.steady.num_versions,
            "weight_bytes": self.weight_bytes,
        }

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all versions of all weights and of T2's mean steps, over all devices."""
        kept = self.shapes["weights"], self.shapes["delta"]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))

    def carried_bytes(self) -> dict[str, int]:
        """Returns the bytes that each device carries from step to step, by kind."""
        sizes: dict[str, int] = {}
        for path, leaf in self.saved_shapes.items():
            part, *rest = path.split(".")
            kind = _CARRIED.get(".".join([part, *rest[:1]]), _CARRIED[part])
            sizes[kind] = sizes.get(kind, 0) + device_bytes(leaf)
        return sizes


class Modes:
    """The modes of a run, each made when first needed."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @cached_property
    def synchronous(self) -> Synchronous:
        return Synchronous(self._setup)

    @cached_property
    def asynchronous(self) -> Asynchronous:
        return Asynchronous(self._setup)

    def after(self, step: int) -> Mode:
        """Returns the mode of the next step, given the number of steps done."""
        config = self._setup.config
        if pipeline_section.is_asynchronous(config) and step >= config.asynchronous.warmup_steps:
            return self.asynchronous
        return self.synchronous


def layout_of(setup: Setup) -> dict[str, Any]:
    """Returns the fields that decide the shapes and the meaning of what is in flight, by path."""
    config: Config = setup.config
    fields = [
        *("mesh.stage", "mesh.data", "mesh.replica", "pipeline.schedule", "pipeline.microbatches"),
        *("pipeline.zero", "train.batch_size", "asynchronous.warmup_steps"),
    ]
    flat = config.flat()
    layout = {path: flat[path] for path in fields}
    layout["pipeline.remat"] = setup.pipe.options.remat
    layout["pipeline.partition"] = ",".join(map(str, setup.layer_counts))
    if pipeline_section.is_asynchronous(config):
        layout["asynchronous.discrepancy_decay"] = pipeline_section.techniques(config)[1] or 0.0
        layout["asynchronous.recompute_segment"] = flat["asynchronous.recompute_segment"]
    if "model.dropout" in flat:
        layout["model.dropout"] = flat["model.dropout"]
    return layout


def device_bytes(shapes: PyTree) -> int:
    """Returns the bytes per device of arrays with these shapes and shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by path, in the order of the tree."""

    def name(path: tuple[Any, ...]) -> str:
        # In checkpoints, states of layers have no part "layers", as before they were `Placed`.
        return re.sub(r"^states\.layers\b", "states", keystr(path, simple=True, separator="."))

    return {name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _saved(leaf: jax.Array) -> jax.Array:
    """Copies a leaf to save, since the next step may overwrite the array itself."""
    return jax.random.key_data(leaf) if _is_key(leaf) else jnp.copy(leaf)
