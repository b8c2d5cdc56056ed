"""Bytes of a plan on the device that holds the most, by part.

They are those of the executor's own buffers: slots of the tick table times what a layer keeps, and
beside them what is live while one layer, or the head, is at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from jaxpipe.planning.plans import (
    MASTER_BYTES,
    SCHEDULES,
    PlacedPlan,
    Program,
    grown,
    lowering_of,
    table_of,
)
from jaxpipe.runtime.defaults import (
    FUSES_SLICES,
    MOST_COPIES,
    MOST_CROSSING,
    RESIDUALS,
    RESIDUALS_OF_F,
    known_slots,
)
from jaxpipe.schedule.lowering.table import TickTable

CARRIED = ("carry", "carry_gradient")
"""Buffers of what a slice of a sequence hands to the next in F, and of its cotangents."""

Slots = Mapping[str, float]
"""Slots of the tick loop's buffers, as in `TickTable.num_slots`; messages "handed" on; chunks of
"gathers" and "reduces", and layers that are "gathering" and "reducing" while others run."""


def device_bytes(placed: PlacedPlan, program: Program) -> dict[str, float]:
    """Predicts bytes by part, on the device that holds the most."""
    table = table_of(program.shorter()[0][0])
    gathers, reduces = table.gathers, table.reduces
    gathering, reducing = (
        count / shares for count, shares in (gathers.most_moved, reduces.most_moved)
    )
    moved = {"gathers": gathers.num_slots, "reduces": reduces.num_slots}
    moving = {"gathering": gathering, "reducing": reducing, "handed": _handed(placed, table)}
    return _bytes(placed, {**slots_of_order(program), **moved, **moving})


def _handed(placed: PlacedPlan, table: TickTable) -> int:
    """Counts the messages that layers hand on and that are kept between ticks: those that travel
    late, or, where the program knows its chunks (`Setup.knows_chunks`), all."""
    in_rows = FUSES_SLICES and len(placed.sizes.layers) == 1
    if (placed.plan.weights == "unrolled" or in_rows) and not placed.plan.overlaps:
        return 1 if table.one_message else 2
    return len({channel.kind for channel in table.channels if channel.late_edges})


def known_residuals(placed: PlacedPlan, program: Program | None = None) -> tuple[str, ...]:
    """Names the residuals that kernels read and write in their slots, since unrolled layers know
    these; without a program, at most, from the slots that a schedule has at least."""
    plan = placed.plan
    if plan.weights == "stacked" or plan.overlaps or plan.on_host.residuals:
        return ()
    layers = placed.model.num_layers // plan.num_chunks
    copies = layers * (2 if plan.schedule.endswith("-fused") else 3)  # F, BW; F, B, W
    most: tuple[str, ...] = RESIDUALS
    if plan.schedule in SCHEDULES and copies * plan.in_flight(plan.schedule) > MOST_COPIES:
        crossing = plan.chunks + 2 * max(plan.chunks, plan.crossing(plan.schedule))
        most = RESIDUALS[-1:] if layers * crossing <= MOST_CROSSING else ()
    if program is None or not most:
        return most
    reduces = plan.data * plan.sharing > 1
    return _known(program.shorter()[0][0], plan.zero.shards_weights, reduces)


@lru_cache(maxsize=4096)
def _known(program: Program, gathers: bool, reduces: bool) -> tuple[str, ...]:
    table = table_of(program)
    return known_slots(table, lambda chunk, layers: layers, gathers=gathers, reduces=reduces)


@lru_cache(maxsize=4096)
def least_bytes(
    placed: PlacedPlan, program: Program | None = None, *, among: tuple[str, ...] = ()
) -> float:
    """Bounds the bytes from below: with a schedule without a tick table, or with none.

    ``among`` are schedules in place of the plan's, of which the leanest counts.
    """
    plan = placed.plan
    moved = min(plan.weight_slots, plan.chunks)
    least = {"gathers": moved, "reduces": moved, "gathering": 0.0, "reducing": 0.0, "handed": 0}
    if program is not None:
        return sum(_bytes(placed, {**slots_of_order(program), **least}).values())
    names = among or (plan.schedule,)
    kept = dict.fromkeys(RESIDUALS_OF_F, min(plan.in_flight(name) for name in names))
    crossing = min(plan.crossing(name) for name in names)
    slots = {**kept, "crossing": crossing, "x": 1, "dy": 1}
    slots |= dict.fromkeys(CARRIED, plan.chunks)
    return sum(_bytes(placed, {**slots, **least}).values())


@lru_cache(maxsize=4096)
def slots_of_order(program: Program) -> Slots:
    """Counts the slots that do not depend on what moves over data."""

    def slots(name: str) -> float:
        return grown(program, lambda short: lowering_of(short).num_slots[name])

    names = [*RESIDUALS_OF_F, "crossing", "x", "dy", *(CARRIED if program.slices > 1 else ())]
    return dict.fromkeys(CARRIED, 0) | {name: slots(name) for name in names}


def residual_bytes(placed: PlacedPlan, slots: Slots) -> float:
    """Counts the bytes of residuals, wherever they lie."""
    return placed.layers_per_chunk * sum(slots[name] * placed.mean(name) for name in RESIDUALS_OF_F)


def _bytes(placed: PlacedPlan, slots: Slots) -> dict[str, float]:
    """Counts bytes by part: parameters; weights gathered, or copied in the compute dtype; the state
    of the optimizer; sums of gradients, and what they are reduced to; activations until B or W;
    values from B to W; messages; what slices hand to the next; layers on their way over data;
    values of the layer, or the logits, at work; the batch."""
    plan, model = placed.plan, placed.model
    layers, outer = placed.layers_per_chunk, placed.outer_parameters
    chunk, stage = placed.slot_parameters, placed.stage_parameters
    own = placed.own_parameters if plan.zero.shards_weights else (stage, placed.outer_kept)
    copies = stage if placed.read_bytes != placed.kept_bytes else 0.0
    if plan.zero.shards_weights:
        copies = slots["gathers"] * chunk
    gathered_outer = outer if plan.zero.shards_weights or plan.ends else 0.0
    sums = slots["reduces"] * chunk if plan.zero.shards_gradients else stage
    reduced = placed.stage_part if plan.zero.shards_state else 0.0
    inboxes = (slots["x"] + slots["dy"] + slots["handed"]) * placed.sizes.message.at(plan.rows)
    parts = {
        "parameters": placed.kept_bytes * own[0] + model.parameter_bytes * own[1],
        "copies": copies * placed.read_bytes + gathered_outer * model.parameter_bytes,
        "optimizer": placed.optimizer_bytes,
        "gradients": MASTER_BYTES
        * (placed.trained * (sums + reduced) + placed.outer_trained * outer),
        "residuals": 0.0 if plan.on_host.residuals else residual_bytes(placed, slots),
        "crossing": layers * slots["crossing"] * placed.mean("crossing"),
        "inboxes": inboxes,
        "carries": layers * sum(slots[name] for name in CARRIED) * placed.mean("carry"),
        "moving": _moving_bytes(placed, slots),
        "working": _live_bytes(placed),
        "batch": model.row_bytes * plan.rows * plan.microbatches,
    }
    if plan.on_host.state:  # it comes when the values of layers are gone
        of_layers = ("residuals", "crossing", "inboxes", "carries", "moving", "working")
        left = parts["optimizer"] - sum(parts[name] for name in of_layers)
        parts["optimizer"] = max(0.0, left)
    return parts


def _moving_bytes(placed: PlacedPlan, slots: Slots) -> float:
    """Counts the bytes of layers on their way over data: whole, and as this device's part."""
    plan, both = placed.plan, placed.layer_parameters + placed.layer_part
    gathering = slots["gathering"] * both * placed.read_bytes if plan.zero.shards_weights else 0.0
    reducing = 0.0
    if plan.data * plan.context > 1:
        elements = both if plan.zero.shards_state else placed.layer_parameters
        reducing = slots["reducing"] * placed.trained * elements * MASTER_BYTES
    return gathering + reducing


def _live_bytes(placed: PlacedPlan) -> float:
    """Counts what is live while a layer, with weights cut out of their stack, or the head runs."""
    plan, sizes = placed.plan, placed.sizes
    layer = placed.mean("live") * (2 if plan.overlaps else 1)
    if plan.weights == "stacked":
        layer += placed.layer_parameters * placed.read_bytes
    return max(layer, placed.outer_share * sizes.head_live.at(plan.rows))
