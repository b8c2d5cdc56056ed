"""Beam search for the lock-step clock: how long every tick lasts.

A tick ends when its slowest stage does, so its length is the decision that matters. Each length
worth trying lets some stage finish a forward or a backward; given the length, every stage fills it
layer by layer (`jaxpipe.schedule.search.tick_engine`). The search keeps, for every span of time,
the few states that waited least. Searches of several works, each in several ways, run side by side
and know nothing of each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxpipe.schedule.actions import Kind, Slice
from jaxpipe.schedule.search.tick_engine import (
    Engine,
    Flags,
    Floats,
    Ints,
    Ready,
    States,
    Work,
)
from jaxpipe.schedule.search.tick_options import Beam, Options, joined
from jaxpipe.schedule.search.tick_settings import Clock, Settings
from jaxpipe.schedule.search.tick_tails import Tails
from jaxpipe.schedule.search.tick_ways import by_rank, by_urgency

_SPANS = 12
"""Spans of time, per F+B+W of a chunk, or three messages if they take longer, within each of which
states compete."""
_MIN_LENGTHS, _MAX_LENGTHS = 3, 6
"""Lengths tried per state; twice as many find no better schedule at p=4."""
_LONGEST = 1.6
"""Longest tick, in chunks of the longer of F and B."""
_MAX_WIDTH = 8
"""States kept per span of time; fewer where that would exceed `Settings.cells`."""
_ROUNDING = 1e-9
"""Lengths are sums of layer costs: smaller differences, relative to F+B+W, count as none."""


class TickSearch:
    """Searches the lengths of the ticks that run some works, with equally many stages,
    microbatches and queues."""

    def __init__(self, works: Sequence[Work], trials: Sequence[Settings]) -> None:
        self.engine = engine = Engine(works)
        self.num_works, p = len(works), engine.num_stages
        # One column for every trial of every work.
        columns = [*itertools.product(range(len(works)), trials)]
        self.works = [work for work, _ in columns]
        clocks = [*map(Clock, works)]
        self.clocks = [clocks[work] for work in self.works]
        self.always = np.array([[c.largest.f, c.largest.b, c.largest.w] for c in self.clocks])
        self.message = np.array([c.largest.message if p > 1 else 0.0 for c in self.clocks])
        # A chunk's F, B and W end in ticks of their own, which may take longer than they do.
        self.span = np.maximum(self.always.sum(axis=1), 3 * self.message) / _SPANS
        self.rounding = self.always.sum(axis=1) * _ROUNDING
        self.stage_work = np.array([c.stage_work for c in self.clocks]).T
        self.drains = np.array([clocks[w].drains(trial) for w, trial in columns]).T
        tries = [trial.tries(p, clocks[work].num_ticks) for work, trial in columns]
        self.numbers = np.array([max(_MIN_LENGTHS, min(_MAX_LENGTHS, int(t))) for t in tries])
        self.widths = np.array(
            [max(1, min(_MAX_WIDTH, int(t / n))) for t, n in zip(tries, self.numbers, strict=True)]
        )
        self.by_rank = np.array([trial.by_rank for _, trial in columns])
        self.by_urgency = np.array([trial.by_urgency for _, trial in columns])
        self.forward_first = np.array([trial.first is Kind.F for _, trial in columns])
        self.eagerness = np.array([trial.eagerness for _, trial in columns])
        self.passes = np.array([c.passes for c in self.clocks])
        self.ways_back = np.array([c.ticks_back for c in self.clocks]).T
        # Every tick has room for a layer of any kind, so that none passes idle.
        self.shortest = np.array(
            [
                max(engine.longest_layers[work], trial.shortest * clocks[work].largest.f)
                for work, trial in columns
            ]
        )
        # Numbers that only depend on the shape of the work: sums of them tell states apart.
        kinds = (3, engine.num_queues, p)
        self.tails: Tails | None = None
        self.marks = np.random.RandomState(0).randint(0, 2**63, kinds, np.uint64)

    def best(
        self, makespans: Sequence[float], *, makespan: float = math.inf
    ) -> list[list[list[Slice]] | None]:
        """Of every work, the slices that every stage runs, in order, by the best of its searches'
        plans; None if no plan ends before that work's makespan.

        Args:
          makespan: Also None for a work none of whose plans ends before this. A search stops once
            all that is left of it must end later. Until then it runs as it would without a
            makespan, so the plans that do end before are the same.
        """
        ends = np.array([makespans[work] for work in self.works])
        if self.engine.ordered and makespan < math.inf:
            messages = [self.message[self.works.index(work)] for work in range(self.num_works)]
            self.tails = Tails(self.engine, messages)
        plans = self._search(ends, makespan)
        best: list[list[Ints] | None] = []
        for work in range(self.num_works):
            found = [
                k
                for k, other in enumerate(self.works)
                if other == work and k in plans and ends[k] < makespan
            ]
            best.append(plans[min(found, key=lambda k: ends[k])] if found else None)
        return self._slices(best)

    def _search(self, ends: Floats, makespan: float) -> dict[int, list[Ints]]:
        """By search, the layers that run in every tick of its best plan. Lowers the ends."""
        # How every state came about: the state before, and the layers of the tick.
        history: list[tuple[Ints, NDArray[np.int16]]] = []
        last: dict[int, tuple[int, NDArray[np.int16]]] = {}
        spans: dict[int, list[tuple[Options, Beam]]] = {}
        beam, total = self._start(), len(self.works)
        history.append((beam.options.parents, beam.options.counts))
        hopes = np.zeros(total, np.int64)
        while True:
            options = self._options(beam, ends)
            hopes += np.bincount(options.searches[options.bound < makespan], minlength=len(hopes))
            for k in (options.left == 0).nonzero()[0].tolist():
                search = int(options.searches[k])
                if options.time[k] < ends[search]:
                    ends[search] = options.time[k]
                    last[search] = int(options.parents[k]), options.counts[..., k]
            self._put_off(options.at(options.left > 0), beam, spans)
            while spans:
                chosen = self._best_of(spans.pop(min(spans)), hopes, makespan, total)
                if chosen is not None:
                    break
            else:
                break
            beam = chosen
            history.append((beam.options.parents, beam.options.counts))
            total += len(beam.numbers)
        return {search: _ticks(history, *end) for search, end in last.items()}

    def _start(self) -> Beam:
        """Nothing is done, in every search."""
        number, p = len(self.works), self.engine.num_stages
        searches = np.arange(number, dtype=np.int32)
        left = [self.engine.num_layers[work] for work in self.works]
        options = Options(
            np.array([searches, searches - number, searches, left], np.int32),
            np.zeros((4 + p, number)),
            np.zeros(number, np.uint64),
            np.zeros((3, p, number), np.int16),
        )
        return Beam(options, self.engine.start(self.works), searches)

    def _put_off(
        self, options: Options, beam: Beam, spans: dict[int, list[tuple[Options, Beam]]]
    ) -> None:
        """Sorts options by the span of time in which they end."""
        numbers = (options.time / self.span[options.searches]).astype(np.int64)
        order = numbers.argsort(kind="stable")
        options, numbers = options.at(order), numbers[order]
        edges = [0, *((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist(), len(numbers)]
        for start, end in itertools.pairwise(edges):
            if start < end:
                part = options.at(slice(start, end)), beam
                spans.setdefault(int(numbers[start]), []).append(part)

    def _best_of(
        self,
        parts: Sequence[tuple[Options, Beam]],
        hopes: NDArray[np.int64],
        makespan: float,
        total: int,
    ) -> Beam | None:
        """Of every search that has hopes, the states with the best scores, no two with the same
        work done.

        Args:
          hopes: by search, how many options that wait may end before the makespan.
        """
        options = joined(part for part, _ in parts)
        which = np.repeat(np.arange(len(parts)), [len(part.left) for part, _ in parts])
        alive = hopes[options.searches] > 0
        hopes -= np.bincount(options.searches[options.bound < makespan], minlength=len(hopes))
        if not alive.all():
            options, which = options.at(alive), which[alive]
        order = np.lexsort((options.score, options.searches))
        searches, done = options.searches[order], options.done[order]
        # The first of each: sorting by what is done keeps the order among equals.
        same = np.lexsort((done, searches))
        again = np.zeros(len(order), bool)
        again[same[1:]] = (done[same[1:]] == done[same[:-1]]) & (
            searches[same[1:]] == searches[same[:-1]]
        )
        order, searches = order[~again], searches[~again]
        rank = np.arange(len(order)) - searches.searchsorted(searches)
        order = order[rank < self.widths[searches]]
        if not len(order):
            return None
        # States of one round lie together.
        order = order[which[order].argsort(kind="stable")]
        chosen, which = options.at(order), which[order]
        states = []
        for part, places in itertools.groupby(
            zip(which.tolist(), chosen.places.tolist(), strict=True), key=lambda item: item[0]
        ):
            columns = np.array([place for _, place in places])
            states.append(parts[part][1].states.take(columns))
        new = States(
            np.concatenate([each.fields for each in states], axis=-1),
            np.concatenate([each.works for each in states]),
            states[0].rows,
        )
        self.engine.tick(new, chosen.counts.astype(np.int32))
        numbers = np.arange(total, total + len(order), dtype=np.int32)
        return Beam(chosen, new, numbers)

    def _options(self, beam: Beam, ends: Floats) -> Options:
        """What the next tick may run, for every length and way worth trying."""
        ready, searches = self.engine.ready(beam.states), beam.options.searches
        lengths, valid = self._lengths(ready, searches)
        lengths += self.rounding[searches][:, None]
        under_way = beam.states["layers"][:2] > 0
        found, rows = [], []
        for ways in (self.by_rank, self.by_urgency):
            some = ways[searches].nonzero()[0]
            if not len(some):
                continue
            part = ready.take(some)
            left = np.broadcast_to(lengths[some], (self.engine.num_stages, *lengths[some].shape))
            if ways is self.by_rank:
                counts = by_rank(part, left)
            else:
                first = self.forward_first[searches[some]]
                counts = by_urgency(part, under_way.take(some, axis=2), left, first)
            found.append(np.array(counts, np.int16))
            rows.append(some)
        if len(found) == 1:
            return self._times(beam, ready, rows[0], found[0], valid, ends)
        counted = np.concatenate(found, axis=2)
        return self._times(beam, ready, np.concatenate(rows), counted, valid, ends)

    def _times(
        self,
        beam: Beam,
        ready: Ready,
        rows: NDArray[np.intp],
        counts: NDArray[np.int16],
        valid: Flags,
        ends: Floats,
    ) -> Options:
        """The times after ticks, and the scores that they make; only of those that may end before
        the best plan so far.

        Args:
          rows: the states that the ticks follow.
          counts: layers by kind, stage, row and length.
        """
        before, p = beam.options, self.engine.num_stages
        f_cost, b_cost, w_cost = (cost.take(rows, axis=1)[..., None] for cost in ready.costs)
        used = counts[0] * f_cost + counts[1] * b_cost
        spent = used + counts[2] * w_cost
        busy = before.busy.take(rows, axis=1)[..., None] + spent
        longest = spent.max(axis=0)
        starts, message = before.time[rows], self.message[before.searches[rows]]
        time = starts[:, None] + (longest + message[:, None])
        bound = time + (self._least_rest(beam).take(rows, axis=1)[..., None] - busy).max(axis=0)
        latest = (ends - self.rounding)[before.searches[rows]]
        # If no stage runs anything, all of them wait for good.
        chosen = (valid[rows] & (longest > 0) & (bound < latest[:, None])).ravel().nonzero()[0]
        state = rows[chosen // valid.shape[1]]
        searches = before.searches[state]
        times = np.empty((4 + p, len(state)))
        times[1], times[3] = time.take(chosen), bound.take(chosen)
        times[4:] = busy.reshape(p, -1).take(chosen, axis=1)
        if self.tails is not None:
            waits = before.time + self.tails.rest(beam.states)
            np.maximum(times[3], waits[state], out=times[3])
        time, busy = times[1], times[4:]
        # Sums over stages go from the first to the last: the same everywhere.
        spans = np.empty((1 + p, len(state)))
        spans[0], spans[1:] = before.critical[state], used.reshape(p, -1).take(chosen, axis=1)
        times[2] = critical = spans.cumsum(axis=0)[p]
        mean = busy.cumsum(axis=0)[p - 1]
        worst = time + (self.drains.take(searches, axis=1) - busy).max(axis=0)
        times[0] = worst + (time - mean / p) - self.eagerness[searches] * critical / p
        counted = counts.reshape(3, p, -1).take(chosen, axis=2)
        queues = np.array([*ready.queues, np.zeros_like(ready.queues[0])])
        marks = self.marks[np.arange(3)[:, None, None], queues, np.arange(p)[:, None]]
        marks = counted.astype(np.uint64) * marks.take(state, axis=2)
        done = before.done[state] + marks.sum(axis=(0, 1), dtype=np.uint64)
        left = before.left[state] - counted.sum(axis=(0, 1), dtype=np.int32)
        numbers = np.array([searches, beam.numbers[state], state, left], np.int32)
        return Options(numbers, times, done, counted)

    def _least_rest(self, beam: Beam) -> Floats:
        """By stage and state, the time from now on that its work takes at least, what is done
        already included, once the next tick is over.

        A tick that some stage needs ends with a message. A stage ends at most an F and a B in it,
        one of them if it fills ticks by urgency, and its last gradient goes back to the first
        virtual stage in ticks of their own.
        """
        searches, states = beam.options.searches, beam.states
        work: Floats = self.stage_work.take(searches, axis=1)
        messages = self.message[searches]
        if not messages.any():
            return work
        passes = self.passes[searches]
        forwards = passes - states["done_f"].sum(axis=0)
        backwards = passes - states["done_b"].sum(axis=0)
        ticks = np.maximum(forwards, backwards)
        np.add(forwards, backwards, out=ticks, where=~self.by_rank[searches])
        ticks += self.ways_back.take(searches, axis=1) - 1
        work += messages * np.where(backwards > 0, ticks, 0)
        return work

    def _lengths(self, ready: Ready, searches: Ints) -> tuple[Floats, Flags]:
        """By state, lengths that let some stage finish its F, its B, or both, evenly thinned out;
        and which of them are there."""
        always, rounding = self.always[searches], self.rounding[searches][:, None]
        forward, backward, _ = (
            rooms * prices for rooms, prices in zip(ready.rooms, ready.costs, strict=True)
        )
        lengths = np.concatenate([forward, backward, forward + backward, always.T]).T
        shortest = self.shortest[searches][:, None]
        longest = np.maximum(shortest, _LONGEST * always[:, :2].max(axis=1)[:, None])
        fits = (shortest - rounding <= lengths) & (lengths <= longest + rounding)
        kept = np.where(fits, np.rint(lengths / rounding) * rounding, np.inf)
        kept.sort(axis=1)
        kept[:, 1:][kept[:, 1:] == kept[:, :-1]] = np.inf
        kept.sort(axis=1)
        sizes = (kept < np.inf).sum(axis=1)
        kept[:, 0] = np.where(sizes, kept[:, 0], shortest[:, 0])
        sizes = np.maximum(sizes, 1)
        numbers = np.minimum(self.numbers[searches], sizes)[:, None]
        turns = np.arange(self.numbers.max())
        places = np.minimum(turns * sizes[:, None] // numbers, kept.shape[1] - 1)
        valid = turns < numbers
        return np.where(valid, np.take_along_axis(kept, places, axis=1), shortest), valid

    def _slices(self, plans: Sequence[list[Ints] | None]) -> list[list[list[Slice]] | None]:
        """The slices of every work's plan."""
        works = [work for work, plan in enumerate(plans) if plan is not None]
        states = self.engine.start(works)
        rows: list[list[list[Slice]] | None] = [None for _ in plans]
        for work in works:
            rows[work] = [[] for _ in range(self.engine.num_stages)]
        some = [plan for plan in plans if plan is not None]
        for tick in range(max(map(len, some), default=0)):
            counts = np.zeros((3, self.engine.num_stages, len(works)), np.int32)
            self.engine.ready(states)
            for column, (work, plan) in enumerate(zip(works, some, strict=True)):
                if tick < len(plan):
                    counts[..., column] = plan[tick]
                    parts = self.engine.slices(states, counts, column, tick)
                    for row, part in zip(rows[work] or (), parts, strict=True):
                        row.extend(part)
            self.engine.tick(states, counts)
        return rows


def _ticks(
    history: Sequence[tuple[Ints, NDArray[np.int16]]], parent: int, counts: NDArray[np.int16]
) -> list[Ints]:
    """The layers that run in every tick up to one whose state before is given."""
    starts = np.cumsum([0, *(len(parents) for parents, _ in history)])
    found = [counts]
    while True:
        part = int(starts.searchsorted(parent, side="right")) - 1
        column = parent - int(starts[part])
        if part == 0:
            return [each.astype(np.int32) for each in reversed(found)]
        parents, before = history[part]
        found.append(before[..., column])
        parent = int(parents[column])
