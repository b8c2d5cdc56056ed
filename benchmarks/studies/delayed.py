"""Training with old weights on one device: what an asynchronous pipeline computes, faster.

A pipeline that never drains trains like one device that keeps its old weights and reads, for every
layer and microbatch, the version that the pipeline would have there. That takes seconds where
simulated devices take minutes, so that learning rates can be tuned and runs repeated. The
derivative is cut by the library's own split; which version is read, and how an update is scaled,
is a `Course`: arrays, one row per optimizer step. `tests/planning/test_pipemare_quality.py` holds
the losses against those of `jaxpipe.AsyncPipeline`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxpipe import Model
from jaxpipe.asynchronous import SteadyState
from jaxpipe.runtime.layers.split import split_layer
from jaxpipe.schedule.actions import Kind

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Course:
    """What every optimizer step reads and how it moves; the parts are the layers, then the head.

    Args:
      forward, backward: updates that the weights read there are missing, int ``[steps,
        microbatches, parts]``.
      rate: the learning rate, ``[steps]``.
      divisor: by which T1 divides it, ``[steps, parts]``.
      correction: tau of T2, or 0, ``[steps, parts]``.
      decay: the share of T2's mean step that is left after an update, ``[steps, parts]``.
    """

    forward: np.ndarray
    backward: np.ndarray
    rate: np.ndarray
    divisor: np.ndarray
    correction: np.ndarray
    decay: np.ndarray

    @property
    def oldest(self) -> int:
        """The most updates that any read is missing."""
        return int(max(self.forward.max(), self.backward.max()))


def course(
    steady: SteadyState | None,
    rate: np.ndarray,
    *,
    layers: int,
    microbatches: int,
    warm_up: int = 0,
    rescheduling_steps: int | None = None,
    discrepancy_decay: float | None = None,
    delays: np.ndarray | None = None,
) -> Course:
    """The course of a pipeline.

    Args:
      steady: the rules of an asynchronous pipeline, or None for a synchronous one. Layers are
        spread evenly over its stages; with more stages than layers, layer l has the delay of the
        stage in which it would begin.
      rate: the learning rate of every step.
      layers: of the model.
      microbatches: of a minibatch; fewer than those of ``steady`` stand for all of them where all
        read the same version, as in 2BW.
      warm_up: T3: steps that are synchronous.
      rescheduling_steps: T1's K, or None.
      discrepancy_decay: T2's D, or None.
      delays: int ``[steps, microbatches, layers]`` in place of those of ``steady``.
    """
    steps = len(rate)
    ages = np.zeros((steps, microbatches, layers + 1), np.int32)
    tau = np.zeros(layers + 1)
    stashes = False
    if steady is not None:
        stages = [steady.stage(n * steady.num_stages // layers) for n in range(layers)]
        parts = [*stages, steady.head]
        tau = np.array([float(steady.mean_delay(part)) for part in parts])
        k = np.arange(steps - warm_up)[:, None]
        g = k * steady.num_microbatches + np.arange(microbatches)
        for n, part in enumerate(parts):
            ages[warm_up:, :, n] = k - steady.version(part, Kind.F, g)
        if delays is not None:
            since = np.maximum(np.arange(steps) - warm_up, 0)[:, None, None]
            ages[..., :layers] = np.minimum(delays, since)
        stashes = steady.method != "pipemare"
    after = np.arange(steps) - warm_up
    divisor = np.ones((steps, layers + 1))
    if rescheduling_steps is not None:
        p = np.where(after < 0, 0, 1 - np.minimum(after / rescheduling_steps, 1))
        divisor = np.maximum(tau, 1) ** p[:, None]
    correction, decay = np.zeros((2, steps, layers + 1))
    if discrepancy_decay is not None:
        on = (after >= 0)[:, None] & (tau > 0)
        correction = np.where(on, tau, 0)
        decay = np.where(on, discrepancy_decay ** (1 / np.maximum(tau, 1e-9)), 0)
    numbers = (np.asarray(a, np.float32) for a in (rate, divisor, correction, decay))
    return Course(ages, ages if stashes else np.zeros_like(ages), *numbers)


@dataclasses.dataclass(frozen=True)
class Curves:
    """What training gives.

    Args:
      losses: of every minibatch, with the weights that its microbatches read, ``[steps]``.
      heldout: losses of the newest weights on the held-out rows, ``[steps / every]``.
      accuracy: the same of the accuracies.
    """

    losses: np.ndarray
    heldout: np.ndarray
    accuracy: np.ndarray


class Training:
    """A model without parameters in its embedding and without a state, trained along courses.

    All courses of one length run in one compiled program, whatever their method.

    Args:
      model: its head returns the loss and the metric "accuracy".
      params: initial parameters, for their shapes.
      rows: rows of a minibatch by name, ``[microbatches, rows, ...]``, for their shapes.
      optimizer: of directions: the rate is the course's.
      oldest: the most updates that a course may miss.
      every: steps from one evaluation to the next.
    """

    def __init__(
        self,
        model: Model,
        params: Tree,
        rows: Tree,
        *,
        optimizer: optax.GradientTransformation,
        oldest: int,
        every: int,
    ) -> None:
        self.model, self.optimizer, self.every = model, optimizer, every
        self.versions = oldest + 1
        self.splits = []
        rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
        x = jax.eval_shape(lambda rows: model.embed({}, rows, None), rows)
        for layer, weights in zip(model.layer, params["layers"], strict=True):
            self.splits.append(split_layer(layer, weights, x, rows, None))
            x = jax.eval_shape(lambda w, x, rows, f=layer: f(w, x, rows, None), weights, x, rows)
        # A step is a call: XLA's convolutions are several times slower inside loops on CPUs.
        self._run = jax.jit(self._step, donate_argnums=0)
        self._evaluate = jax.jit(self._heldout)

    def train(
        self, params: Tree, images: Tree, heldout: Tree, numbers: np.ndarray, along: Course
    ) -> Curves:
        """Trains along a course.

        Args:
          params: initial parameters.
          images, heldout: all rows by name, ``[rows, ...]``.
          numbers: of the rows of every step, int ``[steps, microbatches, rows]``.
          along: the course.

        Raises:
          ValueError: the course reads weights that are not kept any more.
        """
        if along.oldest >= self.versions:
            raise ValueError(
                f"The course misses {along.oldest} updates, and {self.versions - 1} are kept."
            )
        state, losses, evaluations = self._begin((*params["layers"], params["head"])), [], []
        for k, chosen in enumerate(numbers):
            rows = jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen], images)
            now = jax.tree.map(lambda leaf, k=k: leaf[k], along)
            state, loss = self._run(state, rows, now)
            losses.append(loss)
            if (k + 1) % self.every == 0:
                evaluations.append(self._evaluate(state, heldout))
        found, accuracy = zip(*evaluations, strict=True)
        return Curves(*(np.array(jax.device_get(values)) for values in (losses, found, accuracy)))

    def _begin(self, parts: tuple[Tree, ...]) -> Tree:
        return {
            "step": jnp.int32(0),
            "history": jax.tree.map(lambda w: jnp.stack([w] * self.versions), parts),
            "optimizer": tuple(map(self.optimizer.init, parts)),
            "delta": jax.tree.map(jnp.zeros_like, parts),
        }

    def _read(self, state: Tree, part: int, age: jax.Array | int) -> Tree:
        slot = (state["step"] - age) % self.versions
        return jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(w, slot, keepdims=False), state["history"][part]
        )

    def _heldout(self, state: Tree, rows: Tree) -> tuple[jax.Array, jax.Array]:
        """Loss and accuracy of the newest weights."""
        parts = [self._read(state, n, 0) for n in range(len(state["history"]))]
        x = self.model.embed({}, rows, None)
        for layer, weights in zip(self.model.layer, parts[:-1], strict=True):
            x = layer(weights, x, rows, None)
        loss, metrics = self.model.head_loss({"embed": {}, "head": parts[-1]}, x, rows, None)
        return loss, metrics["accuracy"]

    def _step(self, state: Tree, rows: Tree, now: Course) -> tuple[Tree, jax.Array]:
        """One minibatch, and the update that follows it."""
        count = len(now.forward)
        own = [jax.tree.map(lambda leaf, j=j: leaf[j], rows) for j in range(count)]
        found = [self._gradients(state, now, *each) for each in enumerate(own)]
        losses, gradients = zip(*found, strict=True)
        mean = jax.tree.map(lambda *g: sum(g) / count, *gradients)
        updated = [self._update(state, n, gradient, now) for n, gradient in enumerate(mean)]
        history, optimizer, delta = zip(*updated, strict=True)
        new = {"history": history, "optimizer": optimizer, "delta": delta}
        return {"step": state["step"] + 1} | new, sum(losses) / count

    def _gradients(
        self, state: Tree, now: Course, j: int, rows: Tree
    ) -> tuple[jax.Array, tuple[Tree, ...]]:
        """Loss and gradient of microbatch j, each part with the versions that it reads."""
        forward, backward, correction = now.forward[j], now.backward[j], now.correction
        x, kept = self.model.embed({}, rows, None), []
        for n, split in enumerate(self.splits):
            x, *residuals = split.forward(self._read(state, n, forward[n]), x, rows, None)
            kept.append(residuals)

        def leave(head: Tree, x: jax.Array) -> jax.Array:
            return self.model.head_loss({"embed": {}, "head": head}, x, rows, None)[0]

        head = self._read(state, len(self.splits), forward[-1])
        loss, (dhead, dx) = jax.value_and_grad(leave, argnums=(0, 1))(head, x)
        gradients = [dhead]
        for n, split in reversed(list(enumerate(self.splits))):
            weights = jax.tree.map(
                lambda w, d, n=n: w - correction[n] * d,
                self._read(state, n, backward[n]), state["delta"][n],
            )  # fmt: skip
            dx, dweights = split.backward_fused(weights, *kept[n], dx, rows, None)
            gradients.insert(0, dweights)
        return loss, tuple(gradients)

    def _update(self, state: Tree, part: int, gradient: Tree, now: Course) -> tuple[Tree, ...]:
        """A part's history, optimizer state and mean step after an update."""
        old = self._read(state, part, 0)
        direction, optimizer = self.optimizer.update(gradient, state["optimizer"][part], old)
        rate, decay = now.rate / now.divisor[part], now.decay[part]
        new = jax.tree.map(lambda w, d: w - rate * d, old, direction)
        delta = jax.tree.map(
            lambda d, before, after: jnp.where(
                now.correction[part] > 0, decay * d + (1 - decay) * (after - before), d
            ),
            state["delta"][part], old, new,
        )  # fmt: skip
        slot = (state["step"] + 1) % self.versions
        history = jax.tree.map(
            lambda ws, w: lax.dynamic_update_index_in_dim(ws, w, slot, 0),
            state["history"][part], new,
        )  # fmt: skip
        return history, optimizer, delta
