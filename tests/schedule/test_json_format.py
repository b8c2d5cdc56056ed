"""Every schedule survives the trip through JSON as it is; what is damaged is refused."""

from __future__ import annotations

import json

import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.check.validate import ScheduleError
from jaxpipe.schedule.formats.json_format import from_json, to_json
from jaxpipe.schedule.generators.depth_first import one_f_one_b
from jaxpipe.schedule.simulate import Costs

_COSTS = Costs(1, 1.2, 0.8)
_SCHEDULE = one_f_one_b(2, 4)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v-published", "auto"])
def test_schedules_survive_the_round_trip(name):
    schedule = catalog.build(name, stages=4, microbatches=8, costs=_COSTS)
    assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("orders", ["0F0", "0F0"], "cannot run"),
        ("orders", ["0F0 zero", ""], "'zero' is not an action"),
        ("orders", "0F0", "is not an action"),
        ("orders", None, "no schedule in JSON"),
        ("orders", [3], "no schedule in JSON"),
        ("stages", [0, 7], "same number of virtual stages"),
        ("stages", ["0", "1"], "nothing but int"),
        ("stages", 2, "no schedule in JSON"),
        ("num_microbatches", "4", "num_microbatches"),
        ("num_microbatches", 5, "cannot run"),
        ("peak_in_flight", [1, 1], "cannot run"),
    ],
)
def test_what_is_damaged_is_refused(field, value, expected):
    with pytest.raises(ScheduleError, match=expected):
        from_json(to_json(_SCHEDULE) | {field: value})


def test_what_is_missing_is_named_and_anything_else_is_refused():
    whole = to_json(_SCHEDULE)
    for field in whole:
        with pytest.raises(ScheduleError, match=f"needs '{field}'"):
            from_json({name: value for name, value in whole.items() if name != field})
    for data in (None, 3, "text", [], [1]):
        with pytest.raises(ScheduleError, match="no schedule in JSON"):
            from_json(data)
