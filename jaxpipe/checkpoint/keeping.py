"""The choice of checkpoints to keep: the latest few, the best one, and one every so many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from orbax.checkpoint import checkpoint_managers

from jaxpipe.checkpoint import checksums
from jaxpipe.checkpoint.checksums import DamagedError
from jaxpipe.files import read_json

_EVAL_LOSS = "eval_loss"
LOSS_FILE = "metrics/metrics"
"""The file of a checkpoint with its held-out loss."""


def metrics(loss: float | None) -> dict[str, float]:
    """Makes the metrics to save of a held-out loss."""
    return {_EVAL_LOSS: math.inf if loss is None else loss}


def held_out(metrics: Mapping[str, float]) -> float:
    """Reads the held-out loss from saved metrics."""
    return metrics[_EVAL_LOSS]


class LatestAndBest:
    """Keeps the latest few, the one with the lowest held-out loss, and one every so many steps.

    Args:
      folder: folder of the checkpoints.
      num_latest: number of the latest checkpoints to keep.
      every: steps that are multiples of it are kept for good; None keeps no others.
    """

    def __init__(self, folder: Path, num_latest: int, every: int | None) -> None:
        self._folder, self._num_latest, self._every = folder, num_latest, every

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        del context
        losses = [self._loss(checkpoint) for checkpoint in checkpoints]
        newest_first = range(len(losses) - 1, -1, -1)
        best = min(newest_first, key=losses.__getitem__, default=None)
        first = len(losses) - self._num_latest
        return [
            number >= first or number == best or self._is_for_good(checkpoint.step)
            for number, checkpoint in enumerate(checkpoints)
        ]

    def _is_for_good(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def _loss(self, checkpoint: checkpoint_managers.PolicyCheckpointInfo) -> float:
        metrics = checkpoint.metrics  # None if an earlier run saved it
        return read_loss(self._folder / str(checkpoint.step), metrics)


def read_loss(folder: Path, metrics: Mapping[str, float] | None = None) -> float:
    """Reads the held-out loss of a checkpoint; infinite if not evaluated, or not readable.

    Args:
      folder: folder of the checkpoint.
      metrics: the metrics that were saved; None to read them.
    """
    try:
        if metrics is None:
            metrics = read_json(folder / LOSS_FILE)
            if (folder / checksums.CHECKSUMS_FILE).exists():
                checksums.verify_checksums(folder, [LOSS_FILE])
        return loss if math.isfinite(loss := held_out(metrics)) else math.inf
    except (OSError, ValueError, KeyError, TypeError, DamagedError):
        return math.inf
