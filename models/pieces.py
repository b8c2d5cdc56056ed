"""Collectives of a layer beside its matmuls: the tokens of a sequence in pieces, one after another.

A matmul waits for what it multiplies to be gathered, and a sum over devices for its matmul. In
pieces, one travels while the next is computed, as far as tokens do not mix (Wang et al. 2023,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"):

    gather    0  1  2  3
    matmul       0  1  2  3
    scatter         0  1  2  3

Backward, the same in the opposite order. The gradient of a kernel stays one matmul of all tokens,
for which the backward gathers whole what it needs. Collectives of groups take part, no ring: layers
of a pipeline run for different times on different stages, and a permute needs all devices.

Dimension suffixes: B rows, S the whole sequence, T a device's part of it, E width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models.blocks import Linear
from models.tensor import Tensor

MOST = 4
"""Pieces of a sequence. The first gather and the last scatter of a layer are exposed."""
LEAST_BYTES = 8 << 20
"""Size that a piece is gathered to at least: below, launches of more kernels cost what is won."""


def num_pieces(x_BTE: jax.Array, tensor: Tensor) -> int:
    """The number of pieces that the layer of an activation runs in; 1 where nothing would overlap.

    On GPUs it is the larger of 4 and 2 that divides a device's tokens and leaves pieces of 8 MiB.
    """
    if tensor.axis is None or not tensor.in_pieces or jax.default_backend() != "gpu":
        return 1
    most = tensor.size * x_BTE.size * x_BTE.dtype.itemsize // LEAST_BYTES
    fits = (n for n in (MOST, MOST // 2) if n <= most and x_BTE.shape[1] % n == 0)
    return next(fits, 1)


def staggered(stages: Sequence[Callable[[int, Any], Any]], values: Sequence[Any]) -> list[Any]:
    """Runs stages on pieces, each piece one step behind the one before.

    A barrier ends each step, so that XLA joins no collectives, matmuls or kernels of several pieces
    and starts none of a later step first.

    Args:
      stages: functions of a piece's number and value that return its next value; collectives
        and matmuls alternate.
      values: of the pieces.
    """
    values = list(values)
    for step in range(len(values) + len(stages) - 1):
        values = list(lax.optimization_barrier(values)) if step else values
        for n, value in enumerate(values):
            if 0 <= step - n < len(stages):
                values[n] = stages[step - n](n, value)
    return values


def in_turn(function: Callable[[int, Any], Any], values: Sequence[Any]) -> list[Any]:
    """Calls a function of a piece's number and value for each, after its result for the last."""
    results: list[Any] = []
    for n, value in enumerate(values):
        if results:
            value, results[-1] = lax.optimization_barrier((value, results[-1]))
        results.append(function(n, value))
    return results


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A device's part of the sequence in equal pieces."""

    tensor: Tensor
    count: int

    def split(self, x_BTE: jax.Array) -> list[jax.Array]:
        """Cuts a device's part of the sequence."""
        return jnp.split(x_BTE, self.count, axis=1)

    def of_whole(self, x_BSE: jax.Array) -> list[jax.Array]:
        """Cuts the whole sequence: a piece has that of each device."""
        num_rows, _, width = x_BSE.shape
        x = x_BSE.reshape(num_rows, self.tensor.size, self.count, -1, width)
        return [x[:, :, n].reshape(num_rows, -1, width) for n in range(self.count)]

    def whole(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Undoes `of_whole`."""
        num_rows, _, width = pieces[0].shape
        by_device = [w.reshape(num_rows, self.tensor.size, -1, width) for w in pieces]
        return jnp.stack(by_device, axis=2).reshape(num_rows, -1, width)

    def gathered(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Gathers the whole sequence from pieces of the devices' parts."""
        return self.tensor.gather(jnp.concatenate(pieces, axis=1))

    def columns(self, linears: Sequence[Linear], x_BTE: jax.Array) -> PieceMap:
        """Linear maps whose input is gathered; `PieceMap.take` notes this device's part of it."""
        return self._map(linears, x_BTE, (self.gathered, self.whole), (1, self.tensor.size))

    def rows(self, linear: Linear, x_BTE: jax.Array) -> PieceMap:
        """A linear map whose output is scattered before `PieceMap.finish`."""
        return self._map([linear], x_BTE, (self.whole, self.gathered), (self.tensor.size, 1))

    def last_rows(self, linear: Linear, x_BTE: jax.Array) -> PieceMap:
        """A linear map whose output is scattered between `PieceMap.note` and `PieceMap.biased`.

        Its kernel's gradient takes the cotangents that the backward has gathered: one matmul waits
        for no gather, and others are gathered beside it.
        """
        return self._map([linear], x_BTE, (self.whole, self.whole), (self.tensor.size,) * 2)

    def _map(
        self, linears: Sequence[Linear], x_BTE: jax.Array, join: _Join, times: tuple[int, int]
    ) -> PieceMap:
        num_rows, length, _ = x_BTE.shape
        kernels = tuple(linear.kernel[...] for linear in linears)
        widths = kernels[0].shape[0], *(kernel.shape[1] for kernel in kernels)
        lengths = [count * length // self.count for count in (times[0], *times[1:] * len(kernels))]
        shapes = tuple((num_rows, *sizes) for sizes in zip(lengths, widths, strict=True))
        return PieceMap(linears, _places(join, self.count, shapes, x_BTE.dtype, kernels))


def gathered_last(x: jax.Array, *maps: PieceMap) -> tuple[Any, ...]:
    """Returns ``x`` and the maps, whose kernels' gradients come after the cotangent of ``x``.

    A whole input takes as long to gather as four pieces, and XLA would start before the last pieces
    are scattered: they would wait for the link.
    """
    x, all_places = _places_last(x, [one.places for one in maps])
    places = zip(maps, all_places, strict=True)
    return x, *(dataclasses.replace(one, places=its_own) for one, its_own in places)


@dataclasses.dataclass(frozen=True)
class PieceMap:
    """Linear maps of pieces that share their input.

    Args:
      linears: the maps.
      places: of the input and the outputs of each piece, as `_places` makes them.
    """

    linears: Sequence[Linear]
    places: Sequence[Sequence[jax.Array]]

    def take(self, n: int, x: jax.Array, own: jax.Array) -> jax.Array:
        """Returns ``x``, the input of piece ``n``, and notes ``own`` for the kernels' gradients."""
        return _note(self.places[n][0], x, own)

    def products(self, x: jax.Array) -> list[jax.Array]:
        """Multiplies a piece by the kernels, without their gradients and without biases."""
        kernels = (linear.kernel[...].astype(x.dtype) for linear in self.linears)
        return [x @ lax.stop_gradient(kernel) for kernel in kernels]

    def finish(self, n: int, *ys: jax.Array) -> list[jax.Array]:
        """Adds biases to the products of piece ``n``, and notes cotangents for the gradients."""
        return self.biased(*self.note(n, *ys))

    def note(self, n: int, *ys: jax.Array) -> list[jax.Array]:
        """Returns the products of piece ``n``, and notes their cotangents for the gradients."""
        return list(map(_note_cotangent, self.places[n][1:], ys))

    def biased(self, *ys: jax.Array) -> list[jax.Array]:
        """Adds biases to the products of a piece."""
        biases = [linear.bias for linear in self.linears]
        return [
            y if bias is None else y + bias[...].astype(y.dtype)
            for y, bias in zip(ys, biases, strict=True)
        ]


_Join = tuple[Callable[..., jax.Array], Callable[..., jax.Array]]
"""Make the whole input, and a whole cotangent, of pieces."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _places(
    join: _Join, count: int, shapes: tuple[tuple[int, ...], ...], dtype: jnp.dtype,
    kernels: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, ...], ...]:  # fmt: skip
    """Makes zeros for the input and the outputs of each piece of matmuls.

    Their cotangents are this input, as `_note` puts it there, and the outputs' cotangents. So
    gradients of kernels come after all pieces, though pieces end at different times.
    """
    del join, kernels
    return (tuple(jnp.zeros(shape, dtype) for shape in shapes),) * count


def _kernel_gradients(
    join: _Join, count: int, shapes: tuple[tuple[int, ...], ...], dtype: jnp.dtype, _: None,
    places: tuple[tuple[jax.Array, ...], ...],
) -> tuple[tuple[jax.Array, ...]]:  # fmt: skip
    del count, shapes, dtype
    inputs, *cotangents = zip(*places, strict=True)
    gradient = functools.partial(
        jnp.einsum, "...i,...o->io", join[0](inputs), preferred_element_type=jnp.float32
    )
    return (tuple(gradient(join[1](dys)) for dys in cotangents),)


_places.defvjp(lambda *args: (_places(*args), None), _kernel_gradients)


@jax.custom_vjp
def _places_last(x: jax.Array, places: Any) -> tuple[jax.Array, Any]:
    return x, places


_places_last.defvjp(
    lambda *args: (args, None), lambda _, cotangents: lax.optimization_barrier(cotangents)
)


@jax.custom_vjp
def _note(place: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
    """Returns ``y``; its backward puts x in its place."""
    del place, x
    return y


_note.defvjp(lambda place, y, x: (y, x), lambda x, dy: (x, dy, None))


@jax.custom_vjp
def _note_cotangent(place: jax.Array, y: jax.Array) -> jax.Array:
    """Returns ``y``; its backward puts dy in its place."""
    del place
    return y


_note_cotangent.defvjp(lambda place, y: (y, None), lambda _, dy: (dy, dy))
