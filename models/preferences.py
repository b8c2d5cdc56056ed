"""Direct preference optimization of a GPT (Rafailov et al. 2023, equation 7).

    loss = -log sigmoid(beta * (margin - reference margin))

The margin of a pair is the log-probability of its chosen answer minus that of the rejected one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe import Model
from models import gpt
from models.gpt_config import GPTConfig
from models.types import PyTree


def model(config: GPTConfig, beta: float, **axes: Any) -> Model:
    """Makes a GPT whose loss is that of pairs.

    A microbatch is ``{"tokens", "targets", "reference"}``: the first two int32 [pairs, 2, S], the
    chosen answer first, with targets below 0 where nothing is predicted; the third float32 [pairs],
    the margin of the reference model. The model's output is its own margin. Metrics are "accuracy",
    the share of pairs whose margin is above the reference's, and "reward", beta times the mean
    difference.

    Args:
      config: the model's shape, without ``mtp_loss``.
      beta: weight of the margin.
      axes: as of `models.gpt.model`.
    """
    base = gpt.model(config, **axes)

    def embed(outer: PyTree, microbatch: PyTree, rng: jax.Array | None) -> PyTree:
        return base.embed(outer, _rows(microbatch), rng)

    def margin(outer: PyTree, x: PyTree, microbatch: PyTree, rng: jax.Array | None) -> jax.Array:
        def negative(x: PyTree, row: PyTree) -> jax.Array:
            row = {name: value[None] for name, value in row.items()}
            return base.head_loss(outer, x[None], row, rng).total

        losses = jax.vmap(negative)(x, _rows(microbatch)).reshape(-1, 2)
        return losses[:, 1] - losses[:, 0]

    def head_loss(
        outer: PyTree, x: PyTree, microbatch: PyTree, rng: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        rewards = beta * (margin(outer, x, microbatch, rng) - microbatch["reference"])
        metrics = {"accuracy": (rewards > 0).mean(dtype=jnp.float32), "reward": rewards.mean()}
        return -jax.nn.log_sigmoid(rewards).mean(), metrics

    return dataclasses.replace(base, embed=embed, head_loss=head_loss, output=margin, carry=None)


def _rows(microbatch: PyTree) -> PyTree:
    """Makes a row of each answer."""
    names = ("tokens", "targets")
    return {name: microbatch[name].reshape(-1, microbatch[name].shape[-1]) for name in names}
