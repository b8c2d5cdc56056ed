"""The device mesh: an axis of stages, axes of data shards, and axes along which devices share a
model's layers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, ParamSpec

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from jaxpipe import cpu_threads
from jaxpipe.schedule.problems import Problem, below_one, refuse

_Given = ParamSpec("_Given")

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of a mesh's axes, by their use.

    Args:
      data: the axes of the data shards, which act as one, the first the outermost.
      replica: those of `data` along which nothing is sharded: devices hold the same parts.
      model: axes whose devices share the work of a layer as the model's functions say, such as
        those of tensor parallelism.
      alike: those of `model` whose devices hold the same parameters, such as a context axis.

    Example:
      >>> axes = Axes("pp", ("dp", "fsdp"), replica=("dp",))
      >>> axes.names, axes.split
      (('dp', 'fsdp', 'pp'), ('fsdp',))
    """

    stage: str = "stage"
    data: tuple[str, ...] = ("data",)
    replica: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        stage: str,
        data: Sequence[str] | None,
        replica: Sequence[str] | None,
        model: Sequence[str],
        splitting: Collection[str],
    ) -> Axes:
        """Axes by name, with those of replicas the outermost.

        By default, ``replica`` is the axis "replica", if the mesh has it, and ``data`` is "data"
        and, if the mesh has it, "expert".

        Args:
          splitting: axes that split the model's parameters.
        """
        own: set[str] = set(mesh.axis_names if isinstance(mesh, Mesh) else ())
        model = names_of(model)
        if data is None:
            data = ("data", *sorted(own & {"expert"} - {*model, stage}))
        data = names_of(data)
        if replica is None:
            replica = sorted(own & {"replica"} - {*data, stage})
        replica = names_of(replica)
        alike = tuple(name for name in model if name not in splitting)
        return cls(stage, (*replica, *data), replica, model, alike)

    @property
    def split(self) -> tuple[str, ...]:
        """The axes over which ZeRO shards arrays: those of the data, and model axes whose devices
        hold the same parameters."""
        return tuple(name for name in (*self.data, *self.alike) if name not in self.replica)

    def sharding(self, apart: Collection[str]) -> tuple[str, ...]:
        """The axes of `split` that shard arrays which the axes ``apart`` already split."""
        return tuple(name for name in self.split if name not in apart)

    @property
    def peers(self) -> tuple[str, ...]:
        """The axes over whose devices a loss is the mean: all but that of stages."""
        return (*self.data, *self.model)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.data, self.stage, *self.model)

    def num_stages(self, mesh: Mesh) -> int:
        return int(mesh.shape[self.stage])

    def num_shards(self, mesh: Mesh) -> int:
        return math.prod(mesh.shape[name] for name in self.data)

    def num_parts(self, mesh: Mesh) -> int:
        return math.prod(mesh.shape[name] for name in self.split)

    def problems(self, mesh: Mesh) -> Iterator[str]:
        """Why a mesh has no such axes, or others that a pipeline does not use."""
        if not isinstance(mesh, Mesh):
            yield f"mesh is {mesh!r}; it must be a mesh, such as jaxpipe.make_mesh returns."
            return
        has = f"mesh has the axes {dict(mesh.shape)}"
        if len(set(self.names)) < len(self.names):
            yield (
                f"{self} uses an axis twice; every one is either of stages, of data shards or the "
                "model's."
            )
        if self.stage not in mesh.shape:
            yield f"{has}, and none is {self.stage!r}. Name the one of the stages: stage_axis=..."
        for name in self.data:
            if name not in mesh.shape:
                yield (
                    f"{has}, and none is {name!r}. Name those of the data shards: data_axes=(...), "
                    "which is () if there are none."
                )
        for name in self.model:
            if name not in mesh.shape:
                yield (
                    f"{has}, and none is {name!r}, which Model.axes names. Give it one device if "
                    f"the model is not to be split: jaxpipe.make_mesh(..., {name}=1)."
                )
        for name, size in mesh.shape.items():
            if name not in self.names and size > 1:
                yield (
                    f"{has}, and a pipeline would compute the same on all {size} devices along "
                    f"{name!r}. Name it in data_axes, or in Model.axes if the model's functions "
                    "use it, or give it one device."
                )


def names_of(axes: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names of axes, of which there may be one or none."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _by_known_names(make: Callable[_Given, Mesh]) -> Callable[_Given, Mesh]:
    """Refuses arguments that the function does not have, and says which it has."""
    known = tuple(inspect.signature(make).parameters)

    @functools.wraps(make)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> Mesh:
        unknown = [*map(repr, args), *(name for name in kwargs if name not in known)]
        if unknown or "stage" not in kwargs:
            found = f"has no {', '.join(unknown)}" if unknown else "needs the number of stages"
            raise TypeError(
                f"make_mesh {found}. It takes by name: {', '.join(known)}; such as "
                "make_mesh(stage=2, data=2). A mesh of other axes is jax.sharding.Mesh's: "
                "Pipeline(stage_axis=..., data_axes=...) names them."
            )
        return make(*args, **kwargs)

    return checked


@_by_known_names
def make_mesh(
    *,
    stage: int,
    data: int = 1,
    replica: int = 1,
    expert: int | None = None,
    context: int | None = None,
    tensor: int | None = None,
    devices: Sequence[jax.Device] | np.ndarray | None = None,
) -> Mesh:
    """Builds the mesh of a pipeline: ``(data, stage)``, with "replica" before them, and "expert"
    and model axes after them, if you ask for these.

    Devices along a model axis communicate most and are neighbors; next come those along "expert".
    On several hosts (or TPU slices), the data shards of a stage come next, if they fit into one
    host. Then only stages, which just send messages, and replicas cross hosts. Otherwise
    consecutive devices form one pipeline.

    Args:
      stage: number of pipeline stages.
      data: number of data shards.
      replica: number of groups of data shards for hybrid sharding: ZeRO shards within each group,
        over ``data / replica`` devices.
      expert: number of neighboring data shards that split a layer's experts, on an axis of its
        own, so that "data" has size ``data / replica / expert``. None for no such axis.
      context, tensor: devices along the model axes of these names (`jaxpipe.Model`'s ``axes``);
        None for no such axis.
      devices: the devices to use, by default the first of `jax.devices`; or an array of devices in
        the shape of the mesh, whose order is kept.

    Raises:
      ValueError: a number below 1, replicas or experts that do not divide the data shards, too few
        devices, a repeated device, or an array of devices in another shape.

    Example:
      >>> make_mesh(stage=1).axis_names
      ('data', 'stage')
    """
    model = {"context": context, "tensor": tensor}
    refuse(below_one({"expert": expert, **model}, data=data, stage=stage, replica=replica))
    refuse(_no_part("replica", replica, "data", data))
    refuse(_no_part("expert", expert or 1, "data / replica", data // replica))
    cpu_threads.suffice()
    given = jax.devices() if devices is None else devices
    available = list(np.asarray(given, object).flat)
    refuse(_no_devices(available))
    asked = {
        "replica": None if replica == 1 else replica,
        "data": data // replica // (expert or 1),
        "stage": stage,
        "expert": expert,
        **model,
    }
    sizes = {name: size for name, size in asked.items() if size is not None}
    needed = math.prod(sizes.values())
    if needed > len(available):
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{product} needs {needed} devices, but there are "
            f"{len(available)} ({available[0].platform}). On CPU, simulate them: "
            f"jaxpipe.testing.simulate_devices({needed}) before the first array."
        )
    shape, names = tuple(sizes.values()), tuple(sizes)
    if isinstance(given, np.ndarray) and given.ndim > 1:
        if given.shape != shape:
            raise ValueError(f"devices are an array {given.shape}; the mesh of {names} is {shape}.")
    else:
        available = _on_hosts(available[:needed], sizes)
    # `jax.make_mesh` would put them in an order of its own.
    types = (AxisType.Auto,) * len(sizes)
    mesh = Mesh(np.asarray(available, object)[:needed].reshape(shape), names, axis_types=types)
    leave_compilation_cache(mesh)
    return mesh


def _no_part(name: str, size: int, of: str, whole: int) -> Iterator[Problem]:
    """Says that a number of devices does not divide that of which they are a part."""
    if whole % size:
        nearest = tuple(n for n in range(1, whole + 1) if whole % n == 0)
        yield Problem(name, size, f"does not divide {of}={whole}", nearest)


def _no_devices(given: list[object]) -> Iterator[Problem]:
    """Says that there are no devices, or other things, or one device twice."""
    are_devices = all(hasattr(device, "platform") for device in given)
    if not (given and are_devices and len(set(given)) == len(given)):
        rule = "must be a list or array of different devices of jax"
        yield Problem("devices", given, rule, ("jax.devices()",))


def _on_hosts(devices: list[jax.Device], sizes: dict[str, int]) -> list[jax.Device]:
    """Devices in the order of a mesh of these axes: see `make_mesh`."""
    hosts = host_of(devices)
    inner = [name for name in sizes if name not in ("replica", "data", "stage")]
    near = sizes["data"] * math.prod(sizes[name] for name in inner)
    fits = all(hosts.count(host) % near == 0 for host in set(hosts))
    data_inside = len(set(hosts)) > 1 and fits
    outer = ["replica"] * ("replica" in sizes)
    order = [*outer, *(["stage", "data"] if data_inside else ["data", "stage"]), *inner]
    found = np.asarray(devices, object).reshape([sizes[name] for name in order])
    return list(found.transpose([order.index(name) for name in sizes]).flat)


def host_of(devices: Sequence[jax.Device]) -> list[int]:
    """The number of each device's host.

    A host is a process or, if every process has one device, a slice of jax: the devices that a fast
    network joins. On TPUs it is always a slice.
    """
    if devices[0].platform == "tpu":
        return [getattr(device, "slice_index", 0) for device in devices]
    processes = [device.process_index for device in devices]
    if len(set(processes)) < len(processes):
        return processes
    return [getattr(device, "slice_index", device.process_index) for device in devices]


def axes_across_hosts(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which devices are on different hosts.

    Example:
      >>> axes_across_hosts(make_mesh(stage=1))
      ()
    """
    hosts = np.reshape(host_of(list(mesh.devices.flat)), mesh.devices.shape)
    return tuple(
        name
        for axis, name in enumerate(mesh.axis_names)
        if (hosts != hosts.take([0], axis=axis)).any()
    )


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh with automatic axes, whose shardings the compiler chooses if none is stated.

    `jax.make_mesh` makes explicit axes. Arrays that lie on such a mesh can be passed to a program
    for this one.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def unusable_context() -> Iterator[str]:
    """Why nothing can run here: inside `jax.set_mesh` of explicit axes, or `jax.disable_jit`."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        yield (
            "jax.set_mesh has set a mesh of explicit axes, where every operation must say the "
            "sharding of its result; a pipeline's do not. Set `pipe.mesh`, or no mesh."
        )
    config: Any = jax.config  # its stubs name no settings
    if config.jax_disable_jit:
        yield (
            "jax.disable_jit is set, and a pipeline is one compiled program: operation by "
            "operation, on all devices, it would hardly end. To look into a model that way, run "
            "`jaxpipe.unpipelined.loss(model, params, batch)`, the same loss without a pipeline."
        )


def transfers_overlap(mesh: Mesh) -> bool:
    """Whether messages travel while layers run: XLA for CPUs runs one after the other."""
    return bool(mesh.devices.flat[0].platform != "cpu")


def stores_tiles(mesh: Mesh) -> bool:
    """Whether devices store arrays in tiles of their last two dimensions, so that another shape of
    the same elements is another order in memory."""
    return bool(mesh.devices.flat[0].platform == "tpu")


def leave_compilation_cache(mesh: Mesh) -> None:
    """Switches jax's persistent compilation cache off in this process for a mesh of CPU devices.

    A CPU program that XLA loads from the cache has lost the order between the collectives inside a
    loop and those beside it. Its devices may then wait for each other forever
    (docs/design/001-executor.md). A line in the log says so if a cache was configured.
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
