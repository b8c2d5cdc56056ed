"""Arrays that lie in the memory of the host, which a device reads and writes over its bus."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from jaxpipe.runtime.types import Gradients, OptimizerState, Shapes, Shardings, Tree
from jaxpipe.schedule.problems import Problem

_KIND = "pinned_host"


class OnHost(NamedTuple):
    """An optax transformation whose state lies on the host; see `on_host`."""

    init: optax.TransformInitFn
    update: optax.TransformUpdateFn


def on_host(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keeps an optimizer's state, such as Adam's two moments, in host memory.

    A step fetches the state when all gradients are complete and most activations are freed, and
    returns it after the update. For Adam in float32, a device then holds 4 bytes per parameter
    between steps instead of 12. Each step sends 8 bytes per parameter both ways over PCI Express,
    and no computation hides this. Counts and other scalars stay on the device.

    Args:
      optimizer: any optax transformation.

    Returns:
      A transformation for every method of `Pipeline` that takes an optimizer, except updates chunk
      by chunk. The devices must have pinned host memory, as GPUs and simulated CPU devices do.

    Example:
      >>> optimizer = on_host(optax.adam(1e-3))
      >>> step = pipe.train_step(optimizer)  # doctest: +SKIP
    """
    return OnHost(optimizer.init, optimizer.update)


def problems(name: str, value: object, mesh: Mesh) -> list[Problem]:
    """Why devices cannot do what an argument wants, which is to keep something on their host."""
    device, kinds = mesh.devices.flat[0], _memories(mesh.devices.flat)
    # Devices that programs are only compiled for name no memory at all.
    if not kinds or _KIND in kinds:
        return []
    rule = f"needs {_KIND} memory, and {device.device_kind} has only {', '.join(sorted(kinds))}"
    return [Problem(name, value, rule, note="Leave it on the devices.")]


def _memories(devices: Iterable[jax.Device]) -> set[str]:
    """Kinds of memory that this process sees of its own devices."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    return {memory.kind for device in own[:1] for memory in device.addressable_memories()}


def shardings_if_any(shapes: Shapes, on_devices: Shardings) -> Shardings:
    """`shardings`, or those on the devices where these have no such memory."""
    devices = {device for leaf in jax.tree.leaves(on_devices) for device in leaf.device_set}
    return shardings(shapes, on_devices) if _KIND in _memories(devices) else on_devices


def shardings(shapes: Shapes, on_devices: Shardings) -> Shardings:
    """The same shardings with all but scalars on the host."""
    return jax.tree.map(
        lambda leaf, sharding: sharding.with_memory_kind(_KIND) if leaf.ndim else sharding,
        shapes,
        on_devices,
    )


def fetch(state: OptimizerState, grads: Gradients) -> tuple[OptimizerState, Gradients]:
    """Brings a state to the devices, not before there are all gradients.

    Without the barrier XLA fetches it at the beginning of the step and keeps it there: compiled for
    H100s, temporaries grew by just what the arguments had lost.
    """
    state, grads = jax.lax.optimization_barrier((state, grads))
    return to_devices(state), grads


def to_devices(tree: Tree) -> Tree:
    """Brings all but scalars to the devices; only in `jax.jit`."""
    return _move(tree, jax.memory.Space.Device)


def to_host(tree: Tree) -> Tree:
    """Undoes `to_devices`."""
    return _move(tree, jax.memory.Space.Host)


def _move(tree: Tree, space: Any) -> Tree:
    return jax.tree.map(lambda w: jax.device_put(w, space) if w.ndim else w, tree)
