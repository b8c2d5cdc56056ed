"""Seconds of a training step, by part, with what computation hides as the executor overlaps it.

=========================  ========================================================================
what                       what hides it
=========================  ========================================================================
messages between stages    late ones: the tick's layers; others nothing (`device_clock.replay`)
gathers, ZeRO-3            with two weight slots the layers of the ticks in which pieces move, but
                           for the first chunk; with one slot, or where windows are short, nothing
reductions of gradients    likewise, but for the last chunk
between replicas           travels with the reductions
over model axes            nothing: a layer waits for its own collectives
residuals on the host      nothing, there or back; nor their slots before the first tick
after the step             nothing: the optimizer; ZeRO-1 and 2 then gather the new parameters
=========================  ========================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from jaxpipe.planning.devices import LAUNCH_SECONDS, Cluster
from jaxpipe.planning.memory import KEPT, residual_bytes
from jaxpipe.planning.plans import MASTER_BYTES, Links, Placed
from jaxpipe.planning.programs import Program, grown, lowering_of, relative, table_of
from jaxpipe.planning.sizes import PASSES, ModelSizes, Pass, Variant
from jaxpipe.schedule.device_clock import replay, work_of
from jaxpipe.schedule.lowering.table import NONE
from jaxpipe.schedule.simulate import Costs

PARTS = ("layers", "head", "waits", "transfers", "update")
"""Of a step: layers that run; embedding and head; stages that wait for each other; gathers and
reductions that nothing hides; the optimizer and what follows it."""

_X_SUMS = 3
"""Sums over stages of an activation per microbatch: it enters, leaves, and its gradient leaves."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Seconds in which a layer's weights are gathered over data, and its gradient is reduced."""

    gather: float
    reduce: float


_NOTHING = Transfer(0.0, 0.0)


def pass_seconds(
    one: Pass, rows: int, cluster: Cluster, links: Links, *, factor: float = 1.0
) -> float:
    """One pass of a layer for one microbatch: kernels at the roofline, copies, and collectives.

    Args:
      one: to time.
      rows: of the microbatch.
      cluster: what devices attain.
      links: between devices that share the layer.
      factor: of what is no collective, as `jaxpipe.planning.devices.Passes` has it.
    """
    seconds = LAUNCH_SECONDS * len(one.kernels) + one.values.at(rows) / cluster.bandwidth
    for kernel in one.kernels:
        at_peak = kernel.flops.at(rows) / cluster.flops
        seconds += max(at_peak, kernel.bytes.at(rows) / cluster.bandwidth)
    seconds *= factor
    for collective in one.collectives:
        sent = max(collective.sent.at(rows), 0.0)
        seconds += cluster.device.latency + sent / links.along(collective.axis)
    return seconds


def layer_costs(placed: Placed) -> Costs:
    """Seconds of F, B and W of a layer, the mean if they differ, and of a message."""
    plan, sizes = placed.plan, placed.sizes
    case = placed.variant, plan.rows, placed.cluster, placed.sharing_links
    f, b, w = _mean_passes(placed.model, *case)
    copies, sums = _of_weights(placed)
    f, b, w = f + copies, b + copies, w + sums
    if plan.on_host.residuals:
        until_b, until_w = (placed.mean(name) / placed.cluster.bus for name in KEPT)
        f, b = f + until_b + until_w, b + until_b + until_w
        w += 0.0 if plan.schedule.endswith("-fused") else until_w
    sent = 0.0
    if plan.stage > 1:
        sent = placed.cluster.device.latency + sizes.message.at(plan.rows) / placed.stage_link
    return Costs(f, b, w, sent)


@lru_cache(maxsize=1024)
def _mean_passes(
    model: ModelSizes, variant: Variant, rows: int, cluster: Cluster, links: Links
) -> tuple[float, ...]:
    """Seconds of F, B and W of a layer without what the layout of weights adds."""
    sizes = model.variants[variant]
    factors = cluster.device.passes
    by_kind = [
        [
            pass_seconds(getattr(layer, name), rows, cluster, links, factor=getattr(factors, name))
            for name in PASSES
        ]
        for layer in sizes.layers
    ]
    of_layers = [by_kind[kind] for kind in sizes.kind_of]
    return tuple(sum(each) / len(of_layers) for each in zip(*of_layers, strict=True))


def _of_weights(placed: Placed) -> tuple[float, float]:
    """Seconds to cut a layer's weights out of their stack, for F and for B, and to add a gradient.

    Unrolled weights are read where they lie, and their gradients added within the matmul
    (docs/design/001-executor.md)."""
    plan, bandwidth = placed.plan, placed.cluster.bandwidth
    size, read = placed.layer_parameters, placed.model.compute_bytes
    if plan.weights == "unrolled":
        return 0.0, MASTER_BYTES * size / bandwidth
    return 2 * read * size / bandwidth, 5 * MASTER_BYTES * size / bandwidth


def transfer(placed: Placed) -> Transfer:
    """Seconds in which a layer's weights are gathered over data, and its gradient is reduced."""
    plan, size, part = placed.plan, placed.layer_parameters, placed.layer_part
    latency = placed.cluster.device.latency if plan.parts > 1 else 0.0
    gather = 0.0
    if plan.zero == 3:
        gather = latency + (size - part) * placed.model.compute_bytes / placed.data_link
    times = 1 if plan.zero else 2  # a sum scatters and gathers
    reduce = times * (latency + MASTER_BYTES * (size - part) / placed.data_link)
    return Transfer(gather, reduce + _among_copies(placed, size, part))


def _among_copies(placed: Placed, size: float, part: float) -> float:
    """Seconds in which what data shards have of a gradient is summed over replicas and context."""
    plan = placed.plan
    own = MASTER_BYTES * (part if plan.zero else size)
    seconds = 2 * (plan.replica - 1) / plan.replica * own / placed.replica_link
    return seconds + 2 * (plan.context - 1) / plan.context * own / placed.sharing_links[0]


def chunk_costs(placed: Placed) -> Costs:
    """Costs of a chunk as a configuration has them: relative to its F, in few digits."""
    layer, share = layer_costs(placed), placed.model.num_layers / placed.plan.num_chunks
    return relative(Costs(share * layer.f, share * layer.b, share * layer.w, layer.message))


def program_of(placed: Placed, *, published: bool = False) -> Program:
    """The program of a plan.

    Args:
      published: that of the published order, which is made faster.
    """
    plan = placed.plan
    shares = placed.shares if plan.weight_slots > 1 else 0
    return Program(
        plan.schedule,
        plan.stage,
        plan.chunks,
        plan.microbatches,
        placed.model.num_layers,
        None if published else chunk_costs(placed),
        weight_slots=min(plan.weight_slots, plan.chunks),
        own_slots=plan.weights == "unrolled",
        shares=shares,
        sums_in_slots=plan.zero >= 2,
        together=not plan.ends,
        head_layers=placed.head_layers,
    )


def step_seconds(placed: Placed, program: Program) -> dict[str, float]:
    """Seconds of a step by part (`PARTS`)."""
    plan, layer = placed.plan, layer_costs(placed)
    of_microbatch = placed.model.num_layers / plan.stage * (layer.f + layer.b + layer.w)
    layers, head = plan.microbatches * of_microbatch, plan.microbatches * _head(placed)
    if plan.ends:
        at_end = plan.stage * _head(placed)
        waited = grown(program, lambda one: replayed(one, layer, head=at_end)) - layers - head
    else:
        waited = grown(program, lambda one: replayed(one, layer)) - layers
    return {
        "layers": layers,
        "head": head,
        "waits": max(0.0, waited),
        "transfers": _exposed(program, layer, transfer(placed))
        + _outer_transfer(placed)
        + _slots_to_host(placed, program),
        "update": _update(placed),
    }


def least_seconds(placed: Placed) -> float:
    """What a step takes at least, whatever the schedule: it is found without one."""
    plan, layer = placed.plan, layer_costs(placed)
    work = plan.microbatches * placed.model.num_layers / plan.stage * (layer.f + layer.b + layer.w)
    # The last stage waits for the first microbatch; where B and W are one, the first stage also
    # waits for the last gradient to come back.
    back = layer.b + layer.w if plan.schedule.endswith("-fused") else 0.0
    chunk = placed.model.num_layers / plan.num_chunks
    fill = (plan.stage - 1) * (chunk * (layer.f + back) + layer.message)
    head = _whole_head(
        placed.model, placed.variant, plan.rows, placed.cluster, placed.sharing_links
    )
    rest = _outer_transfer(placed) + _update(placed)
    return work + fill + plan.microbatches * head / plan.stage + rest


def _chunk_costs(layer: Costs, program: Program) -> list[Costs]:
    counts = lowering_of(program).layer_counts
    return [Costs(n * layer.f, n * layer.b, n * layer.w, layer.message) for n in counts]


def _exposed(program: Program, layer: Costs, moved: Transfer) -> float:
    """Seconds of the transfers over data that nothing hides.

    Where they lie under layers they take as long in a longer step, which only has more layers to
    hide them; where chunks move as a whole, they move for every group of microbatches again.
    """
    if moved == _NOTHING:
        return 0.0

    def extra(one: Program) -> float:
        return replayed(one, layer, moved) - replayed(one, layer)

    steady = program.shorter()[0][0]
    table = table_of(steady)
    if table.gathers.shared.any() or table.reduces.shared.any():
        return max(0.0, extra(steady))
    return max(0.0, grown(program, extra))


def replayed(
    program: Program, layer: Costs, moved: Transfer = _NOTHING, *, head: float = 0.0
) -> float:
    """The table on the device clock, with transfers in its ticks and at its edges.

    ``head`` is how long the last stage's head takes a microbatch.
    """
    table, costs = table_of(program), _chunk_costs(layer, program)
    work = np.sum(list(work_of(table, costs).values()), axis=0)
    work[table.head != NONE, table.schedule.placement.stages[-1]] += head
    seconds, under = 0.0, np.zeros(table.num_ticks)
    for moves, each in ((table.gathers, moved.gather), (table.reduces, moved.reduce)):
        if not each:
            continue
        chunk = each * table.layers_per_chunk
        seconds += len(moves.edge.chunk) * chunk
        under += each * moves.group / moves.shares * moves.shared
        if moves.whole:
            work = work + chunk * (moves.chunk >= 0)
    # All stages take part, and a tick ends with the later of its layers and its transfers.
    work = np.maximum(work, under[:, None])
    message = layer.message if program.stages > 1 else 0.0
    return seconds + float(replay(table, work, message=message)[-1].max())


def _head(placed: Placed) -> float:
    """Embedding and head of one microbatch: a stage's part of their time, and sums over stages if
    all compute them together."""
    plan, sizes = placed.plan, placed.sizes
    case = placed.variant, plan.rows, placed.cluster, placed.sharing_links
    whole = _whole_head(placed.model, *case)
    if plan.stage == 1 or plan.ends:
        return whole / plan.stage
    launches = LAUNCH_SECONDS * len(sizes.head.kernels)
    share = placed.outer_parameters / sizes.outer_parameters if sizes.outer_parameters else 1.0
    over_stages = 2 * (plan.stage - 1) / plan.stage * sizes.message.at(plan.rows)
    return (whole - launches) * share + launches + _X_SUMS * over_stages / placed.stage_link


@lru_cache(maxsize=1024)
def _whole_head(
    model: ModelSizes, variant: Variant, rows: int, cluster: Cluster, links: Links
) -> float:
    return pass_seconds(model.variants[variant].head, rows, cluster, links)


def _slots_to_host(placed: Placed, program: Program) -> float:
    """Seconds in which the slots of residuals are made on the host."""
    if not placed.plan.on_host.residuals:
        return 0.0
    return residual_bytes(placed, program) / placed.cluster.bus


def _outer_transfer(placed: Placed) -> float:
    """Embedding and head over data and, at the ends, over stages: gathered before the step (over
    data with ZeRO-3), reduced after it."""
    plan, size, kept = placed.plan, placed.model.parameter_bytes, placed.outer_kept
    part = kept / plan.parts
    gathered = size * (kept - part) if plan.zero == 3 else 0.0
    reduced = (1 if plan.zero else 2) * MASTER_BYTES * (kept - part)
    over_stages = (size + MASTER_BYTES) * (placed.outer_parameters - kept) / placed.stage_link
    over_data = (gathered + reduced) / placed.data_link
    return over_data + over_stages + _among_copies(placed, kept, part)


def _update(placed: Placed) -> float:
    """Reads and writes of the optimizer, casts, and ZeRO-1's and 2's gather of new parameters."""
    plan, model = placed.plan, placed.model
    held = placed.held_parameters
    moved = update_bytes(held, model.parameter_bytes, model.moments)
    seconds = moved / placed.cluster.bandwidth * placed.cluster.device.passes.update
    if plan.on_host.state:  # there and back, while nothing runs
        seconds += 2 * placed.optimizer_bytes / placed.cluster.bus
    if plan.zero < 3 and model.compute_bytes != model.parameter_bytes:
        cast = placed.stage_parameters * (model.parameter_bytes + model.compute_bytes)
        seconds += cast / placed.cluster.bandwidth
    if plan.zero in (1, 2):
        whole = placed.stage_parameters + placed.outer_kept
        seconds += model.parameter_bytes * (whole - held) / placed.data_link
    return seconds


def update_bytes(parameters: float, parameter_bytes: int, moments: float) -> float:
    """What an optimizer reads and writes: parameters and moments both, gradients it reads."""
    return parameters * (2 * parameter_bytes + MASTER_BYTES * (2 * moments + 1))


def total(parts: Mapping[str, float]) -> float:
    """Seconds, or bytes, of all parts."""
    return sum(parts.values())
