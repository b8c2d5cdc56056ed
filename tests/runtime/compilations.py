"""How tests compile, and what."""

import jax
import pytest

from jaxpipe.testing import compilations

AS_USED = {"xla_disable_hlo_passes": "hlo-verifier"}
if jax.__version_info__[:2] == (0, 10):
    AS_USED |= {"xla_cpu_use_fusion_emitters": True}
"""Options that compile a program with the passes of XLA's default: what `conftest.py` leaves out
for time changes which instructions are fused."""


def refusal(function, *arguments, **options) -> str:
    """The text of the ValueError that a call raises; nothing is compiled on the way to it."""
    # PT011 wants a pattern; callers look at the whole text, line by line.
    with compilations() as found, pytest.raises(ValueError) as error:  # noqa: PT011
        function(*arguments, **options)
    assert not found
    return str(error.value)
