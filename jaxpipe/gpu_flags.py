"""XLA's flags for GPUs: the ones a pipeline needs, each with its reason.

They go into ``XLA_FLAGS``, which XLA reads once, when jax makes its first backend. A flag that the
installed XLA does not know would end the process there, so unknown ones are found in a child
process first and left out.
"""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Collection, MutableMapping, Sequence

COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer"
FLAGS = {
    # A loop whose trip count is in device memory costs the host a round trip for every iteration.
    # In a CUDA graph the device decides: the layer loops of a tick become one graph launch. What it
    # does to the overlap of collectives is not known for several GPUs: docs/cluster.md.
    COMMAND_BUFFERS: "+WHILE",
    # Messages in both directions, and the arrays of a layer that is gathered and of one that is
    # reduced, are in flight at once. By default one transfer at a time is, and the others are made
    # synchronous.
    "--xla_gpu_experimental_parallel_collective_overlap_limit": "16",
}
"""Flag to value. What each does to the compiled program: docs/design/001-executor.md."""

_PROBE = "from jaxlib import xla_client; xla_client.make_cpu_client()"
_PROBE_SECONDS = 60.0


def apply(
    environment: MutableMapping[str, str] | None = None, *, without: Collection[str] = ()
) -> tuple[str, ...]:
    """Adds `FLAGS` to ``XLA_FLAGS`` where jax will use a GPU. Call it before jax is first used.

    What the user has set in ``XLA_FLAGS`` wins, flag by flag; a file named there is left alone.

    Args:
      environment: variables; the process's own by default.
      without: flags to leave out.

    Returns:
      The flags that the installed XLA does not know, which were left out.

    Example:
      >>> variables = {"JAX_PLATFORMS": "cpu"}
      >>> apply(variables), variables
      ((), {'JAX_PLATFORMS': 'cpu'})
    """
    environment = os.environ if environment is None else environment
    given = environment.get("XLA_FLAGS", "").split()
    if not expects_gpu(environment) or (given and not given[0].startswith("-")):
        return ()
    names = {flag.split("=")[0] for flag in given} | set(without)
    wanted = [f"{name}={value}" for name, value in FLAGS.items() if name not in names]
    known = _known(wanted) if wanted else []
    environment["XLA_FLAGS"] = " ".join([*given, *known])
    return tuple(flag for flag in wanted if flag not in known)


def expects_gpu(environment: MutableMapping[str, str] | None = None) -> bool:
    """Whether jax has a CUDA plugin and may use it; asking jax itself would make the backends."""
    platforms = (os.environ if environment is None else environment).get("JAX_PLATFORMS", "")
    allowed = not platforms or {"cuda", "gpu"} & set(platforms.split(","))
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(allowed) and any("cuda" in plugin.name for plugin in plugins)


def _known(flags: Sequence[str]) -> list[str]:
    """Selects the flags that the installed XLA accepts."""
    if _accepts(flags):
        return list(flags)
    return [flag for flag in flags if _accepts([flag])]


def _accepts(flags: Sequence[str]) -> bool:
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=environment,
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
