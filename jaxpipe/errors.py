"""Problems of arguments, as data, for programs that check arguments of their own.

A `Problem` is one argument that does not fit; `refuse` raises one `ArgumentError` with all of them.
Neither says how an argument is written, so that a command line or a configuration can render them
in its own names. Imports no jax.

Example:
  >>> def check(width, num_heads):
  ...     problems = below_one(width=width, num_heads=num_heads)
  ...     if not problems and width % num_heads:
  ...         rule = "must divide $width"
  ...         problems.append(Problem("num_heads", num_heads, rule, others={"width": width}))
  ...     refuse(problems)
  >>> try:
  ...     check(width=8, num_heads=3)
  ... except ArgumentError as error:
  ...     print(error)
  ...     print(error.text(lambda argument, value: f"--{argument} {value}"))
  num_heads=3 must divide width=8.
  --num_heads 3 must divide --width 8.
"""

from jaxpipe.schedule.check import ScheduleError
from jaxpipe.schedule.problems import (
    ArgumentError,
    Problem,
    below_one,
    counted,
    in_python,
    printable,
    refuse,
    shortened,
    shown,
)

__all__ = [
    "ArgumentError",
    "Problem",
    "ScheduleError",
    "below_one",
    "counted",
    "in_python",
    "printable",
    "refuse",
    "shortened",
    "shown",
]
