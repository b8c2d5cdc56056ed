"""How tests compile, and what."""

import pytest

from jaxpipe.testing import compilations

AS_USED = {"xla_disable_hlo_passes": "hlo-verifier"}
"""Options that compile a program with XLA's passes over loops: those that `conftest.py` leaves out
for time change what is fused and copied."""


def refusal(function, *arguments, **options) -> str:
    """The text of the ValueError that a call raises; nothing is compiled on the way to it."""
    # PT011 wants a pattern; callers look at the whole text, line by line.
    with compilations() as found, pytest.raises(ValueError) as error:  # noqa: PT011
        function(*arguments, **options)
    assert not found
    return str(error.value)
