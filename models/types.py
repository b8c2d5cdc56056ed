"""Names for the trees that models take and return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any
"""Parameters, states, activations, or what is shaped like them."""
Batch: TypeAlias = Mapping[str, jax.Array]
"""A microbatch: arrays [rows, ...] by name."""
KeyPath: TypeAlias = tuple[Any, ...]
"""The path of a leaf; jax has a class for every kind of key."""
Key: TypeAlias = jax.Array | None
"""A random key; None without dropout."""
