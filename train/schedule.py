"""The schedule that a configuration asks for."""

from __future__ import annotations

import dataclasses
import functools

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.partition import partition
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


@functools.cache
def build(config: Config) -> Schedule:
    """Builds the schedule and cuts it into slices of the model's layers, unless told not to.

    Args:
      config: a checked configuration.
    """
    schedule = order(config)
    if not config.pipeline.slices:
        return dataclasses.replace(schedule, slices=None)
    counts = partition([1] * config.num_layers, schedule.placement)
    if schedule.slices is None or len(set(counts)) > 1:
        return slice_ticks(schedule, costs(config), counts)
    return schedule


def costs(config: Config) -> Costs:
    """The costs that schedules and ticks are made for."""
    return Costs(**config.costs.model_dump())
