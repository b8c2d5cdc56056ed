"""A whole schedule as JSON, in both directions, with placement, slices and promised peak.

PyTorch's CSV (`jaxpipe.schedule.formats.csv_format`) has no room for slices, which decide the
ticks.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxpipe.schedule.actions import Action, Minibatches, MinibatchSchedule, Schedule, Slice
from jaxpipe.schedule.check.validate import ScheduleError, validate
from jaxpipe.schedule.placement import Placement

_SLICE = re.compile(r"([0-9]+):([0-9]+[A-Z]+[0-9]+)\[([0-9]+):([0-9]+)\]")


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Writes the fields of a schedule as an object that JSON can hold.

    An order is one text for each stage, and a slice is ``tick:action[lo:hi]``.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> to_json(gpipe(2, 1))["orders"]
      ['0F0 0B0 0W0', '1F0 1B0 1W0']
    """
    slices, minibatches, overlapped = schedule.slices, schedule.minibatches, schedule.overlapped
    return {
        "name": schedule.name,
        "stages": list(schedule.placement.stages),
        "num_copies": schedule.placement.num_copies,
        "num_microbatches": schedule.num_microbatches,
        "peak_in_flight": schedule.peak_in_flight and list(schedule.peak_in_flight),
        "orders": [" ".join(map(str, order)) for order in schedule.orders],
        "slices": slices and [" ".join(map(_written, row)) for row in slices],
        **({} if minibatches is None else {"minibatches": dataclasses.asdict(minibatches)}),
        **({"overlapped": " ".join(map(str, overlapped))} if overlapped else {}),
    }


def from_json(data: Any) -> Schedule:
    """Reads what `to_json` wrote, and validates it.

    Raises:
      ScheduleError: a field is missing or of another form, or the schedule cannot run.

    Example:
      >>> from jaxpipe.schedule.generators.gpipe import gpipe
      >>> from_json(to_json(gpipe(2, 4))) == gpipe(2, 4)
      True
    """
    try:
        peak, slices = data["peak_in_flight"], data["slices"]
        minibatches = data.get("minibatches")
        several = {} if minibatches is None else {"several": Minibatches(**minibatches)}
        make = Schedule if minibatches is None else MinibatchSchedule
        schedule = make(
            name=str(data["name"]),
            placement=Placement(tuple(data["stages"]), data["num_copies"]),
            num_microbatches=data["num_microbatches"],
            orders=tuple(tuple(map(Action.parse, row.split())) for row in data["orders"]),
            peak_in_flight=None if peak is None else tuple(peak),
            slices=None if slices is None else tuple(map(_read_row, slices)),
            overlapped=tuple(map(Action.parse, data.get("overlapped", "").split())),
            **several,
        )
    except KeyError as error:
        raise ScheduleError(f"A schedule in JSON needs {error}.") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ScheduleError(f"This is no schedule in JSON: {error}") from None
    validate(schedule)
    return schedule


def _written(part: Slice) -> str:
    return f"{part.tick}:{part.action}[{part.lo}:{part.hi}]"


def _read_row(row: str) -> tuple[Slice, ...]:
    return tuple(map(_read, row.split()))


def _read(text: str) -> Slice:
    match = _SLICE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a slice: write tick:action[lo:hi], such as '3:0F1[0:2]'."
        )
    return Slice(int(match[1]), Action.parse(match[2]), int(match[3]), int(match[4]))
