"""Types of a configuration's fields: numbers with a range."""

from __future__ import annotations

import dataclasses
from typing import Annotated


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of legal numbers of a field; `train.checks` applies it.

    Args:
      low: the smallest legal number.
      high: the largest, or None.
      above: the number must be larger than ``low``, not equal to it.
      below: the number must be smaller than ``high``, not equal to it.
    """

    low: float
    high: float | None = None
    above: bool = False
    below: bool = False


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Weight = Annotated[float, Range(1e-6, 1e6)]
Beta = Annotated[float, Range(0, 1, below=True)]
