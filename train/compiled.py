"""Compiles the training step of a configuration without its devices, and prints what it takes.

``jaxpipe plan --measure`` starts this program in a process of its own for every plan, because XLA
reads its flags, and jax counts its devices, only once.

    python -m train.compiled --config plan.yaml --device h100
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence

import jax
import tyro

from jaxpipe.errors import ArgumentError
from jaxpipe.planning import without_devices
from jaxpipe.testing import simulate_devices
from train import command_line
from train.errors import ConfigError
from train.step import Setup


def main(config: str, device: str) -> None:
    """Prints bytes of a device and seconds to compile, as JSON.

    Args:
      config: a configuration.
      device: h100, b200, or cpu for simulated devices.
    """
    jax.config.update("jax_platforms", "cpu")  # also where there are GPUs
    parsed = command_line.parse(["--config", config]).config
    count = parsed.mesh.num_devices
    devices: Sequence[jax.Device] | None
    attention: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if device == "cpu":
        simulate_devices(count)
        devices = None
    else:
        without_devices.use_gpu_flags()
        blackwell = device == "b200"
        devices = without_devices.gpus("b200" if blackwell else "h100", count)
        capability = "10.0" if blackwell else "9.0"
        attention = without_devices.attention_of_gpus(compute_capability=capability)
    with attention:
        setup = Setup(parsed, devices=devices)
        began = time.perf_counter()
        lowered = setup.lower()
        if parsed.optimizer.offload and devices is not None:
            without_devices.put_on_host(lowered, _moments(setup))
        program = lowered.compile()
    seconds = time.perf_counter() - began
    print(json.dumps({"bytes": without_devices.device_bytes(program), "seconds": seconds}))


def _moments(setup: Setup) -> list[int]:
    """Lists, by number, the arguments of a step that are arrays of its optimizer's state."""
    state = setup.state_shapes
    first = len(jax.tree.leaves(state.params))
    leaves = jax.tree.leaves(state.optimizer)
    return [first + number for number, leaf in enumerate(leaves) if leaf.ndim]


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ArgumentError, ConfigError) as error:
        sys.exit(str(error))
