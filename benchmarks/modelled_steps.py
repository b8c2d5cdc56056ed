"""Training steps of the GPT on H100s, modelled at the roofline from their compiled programs.

`pipeline_step` takes the trips of a tick's loops from the tick table. `plain_layer` and
`sharded_step` are what to compare with: steps of one GPU, and of as many GPUs with data shards
alone, with any policy of rematerialization. `jax.named_scope` in `jaxpipe.runtime.tick` names the
loops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe
from benchmarks import plain_steps
from benchmarks.gpu_compile import CONFIG, DATA, ROWS
from benchmarks.hlo import PASSES, HloProgram, Instruction, Scope, layers_of, scope_of
from benchmarks.kernels import Use
from benchmarks.roofline import Roofline, Spent, known_trips, scaled, total
from jaxpipe.planning.devices import DEVICES
from jaxpipe.planning.without_devices import GPUS_PER_HOST, device_bytes, gpus
from jaxpipe.runtime.layers.split import REMAT_POLICIES
from jaxpipe.runtime.memory import compiled
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.device_clock import replay
from jaxpipe.schedule.lowering.table import NONE, Cell, TickTable, Transfers
from models import gpt

_DEPTHS = 2, 4
"""Numbers of layers that are compiled of a step without a pipeline."""


def weight_shapes(num_layers: int, config: gpt.GPTConfig = CONFIG) -> set[tuple[int, ...]]:
    """Shapes of a layer's matrices, also of several layers stacked and of data shards, sorted."""
    layers = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))["layers"]
    lead = 0 if isinstance(layers, tuple) else 1
    shapes = [leaf.shape[lead:] for leaf in jax.tree.leaves(layers) if leaf.ndim == lead + 2]
    whole = [(rows // n, columns) for n in (1, DATA, GPUS_PER_HOST) for rows, columns in shapes]
    return {tuple(sorted(shape)) for cut in whole for shape in (cut, (num_layers, *cut))}


# Steps without a pipeline.


class Rival(NamedTuple):
    """A step without a pipeline.

    Args:
      spent: its time.
      bytes: memory of a device, arguments included.
    """

    spent: Spent
    bytes: float


@functools.cache
def plain_layer(remat: str) -> Spent:
    """One layer and microbatch of the step of one GPU: what a microbatch takes more with it."""

    def microbatch(num_layers: int) -> Spent:
        config = dataclasses.replace(CONFIG, num_layers=num_layers)
        tokens = (16, ROWS, CONFIG.sequence_length + 1)
        step = plain_steps.plain_step(config, remat, gpus("h100", 1)[0], tokens)
        roofline = Roofline(HloProgram(step.as_text()), weight_shapes(num_layers))
        (loop,) = roofline.program.loops(roofline.program.entry)
        return roofline.body(loop.calls["body"])

    few, many = _DEPTHS
    return _mixed(microbatch(few), -1 / (many - few), microbatch(many), 1 / (many - few))


def sharded_step(hosts: int, num_layers: int, rows: int) -> Rival:
    """The step of data shards alone for a batch of so many rows, with the fastest policy of those
    that fit into a GPU's memory."""
    found = [_sharded_step(hosts, num_layers, rows, remat) for remat in REMAT_POLICIES]
    fitting = [one for one in found if one.bytes <= DEVICES["h100"].memory_bytes]
    return min(fitting or found, key=lambda one: total(one.spent))


@functools.cache
def _sharded_step(hosts: int, num_layers: int, rows: int, remat: str) -> Rival:
    """Every layer takes the same time and memory: few are compiled."""
    gpus = GPUS_PER_HOST * hosts

    def compiled_step(layers: int) -> Rival:
        config = dataclasses.replace(CONFIG, num_layers=layers)
        tokens = (rows // ROWS // gpus, ROWS * gpus, CONFIG.sequence_length + 1)
        step = plain_steps.sharded_step(config, remat, gpus("h100", gpus), tokens)
        roofline = Roofline(HloProgram(step.as_text()), weight_shapes(layers))
        return Rival(roofline.body(roofline.program.entry), device_bytes(step))

    few, many = map(compiled_step, _DEPTHS)
    share = (num_layers - _DEPTHS[0]) / (_DEPTHS[1] - _DEPTHS[0])
    return Rival(
        _mixed(few.spent, 1 - share, many.spent, share),
        (1 - share) * few.bytes + share * many.bytes,
    )


def _mixed(one: Spent, share: float, other: Spent, share_of_other: float) -> Spent:
    return Counter({use: share * one[use] + share_of_other * other[use] for use in Use})


# A pipeline's step.


@dataclasses.dataclass(frozen=True)
class Step:
    """The modelled step of a pipeline.

    Args:
      passes: one layer and microbatch, by kind of action.
      seconds: how long it takes if stages wait for each other as on GPUs.
      spent: what a stage spends, the mean over stages; the rest of ``seconds`` it waits for others.
      bytes: memory of a device, arguments included.
    """

    passes: dict[str, Spent]
    seconds: float
    spent: Spent
    bytes: float


def batch_rows(pipe: jaxpipe.Pipeline) -> int:
    return ROWS * pipe.axes.num_shards(pipe.mesh) * pipe.schedule.num_microbatches


def pipeline_step(pipe: jaxpipe.Pipeline, rows: int, config: gpt.GPTConfig = CONFIG) -> Step:
    """Compiles a pipeline of a GPT for a batch of so many rows, and models it."""
    shape = rows, config.sequence_length + 1
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}
    return modelled(pipe, compiled(pipe, batch), config)


def modelled(
    pipe: jaxpipe.Pipeline,
    step: jax.stages.Compiled,
    config: gpt.GPTConfig,
    model: Callable[..., Roofline] = Roofline,
) -> Step:
    """Models the compiled step of a pipeline of a GPT; ``model`` is given what `Roofline` is."""
    program = HloProgram(step.as_text())
    shapes = weight_shapes(pipe.table.layers_per_chunk, config)
    rooflines = of_stages(pipe, lambda *where: model(program, shapes, *where))
    bodies = program.tick_bodies()
    table, stages = pipe.table, range(pipe.schedule.num_stages)
    gathers, reduces = pipe.options.zero.shards_weights, pipe.axes.num_shards(pipe.mesh) > 1
    parts = table.parts(gathers=gathers, reduces=reduces)
    names = [one.name for one in parts]
    # XLA leaves out the loop around a tick that runs once.
    inlined = [n for n, name in enumerate(names) if bodies[name] == program.entry]

    @functools.cache
    def of_trips(roofline: Roofline, body: str, trips: tuple[float, ...], branch: int) -> Spent:
        by_name = dict(zip(program.loops(body), trips, strict=True))
        return roofline.run(body, lambda loop: by_name[loop], branch)

    def trips_of(tick: int, stage: int) -> Callable[[Instruction], float]:
        trips = Trips(table, tick, stage)

        def of_tick(loop: Instruction) -> float:
            others = tick in inlined and scope_of(loop) is None
            return not others and is_of(loop, names[tick]) and trips(loop)

        return of_tick

    def trips_of_entry(stage: int) -> Callable[[Instruction], float]:
        def trips(loop: Instruction) -> float:
            inside = (trips_of(tick, stage)(loop) for tick in inlined)
            return next(filter(None, inside), runs_outside(program, table, loop, bodies))

        return trips

    def in_entry(tick: int, stage: int) -> Spent:
        """From the first loop of a tick to its last, with what they leave exposed of transfers."""
        rows = program.computations[program.entry]
        loops = [n for n, row in enumerate(rows) if row.opcode == "while" and scope_of(row)]
        own = [n for n in loops if is_of(rows[n], names[tick])]
        run = functools.partial(rooflines[stage].run, program.entry, trips_of_entry(stage))
        spent = run(until=own[-1] + 1)
        spent.subtract(run(until=own[0]))
        return spent

    def one(tick: int, stage: int) -> Spent:
        if tick in inlined:
            return in_entry(tick, stage)
        own = map(trips_of(tick, stage), program.loops(bodies[names[tick]]))
        *_, numbers = table.branches(list(filter(parts[tick].has, (Kind.F, Kind.B))))
        branch = numbers[table.exchange[tick]]
        return of_trips(rooflines[stage], bodies[names[tick]], tuple(own), branch)

    ticks = [[one(tick, stage) for stage in stages] for tick in range(table.num_ticks)]

    def outside(stage: int) -> Spent:
        """Times a stage outside of ticks."""
        spent = rooflines[stage].run(program.entry, trips_of_entry(stage))
        for tick in inlined:
            spent.subtract(ticks[tick][stage])
        return spent

    beside = [outside(stage) for stage in stages]
    work = np.array([[total(one) for one in by_stage] for by_stage in ticks])
    inside = sum((one for by_stage in [*ticks, beside] for one in by_stage), Counter())
    return Step(
        layer_passes(rooflines[0]),
        float((replay(table, work)[-1] + list(map(total, beside))).max()),
        scaled(inside, 1 / pipe.schedule.num_stages),
        device_bytes(step),
    )


def of_stages(
    pipe: jaxpipe.Pipeline, roofline: Callable[[Sequence[int], int], Roofline]
) -> list[Roofline]:
    """By stage, from the hosts of all devices and the stage's first one; equal links share one."""
    devices = pipe.mesh.devices
    hosts = [device.process_index for device in devices.flat]
    numbers = np.moveaxis(
        np.arange(devices.size).reshape(devices.shape), pipe.mesh.axis_names.index("stage"), 0
    )
    by_links: dict[tuple[float, ...], Roofline] = {}
    found = [roofline(hosts, int(of_stage.flat[0])) for of_stage in numbers]
    return [by_links.setdefault(one.links(), one) for one in found]


def is_of(loop: Instruction, tick: str) -> bool:
    """Whether a loop is one of the tick: others stand beside them where it is the only one of its
    loop, which is none then."""
    scope = scope_of(loop)
    return scope is None or scope.tick == tick


def runs_outside(
    program: HloProgram, table: TickTable, loop: Instruction, bodies: dict[str, str]
) -> float:
    """How often a loop of the entry runs, without those of ticks, on the first stage."""
    inside = (row.calls.get("body") for row in program.reached(loop.calls["body"], into_loops=True))
    scope = scope_of(loop)
    if {loop.calls["body"], *inside} & set(bodies.values()) or (scope and scope.tick):
        return 0
    if scope is None or scope.name not in ("gather", "reduce"):
        return known_trips(loop)
    edge = (table.gathers if scope.name == "gather" else table.reduces).edge
    return table.layers_per_chunk if scope.chunk is None else int(scope.chunk in edge.chunk[:, 0])


def layer_passes(roofline: Roofline) -> dict[str, Spent]:
    """One layer and microbatch by kind of action, the mean over its loops."""
    return {
        name: scaled(
            sum((roofline.body(loop.calls["body"]) for loop in loops), Counter()),
            1 / sum(map(layers_of, loops)),
        )
        for name, loops in roofline.program.layer_loops().items()
    }


@dataclasses.dataclass(frozen=True)
class Trips:
    """How often a loop of a tick's body runs on one stage."""

    table: TickTable
    tick: int
    stage: int

    def __call__(self, loop: Instruction) -> float:
        """Raises ValueError for a loop without a name that says so."""
        if (scope := scope_of(loop)) is None:
            raise ValueError(f"How often does this loop run?\n{loop.text[-600:]}")
        name, chunk, layer = scope.name, scope.chunk, scope.layer
        if name in PASSES:
            return self._layers(self.table.passes[Kind[name]], scope)
        table = self.table
        if name in ("gather", "store_gathered"):
            return self._pieces(table.gathers, chunk, layer)
        if name in ("reduce", "store_reduced"):
            return self._pieces(table.reduces, chunk, layer)
        if name.startswith("meet/receive"):
            places = [divmod(int(n), 2) for n in name.removeprefix("meet/receive").split("_")]
            slots = [table.rows.arrivals[number][late] for number, late in places]
            return sum(int(slot[self.tick, self.stage] != NONE) for slot in slots)
        column, virtual_stage = {
            "enter": (table.outer.embed != NONE, 0),
            "leave": (table.outer.head != NONE, -1),
            "embed_gradient": ((table.outer.embed_gradient != NONE).sum(axis=1), 0),
        }[name]
        here = table.schedule.placement.stages[virtual_stage] == self.stage
        return int(column[self.tick]) * (table.together or here)

    def _layers(self, cell: Cell, scope: Scope) -> int:
        place = self.tick, self.stage
        layers = int(cell.layers[place])
        if scope.chunk is None:
            return layers
        runs = all(getattr(cell, field)[place] == value for field, value in scope.cell)
        runs = runs and (scope.layer is None or scope.layer < layers)
        return int(cell.runs[place] and cell.chunk[place] == scope.chunk and runs)

    def _pieces(self, transfers: Transfers, chunk: int | None, layer: int | None) -> int:
        place = self.tick, self.stage
        own, first = transfers.chunk[place], transfers.piece[place]
        if own == NONE or chunk not in (None, own):
            return 0
        if transfers.whole:  # one loop over all layers, or one per chunk
            return self.table.layers_per_chunk if chunk is None else 1
        first //= transfers.shares
        # A loop, or one per layer, for each piece of the group: each runs for one layer.
        return int(layer is None or first <= layer < first + transfers.group)
