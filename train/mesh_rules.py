"""Which meshes a configuration may ask for."""

from __future__ import annotations

from collections.abc import Iterator

from models.validation import nearest_divisors
from train import configured, tasks
from train.config import Config
from train.errors import Failure


def replicas(config: Config) -> Iterator[Failure]:
    """Replicas are groups of data shards."""
    data, replica = config.mesh.data, config.mesh.replica
    if data % replica:
        yield Failure(
            f"mesh.replica={replica} does not divide mesh.data={data}. Nearest valid: "
            f"mesh.replica={_divisors(data, replica)}.",
            ("mesh.replica", "mesh.data"),
        )


def tensor(config: Config) -> Iterator[Failure]:
    """Devices that share a layer have equal parts of it."""
    devices = config.mesh.tensor
    if devices == 1:
        return
    if configured.is_asynchronous(config):
        yield Failure(
            f"mesh.tensor={devices} has no place in pipeline.schedule="
            f"{config.pipeline.schedule}, which splits no layer over devices. Nearest valid: "
            "mesh.tensor=1, or pipeline.schedule=1f1b.",
            ("mesh.tensor", "pipeline.schedule"),
        )
    counts = tasks.make(config).shared()
    if not counts:
        yield Failure(
            f"mesh.tensor={devices}: layers of task={config.task} are not split over devices; "
            "those of a GPT without experts are. Nearest valid: mesh.tensor=1.",
            ("mesh.tensor", "task"),
        )
    for field, count in counts.items():
        if count % devices:
            below = count // devices * devices
            multiples = " or ".join(str(n) for n in (below, below + devices) if n)
            yield Failure(
                f"model.{field}={count} is not divisible by mesh.tensor={devices}, whose devices "
                f"share it. Nearest valid: model.{field}={multiples}, or mesh.tensor="
                f"{_divisors(count, devices)}.",
                (f"model.{field}", "mesh.tensor"),
            )


def _divisors(whole: int, value: int) -> str:
    return " or ".join(map(str, nearest_divisors(whole, value)))
