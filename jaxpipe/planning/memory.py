"""Bytes on a device during a step, by part, from a plan's tick table and a model's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from jaxpipe.planning.candidates import SCHEDULES
from jaxpipe.planning.plans import MASTER_BYTES, Placed, Plan
from jaxpipe.planning.programs import Program, grown, lowering_of, table_of
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import NONE

PARTS = (
    *("parameters", "copies", "optimizer", "gradients", "residuals", "crossing", "inboxes"),
    *("moving", "working", "batch"),
)
"""What a device holds: parameters; weights gathered, or copied in the compute dtype; the state of
the optimizer; sums of gradients; activations until B or W; values from B to W; messages; pieces of
chunks on their way over data; values of the layer, or the logits, at work; the batch."""

KEPT = ("until_b", "until_w")
"""What F keeps, for B and for W."""
_OF_LAYERS = "residuals", "crossing", "inboxes", "moving", "working"
"""What is there only until the last layer has run."""


def device_bytes(placed: Placed, program: Program) -> Mapping[str, float]:
    """Bytes by part (`PARTS`), on the device that holds the most.

    Sums of gradients are float32, as are the parameters of a model that casts them. The working set
    is that of a traced layer, beside pieces on their way, or of the head: what XLA makes of it is
    known only once it has compiled.
    """
    return _bytes(placed, _slots(program, placed.plan.zero == 3))


def least_bytes(placed: Placed, program: Program | None = None) -> float:
    """What a device holds at least: found without a schedule, or with one without a tick table."""
    slots = _least_slots(placed.plan)
    if program is not None:
        slots = {**slots, **_slots_of_order(program.unmoved)}
    return sum(_bytes(placed, slots).values())


def _bytes(placed: Placed, slots: Mapping[str, float]) -> Mapping[str, float]:
    """Bytes by part with so many slots (`_slots`)."""
    plan, model = placed.plan, placed.model
    layers = placed.layers_per_chunk
    stage, outer = placed.stage_parameters, placed.outer_parameters
    chunk = layers * placed.layer_parameters
    size = model.parameter_bytes
    found = dict.fromkeys(PARTS, 0.0)
    kept = placed.held_parameters if plan.zero == 3 else stage + placed.outer_kept
    found["parameters"] = size * kept
    if plan.zero == 3:
        found["copies"] = slots["gathers"] * chunk * model.compute_bytes
    elif model.compute_bytes != size:
        found["copies"] = stage * model.compute_bytes
    if plan.zero == 3 or plan.ends:
        found["copies"] += outer * size
    found["optimizer"] = placed.optimizer_bytes
    sums = slots["reduces"] * chunk if plan.zero >= 2 else stage
    # What is reduced after the last tick takes the room of activations that are gone by then, but
    # for what has the shape of a sum: XLA makes both of zeros at once, before the first tick.
    reduced = 0.0
    if plan.zero and slots["reduced in ticks"]:
        reduced = MASTER_BYTES * placed.stage_part
    elif plan.zero:
        reduced = MASTER_BYTES * plan.chunks * layers * placed.sum_sized_parameters
    found["gradients"] = MASTER_BYTES * (sums + outer) + reduced
    if not plan.on_host.residuals:
        found["residuals"] = _residual_bytes(placed, slots)
    found["crossing"] = layers * slots["crossing"] * placed.mean("crossing")
    message = placed.sizes.message.at(plan.rows)
    found["inboxes"] = (slots["x"] + slots["dy"] + slots["late"]) * message
    found["moving"], found["working"] = _at_work(placed, slots, reduced)
    found["batch"] = model.row_bytes * plan.rows * plan.microbatches
    if plan.on_host.state:  # it comes when these are gone
        gone = sum(found[name] for name in _OF_LAYERS)
        found["optimizer"] = max(0.0, found["optimizer"] - gone)
    return found


def _at_work(placed: Placed, slots: Mapping[str, float], reduced: float) -> tuple[float, float]:
    """Bytes of pieces that move while layers run, and of the layer or, beyond them, of the head or
    what moves alone.

    ``reduced`` are those of what gradients are reduced to.
    """
    plan, sizes = placed.plan, placed.sizes
    compute, outer = placed.model.compute_bytes, placed.outer_parameters
    both = placed.layer_parameters + placed.layer_part  # whole, and as this device's part
    gathering = slots["gathering"] * both * compute if plan.zero == 3 else 0.0
    whole = reducing = 0.0
    if plan.data * plan.context > 1:
        # What the last tick alone reduces takes the room of its sums.
        in_place = plan.zero == 0 or slots["reduced last"]
        whole = slots["reducing"] * MASTER_BYTES * (placed.layer_parameters if in_place else both)
        # Parts are summed over replicas under the layers, and so reduced to parts before.
        before = plan.replica * plan.context > 1 and not in_place
        reducing = slots["reducing"] * MASTER_BYTES * placed.layer_part if before else whole
    moving = gathering + reducing if slots["together"] else max(gathering, reducing)
    working_set = "fused_working_set" if slots["fused"] else "working_set"
    layer = placed.mean(f"stacked_{working_set}" if plan.weights == "stacked" else working_set)
    # The head reads what the last layer sends, if that is another stage's, and the slot for what it
    # returns. Pieces have arrived then, but for those of a last tick that runs it, too.
    held = outer / sizes.outer_parameters if sizes.outer_parameters else 1.0
    head = held * sizes.head_working_set.at(plan.rows)
    head += (1 + (plan.stage > 1)) * sizes.message.at(plan.rows)
    head += reducing if slots["reduced beside the head"] else 0.0
    if slots["apart"]:  # backwards need no gathered embedding and head
        gathered = plan.zero == 3 or plan.ends
        layer -= outer * placed.model.parameter_bytes if gathered else 0.0
        head -= reduced if plan.microbatches == 1 else 0.0  # it is made after the one head
    # Chunks that move whole do so before or after layers.
    alone = max(head, whole, _moving_alone(placed, slots))
    return moving, max(alone - moving, layer)


def _moving_alone(placed: Placed, slots: Mapping[str, float]) -> float:
    """Of a layer that moves over data while no layer runs, one at a time.

    It is gathered beside its slot; its sums are copied before they are reduced if they lie in a
    stack, or if data shards split them in another dimension than the first.
    """
    plan = placed.plan
    gathered = reduced = 0.0
    if plan.zero == 3:
        both = placed.layer_parameters + placed.layer_part
        gathered = both * placed.model.compute_bytes
    if slots["reduced in ticks"] and not slots["reducing"] and plan.data * plan.context > 1:
        stacked = plan.weights == "stacked"
        copied = placed.layer_parameters if stacked else placed.reordered_parameters
        kept = placed.layer_part if plan.zero else placed.layer_parameters
        reduced = (copied + kept) * MASTER_BYTES
    return max(gathered, reduced)


def residual_bytes(placed: Placed, program: Program) -> float:
    """Of the slots of what F keeps, wherever they lie."""
    return _residual_bytes(placed, _slots_of_order(program.unmoved))


def _residual_bytes(placed: Placed, slots: Mapping[str, float]) -> float:
    return placed.layers_per_chunk * sum(slots[name] * placed.mean(name) for name in KEPT)


@lru_cache(maxsize=4096)
def _slots(program: Program, gathers: bool) -> Mapping[str, float]:
    """Slots of every buffer; of transfers, chunks that lie in slots, and pieces on their way."""
    table = table_of(program.shorter()[0][0])
    found: dict[str, float] = {"gathers": table.gathers.num_slots}
    found["reduces"] = table.reduces.num_slots
    last = table.reduces_last(gathers=gathers)
    found["reduced in ticks"] = (table.reduces.chunk != NONE).any() and not last
    found["reduced last"] = last
    bodies, rounds = table.runs(gathers=gathers, reduces=True)
    found["apart"] = len(rounds) == 1 and not any(one.forward and one.backward for one in bodies)
    found["reduced beside the head"] = last and any(one.reduce and one.forward for one in bodies)
    found["together"] = last or any(one.gather and one.reduce for one in bodies)
    for name, moves in (("gathering", table.gathers), ("reducing", table.reduces)):
        found[name] = moves.group / moves.shares if moves.shared.any() else 0
    return {**_slots_of_order(program.unmoved), **found}


@lru_cache(maxsize=4096)
def _slots_of_order(program: Program) -> Mapping[str, float]:
    """Those of `_slots` that do not depend on what moves over data."""
    lowered = lowering_of(program.shorter()[0][0])

    def slots(name: str) -> float:
        return grown(program, lambda one: lowering_of(one).num_slots[name])

    found = {name: slots(name) for name in lowered.num_slots}
    # What is sent late, by kind, and what arrives, by channel.
    late = [channel.kind for channel in lowered.channels if channel.late_edges]
    return found | {"late": len(set(late)) + len(late), "fused": Kind.BW in lowered.kinds}


def _least_slots(plan: Plan) -> Mapping[str, float]:
    """No more of any than `_slots` finds."""
    share = SCHEDULES[plan.schedule].in_flight
    in_flight = plan.microbatches if share is None else min(plan.microbatches, plan.stage * share)
    held, fused = min(plan.weight_slots, plan.chunks), plan.schedule.endswith("-fused")
    kept = dict.fromkeys(KEPT, plan.chunks * in_flight)
    inboxes = {"x": 1, "dy": 1, "crossing": 0 if fused else 1}
    moving = {"gathers": held, "gathering": 0, "reduces": held, "reducing": 0}
    return (
        kept
        | inboxes
        | moving
        | {"late": 0, "reduced in ticks": False, "reduced last": True, "fused": fused}
        | {"reduced beside the head": False, "apart": True, "together": False}
    )
