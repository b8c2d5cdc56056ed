"""Counts what JAX compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Yields a list to which the block adds the name of every function that is compiled in it."""
    found: list[str] = []

    def listen(event: str, seconds: float, **details) -> None:
        del seconds
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(details["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
