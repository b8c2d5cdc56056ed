"""Seconds of a plan's step, by part, and what they add up to with the bytes of a device.

Seconds are those of the tick table on the device clock; `docs/design/009-planner.md` lists what
hides which communication. Nothing hides residuals that lie on the host, there or back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxpipe.planning import plans
from jaxpipe.planning.devices import LAUNCH_SECONDS, Cluster
from jaxpipe.planning.memory import known_residuals, residual_bytes, slots_of_order
from jaxpipe.planning.plans import MASTER_BYTES, Links, PlacedPlan, Plan, Program, grown, table_of
from jaxpipe.planning.sizes import Kernel, ModelSizes, Pass, Variant
from jaxpipe.runtime.defaults import RESIDUALS, RESIDUALS_OF_F
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.device_clock import replay, work_of
from jaxpipe.schedule.lowering.table import NONE
from jaxpipe.schedule.simulate import Costs

COARSE_STAGES = 8
"""Fewest stages in place of twice as many or more, when a plan is timed at first."""
_MORE_IN_FLIGHT = 2
"""Most microbatches of a full stage that its last stage has in flight beyond a schedule's share."""
_X_SUMS = 4
"""Sums over stages of an activation per microbatch: as it enters and leaves, and its gradients."""

OFF = 0.16
"""Share by which nine in ten published runs that were not fitted are off at most
(docs/published.md)."""
MOST_HOSTS = 64
"""Hosts over which ZeRO-3 has been run often; beyond, its transfers may take twice as long."""
EXPOSED_IN_PIECES = {2: 0.07, 4: 0.07, 8: 0.13}
"""Share of tensor collectives that layers in pieces expose, by the devices: compiled programs of
Llama 70B (docs/design/002-axes.md)."""
PIECES_SECONDS, PIECES_BYTES = 0.2e-3, 16 << 20
"""Seconds that pieces add to each of F, B and W, and bytes of the smallest activation in pieces."""
TICK_SECONDS = 0.2e-3
"""Seconds of a tick beside its layers, embedding and head, in a compiled program: launches of idle
loops, receives, and waits of the host (docs/benchmarks.md, `make gpu-roofline`, zb-v)."""

WIDE = 0.5
"""Rate of matmuls in float32 (TF32), in which optimizers multiply, in that of 16 bits, by data
sheets."""


class Measures(NamedTuple):
    """Seconds, bytes of a device and dollars of a training."""

    time: float
    memory: float
    cost: float

    def near(self, other: Measures, factor: float = 1.0) -> bool:
        """Whether each of them is at most so many times the other's."""
        return (
            self.time <= factor * other.time
            and self.memory <= factor * other.memory
            and self.cost <= factor * other.cost
        )


class Prediction(NamedTuple):
    """Predicted time and memory of a plan.

    Args:
      seconds: seconds of a step, by part.
      bytes: bytes of a device, by part.
      steps: optimizer steps of the training.
      doubt: seconds by which a step may take longer, since nobody has measured what the plan does.
      compiled_bytes: bytes of a device, by the compiler; None if it was not compiled.
    """

    placed: PlacedPlan
    seconds: Mapping[str, float]
    bytes: Mapping[str, float]
    steps: float
    doubt: float = 0.0
    compiled_bytes: float | None = None

    @property
    def plan(self) -> Plan:
        return self.placed.plan

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def range_seconds(self) -> tuple[float, float]:
        """Seconds of a step at best and at worst, as far as published runs were off."""
        return (1 - OFF) * self.step_seconds, (1 + OFF) * (self.step_seconds + self.doubt)

    @property
    def device_bytes(self) -> float:
        """Bytes of a device, as compiled, or else as predicted."""
        return sum(self.bytes.values()) if self.compiled_bytes is None else self.compiled_bytes

    @property
    def train_seconds(self) -> float:
        return self.steps * self.step_seconds

    @property
    def dollars(self) -> float:
        """Cost of all devices until then."""
        return self.train_seconds * self.placed.cluster.dollars_per_second

    @property
    def measures(self) -> Measures:
        """Measures by which plans are ranked: time and cost include the doubt."""
        doubted = 1 + self.doubt / self.step_seconds
        return Measures(doubted * self.train_seconds, self.device_bytes, doubted * self.dollars)

    @property
    def model_flops_share(self) -> float:
        """Share of the devices' data-sheet peak that matmuls take, recomputation not counted."""
        plan, cluster = self.plan, self.placed.cluster
        least = min(  # recomputation only adds
            sizes.layer_flops(plan.rows) + sizes.head.flops(plan.rows)
            for variant, sizes in self.placed.model.variants.items()
            if (variant.mesh, variant.slices) == (self.placed.variant.mesh, plan.slices)
        )
        flops = least * plan.sharing * plan.passes * plan.data
        return flops / (self.step_seconds * cluster.device.flops * cluster.count)


def program_of(placed: PlacedPlan, *, published: bool = False) -> Program:
    """Finds the program of a plan, or that of its published order, which is made faster."""
    plan = placed.plan
    return Program(
        plan.schedule,
        plan.stage,
        plan.chunks,
        plan.microbatches,
        placed.model.num_layers,
        None if published else chunk_costs(placed),
        weight_slots=min(plan.weight_slots, plan.chunks),
        own_slots=plan.weights == "unrolled",
        shares=placed.shares if plan.weight_slots > 1 else 0,
        sums_in_slots=plan.zero.shards_gradients,
        together=not plan.ends,
        head_layers=placed.head_layers,
        slices=plan.slices,
    )


class LayerTransfer(NamedTuple):
    """Seconds in which a layer's weights are gathered over data, and its gradient is reduced."""

    gather: float
    reduce: float


_NOTHING = LayerTransfer(0.0, 0.0)


def step_seconds(placed: PlacedPlan, program: Program) -> dict[str, float]:
    """Predicts the seconds of a step by part: layers that run; embedding and head; stages that wait
    for each other; gathers and reductions that nothing hides; the optimizer and what follows it."""
    layer = layer_costs(placed, program)
    parts = seconds_of_order(placed, program, layer)
    parts["transfers"] += _exposed(program, layer, transfer(placed))
    return parts | {"stragglers": placed.cluster.straggling * sum(parts.values())}


def doubt(placed: PlacedPlan, program: Program, seconds: Mapping[str, float]) -> float:
    """Seconds that a step may take longer where no published run says what is assumed: half of what
    pairs hide; all transfers of ZeRO-3 over many hosts once more; with fewer microbatches than two
    per stage, half of the waits, which nothing evens out."""
    if hidden := hidden_in_pairs(placed):
        hidden *= _pairs(program)
    return doubt_of_hosts(placed) + _doubt_of_order(placed.plan, hidden, seconds["waits"])


def _pairs(program: Program) -> float:
    """Counts the pairs of layers in `paired_layers` on a stage: the mean."""
    return grown(program, lambda short: float(paired_layers(short).sum(0).mean()))


def _doubt_of_order(plan: Plan, hidden: float, waits: float) -> float:
    return 0.5 * (hidden + waits * (plan.microbatches < 2 * plan.stage > 2))


def doubt_of_hosts(placed: PlacedPlan) -> float:
    """The part of `doubt` that no schedule changes."""
    plan = placed.plan
    if not (plan.zero.shards_weights and placed.data_hosts > MOST_HOSTS):
        return 0.0
    layers = placed.model.num_layers / plan.stage
    # Orders of one stage that run its chunks in turn gather them for every microbatch.
    in_turn = plan.stage == 1 and plan.schedule == "interleaved-fused"
    times = plan.passes if plan.weight_slots == 1 or in_turn else 1
    return layers * sum(transfer(placed)) * times


def least_seconds(placed: PlacedPlan, program: Program | None = None) -> float:
    """Bounds the seconds of a step from below: whatever the schedule, or with one that hides all
    transfers under layers."""
    if program is not None:
        return sum(seconds_of_order(placed, program).values())
    return least_of_family(placed) + _least_transfer(placed) + _update(placed)


def coarse_seconds(placed: PlacedPlan) -> tuple[float, float]:
    """Estimates the seconds of a step, and those that its order leaves in doubt, from fewer stages
    that each have as many microbatches: the order takes a fraction of the time to make, and waits
    slightly less."""
    plan, layer = placed.plan, layer_costs(placed)
    fold = next(
        n
        for n in range(max(1, plan.stage // COARSE_STAGES), 0, -1)
        if math.gcd(plan.stage, plan.microbatches) % n == 0
    )
    stages, share = plan.stage // fold, placed.model.num_layers / plan.num_chunks
    program = program_of(placed, published=True).without_transfers()
    program = program._replace(
        stages=stages,
        microbatches=plan.microbatches // fold,
        layers=stages * plan.chunks,
        head_layers=0.0,
    )
    chunk, hidden = layer.times(share), share * hidden_in_pairs(placed)
    makespan = fold * grown(program, lambda short: replayed(short, chunk, hidden=hidden))
    hidden *= fold * _pairs(program) if hidden else 0.0
    doubted = _doubt_of_order(plan, hidden, makespan + hidden - _layer_seconds(placed, layer))
    head = plan.passes * _head(placed)
    return makespan + head + _least_transfer(placed) + _update(placed), doubted


@lru_cache(maxsize=4096)
def least_of_family(placed: PlacedPlan) -> float:
    """Bounds the seconds of a step from below, whatever the plan's options."""
    plan = placed.plan
    head = plan.passes * layer_passes(placed).head / plan.stage
    return _layer_seconds(placed, layer_costs(placed)) - _most_hidden(placed) + _fill(placed) + head


@lru_cache(maxsize=4096)
def least_doubt(placed: PlacedPlan) -> float:
    """Bounds from below what the order leaves in doubt, where the seconds are `least_of_family`."""
    hidden = _most_hidden(placed)
    return _doubt_of_order(placed.plan, hidden, 0.0 if hidden else _fill(placed))


def _most_hidden(placed: PlacedPlan) -> float:
    """Bounds the seconds that pairs save from above."""
    plan = placed.plan
    return hidden_in_pairs(placed) * plan.passes * placed.model.num_layers / plan.stage


def _fill(placed: PlacedPlan) -> float:
    """Bounds from below how long a stage waits for others, whatever the order."""
    plan, layer = placed.plan, layer_costs(placed)
    # The last stage waits for the first microbatch, and the first one for the last gradient. The
    # last one may still owe the W of what it has in flight when it sends that, if it is split off.
    chunk, hops = placed.model.num_layers / plan.num_chunks, plan.stage - 1
    there = chunk * (layer.f + layer.more(Kind.F, 0, plan.slices)) + layer.message
    back = chunk * (layer.b + layer.more(Kind.B, 0, plan.slices)) + layer.message
    if plan.schedule.endswith("-fused"):
        return hops * (there + back + chunk * layer.w)
    owed = plan.in_flight(plan.schedule) + _MORE_IN_FLIGHT * plan.chunks
    return hops * there + max(0.0, hops * back - owed * chunk * layer.w)


def seconds_of_order(
    placed: PlacedPlan, program: Program, layer: Costs | None = None
) -> dict[str, float]:
    """Predicts the parts of `step_seconds` if layers hide all transfers, and without stragglers.

    Args:
      layer: the costs of one layer; None for those with all slots known that may be.
    """
    plan, layer = placed.plan, layer or layer_costs(placed)
    layers, head = _layer_seconds(placed, layer), plan.passes * _head(placed)
    at_end = plan.stage * _head(placed) if plan.ends else 0.0
    hidden = hidden_in_pairs(placed)
    makespan = grown(program, lambda short: replayed(short, layer, head=at_end, hidden=hidden))
    if hidden:
        layers -= hidden * _pairs(program)
    waits = makespan - layers - (head if plan.ends else 0.0)
    transfers = _outer_transfer(placed)
    if plan.on_host.residuals:  # their slots are made there
        transfers += residual_bytes(placed, slots_of_order(program)) / placed.cluster.bus
    ticks = TICK_SECONDS * grown(program, lambda short: float(table_of(short).num_ticks))
    return {
        "layers": layers,
        "head": head,
        "waits": max(0.0, waits),
        "ticks": ticks,
        "transfers": transfers,
        "update": _update(placed),
    }


def _layer_seconds(placed: PlacedPlan, layer: Costs) -> float:
    plan = placed.plan
    layers = plan.passes * placed.model.num_layers / plan.stage
    return layers * (layer.f + layer.b + layer.w)


class Passes(NamedTuple):
    """Seconds of a layer and of the head, for the rows of a microbatch or their average slice.

    Args:
      f, b, w: F, B and W of a layer, the mean if they differ, without what the layout of weights
        adds.
      attention: what F and B spend in attention.
      communication: what the three spend in collectives.
      head: embedding and head, on one stage.
    """

    f: float
    b: float
    w: float
    attention: float
    communication: float
    head: float


def layer_passes(placed: PlacedPlan, program: Program | None = None) -> Passes:
    """Times the passes of a layer; without a program, with all slots known that may be."""
    plan = placed.plan
    known = known_residuals(placed, program)
    # A fused backward hands nothing from B to W.
    known = (*known, *RESIDUALS[-1:]) if plan.schedule.endswith("-fused") else known
    whole = plan.tensor * placed.sizes.message.at(plan.rows)
    pieces = placed.model.in_pieces and not plan.overlaps and whole >= PIECES_BYTES
    return _passes_of(
        *(placed.model, placed.variant, plan.rows, placed.cluster, placed.sharing_links),
        pieces=pieces and plan.tensor > 1,
        copies=RESIDUALS_OF_F[0] not in known,
        crossing=RESIDUALS[-1] not in known,
    )


@lru_cache(maxsize=1024)
def _passes_of(
    model: ModelSizes,
    variant: Variant,
    rows: int,
    cluster: Cluster,
    links: Links,
    *,
    pieces: bool,
    copies: bool,
    crossing: bool,
) -> Passes:
    of_tensor = EXPOSED_IN_PIECES[min(variant.tensor, 8)] if pieces else 1.0

    def communicated(layer_pass: Pass) -> float:
        seconds = 0.0
        for collective in layer_pass.collectives:
            sent = max(collective.sent.at(rows), 0.0)
            shown = of_tensor if collective.axis == "tensor" else 1.0
            seconds += shown * (cluster.device.latency + sent / links.along(collective.axis))
        return cluster.exposed * seconds + (PIECES_SECONDS if pieces else 0.0)

    def timed(layer_pass: Pass) -> float:
        """Times kernels at the roofline, copies, and collectives, one after another."""
        copied = copies * layer_pass.values.at(rows) + crossing * layer_pass.crossing.at(rows)
        seconds = copied / cluster.bandwidth
        seconds += sum(kernel_seconds(kernel, rows, cluster) for kernel in layer_pass.kernels)
        return seconds + communicated(layer_pass)

    def attending(layer_pass: Pass) -> float:
        fused = (kernel for kernel in layer_pass.kernels if kernel.kind == "attention")
        return sum(kernel_seconds(kernel, rows, cluster) for kernel in fused)

    sizes = model.variants[variant]
    by_kind = [
        [
            *map(timed, layer.passes),
            attending(layer.f) + attending(layer.b),
            sum(map(communicated, layer.passes)),
        ]
        for layer in sizes.layers
    ]
    of_layers = [by_kind[kind] for kind in sizes.kind_of]
    means = (sum(values) / len(of_layers) for values in zip(*of_layers, strict=True))
    return Passes._make([*means, timed(sizes.head)])


def kernel_seconds(kernel: Kernel, rows: float, cluster: Cluster) -> float:
    """Times a kernel for so many rows: a launch, and the longer of its FLOPs and its bytes."""
    attained = cluster.device.efficiency
    device = cluster.device
    speeds = {
        "attention": attained.attention,
        "fp8": device.fp8,
        "mxfp8": device.fp8,
        "fp4": device.fp4,
    }
    computing = kernel.flops.at(rows) / (speeds.get(kernel.kind, 1.0) * cluster.flops)
    moving = kernel.bytes.at(rows) / cluster.bandwidth
    shown = attained.loads if kernel.kind in ("matmul", "fp8", "mxfp8", "fp4") else 0.0
    return LAUNCH_SECONDS + max(computing, moving) + shown * min(computing, moving)


@lru_cache(maxsize=4096)
def layer_costs(placed: PlacedPlan, program: Program | None = None) -> Costs:
    """Times F, B and W of a layer, the mean if they differ, and a message: `layer_passes`, and
    what the layout of weights and the host add."""
    plan, cluster = placed.plan, placed.cluster
    f, b, w, attention, *_ = layer_passes(placed, program)
    copies, sums = _of_weights(placed)
    f, b, w = f + copies, b + copies, w + sums
    if plan.on_host.residuals:
        until_b, until_w = (placed.mean(name) / cluster.bus for name in RESIDUALS_OF_F)
        f, b = f + until_b + until_w, b + until_b + until_w
        w += 0.0 if plan.schedule.endswith("-fused") else until_w
    sent = 0.0
    if plan.stage > 1:
        sent = cluster.device.latency + placed.sizes.message.at(plan.rows) / placed.stage_link
    grows = placed.model.document_share * attention if plan.slices > 1 else 0.0
    # Nobody has measured yet whether senders of tens of megabytes go on.
    return Costs(f, b, w, sent, attention=grows / (f + b), rendezvous=True)


def _of_weights(placed: PlacedPlan) -> tuple[float, float]:
    """Times cutting a layer's weights out of their stack, for F and for B, and adding a gradient.

    Unrolled weights are read where they lie, and their gradients added within the matmul
    (docs/design/001-executor.md). So are stacked ones from JAX 0.12 on, which is not counted."""
    plan, bandwidth = placed.plan, placed.cluster.bandwidth
    size, read = placed.layer_parameters, placed.read_bytes
    summed = MASTER_BYTES * placed.trained * size
    if plan.weights == "unrolled":
        return 0.0, placed.cluster.device.efficiency.loads * summed / bandwidth
    layer = placed.sizes.layers[-1]
    launches = LAUNCH_SECONDS * len(layer.shapes + layer.expert_shapes)
    # Both arrays of a sum are read outside of the matmul, and it is written.
    return launches + 2 * read * size / bandwidth, launches + 3 * summed / bandwidth


def hidden_in_pairs(placed: PlacedPlan) -> float:
    """Seconds that a layer of F and one of a whole backward save in one loop, where what either
    communicates lies under matmuls of the other: the shorter of computation and communication.

    A profile that DeepSeek published of such a pair has 118 ms of computation and 115 of
    communication, and lasts 129.
    """
    differ = len(placed.sizes.layers) > 1
    if not placed.plan.overlaps or (differ and placed.plan.weights == "stacked"):
        return 0.0
    seconds = layer_passes(placed)
    computation = seconds.f + seconds.b + seconds.w - seconds.communication
    return min(seconds.communication, computation)


def paired_layers(program: Program) -> np.ndarray:
    """Counts the layers that run in pairs of F and a whole backward, ``[ticks, stages]``."""
    table = table_of(program.without_transfers())
    passes = {kind: cell.layers for kind, cell in table.passes.items()}
    fused = Kind.BW in passes
    backward = passes[Kind.BW] if fused else np.minimum(passes[Kind.B], passes[Kind.W])
    return np.minimum(passes[Kind.F], backward)


def transfer(placed: PlacedPlan) -> LayerTransfer:
    """Times gathering a layer's weights over data, and reducing its gradient."""
    plan, size, part = placed.plan, placed.layer_parameters, placed.layer_part
    # A ring passes all hosts, and its links within one are fast.
    latency = placed.cluster.device.latency * placed.data_hosts if plan.parts > 1 else 0.0
    gather = 0.0
    if plan.zero.shards_weights:
        gather = latency + (size - part) * placed.read_bytes / placed.data_link
    times = 1 if plan.zero.shards_state else 2  # a sum scatters and gathers
    size, part = placed.trained * size, placed.trained * part
    reduce = times * (latency + MASTER_BYTES * (size - part) / placed.data_link)
    return LayerTransfer(gather, reduce + _among_copies(placed, size, part))


def _among_copies(placed: PlacedPlan, size: float, part: float) -> float:
    """Times the sum of data shards' gradients over replicas."""
    plan = placed.plan
    own = MASTER_BYTES * (part if plan.zero.shards_state else size)
    return 2 * (plan.replica - 1) / plan.replica * own / placed.replica_link


def chunk_costs(placed: PlacedPlan) -> Costs:
    """Costs of a chunk as a configuration has them: relative to its F, in few digits."""
    share = placed.model.num_layers / placed.plan.num_chunks
    return plans.relative(layer_costs(placed).times(share))


def _exposed(program: Program, layer: Costs, moved: LayerTransfer) -> float:
    """Seconds of the transfers over data that nothing hides.

    Where they lie under layers they take as long in a longer step, which only has more layers to
    hide them; where chunks move as a whole, they move for every group of microbatches again.
    """
    if moved == _NOTHING:
        return 0.0

    def extra(short: Program) -> float:
        return replayed(short, layer, moved) - replayed(short, layer)

    steady = program.shorter()[0][0]
    table = table_of(steady)
    shared = table.gathers.shared.any() or table.reduces.shared.any()
    return max(0.0, extra(steady) if shared else grown(program, extra))


@lru_cache(maxsize=4096)
def replayed(
    program: Program,
    layer: Costs,
    moved: LayerTransfer = _NOTHING,
    *,
    head: float = 0.0,
    hidden: float = 0.0,
) -> float:
    """Times the table on the device clock, with transfers in its ticks and at its edges.

    ``head`` is how long the last stage's head takes a microbatch, ``hidden`` what a pair of layers
    saves.
    """
    if moved == _NOTHING and program != (plain := program.without_transfers()):
        return replayed(plain, layer, head=head, hidden=hidden)  # many differ only in what moves
    table = table_of(program)
    costs = [layer.times(layers) for layers in table.layer_counts]
    work = np.sum(list(work_of(table, costs).values()), axis=0)
    if hidden:
        work = work - hidden * paired_layers(program)
    work[table.outer.head != NONE, table.schedule.placement.stages[-1]] += head
    seconds, under = 0.0, np.zeros(table.num_ticks)
    edges = (table.gathers, 0), (table.reduces, -1)
    for (moves, tick), of_layer in zip(edges, moved, strict=True):
        if not of_layer:
            continue
        chunk = of_layer * table.layers_per_chunk
        within = moves.within * (chunk - of_layer)
        seconds += len(moves.edge.chunk) * chunk - within
        under[tick] += within
        under += of_layer * moves.group / moves.shares * moves.shared
        if moves.whole:
            work = work + chunk * (moves.chunk >= 0)
    # All stages take part, and a tick ends with the later of its layers and its transfers.
    work = np.maximum(work, under[:, None])
    message = layer.message if program.stages > 1 else 0.0
    starts = replay(table, work, message=message, rendezvous=layer.rendezvous)
    return seconds + float(starts[-1].max())


def _head(placed: PlacedPlan) -> float:
    """Times embedding and head of one microbatch: a stage's part, and sums over stages if all
    compute them together."""
    plan, sizes = placed.plan, placed.sizes
    whole = layer_passes(placed).head
    if plan.stage == 1 or plan.ends:
        return whole / plan.stage
    launches = LAUNCH_SECONDS * len(sizes.head.kernels)
    over_stages = 2 * (plan.stage - 1) / plan.stage * sizes.merged.at(plan.rows)
    sums = _X_SUMS * over_stages / placed.stage_link
    return (whole - launches) * placed.outer_share + launches + sums


def _outer_transfer(placed: PlacedPlan) -> float:
    """Times embedding and head over data and, at the ends, over stages: gathered before the step
    (over data with ZeRO-3), reduced after it."""
    plan, size, kept = placed.plan, placed.model.parameter_bytes, placed.outer_kept
    part = kept / plan.parts
    gathered = size * (kept - part) if plan.zero.shards_weights else 0.0
    trained = placed.outer_trained * MASTER_BYTES
    reduced = (1 if plan.zero.shards_state else 2) * trained * (kept - part)
    over_stages = (size + trained) * (placed.outer_parameters - kept) / placed.stage_link
    over_data = (gathered + reduced) / placed.data_link
    return over_data + over_stages + _among_copies(placed, kept, part)


def _least_transfer(placed: PlacedPlan) -> float:
    """Bounds what nothing hides: beside embedding and head chunks that share one slot, which are
    gathered for F and for B, and reduced."""
    plan, moved, seconds = placed.plan, transfer(placed), _outer_transfer(placed)
    if plan.weight_slots == 1 < plan.chunks and plan.zero.shards_gradients:
        layers = placed.model.num_layers / plan.stage * (1 - 1 / plan.chunks)
        seconds += layers * (2 * moved.gather + moved.reduce)
    return seconds


def _update(placed: PlacedPlan) -> float:
    """Times reads and writes of the optimizer, casts, and ZeRO-1's and 2's gather of parameters."""
    plan, model, cluster = placed.plan, placed.model, placed.cluster
    updated = placed.updated_parameters
    # Parameters and moments there and back, and gradients.
    moved = updated * (2 * model.parameter_bytes + MASTER_BYTES * (2 * model.moments + 1))
    seconds = moved / cluster.bandwidth
    if plan.on_host.state:  # there and back, while nothing runs
        seconds += 2 * placed.optimizer_bytes / cluster.bus
    if not plan.zero.shards_weights and placed.read_bytes != placed.kept_bytes:
        cast = placed.stage_parameters * (model.parameter_bytes + placed.read_bytes)
        seconds += cast / cluster.bandwidth
    if plan.zero.shards_state and not plan.zero.shards_weights:
        whole = placed.trained * placed.stage_parameters + placed.outer_trained * placed.outer_kept
        seconds += model.parameter_bytes * (whole - updated) / placed.data_link
    return seconds + (at_homes(placed) if model.update_flops else 0.0)


def at_homes(placed: PlacedPlan) -> float:
    """Times what an optimizer multiplies of whole layers, and the exchange before and after it:
    devices of a stage each have a layer at a time, or some of its matrices if there are several
    times as many (docs/design/004-optimizers.md)."""
    plan, cluster = placed.plan, placed.cluster
    homes, own, parts = plan.data * plan.sharing, placed.layer_parameters, plan.tensor
    if plan.zero.shards_state:
        own, parts = placed.layer_part, parts * plan.parts
    link = placed.sharing_links[0] if plan.data == 1 else placed.data_link
    # Parts go to the home, and those of the result to all that have them.
    exchanged = MASTER_BYTES * placed.trained * own * (parts - 1 + homes - 1)
    layers, flops = plan.chunks * placed.layers_per_chunk, placed.model.update_flops
    trips = math.ceil(layers / homes)
    groups = homes // math.ceil(layers / trips) if layers > 1 else 1
    most = max(sum(flops[group::groups]) for group in range(groups))
    return trips * (most / (WIDE * cluster.flops) + exchanged / link)
