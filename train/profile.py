"""A profile of some steps: ``jax.profiler`` writes it to the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from train import run_folder
from train.config import Config
from train.errors import Failure


def failures(config: Config) -> Iterator[Failure]:
    """Says which steps cannot be recorded."""
    first, last = config.train.profile_from, config.train.profile_to
    if last is not None and (first is None or last < first):
        yield Failure(
            f"train.profile_to={last} must not lie before train.profile_from={first}. Nearest "
            f"valid: train.profile_from={last}.",
            ("train.profile_to", "train.profile_from"),
        )


class Profile:
    """Records the steps from ``train.profile_from`` to ``train.profile_to``; use it as a context
    manager around the loop.

    Args:
      config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self._first, self._last = config.train.profile_from, config.train.profile_to
        self._folder, self._is_open = Path(config.run_dir) / run_folder.PROFILE, False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def before(self, step: int, carried: Any) -> None:
        """Begins if this is the first step, once those before it are done."""
        if step == self._first:
            jax.block_until_ready(carried)
            jax.profiler.start_trace(str(self._folder))
            self._is_open = True

    def after(self, step: int, carried: Any) -> None:
        """Ends if this was the last step, once it is done."""
        if self._is_open and step == (self._last or self._first):
            jax.block_until_ready(carried)
            self._close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()
