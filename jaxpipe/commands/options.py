"""Reads and checks options of the command, and writes errors in their names."""

import dataclasses
import sys
from pathlib import Path

from jaxpipe.files import read_bytes
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check import peak_in_flight
from jaxpipe.schedule.problems import (
    ArgumentError,
    Problem,
    below_one,
    printable,
    refuse,
    shortened,
    shown,
)
from jaxpipe.schedule.simulate import Costs, ticks

DEFAULT_COSTS = "1,1,1"
_MAX_PASSES = 5_000_000
"""Forward passes of the largest schedule the command builds, about 5 GB: more is a typo."""
_MAX_VIRTUAL_STAGES = 4096
"""Virtual stages of the longest pipeline: more than any machine has, and some generators take
quadratic time."""
_MAX_LAYERS = 10_000
"""Layers of a model at most: more is a typo."""
_MAX_CELLS = 10_000_000
"""Ticks times stages of the largest schedule that is timed and drawn, which takes a minute."""
_MAX_SLOTS = 250_000_000
"""Ticks times what one stage keeps in flight: a table of 1 GB."""


def spell(argument: str, value: object) -> str:
    """Writes an argument as the command line has it: the schedule's name, or an option."""
    if argument in ("name", "method", "schedule"):
        return shown(value)
    option = "--" + argument.removeprefix("num_").replace("_", "-")
    return option if value is None else f"{option} {shortened(str(value))}"


def message(error: Exception) -> str:
    """Writes an error for the user, in the names of the command's options."""
    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{error.filename} cannot be used: {error.strerror}.")
    if not isinstance(error, ArgumentError):
        return str(error)
    return ArgumentError(map(_of_options, error.problems)).text(spell)


def _of_options(problem: Problem | str) -> Problem | str:
    """Names the number of layers, which the user gave, in place of the layers' costs."""
    if isinstance(problem, str) or (problem.argument, problem.value) != ("layer_costs", None):
        return problem
    return dataclasses.replace(problem, argument="layers") if problem.schedule else problem


def say_written(path: Path) -> None:
    """Says on standard error which file was written: the output may go to another program."""
    print(f"Wrote {path}", file=sys.stderr)


def parse_costs(text: str, *, option: str = "costs") -> Costs:
    """Reads the value of an option: "F,B,W", as many of ",message,overlap,attention", and perhaps
    ",rendezvous" (`Costs.rendezvous`).

    Raises:
      ValueError: the text is not three to six numbers and that word, or a number is out of range.

    Example:
      >>> parse_costs("1,1.2,0.8,0.1,rendezvous")
      Costs(f=1.0, b=1.2, w=0.8, message=0.1, overlap=0.0, attention=0.0, rendezvous=True)
    """
    try:
        plain = text.removesuffix(",rendezvous")
        numbers = [float(part) for part in plain.split(",")]
    except ValueError:
        numbers = []
    if not 3 <= len(numbers) <= 6:
        rule = (
            "must be three to six numbers: F,B,W, then a message, then the shares of overlap and "
            "of attention, and rendezvous if senders wait for receivers"
        )
        refuse([Problem(option, text, rule, {option: DEFAULT_COSTS})])
    try:
        return Costs(*numbers, rendezvous=plain != text)
    except ValueError as error:
        raise ValueError(f"{spell(option, text)} is out of range: {error}") from None


def layers_of_model(
    stages: int,
    *,
    layers: int | None,
    layer_costs: str | None,
    stage_costs: str | None = None,
    chunks: int = 1,
) -> list[Costs]:
    """Lists the costs of every layer of a model.

    Args:
      layers: layers of the whole model; None for two per chunk, if the costs are of a stage.
      chunks: chunks per stage.
    """
    problems = below_one({"layers": layers})
    both = {"stage_costs": stage_costs, "layer_costs": layer_costs}
    if layer_costs is None and stage_costs is None:
        rule = "needs $layer_costs, the time of F,B,W of one of them"
        problems.append(Problem("layers", layers, rule, (), {"layer_costs": None}))
    elif None not in both.values():
        rule = "cannot be combined with $stage_costs: give one of them"
        problems.append(Problem("layer_costs", layer_costs, rule, (), both))
    elif layer_costs is not None and layers is None:
        rule = "needs $layers, the layers of the whole model"
        problems.append(Problem("layer_costs", layer_costs, rule, (), {"layers": None}))
    if layers is not None and layers > _MAX_LAYERS:
        problems.append(Problem("layers", layers, "is more than any model has", (_MAX_LAYERS,)))
    if layers is not None and 0 < layers < stages:
        rule = "is too few for $num_stages: each needs a layer"
        problems.append(Problem("layers", layers, rule, (stages,), {"num_stages": stages}))
    refuse(problems)
    count = layers or 2 * stages * chunks
    if stage_costs is None:
        return [parse_costs(layer_costs or "", option="layer_costs")] * count
    stage, share = parse_costs(stage_costs, option="stage_costs"), stages / count
    return [stage.times(share)] * count


def check_size(stages: int, microbatches: int, chunks: int) -> None:
    """Refuses schedules that would take all memory, or hours."""
    pipeline = f"--stages {stages}" + f" and --chunks {chunks}" * (chunks != 1)
    passes = stages * chunks * microbatches
    for made, limit, options, what in (
        (stages * chunks, _MAX_VIRTUAL_STAGES, pipeline, "virtual stages"),
        (passes, _MAX_PASSES, f"{pipeline} and --microbatches {microbatches}", "forward passes"),
    ):
        if made > limit:
            nearest = f"a product of {limit}" if " and " in options else f"--stages {limit}"
            raise ValueError(
                f"{options} make {made} {what}, and a schedule that fits in memory has at most "
                f"{limit}.\nNearest valid: {nearest}."
            )


def check_table(schedule: Schedule) -> None:
    """Refuses schedules whose clocks and pictures would take all memory, or hours."""
    num_ticks, stages = 1 + max(row[-1] for row in ticks(schedule)), schedule.num_stages
    peak = max(peak_in_flight(schedule))
    for count, limit, what in (
        (stages, _MAX_CELLS, "stages"),
        (peak, _MAX_SLOTS, "microbatches of a chunk in flight"),
    ):
        if num_ticks * count > limit:
            raise ValueError(
                f"Schedule {schedule.name!r} is too large to time and draw: {num_ticks} ticks x "
                f"{count} {what} = {num_ticks * count}, and the limit is {limit}. Use fewer stages "
                "or microbatches."
            )


def read_sizes(path: Path, *, option: str) -> ModelSizes:
    """Reads a file that ``jaxpipe plan --write-sizes`` wrote, the value of an option."""
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        refuse([Problem(option, str(path), f"is not text: {error}")])
        raise AssertionError from error  # refused
    return ModelSizes.from_json(text, source=str(path))
