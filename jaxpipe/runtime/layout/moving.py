"""Moves of layers between canonical and placed arrays, one layer at a time.

A device never holds more than its part of both, and one layer. A program that sorts whole arrays
would leave it to XLA, which gathers all of them on every device.

Some arrays join several, such as queries, keys and values. A canonical array is
split in equal runs of its own order, so that it lies like any other; a placed one is split into
parts of each array that is joined in it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxpipe.runtime.barriers import Carry, always, run_if, tie
from jaxpipe.runtime.indices import repeat
from jaxpipe.runtime.layout.layer_layout import LayerLayout
from jaxpipe.runtime.layout.leaf import Cut, Leaf, MeshLayout, communicate
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.trees import is_sequence
from jaxpipe.runtime.types import Arrays, Index, LayerParams, Leaves, Stored, Tree


@dataclasses.dataclass(frozen=True)
class LayersOnMesh(MeshLayout):
    """The layout of layers on a mesh, which moves them between canonical and placed arrays.

    A placed tree has the layers alone. Its arrays have shape ``[stages, ...]``, with a stage's part
    as a `LayerLayout` describes it.
    """

    layers: LayerLayout
    mesh: Mesh
    axes: Axes

    @property
    def canonical(self) -> Leaves:
        return self.layers.canonical

    @property
    def placed(self) -> Leaves:
        return self._of_stages(lambda leaf: leaf.stacked(self.num_stages), self.layers.placed)

    def _of_stages(self, add_stages: Callable[[Any], Any], layers: Tree) -> Placed:
        """The placed tree of a stage's layers, whose arrays get a dimension of stages."""
        return Placed({"layers": jax.tree.map(add_stages, layers)}, self.layers.order)

    def place(self, tree: Tree) -> Placed:
        """Places layers, split over data."""
        return _inverse(self._place, self._unplace)(tree)

    def unplace(self, tree: Placed) -> Tree:
        return _inverse(self._unplace, self._place)(tree)

    def _place(self, canonical: Tree) -> Placed:
        body = self._place_each if is_sequence(self.layers.canonical) else self._place_alike

        def own(canonical: Tree) -> Placed:
            return self._of_stages(lambda w: w[None], body(canonical))

        return self._shard_map(own, self.canonical_specs(), self.specs(sharded=True))(canonical)

    def _unplace(self, placed: Placed) -> Tree:
        body = self._unplace_each if is_sequence(self.layers.canonical) else self._unplace_alike

        def own(placed: Placed) -> Tree:
            return body(jax.tree.map(lambda w: w[0], placed["layers"]))

        return self._shard_map(own, self.specs(sharded=True), self.canonical_specs())(placed)

    def _shard_map(self, body: Callable[..., Tree], given: Tree, returned: Tree) -> Tree:
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=(given,), out_specs=returned, check_vma=False
        )

    # All methods below run on every device, with its part of the arrays.

    @cached_property
    def _local(self) -> LayerLayout:
        """The layout of a device's part of arrays that model axes split: it stays along these."""
        return self.layers.local

    def _rearranged(
        self, function: Callable[..., jax.Array], n: int, layer: LayerParams, *, sharded: bool
    ) -> LayerParams:
        """Brings layer n, with its joined arrays, into the order of placed or canonical ones."""
        move = partial(function, axes=self.axes, sharded=sharded)
        return jax.tree.map(lambda leaf, w: move(w, leaf), self.layers.canonical_of(n), layer)

    def _of_stage(self, stage: Index, value: jax.Array) -> jax.Array:
        """Sends the value of one stage to all stages."""
        is_here = stage == self._stage
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return communicate(lax.psum, jnp.where(is_here, value, 0), self.axes.stage)
        # A sum of numbers would lose the sign of a zero, and numbers that are too small.
        bits = lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")
        summed = lax.psum(jnp.where(is_here, bits, 0), self.axes.stage)
        return lax.bitcast_convert_type(summed, value.dtype)

    @property
    def _stage(self) -> Index:
        return lax.axis_index(self.axes.stage)

    # Layers that are alike. Data shards split a canonical array as they split the placed ones.

    @property
    def _in_order(self) -> bool:
        """Whether every stage has the same layers of canonical arrays as of placed ones."""
        flat = self.layers.rows.reshape(-1)
        return bool(np.array_equal(flat, np.arange(len(flat))))

    def _place_alike(self, canonical: Tree) -> Arrays:
        def row(chunk: Index, number: Index, arrays: Arrays) -> Arrays:
            if self._in_order:
                n = chunk * self.layers.rows.shape[2] + number
                values = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, n, 0, False), canonical)
            else:
                of_stage = partial(receive, chunk, number)
                values = repeat(self.num_stages, of_stage, nothing)
            values = self._rearranged(_to_parts, 0, values, sharded=True)
            return self._local.write(arrays, self._place_of(chunk, number), values)

        def receive(chunk: Index, number: Index, stage: Index, values: Stored) -> Stored:
            n = jnp.asarray(self.layers.rows)[stage, chunk, number]
            is_here = (stage == self._stage) & (n >= 0)
            read = partial(self._read, jnp.maximum(n, 0))
            layer = jax.tree.map(read, self._local.canonical, canonical)
            return jax.tree.map(partial(jnp.where, is_here), layer, values)

        nothing, arrays = map(self._zeros, (self._local.piece, self._local.placed))
        return self._local.every_layer(self.layers.rows.shape[2], row, arrays)

    def _unplace_alike(self, arrays: Arrays) -> Tree:
        def row(chunk: Index, number: Index, canonical: Tree) -> Tree:
            values = self._local.read(arrays, self._place_of(chunk, number))
            values = self._rearranged(_from_parts, 0, values, sharded=True)
            if self._in_order:
                n = chunk * self.layers.rows.shape[2] + number
                return jax.tree.map(
                    lambda w, value: lax.dynamic_update_index_in_dim(w, value, n, 0),
                    canonical,
                    values,
                )
            send = partial(spread, chunk, number, values)
            return repeat(self.num_stages, send, canonical)

        def spread(
            chunk: Index, number: Index, values: Stored, stage: Index, canonical: Tree
        ) -> Tree:
            n = jnp.asarray(self.layers.rows)[stage, chunk, number]
            layer = jax.tree.map(partial(self._of_stage, stage), values)
            return jax.tree.map(partial(self._write, n), self._local.canonical, canonical, layer)

        first = jax.eval_shape(lambda: self._local.read(arrays, self._place_of(0, 0)))
        shapes = jax.tree.map(self._own_shape, self._local.canonical)
        dtypes = jax.tree.map(lambda w: w.dtype, first)
        nothing = jax.tree.map(lambda dtype, shape: jnp.zeros(shape, dtype), dtypes, shapes)
        return self._local.every_layer(self.layers.rows.shape[2], row, nothing)

    def _place_of(self, chunk: Index, number: Index) -> Tree:
        return self._local.layer_at((self._stage, chunk, number), 0)

    def _zeros(self, leaves: Tree) -> Tree:
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf.struct(sharded=True)), leaves)

    def _read(self, n: Index, leaf: Leaf, w: jax.Array) -> jax.Array:
        """Reads layer n of a canonical array, on all stages."""
        dim = leaf.spread(self.num_stages).stage_dim
        row = lax.dynamic_index_in_dim(w, n % len(w), keepdims=False)
        if dim == 0:
            return self._of_stage(n // len(w), row)
        return (
            row if dim is None else lax.all_gather(row, self.axes.stage, axis=dim - 1, tiled=True)
        )

    def _write(self, n: Index, leaf: Leaf, w: jax.Array, layer: jax.Array) -> jax.Array:
        """Writes layer n of a canonical array; if n is negative, the array stays as it is."""
        dim = leaf.spread(self.num_stages).stage_dim
        is_here, at = n >= 0, jnp.maximum(n, 0) % len(w)
        if dim == 0:
            is_here &= n // len(w) == self._stage
        elif dim is not None:
            layer = Cut(layer.shape, (((self.axes.stage,), dim - 1),)).own(layer)
        old = lax.dynamic_index_in_dim(w, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(w, jnp.where(is_here, layer, old), at, 0)

    # Layers that differ: whole on every device, one after the other.

    def _place_each(self, canonical: Tree) -> Arrays:
        arrays = self._zeros(self._local.placed)
        for n, at in self._layers_in_order():

            def put(arrays: Arrays, n: int = n, at: Tree = at) -> Arrays:
                parts, arrays = tie(canonical[n], arrays)
                layer = self._each(Cut.whole, n, parts)
                layer = self._rearranged(_to_parts, n, layer, sharded=False)
                stored = self._local.pack(layer, n)
                place, leaves = self._local.layer_at(at, n), self._local.leaves_of(n)

                def mine(leaf: Leaf, whole: jax.Array, old: jax.Array) -> jax.Array:
                    own = leaf.cut(self.axes, sharded=True).own(whole)
                    return jnp.where(at[0] == self._stage, own, old)

                values = jax.tree.map(mine, leaves, stored, self._local.read(arrays, place))
                return self._local.write(arrays, place, values)

            arrays = self._in_turn(put, arrays)
        return arrays

    def _unplace_each(self, arrays: Arrays) -> Tree:
        layers = []
        for n, at in self._layers_in_order():

            def get(carry: Tree, n: int = n, at: Tree = at) -> Tree:
                arrays, _ = carry
                stored = self._local.read(arrays, self._local.layer_at(at, n))

                def whole(leaf: Leaf, own: jax.Array) -> jax.Array:
                    cut, shape = leaf.cut(self.axes, sharded=True), list(own.shape)
                    if leaf.data_dim is not None:
                        shape[leaf.data_dim] *= leaf.data_parts
                    cut = dataclasses.replace(cut, shape=tuple(shape))
                    return cut.whole(self._of_stage(at[0], own))

                layer = jax.tree.map(whole, self._local.leaves_of(n), stored)
                params = self._local.unpack(layer, n)
                params = self._rearranged(_from_parts, n, params, sharded=False)
                # Arrays that a loop does not change would not make the next one wait for it.
                return tie(arrays, self._each(Cut.own, n, params))

            _, layer = jax.eval_shape(get, (arrays, None))
            nothing = jax.tree.map(jnp.zeros_like, layer)
            arrays, layer = self._in_turn(get, (arrays, nothing))
            layers.append(layer)
        return type(self._local.canonical)(layers)

    def _in_turn(self, body: Callable[[Carry], Carry], carry: Carry) -> Carry:
        """Runs ``body(carry)`` in a loop, which XLA neither inlines nor runs beside another one."""
        return run_if(always(lax.axis_index(self.axes.names)), body, carry)

    def _layers_in_order(self) -> list[tuple[int, tuple[int, int, int]]]:
        """Lists every layer's number and place."""
        places = {int(n): at for at, n in np.ndenumerate(self.layers.rows) if n >= 0}
        return sorted(places.items())

    def _each(self, fn: Callable[..., Tree], n: int, layer: LayerParams) -> LayerParams:
        """Applies a method of `Cut` to each of a layer's canonical arrays."""

        def apply(leaf: Leaf, w: jax.Array) -> jax.Array:
            return fn(leaf.spread(self.num_stages).cut(self.axes, sharded=True), w)

        return jax.tree.map(apply, self._local.canonical[n], layer)

    def _own_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Computes the shape of a device's part of a canonical array."""
        spec = leaf.canonical_spec(self.axes, self.num_stages)
        return NamedSharding(self.mesh, spec).shard_shape(leaf.shape)


def _to_parts(w: jax.Array, leaf: Leaf, axes: Axes, *, sharded: bool) -> jax.Array:
    """Makes a device's part of a placed array, which data shards may split, from its part of the
    canonical one."""
    for canonical, placed in _joined_cuts(leaf, axes, sharded=sharded):
        w = placed.own(canonical.whole(w))
    return w


def _from_parts(w: jax.Array, leaf: Leaf, axes: Axes, *, sharded: bool) -> jax.Array:
    for canonical, placed in _joined_cuts(leaf, axes, sharded=sharded):
        w = canonical.own(placed.whole(w))
    return w


def _joined_cuts(leaf: Leaf, axes: Axes, *, sharded: bool) -> Iterator[tuple[Cut, Cut]]:
    """Yields the canonical and the placed cut of each dimension in which arrays are joined."""
    names = leaf.names(axes, sharded=sharded)
    for split in leaf.splits:
        if split.joined:
            dims = ((names[split.dim], split.dim),)
            yield Cut(leaf.shape, dims), Cut(leaf.shape, dims, (split,))


def _inverse(forward: Callable[[Tree], Tree], backward: Callable[[Tree], Tree]) -> Tree:
    """Gives ``forward``, which only moves numbers, ``backward`` as its derivative, since JAX cannot
    reverse its loops. Integers have no derivative."""

    def run(tree: Tree) -> Tree:
        if not all(jnp.issubdtype(w.dtype, jnp.inexact) for w in jax.tree.leaves(tree)):
            return forward(tree)
        return differentiable(tree)

    differentiable = jax.custom_vjp(forward)
    differentiable.defvjp(lambda tree: (forward(tree), None), lambda _, moved: (backward(moved),))
    return run
