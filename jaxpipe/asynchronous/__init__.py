"""Asynchronous pipelines, which never drain: their rules, rows, runs, weights and updates.

The core knows nothing of them: `jaxpipe.schedule.actions.GUESTS` has their names. Their schedules
are plain data; what trains them imports jax, and is `jaxpipe.AsyncPipeline`.
"""

from jaxpipe.asynchronous.draw import steady_text
from jaxpipe.asynchronous.schedule import shown_minibatches, steady_schedule
from jaxpipe.asynchronous.steady import ASYNCHRONOUS_METHODS, SteadyState

__all__ = [
    "ASYNCHRONOUS_METHODS",
    "SteadyState",
    "shown_minibatches",
    "steady_schedule",
    "steady_text",
]
