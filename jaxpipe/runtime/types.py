"""Names for the trees that the runtime's functions take and return.

To a type checker most trees are `Any`; to a reader the name says which one is meant.
"""

from typing import Any, TypeAlias

import jax
import numpy as np

Tree: TypeAlias = Any
"""Any tree of arrays, or of their shapes."""
Params: TypeAlias = dict[str, Tree]
"""Canonical parameters ``{"embed", "layers", "head"}``, with the layers in model order."""
OuterParams: TypeAlias = dict[str, Any]
"""The parameters of embedding and head, ``{"embed", "head"}``."""
LayerParams: TypeAlias = Any
"""The parameters of one layer, as the user has them."""
Stored: TypeAlias = Any
"""Arrays of one layer or piece, as a layout stores them."""
Arrays: TypeAlias = Any
"""A stage's arrays of all its layers, or of slots that hold a chunk each."""
Leaves: TypeAlias = Any
"""A tree of `jaxpipe.runtime.layout.leaf.Leaf`."""
Shapes: TypeAlias = Any
"""A tree of `jax.ShapeDtypeStruct`."""
Shardings: TypeAlias = Any
"""A tree of `jax.sharding.NamedSharding`."""
Batch: TypeAlias = Any
"""A batch, leaves ``[rows, ...]``; the rows of one microbatch are such a tree, too."""
Activation: TypeAlias = Any
"""Inputs and outputs of a layer: arrays of floating point."""
Gradients: TypeAlias = Any
"""Gradients, shaped like what they belong to."""
States: TypeAlias = Any
"""The states of stateful layers: one tree per layer, or placed."""
OptimizerState: TypeAlias = Any
"""The state of an optax transformation."""

Key: TypeAlias = jax.Array | None
"""A random key; None for a model without randomness."""
Message: TypeAlias = list[jax.Array]
"""A message between stages: flat arrays, one per buffer."""
Index: TypeAlias = jax.Array | np.integer[Any] | int
"""An int32 scalar: known to the program, or computed while it runs."""
Slot: TypeAlias = Index | None
"""The number of a slot; None for the stage's own arrays."""
Flag: TypeAlias = jax.Array | np.bool | bool
"""A condition: known to the program, or computed while it runs."""
At: TypeAlias = tuple[Index, Index, Index]
"""A layer or a piece: its stage, its chunk there, its number within the chunk."""
Span: TypeAlias = tuple[Index, Index, Index]
"""Layers of a chunk: the chunk, the first one, one past the last."""
Dim: TypeAlias = str | tuple[str, ...] | None
"""The mesh axes over which a dimension is split, as of a `jax.sharding.PartitionSpec`."""
Path: TypeAlias = tuple[Any, ...]
"""The path of a leaf in a tree, one key per level; jax has a class for every kind of key."""
Unit: TypeAlias = str | int
"""``"embed"``, ``"head"``, ``"shared"``, or the canonical number of a layer."""
