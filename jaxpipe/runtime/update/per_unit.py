"""Runs a function of whole trees where their parts lie, unit by unit, inside `jax.shard_map`.

Each stage runs its own layers, and all stages run the embedding and the head. A device may hold
only a part of an array: the stages may split embedding and head, the data shards and model axes may
split all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.barriers import after, run_if, tie
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Env
from jaxpipe.runtime.layout.data_axis import gather, own_shard
from jaxpipe.runtime.layout.leaf import Leaf
from jaxpipe.runtime.layout.parts import Part, Slices, communicate
from jaxpipe.runtime.layout.tree_layout import TreeLayout, units_of
from jaxpipe.runtime.layout.whole_model import Layout
from jaxpipe.runtime.types import Arrays, At, Index, Leaves, Shapes, Stored, Tree
from jaxpipe.runtime.update.run_parts import own, run_parts, whole
from jaxpipe.runtime.update.units import Slice, Unit, Units


class _Kind(NamedTuple):
    """Layers that compute the same.

    Args:
      number: of the kind.
      example: the first of its layers.
      slice: what that one computes.
      shared: for every variable that it shares, the variable of each layer in its place; None for
        layers of other kinds.
    """

    number: int
    example: int
    slice: Slice
    shared: tuple[tuple[Any, ...], ...]


class _Kinds:
    """All layers, sorted by what they compute in one pass."""

    def __init__(self, slices: Sequence[Slice], rows: np.ndarray) -> None:
        members: dict[Any, list[int]] = {}
        for n, one in enumerate(slices):
            members.setdefault(one.signature(), []).append(n)
        self.kinds, kind_of = [], np.zeros(len(slices), np.int32)
        for number, mine in enumerate(members.values()):
            kind_of[mine] = number
            nothing = (None,) * len(slices[mine[0]].shared)
            shared = [one.shared if n in mine else nothing for n, one in enumerate(slices)]
            columns = tuple(zip(*shared, strict=True))
            self.kinds.append(_Kind(number, mine[0], slices[mine[0]], columns))
        self.slices, self.members = slices, list(members.values())
        self.kind_of = np.where(rows < 0, -1, kind_of[rows])

    def wanted(self) -> list[Any]:
        """What all layers share."""
        return [v for kind in self.kinds for column in kind.shared for v in column if v is not None]


class PerUnit:
    """A function of trees of components, run unit by unit.

    In its methods, a *component* is this device's part of one, and ``env`` is what units share.

    Args:
      function: of trees of arrays, whose components have one tree per layer.
      args: shapes of its arguments, by name.
      params: where the parameters lie.
      sharded: whether data shards split every array.
      replaces: components of the result that take the place of one of the arguments, by their
        numbers; both must lie alike.
      whole: components of the arguments, by number, that every data shard has whole although the
        shards split their work; so are the results that replace them.

    Attributes:
      result_shapes: of the function's result.
      result: where it lies.
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
        replaces: Mapping[int, int] = MappingProxyType({}),
        whole: Collection[int] = (),
    ) -> None:
        self._units = Units(function, args, lambda tree: units_of(tree, params))
        self.mixes = self._units.mixes
        trees = [TreeLayout(arg, params) for arg in args.values()]
        self._inputs = [layout for tree in trees for layout in tree.components]
        self.result_shapes = self._units.result
        self.result = TreeLayout(self.result_shapes, params)
        self._replaces = [replaces.get(r) for r in range(len(self.result.components))]
        self._sharded, self._whole = sharded, frozenset(whole)
        self._params, self._axes = params, params.axes
        cuts: list[Callable[[Unit], Slice]] = [
            functools.partial(self._units.given, number=n) for n in range(self._units.passes)
        ]
        cuts.append(self._units.results)
        layers = range(params.num_layers)
        *self._given, self._results = (
            _Kinds([cut(n) for n in layers], params.rows) for cut in cuts
        )
        *self._outer_given, self._outer_results = (
            {name: cut(name) for name in params.outer} for cut in cuts
        )
        outer = (*self._outer_given, self._outer_results)
        wanted = [
            v for slices in outer for one in slices.values() for v in one.shared
        ] + self._units.shared_results()
        wanted += [v for kinds in (*self._given, self._results) for v in kinds.wanted()]
        self._wanted = list(dict.fromkeys(v for v in wanted if jaxprs.is_var(v)))

    # What units share.

    def share(self, rest: Iterable[jax.Array]) -> Env:
        """What units share before any has given a scalar, from the arguments' leaves that belong
        to no parameter."""
        return self._units.go_on(self._units.start(rest), self._wanted, 0)

    def rest(self, env: Env) -> list[jax.Array]:
        """The leaves of the result that belong to no parameter."""
        return jaxprs.values(self._units.shared_results(), env)

    # Embedding, head, and what layers share.

    def with_outer(
        self, layers: Sequence[Arrays], components: Sequence[Tree], env: Env
    ) -> list[Tree]:
        """The result's components, of their layers and of what else the function computes."""
        outer = {name: self.outer(name, components, env) for name in self._params.outer}
        found = zip(layers, *outer.values(), strict=True)
        return [dict(zip(("layers", *outer), one, strict=True)) for one in found]

    def outer(self, name: str, components: Sequence[Tree], env: Env) -> list[Tree]:
        """What the result's components have for one of these."""
        found = iter(self._run_outer(name, self._outer_results[name], components, env))
        results = []
        for layout, replaced in zip(self.result.components, self._replaces, strict=True):
            leaves, tree = jax.tree.flatten(layout.outer[name])
            cuts = [self._cut(leaf) for leaf in leaves]
            parts = [cut.with_padding(own(next(found), cut)) for cut in cuts]
            one = jax.tree.unflatten(tree, parts)
            results.append(self._put_whole(replaced, one, layout.outer[name]))
        return results

    def _run_outer(self, name: str, one: Slice, components: Sequence[Tree], env: Env) -> list[Any]:
        parts: list[Part] = []
        for c, layout in enumerate(self._inputs):
            leaves = layout.outer[name]
            values = jax.tree.leaves(self._take_own(c, components[c][name], leaves))
            parts += map(Part, values, map(self._cut, jax.tree.leaves(leaves)))
        return self._run(one, parts, [env[v] for v in one.shared])

    def _cut(self, leaf: Leaf) -> Slices:
        return leaf.cut(self._axes, sharded=self._sharded)

    def _take_own(self, component: int | None, stored: Stored, leaves: Leaves) -> Stored:
        """This data shard's part, of what it may have whole."""
        return own_shard(stored, leaves, self._axes) if component in self._whole else stored

    def _put_whole(self, component: int | None, stored: Stored, leaves: Leaves) -> Stored:
        """Undoes `_take_own`."""
        return gather(stored, leaves, self._axes) if component in self._whole else stored

    def _run(self, one: Slice, parts: Sequence[Part], shared: Sequence[jax.Array]) -> list[Any]:
        """The targets of a slice, whole or parts."""
        env = self._units.consts | dict(zip(one.shared, shared, strict=True))
        env = run_parts(one.eqns, env | dict(zip(one.inputs, parts, strict=True)))
        return [env[v] if jaxprs.is_var(v) else jaxprs.values([v], {})[0] for v in one.targets]

    # Layers.

    def layer(
        self, at: At, read: Callable[[int, int], Stored], results: Sequence[Arrays], env: Env
    ) -> list[Arrays]:
        """Runs the layer at a place, if there is one.

        Args:
          at: the place: stage, chunk, number in the chunk.
          read: finds what is stored there of a component of the arguments that no result replaces,
            from the component's number and an example of the layer's kind.
          results: the layers of the result's components, or of those that they replace.
          env: what units share.

        Returns:
          The results, with those of the layer written.
        """
        found = list(results)
        mine = jnp.asarray(self._results.kind_of)[at]
        for kind in self._results.kinds:
            # A stage is never negative, but XLA does not know that: it would leave out the loop.
            runs = (mine == kind.number) & (at[0] >= 0)
            step = functools.partial(self._layer_of, kind, runs, at, read, env)
            several = len(self._results.kinds) > 1 and not self._params.layers.own_arrays
            found = run_if(mine == kind.number, step, found) if several else step(found)
        return found

    def _layer_of(
        self,
        kind: _Kind,
        runs: jax.Array,
        at: At,
        read: Callable[[int, int], Stored],
        env: Env,
        results: list[Arrays],
    ) -> list[Arrays]:
        layouts = [layout.layers for layout in self.result.components]
        places = [layout.layer_at(at, kind.example) for layout in layouts]
        stored = [
            layout.read(arrays, place)
            for layout, arrays, place in zip(layouts, results, places, strict=True)
        ]

        def compute(stored: list[Stored]) -> list[Stored]:
            others = [c for c in range(len(self._inputs)) if c not in self._replaces]
            values, stored = tie([read(c, kind.example) for c in others], stored)
            inputs = dict(zip((*others, *self._replaces), (*values, *stored), strict=True))
            ordered = [inputs[c] for c in range(len(self._inputs))]
            found = iter(self._run_layer(kind, ordered, at, env))
            new = []
            for layout, old, c in zip(layouts, stored, self._replaces, strict=True):
                leaves, sharded = layout.leaves_of(kind.example), self._sharded
                cuts = layout.cuts(kind.example, self._axes, sharded=sharded)
                parts = [own(next(found), cut) for cut in cuts]
                mine = self._take_own(c, old, leaves)
                one = layout.of_parts(parts, mine, kind.example, self._axes, sharded=sharded)
                one = jax.tree.map(lambda w, like: w.astype(like.dtype), one, mine)
                new.append(self._put_whole(c, one, leaves))
            return new

        # Written outside the loop: XLA would compute the result again from what it overwrites.
        stored = run_if(runs, compute, stored)
        return [
            layout.write(arrays, place, one)
            for layout, arrays, place, one in zip(layouts, results, places, stored, strict=True)
        ]

    def _run_layer(self, kind: _Kind, stored: Sequence[Stored], at: At, env: Env) -> list[Any]:
        number = jnp.asarray(self._params.rows)[at]
        parts: list[Part] = []
        for c, layout in enumerate(layout.layers for layout in self._inputs):
            one = self._take_own(c, stored[c], layout.leaves_of(kind.example))
            values = layout.parts(one, kind.example, self._axes, sharded=self._sharded)
            parts += map(Part, values, layout.cuts(kind.example, self._axes, sharded=self._sharded))
        return self._run(kind.slice, parts, [_of(column, number, env) for column in kind.shared])

    # All units.

    def run(
        self, components: Sequence[Tree], rest: Iterable[jax.Array]
    ) -> tuple[list[Tree], list[jax.Array]]:
        """Runs the whole function.

        Args:
          components: those of all arguments.
          rest: the arguments' leaves that belong to no parameter.

        Returns:
          The result's components, and its other leaves.
        """
        stage, env = lax.axis_index(self._axes.stage), self.share(rest)
        for number in range(len(self._given)):
            env |= self._give(number, stage, components, env)
            env = self._units.go_on(env, self._wanted, number + 1)

        def body(chunk: Index, row: Index, results: list[Arrays]) -> list[Arrays]:
            at = stage, chunk, row
            read = functools.partial(self._read, components, at)
            return self.layer(at, read, results, env)

        start = [
            self._zeros(layout) if place is None else components[place]["layers"]
            for layout, place in zip(self.result.components, self._replaces, strict=True)
        ]
        layers, device = self._each_layer(body, start), lax.axis_index(self._axes.names)
        components = [
            one | {name: after(layers, one[name], device) for name in self._params.outer}
            for one in components
        ]
        return self.with_outer(layers, components, env), self.rest(env)

    def _each_layer(self, body: Callable[..., Any], carry: Any) -> Any:
        return self._params.layers.every_layer(self._params.rows.shape[2], body, carry)

    def _zeros(self, layout: Layout) -> Arrays:
        def zeros(leaf: Leaf) -> jax.Array:
            return jnp.zeros(leaf.local.struct(sharded=self._sharded).shape, leaf.dtype)

        return jax.tree.map(zeros, layout.layers.placed)

    def _read(self, components: Sequence[Tree], at: At, component: int, example: int) -> Stored:
        """What is stored for a layer of a component; ``example`` is a layer of its kind."""
        layout = self._inputs[component].layers
        return layout.read(components[component]["layers"], layout.layer_at(at, example))

    def _give(self, number: int, stage: jax.Array, components: Sequence[Tree], env: Env) -> Env:
        """The scalars that units give to all others in a pass."""
        given: Env = {}
        kinds = self._given[number]
        for name, one in self._outer_given[number].items():
            values = self._run_outer(name, one, components, env)
            given |= zip(one.targets, map(whole, values), strict=True)

        def body(chunk: Index, row: Index, found: list[Any]) -> list[Any]:
            at = stage, chunk, row
            for kind in kinds.kinds:

                def compute(mine: list[jax.Array], kind: _Kind = kind) -> list[jax.Array]:
                    inputs = range(len(self._inputs))
                    stored = [self._read(components, at, c, kind.example) for c in inputs]
                    values = self._run_layer(kind, stored, at, env)
                    n = jnp.asarray(self._params.rows)[at]
                    return [
                        w.at[n].set(whole(v).reshape(())) for w, v in zip(mine, values, strict=True)
                    ]

                mine = jnp.asarray(kinds.kind_of)[at] == kind.number
                found[kind.number] = run_if(mine, compute, found[kind.number])
            return found

        count = self._params.num_layers
        empty = [
            [jnp.zeros(count, v.aval.dtype) for v in kind.slice.targets] for kind in kinds.kinds
        ]
        empty = after(list(given.values()), empty, lax.axis_index(self._axes.names))
        # Every stage has those of its own layers, and zeros.
        stage_sum = functools.partial(communicate, lax.psum, axes=self._axes.stage)
        found = jax.tree.map(stage_sum, self._each_layer(body, empty))
        for members, values in zip(kinds.members, found, strict=True):
            for n in members:
                pairs = zip(kinds.slices[n].targets, values, strict=True)
                given |= {v: w[n].reshape(v.aval.shape) for v, w in pairs}
        return given


def _of(column: tuple[Any, ...], number: Index, env: Env) -> jax.Array:
    """What a layer reads of what units share, if other layers read another variable."""
    different = {v for v in column if v is not None}
    if len(different) == 1:
        return env[different.pop()]
    nothing = jnp.zeros_like(env[next(iter(different))])
    return jnp.stack([nothing if v is None else env[v] for v in column])[number]
