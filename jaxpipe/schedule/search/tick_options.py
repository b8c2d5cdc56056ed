"""States of searches for ticks, and the options between which they choose, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxpipe.schedule.search.tick_engine import Floats, Ints, States


class Options(NamedTuple):
    """States one tick later, of which only the times are known yet; the last axis counts them.

    Args:
      searches: to which they belong.
      parents: the states before the tick, among all; then among those of their round.
      left: layers to run.
      score: smaller is better.
      critical: time in F and B, all stages together.
      bound: no way from here ends before this.
      done: a number that two of a search share only if the same work is done in both.
      counts: the layers that run in the tick, by kind and stage.
    """

    searches: Ints
    parents: Ints
    places: Ints
    left: Ints
    score: Floats
    time: Floats
    critical: Floats
    bound: Floats
    done: NDArray[np.uint64]
    busy: Floats
    counts: NDArray[np.int16]

    def at(self, which: Any) -> Options:
        """Some of them."""
        return Options._make(field[..., which] for field in self)


def joined(parts: Iterable[Options]) -> Options:
    """All options of several groups, in order."""
    return Options._make(np.concatenate(fields, axis=-1) for fields in zip(*parts, strict=True))


class Beam(NamedTuple):
    """States with their times: how they came about, and what their stages have done."""

    options: Options
    states: States
    numbers: Ints
