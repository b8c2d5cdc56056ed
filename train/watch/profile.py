"""Records of some steps: a profile by ``jax.profiler``, and a timeline of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpipe import measure
from jaxpipe.schedule import Timeline, page, timelines
from train.config import Config
from train.errors import refused
from train.runs import run_folder
from train.step import Setup, TrainState

STAGE_SECONDS = "stage_seconds"
"""The entry of a record with the seconds that each stage spends in its layers."""


def check_processes(config: Config) -> None:
    """Refuses to measure a step across processes, once it is known how many there are.

    Raises:
      ConfigError: `Config.train.timeline_at` is set, and there are several.
    """
    at, count = config.train.timeline_at, jax.process_count()
    if at is not None and count > 1:
        raise refused(
            f"train.timeline_at={at} needs one process, and there are {count}, with a clock each. "
            "Nearest valid: null.",
            "train.timeline_at",
        )


def write_timeline(setup: Setup, state: TrainState, batch: Any, rng: Any) -> list[float]:
    """Measures forward and backward of a batch, and writes a page of them beside the predicted
    timelines; returns the seconds that each stage spends in its layers."""
    measured = measure.timeline(setup.pipe, state.params, batch, rng, states=state.layers)
    drawn = page([[*timelines(measured.schedule, measured.costs), measured]])
    (setup.config.folder / run_folder.TIMELINE_PAGE).write_text(drawn, encoding="utf-8")
    return _work(measured)


def slowest(setup: Setup, seconds: Sequence[float]) -> str:
    """Names the stage with the slowest layers, and says whether their costs explain it."""
    stage = int(np.argmax(seconds))
    over, expected = (part[stage] / np.mean(part) for part in (seconds, _work(setup.timeline)))
    return (
        f"stage {stage} is the slowest: {1e3 * seconds[stage]:.2f} ms in its layers, {over:.2f} "
        f"times the mean of all stages; the costs of its layers predict {expected:.2f}"
    )


def _work(timeline: Timeline) -> list[float]:
    """Adds up what the actions of each stage take, without what it waits for."""
    return [sum(part.end - part.start for part in row) for row in timeline.rows]


class Profile:
    """Records the steps from ``train.profile_from`` to ``train.profile_to``; use it as a context
    manager around the loop.
    """

    def __init__(self, config: Config) -> None:
        self._first, self._last = config.train.profile_from, config.train.profile_to
        self._folder, self._is_open = config.folder / run_folder.PROFILE, False

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
