"""Threads for simulated devices: as many as XLA needs to run one program and hand over the next.

Where devices meet, a program holds one of XLA's threads for each device. The next program that is
handed over holds one more for each while 32 programs wait on a device. XLA starts only one thread
per device, so a loop that never waits for a result could stop for good
(docs/design/001-executor.md).
"""

import os
import re
import sys

COUNT_FLAG = "--xla_force_host_platform_device_count"
_VARIABLE = "PJRT_NPROC"


def suffice() -> None:
    """Asks XLA for two threads per simulated device, by the variable ``PJRT_NPROC``.

    XLA reads it once, when jax makes its CPU devices. A larger number that the user has set stays.
    """
    needed = 2 * _simulated_devices()
    if needed > 2:
        found = os.environ.get(_VARIABLE, "")
        usual = int(found) if found.isdecimal() else (os.cpu_count() or 1)
        os.environ[_VARIABLE] = str(max(usual, needed))


def _simulated_devices() -> int:
    """Counts the CPU devices that ``XLA_FLAGS`` or jax's settings ask for, 1 by default."""
    flags = re.findall(rf"{COUNT_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    jax = sys.modules.get("jax")  # nothing imports it for this
    setting = jax.config.jax_num_cpu_devices if jax else 1
    return max(1, setting, *map(int, flags[-1:]))
