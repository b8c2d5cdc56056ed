"""Schedules from outside: PyTorch's CSV of pipeline actions, JSON, which also has placement and
promised peak, and users' functions.

The CSV has one row per stage and one cell per tick, empty where the stage is idle; a cell is
virtual stage, kind, microbatch. The kinds have PyTorch's names (``torch.distributed.pipelining``,
format "compute_only"): F forward, I backward for the input, W for the weights, B *full* backward.
A forward and a backward that run together are one cell, ``(0F1;3B0)OVERLAP_F_B``.
"""

import collections
import csv
import dataclasses
import importlib
import inspect
import io
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from jaxpipe.schedule.actions import Action, Kind, Schedule
from jaxpipe.schedule.check import ScheduleError, validate
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.problems import ArgumentError, Problem, refuse
from jaxpipe.schedule.simulate import ticks

_LETTERS = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
# Nine digits: more than any schedule needs, and quick to convert.
_CELL = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")
_Options: TypeAlias = Mapping[str, object]
_MAX_BYTES = 20_000_000
"""Largest size of a file: about three million actions, more than any program could run."""
_COMMUNICATION = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")


def write_csv(schedule: Schedule) -> str:
    """Writes a schedule as PyTorch's CSV, every action in the column of its earliest tick.

    `parse_csv` restores the order, but not name, promised peak or ticks.

    Raises:
      ScheduleError: the schedule cannot run, or cuts sequences into slices, which the format does
        not know.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> print(write_csv(gpipe(2, 1)), end="")
      0F0,,,0I0,0W0
      ,1F0,1I0,1W0,
    """
    if schedule.num_slices > 1:
        raise ScheduleError(
            f"Schedule {schedule.name!r} cuts sequences into {schedule.num_slices} slices, and "
            "PyTorch's format knows none. `jaxpipe.schedule.to_json` writes it."
        )
    table = ticks(dataclasses.replace(schedule, ticks=None))
    num_ticks = 1 + max(row[-1] for row in table)
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    for d, row in enumerate(table):
        cells = [""] * num_ticks
        for tick, unit in zip(dict.fromkeys(row), schedule.units(d), strict=True):
            parts = ";".join(map(_cell, unit))
            cells[tick] = parts if len(unit) == 1 else f"({parts})OVERLAP_F_B"
        writer.writerow(cells)
    return written.getvalue()


def read_csv(path: str | Path) -> Schedule:
    """Reads a schedule from a file, whose name it gets without the ending: see `parse_csv`.

    Raises:
      ScheduleError: as `parse_csv`, or the file is not text in UTF-8, or is too large.
      OSError: the file cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        limit = f"{_MAX_BYTES // 10**6} MB"
        raise ScheduleError(
            f"{path} is larger than {limit}, and no schedule is.\nNearest valid: {limit}."
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path} is not text in UTF-8: {error.reason}.") from None
    return parse_csv(text, name=path.stem, source=str(path))


def parse_csv(text: str, *, name: str = "csv", source: str = "csv") -> Schedule:
    """Reads a schedule from PyTorch's CSV and validates it.

    Rows are stages, in order; only the order of a row's cells counts, not their columns. A virtual
    stage is held by the row that has most of its actions. The virtual stages and microbatches end
    before the first one that is absent: a cell beyond that is refused, rather than all cells up to
    it being reported as missing.

    Args:
      name: name of the schedule.
      source: the name of the text in errors.

    Raises:
      ScheduleError: a cell is no action, naming row and cell (from 1); or the schedule cannot
        run, with the grid in the letters of the file.

    Example:
      >>> [[str(action) for action in order] for order in parse_csv("0F0,,0B0\\n,1F0,1B0").orders]
      [['0F0', '0BW0'], ['1F0', '1BW0']]
    """
    rows = _rows(text, source)
    orders = tuple(tuple(itertools.chain.from_iterable(row)) for row in rows)
    if not any(orders):
        raise ScheduleError(f"{source} has no action.\nNearest valid: a row '0F0,0B0'.")
    row_counts: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for d, order in enumerate(orders):
        for action in order:
            row_counts[action.virtual_stage][d] += 1
    # No more than there are actions, so that no size depends on an index in the file.
    num_virtual_stages = _first_absent(row_counts)
    microbatches = {action.microbatch for order in orders for action in order}
    schedule = Schedule(
        name=name,
        placement=Placement(
            tuple(row_counts[s].most_common(1)[0][0] for s in range(num_virtual_stages)) or (0,)
        ),
        num_microbatches=_first_absent(microbatches) or 1,
        orders=orders,
        overlapped=tuple(unit[0] for row in rows for unit in row if len(unit) > 1),
    )
    try:
        validate(schedule, spell=_cell)
    except ScheduleError as error:
        raise ScheduleError(f"{source}:\n{error}") from None
    return schedule


def _first_absent(indices: Collection[int]) -> int:
    return next(index for index in itertools.count() if index not in indices)


def _rows(text: str, source: str) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """Reads the actions of every cell, by row: one, or an overlapped pair."""
    # A trailing blank line is not a stage; one in between is a stage that does nothing.
    rows = csv.reader(text.rstrip().splitlines())
    try:
        return tuple(
            tuple(
                _unit(cell, f"{source}, row {r}, cell {c}")
                for c, cell in enumerate(row, start=1)
                if cell.strip()
            )
            for r, row in enumerate(rows, start=1)
        )
    except csv.Error as error:
        raise ScheduleError(f"{source}, row {rows.line_num}: {error}.") from None


def _unit(cell: str, where: str) -> tuple[Action, ...]:
    pair = _PAIR.fullmatch(cell.strip())
    if pair is None:
        return (_action(cell, where),)
    forward, backward = (_action(part, where) for part in pair.groups())
    if forward.kind is not Kind.F or backward.kind not in (Kind.B, Kind.BW):
        raise ScheduleError(
            f"{where}: {cell.strip()!r} overlaps other actions than an F and then a backward, I or "
            "B, as in '(0F1;3B0)OVERLAP_F_B'."
        )
    return forward, backward


def _action(cell: str, where: str) -> Action:
    text = cell.strip()
    match = _CELL.fullmatch(text)
    if match is not None:
        return Action(int(match[1]), _KINDS[match[2]], int(match[3]))
    shown = repr(text if len(text) <= 40 else text[:40] + "...")
    if _COMMUNICATION.fullmatch(text):
        raise ScheduleError(
            f"{where}: {shown} is communication, which jaxpipe derives from the order: write only "
            "the computations (PyTorch's format 'compute_only')."
        )
    raise ScheduleError(
        f"{where}: {shown} is not an action: write virtual stage, kind and microbatch, kind F, I "
        "(backward for the input), W (for the weights) or B (both), for example '2F0'; or an "
        "overlapped pair, for example '(0F1;3B0)OVERLAP_F_B'."
    )


def _cell(action: Action) -> str:
    return f"{action.virtual_stage}{_LETTERS[action.kind]}{action.microbatch}"


def to_json(schedule: Schedule) -> dict[str, object]:
    """Writes the fields of a schedule as an object that JSON can hold.

    An order is one text for each stage.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> to_json(gpipe(2, 1))["orders"]
      ['0F0 0B0 0W0', '1F0 1B0 1W0']
    """
    overlapped = schedule.overlapped
    return {
        "name": schedule.name,
        "stages": list(schedule.placement.stages),
        "num_microbatches": schedule.num_microbatches,
        "peak_in_flight": schedule.peak_in_flight and list(schedule.peak_in_flight),
        "orders": [" ".join(map(str, order)) for order in schedule.orders],
        **({} if schedule.num_slices == 1 else {"num_slices": schedule.num_slices}),
        **({"overlapped": " ".join(map(str, overlapped))} if overlapped else {}),
        **({} if schedule.ticks is None else {"ticks": [*map(list, schedule.ticks)]}),
    }


def from_json(data: Any) -> Schedule:
    """Reads what `to_json` wrote, and validates it.

    Raises:
      ScheduleError: a field is missing or of another form, or the schedule cannot run.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> from_json(to_json(gpipe(2, 4))) == gpipe(2, 4)
      True
    """
    try:
        peak = data["peak_in_flight"]
        schedule = Schedule(
            name=str(data["name"]),
            placement=Placement(tuple(data["stages"])),
            num_microbatches=data["num_microbatches"],
            orders=tuple(tuple(map(Action.parse, row.split())) for row in data["orders"]),
            peak_in_flight=None if peak is None else tuple(peak),
            overlapped=tuple(map(Action.parse, data.get("overlapped", "").split())),
            num_slices=data.get("num_slices", 1),
            ticks=tuple(map(tuple, data["ticks"])) if "ticks" in data else None,
        )
    except KeyError as error:
        raise ScheduleError(f"A schedule in JSON needs {error}.") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ScheduleError(f"This is not a schedule in JSON: {error}") from None
    validate(schedule)
    return schedule


_LIBRARY = str(Path(__file__).parents[1])


def is_users(name: str) -> bool:
    """Whether a schedule's name is a file "PATH.csv" or a function "module:function".

    Example:
      >>> is_users("mine.csv"), is_users("package.module:mine"), is_users("1f1b")
      (True, True, False)
    """
    return is_file(name) or ":" in name


def is_file(name: str) -> bool:
    """Whether a schedule's name is a file "PATH.csv"."""
    return name.lower().endswith(".csv")


def load(
    name: str,
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    clock: _Options | None = None,
    **options: Any,
) -> Schedule:
    """Loads and validates a user's schedule, by a name and with options as of `catalog.build`.

    Args:
      clock: the costs of the later timing: passed to a function that has parameters of these names.
    """
    shape = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    wanted = {argument: number for argument, number in shape.items() if number is not None}
    if not is_file(name):
        if num_stages is None or num_microbatches is None:
            raise ArgumentError([no_shape(name)])
        return _load_function(name, num_stages, num_microbatches, clock or {}, options)
    if options:
        extra = ", ".join(f"${argument}" for argument in options)
        rule = f"is a schedule as it stands: leave out {extra}"
        refuse([Problem("name", name, rule, others=dict.fromkeys(options))])
    try:
        schedule = read_csv(name)
    except OSError as error:
        raise ArgumentError([Problem("name", name, f"cannot be read: {error.strerror}")]) from None
    own = {argument: getattr(schedule, argument) for argument in wanted}
    if own != wanted:
        rule = f"is not a schedule for {' and '.join(f'${argument}' for argument in wanted)}"
        refuse([Problem("name", name, rule, own, wanted)])
    return schedule


def _load_function(
    name: str, stages: int, microbatches: int, clock: _Options, options: _Options
) -> Schedule:
    """Calls the function of a name, with the costs for which it has parameters."""
    function = _function(name)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        unsaid = "does not say what parameters it has, so it cannot be used"
        raise ValueError(f"{name} {unsaid}.") from None
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        refuse(
            Problem(
                key, options[key], f"the function has no parameter {key}", (None,), schedule=name
            )
            for key in sorted(options.keys() - parameters.keys())
        )
    costs = {cost: value for cost, value in clock.items() if cost in parameters}
    return call_user(name, function, stages, microbatches, **options, **costs)


def no_shape(name: str) -> Problem:
    """Says that a schedule was asked for without its stages or its microbatches."""
    rule = "needs $num_stages and $num_microbatches"
    return Problem("name", name, rule, others={"num_stages": None, "num_microbatches": None})


def call_user(
    name: str, function: Callable[..., Schedule], stages: int, microbatches: int, **options: Any
) -> Schedule:
    """Calls a user's function for a schedule, which gets this name, and checks what it returns.

    Raises:
      ValueError: the function does not take these arguments, raises something, or returns anything
        but a schedule of p stages, m microbatches and, if they are an option, k slices.
      ScheduleError: the schedule cannot run.
    """
    try:
        inspect.signature(function).bind(stages, microbatches, **options)
    except TypeError as error:
        names = ", ".join(["num_stages", "num_microbatches", *(f"{key}=..." for key in options)])
        raise ValueError(f"{name} cannot be called as function({names}): {error}.") from None
    try:
        schedule = function(stages, microbatches, **options)
    except Exception as error:  # a user's code may raise anything
        raise ValueError(f"{name} {_raised(error)}") from error
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{name} returned {type(schedule).__name__}, and must return a Schedule.")
    schedule = dataclasses.replace(schedule, name=name)
    validate(schedule)
    asked = {"stages": stages, "microbatches": microbatches}
    asked |= {"slices": options["num_slices"]} if "num_slices" in options else {}
    made = {what: getattr(schedule, f"num_{what}") for what in asked}
    if made != asked:
        returned, wanted = (
            ", ".join(f"{what}={count}" for what, count in counts.items())
            for counts in (made, asked)
        )
        raise ValueError(f"{name} returned a schedule of {returned}; it was asked for {wanted}.")
    return schedule


def _function(name: str) -> Callable[..., Schedule]:
    module_name, _, function_name = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise _no_function(name, f"{module_name!r} is not the full name of a module")
    if os.getcwd() not in sys.path and "" not in sys.path:
        # An installed command does not search the current folder by itself.
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything when it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise _no_function(name, str(error)) from None
        raise ValueError(f"{name!r} cannot be imported: {module_name} {_raised(error)}") from error
    if not hasattr(module, function_name):
        raise _no_function(name, f"module {module_name!r} has no attribute {function_name!r}")
    function: Callable[..., Schedule] = getattr(module, function_name)
    if not callable(function):
        raise ValueError(f"{name!r} is not a function but {type(function).__name__}.")
    return function


def _no_function(name: str, reason: str) -> ArgumentError:
    rule = f"is not a function that Python can import: {reason}"
    note = "Nearest valid: 'module:function', for example 'my_schedules:mine'."
    return ArgumentError([Problem("name", name, rule, note=note)])


def _raised(error: Exception) -> str:
    """Describes an error and its place: the unreadable file, or the deepest line of others."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(("<", _LIBRARY))]
    place = f"{(theirs or frames)[-1].filename}:{(theirs or frames)[-1].lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    return f"raised {type(error).__name__} at {place}: {error}"
