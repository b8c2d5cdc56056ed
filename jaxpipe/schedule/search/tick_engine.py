"""The lock-step clock at work: fills ticks of given lengths, in many states at once.

The states of all searches lie side by side in arrays, whose last axis counts them: a tick takes as
many array operations for hundreds of states as for one. `jaxpipe.schedule.search.tick_search`
decides how long the ticks are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxpipe.schedule.actions import Action, Kind, Schedule, Slice
from jaxpipe.schedule.simulate import Costs

_NONE = -1
"""No queue."""
_NEVER = 2**30
"""Behind every place in a queue."""

_F, _B, _W = range(3)
"""The kinds of action, as indices."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of the stages; passes are those of `Schedule.number`.

    Args:
      schedule: placement and microbatches; its orders are not read.
      costs: of every virtual stage, however many layers it has.
      forwards: per stage, its queues of forwards. A stage starts the head of the first queue whose
        head is ready.
      backwards: likewise.
      weights: per stage, the order of its W; None for that of its B.
      limits: per stage and queue of forwards, in flight below which the queue may start another.
      fused: the passes whose backward is BW.
      ranks: for F, B and W, per pass, its place in its stage's order; None if there is no order
        yet.
    """

    schedule: Schedule
    layer_counts: tuple[int, ...]
    costs: tuple[Costs, ...]
    forwards: Sequence[Sequence[Sequence[int]]]
    backwards: Sequence[Sequence[Sequence[int]]]
    weights: Sequence[Sequence[int]] | None
    limits: Sequence[Sequence[int]]
    fused: frozenset[int] = frozenset()
    ranks: tuple[Sequence[int], ...] | None = None


class States:
    """What the stages have done before a tick, by field, stage and state.

    Args:
      fields: all of them in one array, as `Engine.rows` lists them.
      works: of every state, whose work it is.
    """

    def __init__(self, fields: Ints, works: Ints, rows: dict[str, slice]) -> None:
        self.fields, self.works, self.rows = fields, works, rows

    def __getitem__(self, name: str) -> Ints:
        """A field: by kind or queue, stage and state; a view."""
        return self.fields[self.rows[name]]

    def take(self, numbers: NDArray[np.intp]) -> States:
        """Copies of some states."""
        return States(self.fields.take(numbers, axis=-1), self.works.take(numbers), self.rows)


class Ready(NamedTuple):
    """What stages can run in the next tick, by stage and state; lists are by kind: F, B, W.

    Args:
      rooms: the layers left to run; for W those whose B has run.
      costs: of a layer.
      ranks: in the stage's order; empty if there is no order yet.
      same: whether W is that of the backward.
      blocked: whether memory keeps every forward waiting.
      queues: of F and B, the queues of the passes that run or would start.
    """

    rooms: list[Ints]
    costs: list[Floats]
    ranks: list[Ints]
    same: Flags
    blocked: Flags
    queues: list[Ints]

    def take(self, numbers: NDArray[np.intp]) -> Ready:
        """For some states."""

        def some(rows: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
            return [row.take(numbers, axis=1) for row in rows]

        same, blocked = some((self.same, self.blocked))
        lists = self.rooms, self.costs, self.ranks, self.queues
        rooms, costs, ranks, queues = [some(rows) for rows in lists]
        return Ready(rooms, costs, ranks, same, blocked, queues)


class Engine:
    """Runs ticks of given lengths, for works with equally many stages, microbatches and queues."""

    def __init__(self, works: Sequence[Work]) -> None:
        work = works[0]
        self.works, self.num_stages = works, work.schedule.num_stages
        self.none = max(work.schedule.num_passes for work in works)
        self.num_queues = len(work.forwards[0])
        self.ordered = work.weights is not None
        self._count_layers()
        self._number_queues()
        sizes = {"done_f": self.num_queues, "done_b": self.num_queues, "done_w": 1, "in_flight": 1}
        # The pass under way, its layers that are done, and its queue; then what `ready` found.
        sizes |= {"running": 2, "layers": 3, "queue": 2, "passes": 3, "starts": 2}
        if not self.ordered:
            # W to come, where Work does not order them.
            most = max(max(map(max, work.limits)) for work in works)
            sizes |= {"num_pending": 1, "pending": 1 + most}
        ends = np.cumsum([*sizes.values()]).tolist()
        self.rows = {
            name: slice(end - size, end)
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }

    def _count_layers(self) -> None:
        """Layers and costs by pass, the last being none."""
        shape = len(self.works), self.none + 1
        self.num_layers = []
        layers, fused = np.zeros(shape, np.int32), np.zeros(shape, bool)
        costs = np.ones((3, *shape))
        for w, work in enumerate(self.works):
            m, number = work.schedule.num_microbatches, work.schedule.num_passes
            layers[w, :number] = np.repeat(work.layer_counts, m)
            fused[w, [*work.fused]] = True
            self.num_layers.append(3 * int(layers[w].sum()) - int(layers[w][fused[w]].sum()))
            for kind, action in enumerate((Kind.F, Kind.B, Kind.W)):
                costs[kind, w, :number] = np.repeat([cost.of(action) for cost in work.costs], m)
            both = np.repeat([cost.of(Kind.BW) for cost in work.costs], m)
            costs[_B, w, :number] = np.where(fused[w, :number], both, costs[_B, w, :number])
            costs[:, w, :number] /= layers[w, :number]
        self.longest_layers = np.where(layers, costs, 0).max(axis=(0, 2)).tolist()
        self.layers, self.fused, self.costs = layers.ravel(), fused.ravel(), [*costs.reshape(3, -1)]

    def _number_queues(self) -> None:
        """The queues as arrays, and where each pass and what it waits for stand in them."""
        shape = len(self.works), self.none + 1
        self.heads: list[Ints] = []  # the passes of every queue, one after another
        self.size = 1 + max(
            len(queue)
            for work in self.works
            for stages in (work.forwards, work.backwards)
            for queues in stages
            for queue in queues
        )
        # By kind and pass: its queue, and its place there.
        queues, places = np.zeros((2, *shape), np.int32), np.full((2, *shape), _NEVER, np.int32)
        for kind in (_F, _B):
            heads = np.full(
                (len(self.works), self.num_queues, self.num_stages, self.size), self.none, np.int32
            )
            for w, work in enumerate(self.works):
                for d, stage in enumerate((work.forwards, work.backwards)[kind]):
                    for j, queue in enumerate(stage):
                        passes = np.array(queue, np.int32)
                        heads[w, j, d, : len(queue)] = passes
                        queues[kind, w, passes] = j * self.num_stages + d
                        places[kind, w, passes] = np.arange(len(queue))
            self.heads.append(heads.ravel())
        self.queues, self.places = [*queues.reshape(2, -1)], [*places.reshape(2, -1)]
        # By kind and pass, the queues and places of its inputs. Place -1 is always done.
        before, after = np.full((2, *shape), self.none)
        first, last = np.zeros((2, *shape), bool)
        for w, work in enumerate(self.works):
            m, depth = work.schedule.num_microbatches, work.schedule.placement.depth
            numbers = np.arange(work.schedule.num_passes)
            first[w, numbers] = numbers // m % depth == 0
            last[w, numbers] = (numbers // m + 1) % depth == 0
            before[w, numbers] = np.where(first[w, numbers], numbers, numbers - m)
            after[w, numbers] = np.where(last[w, numbers], numbers, numbers + m)
        base = np.arange(len(self.works))[:, None] * (self.none + 1)

        def inputs(kind: int, numbers: NDArray[np.intp], free: Flags) -> tuple[int, Ints, Ints]:
            needed = base + numbers
            where = np.where(free, -1, places[kind].take(needed))
            return kind, queues[kind].take(needed).ravel(), where.ravel()

        own = inputs(_F, np.arange(self.none + 1), np.zeros(shape, bool))
        self.inputs = [[inputs(_F, before, first)], [own, inputs(_B, after, last)]]
        self.limits = np.array([work.limits for work in self.works]).transpose(2, 1, 0)
        self.least = self.limits.min(axis=0)
        weights = np.full((len(self.works), self.num_stages, self.size), self.none, np.int32)
        self.ranks: list[Ints] = []
        if self.ordered:
            for w, work in enumerate(self.works):
                for d, order in enumerate(work.weights or ()):
                    weights[w, d, : len(order)] = order
            ranks = np.zeros((3, *shape), np.int32)
            for w, work in enumerate(self.works):
                ranks[:, w, : work.schedule.num_passes] = np.array(work.ranks)
            self.ranks = [*ranks.reshape(3, -1)]
        self.weights: Ints = weights.ravel()

    def start(self, works: Sequence[int]) -> States:
        """Nothing is done, of some works."""
        fields = np.zeros(([*self.rows.values()][-1].stop, self.num_stages, len(works)), np.int32)
        states = States(fields, np.array(works, np.int32), self.rows)
        states["running"][:] = self.none
        return states

    def ready(self, states: States) -> Ready:
        """What the stages can run now; writes the passes and the queues that start into the
        states."""
        number = len(states.works)
        base = states.works * np.int32(self.none + 1)
        done = [states["done_f"].ravel(), states["done_b"].ravel()]
        passes, starts = states["passes"], states["starts"]
        columns = np.arange(number, dtype=np.int32)
        for kind in (_F, _B):
            running = states["running"][kind]
            passes[kind], starts[kind] = self._next(states, kind, base, done, columns)
            idle = running == self.none
            np.copyto(passes[kind], running, where=~idle)
            np.copyto(starts[kind], _NONE, where=~idle)
        forward, backward = passes[_F], passes[_B]
        weights = passes[_W] = self._weights(states)
        f_layers, b_layers, w_layers = states["layers"]
        read = base + weights
        place = self.queues[_B].take(read) * number + columns
        is_done = done[_B].take(place) > self.places[_B].take(read)
        same = weights == backward
        room = np.where(is_done, self.layers.take(read), np.where(same, b_layers, w_layers))
        rooms = [
            self.layers.take(base + forward) - f_layers,
            self.layers.take(base + backward) - b_layers,
            room - w_layers,
        ]
        costs = [self.costs[kind].take(base + passes[kind]) for kind in range(3)]
        ranks = [row.take(base + passes[kind]) for kind, row in enumerate(self.ranks)]
        blocked = (forward == self.none) & (
            states["in_flight"][0] >= self.least.take(states.works, axis=1)
        )
        queues = [
            np.where(starts[kind] == _NONE, states["queue"][kind], starts[kind])
            for kind in (_F, _B)
        ]
        return Ready(rooms, costs, ranks, same & (weights != self.none), blocked, queues)

    def _next(
        self, states: States, kind: int, base: Ints, done: Sequence[Ints], columns: Ints
    ) -> tuple[Ints, Ints]:
        """The F or B that every stage can start, and its queue."""
        number, p, size = len(columns), self.num_stages, self.size
        found = np.full((p, number), self.none, np.int32)
        queue = np.full((p, number), _NONE, np.int32)
        stages = np.arange(p, dtype=np.int32)[:, None] * size
        for j in reversed(range(self.num_queues)):
            first = (states.works * self.num_queues + j) * (p * size)
            heads = done[kind].reshape(-1, p, number)[j]
            head = self.heads[kind].take(first + stages + heads)
            read = base + head
            is_ready = head != self.none
            for of, queues, places in self.inputs[kind]:
                place = queues.take(read) * number + columns
                is_ready &= done[of].take(place) > places.take(read)
            if kind == _F:
                is_ready &= states["in_flight"][0] < self.limits[j].take(states.works, axis=1)
            np.copyto(found, head, where=is_ready)
            np.copyto(queue, j, where=is_ready)
        return found, queue

    def _weights(self, states: States) -> Ints:
        """The next W of every stage, which may be that of the backward it can run."""
        if not self.ordered:
            pending = states["pending"][0]
            found: Ints = np.where(states["num_pending"][0] > 0, pending, states["passes"][_B])
            return found
        stages = np.arange(self.num_stages, dtype=np.int32)[:, None] * self.size
        first = states.works * (self.num_stages * self.size)
        head: Ints = self.weights.take(first + stages + states["done_w"][0])
        return head

    def tick(self, new: States, counts: Ints) -> None:
        """Runs layers, by kind, stage and state, of what `ready` found."""
        states, layers, in_flight = new, new["layers"], new["in_flight"][0]
        base = states.works * np.int32(self.none + 1)
        for kind, done in ((_F, states["done_f"]), (_B, states["done_b"])):
            runs, number = counts[kind] > 0, states["passes"][kind]
            starts = runs & (states["starts"][kind] != _NONE)
            np.copyto(states["queue"][kind], states["starts"][kind], where=starts)
            if kind == _F:
                in_flight += starts
            elif not self.ordered:
                num_pending = states["num_pending"][0]
                d, column = starts.nonzero()
                states["pending"][num_pending[d, column], d, column] = number[d, column]
                num_pending += starts
            ends = self._run(layers[kind], counts[kind], base + number)
            d, column = ends.nonzero()
            done[states["queue"][kind][d, column], d, column] += 1
            np.copyto(states["running"][kind], np.where(ends, self.none, number), where=runs)
            if kind == _B:
                in_flight -= ends & self.fused.take(base + number)
        ends = self._run(layers[_W], counts[_W], base + states["passes"][_W])
        in_flight -= ends
        states["done_w"][0] += ends
        if not self.ordered:
            d, column = ends.nonzero()
            pending = states["pending"]
            pending[:-1, d, column] = pending[1:, d, column]
            states["num_pending"][0] -= ends

    def _run(self, layers: Ints, counts: Ints, passes: Ints) -> Flags:
        """Adds layers to those that are done; where that ends a pass."""
        layers += counts
        ends: Flags = (counts > 0) & (layers == self.layers.take(passes))
        np.copyto(layers, 0, where=ends)
        return ends

    def slices(self, states: States, counts: Ints, column: int, tick: int) -> Iterator[list[Slice]]:
        """What every stage runs in a tick of one state."""
        passes, layers = states["passes"][..., column], states["layers"][..., column]
        work = int(states.works[column])
        schedule, base = self.works[work].schedule, work * (self.none + 1)
        for row in zip(*(a.T.tolist() for a in (passes, layers, counts[..., column])), strict=True):
            parts = []
            for kind, (number, done, count) in enumerate(zip(*row, strict=True)):
                if count:
                    backward = Kind.BW if self.fused[base + number] else Kind.B
                    s, i = schedule.place(number)
                    # F goes up through the layers, the others go down.
                    hi = done + count if kind == _F else int(self.layers[base + number]) - done
                    action = Action(s, (Kind.F, backward, Kind.W)[kind], i)
                    parts.append(Slice(tick, action, hi - count, hi))
            yield parts
