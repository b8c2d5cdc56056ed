"""Reads a run's configuration from a YAML file and from options, one for every field.

``--config configs/gpt-tiny.yaml --mesh.stage 2`` reads the file, then overrides a field. The task,
which the file or ``--task`` names, decides the fields of the model's section. This module checks
only names and types.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic
import tyro

from train import tasks
from train.config import Config, names_process
from train.config_file import load_yaml, validate
from train.errors import ConfigError, Failure


class Command(Config):
    """Trains a model through a pipeline."""

    config: str | None = None
    """YAML file; the other options override its fields."""
    resume: bool = False
    """Continue the run in run_dir from its newest whole checkpoint; start it if it has none yet."""
    dry_run: bool = False
    """Check, draw the schedule, compile and compare memory; train, read and write nothing."""
    evaluate: bool = False
    """Evaluate the weights of init_from, or of the latest checkpoint in run_dir; write nothing."""


@dataclasses.dataclass(frozen=True)
class Invocation:
    """A parsed command line.

    Args:
      config: the configuration, with defaults in place of fields that are wrong.
      resume: continue the run.
      dry_run: compile only.
      evaluate: evaluate only; ``init_from`` then names the weights.
      failures: wrong names and types in the file.
    """

    config: Config
    resume: bool = False
    dry_run: bool = False
    evaluate: bool = False
    failures: tuple[Failure, ...] = ()


def parse(arguments: Sequence[str]) -> Invocation:
    """Reads the file that ``--config`` names and applies the command line to it.

    Returns:
      The configuration, and the wrong names and types in the file; nothing else is checked.

    Raises:
      ConfigError: the file is missing, unreadable or not YAML, or there is no such task.
      SystemExit: tyro printed help (status 0) or refused an option (status 2).

    Example:
      >>> parse(["--mesh.stage", "2"]).config.mesh.stage
      2
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    finder.add_argument("--task")
    finder.add_argument("--init-from")
    given = finder.parse_known_args([a for a in arguments if a not in ("-h", "--help")])[0]
    raw = {} if given.config is None else load_yaml(Path(given.config))
    if init_from := given.init_from or raw.get("init_from"):
        from train import initial  # imports jax

        raw = initial.completed(raw, str(init_from), task=given.task)
    if names_process(raw):
        print(
            f"warning: {given.config} says how an earlier run was started, and its "
            "distributed.coordinator, num_processes and process_id are not read. To start several "
            "processes, pass them as options.",
            file=sys.stderr,
        )
    base, failures = validate(raw, source=given.config or "the defaults")
    if given.task is not None and given.task != base.task:
        # The task decides which fields the section of the model has.
        source = given.config or "the command line"
        base, failures = validate(raw | {"task": given.task}, source=source)
        if base.task != given.task:
            raise ConfigError([failure for failure in failures if failure.fields == ("task",)])
    model: Any = type(base.model)
    choices = f"Task to train: {', '.join(tasks.names())}, or module:Class of your own."
    task: Any = (str, pydantic.Field(base.task, description=choices))
    command = tyro.cli(
        pydantic.create_model("Command", __base__=Command, task=task, model=(model, base.model)),
        args=list(arguments),
        default=Command(**_sections(base)),
        prog="python train/train.py",
        description=Command.__doc__,
    )
    config, evaluate = Config(**_sections(command)), command.evaluate
    if evaluate and config.init_from is None:
        config = config.model_copy(update={"init_from": config.run_dir})
    return Invocation(config, command.resume, command.dry_run, evaluate, failures)


def _sections(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in Config.model_fields}
