"""The measured timeline of a step: what its stages run, and when, like those of the simulator."""

import collections
from collections.abc import Mapping, Sequence

import jax

from jaxpipe.runtime import checks
from jaxpipe.runtime.layout.placed import Placed
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.tick.stamps import Stamp, Stamps
from jaxpipe.runtime.types import Batch, Key, States
from jaxpipe.schedule.actions import Action, Kind, split_backwards
from jaxpipe.schedule.lowering.table import TickTable
from jaxpipe.schedule.problems import Problem, refuse
from jaxpipe.schedule.simulate import MEASURED, Costs, TimedAction, Timeline

_LEAST_SECONDS = 1e-9
"""Smallest cost: two readings of a clock may be equal."""


def timeline(
    pipe: Pipeline, placed: Placed, batch: Batch, rng: Key = None, *, states: States = None
) -> Timeline:
    """Runs forward and backward of a batch twice, and measures the second run of every stage.

    The program is the pipeline's own, with calls to the host before and after every cell's layers.
    The time between two cells of a stage is that of messages, embedding and loss, transfers over
    data, and these calls. A call costs about 0.15 ms on CPUs. It keeps a GPU from launching a
    cell's kernels before the previous cell has ended, so a measured step takes longer than others.

    Args:
      pipe: any pipeline whose devices are all in this process; if several devices share a stage,
        the first is measured.
      placed: placed parameters. All other arguments are as for `Pipeline.value_and_grad`.

    Returns:
      The timeline of all stages, in seconds from the start of the first layer. Its costs are the
      mean times of F, B and W of every virtual stage; a fused backward counts half as B and half as
      W.

    Raises:
      ValueError: arguments that do not fit the pipeline, or devices of other processes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxpipe.runtime.layers.model import Model
      >>> from jaxpipe.runtime.mesh import make_mesh
      >>> model = Model(
      ...     embed=lambda outer, batch, rng: batch,
      ...     layer=lambda w, x, batch, rng: jnp.tanh(x @ w),
      ...     head_loss=lambda outer, x, batch, rng: jnp.mean(x**2),
      ... )
      >>> params = {"embed": {}, "layers": jnp.ones((1, 3, 3)), "head": {}}
      >>> pipe = Pipeline(model, params, schedule="1f1b", microbatches=2, mesh=make_mesh(stage=1))
      >>> measured = timeline(pipe, pipe.place(params), jnp.ones((4, 3)))
      >>> [str(part.action) for part in measured.rows[0]]
      ['0F0', '0B0', '0W0', '0F1', '0B1', '0W1']
    """
    own = jax.process_index()
    if any(device.process_index != own for device in pipe.mesh.devices.flat):
        rule = "has devices of other processes, whose clocks differ: measure on one process"
        refuse([Problem("mesh", None, rule)])
    pipe.check("placed", placed, batch, states, checks.key(rng))
    stamps = Stamps()
    run = pipe.make_program("train", stamps=stamps)
    for _ in range(2):  # compiled and warm the second time
        stamps.taken.clear()
        jax.block_until_ready(run(placed, batch, rng, states))
        jax.effects_barrier()
    return from_stamps(stamps.taken, pipe.table)


def from_stamps(taken: Sequence[Stamp], table: TickTable) -> Timeline:
    """Makes the timeline of a table that ran from the first of these stamps on."""
    schedule = table.schedule
    if schedule.mixes_backwards:
        schedule = split_backwards(schedule)  # as lowering does
    placement = schedule.placement
    places = zip(placement.stages, placement.chunks, strict=True)
    virtual_stages = {place: s for s, place in enumerate(places)}
    begin = min(stamp.seconds for stamp in taken)
    spent: dict[tuple[int, Kind], float] = collections.defaultdict(float)
    parts: list[list[TimedAction]] = []
    for stage in range(schedule.num_stages):
        parts.append([])
        own = [stamp for stamp in taken if stamp.stage == stage]
        for first, last in zip(own[::2], own[1::2], strict=True):
            s, seconds = virtual_stages[stage, first.chunk], last.seconds - first.seconds
            spent[s, first.kind] += seconds
            action = Action(s, first.kind, first.microbatch)
            start = first.seconds - begin
            parts[-1].append(TimedAction(action, start, start + seconds))
    costs = tuple(
        _costs(spent, s, schedule.num_passes) for s in range(placement.num_virtual_stages)
    )
    makespan = max(row[-1].end for row in parts)
    return Timeline(schedule, costs, MEASURED, tuple(map(tuple, parts)), makespan)


def _costs(spent: Mapping[tuple[int, Kind], float], s: int, microbatches: int) -> Costs:
    """Computes the mean times of a virtual stage."""
    f, b, w, both = (
        spent.get((s, kind), 0.0) / microbatches for kind in (Kind.F, Kind.B, Kind.W, Kind.BW)
    )
    f, b, w = (max(seconds, _LEAST_SECONDS) for seconds in (f, b + both / 2, w + both / 2))
    return Costs(f, b, w)
