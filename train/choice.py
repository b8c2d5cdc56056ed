"""What a run has chosen, a schedule and a partition, as its folder records it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpipe.files import read_json, write_whole
from jaxpipe.schedule import Schedule, from_json, is_users, lower, to_json
from train import pipeline_section
from train.config import Config


@dataclasses.dataclass(frozen=True)
class Choice:
    """A schedule and the partition.

    Args:
      schedule: the order of every stage.
      layer_counts: layers of every virtual stage.
      layer_costs: the costs that the partition balances, one number per layer.
      vocabulary: "split" or "ends", as of ``pipeline.vocabulary``.
    """

    schedule: Schedule
    layer_counts: tuple[int, ...]
    layer_costs: tuple[float, ...]
    vocabulary: str

    def to_json(self) -> dict[str, Any]:
        """Returns an object that JSON can hold."""
        counts, costs = list(self.layer_counts), list(self.layer_costs)
        return {
            "schedule": to_json(self.schedule),
            "layer_counts": counts,
            "layer_costs": costs,
            "vocabulary": self.vocabulary,
        }

    @classmethod
    def from_json(cls, data: Any) -> Choice:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: its form is wrong, the schedule cannot run, or the parts do not fit together.
        """
        try:
            counts, costs = tuple(data["layer_counts"]), tuple(data["layer_costs"])
            # Earlier runs, which do not record it, have split the vocabulary.
            vocabulary = data.get("vocabulary", "split")
            choice = cls(from_json(data["schedule"]), counts, costs, vocabulary)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it has no choice of a schedule and a partition: {error}") from None
        if not _are_all(int, counts) or not _are_all((int, float), costs):
            raise ValueError("layer_counts and layer_costs must be lists of numbers")
        if vocabulary not in ("split", "ends"):
            raise ValueError('vocabulary must be "split" or "ends"')
        needed = choice.schedule.placement.num_virtual_stages
        if len(counts) != needed or min(counts) < 1:
            raise ValueError(f"layer_counts must be {needed} numbers of at least 1")
        if len(costs) != sum(counts) or not all(0 < cost < math.inf for cost in costs):
            raise ValueError(f"layer_costs must be {sum(counts)} numbers above 0")
        return choice


def write_choice(path: Path, config: Config, choice: Choice) -> None:
    """Records a choice and the settings that led to it. The file is never half-written."""
    record = {"settings": _settings(config), **choice.to_json()}
    write_whole(path, f"{json.dumps(record, indent=1)}\n".encode())


def read_choice(path: Path, config: Config) -> Choice | None:
    """Reads what an earlier part of the run chose.

    Returns:
      The choice; None if there is no file, or if a setting that decides it has changed.

    Raises:
      ValueError: the file is damaged; the message is one line.
      OSError: the file cannot be read.
    """
    if not path.exists():
        return None
    try:
        record = read_json(path)
        before = dict(record["settings"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is not a record: {_in_one_line(error)}") from None
    # A field that an older version did not have counts as its default.
    defaults = Config().flat()
    now = _settings(config)
    if any(before.get(path, defaults.get(path)) != now[path] for path in now):
        return None
    try:
        choice = Choice.from_json(record)
        _check_fits(choice, config)
    except ValueError as error:
        raise ValueError(_in_one_line(error)) from None
    return choice


def _settings(config: Config) -> dict[str, Any]:
    """Returns the fields that decide the choice, by path."""
    name, sections = config.pipeline.schedule, {"pipeline", "costs"}
    paths = {"task", "mesh.stage"}
    settings = {
        path: value
        for path, value in pipeline_section.recorded(config).items()
        if path in paths or path.split(".")[0] in sections
    }
    settings["num_layers"] = config.num_layers
    if is_users(name):
        # Users who edit their own schedule want the new version.
        own = json.dumps(to_json(pipeline_section.order(config)))
        settings["order_sha256"] = hashlib.sha256(own.encode()).hexdigest()
    return settings


def _check_fits(choice: Choice, config: Config) -> None:
    schedule = choice.schedule
    pipeline, number = config.pipeline, sum(choice.layer_counts)
    have = schedule.num_stages, schedule.num_microbatches, schedule.num_slices, number
    slices = pipeline.sequence_slices
    want = config.mesh.stage, pipeline.microbatches, slices, config.num_layers
    if have != want:
        raise ValueError(f"(stages, microbatches, slices, layers) is {have}, and must be {want}")
    lower(schedule, choice.layer_counts)


def _are_all(kinds: type | tuple[type, ...], values: Sequence[Any]) -> bool:
    return all(isinstance(value, kinds) for value in values)


def _in_one_line(error: Exception) -> str:
    # Further lines draw the schedule.
    return " ".join(line.strip() for line in str(error).splitlines()[:2])
