"""Bubble rates that the authors of Zero Bubble computed from times that they measured.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241: milliseconds of F, B, W and a
message in table 6, bubble rates in table 5. A rate is that of the longest span of a stage, from its
first action to its last: their optimizer steps stage by stage.
"""

from __future__ import annotations

import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.simulate import Costs, simulate

# Stages, microbatches, (F, B, W, message), and the rates of 1F1B, ZB-H1 and ZB-H2.
MEASURED = (
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    (8, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559)),
    (8, 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
    (32, 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490)),
    (32, 256, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0594, 0.0257)),
)


@pytest.mark.parametrize(
    ("name", "column"), [("1f1b-fused", 0), ("zb-h1-published", 1), ("zb-h2-published", 2)]
)
def test_bubbles_at_measured_costs_are_those_that_the_authors_state(name, column):
    for stages, microbatches, measured, rates in MEASURED:
        *kinds, message = measured
        costs = Costs(*kinds, message=message)
        schedule = catalog.build(name, stages=stages, microbatches=microbatches)
        longest = max(simulate(schedule, costs).stage_spans)
        rate = 1 - microbatches * sum(kinds) / longest
        assert rate == pytest.approx(rates[column], abs=1e-4), (stages, microbatches)
