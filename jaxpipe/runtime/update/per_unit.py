"""Runs a function of whole trees where their parts lie, unit by unit, inside `jax.shard_map`.

Each stage runs its own layers, and all stages run the embedding and the head. A device may hold
only a part of an array: the stages may split embedding and head, the data shards and model axes may
split all. Nothing is gathered that an equation can do without: one that treats every element by
itself runs on parts; a reduction to a scalar runs on parts and then across devices. Any other is
given whole arrays, which are gathered where it first needs them: on every device, or those of a
layer on one of the devices that share a stage, where other devices gather other layers
(`jaxpipe.runtime.update.homes`).
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.barriers import after, always, run_if, tie
from jaxpipe.runtime.indices import repeat
from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Atom, Env, Eqn, Eqns
from jaxpipe.runtime.layout.data_axis import gather, own_shard
from jaxpipe.runtime.layout.layer_layout import Piece
from jaxpipe.runtime.layout.leaf import Cut, DevicePart, communicate
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.layout.whole_model import Layout, TreeLayout, outer_of
from jaxpipe.runtime.types import Arrays, At, Flag, Index, Shapes, Stored, Tree
from jaxpipe.runtime.update.homes import EVERYWHERE, LAYERS, AtHome, Homes, SeparateHomes
from jaxpipe.runtime.update.units import Slice, Units


class _Group(NamedTuple):
    """Units whose programs are equal, in one round: layers, or the embedding.

    Args:
      example: the first layer, if they are layers.
      index_in_group: for every row, its layer's index in the group; -1 if it is none of these.
    """

    pieces: Sequence[Piece]
    slices: Sequence[Slice]
    example: int = 0
    index_in_group: np.ndarray = np.zeros(())

    @property
    def program(self) -> Slice:
        return self.slices[0]

    def may_have(self, at: At) -> bool:
        """Whether a layer at a place may be in the group: whether one is on any stage, if the
        program knows the place."""
        _, chunk, row = at
        knows = isinstance(chunk, int) and isinstance(row, int)
        return not knows or bool((self.index_in_group[:, chunk, row] >= 0).any())

    def env(self, index: Index, env: Env) -> Env:
        """The environment of a layer, whose variables may be others than the first one's."""
        columns = zip(*(program.shared for program in self.slices), strict=True)
        differ = [column for column in columns if len(set(column)) > 1]
        return env | {column[0]: jnp.stack([env[v] for v in column])[index] for column in differ}


def _grouped(pieces: Sequence[Piece], slices: Sequence[Slice], rows: np.ndarray) -> list[_Group]:
    """Sorts layers by what they compute."""
    layers_of: dict[str, list[int]] = {}
    for n, program in enumerate(slices):
        layers_of.setdefault(program.signature(), []).append(n)
    groups = []
    for layers in layers_of.values():
        index = np.full(len(slices) + 1, -1, np.int32)  # the last is of rows without a layer
        index[layers] = range(len(layers))
        groups.append(_Group(pieces, [slices[n] for n in layers], layers[0], index[rows]))
    return groups


class PerUnit:
    """A function of trees, run unit by unit.

    The arguments flatten to a list of *components* (each shaped like the parameters) and a *rest*
    of leaves that belong to no parameter. Component 0 is only read. The function must return
    components 1, 2, ... again, in the same order and with the same shapes, as in ``(grads, params,
    state) -> (params, state)``. In the methods a component is this device's part of it; ``env``
    holds the values that all units share. Units and rounds: `jaxpipe.runtime.update.units`; why:
    docs/design/004-optimizers.md.

    Args:
      function: of trees of arrays, whose components have one tree per layer.
      params: where the parameters lie.
      sharded: whether data shards split every array.
      replicated: components, by number, that every data shard has whole although the shards split
        their work.

    Attributes:
      mixes: says where scalars of several units meet; None if nowhere.
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        args: dict[str, Shapes],
        params: Layout,
        *,
        sharded: bool,
        replicated: Collection[int] = (),
    ) -> None:
        self._units = units = Units(function, args, lambda tree: TreeLayout(tree, params).units)
        self.result_shapes, self.mixes = units.result, units.mixes
        self._params, self._axes = params, params.axes
        self._sharded, self._replicated = sharded, replicated
        trees = [TreeLayout(arg, params) for arg in args.values()]
        self._components = [layout for tree in trees for layout in tree.components]
        self._layer_layouts = [component.layers for component in self._components]
        layers = [units.slices(n) for n in range(params.num_layers)]
        outer = {name: units.slices(name) for name in params.outer}
        self._layer_groups = [  # [round][group]
            _grouped(self._layer_layouts, slices, params.layers.rows)
            for slices in zip(*layers, strict=True)
        ]
        pieces = {name: [Piece(c.outer[name]) for c in self._components] for name in outer}
        self._outer_groups = [  # [round][name]; round -1 gives results
            {name: _Group(pieces[name], [slices[n]]) for name, slices in outer.items()}
            for n in range(units.rounds + 1)
        ]
        slices = itertools.chain(*layers, *outer.values())
        sizes, rows = (
            {n: params.mesh.shape[n] for n in params.axes.peers},
            params.layers.rows[0].size,
        )
        at_home = any(_needs_wholes(group.program) for group in self._layer_groups[-1])
        self._trips = -(-rows // (math.prod(sizes.values()) if at_home else 1))
        self._homes = SeparateHomes(tuple(sizes), tuple(sizes.values()), -(-rows // self._trips))
        self._of_all = units.of_all(v for program in slices for v in program.shared)

    # What units share.

    def share(self, rest: Iterable[jax.Array]) -> Env:
        """Computes what units share before any has given a scalar, from leaves of no parameter."""
        env = self._units.consts | dict(zip(self._units.inputs, rest, strict=True))
        return jaxprs.run_eqns(self._of_all[0], env)

    def rest(self, env: Env) -> list[jax.Array]:
        """The leaves of the result that belong to no parameter."""
        return jaxprs.values(self._units.results, env)

    # One unit, of what is stored for it of every component.

    def _take_shards(self, group: _Group, stored: Sequence[Stored]) -> list[Stored]:
        """This data shard's part, of what it may have whole."""
        shards = list(stored)
        for c in self._replicated:
            shards[c] = own_shard(stored[c], group.pieces[c].leaves_of(group.example), self._axes)
        return shards

    def _run_unit(
        self, group: _Group, owned: Sequence[Stored], env: Env, homes: Homes
    ) -> tuple[list[list[DevicePart]], list[Tree]]:
        """This device's parts of all arrays, and what the unit computes, whole or in parts."""
        program = group.program
        parts = [
            piece.parts(arrays, group.example, self._axes, sharded=self._sharded)
            for piece, arrays in zip(group.pieces, owned, strict=True)
        ]
        inputs = zip(program.inputs, itertools.chain(*parts), strict=True)
        env = _run_on_parts(program.eqns, env | dict(inputs), homes)
        return parts, jaxprs.values(program.targets, env)

    def _scalars(self, group: _Group, stored: Sequence[Stored], env: Env) -> list[jax.Array]:
        """Computes the scalars that a unit gives to all others."""
        owned = self._take_shards(group, stored)
        _, targets = self._run_unit(group, owned, env, EVERYWHERE)
        return [_at_home(value, EVERYWHERE).value for value in targets]

    def _renew(
        self, group: _Group, stored: Sequence[Stored], env: Env, homes: Homes = EVERYWHERE
    ) -> list[Stored]:
        """Runs a unit; returns its arrays of every component but the first."""
        owned = self._take_shards(group, stored)
        parts, targets = self._run_unit(group, owned, env, homes)
        values, results = iter(targets), []
        for c, piece in list(enumerate(group.pieces))[1:]:
            new = [_own(next(values), old.cut, homes).astype(old.value.dtype) for old in parts[c]]
            arrays = piece.of_parts(new, owned[c], group.example, self._axes, sharded=self._sharded)
            if c in self._replicated:
                arrays = gather(arrays, piece.leaves_of(group.example), self._axes)
            results.append(arrays)
        return results

    # Parts: the layers, the embedding, the head, and what layers share.

    def part(self, name: str, given: Sequence[Tree], env: Env) -> list[Tree]:
        """A part of the result's components, from that of all components."""
        if name != "layers":
            return self._renew(self._outer_groups[-1][name], given, env)
        first, *results = given
        stage, count = lax.axis_index(self._axes.stage), self._params.layers.rows.shape[2]
        rows, size = self._params.layers.rows[0].size, self._homes.layers

        def body(trip: Index, results: list[Arrays]) -> list[Arrays]:
            left, numbers = rows - trip * size, [trip * size + k for k in range(size)]
            if rows % size:  # the last ones come round to the first, which are left as they are
                numbers = [n % rows for n in numbers]
            at = [(stage, n // count, n % count) for n in numbers]
            return self.layers(at, partial(self._read, 0, first), results, env, left=left)

        if not self._params.layers.own_arrays:
            return repeat(self._trips, body, results)
        for trip in range(self._trips):  # the program must know their numbers
            results = body(trip, results)
        return results

    def with_outer(
        self, layers: Sequence[Arrays], components: Sequence[Tree], env: Env
    ) -> list[Tree]:
        """The result's components, of their layers and of what else the function computes."""
        parts = {"layers": layers}
        for name in self._params.outer:
            parts[name] = self.part(name, [c[name] for c in components], env)
        return [dict(zip(parts, trees, strict=True)) for trees in zip(*parts.values(), strict=True)]

    # Layers.

    def layers(
        self,
        at: Sequence[At],
        read: Callable[[At, int], Stored],
        results: Sequence[Arrays],
        env: Env,
        *,
        left: Index = 1,
    ) -> list[Arrays]:
        """Runs the layers at some places, as far as there are any, several of them at their homes;
        returns the results with theirs written.

        Args:
          read: finds what is stored at a place of the first component, from an example of the
            layer's group.
          results: the layers of the other components.
          left: how many of the places, the first ones, to run; at others nothing changes.
        """
        groups, layouts = self._layer_groups[-1], self._layer_layouts[1:]
        # A loop spares a group reading and writing back the layers of others. If rows have arrays
        # of their own, that is no work, and the loop would carry those of all rows.
        alone = len(groups) == 1 or self._params.layers.own_arrays

        def run(
            group: _Group, at: Sequence[At], index: Sequence[Index], results: list[Arrays]
        ) -> list[Arrays]:
            def renew(stored: list[Stored]) -> list[Stored]:
                first, stored = tie(_stacked([read(one, group.example) for one in at]), stored)
                if len(at) == 1:
                    return self._renew(group, [first, *stored], group.env(index[0], env))
                return self._renew_at_homes(group, index, [first, *stored], env)

            def write(n: int, results: list[Arrays]) -> list[Arrays]:
                own = stored if len(at) == 1 else jax.tree.map(lambda w: w[n], stored)
                given = zip(layouts, results, places[n], own, strict=True)
                return [layout.write(arrays, *one) for layout, arrays, *one in given]

            places = [[layout.layer_at(one, group.example) for layout in layouts] for one in at]
            of_layers = [
                [layout.read(w, one) for layout, w, one in zip(layouts, results, own, strict=True)]
                for own in places
            ]
            stored = _stacked(of_layers)
            # Written outside the loop: XLA would compute the result again from what it overwrites.
            stored = run_if(_any(index) & always(at[0][0]), renew, stored)
            for n, number in enumerate(index):
                step, others = partial(write, n), not alone and len(at) > 1
                results = run_if(number >= 0, step, results) if others else step(results)
            return results

        renewed = list(results)
        for group in groups:
            mine = [n for n, one in enumerate(at) if group.may_have(one)]
            number, own = jnp.asarray(group.index_in_group), [at[n] for n in mine]
            index = [number[place] for place in own]
            if len(at) > 1:
                index = [jnp.where(k < left, n, -1) for k, n in zip(mine, index, strict=True)]
            step = partial(run, group, own, index)
            if mine:
                renewed = step(renewed) if alone else run_if(_any(index), step, renewed)
        return renewed

    def _renew_at_homes(
        self, group: _Group, index: Sequence[Index], stored: Sequence[Stored], env: Env
    ) -> list[Stored]:
        """Does as `_renew` for several layers at once, those that are in the group."""

        def renew(index: Index, stored: Sequence[Stored]) -> list[Stored]:
            new = self._renew(group, stored, group.env(index, env), homes)
            return jax.tree.map(partial(jnp.where, index >= 0), new, stored[1:])

        homes = dataclasses.replace(self._homes, layers=len(index))
        return jax.vmap(renew, axis_name=LAYERS)(jnp.stack(index), stored)

    def _each_layer(self, body: Callable[..., Tree], carry: Tree) -> Tree:
        """Runs ``body(at, carry)`` for every row of this stage."""
        stage, count = lax.axis_index(self._axes.stage), self._params.layers.rows.shape[2]
        return self._params.layers.every_layer(
            count, lambda chunk, row, carry: body((stage, chunk, row), carry), carry
        )

    def _read(self, component: int, arrays: Arrays, at: At, example: int) -> Stored:
        """Reads a layer of a component; ``example`` is a layer of its group."""
        layout = self._layer_layouts[component]
        return layout.read(arrays, layout.layer_at(at, example))

    # All units.

    def run(
        self, components: Sequence[Placed], rest: Sequence[jax.Array]
    ) -> tuple[list[Placed], list[jax.Array]]:
        """Runs the whole function on all devices, from the placed components and the other leaves
        of its arguments to those of its result."""
        specs = [
            component.specs(sharded=self._sharded and c not in self._replicated)
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
            scalars = self._exchange_scalars(number, components, env)
            env = jaxprs.run_eqns(equations, env | scalars)
        layers = self.part("layers", [c["layers"] for c in components], env)
        device = lax.axis_index(self._axes.names)
        outer = after(layers, list(map(outer_of, components)), device)
        components = [c | own for c, own in zip(components, outer, strict=True)]
        new = self.with_outer(layers, components, env)
        return self.on_stages(new), self.rest(env)

    def on_stages(self, results: Sequence[Tree]) -> list[Placed]:
        """The result's components as they are placed, from a device's parts."""
        return [
            Placed(with_stages(result), layers.order)
            for result, layers in zip(results, self._layer_layouts[1:], strict=True)
        ]

    def _exchange_scalars(self, number: int, components: Sequence[Tree], env: Env) -> Env:
        """The scalars that units give to all others in a round."""
        given: Env = {}
        for name, unit in self._outer_groups[number].items():
            values = self._scalars(unit, [c[name] for c in components], env)
            given |= zip(unit.program.targets, values, strict=True)
        groups, layers = self._layer_groups[number], [c["layers"] for c in components]

        def body(at: At, scalars: list[Tree]) -> list[Tree]:
            return [
                self._layer_scalars(group, at, layers, env, of_group)
                for group, of_group in zip(groups, scalars, strict=True)
            ]

        scalars = [
            [jnp.zeros(len(group.slices), v.aval.dtype) for v in group.program.targets]
            for group in groups
        ]
        scalars = after(list(given.values()), scalars, lax.axis_index(self._axes.names))
        # Every stage has those of its own layers, and zeros.
        stage_sum = partial(communicate, lax.psum, axes=self._axes.stage)
        scalars = jax.tree.map(stage_sum, self._each_layer(body, scalars))
        for group, of_group in zip(groups, scalars, strict=True):
            for n, program in enumerate(group.slices):
                pairs = zip(program.targets, of_group, strict=True)
                given |= {v: values[n].reshape(v.aval.shape) for v, values in pairs}
        return given

    def _layer_scalars(
        self, group: _Group, at: At, layers: Sequence[Arrays], env: Env, scalars: list[jax.Array]
    ) -> list[jax.Array]:
        """A group's scalars, with those of the layer at a place if that is in the group."""
        if not group.may_have(at):
            return scalars
        index = jnp.asarray(group.index_in_group)[at]

        def run(scalars: list[jax.Array]) -> list[jax.Array]:
            stored = [self._read(c, arrays, at, group.example) for c, arrays in enumerate(layers)]
            values = zip(scalars, self._scalars(group, stored, group.env(index, env)), strict=True)
            return [of_group.at[index].set(value.reshape(())) for of_group, value in values]

        return run_if(index >= 0, run, scalars)


def _stacked(of_layers: Sequence[Stored]) -> Stored:
    """Joins the stored arrays of several layers; those of a single one stay as they are."""
    if len(of_layers) == 1:
        return of_layers[0]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *of_layers)


def _any(index: Sequence[Index]) -> Flag:
    """Whether any layer is in the group."""
    return functools.reduce(operator.or_, [n >= 0 for n in index])


def without_stages(placed: Mapping[str, Tree]) -> dict[str, Tree]:
    """A device's part of a placed tree, without the dimension of stages."""
    return {"layers": jax.tree.map(lambda w: w[0], placed["layers"]), **outer_of(placed)}


def with_stages(component: Tree) -> dict[str, Tree]:
    """Undoes `without_stages`, but for the order of layers."""
    layers = jax.tree.map(lambda w: w[None], component["layers"])
    return {"layers": layers, **outer_of(component)}


# Equations on parts of arrays.

_SCALAR = Cut((), ())

_ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "asin", "acos", "atan", "atan2", "cbrt", "ceil", "clamp"),
    *("convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf", "erf_inv", "exp", "exp2"),
    *("expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p"),
    *("logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real"),
    *("reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt"),
    *("square", "stop_gradient", "sub", "tan", "tanh", "xor"),
}

_REDUCTIONS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array], float]] = {
    "reduce_sum": (lambda part: jnp.sum(part, dtype=part.dtype), lax.psum, 0),
    "reduce_max": (jnp.max, lax.pmax, -jnp.inf),
    "reduce_min": (jnp.min, lax.pmin, jnp.inf),
    "reduce_and": (jnp.all, lax.pmin, True),
    "reduce_or": (jnp.any, lax.pmax, False),
}
"""Primitives that reduce: on one device, across devices, and the result of nothing."""

_CHEAP = _ELEMENTWISE | _REDUCTIONS.keys() | jaxprs.FORMS
"""Primitives that may run on every device, although one alone needs the result."""


def _needs_wholes(program: Slice) -> bool:
    """Whether an equation needs a whole array of the unit."""
    arrays = jaxprs.reachable(program.eqns, {v for v in program.inputs if v.aval.shape})
    return any(
        eqn.primitive.name not in _ELEMENTWISE
        and (eqn.primitive.name not in _REDUCTIONS or eqn.outvars[0].aval.shape)
        and any(jaxprs.is_var(v) and v in arrays and v.aval.shape for v in eqn.invars)
        for eqn in program.eqns
    )


def _run_on_parts(eqns: Eqns, env: Env, homes: Homes) -> Env:
    """Evaluates equations in order, and returns the environment grown by their outputs; its values
    are `DevicePart`, `AtHome`, or arrays that belong to no unit's array."""
    env, wholes, turns = dict(env), {}, itertools.cycle(range(homes.groups))

    def value(atom: Atom) -> Tree:
        return env[atom] if jaxprs.is_var(atom) else jaxprs.values([atom], {})[0]

    def gathered(atom: Atom, group: int) -> jax.Array:
        if not jaxprs.is_var(atom):
            return value(atom)
        if (atom, group) not in wholes:
            wholes[atom, group] = _at_home(env[atom], homes, group).value
        return wholes[atom, group]

    for eqn in eqns:
        found = [value(atom) for atom in eqn.invars]
        parts = [v for v in found if isinstance(v, DevicePart)]
        if parts and _is_elementwise(eqn, parts):
            cut = parts[0].cut
            cuts = [cut if atom.aval.shape else _SCALAR for atom in eqn.invars]
            outs = jaxprs.bind(eqn, [_own(*of, homes) for of in zip(found, cuts, strict=True)])
            env.update(zip(eqn.outvars, [DevicePart(out, cut) for out in outs], strict=True))
        elif parts and _is_full_reduction(eqn, parts[0]):
            env[eqn.outvars[0]] = _reduced(parts[0], eqn.primitive.name)
        elif any(map(_is_of_array, found)):
            groups = [v.group for v in found if isinstance(v, AtHome)]
            group = groups[0] if groups else next(turns)
            operands = [gathered(atom, group) for atom in eqn.invars]
            cheap = eqn.primitive.name in _CHEAP
            outs = jaxprs.bind(eqn, operands) if cheap else homes.bind(eqn, operands, group)
            env.update(zip(eqn.outvars, [AtHome(out, group) for out in outs], strict=True))
        else:
            outs = jaxprs.bind(eqn, [_at_home(v, EVERYWHERE).value for v in found])
            env.update(zip(eqn.outvars, outs, strict=True))
    return env


def _is_of_array(value: Tree) -> bool:
    """Whether a unit's array is needed for a value."""
    return isinstance(value, AtHome) or (isinstance(value, DevicePart) and value.cut.shape != ())


def _at_home(value: Tree, homes: Homes, group: int = 0) -> AtHome:
    """An array whole, where a group needs it."""
    if isinstance(value, AtHome):
        if value.group == group:
            return value
        value = homes.give(value, Cut(value.value.shape, ()))
    part = value if isinstance(value, DevicePart) else DevicePart(value, Cut(value.shape, ()))
    return AtHome(homes.fetch(*part, group), group)


def _own(value: Tree, cut: Cut, homes: Homes) -> jax.Array:
    """This device's part of a value, as ``cut`` wants it."""
    if isinstance(value, DevicePart):
        return value.value if value.cut == cut else homes.give(_at_home(value, homes), cut)
    return homes.give(value, cut) if isinstance(value, AtHome) else cut.own(value)


def _is_elementwise(eqn: Eqn, parts: Sequence[DevicePart]) -> bool:
    shape = parts[0].cut.shape
    return (
        shape != ()
        and eqn.primitive.name in _ELEMENTWISE
        and all(part.cut == parts[0].cut for part in parts)
        and all(v.aval.shape in ((), shape) for v in eqn.invars)
        and all(v.aval.shape == shape for v in eqn.outvars)
    )


def _is_full_reduction(eqn: Eqn, part: DevicePart) -> bool:
    of_numbers = eqn.primitive.name in ("reduce_max", "reduce_min")
    return (
        eqn.primitive.name in _REDUCTIONS
        # The result of nothing must be of the dtype.
        and (not of_numbers or jnp.issubdtype(part.value.dtype, jnp.floating))
        and len(eqn.invars) == 1
        and eqn.outvars[0].aval.shape == ()
        and part.cut.shape != ()
    )


def _reduced(part: DevicePart, name: str) -> jax.Array:
    """Reduces the whole array to a scalar, by the name of the reduction's primitive."""
    local, across, nothing = _REDUCTIONS[name]
    counts, axes = part.cut.counts(), part.cut.axes
    total = local(part.value if counts is None else jnp.where(counts, part.value, nothing))
    return communicate(across, total, axes) if axes else total
