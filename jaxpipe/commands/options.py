"""From the command's options to a schedule, and its errors in the names of these options."""

from __future__ import annotations

from typing import Any

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.formats import user
from jaxpipe.schedule.problems import ArgumentError, Problem, refuse, shown
from jaxpipe.schedule.simulate import Costs

DEFAULT_COSTS = "1,1,1"
_MAX_PASSES = 5_000_000
"""Forward passes of the largest schedule the command builds, about 5 GB: more is a typo."""
_MAX_VIRTUAL_STAGES = 4096
"""Of the longest pipeline: beyond every machine, and some generators take quadratic time."""


def spell(argument: str, value: Any) -> str:
    """Writes an argument as the command line has it: the schedule's name, or an option."""
    if argument in ("name", "method", "schedule"):
        return shown(value)
    option = "--" + argument.removeprefix("num_").replace("_", "-")
    return option if value is None else f"{option} {value}"


def message(error: Exception) -> str:
    """What the user is told."""
    return error.text(spell) if isinstance(error, ArgumentError) else str(error)


def parse_costs(text: str) -> Costs:
    """Reads "F,B,W" or "F,B,W,message".

    Raises:
      ValueError: the text is not three or four numbers, or a number is out of range.

    Example:
      >>> parse_costs("1,1.2,0.8")
      Costs(f=1.0, b=1.2, w=0.8, message=0.0)
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4):
        rule = "must be three or four numbers, F,B,W or F,B,W,message"
        refuse([Problem("costs", text, rule, {"costs": DEFAULT_COSTS})])
    return Costs(*numbers)


def check_size(stages: int, microbatches: int, chunks: int, *, minibatches: int = 1) -> None:
    """Refuses schedules that would take all memory, or hours."""
    pipeline = f"--stages {stages}" + f" and --chunks {chunks}" * (chunks != 1)
    batches = f"--microbatches {microbatches}" + f" in {minibatches} minibatches" * (
        minibatches > 1
    )
    passes = stages * chunks * microbatches * minibatches
    for made, limit, options, what in (
        (stages * chunks, _MAX_VIRTUAL_STAGES, pipeline, "virtual stages"),
        (passes, _MAX_PASSES, f"{pipeline} and {batches}", "forward passes"),
    ):
        if made > limit:
            nearest = f"a product of {limit}" if " and " in options else f"--stages {limit}"
            raise ValueError(
                f"{options}: {made} {what}, beyond {limit}: such a schedule does not fit in "
                f"memory.\nNearest valid: {nearest}."
            )


def build(
    name: str,
    *,
    stages: int | None,
    microbatches: int | None,
    costs: Costs,
    layers_per_chunk: int | None,
    **options: Any,
) -> Schedule:
    """Builds a schedule, or loads a user's own, with the given options.

    Costs and layers are also used by the clocks.
    """
    given = {option: value for option, value in options.items() if value is not None}
    clock: dict[str, Any] = {"costs": costs}
    if layers_per_chunk is not None:
        clock["layers_per_chunk"] = layers_per_chunk
    if user.is_users(name):
        if "chunks" in given:
            given["num_chunks"] = given.pop("chunks")
        shape = {"num_stages": stages, "num_microbatches": microbatches}
        refuse(catalog.range_problems(**shape, layers_per_chunk=layers_per_chunk, **given))
        if stages is not None and microbatches is not None:
            check_size(stages, microbatches, given.get("num_chunks", 1))
        return user.load(name, **shape, clock=clock, **given)
    if stages is None or microbatches is None:
        raise ArgumentError([user.no_shape(name)])
    own = [entry.default_chunks for entry in catalog.entries() if entry.name == name]
    check_size(stages, microbatches, given.get("chunks", own[0] if own else 1))
    return catalog.build(name, stages=stages, microbatches=microbatches, **given, **clock)
