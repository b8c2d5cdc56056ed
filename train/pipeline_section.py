"""What the section ``pipeline`` of a configuration means: schedule, layout and techniques."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jaxpipe import schedules
from jaxpipe.asynchronous import ASYNCHRONOUS_METHODS, SteadyState
from jaxpipe.schedule import Costs, Schedule
from models.adapters import TRAINED
from train.config import Config

_SYNCHRONOUS = "1f1b"
"""The schedule that asynchronous training warms up and evaluates with."""

_RULES = ("equal", "flops", "measured")
"""Rules that ``pipeline.partition`` may name, beside lists of the layers of every chunk."""

PLAN = "plan"
"""Value of ``pipeline.schedule`` with which schedule, chunks, microbatches and remat are chosen."""

_WARMUPS = 5
"""T1's steps, in learning-rate warm-ups, as for PipeMare's Transformers (arXiv 1910.05124)."""

_DECAY = 0.135
"""T2's decay, e^-2: arXiv 1910.05124, section 3.2."""


_EXCHANGE = 0.02
"""Time of a tick beside its layers, as a share of a microbatch's time on half a stage, unless
``costs.message`` sets it: without it `auto` would cut a model into as many chunks as layers."""


def weights(config: Config) -> str:
    """Names the layout of the weights of a stage's layers, as `jaxpipe.Pipeline` takes it."""
    wanted = config.pipeline.weights
    one_array = is_asynchronous(config) or config.pipeline.update == "chunk"
    return "stacked" if wanted == "auto" and one_array else wanted


def recorded(config: Config) -> dict[str, Any]:
    """Lists the fields by path as runs record and compare them.

    The default policy of rematerialization has been "none", and earlier runs have recorded that.
    """
    fields = config.flat()
    if fields["pipeline.remat"] == "auto":
        fields["pipeline.remat"] = "none"
    return fields


def remat(config: Config) -> str:
    """Names what layers keep, as `jaxpipe.Pipeline` takes it."""
    wanted = config.pipeline.remat
    return "none" if wanted == "auto" and is_asynchronous(config) else wanted


def trainable(config: Config) -> list[str] | None:
    """Lists patterns of the parameters that are trained; None for all."""
    patterns = config.train.trainable
    if config.lora.rank:
        return [TRAINED, *(patterns or ())]
    return patterns


def weight_slots(config: Config) -> int | None:
    """Gives the chunks of weights and of gradient sums that a stage keeps at once, as
    `jaxpipe.Pipeline` takes them. With updates by chunk, the fewest are kept."""
    wanted = config.pipeline.weight_slots
    return 1 if wanted is None and config.pipeline.update == "chunk" else wanted


def without_choice(config: Config) -> Config:
    """Gives a configuration whose schedule is chosen later one that fits like all choices."""
    # The noise scale needs two microbatches.
    fewest = 2 if config.train.noise_every else 1
    default = {"schedule": _SYNCHRONOUS, "chunks": None, "microbatches": fewest}
    return config.changed(pipeline=default)


def is_asynchronous(config: Config) -> bool:
    """Says whether ``pipeline.schedule`` names a method that never drains the pipeline."""
    return config.pipeline.schedule in ASYNCHRONOUS_METHODS


def steady_state(config: Config) -> SteadyState:
    """Returns the rules of an asynchronous pipeline.

    Raises:
      ValueError: the method needs more microbatches, or a segment has more stages than there are.
    """
    pipeline = config.pipeline
    segment = config.asynchronous.recompute_segment
    return SteadyState(config.mesh.stage, pipeline.microbatches, pipeline.schedule, segment)


def techniques(config: Config) -> tuple[int | None, float | None]:
    """Returns T1's number of steps and T2's decay; None for a technique that is off."""
    settings, own = config.asynchronous, config.pipeline.schedule == "pipemare"
    steps, decay = settings.rescheduling_steps, settings.discrepancy_decay
    if steps is None:
        steps = _WARMUPS * config.optimizer.warmup_steps if own else 0
    if decay is None:
        decay = _DECAY if own else 0.0
    return steps or None, decay or None


@functools.cache
def order(config: Config) -> Schedule:
    """Builds the schedule by its name; for asynchronous training, the one that it warms up with.

    Args:
      config: only the number of layers, ``mesh.stage``, ``pipeline.*`` and ``costs.*`` are read.

    Raises:
      ValueError: as in `jaxpipe.schedules.build`.
    """
    pipeline, name = config.pipeline, config.pipeline.schedule
    limit, offload = _memory(config)
    if chooses_placement(config):
        return searched(config, [1.0] * config.num_layers)
    return schedules.build(
        _SYNCHRONOUS if is_asynchronous(config) else name,
        stages=config.mesh.stage,
        microbatches=pipeline.microbatches,
        chunks=pipeline.chunks,
        group=pipeline.group,
        slices=slices(config),
        memory_limit=limit,
        offload=offload,
        costs=costs(config),
    )


def any_order(config: Config) -> Schedule:
    """Builds the schedule, or where `searched` would take its time the first that fits, of as few
    microbatches as fill the pipeline: whatever keeps the one from running keeps the other."""
    if not chooses_placement(config):
        return order(config)
    few = min(config.pipeline.microbatches, config.mesh.stage)
    few_microbatches = config.changed(pipeline={"microbatches": few})
    return searched(few_microbatches, [1.0] * config.num_layers, seconds=0)


def chooses_placement(config: Config) -> bool:
    """Says whether ``auto`` also chooses how layers are cut into chunks, and where these lie."""
    pipeline = config.pipeline
    free = pipeline.chunks is None and pipeline.partition in _RULES
    return pipeline.schedule == "auto" and free


def searched(
    config: Config, layer_costs: Sequence[float], *, seconds: float | None = None
) -> Schedule:
    """Searches schedule, placement and number of chunks for a model (``pipeline.schedule: auto``).

    Args:
      config: as for `order`; ``costs.*`` are of half a stage.
      layer_costs: of every layer, in any unit.
      seconds: as in `jaxpipe.schedules.build`.

    Raises:
      ValueError: the memory limit is too small, or there are fewer layers than stages.
    """
    scale = 2 * config.mesh.stage / math.fsum(layer_costs)
    half = costs(config)
    message = half.message or _EXCHANGE * (half.f + half.b + half.w)
    half = dataclasses.replace(half, message=message)
    limit, offload = _memory(config)
    return schedules.build(
        "auto",
        stages=config.mesh.stage,
        microbatches=config.pipeline.microbatches,
        slices=slices(config),
        memory_limit=limit,
        offload=offload,
        layer_costs=[half.times(scale * cost) for cost in layer_costs],
        seconds=seconds,
    )


def _memory(config: Config) -> tuple[float | None, float | None]:
    """Returns the limit of memory, and the time of moves to a host where residuals may wait."""
    field = limit_of_memory(config)
    offload = config.costs.offload if field == "residuals" else None
    return getattr(config.pipeline, field), offload


def limit_of_memory(config: Config) -> str:
    """Names the field of ``pipeline`` that limits what a schedule keeps on a device: with a number
    of ``residuals``, which others leave for the host, ``auto`` orders for that number."""
    some = not isinstance(config.pipeline.residuals, str)
    return "residuals" if some and config.pipeline.schedule == "auto" else "memory_limit"


def slices(config: Config) -> int | None:
    """Returns the slices of a sequence; None for whole ones, which every schedule runs."""
    number = config.pipeline.sequence_slices
    return None if number == 1 else number


def own_counts(config: Config) -> tuple[int, ...] | None:
    """Returns the layers of every chunk if ``pipeline.partition`` lists them; None for a rule."""
    if config.pipeline.partition in _RULES:
        return None
    return tuple(int(count) for count in config.pipeline.partition.split(","))


def costs(config: Config) -> Costs:
    """Returns the costs that schedules and ticks are made for."""
    return Costs(**config.costs.model_dump(exclude={"offload"}))
