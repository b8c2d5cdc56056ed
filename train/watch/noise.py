"""The noise scale of the gradient: how many tokens a batch needs before larger ones pay little.

A gradient of b rows is the true gradient G plus noise of variance tr(S)/b. So its squared norm is
|G|^2 + tr(S)/b on average, and the norms at two batch sizes give both (McCandlish et al. 2018,
"An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1). The small batch is
one microbatch of all data shards, the large one is the whole batch of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from train.watch.metrics import records

if TYPE_CHECKING:
    from train.step import Key, Setup, TrainState

RECORD = "noise"
"""The entry of a record in metrics.jsonl."""
_NORM = "microbatch_norm"
_AVERAGED = 10
"""Estimates over which the running means go: a single one varies too much (appendix A.1)."""


@dataclasses.dataclass(frozen=True)
class Noise:
    """Running means of both estimates. Each is unbiased; their ratio is so for many estimates.

    Args:
      gradient: |G|^2, of the true gradient.
      variance: tr(S), of the gradient of one row.
      estimates: number of estimates.
    """

    gradient: float = 0.0
    variance: float = 0.0
    estimates: int = 0

    def after(self, norms: dict[int, float]) -> Noise:
        """Adds one more estimate to the means.

        Args:
          norms: norms of the gradients of two batches, by their number of rows.
        """
        (few, of_few), (many, of_many) = ((rows, norms[rows] ** 2) for rows in sorted(norms))
        gradient = (many * of_many - few * of_few) / (many - few)
        variance = (of_few - of_many) / (1 / few - 1 / many)
        number = self.estimates + 1
        share = 1 / min(number, _AVERAGED)
        return Noise(
            self.gradient + share * (gradient - self.gradient),
            self.variance + share * (variance - self.variance),
            number,
        )

    @property
    def rows(self) -> float | None:
        """The noise scale; None as long as noise hides the gradient or the other way round."""
        if self.gradient <= 0 or self.variance <= 0:
            return None
        return self.variance / self.gradient


class Gauge:
    """Estimates the noise scale every few steps of a run, if that is configured.

    Args:
      path: metrics.jsonl; a resumed run continues with the last means in it.
    """

    def __init__(self, setup: Setup, path: Path) -> None:
        self._setup, self._every = setup, setup.config.train.noise_every
        self._noise = _last(path) if self._every else Noise()
        self._norm: jax.stages.Compiled | None = None

    def compile(self) -> None:
        """Compiles the gauge's program, once."""
        if self._every and self._norm is None:
            self._norm = microbatch_norm(self._setup)

    def before(self, step: int, carried: Any, batch: Any, rng: Any) -> dict[str, Any]:
        """Runs a microbatch of a step; the norm that it returns belongs to the step's values."""
        if self._norm is None or step % self._every:
            return {}
        return {_NORM: self._norm(carried, batch, rng)}

    def after(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the entry of a step's record from the step's values."""
        if _NORM not in values:
            return {}
        rows = self._setup.config.train.batch_size
        few = rows // self._setup.schedule.num_microbatches
        norms = {few: float(values[_NORM]), rows: float(values["grad_norm"])}
        self._noise = self._noise.after(norms)
        means = dataclasses.asdict(self._noise)
        return {RECORD: {f"scale_{self._setup.task.unit}": self.scale, **means}}

    @property
    def scale(self) -> float | None:
        """The noise scale in tokens, or in whatever unit a row has."""
        rows = self._noise.rows
        return None if rows is None else rows * self._setup.task.units_per_row


def microbatch_norm(setup: Setup) -> jax.stages.Compiled:
    """Compiles ``(state, batch, rng) -> norm``, of the gradient of a step's first microbatch.

    All microbatches are copies of the first, so that the pipeline runs as it does in a step.
    """
    number = setup.schedule.num_microbatches

    def first(leaf: jax.Array) -> jax.Array:
        rows = leaf.reshape(-1, number, *leaf.shape[1:])
        return jnp.broadcast_to(rows[:, :1], rows.shape).reshape(leaf.shape)

    def norm(state: TrainState, batch: dict[str, jax.Array], rng: Key) -> jax.Array:
        batch = jax.tree.map(first, batch)
        batch = jax.lax.with_sharding_constraint(batch, setup.pipe.batch_sharding)
        _, grads = setup.pipe.value_and_grad(state.params, batch, rng, states=state.layers)
        return optax.tree.norm(grads)

    jitted = jax.jit(norm, out_shardings=setup.replicated)
    return jitted.lower(setup.state_shapes, setup.batch_shapes, setup.rng_shape).compile()


def _last(path: Path) -> Noise:
    """Reads the last means in metrics.jsonl."""
    means = Noise()
    for _, record in records(path):
        if (kept := record.get(RECORD)) is not None:
            means = Noise(kept["gradient"], kept["variance"], kept["estimates"])
    return means
