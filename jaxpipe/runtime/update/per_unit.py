"""Runs a function of whole trees where their parts lie, unit by unit, inside `jax.shard_map`.

Each stage runs its own layers, and all stages run the embedding and the head. A device may hold
only a part of an array: the stages may split embedding and head, the data shards and model axes may
split all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.barriers import after, run_if, tie
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Env
from jaxpipe.runtime.layout.data_axis import gather, own_shard
from jaxpipe.runtime.layout.layer_layout import Piece
from jaxpipe.runtime.layout.parts import Part, communicate
from jaxpipe.runtime.layout.tree_layout import TreeLayout, units_of
from jaxpipe.runtime.layout.whole_model import Layout, outer_of
from jaxpipe.runtime.types import Arrays, At, Index, Placed, Shapes, Stored, Tree
from jaxpipe.runtime.update.run_parts import own, run_parts, whole
from jaxpipe.runtime.update.units import Slice, Units


class _Kind(NamedTuple):
    """Layers that compute the same in one round.

    Args:
      layers: their canonical numbers.
      slices: the slice of each.
      numbers: for every row, the layer's number within the kind; -1 if it is of another kind.
    """

    layers: list[int]
    slices: list[Slice]
    numbers: np.ndarray

    @property
    def example(self) -> int:
        return self.layers[0]

    def number_at(self, at: At) -> jax.Array:
        return jnp.asarray(self.numbers)[at]

    def env(self, number: Index, env: Env) -> Env:
        """What a layer shares, by the variables of the example's slice."""
        columns = list(zip(*(one.shared for one in self.slices), strict=True))
        differ = [column for column in columns if len(set(column)) > 1]
        return env | {column[0]: jnp.stack([env[v] for v in column])[number] for column in differ}


def _kinds(slices: Sequence[Slice], rows: np.ndarray) -> list[_Kind]:
    members: dict[Any, list[int]] = {}
    for n, one in enumerate(slices):
        members.setdefault(one.signature(), []).append(n)
    kinds = []
    for layers in members.values():
        numbers = np.full(len(slices) + 1, -1, np.int32)  # the last is of rows without a layer
        numbers[layers] = range(len(layers))
        kinds.append(_Kind(layers, [slices[n] for n in layers], numbers[rows]))
    return kinds


class PerUnit:
    """A function of trees of components, run unit by unit.

    The results' components take the places of the arguments' but the first: both lie alike. In the
    methods, a *component* is this device's part of one, and ``env`` is what units share.

    Args:
      function: of trees of arrays, whose components have one tree per layer.
      args: shapes of its arguments, by name.
      params: where the parameters lie.
      sharded: whether data shards split every array.
      whole: components, by number, that every data shard has whole although the shards split their
        work.

    Attributes:
      result_shapes: of the function's result.
      mixes: says where scalars of several units meet; None if nowhere.

    Raises:
      ValueError: a unit that needs the arrays of another.
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        args: dict[str, Shapes],
        params: Layout,
        *,
        sharded: bool,
        whole: Collection[int] = (),
    ) -> None:
        self._units = units = Units(function, args, lambda tree: units_of(tree, params))
        self.result_shapes, self.mixes = units.result, units.mixes
        trees = [TreeLayout(arg, params) for arg in args.values()]
        self._layouts = layouts = [layout for tree in trees for layout in tree.components]
        self._layers = [layout.layers for layout in layouts]
        self._outer = {
            name: [Piece(layout.outer[name]) for layout in layouts] for name in params.outer
        }
        self._sharded, self._whole = sharded, whole
        self._params, self._axes = params, params.axes
        self._outer_slices = {name: units.slices(name) for name in params.outer}
        slices = [units.slices(n) for n in range(params.num_layers)]
        self._kinds = [_kinds(of_round, params.rows) for of_round in zip(*slices, strict=True)]
        every = [*self._outer_slices.values(), *slices]
        self._of_all = units.of_all(v for unit in every for one in unit for v in one.shared)

    # What units share.

    def share(self, rest: Iterable[jax.Array]) -> Env:
        """What units share before any has given a scalar, from the arguments' leaves that belong
        to no parameter."""
        env = self._units.consts | dict(zip(self._units.inputs, rest, strict=True))
        return jaxprs.run(self._of_all[0], env)

    def rest(self, env: Env) -> list[jax.Array]:
        """The leaves of the result that belong to no parameter."""
        return jaxprs.values(self._units.results, env)

    # One unit: what is stored of each component goes in, and comes out of all but the first.

    def _run(
        self,
        program: Slice,
        pieces: Sequence[Piece],
        stored: Sequence[Stored],
        example: int,
        env: Env,
    ) -> list[Any]:
        """The targets of a slice, whole or parts."""
        parts: list[Part] = []
        for c, piece in enumerate(pieces):
            values = self._own(c, stored[c], piece, example)
            values = piece.parts(values, example, self._axes, sharded=self._sharded)
            parts += map(Part, values, piece.cuts(example, self._axes, sharded=self._sharded))
        env = run_parts(program.eqns, env | dict(zip(program.inputs, parts, strict=True)))
        return [env[v] if jaxprs.is_var(v) else jnp.asarray(v.val) for v in program.targets]

    def _renew(
        self,
        program: Slice,
        pieces: Sequence[Piece],
        stored: Sequence[Stored],
        example: int,
        env: Env,
    ) -> list[Stored]:
        """What is stored when the slice has run."""
        found, results = iter(self._run(program, pieces, stored, example, env)), []
        for c, piece in list(enumerate(pieces))[1:]:
            old = self._own(c, stored[c], piece, example)
            cuts = piece.cuts(example, self._axes, sharded=self._sharded)
            parts = [own(next(found), cut) for cut in cuts]
            new = piece.of_parts(parts, old, example, self._axes, sharded=self._sharded)
            new = jax.tree.map(lambda w, like: w.astype(like.dtype), new, old)
            if c in self._whole:
                new = gather(new, piece.leaves_of(example), self._axes)
            results.append(new)
        return results

    def _own(self, component: int, stored: Stored, piece: Piece, example: int) -> Stored:
        """This data shard's part, of what it may have whole."""
        if component not in self._whole:
            return stored
        return own_shard(stored, piece.leaves_of(example), self._axes)

    # Embedding, head, and what layers share.

    def outer(self, name: str, components: Sequence[Tree], env: Env) -> list[Tree]:
        """What the result's components have for one of these."""
        stored = [component[name] for component in components]
        return self._renew(self._outer_slices[name][-1], self._outer[name], stored, 0, env)

    def with_outer(
        self, layers: Sequence[Arrays], components: Sequence[Tree], env: Env
    ) -> list[Tree]:
        """The result's components, of their layers and of what else the function computes."""
        outer = {name: self.outer(name, components, env) for name in self._outer}
        found = zip(layers, *outer.values(), strict=True)
        return [dict(zip(("layers", *outer), one, strict=True)) for one in found]

    # Layers.

    def layer(
        self, at: At, read: Callable[[int], Stored], results: Sequence[Arrays], env: Env
    ) -> list[Arrays]:
        """Runs the layer at a place, if there is one.

        Args:
          at: the place: stage, chunk, number in the chunk.
          read: finds what is stored there of the first component, from an example of the layer's
            kind.
          results: the layers of the other components.
          env: what units share.

        Returns:
          The results, with those of the layer written.
        """
        results = list(results)
        alone = len(self._kinds[-1]) == 1 or self._params.layers.own_arrays
        for kind in self._kinds[-1]:
            step = partial(self._layer_of, kind, at, read, env)
            results = step(results) if alone else run_if(kind.number_at(at) >= 0, step, results)
        return results

    def _layer_of(
        self,
        kind: _Kind,
        at: At,
        read: Callable[[int], Stored],
        env: Env,
        results: list[Arrays],
    ) -> list[Arrays]:
        number, layouts = kind.number_at(at), self._layers[1:]
        places = [layout.layer_at(at, kind.example) for layout in layouts]
        found = list(zip(layouts, results, places, strict=True))

        def compute(stored: list[Stored]) -> list[Stored]:
            first, stored = tie(read(kind.example), stored)
            env_of_layer = kind.env(number, env)
            given = [first, *stored]
            return self._renew(kind.slices[0], self._layers, given, kind.example, env_of_layer)

        # Written outside the loop: XLA would compute the result again from what it overwrites. A
        # stage is never negative, but XLA does not know that: it would leave out the loop.
        stored = [layout.read(arrays, place) for layout, arrays, place in found]
        stored = run_if((number >= 0) & (at[0] >= 0), compute, stored)
        return [
            layout.write(arrays, place, new)
            for (layout, arrays, place), new in zip(found, stored, strict=True)
        ]

    # All units.

    def run(
        self, components: Sequence[Placed], rest: Sequence[jax.Array]
    ) -> tuple[list[Placed], list[jax.Array]]:
        """Runs the whole function on all devices.

        Args:
          components: those of all arguments, placed.
          rest: the arguments' leaves that belong to no parameter.

        Returns:
          The result's components, and its other leaves.
        """
        sharded = [self._sharded and c not in self._whole for c in range(len(components))]
        specs = [
            layout.specs(sharded=of) for layout, of in zip(self._layouts, sharded, strict=True)
        ]
        run = jax.shard_map(
            self._run_all,
            mesh=self._params.mesh,
            in_specs=(specs, P()),
            out_specs=(specs[1:], P()),
            check_vma=False,
        )
        return run(list(components), list(rest))

    def _run_all(
        self, placed: Sequence[Placed], rest: Sequence[jax.Array]
    ) -> tuple[list[Placed], list[jax.Array]]:
        components = list(map(without_stages, placed))
        stage, env = lax.axis_index(self._axes.stage), self.share(rest)
        for number in range(self._units.rounds):
            env |= self._give(number, stage, components, env)
            env = jaxprs.run(self._of_all[number + 1], env)
        first, *results = [component["layers"] for component in components]

        def body(chunk: Index, row: Index, results: list[Arrays]) -> list[Arrays]:
            at = stage, chunk, row
            return self.layer(at, partial(self._read, 0, first, at), results, env)

        layers, device = self._each_layer(body, results), lax.axis_index(self._axes.names)
        components = [
            component | {name: after(layers, component[name], device) for name in self._outer}
            for component in components
        ]
        new = self.with_outer(layers, components, env)
        return list(map(with_stages, new)), self.rest(env)

    def _each_layer(self, body: Callable[..., Any], carry: Any) -> Any:
        return self._params.layers.every_layer(self._params.rows.shape[2], body, carry)

    def _read(self, component: int, arrays: Arrays, at: At, example: int) -> Stored:
        """What is stored for a layer of a component; ``example`` is a layer of its kind."""
        layout = self._layers[component]
        return layout.read(arrays, layout.layer_at(at, example))

    def _give(self, number: int, stage: jax.Array, components: Sequence[Tree], env: Env) -> Env:
        """The scalars that units give to all others in a round."""
        given: Env = {}
        for name, slices in self._outer_slices.items():
            stored = [component[name] for component in components]
            values = self._run(slices[number], self._outer[name], stored, 0, env)
            given |= zip(slices[number].targets, map(whole, values), strict=True)
        kinds = self._kinds[number]

        def body(chunk: Index, row: Index, found: list[Any]) -> list[Any]:
            at = stage, chunk, row

            def compute(kind: _Kind, scalars: list[jax.Array]) -> list[jax.Array]:
                n = kind.number_at(at)
                stored = [
                    self._read(c, component["layers"], at, kind.example)
                    for c, component in enumerate(components)
                ]
                env_of_layer = kind.env(n, env)
                values = self._run(kind.slices[0], self._layers, stored, kind.example, env_of_layer)
                return [
                    w.at[n].set(whole(v).reshape(())) for w, v in zip(scalars, values, strict=True)
                ]

            return [
                run_if(kind.number_at(at) >= 0, partial(compute, kind), scalars)
                for kind, scalars in zip(kinds, found, strict=True)
            ]

        empty = [
            [jnp.zeros(len(kind.layers), v.aval.dtype) for v in kind.slices[0].targets]
            for kind in kinds
        ]
        empty = after(list(given.values()), empty, lax.axis_index(self._axes.names))
        # Every stage has those of its own layers, and zeros.
        stage_sum = partial(communicate, lax.psum, axes=self._axes.stage)
        found = jax.tree.map(stage_sum, self._each_layer(body, empty))
        for kind, values in zip(kinds, found, strict=True):
            for n, one in enumerate(kind.slices):
                pairs = zip(one.targets, values, strict=True)
                given |= {v: w[n].reshape(v.aval.shape) for v, w in pairs}
        return given


def without_stages(placed: Placed) -> Tree:
    """A device's part of a placed tree, without the dimension of stages."""
    return {"layers": jax.tree.map(lambda w: w[0], placed["layers"]), **outer_of(placed)}


def with_stages(component: Tree) -> Placed:
    """Undoes `without_stages`."""
    layers = jax.tree.map(lambda w: w[None], component["layers"])
    return {"layers": layers, **outer_of(component)}
