"""Times what plans are made of on the devices that jax has: peaks, links, layers, an optimizer.

All devices work at once, as in a step: GPUs of a host share power and links, simulated devices the
cores of the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.planning import cost, counting
from jaxpipe.planning.devices import (
    DEVICES,
    Calibration,
    Cluster,
    Efficiency,
    Peaks,
    Timed,
    calibrate,
    cluster,
    known,
)
from jaxpipe.planning.plans import Links
from jaxpipe.planning.sizes import Sizes
from jaxpipe.runtime.measure.costs import layer_costs, run_seconds
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.types import Batch, Key, Shapes

_AXIS = "devices"
_SHORT = 2**12
"""Bytes of a message that takes no more than its latency."""
_REPEATS = 8
"""Messages, or copies, of one program, one after another: starting it is not counted."""


class _Amounts(NamedTuple):
    """How much work attains a peak: rows of a square matmul; bytes of an array that no cache holds,
    and of a message."""

    matmul: int
    array: int
    message: int


_AMOUNTS = {"cpu": _Amounts(512, 2**25, 2**22)}
_OF_ACCELERATORS = _Amounts(8192, 2**30, 2**26)


class Runnable(NamedTuple):
    """A model that runs on devices.

    Args:
      pipeline: makes one of a stage, for a number of data shards and a policy of rematerialization.
      batch: the shapes of a batch with so many rows.
      rng: as for `Pipeline.value_and_grad`, or its shape.
      optimizer: of its training.
      compute_dtype: in which layers compute.
      name: of the model.
    """

    pipeline: Callable[[int, str], Pipeline]
    batch: Callable[[int], Batch]
    rng: Key
    optimizer: optax.GradientTransformation
    compute_dtype: Any
    name: str


def measure(
    model: Runnable,
    *,
    rows: Sequence[int],
    remats: Sequence[str],
    devices: int,
    progress: Callable[[float], None],
) -> Calibration:
    """Measures devices, and the layers of a model on them.

    Args:
      model: to run.
      rows: of microbatches.
      remats: policies of rematerialization.
      devices: how many of those that jax has; at least 2, so that there is a link.
      progress: told which share of the work is done.
    """
    cases = list(itertools.product(remats, rows))
    used = jax.devices()[:devices]
    peaks = _peaks(used, model.compute_dtype)
    found, timed = _attained(peaks, used), list[Timed]()
    for done, (remat, count) in enumerate(cases, start=1):
        progress(done / (len(cases) + 1))
        one, together = model.pipeline(1, remat), model.pipeline(devices, remat)
        width = jnp.dtype(model.compute_dtype).itemsize
        counted = counting.sizes(one, model.batch, model.rng, compute_bytes=width)
        if done == 1:
            timed += _updates(together, counted, model.optimizer, found)
        timed += _passes(together, counted, model, count, remat, found)
    progress(1.0)
    kind, memory = used[0].device_kind, (used[0].memory_stats() or {}).get("bytes_limit")
    words = f"measured on {devices} x {kind} with {model.name}"
    return calibrate(kind, peaks, timed, memory_bytes=memory, source=words)


def _attained(peaks: Peaks, devices: Sequence[jax.Device]) -> Cluster:
    """Devices that attain what simple programs do, and nothing else slows them."""
    device = dataclasses.replace(
        known(devices[0].device_kind) or DEVICES["cpu"],
        flops=peaks.flops,
        bandwidth=peaks.bandwidth,
        within_host=peaks.link,
        efficiency=Efficiency(1.0, 1.0, 1.0),
    )
    return cluster(device, len(devices), link=f"nvlink:{len(devices)},ib:400")


# Layers and their optimizer.


def _passes(
    pipe: Pipeline, sizes: Sizes, model: Runnable, rows: int, remat: str, found: Cluster
) -> Iterator[Timed]:
    """F, B and W of every kind of layer for a microbatch of so many rows on every device."""
    shards, microbatches = pipe.mesh.size, pipe.schedule.num_microbatches
    batch = model.batch(rows * microbatches * shards)
    costs = layer_costs(pipe, batch, model.rng, measure=True, together=True)
    for kind, layer in enumerate(sizes.layers):
        first, count = sizes.kind_of.index(kind), sizes.kind_of.count(kind)
        for name, counted in (("f", layer.f), ("b", layer.b), ("w", layer.w)):
            links = Links(*[found.within] * len(Links._fields))
            expected = cost.pass_seconds(counted, rows, found, links)
            yield Timed(name, remat, rows, count, getattr(costs[first], name), expected)


def _updates(
    pipe: Pipeline, sizes: Sizes, optimizer: optax.GradientTransformation, found: Cluster
) -> Iterator[Timed]:
    """An update of every kind of layer, whole on every device."""
    for kind in range(len(sizes.layers)):
        first, count = sizes.kind_of.index(kind), sizes.kind_of.count(kind)
        params = {"layers": (pipe.layout.layers.local.shape_of(first),), "embed": {}, "head": {}}
        leaves = jax.tree.leaves(params)
        elements = sum(leaf.size for leaf in leaves)
        if not elements:
            continue
        state = jax.eval_shape(optimizer.init, params)
        seconds = run_seconds(_everywhere(functools.partial(_update, optimizer), pipe.mesh),
                              params, state, params)  # fmt: skip
        moments = sum(leaf.size for leaf in jax.tree.leaves(state)) / elements
        moved = cost.update_bytes(elements, leaves[0].dtype.itemsize, round(moments))
        yield Timed("update", "none", 0, count, seconds, moved / found.bandwidth)


def _update(
    optimizer: optax.GradientTransformation, grads: Shapes, state: Shapes, params: Shapes
) -> Any:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


# Devices and links.


def _peaks(devices: Sequence[jax.Device], dtype: Any) -> Peaks:
    mesh = jax.make_mesh((len(devices),), (_AXIS,), devices=devices)
    amounts = _AMOUNTS.get(devices[0].platform, _OF_ACCELERATORS)
    matrix = jax.ShapeDtypeStruct((amounts.matmul, amounts.matmul), dtype)
    matmul = run_seconds(_everywhere(jnp.matmul, mesh), matrix, matrix)
    copied = _in_turn(lambda x: x + 1, amounts.array, mesh)
    short, long = (_in_turn(_sent_on, size, mesh) for size in (_SHORT, amounts.message))
    both = _in_turn(_reduced_and_gathered, amounts.message, mesh)
    # Times that vary may hide how little of the long ones is latency: at most half of them.
    message = amounts.message / max(long - short, long / 2)
    share = (len(devices) - 1) / len(devices)
    return Peaks(
        flops=2.0 * amounts.matmul**3 / matmul,
        bandwidth=2.0 * amounts.array / copied,
        message=message,
        # Reducing and gathering send as much each.
        collective=2 * share * amounts.message / max(both - 2 * short, both / 2),
        latency=max(0.0, short - _SHORT / message),
    )


def _everywhere(function: Callable[..., Any], mesh: Mesh) -> jax.stages.Wrapped:
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
