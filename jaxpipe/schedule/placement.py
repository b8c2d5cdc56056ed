"""Placements: which stage holds which virtual stage of the model.

A model is cut into ``num_stages * num_chunks`` virtual stages, in model order. A placement says
which stage runs each of them; the chunks of a stage are numbered in model order.
"""

import dataclasses
from functools import cached_property


@dataclasses.dataclass(frozen=True)
class Placement:
    """The stage of every virtual stage.

    Args:
      stages: ``stages[s]`` is the stage (0-based) that holds virtual stage ``s``. Every stage holds
        the same number of virtual stages.

    Example:
      >>> linear(3).stages
      (0, 1, 2)
      >>> looped(2, num_chunks=2).stages
      (0, 1, 0, 1)
    """

    stages: tuple[int, ...]

    @cached_property
    def num_stages(self) -> int:
        return max(self.stages) + 1

    @property
    def num_virtual_stages(self) -> int:
        return len(self.stages)

    @cached_property
    def num_chunks(self) -> int:
        """The chunks of a stage."""
        return len(self.stages) // self.num_stages

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """``chunks[s]`` is the chunk number of virtual stage ``s`` on its own stage."""
        seen = [0] * self.num_stages
        numbers = []
        for stage in self.stages:
            numbers.append(seen[stage])
            seen[stage] += 1
        return tuple(numbers)

    @cached_property
    def virtual_stages(self) -> tuple[tuple[int, ...], ...]:
        """``virtual_stages[d][c]`` is the virtual stage that stage ``d`` holds as chunk ``c``."""
        rows: list[list[int]] = [[] for _ in range(self.num_stages)]
        for virtual_stage, stage in enumerate(self.stages):
            rows[stage].append(virtual_stage)
        return tuple(tuple(row) for row in rows)


def linear(num_stages: int) -> Placement:
    """Places one chunk on each stage, in order."""
    return Placement(tuple(range(num_stages)))


def looped(num_stages: int, *, num_chunks: int) -> Placement:
    """Places virtual stage ``s`` on stage ``s mod p``, as interleaved and breadth-first do."""
    return Placement(tuple(s % num_stages for s in range(num_stages * num_chunks)))


def wave(num_stages: int, *, num_waves: int = 1) -> Placement:
    """Places virtual stages down the stages and up again, ``num_waves`` times.

    Each turn stays on one stage.

    With one wave this is the V placement.

    Example:
      >>> wave(3).stages
      (0, 1, 2, 2, 1, 0)
    """
    down = tuple(range(num_stages))
    return Placement((down + down[::-1]) * num_waves)
