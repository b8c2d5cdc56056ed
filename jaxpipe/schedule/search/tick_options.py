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
      numbers: `searches`, `parents`, `places` and `left`, one after another.
      times: `score`, `time`, `critical` and `bound`, then `busy`.
      done: a number that two of a search share only if the same work is done in both.
      counts: the layers that run in the tick, by kind and stage.
    """

    numbers: Ints
    times: Floats
    done: NDArray[np.uint64]
    counts: NDArray[np.int16]

    @property
    def searches(self) -> Ints:
        """To which they belong."""
        field: Ints = self.numbers[0]
        return field

    @property
    def parents(self) -> Ints:
        """The states before the tick, among all."""
        field: Ints = self.numbers[1]
        return field

    @property
    def places(self) -> Ints:
        """The states before the tick, among those of their round."""
        field: Ints = self.numbers[2]
        return field

    @property
    def left(self) -> Ints:
        """Layers to run."""
        field: Ints = self.numbers[3]
        return field

    @property
    def score(self) -> Floats:
        """Smaller is better."""
        field: Floats = self.times[0]
        return field

    @property
    def time(self) -> Floats:
        """When the tick ends."""
        field: Floats = self.times[1]
        return field

    @property
    def critical(self) -> Floats:
        """Time in F and B, all stages together."""
        field: Floats = self.times[2]
        return field

    @property
    def bound(self) -> Floats:
        """No way from here ends before this."""
        field: Floats = self.times[3]
        return field

    @property
    def busy(self) -> Floats:
        """Time in actions, by stage."""
        field: Floats = self.times[4:]
        return field

    def at(self, which: Any) -> Options:
        """Some of them."""
        return Options(
            self.numbers[:, which],
            self.times[:, which],
            self.done[which],
            self.counts[..., which],
        )


def joined(parts: Iterable[Options]) -> Options:
    """All options of several groups, in order."""
    return Options._make(np.concatenate(fields, axis=-1) for fields in zip(*parts, strict=True))


class Beam(NamedTuple):
    """States with their times: how they came about, and what their stages have done."""

    options: Options
    states: States
    numbers: Ints
