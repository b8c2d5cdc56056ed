"""Whole arrays of several layers, each layer's on a device of its own.

The devices that share a stage are *homes*. Of a few layers at a time, home k fetches the arrays of
the k-th from all of them, works with these, and gives each device its part of the results. What
needs whole arrays so runs once per layer, and no device holds those of several.

Everything here runs in a `jax.vmap` over these layers whose axis is called `LAYERS`: what a device
has of every layer is batched, and what it has of its own layer alone is not.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.layout.leaf import Cut

LAYERS = "layers at home"


class AtHome(NamedTuple):
    """An array of the layer whose home this device is."""

    value: jax.Array


class Homes:
    """Every device is a home of the one layer at work, outside such a `jax.vmap`."""

    def fetch(self, part: jax.Array, cut: Cut) -> jax.Array:
        return cut.whole(part)

    def give(self, whole: jax.Array, cut: Cut) -> jax.Array:
        return cut.own(whole)


EVERYWHERE = Homes()


@dataclasses.dataclass(frozen=True)
class SeparateHomes(Homes):
    """Home k is the k-th device along these mesh axes, of these sizes."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def fetch(self, part: jax.Array, cut: Cut) -> jax.Array:
        """Makes the whole array of the own layer, from all devices' parts of each layer's."""
        rows = lax.all_gather(part, LAYERS)
        rows = jnp.pad(rows, [(0, self.count - len(rows)), *[(0, 0)] * part.ndim])
        rows = rows.reshape(*self.sizes, *part.shape)
        sharing, alike = self._axes(cut)
        for name in reversed(alike):  # each of these devices has the part itself
            number = lax.axis_index(name)
            rows = lax.dynamic_index_in_dim(rows, number, self.axes.index(name), keepdims=False)
        rows = _exchanged(rows, sharing)
        return _along(sharing, cut.whole, in_axes=0, out_axes=None)(rows)

    def give(self, whole: jax.Array, cut: Cut) -> jax.Array:
        """Undoes `fetch`: this device's part of each layer's array, from the homes."""
        sharing, alike = self._axes(cut)
        rows = _exchanged(_along(sharing, cut.own, in_axes=None, out_axes=0)(whole), sharing)
        for name in alike:
            rows = lax.all_gather(rows, name, axis=self.axes.index(name))
        rows = rows.reshape(self.count, *rows.shape[len(self.axes) :])
        return lax.dynamic_index_in_dim(rows, lax.axis_index(LAYERS), keepdims=False)

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
