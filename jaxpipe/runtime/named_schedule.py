"""The schedule of a pipeline by its name alone, built for the pipeline's mesh."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from jaxpipe.runtime.mesh import Axes
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.problems import ArgumentError, Problem, in_python

MICROBATCHES_PER_STAGE = 2
"""By default. Every built-in schedule takes this many, and 1F1B's bubble ratio is below a third."""


def named_schedule(
    schedule: Schedule | str, mesh: Mesh, axes: Axes, microbatches: int | None
) -> tuple[Schedule | None, list[Problem | str]]:
    """The schedule that was meant, and what is wrong with the arguments that say so.

    Args:
      schedule: a schedule, or the name of one.
      mesh, axes: a mesh, and which of its axes is that of the stages.
      microbatches: m for a name; None for the default.

    Returns:
      The schedule, or None if there is none or the mesh has no such axis; and the problems.
    """
    if isinstance(schedule, Schedule):
        if microbatches in (None, schedule.num_microbatches):
            return schedule, []
        rule = "is for a schedule that is given by its name, and $schedule is built already"
        others = {"schedule": schedule.name}
        near = (None, schedule.num_microbatches)
        return schedule, [Problem("microbatches", microbatches, rule, near, others)]
    if not isinstance(schedule, str):
        found = type(schedule).__name__
        return None, [
            f"schedule is a {found}; it must be a Schedule, such as `jaxpipe.schedules.build` "
            'returns, or the name of one, such as "1f1b".'
        ]
    if not isinstance(mesh, Mesh) or axes.stage not in mesh.shape:
        return None, []
    num_stages = axes.num_stages(mesh)
    if microbatches is None:
        microbatches = MICROBATCHES_PER_STAGE * num_stages
    try:
        built = catalog.build(schedule, stages=num_stages, microbatches=microbatches)
        return built, []
    except ArgumentError as error:
        return None, [error.text(_spell)]


def _spell(argument: str, value: Any) -> str:
    """`Pipeline` calls the name ``schedule``, and its stages are those of the mesh."""
    names = {"name": "schedule", "num_stages": "mesh's stage"}
    return in_python(names.get(argument, argument.removeprefix("num_")), value)
