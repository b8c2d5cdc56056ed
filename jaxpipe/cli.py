"""The ``jaxpipe`` command: look at schedules, plan a training, measure devices. Only the last needs
any, and jax is imported only for the model of a configuration.

Messages for the user's mistakes go to stderr with exit status 2.
"""

import sys
from collections.abc import Sequence

import tyro

from jaxpipe import __version__
from jaxpipe.commands.measure import measure
from jaxpipe.commands.options import message
from jaxpipe.commands.plan import plan
from jaxpipe.commands.show import show, validate
from jaxpipe.commands.tables import compare, schedules


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, by default with the process's own arguments; returns the exit status: 0,
    or 2 for a mistake of the user's."""
    given = sys.argv[1:] if arguments is None else arguments
    if list(given) == ["--version"]:
        print(f"jaxpipe {__version__}")
        return 0
    commands = show, schedules, compare, validate, plan, measure
    try:
        tyro.extras.subcommand_cli_from_dict(
            {command.__name__: command for command in commands},
            prog="jaxpipe",
            description="Draw, compare and check pipeline schedules; plan runs; measure devices.",
            args=given,
        )
    except (ValueError, OSError) as error:
        print(message(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
