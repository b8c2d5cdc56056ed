"""Finds the ticks in which all stages embed together, or take the embedding's gradient.

Both are sums over all stages, in which every stage waits for the slowest. The head's sum is one
that cannot be moved: its cotangent is wanted in the next tick. Beside it, in the same wait, the
other two cost nothing. So a microbatch is embedded right after a head, ahead of its use, and its
cotangent waits for the next head, or with others for the end of the step.
"""

from __future__ import annotations

import numpy as np


def embed_ticks(first: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Finds the tick at whose beginning each microbatch is embedded.

    This is the latest tick that follows a head, if the microbatch before has been read by then, so
    that no more than one waits; otherwise the tick of its own first use.

    Args:
      first: ticks in which the first virtual stage runs F, int64 ``[microbatches]``.
      heads: ticks that end with a head.

    Example:
      >>> embed_ticks(np.array([0, 4, 6]), np.array([2, 3, 7])).tolist()
      [0, 4, 6]
      >>> embed_ticks(np.array([0, 5, 6]), np.array([2, 3, 7])).tolist()
      [0, 4, 6]
    """
    order, after = np.argsort(first), np.sort(heads) + 1
    first = first[order]
    read = np.concatenate([[0], first[:-1] + 1])
    beside = np.concatenate([[-1], after])[np.searchsorted(after, first, side="right")]
    ticks = np.empty_like(first)
    ticks[order] = np.where(beside >= read, beside, first)
    return ticks


def embed_gradient_ticks(
    done: np.ndarray, heads: np.ndarray, num_ticks: int, most: int
) -> np.ndarray:
    """Finds the tick at whose end each microbatch's cotangent goes through the embedding.

    This is the first tick with a head, or the last tick of all. Where more than ``most`` cotangents
    would wait for it, the waiting ones go together with the next one, as soon as that is there.

    Args:
      done: the ticks in which cotangents are there, int64 ``[microbatches]``.
      heads: ticks that end with a head.
      num_ticks: number of ticks of the table.
      most: cotangents that may wait at once.

    Example:
      >>> done, heads = np.array([3, 6, 7, 8]), np.array([2, 5])
      >>> embed_gradient_ticks(done, heads, 10, 1).tolist()
      [5, 7, 7, 9]
      >>> embed_gradient_ticks(done, heads, 10, 0).tolist()
      [3, 6, 7, 8]
    """
    order, meetings = np.argsort(done), np.append(np.sort(heads), num_ticks - 1)
    together = meetings[np.searchsorted(meetings, done)]
    ticks, waiting = np.empty_like(done), list[int]()
    for microbatch in order.tolist():
        if waiting and together[waiting[0]] < done[microbatch]:
            waiting = []  # a head has come
        waiting.append(microbatch)
        ticks[microbatch] = together[microbatch]
        if done[microbatch] < together[microbatch] and len(waiting) > most:
            ticks[waiting] = done[microbatch]
            waiting = []
    return ticks
