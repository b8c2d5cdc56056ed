"""Rules of asynchronous training: the settings that go with it, and those that do not."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpipe import schedules
from jaxpipe.schedule import is_users
from train import configured, errors
from train.config import AsynchronousConfig, Config
from train.errors import Failure

_REFUSED = (
    ("weights", "stacked", "has no room for the versions of weights that {schedule} keeps"),
    ("compute_dtype", None, "has no place beside the versions of weights that {schedule} keeps"),
    (
        "residuals",
        "device",
        "would leave the host: {schedule} keeps them from step to step",
    ),
    (
        "update",
        "step",
        "has no effect: {schedule} updates every stage as soon as its gradient is complete",
    ),
)
"""Fields of ``pipeline``, the value that each must have, and the reason."""


def problems(config: Config) -> Iterator[Failure]:
    """Finds settings without effect, with too few steps, or that asynchronous training refuses."""
    settings, name = config.asynchronous, config.pipeline.schedule
    if not configured.is_asynchronous(config):
        if name not in {entry.name for entry in schedules.entries()} and not is_users(name):
            return  # another rule says so
        for field, default in AsynchronousConfig().model_dump().items():
            if getattr(settings, field) != default:
                yield Failure(
                    f"asynchronous.{field}={getattr(settings, field)} has no effect: "
                    f"pipeline.schedule={name} drains the pipeline in every step, so no weights "
                    f"are late. Nearest valid: {default}, or pipeline.schedule=pipemare.",
                    (f"asynchronous.{field}", "pipeline.schedule"),
                )
        return
    yield from _refused(config)
    try:
        configured.steady_state(config)
    except ValueError as error:
        yield from errors.of_schedule(error, name)
    if settings.discrepancy_decay and name != "pipemare":
        yield Failure(
            f"asynchronous.discrepancy_decay={settings.discrepancy_decay} corrects what the "
            f"backward of pipeline.schedule=pipemare reads; with {name} it reads the weights of "
            "its forward. Nearest valid: 0.",
            ("asynchronous.discrepancy_decay", "pipeline.schedule"),
        )
    if settings.warmup_steps >= config.train.steps:
        yield Failure(
            f"asynchronous.warmup_steps={settings.warmup_steps} leaves none of train.steps="
            f"{config.train.steps} for pipeline.schedule={name}. Nearest valid: "
            f"{config.train.steps - 1}, or pipeline.schedule=1f1b.",
            ("asynchronous.warmup_steps", "train.steps"),
        )


def _refused(config: Config) -> Iterator[Failure]:
    for name, needed, why in _REFUSED:
        value = getattr(config.pipeline, name)
        if value not in (needed, "auto"):
            path, schedule = f"pipeline.{name}", f"pipeline.schedule={config.pipeline.schedule}"
            yield Failure(
                f"{path}={value} {why.format(schedule=schedule)}. Nearest valid: "
                f"{'none' if needed is None else needed}.",
                (path, "pipeline.schedule"),
            )
