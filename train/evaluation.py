"""The held-out loss and metrics of a run, or with ``--evaluate`` of existing weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxpipe import Sum, Weighted
from train import initial
from train.config import Config
from train.data.stream import Examples, heldout_batches
from train.processes import distributed
from train.step import Setup, TrainState
from train.watch.metrics import recorded, say, shown

_LARGEST_EXPONENT = 700.0
"""Its exponential is a float64; that of a larger loss need not be."""


def run(config: Config) -> None:
    """Prints loss and metrics of ``train.eval_batches`` held-out batches; writes nothing.

    Args:
      config: a checked configuration, whose ``init_from`` names the weights; jax already has the
        devices.

    Raises:
      ConfigError: the weights cannot be read, or are not this model's.
    """
    console = Console(quiet=jax.process_index() != 0)
    setup = Setup(config)
    state = initial.state(setup, console)
    _, heldout = setup.task.load()
    num_batches, size = config.train.eval_batches, config.train.batch_size
    values = recorded(means(setup, state, heldout, num_batches))
    metrics = "".join(f", {text}" for text in shown(values.get("metrics")))
    unit = setup.task.loss_unit
    loss = "not finite" if values["loss"] is None else f"{values['loss']:.4f} {unit}".rstrip()
    say(console, f"held-out loss {loss}{metrics} over {num_batches} batches of {size}")
    for line in of_domains(domain_losses(setup, state, setup.task.load_domains(), num_batches)):
        say(console, line)


def domain_losses(
    setup: Setup, state: TrainState, domains: Mapping[str, Examples], num_batches: int
) -> dict[str, float | None]:
    """Evaluates each domain, by its name, as `means` does; None for a loss that is not finite."""
    return {
        name: recorded(means(setup, state, rows, num_batches)["loss"])
        for name, rows in domains.items()
    }


def of_domains(losses: Mapping[str, float | None]) -> Iterator[str]:
    """Writes the loss and the perplexity of each domain."""
    for name, loss in losses.items():
        text = "not finite"
        if loss is not None:
            perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
            text = f"{loss:.4f}, perplexity {perplexity:.4g}"
        yield f"  {name}: loss {text}"


def means(setup: Setup, state: TrainState, heldout: Examples, num_batches: int) -> dict[str, Any]:
    """Evaluates held-out batches; every process must call it.

    Args:
      num_batches: number of batches, spread over all examples.

    Returns:
      Loss and metrics of all their rows, whatever the batches; in float64.
    """
    sharding, size = setup.pipe.batch_sharding, setup.config.train.batch_size
    rows = distributed.local_rows(sharding, size)
    batches = heldout_batches(heldout, batch_size=size, num_batches=num_batches, rows=rows)
    totals = [
        setup.evaluate(state, distributed.global_batch(batch, sharding, size)) for batch in batches
    ]
    sums = jax.tree.map(lambda *all_: np.sum(np.asarray(all_, np.float64), axis=0), *totals)
    return jax.tree.map(
        lambda node: node.mean if isinstance(node, Weighted) else node.value,
        sums,
        is_leaf=lambda node: isinstance(node, (Weighted, Sum)),
    )
