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


def expert(config: Config) -> Iterator[Failure]:
    """Data shards that split the experts of a layer have equal numbers of them."""
    devices, count = config.mesh.expert, tasks.make(config).num_experts
    if devices == 1:
        return
    yield from _asynchronous(config, "expert", devices)
    if count is None:
        yield Failure(
            f"mesh.expert={devices}: the model of task={config.task} has no experts to split "
            "(model.num_experts). Nearest valid: mesh.expert=1.",
            ("mesh.expert", "task"),
        )
    else:
        yield from _unequal("num_experts", count, "expert", devices)
    data, replica = config.mesh.data, config.mesh.replica
    if data % replica == 0 and data // replica % devices:
        yield Failure(
            f"mesh.expert={devices} does not divide mesh.data={data} / mesh.replica={replica}. "
            f"Nearest valid: mesh.expert={_divisors(data // replica, devices)}.",
            ("mesh.expert", "mesh.data", "mesh.replica"),
        )


def _asynchronous(config: Config, axis: str, devices: int) -> Iterator[Failure]:
    if configured.is_asynchronous(config):
        yield Failure(
            f"mesh.{axis}={devices} has no place in pipeline.schedule="
            f"{config.pipeline.schedule}, which splits no layer over devices. Nearest valid: "
            f"mesh.{axis}=1, or pipeline.schedule=1f1b.",
            (f"mesh.{axis}", "pipeline.schedule"),
        )


def tensor(config: Config) -> Iterator[Failure]:
    """Devices that share a layer have equal parts of it."""
    devices = config.mesh.tensor
    if devices == 1:
        return
    yield from _asynchronous(config, "tensor", devices)
    counts = tasks.make(config).shared()
    if not counts:
        yield Failure(
            f"mesh.tensor={devices}: layers of task={config.task} are not split over devices; "
            "those of a GPT without experts are. Nearest valid: mesh.tensor=1.",
            ("mesh.tensor", "task"),
        )
    for field, count in counts.items():
        yield from _unequal(field, count, "tensor", devices)


def _unequal(field: str, count: int, axis: str, devices: int) -> Iterator[Failure]:
    """Says that devices cannot have equal parts of a count."""
    if count % devices:
        below = count // devices * devices
        multiples = " or ".join(str(n) for n in (below, below + devices) if n)
        yield Failure(
            f"model.{field}={count} is not divisible by mesh.{axis}={devices}, whose devices "
            f"share it. Nearest valid: model.{field}={multiples}, or mesh.{axis}="
            f"{_divisors(count, devices)}.",
            (f"model.{field}", f"mesh.{axis}"),
        )


def _divisors(whole: int, value: int) -> str:
    return " or ".join(map(str, nearest_divisors(whole, value)))
