"""Schedules as plain data; imports no jax.

A schedule is a function of the numbers of stages and microbatches; `validate` proves that what it
returns can run, `simulate` tells how long it takes, and `register` gives it a name for `build`, the
command line and the trainer. That is all that its author needs. Programs that train choose with
`partition` which layers make a chunk, picture the result with `draw`, and keep it with
`to_json`.

Example:
  >>> from jaxpipe.schedule import Action, Costs, Kind, Schedule, linear
  >>> from jaxpipe.schedule import build, register, simulate, validate
  >>> @register("one-by-one")
  ... def one_by_one(num_stages, num_microbatches):
  ...     "Each microbatch leaves the pipeline before the next one enters it."
  ...     orders = tuple(
  ...         tuple(
  ...             Action(stage, kind, i)
  ...             for i in range(num_microbatches)
  ...             for kind in (Kind.F, Kind.BW)
  ...         )
  ...         for stage in range(num_stages)
  ...     )
  ...     return Schedule("one-by-one", linear(num_stages), num_microbatches, orders)
  >>> schedule = build("one-by-one", stages=4, microbatches=2)
  >>> validate(schedule)
  >>> simulate(schedule, Costs(f=1, b=1, w=1)).makespan
  24.0
"""

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.catalog import build, register
from jaxpipe.schedule.check import ScheduleError, validate
from jaxpipe.schedule.device_clock import Cut, cuts, device_clock, timelines
from jaxpipe.schedule.formats import from_json, is_users, read_csv, to_json, write_csv
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.partition import chunk_costs, partition
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.show import draw
from jaxpipe.schedule.show.page import page
from jaxpipe.schedule.simulate import Costs, TimedAction, Timeline, simulate, ticks

__all__ = [
    "Action",
    "Costs",
    "Cut",
    "Kind",
    "Placement",
    "Schedule",
    "ScheduleError",
    "TimedAction",
    "Timeline",
    "build",
    "chunk_costs",
    "cuts",
    "device_clock",
    "draw",
    "from_json",
    "is_users",
    "linear",
    "looped",
    "lower",
    "page",
    "partition",
    "read_csv",
    "register",
    "simulate",
    "ticks",
    "timelines",
    "to_json",
    "validate",
    "wave",
    "write_csv",
]
