"""Agreement among several processes: one decides, and all go on with its answer."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

_PATIENCE_SECONDS = 3600
"""Time that the other processes wait for work that process 0 does alone."""

T = TypeVar("T")


def from_first(make: Callable[[], T]) -> T:
    """Lets process 0 decide for all processes; every process must call it.

    Args:
      make: called by process 0 alone; returns a value that JSON can hold.

    Returns:
      That value on every process, after a round trip through JSON.

    Raises:
      RuntimeError: process 0 raised something; there the error itself is raised.
    """
    answer: dict[str, Any] = {}
    failed: Exception | None = None
    if jax.process_index() == 0:
        try:
            answer = {"value": make()}
        except Exception as error:  # the other processes wait for an answer, whatever went wrong
            answer, failed = {"error": f"{type(error).__name__}: {error}"}, error
    text = json.dumps(answer).encode()
    answer = json.loads(_broadcast(text) if jax.process_count() > 1 else text)
    if failed is not None:
        raise failed
    if "error" in answer:
        raise RuntimeError(f"process 0 failed: {answer['error']}")
    return answer["value"]


def _broadcast(text: bytes) -> bytes:
    """Returns the text of process 0 on every process."""
    # A collective operation would time out while process 0 reads a large checkpoint.
    wait = ocp.multihost.get_barrier_sync_fn()
    wait(key="jaxpipe:from_first", timeout_ms=_PATIENCE_SECONDS * 1000)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(size, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)[:size]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded)))
