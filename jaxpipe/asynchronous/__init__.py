"""Asynchronous pipelines, which never drain: their rules, rows, runs, weights and updates.

The core knows nothing of them: `jaxpipe.schedule.actions.GUESTS` has their names. Their rules are
plain arithmetic; what trains them imports jax, and is `jaxpipe.AsyncPipeline`.
"""

from jaxpipe.asynchronous.steady import ASYNCHRONOUS_METHODS, SteadyState, steady_text

__all__ = [
    "ASYNCHRONOUS_METHODS",
    "SteadyState",
    "steady_text",
]
