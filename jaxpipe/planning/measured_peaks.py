"""Times simple programs on the devices that jax has: a matmul, copies, messages and collectives.

All devices work at once, as in a step: GPUs of a host share power and links, simulated devices the
cores of the machine.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.planning.devices import Peaks
from jaxpipe.runtime.layer_costs import run_seconds
from jaxpipe.runtime.types import Tree

_AXIS = "devices"
_SHORT = 2**12
"""Bytes of a message that takes no more than its latency."""
_REPEATS = 8
"""Messages, or copies, of one program, one after another: starting it is not counted."""

_ON_CPUS, _ON_ACCELERATORS = (512, "float32", 2**25, 2**22), (8192, "bfloat16", 2**30, 2**26)
"""Amounts of work that attain a peak: rows of a square matmul and the dtype in which layers usually
compute; bytes of an array that no cache holds, and of a message."""


def peaks(devices: Sequence[jax.Device]) -> Peaks:
    """Measures what devices attain; at least two, so that there is a link."""
    mesh = jax.make_mesh((len(devices),), (_AXIS,), devices=devices)
    on_cpus = devices[0].platform == "cpu"
    rows, dtype, array, sent = _ON_CPUS if on_cpus else _ON_ACCELERATORS
    matrix = jax.ShapeDtypeStruct((rows, rows), dtype)
    matmul = run_seconds(_everywhere(jnp.matmul, mesh), matrix, matrix)
    copied = _in_turn(lambda x: x + 1, array, mesh)
    short, long = (_in_turn(_sent_on, size, mesh) for size in (_SHORT, sent))
    both = _in_turn(_reduced_and_gathered, sent, mesh)
    # Times that vary may hide how little of the long ones is latency: at most half of them.
    message = sent / max(long - short, long / 2)
    share = (len(devices) - 1) / len(devices)
    return Peaks(
        flops=2.0 * rows**3 / matmul,
        bandwidth=2.0 * array / copied,
        message=message,
        # Reducing and gathering send as much each.
        collective=2 * share * sent / max(both - 2 * short, both / 2),
        latency=max(0.0, short - _SHORT / message),
    )


def _everywhere(function: Callable[..., Tree], mesh: Mesh) -> jax.stages.Wrapped:
    """A function that every device computes, of the same values."""
    on_devices = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(on_devices, keep_unused=True)


def _in_turn(once: Callable[[jax.Array], jax.Array], size: int, mesh: Mesh) -> float:
    """Seconds of doing something with so many bytes, one of several times in one program."""

    def program(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _REPEATS, lambda _, x: once(x), x)

    # Devices have equal parts of it.
    whole = -(-size // (4 * mesh.size)) * 4 * mesh.size
    floats = jax.ShapeDtypeStruct((whole // 4,), np.float32)
    return run_seconds(_everywhere(program, mesh), floats) / _REPEATS


def _sent_on(x: jax.Array) -> jax.Array:
    number = jax.lax.axis_size(_AXIS)
    ring = [(n, (n + 1) % number) for n in range(number)]
    return jax.lax.ppermute(x, _AXIS, ring)


def _reduced_and_gathered(x: jax.Array) -> jax.Array:
    own = jax.lax.psum_scatter(x, _AXIS, tiled=True)
    return jax.lax.all_gather(own, _AXIS, tiled=True)
