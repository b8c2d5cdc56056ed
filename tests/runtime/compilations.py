"""How tests compile, and what."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import pytest

AS_USED = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__[:2] == (0, 10) else {}
"""Options that compile a program as XLA does by default: what `conftest.py` leaves out for time
changes which instructions are fused."""


def refusal(function, *arguments, **options) -> str:
    """The text of the ValueError that a call raises; nothing is compiled on the way to it."""
    # PT011 wants a pattern; callers look at the whole text, line by line.
    with counted() as found, pytest.raises(ValueError) as error:  # noqa: PT011
        function(*arguments, **options)
    assert not found
    return str(error.value)


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
