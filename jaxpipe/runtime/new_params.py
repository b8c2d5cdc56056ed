"""Parameters made, or read, where they belong: no device and no host ever holds the whole model."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layout.alike import Unrolled
from jaxpipe.runtime.layout.leaf import AxisSplit, Leaf
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.layout.whole_model import FROZEN, Layout, trained_part
from jaxpipe.runtime.mesh import unusable_context
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.trees import is_sequence, mismatches, select
from jaxpipe.runtime.types import Arrays, At, LayerParams, Params, Shapes, Stored, Tree
from jaxpipe.schedule.problems import refuse

ReadPart: TypeAlias = Callable[..., Tree]
"""``read("embed")`` and ``read("head")`` return these parts, ``read("layers", n)`` layer n."""


def init_params(pipe: Pipeline, init: Callable[[jax.Array], Params], key: jax.Array) -> Placed:
    """Computes ``pipe.place(init(key))`` directly on the devices, without the whole tree anywhere.

    The random bits are the same. XLA may round values computed from them differently in the last
    place, because it computes fewer at once.

    Args:
      pipe: the pipeline for which to place the parameters.
      init: a function of the key alone that returns canonical parameters; `jax.jit` must accept it.
        XLA can split random numbers, constants and `jax.vmap` over layers. It cannot split a
        decomposition, such as that of `jax.nn.initializers.orthogonal`: such an array is whole on
        a device while it is made.
      key: a random key.

    Raises:
      ValueError: parameters that differ from those that the pipeline was built for.

    Example:
      >>> from jaxpipe.runtime.layers.model import Model
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch["x"],
      ...     layer=lambda w, x, batch, rng: x @ w,
      ...     head_loss=lambda outer, x, batch, rng: x.mean(),
      ... )
      >>> def init(key):
      ...     return {"embed": {}, "layers": jax.random.normal(key, (2, 3, 3)), "head": {}}
      >>> shapes, mesh = jax.eval_shape(init, jax.random.key(0)), make_mesh(stage=1)
      >>> pipe = Pipeline(model, shapes, schedule="1f1b", mesh=mesh)
      >>> init_params(pipe, init, jax.random.key(0))["layers"].shape
      (1, 2, 3, 3)
    """
    # Every array has a program of its own, or every layer if layers differ: XLA then keeps no more
    # than one of them whole, whatever it cannot split.
    placing = pipe.params_placing
    jaxpr, shapes = jax.make_jaxpr(init, return_shape=True)(key)
    refuse(placing.canonical_problems("init(key)", shapes))
    run = jaxpr_as_fun(jaxpr)
    expected, structure = jax.tree.flatten(placing.canonical)
    leaves: list[jax.Array] = []
    for first, end in _programs(shapes):

        def make(key: jax.Array, first: int = first, end: int = end) -> list[jax.Array]:
            made = run(*jax.tree.leaves(key))[first:end]
            return [_split_within(w, n) for w, n in zip(made, expected[first:end], strict=True)]

        shardings = [leaf.sharding for leaf in expected[first:end]]
        # One after the other: programs in flight at once would take their memory at once.
        leaves += jax.block_until_ready(jax.jit(make, out_shardings=shardings)(key))
    return placing.place(jax.tree.unflatten(structure, leaves))


def _programs(params: Shapes) -> Iterator[tuple[int, int]]:
    """The leaves that one program makes, as ranges of their numbers."""
    end = 0
    for _, part in sorted(params.items()):
        for unit in part if is_sequence(part) else jax.tree.leaves(part):
            first, end = end, end + len(jax.tree.leaves(unit))
            if end > first:
                yield first, end


def _split_within(w: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of stacked layers, split within the layers first.

    An init function that makes one layer after the other and stacks them would otherwise have to
    send each to its stage; random bits can be drawn on any device.
    """
    sharding: Any = leaf.sharding
    dims = [*sharding.spec, *[None] * (w.ndim - len(sharding.spec))]
    if w.ndim < 2 or dims[0] is None:
        return w
    size = sharding.mesh.shape[dims[0]] if isinstance(dims[0], str) else 0
    free = [d for d in range(1, w.ndim) if dims[d] is None and size and w.shape[d] % size == 0]
    if not free:
        return w
    dims[free[-1]], dims[0] = dims[0], None
    return jax.lax.with_sharding_constraint(w, NamedSharding(sharding.mesh, P(*dims)))


def load_params(pipe: Pipeline, read: ReadPart) -> Placed:
    """Reads parameters layer by layer, directly onto the devices that hold them.

    A device never holds more than its part and one layer. Each process reads only the layers of its
    own devices.

    Args:
      pipe: the pipeline for which to place the parameters.
      read: returns numpy or jax arrays: ``read("embed")``, ``read("head")`` and, if layers share
        parameters, ``read("shared")`` return these parts, and ``read("layers", n)`` the parameters
        of layer n alone. Memory maps are read where needed.

    Raises:
      ValueError: a part that differs from that of the pipeline's parameters.

    Example:
      >>> from jaxpipe.runtime.layers.model import Model
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch["x"],
      ...     layer=lambda w, x, batch, rng: x @ w,
      ...     head_loss=lambda outer, x, batch, rng: x.mean(),
      ... )
      >>> shapes = jax.ShapeDtypeStruct((2, 3, 3), "float32")
      >>> params, mesh = {"embed": {}, "layers": shapes, "head": {}}, make_mesh(stage=1)
      >>> pipe = Pipeline(model, params, schedule="1f1b", mesh=mesh)
      >>> def read(name, n=None):
      ...     return {} if n is None else np.full((3, 3), n, np.float32)
      >>> load_params(pipe, read)["layers"][0, :, 0, 0].tolist()
      [0.0, 1.0]
    """
    refuse(list(unusable_context()))
    placed = pipe.placed_params
    checked = partial(_read, pipe.canonical_params, read)
    fill = partial(_fill, read=checked, sharded=pipe.options.zero.shards_weights)
    params = fill(pipe.layout, trained_part(placed))
    if pipe.frozen is None:
        return params
    return params | {FROZEN: fill(pipe.frozen, placed[FROZEN])}


def _read(canonical: Shapes, read: ReadPart, name: str, *number: int) -> Tree:
    """Reads a part of the model, and refuses one of other shapes."""
    expected = canonical[name]
    if number and is_sequence(expected):
        expected = expected[number[0]]
    elif number:
        expected = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), expected)
    found = read(name, *number)
    refuse(mismatches(f"read({', '.join(map(repr, [name, *number]))})", found, expected))
    return found


def _fill(layout: Layout, placed: Shapes, read: ReadPart, *, sharded: bool) -> Placed:
    """The parameters of a layout, from parts that may hold others, too."""
    filled = {
        name: jax.tree.map(_part, select(read(name), leaves), placed[name])
        for name, leaves in layout.outer.items()
    }
    layers = _Layers(layout, placed["layers"], sharded=sharded).load(read)
    return Placed({"layers": layers, **filled}, placed.order)


class _Layers:
    """Fills the layers of this process's devices, each by itself: no program spans devices."""

    def __init__(self, layout: Layout, placed: Shapes, *, sharded: bool) -> None:
        self._layout, self._placed, self._sharded = layout, placed, sharded
        self._local = layout.layers.local
        self._write = jax.jit(self._written, static_argnames="example", donate_argnums=0)
        mesh, axes = layout.mesh, layout.axes
        self._devices: list[tuple[jax.Device, int, dict[str, int]]] = []
        for index, device in np.ndenumerate(mesh.devices):
            at = dict(zip(mesh.axis_names, index, strict=True))
            if device.process_index == jax.process_index():
                self._devices.append((device, at[axes.stage], at))

    def load(self, read: ReadPart) -> Arrays:
        if not jax.tree.leaves(self._placed):
            return self._placed
        own = [self._zeros(device) for device, _, _ in self._devices]
        stages = {stage for _, stage, _ in self._devices}
        for at, n in sorted(np.ndenumerate(self._layout.layers.rows), key=lambda held: held[1]):
            if n < 0 or at[0] not in stages:
                continue
            self._put(own, at, int(n), read)
            # Otherwise layers that are still to be written would pile up.
            jax.block_until_ready(own)
        return jax.tree.map(_joined, self._placed, *own)

    def _put(self, own: list[Arrays], at: At, n: int, read: ReadPart) -> None:
        """Reads a layer for all devices of its stage."""
        layer = select(read("layers", n), self._layout.layers.shape_of(n))
        packed: dict[tuple[int, ...], Stored] = {}  # by place on the axes that split the layer
        leaves = jax.tree.leaves(self._layout.layers.canonical_of(n))
        apart = sorted({name for leaf in leaves for name in leaf.apart})
        for number, (device, stage, place) in enumerate(self._devices):
            if stage == at[0]:
                among = tuple(place[name] for name in apart)
                if among not in packed:
                    packed[among] = self._local.pack(self._own(layer, n, place), n)
                part = jax.device_put(self._shard(packed[among], n, place), device)
                own[number] = self._with(own[number], at, part, n)

    def _own(self, layer: LayerParams, n: int, place: dict[str, int]) -> LayerParams:
        """Takes a device's part of arrays that model axes split."""

        def own(leaf: Leaf, w: Tree) -> Tree:
            for split in leaf.splits:
                w = self._cut(w, split, place)
            return w

        return jax.tree.map(own, self._layout.layers.canonical_of(n), layer)

    def _cut(self, w: Tree, split: AxisSplit, place: dict[str, int]) -> Tree:
        """Takes the part of an array that a split gives the device at a place."""
        number = 0
        for name in split.axes:
            number = number * self._layout.mesh.shape[name] + place[name]
        before = (slice(None),) * split.dim
        parts = [w[(*before, run)] for run in split.own(number, w.shape[split.dim])]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, split.dim)

    def _zeros(self, device: jax.Device) -> Arrays:
        def zeros(leaf: Tree) -> jax.Array:
            shape = leaf.sharding.shard_shape(leaf.shape)
            return jnp.zeros(shape, leaf.dtype, device=device)

        return jax.tree.map(zeros, self._placed)

    def _shard(self, stored: Stored, n: int, place: dict[str, int]) -> Stored:
        """Takes a data shard's part of a layer."""
        axes = self._layout.axes

        def part(leaf: Leaf, w: Tree) -> Tree:
            if leaf.data_dim is None or not self._sharded:
                return w
            split = AxisSplit(axes.sharding(leaf.apart), leaf.data_dim, leaf.data_parts)
            return self._cut(w, split, place)

        return jax.tree.map(part, self._local.leaves_of(n), stored)

    def _with(self, arrays: Arrays, at: At, part: Stored, n: int) -> Arrays:
        """A device's arrays with one more layer."""
        if not isinstance(self._layout.layers, Unrolled):
            return self._write(arrays, part, at, example=self._alike(n))
        layers, own = self._layout.layers, jax.tree.map(lambda w: w[None], part)
        return layers.write(arrays, layers.layer_at(at, n), own)

    def _alike(self, n: int) -> int:
        """The first layer that is stored like layer n, so that they share a program."""
        shapes = self._layout.layers.shape_of
        if not isinstance(self._layout.layers.canonical, tuple | list):
            return 0
        return next(m for m in range(n + 1) if shapes(m) == shapes(n))

    def _written(self, arrays: Arrays, part: Stored, at: At, example: int) -> Arrays:
        layers = self._layout.layers
        own = jax.tree.map(lambda w: w[0], arrays)
        new = layers.write(own, layers.layer_at(at, example), part)
        return jax.tree.map(lambda w: w[None], new)


def _part(w: Tree, leaf: Tree) -> jax.Array:
    """An array of embedding or head, padded where stages split it."""

    def own(index: Tree) -> Tree:
        shape = leaf.sharding.shard_shape(leaf.shape)
        held = np.asarray(w[index])
        room = [(0, size - n) for size, n in zip(shape, held.shape, strict=True)]
        return np.pad(held, room)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, own)


def _joined(leaf: Tree, *parts: jax.Array) -> jax.Array:
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, list(parts))
