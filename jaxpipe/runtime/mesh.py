"""The device mesh: a ``data`` axis of shards, each of them a pipeline along ``stage``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from jaxpipe.schedule.problems import below_one, refuse

DATA, STAGE = "data", "stage"

_LOG = logging.getLogger(__name__)


def make_mesh(*, stage: int, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the ``(data, stage)`` mesh the pipeline runs on.

    Consecutive devices form one pipeline, so that neighbouring stages are near each other.

    Args:
      stage: number of pipeline stages.
      data: number of data shards.
      devices: the devices to use; by default the first ``data * stage`` of `jax.devices`.

    Raises:
      ValueError: a number below 1, or too few devices.

    Example:
      >>> make_mesh(stage=1).axis_names
      ('data', 'stage')
    """
    refuse(below_one(data=data, stage=stage))
    available = list(jax.devices() if devices is None else devices)
    needed = data * stage
    if needed > len(available):
        raise ValueError(
            f"data={data} x stage={stage} needs {needed} devices, but there are "
            f"{len(available)} ({available[0].platform}). On CPU, simulate them with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}."
        )
    types = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((data, stage), (DATA, STAGE), axis_types=types, devices=available[:needed])
    leave_compilation_cache(mesh)
    return mesh


def leave_compilation_cache(mesh: Mesh) -> None:
    """Switches jax's persistent compilation cache off in this process for a mesh of CPU devices.

    A CPU program that XLA loads from the cache has lost the order between the collectives inside a
    loop and those beside it. Its devices may then wait for each other forever
    (docs/design/002-executor.md). This works whatever jax has compiled before; a line in the log
    says so if a cache was configured.

    Args:
      mesh: of one device it needs no collectives, and the cache stays as it is; on GPUs, too.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    config: Any = jax.config  # its stubs name no settings
    was_enabled = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    # jax looks at the setting once, when it first compiles.
    compilation_cache.reset_cache()
    if was_enabled and config.jax_compilation_cache_dir:
        _LOG.warning(
            "jax_compilation_cache_dir=%s is not used: XLA's programs for several CPU devices can "
            "deadlock when they are loaded from a cache.",
            config.jax_compilation_cache_dir,
        )
