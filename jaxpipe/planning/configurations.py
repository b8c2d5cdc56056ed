"""Sources of models: readers of configurations that other packages register, or a file.

The library knows no trainer. A package whose configurations ``jaxpipe plan`` shall read has an
entry point of the group ``jaxpipe.configurations`` that names a function ``(path) -> Configured``.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from jaxpipe.planning.plans import Plan
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.simulate import Costs

GROUP = "jaxpipe.configurations"
"""The group of entry points."""
COMPILED_FOR = ("h100", "h200", "b200", "cpu")
"""Devices for which programs are compiled where there are none; an H200 computes as an H100."""


class Configured(Protocol):
    """A model as a configuration has it."""

    def sizes(
        self,
        devices: Sequence[int],
        most_context: int,
        most_slices: int,
        progress: Callable[[float], None],
    ) -> ModelSizes:
        """Counts the model for all numbers of devices that it lets share a layer in clusters of
        these sizes, up to so many that share a sequence, and so many slices of one.

        ``progress`` is told which share of the work is done.
        """

    def compiled_bytes(self, plan: Plan, costs: Costs, device: str) -> int:
        """Compiles a plan's training step without its devices, for one in `COMPILED_FOR`; returns
        what it takes of each while it runs. Costs are as for `write`."""

    def write(self, plan: Plan, costs: Costs, steps: int | None) -> str:
        """Writes the text of a configuration that trains the model by a plan, whose schedule is
        made for these costs of a chunk; None keeps the steps that the configuration has."""


def read(path: Path) -> Configured:
    """Reads a configuration with the reader that is installed."""
    points = entry_points(group=GROUP)
    reason = f"no installed package has an entry point of the group {GROUP}"
    for point in points:
        try:
            reader = point.load()
        except ModuleNotFoundError as error:
            # jaxpipe's own names its trainer, which runs from a clone and is not in the wheel.
            reason = f"{point.value} cannot be imported ({error})"
            continue
        return reader(path)
    note = "A file of sizes needs no reader: --sizes FILE. The trainer's runs in a clone."
    refuse([Problem("config", str(path), f"cannot be read: {reason}", note=note)])
    raise AssertionError  # refused
