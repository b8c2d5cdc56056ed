"""The schedule that a configuration asks for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.simulate import Costs
from jaxpipe.schedule.slices import slice_ticks
from train.config import Config


@functools.cache
def order(config: Config) -> Schedule:
    """Builds the schedule by its name.

    Args:
      config: the task's layers, ``mesh.stage``, ``pipeline.*`` and ``costs.*`` are read.

    Raises:
      ValueError: as `jaxpipe.schedules.build`; the message names the fields.
    """
    pipeline = config.pipeline
    # Schedules that read the layers have two chunks a stage.
    layers_per_chunk = -(-config.num_layers // (2 * config.mesh.stage))
    return catalog.build(
        pipeline.schedule,
        stages=config.mesh.stage,
        microbatches=pipeline.microbatches,
        chunks=pipeline.chunks,
        group=pipeline.group,
        memory_limit=pipeline.memory_limit,
        costs=costs(config),
        layers_per_chunk=max(1, layers_per_chunk),
    )


def build(config: Config, layer_counts: Sequence[int]) -> Schedule:
    """Builds the schedule and cuts it into slices of the model's layers, unless told not to.

    Args:
      config: a checked configuration.
      layer_counts: layers of every virtual stage.
    """
    schedule = order(config)
    if not config.pipeline.slices:
        return dataclasses.replace(schedule, slices=None)
    if schedule.slices is None or len(set(layer_counts)) > 1:
        return slice_ticks(schedule, costs(config), layer_counts)
    return schedule


def own_counts(config: Config) -> tuple[int, ...] | None:
    """The layers of every chunk as ``pipeline.partition`` lists them; None if it names a rule."""
    if config.pipeline.partition in ("equal", "flops", "measured"):
        return None
    return tuple(int(count) for count in config.pipeline.partition.split(","))


def costs(config: Config) -> Costs:
    """The costs that schedules and ticks are made for."""
    return Costs(**config.costs.model_dump())
