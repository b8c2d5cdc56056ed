"""The level of ZeRO that runs."""


def zero_level(asked: int, parts: int) -> int:
    """The level that runs where another may be asked for: 0 if there is nothing to split over.

    Args:
      asked: a level, 0 to 3.
      parts: data shards among which arrays are split: without replicas, which hold the same.

    Example:
      >>> zero_level(3, 4), zero_level(3, 1)
      (3, 0)
    """
    return asked if parts > 1 else 0
