"""Runs a function of whole trees where their parts lie, unit by unit, inside `jax.shard_map`.

Each stage runs its own layers, and all stages run the embedding and the head. A device may hold
only a part of an array: the stages may split embedding and head, the data shards and model axes may
split all. Nothing is gathered that an equation can do without: `run_parts`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

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
from jaxpipe.runtime.layout.parts import DevicePart, communicate
from jaxpipe.runtime.layout.tree_layout import TreeLayout
from jaxpipe.runtime.layout.whole_model import Layout, outer_of
from jaxpipe.runtime.types import Arrays, At, Index, Placed, Shapes, Stored, Tree
from jaxpipe.runtime.update.run_parts import own, run_parts, whole
from jaxpipe.runtime.update.units import Slice, Units


class _Kind(NamedTuple):
    """Units that compute the same in one round: layers, or the embedding.

    Args:
      pieces: what is stored for a unit, of every component.
      slices: the program of every unit; the first one's is run.
      example: the first layer, if they are layers.
      numbers: for every row, its layer's number within the kind; -1 if it is none of these.
    """

    pieces: Sequence[Piece]
    slices: Sequence[Slice]
    example: int = 0
    numbers: np.ndarray = np.zeros(())

    @property
    def program(self) -> Slice:
        return self.slices[0]

    def number_at(self, at: At) -> jax.Array:
        return jnp.asarray(self.numbers)[at]

    def env(self, number: Index, env: Env) -> Env:
        """The environment of a layer, whose variables may be others than the first one's."""
        columns = zip(*(each.shared for each in self.slices), strict=True)
        differ = [column for column in columns if len(set(column)) > 1]
        return env | {column[0]: jnp.stack([env[v] for v in column])[number] for column in differ}


def _kinds(pieces: Sequence[Piece], slices: Sequence[Slice], rows: np.ndarray) -> list[_Kind]:
    """Sorts layers by what they compute."""
    layers_of: dict[str, list[int]] = {}
    for n, program in enumerate(slices):
        layers_of.setdefault(program.signature(), []).append(n)
    kinds = []
    for layers in layers_of.values():
        numbers = np.full(len(slices) + 1, -1, np.int32)  # the last is of rows without a layer
        numbers[layers] = range(len(layers))
        kinds.append(_Kind(pieces, [slices[n] for n in layers], layers[0], numbers[rows]))
    return kinds


class PerUnit:
    """A function of trees of components, run unit by unit.

    The components of the result replace those of the arguments but the first. In the methods, a
    *component* is this device's part of one, and ``env`` is what units share.

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
        self._units = units = Units(function, args, lambda tree: TreeLayout(tree, params).units)
        self.result_shapes, self.mixes = units.result, units.mixes
        self._params, self._axes = params, params.axes
        self._sharded, self._whole = sharded, whole
        trees = [TreeLayout(arg, params) for arg in args.values()]
        self._components = [layout for tree in trees for layout in tree.components]
        self._layouts = [component.layers for component in self._components]
        layers = [units.slices(n) for n in range(params.num_layers)]
        outer = {name: units.slices(name) for name in params.outer}
        # By round.
        self._layers = [
            _kinds(self._layouts, slices, params.rows) for slices in zip(*layers, strict=True)
        ]
        pieces = {name: [Piece(c.outer[name]) for c in self._components] for name in outer}
        self._outer = [
            {name: _Kind(pieces[name], [slices[n]]) for name, slices in outer.items()}
            for n in range(units.rounds + 1)
        ]
        slices = itertools.chain(*layers, *outer.values())
        self._of_all = units.of_all(v for program in slices for v in program.shared)

    # What units share.

    def share(self, rest: Iterable[jax.Array]) -> Env:
        """What units share before any has given a scalar, from the arguments' leaves that belong
        to no parameter."""
        env = self._units.consts | dict(zip(self._units.inputs, rest, strict=True))
        return jaxprs.run_eqns(self._of_all[0], env)

    def rest(self, env: Env) -> list[jax.Array]:
        """The leaves of the result that belong to no parameter."""
        return jaxprs.values(self._units.results, env)

    # One unit, of what is stored for it of every component.

    def _own(self, kind: _Kind, stored: Sequence[Stored]) -> list[Stored]:
        """This data shard's part, of what it may have whole."""
        return [
            own_shard(arrays, piece.leaves_of(kind.example), self._axes)
            if c in self._whole
            else arrays
            for c, (piece, arrays) in enumerate(zip(kind.pieces, stored, strict=True))
        ]

    def _run_unit(
        self, kind: _Kind, owned: Sequence[Stored], env: Env
    ) -> tuple[list[list[DevicePart]], list[Tree]]:
        """This device's parts of all arrays, and what the unit computes, whole or in parts."""
        program = kind.program
        parts = [
            piece.parts(arrays, kind.example, self._axes, sharded=self._sharded)
            for piece, arrays in zip(kind.pieces, owned, strict=True)
        ]
        inputs = zip(program.inputs, itertools.chain(*parts), strict=True)
        env = run_parts(program.eqns, env | dict(inputs))
        return parts, jaxprs.values(program.targets, env)

    def _scalars(self, kind: _Kind, stored: Sequence[Stored], env: Env) -> list[jax.Array]:
        """Computes the scalars that a unit gives to all others."""
        return list(map(whole, self._run_unit(kind, self._own(kind, stored), env)[1]))

    def _renew(self, kind: _Kind, stored: Sequence[Stored], env: Env) -> list[Stored]:
        """Runs a unit; returns its arrays of every component but the first."""
        owned, results = self._own(kind, stored), []
        parts, targets = self._run_unit(kind, owned, env)
        values = iter(targets)
        for c, piece in list(enumerate(kind.pieces))[1:]:
            new = [own(next(values), old.cut).astype(old.value.dtype) for old in parts[c]]
            arrays = piece.of_parts(new, owned[c], kind.example, self._axes, sharded=self._sharded)
            if c in self._whole:
                arrays = gather(arrays, piece.leaves_of(kind.example), self._axes)
            results.append(arrays)
        return results

    # Parts: the layers, the embedding, the head, and what layers share.

    def part(self, name: str, given: Sequence[Tree], env: Env) -> list[Tree]:
        """A part of the result's components, from that of all components."""
        if name != "layers":
            return self._renew(self._outer[-1][name], given, env)
        first, *results = given

        def body(at: At, results: list[Arrays]) -> list[Arrays]:
            return self.layer(at, partial(self._read, 0, first, at), results, env)

        return self._each_layer(body, results)

    def with_outer(
        self, layers: Sequence[Arrays], components: Sequence[Tree], env: Env
    ) -> list[Tree]:
        """The result's components, of their layers and of what else the function computes."""
        parts = {"layers": layers}
        for name in self._params.outer:
            parts[name] = self.part(name, [c[name] for c in components], env)
        return [dict(zip(parts, trees, strict=True)) for trees in zip(*parts.values(), strict=True)]

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
        kinds, layouts, renewed = self._layers[-1], self._layouts[1:], list(results)

        def run(kind: _Kind, number: Index, results: list[Arrays]) -> list[Arrays]:
            def renew(stored: list[Stored]) -> list[Stored]:
                first, stored = tie(read(kind.example), stored)
                return self._renew(kind, [first, *stored], kind.env(number, env))

            places = [layout.layer_at(at, kind.example) for layout in layouts]
            among = list(zip(layouts, results, places, strict=True))
            stored = [layout.read(arrays, place) for layout, arrays, place in among]
            # Written outside the loop: XLA would compute the result again from what it overwrites.
            # A stage is never negative; XLA does not know that, or it would leave out the loop.
            stored = run_if((number >= 0) & (at[0] >= 0), renew, stored)
            return [
                layout.write(arrays, place, new)
                for (layout, arrays, place), new in zip(among, stored, strict=True)
            ]

        for kind in kinds:
            number = kind.number_at(at)
            step = partial(run, kind, number)
            alone = len(kinds) == 1 or self._params.layers.own_arrays
            renewed = step(renewed) if alone else run_if(number >= 0, step, renewed)
        return renewed

    def _each_layer(self, body: Callable[..., Tree], carry: Tree) -> Tree:
        """Runs ``body(at, carry)`` for every row of this stage."""
        stage, count = lax.axis_index(self._axes.stage), self._params.rows.shape[2]
        return self._params.layers.every_layer(
            count, lambda chunk, row, carry: body((stage, chunk, row), carry), carry
        )

    def _read(self, component: int, arrays: Arrays, at: At, example: int) -> Stored:
        """Reads a layer of a component; ``example`` is a layer of its kind."""
        layout = self._layouts[component]
        return layout.read(arrays, layout.layer_at(at, example))

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
        specs = [
            component.specs(sharded=self._sharded and c not in self._whole)
            for c, component in enumerate(self._components)
        ]
        run = jax.shard_map(
            self._run,
            mesh=self._params.mesh,
            in_specs=(specs, P()),
            out_specs=(specs[1:], P()),
            check_vma=False,
        )
        return run(list(components), list(rest))

    def _run(
        self, placed: Sequence[Placed], rest: Sequence[jax.Array]
    ) -> tuple[list[Placed], list[jax.Array]]:
        components, env = list(map(without_stages, placed)), self.share(rest)
        for number, equations in enumerate(self._of_all[1:]):
            env = jaxprs.run_eqns(equations, env | self._give(number, components, env))
        layers = self.part("layers", [c["layers"] for c in components], env)
        device = lax.axis_index(self._axes.names)
        components = [c | after(layers, outer_of(c), device) for c in components]
        new = self.with_outer(layers, components, env)
        return list(map(with_stages, new)), self.rest(env)

    def _give(self, number: int, components: Sequence[Tree], env: Env) -> Env:
        """The scalars that units give to all others in a round."""
        given: Env = {}
        for name, unit in self._outer[number].items():
            values = self._scalars(unit, [c[name] for c in components], env)
            given |= zip(unit.program.targets, values, strict=True)
        kinds = self._layers[number]

        def body(at: At, scalars: list[Tree]) -> list[Tree]:
            def run(kind: _Kind, scalars: list[jax.Array]) -> list[jax.Array]:
                n = kind.number_at(at)
                stored = [
                    self._read(c, component["layers"], at, kind.example)
                    for c, component in enumerate(components)
                ]
                values = zip(scalars, self._scalars(kind, stored, kind.env(n, env)), strict=True)
                return [of_kind.at[n].set(value.reshape(())) for of_kind, value in values]

            return [
                run_if(kind.number_at(at) >= 0, partial(run, kind), of_kind)
                for kind, of_kind in zip(kinds, scalars, strict=True)
            ]

        scalars = [
            [jnp.zeros(len(kind.slices), v.aval.dtype) for v in kind.program.targets]
            for kind in kinds
        ]
        scalars = after(list(given.values()), scalars, lax.axis_index(self._axes.names))
        # Every stage has those of its own layers, and zeros.
        stage_sum = partial(communicate, lax.psum, axes=self._axes.stage)
        scalars = jax.tree.map(stage_sum, self._each_layer(body, scalars))
        for kind, of_kind in zip(kinds, scalars, strict=True):
            for n, program in enumerate(kind.slices):
                pairs = zip(program.targets, of_kind, strict=True)
                given |= {v: values[n].reshape(v.aval.shape) for v, values in pairs}
        return given


def without_stages(placed: Placed) -> Tree:
    """A device's part of a placed tree, without the dimension of stages."""
    return {"layers": jax.tree.map(lambda w: w[0], placed["layers"]), **outer_of(placed)}


def with_stages(component: Tree) -> Placed:
    """Undoes `without_stages`."""
    layers = jax.tree.map(lambda w: w[None], component["layers"])
    return {"layers": layers, **outer_of(component)}
