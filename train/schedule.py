"""The schedule that a configuration asks for."""

from __future__ import annotations

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from train.config import Config


def build(config: Config) -> Schedule:
    """Builds it.

    Args:
      config: ``mesh.stage`` and ``pipeline.*`` are read.

    Returns:
      The schedule.

    Raises:
      ValueError: as `jaxpipe.schedules.build`; the message names the fields.
    """
    pipeline = config.pipeline
    return catalog.build(
        pipeline.schedule,
        stages=config.mesh.stage,
        microbatches=pipeline.microbatches,
        chunks=pipeline.chunks,
        group=pipeline.group,
        memory_limit=pipeline.memory_limit,
    )
