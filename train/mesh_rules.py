"""Rules for the meshes that a configuration may ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from models.validation import nearest_divisors
from train import configured, tasks
from train.config import Config
from train.errors import Failure

_FAMILIES = {
    "tensor": "gpt, bert and transformer",
    "context": "gpt",
    "expert": "gpt with model.num_experts",
}


def replicas(config: Config) -> Iterator[Failure]:
    """Checks that replicas divide data shards, and that experts divide a replica's shards."""
    data, replica, expert = config.mesh.data, config.mesh.replica, config.mesh.expert
    if data % replica:
        yield Failure(
            f"mesh.replica={replica} does not divide mesh.data={data}. Nearest valid: "
            f"mesh.replica={_divisors(data, replica)}.",
            ("mesh.replica", "mesh.data"),
        )
    elif data // replica % expert:
        yield Failure(
            f"mesh.expert={expert} does not divide mesh.data={data} / mesh.replica={replica}. "
            f"Nearest valid: mesh.expert={_divisors(data // replica, expert)}.",
            ("mesh.expert", "mesh.data", "mesh.replica"),
        )


def shared_axes(config: Config) -> Iterator[Failure]:
    """Checks that devices that share a layer have equal parts of it."""
    for axis, devices in config.mesh.shared_axes().items():
        field = f"mesh.{axis}"
        if configured.is_asynchronous(config):
            yield Failure(
                f"{field}={devices} has no place in pipeline.schedule="
                f"{config.pipeline.schedule}, which splits no layer over devices. Nearest valid: "
                f"{field}=1, or pipeline.schedule=1f1b.",
                (field, "pipeline.schedule"),
            )
        counts = tasks.make(config).shared(axis)
        if not counts:
            yield Failure(
                f"{field}={devices}: layers of task={config.task} are not split over devices so; "
                f"those of task={_FAMILIES[axis]} are. Nearest valid: {field}=1.",
                (field, "task"),
            )
        for name, count in counts.items():
            yield from _shared(config, axis, f"model.{name}", count)


def _shared(config: Config, axis: str, field: str, count: int) -> Iterator[Failure]:
    """Checks that ``count`` divides over devices; those of a context have two parts each."""
    devices = config.mesh.shared_axes()[axis]
    parts, rule, fields = devices, f"mesh.{axis}={devices}, whose devices share it", [field]
    if axis == "context":
        parts = devices * math.lcm(2, config.mesh.tensor)
        rule = f"{parts}: each of mesh.context={devices} devices has an early and a late part of it"
        if config.mesh.tensor > 1:
            rule += f", which mesh.tensor={config.mesh.tensor} devices share"
            fields.append("mesh.tensor")
    elif field == "model.sequence_length" and config.mesh.context > 1:
        return  # the rule of context is the stricter one
    if count % parts == 0:
        return
    below = count // parts * parts
    valid = [f"{field}={' or '.join(str(n) for n in (below, below + parts) if n)}"]
    per_device = parts // devices
    if count % per_device == 0:
        valid.append(f"mesh.{axis}={_divisors(count // per_device, devices)}")
    yield Failure(
        f"{field}={count} is not divisible by {rule}. Nearest valid: {', or '.join(valid)}.",
        (*fields, f"mesh.{axis}"),
    )


def _divisors(whole: int, value: int) -> str:
    return " or ".join(map(str, nearest_divisors(whole, value)))
