"""Indices of arrays and of loops: int32, whatever integers JAX has by default.

In flat arrays that are longer than int32 reaches, an index counts rows of `UNIT` elements.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.types import Index

Carry = TypeVar("Carry")

LONGEST = 2**31 - 1
UNIT = 1024


def start_at(*indices: Index) -> tuple[jax.Array | np.int32, ...]:
    """The start of a dynamic slice, whose indices JAX wants in one dtype.

    Example:
      >>> [index.dtype.name for index in start_at(jnp.int32(2), 0)]
      ['int32', 'int32']
    """
    return tuple(np.int32(n) if isinstance(n, int) else jnp.asarray(n, jnp.int32) for n in indices)


def unit_of(length: int) -> int:
    """The elements that an index counts in a flat array of this length.

    Example:
      >>> unit_of(10**9), unit_of(10**10)
      (1, 1024)
    """
    return 1 if length <= LONGEST else UNIT


def repeat(count: int, body: Callable[[Index, Carry], Carry], carry: Carry) -> Carry:
    """Runs ``body(number, carry)`` so many times: `jax.lax.fori_loop` of a known length.

    Example:
      >>> int(repeat(4, lambda number, total: total + number, jnp.int32(0)))
      6
    """

    def numbered(number: Index, carry: Carry) -> Carry:
        return body(jnp.asarray(number, jnp.int32), carry)

    return lax.fori_loop(0, count, numbered, carry)
