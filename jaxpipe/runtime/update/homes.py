"""Whole arrays of several layers, each layer's on a device of its own.

The devices that share a stage are *homes*. Of a few layers at a time, home k fetches an array of
the k-th from all of them, works with it, and gives each device its part of the result. So what
needs whole arrays runs once per layer, and no device holds those of several layers. If there are at
least twice as many devices as layers, *groups* of homes share a layer's arrays among themselves.

Everything here runs in a `jax.vmap` over these layers whose axis is called `LAYERS`: what a device
has of every layer is batched, and what it has of its own layer alone is not.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.layers import jaxprs
from jaxpipe.runtime.layers.jaxprs import Eqn
from jaxpipe.runtime.layout.leaf import Cut
from jaxpipe.runtime.types import Arrays

LAYERS = "layers at home"


class AtHome(NamedTuple):
    """An array of the layer whose home this device is, if it is in the group."""

    value: jax.Array
    group: int


class Homes:
    """Every device is a home of the one layer at work, outside such a `jax.vmap`."""

    @property
    def groups(self) -> int:
        return 1

    def fetch(self, part: jax.Array, cut: Cut, group: int) -> jax.Array:
        return cut.whole(part)

    def give(self, whole: AtHome, cut: Cut) -> jax.Array:
        return cut.own(whole.value)

    def bind(self, eqn: Eqn, operands: Arrays, group: int) -> Arrays:
        """Runs an equation whose results only a group needs."""
        return jaxprs.bind(eqn, operands)


EVERYWHERE = Homes()


@dataclasses.dataclass(frozen=True)
class SeparateHomes(Homes):
    """Home k is the k-th device along these mesh axes.

    Args:
      sizes: devices along each.
      layers: layers at a time.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    layers: int

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def groups(self) -> int:
        return self.count // self.layers

    def bind(self, eqn: Eqn, operands: Arrays, group: int) -> Arrays:
        if self.groups == 1:
            return super().bind(eqn, operands, group)
        nothing = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        in_group = lax.axis_index(self.axes) // self.layers == group
        return lax.cond(in_group, partial(jaxprs.bind, eqn), lambda _: nothing, operands)

    def fetch(self, part: jax.Array, cut: Cut, group: int) -> jax.Array:
        """Makes the whole array of the own layer, from all devices' parts of each layer's."""
        rows, before = lax.all_gather(part, LAYERS), group * self.layers
        room = before, self.count - before - self.layers
        rows = jnp.pad(rows, [room, *[(0, 0)] * part.ndim])
        rows = rows.reshape(*self.sizes, *part.shape)
        sharing, alike = self._axes(cut)
        for name in reversed(alike):  # each of these devices has the part itself
            number = lax.axis_index(name)
            rows = lax.dynamic_index_in_dim(rows, number, self.axes.index(name), keepdims=False)
        rows = _exchanged(rows, sharing)
        return _along(sharing, cut.whole, in_axes=0, out_axes=None)(rows)

    def give(self, whole: AtHome, cut: Cut) -> jax.Array:
        """Undoes `fetch`: this device's part of each layer's array, from the homes."""
        sharing, alike = self._axes(cut)
        rows = _exchanged(_along(sharing, cut.own, in_axes=None, out_axes=0)(whole.value), sharing)
        for name in alike:
            rows = lax.all_gather(rows, name, axis=self.axes.index(name))
        rows = rows.reshape(self.count, *rows.shape[len(self.axes) :])
        home = whole.group * self.layers + lax.axis_index(LAYERS)
        return lax.dynamic_index_in_dim(rows, home, keepdims=False)

    def _axes(self, cut: Cut) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes whose devices hold parts of an array, and those whose devices hold the same."""
        sharing = tuple(name for name in self.axes if name in cut.axes)
        return sharing, tuple(name for name in self.axes if name not in cut.axes)


def _exchanged(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sends every device along these axes, a leading dimension each, its row; returns, in the same
    form, what it is sent."""
    if not axes:
        return rows
    flat = rows.reshape(-1, *rows.shape[len(axes) :])
    return lax.all_to_all(flat, axes, 0, 0).reshape(rows.shape)


def _along(
    axes: tuple[str, ...],
    function: Callable[[jax.Array], jax.Array],
    *,
    in_axes: int | None,
    out_axes: int | None,
) -> Callable[[jax.Array], jax.Array]:
    """A device's function as one of the arrays of all devices along mesh axes."""
    for name in reversed(axes):
        size = lax.axis_size(name)
        function = jax.vmap(function, in_axes, out_axes, axis_name=name, axis_size=size)
    return function
