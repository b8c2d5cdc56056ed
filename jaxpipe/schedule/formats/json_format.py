"""A whole schedule as JSON, in both directions, with placement and promised peak."""

from __future__ import annotations

from typing import Any

from jaxpipe.schedule.actions import Action, Schedule
from jaxpipe.schedule.check.validate import ScheduleError, validate
from jaxpipe.schedule.placement import Placement


def to_json(schedule: Schedule) -> dict[str, Any]:
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
        )
    except KeyError as error:
        raise ScheduleError(f"A schedule in JSON needs {error}.") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ScheduleError(f"This is no schedule in JSON: {error}") from None
    validate(schedule)
    return schedule
