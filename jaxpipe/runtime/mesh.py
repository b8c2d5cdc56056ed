"""The device mesh: a ``data`` axis of shards, each of them a pipeline along ``stage``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

DATA, STAGE = "data", "stage"


def make_mesh(*, stage: int, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the ``(data, stage)`` mesh the pipeline runs on.

    Consecutive devices form one pipeline, so that neighbouring stages are near each other.

    Args:
      stage: number of pipeline stages.
      data: number of data shards.
      devices: the devices to use; by default the first ``data * stage`` of `jax.devices`.

    Raises:
      ValueError: there are too few devices.

    Example:
      >>> make_mesh(stage=1).axis_names
      ('data', 'stage')
    """
    available = list(jax.devices() if devices is None else devices)
    needed = data * stage
    if needed > len(available):
        raise ValueError(
            f"mesh.data={data} x mesh.stage={stage} needs {needed} devices, but there are "
            f"{len(available)} ({available[0].platform}). On CPU, simulate them with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}."
        )
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, stage), (DATA, STAGE), axis_types=types, devices=available[:needed])
