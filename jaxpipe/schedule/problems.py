"""Problems with arguments, as data: every surface renders them in its own names.

The same number is ``num_microbatches`` in Python, ``--microbatches`` on the command line and
``pipeline.microbatches`` in a configuration (``docs/design/010-checkpoints.md``).
"""

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Template

Spell = Callable[[str, object], str]
"""Writes an argument with its value as a surface does; only its name if the value is None."""

_LONGEST = 200
"""Characters of a value that messages show."""


def shortened(text: str) -> str:
    """Leaves out the middle of a long text."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 50]}...{text[-47:]}"


def shown(value: object) -> str:
    """Writes a value: text in quotes, anything else as it prints; long ones shortened."""
    return shortened(repr(value) if isinstance(value, str) else str(value))


def printable(text: str) -> str:
    """Escapes control characters: what comes from a file may hold codes for the terminal.

    Example:
      >>> print(printable("layers." + chr(27) + "[31m"))
      layers.\\x1b[31m
    """
    escaped = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return "".join(escaped)


def counted(number: int, noun: str) -> str:
    """Writes a number of things, one or several.

    Example:
      >>> counted(1, "layer"), counted(1000, "layer")
      ('1 layer', '1,000 layers')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def plain(value: float) -> str:
    """Writes a number in six digits, or all before the point, never with an exponent.

    Example:
      >>> plain(25.5), plain(100 / 3), plain(1234567.8)
      ('25.5', '33.3333', '1234568')
    """
    return f"{value:.0f}" if value >= 1e5 else f"{value:g}"


def in_python(argument: str, value: object) -> str:
    """Writes an argument as a keyword of the function that was called."""
    return argument if value is None else f"{argument}={shown(value)}"


@dataclasses.dataclass(frozen=True)
class Problem:
    """One argument that does not fit.

    Args:
      argument: its name in the function that refuses it, such as ``num_microbatches``.
      value: what was given; None if nothing was.
      rule: what must hold, as the rest of the sentence; ``$name`` stands for another argument.
      nearest: the nearest valid values, None for leaving it out; or values of arguments by name.
      others: what else the rule reads, by name.
      schedule: the name of the schedule, if the rule belongs to one.
      note: a sentence that helps further.

    Example:
      >>> problem = Problem("group", 2, "must be at least $num_stages", (4,), {"num_stages": 4})
      >>> print(*problem.lines())
      group=2 must be at least num_stages=4. Nearest valid: 4.
      >>> print(*problem.lines(lambda argument, value: f"--{argument} {value}"))
      --group 2 must be at least --num_stages 4. Nearest valid: 4.
    """

    argument: str
    value: object
    rule: str
    nearest: Sequence[object] | Mapping[str, object] = ()
    others: Mapping[str, object] = dataclasses.field(default_factory=dict)
    schedule: str | None = None
    note: str = ""

    def lines(self, spell: Spell = in_python) -> list[str]:
        """Renders the problem in a surface's names, then the nearest valid values, if any."""
        others = {name: spell(name, value) for name, value in self.others.items()}
        fits = "" if self.schedule is None else f"does not fit schedule {self.schedule!r}: "
        rule = Template(self.rule).safe_substitute(others)
        lines = [f"{spell(self.argument, self.value)} {fits}{rule}."]
        if isinstance(self.nearest, Mapping):
            nearest = [spell(name, value) for name, value in self.nearest.items()]
        else:
            nearest = [shown(value) for value in self.nearest if value is not None]
        may_leave_out = any(value is None for value in self.nearest)
        own = spell(self.argument, None)
        if nearest:
            other = f", or leave {own} out" * may_leave_out
            lines.append(f"Nearest valid: {', '.join(nearest)}{other}.")
        elif may_leave_out:
            lines.append(f"Leave {own} out.")
        return [*lines[:-1], f"{lines[-1]} {self.note}".rstrip()]


class ArgumentError(ValueError):
    """Arguments that do not fit, all in one message.

    Args:
      problems: the problems, at least one, or a text, which is the same on every surface.
      spell: the names that ``str(error)`` uses.
    """

    def __init__(self, problems: Iterable[Problem | str] | str, spell: Spell = in_python) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.spell = spell
        super().__init__(self.problems, spell)

    def __str__(self) -> str:
        return self.text(self.spell)

    def text(self, spell: Spell) -> str:
        """The whole message in a surface's names."""
        lines = ([p] if isinstance(p, str) else p.lines(spell) for p in self.problems)
        return printable("\n".join(line for problem in lines for line in problem))


def refuse(problems: Iterable[Problem | str]) -> None:
    """Raises one `ArgumentError` with all problems, if there are any."""
    if refused := tuple(problems):
        raise ArgumentError(refused)


def below_one(optional: Mapping[str, int | None] | None = None, /, **counts: int) -> list[Problem]:
    """Lists the counts that are not whole numbers of at least 1.

    Args:
      optional: counts that may be None, by name.
      counts: counts that may not.

    Example:
      >>> [problem.argument for problem in below_one({"group": None}, stages=0, chunks=2)]
      ['stages']
    """
    given = {name: count for name, count in (optional or {}).items() if count is not None}
    problems = []
    for name, count in (counts | given).items():
        if isinstance(count, bool) or not isinstance(count, numbers.Integral):
            problems.append(Problem(name, count, "must be a whole number of at least 1", (1,)))
        elif count < 1:
            problems.append(Problem(name, count, "must be at least 1", (1,)))
    return problems
