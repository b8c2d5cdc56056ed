"""``--evaluate``: the held-out loss and metrics of weights that exist; nothing is written."""

from __future__ import annotations

import jax
import numpy as np
from rich.console import Console

from train import distributed, initial
from train.config import Config
from train.data import stream
from train.metrics import recorded, say, shown
from train.step import Setup


def run(config: Config) -> None:
    """Prints the means over ``train.eval_batches`` held-out batches.

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
    sharding, size = setup.pipe.batch_sharding, config.train.batch_size
    rows = distributed.local_rows(sharding, size)
    batches = stream.heldout_batches(
        heldout, batch_size=size, num_batches=config.train.eval_batches, rows=rows
    )
    values = [
        setup.evaluate(state, distributed.global_batch(batch, sharding, rows, size))
        for batch in batches
    ]
    means = jax.tree.map(lambda *all_: np.mean(np.asarray(all_, np.float64), axis=0), *values)
    found = recorded(means)
    metrics = "".join(f", {text}" for text in shown(found.get("metrics")))
    loss = "not finite" if found["loss"] is None else f"{found['loss']:.4f} nats"
    say(console, f"held-out loss {loss}{metrics} over {len(values)} batches of {size}")
