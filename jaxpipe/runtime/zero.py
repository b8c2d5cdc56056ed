"""The levels of ZeRO: what data shards divide among each other.

Used by

- state, 1: `data_axis.reduce_gradients`, which scatters; `PlacedOptimizer`, which updates a part;
- gradients, 2: `gradients.Summed`, which keeps sums in slots;
- weights, 3: `executor.begin`, for `Gathered` weights; `Assembly`, which places a part;
- all of them: `jaxpipe.asynchronous.updates`, and `planning.memory` and `planning.cost`, which
  predict the same.
"""

import enum


class Zero(enum.IntEnum):
    """A level of ZeRO. Each also divides what those before it do.

    Example:
      >>> Zero(2).shards_gradients, Zero(2).shards_weights
      (True, False)

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", arXiv 1910.02054, section 5.
    """

    NOTHING = 0
    STATE = 1
    GRADIENTS = 2
    WEIGHTS = 3

    @property
    def shards_state(self) -> bool:
        """Whether a data shard keeps the optimizer's state of a part of the parameters alone."""
        return self >= Zero.STATE

    @property
    def shards_gradients(self) -> bool:
        """Whether a data shard keeps the gradients of a part alone."""
        return self >= Zero.GRADIENTS

    @property
    def shards_weights(self) -> bool:
        """Whether a data shard keeps a part of the weights alone, and gathers the others."""
        return self >= Zero.WEIGHTS

    def over(self, parts: int) -> "Zero":
        """The level that runs where this one is asked for: none if there is nothing to divide.

        Args:
          parts: devices among which arrays are divided: data shards without replicas, and those
            along model axes that split no parameter.

        Example:
          >>> int(Zero(3).over(4)), int(Zero(3).over(1))
          (3, 0)
        """
        return self if parts > 1 else Zero.NOTHING
