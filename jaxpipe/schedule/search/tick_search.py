"""The search for orders and ticks that end early on the device clock, under a memory limit.

The order that ends first on the free-running clock may wait for late messages, and one that ends
later may not. So this search changes all at once: an action moves to another place in its order or
to another tick, or a W shares the tick of the action before. What follows moves on where it must,
and a prompt message mostly stays prompt. A change that delays the end is undone. Most changes are
of actions on the longest chain, since only they can shorten it. If nothing has ended sooner for
long, a few changes may delay the end, and without success the search goes back to the best.

Most changes move few actions. Times before the first of their ticks stay as they are, and so does
the time from the last of them to the end: only the ticks between are run anew.
"""

import dataclasses
import math
import operator
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxpipe.schedule.actions import Schedule, split_action, split_backwards
from jaxpipe.schedule.search.order_search import NumberedActions
from jaxpipe.schedule.simulate import Costs, ticks

_ON_CHAIN, _DRAWS = 0.8, 8
"""Share of changes to actions of the longest chain, and how many are drawn to find one."""
_MOVES, _SHIFTS = 0.5, 0.3
"""Shares of changes that move an action in its order and to another tick; the others let a W share
a tick."""
_FARTHEST, _MOST_TICKS = 6, 2
"""Places, and ticks, that an action moves at most."""
_KEEPS = 0.7
"""Share of changes after which messages that were prompt are prompt."""
_PROMPT, _PROMPT_ACTIONS = 0.1, 8
"""Largest share of moves after which all messages are made prompt, and how many actions that takes
per move."""
_MOST_FOLLOW = 60
"""A change after which more actions move is undone: few of these help, and all take long."""
_STALLED, _KICKS, _KICKED = 1200, 12, 0.1
"""Changes without a better schedule after which the end may be later by this share, and the most
changes for which it may."""
_CHOSEN, _FOLLOWED, _RUN, _MADE_PROMPT = 13.0, 0.75, 0.13, 0.7
"""Microseconds that it takes to choose a change, per action that moves with it, per stage and pair
with late messages to run a tick, and per step of making all messages prompt."""
_NONE = -1
"""The tick before the first, and no action or tick."""
_BITS = 44
"""Times are multiples of the work's share of two to this power, so that sums are exact."""
_ROUNDING = 1e-9


def read_promptly(schedule: Schedule, costs: Sequence[Costs]) -> tuple[Schedule, float] | None:
    """Finds ticks of an order, split, in which every message is read in the tick after it was sent.

    Then no message is late, and no stage waits for a message before it reads it, as on the
    free-running clock. Some W share ticks if there are no such ticks otherwise, which delays what
    is sent.

    Returns:
      The schedule, and when it ends on the device clock; None if there are no such ticks.
    """
    search = TickSearch(schedule, costs, cap=0)
    return (search.found(), search.end) if search.make_prompt() else None


class TickSearch(NumberedActions):
    """A search for orders and ticks of a schedule, split, that end sooner on the device clock.

    The order of a stage is a ring: its head, whose number is after those of all actions, stands
    before its first action and after its last. It is in tick `_NONE`, and stands for no action.

    Args:
      costs: costs of every virtual stage.
      cap: the most chunks in flight on a stage.

    Attributes:
      before, after: neighbors in the order.
      loads: chunks in flight after an action.
      shares: whether a W runs in the tick of the action before it, if it may.
      senders, readers: actions of another stage whose result an action reads, and that read its.
      work: time that every stage works, by tick.
      prompt: pairs of stages between which messages end each tick.
      late: how many late messages each pair of stages has.
      edges: who waits for a late message from whom, sender and receiver.
      sent: the tick whose end awaits the message that an action reads; `_NONE` if it is late.
      starts, tails: when every stage starts each tick, and the time from then to the end.
      end, best_end: when this schedule ends, and the best so far.
      limit: a change that ends later is undone.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[Costs], cap: int) -> None:
        super().__init__(split_backwards(schedule), costs)
        self.schedule, self.cap = schedule, cap
        size, num_stages = len(self.actions), len(self.rows)
        self.rendezvous = any(cost.rendezvous for cost in costs)
        message = max(cost.message for cost in costs)
        whole = math.fsum(self.durations) + size * message
        unit = math.ldexp(1.0, math.frexp(whole)[1] - _BITS)
        self.durations = [round(duration / unit) * unit for duration in self.durations]
        self.message = round(message / unit) * unit
        self.senders, self.readers = [size] * size, [size] * size
        for number, inputs in enumerate(self.inputs):
            for other, _ in inputs:
                if self.stages[other] != self.stages[number]:
                    self.senders[number], self.readers[other] = other, number
        self.first_w = 2 * size // 3
        self.chunks = [action.virtual_stage for action in self.actions]
        self.before, self.after = [_NONE] * (size + num_stages), [_NONE] * (size + num_stages)
        self.loads, self.shares = [0] * (size + num_stages), [False] * size
        given = {
            self.numbers[part]: tick
            for order, row in zip(schedule.orders, ticks(schedule), strict=True)
            for action, tick in zip(order, row, strict=True)
            for part in split_action(action)
        }
        self.ticks = [given[number] for number in range(size)] + [_NONE] * num_stages
        for stage, row in enumerate(self.rows):
            last = head = size + stage
            for number in row:
                self.before[number], self.after[last] = last, number
                self.loads[number] = self.loads[last] + self.held[number]
                self.shares[number] = self.ticks[number] == self.ticks[last]
                last = number
            self.before[head], self.after[last] = last, head
        length = max(self.ticks) + 1
        self.work = [[0.0] * num_stages for _ in range(length)]
        self.prompt: list[list[tuple[int, int]]] = [[] for _ in range(length)]
        self.late: dict[tuple[int, int], int] = {}
        self.sent = [_NONE] * size
        self.starts, self.tails = [[0.0] * num_stages], [[0.0] * num_stages]
        self.left, self.since = 0.0, 0
        for number in range(size):
            self.work[self.ticks[number]][self.stages[number]] += self.durations[number]
            if self.senders[number] < size:
                pair = self.stages[self.senders[number]], self.stages[number]
                self.late[pair] = self.late.get(pair, 0) + 1
        self.end = self.best_end = self.limit = math.inf
        self.edges = self._both_ways(self.late)
        self._put(dict(enumerate(self.ticks[:size])))
        self._ends_in_time({}, anew=True)
        # `random` is the same on every Python since 3.2; `randrange` is not.
        self.random = random.Random(0).random

    def improve(self, bound: float, seconds: float) -> None:
        """Changes the schedule for the better, and goes on from there when called again.

        Args:
          bound: no schedule ends before this.
          seconds: about the time that this takes, as for `search_orders`.
        """
        self.left, kicks = 1e6 * seconds, 0
        prompt = min(_PROMPT, _PROMPT_ACTIONS / len(self.actions))
        while self.left > 0 and self.best_end > bound * (1 + _ROUNDING):
            self.left -= _CHOSEN
            self.since, kicks = self.since + 1, kicks - 1
            if self.since > _STALLED:
                self._go_back()
                self.since, kicks = 0, 2 + self._below(_KICKS)
            self.limit = self.end * (1 + (_KICKED if kicks > 0 else _ROUNDING))
            number, kind = self._chosen(), self.random()
            if kind < _MOVES:
                places = self._below(2 * _FARTHEST + 1) - _FARTHEST
                if moved := self._move(number, places):
                    if self.random() < prompt:
                        improved = self.make_prompt()
                    else:
                        improved = self._try(moved, self._in_turn_ticks(moved))
                    if not improved:
                        self._move(number, -places)
            elif kind < _MOVES + _SHIFTS or number < self.first_w:
                tick = self.ticks[number] + self._below(2 * _MOST_TICKS + 1) - _MOST_TICKS
                tick = self._least(number, tick)
                if tick != self.ticks[number]:
                    given, self.ticks[number] = {number: self.ticks[number]}, tick
                    self._try([number], given)
            elif self._may_share(number):
                self.shares[number] ^= True
                if not self._try([number], {}):
                    self.shares[number] ^= True
        self._go_back()

    def found(self) -> Schedule:
        """Returns the schedule in these orders and ticks."""
        rows = list[list[int]]()
        for head in range(len(self.actions), len(self.after)):
            rows.append([])
            number = self.after[head]
            while number != head:
                rows[-1].append(number)
                number = self.after[number]
        in_ticks = tuple(tuple(self.ticks[number] for number in row) for row in rows)
        return dataclasses.replace(
            self.schedule, orders=self.orders(rows), ticks=in_ticks, peak_in_flight=None
        )

    # Changes.

    def _below(self, number: int) -> int:
        return int(self.random() * number)

    def _chosen(self) -> int:
        """Chooses an action to change, mostly one on the longest chain."""
        number, latest = 0, self.end * (1 - _ROUNDING)
        for _ in range(_DRAWS if self.random() < _ON_CHAIN else 1):
            number = self._below(len(self.actions))
            tick, stage = self.ticks[number], self.stages[number]
            if self.starts[tick][stage] + self.tails[tick][stage] >= latest:
                break
        return number

    def _move(self, number: int, places: int) -> list[int]:
        """Moves an action so many places on; lists those that it passed and itself in their new
        order, and what follows them. The list is empty, and nothing moves, if it may not."""
        size, held, loads, later = len(self.actions), self.held[number], self.loads, places > 0
        step, change = (self.after, -held) if later else (self.before, held)
        passed, other = list[int](), number
        for _ in range(abs(places)):
            other = step[other]
            if other >= size or loads[other] + change > self.cap:
                return []
            if self.in_turn(*((number, other) if later else (other, number))):
                return []
            passed.append(other)
        previous = other if later else self.before[other]
        if not passed or loads[previous] + (change if later else 0) + held > self.cap:
            return []
        for other in passed:
            loads[other] += change
        loads[number] = loads[previous] + held
        before, after = self.before[number], self.after[number]
        self.after[before], self.before[after] = after, before
        follower = self.after[previous]
        self.after[previous] = self.before[follower] = number
        self.before[number], self.after[number] = previous, follower
        return [*passed, number, follower] if later else [number, *reversed(passed), after]

    def _in_turn_ticks(self, moved: Sequence[int]) -> dict[int, int]:
        """Gives actions that changed places, all but the last of these, their ticks in turn;
        returns those before."""
        given = {number: self.ticks[number] for number in moved[:-1]}
        for number, tick in zip(given, sorted(given.values()), strict=True):
            self.ticks[number] = tick
        return given

    def _may_share(self, number: int) -> bool:
        """Whether an action is a W that may share the tick of the one before: `may_share_tick`, by
        numbers alone, since it is asked of every action that moves."""
        other = self.before[number]
        return other < self.first_w <= number and self.chunks[other] == self.chunks[number]

    def _try(self, changed: Sequence[int], given: dict[int, int]) -> bool:
        """Runs the schedule after a change of these actions, whose ticks were given; says whether
        it ends in time. If not, all ticks are as before."""
        follows = self._follow(changed, given)
        if follows and self._ends_in_time(given, anew=self._put(given)):
            return True
        self._undo(given, put=follows)
        return False

    def _undo(self, given: Mapping[int, int], *, put: bool) -> None:
        """Gives actions back their ticks, and their work and messages if these were put there."""
        taken = {number: self.ticks[number] for number in given}
        for number, tick in given.items():
            self.ticks[number] = tick
        if put:
            self._put(taken)

    def _least(self, number: int, tick: int) -> int:
        """The first tick from this one on in which an action runs after those that it follows."""
        last = self.ticks[self.before[number]]
        if self.shares[number] and self._may_share(number):
            return last
        return max(tick, last + 1, self.ticks[self.senders[number]] + 1)

    def _follow(self, changed: Sequence[int], given: dict[int, int]) -> bool:
        """Moves actions on until each runs after those that it follows, and adds their ticks to
        those given; says whether these are few."""
        ticks, after, sent = self.ticks, self.after, self.sent
        senders, readers, shares = self.senders, self.readers, self.shares
        size, queue, keeps = len(shares), [*given], self.random() < _KEEPS

        def put(number: int, tick: int) -> None:
            given.setdefault(number, ticks[number])
            ticks[number] = tick
            queue.append(number)

        for number in changed:
            if number < size and (tick := self._least(number, ticks[number])) != ticks[number]:
                put(number, tick)
        # The list grows on the way.
        for number in queue:
            tick, other, reader = ticks[number], after[number], readers[number]
            if other < size:
                if shares[other] and self._may_share(other):
                    if ticks[other] != tick:
                        put(other, tick)
                elif ticks[other] <= tick:
                    put(other, tick + 1)
            if reader < size and ticks[reader] <= tick:
                put(reader, tick + 1)
            if keeps and sent[number] != _NONE and ticks[senders[number]] < tick - 1:
                put(senders[number], tick - 1)
            if len(queue) > _MOST_FOLLOW:
                break
        self.left -= _FOLLOWED * len(queue)
        return len(queue) <= _MOST_FOLLOW

    def make_prompt(self) -> bool:
        """Moves actions to ticks in which every message is prompt; some W share ticks if there are
        none otherwise. Says whether there are such ticks in which the schedule ends in time. If
        not, all is as before."""
        size, before, after = len(self.actions), self.before, self.after
        senders, readers, shares = self.senders, self.readers, [False] * size
        ticks, causes, queue = [0] * size, [_NONE] * size, [*range(size)]
        # The list grows on the way.
        for step, number in enumerate(queue):
            tick, other = ticks[number], after[number]
            joins = other < size and shares[other]
            later = [(other, tick if joins else tick + 1), (readers[number], tick + 1)]
            later.append((senders[number], tick - 1))
            if shares[number]:
                later.append((before[number], tick))
            for other, least in later:
                if other < size and ticks[other] < least:
                    ticks[other], causes[other] = least, number
                    queue.append(other)
            if step % size == size - 1:
                self.left -= _MADE_PROMPT * size
                for cycle in self._cycles(causes):
                    alone = (n for n in cycle if not shares[n] and before[n] in cycle)
                    if (first := min(filter(self._may_share, alone), default=_NONE)) == _NONE:
                        return False
                    shares[first] = True
                    for number in cycle:
                        causes[number] = _NONE
        given, shared = dict(enumerate(self.ticks[:size])), self.shares
        self.ticks[:size], self.shares = ticks, shares
        self._put(given)
        if not self._ends_in_time(given, anew=True):
            self.shares = shared
            self._undo(given, put=True)
            return False
        return True

    def _cycles(self, causes: Sequence[int]) -> Iterator[list[int]]:
        """Yields actions that move each other on for ever, given which one moved each."""
        seen = [_NONE] * len(causes)
        for first in range(len(causes)):
            number = first
            while number != _NONE and seen[number] == _NONE:
                seen[number] = first
                number = causes[number]
            if number != _NONE and seen[number] == first:
                cycle = [number]
                while causes[cycle[-1]] != number:
                    cycle.append(causes[cycle[-1]])
                yield cycle

    def _save(self) -> None:
        """Copies what makes the best schedule so far."""
        orders = self.before[:], self.after[:], self.loads[:]
        self.best = self.ticks[:], *orders, self.shares[:]

    def _go_back(self) -> None:
        """Returns to the best schedule so far."""
        given = dict(enumerate(self.ticks[: len(self.actions)]))
        self.ticks, self.before, self.after, self.loads, self.shares = self.best
        self._save()
        self._put(given)
        self.limit = math.inf
        self._ends_in_time(given, anew=True)

    # The clock.

    def _put(self, given: Mapping[int, int]) -> bool:
        """Moves the work and the messages of actions from these ticks to those in which they are
        now; says whether other pairs of stages have late messages then."""
        ticks, work, prompt, size = self.ticks, self.work, self.prompt, len(self.actions)
        stages, late, others = self.stages, self.late, False
        for _ in range(len(work), 1 + max(map(ticks.__getitem__, given), default=_NONE)):
            work.append([0.0] * len(self.rows))
            prompt.append([])
        for number, tick in given.items():
            work[tick][stages[number]] -= self.durations[number]
            work[ticks[number]][stages[number]] += self.durations[number]
            for reader in (number, self.readers[number]):
                if reader == size or (sender := self.senders[reader]) == size:
                    continue
                was, now = self.sent[reader], ticks[sender]
                if ticks[reader] != now + 1:
                    now = _NONE
                if was != now:
                    pair, self.sent[reader] = (stages[sender], stages[reader]), now
                    if was == _NONE:
                        late[pair] -= 1
                        others |= not late[pair]
                    else:
                        prompt[was].remove(pair)
                    if now == _NONE:
                        others |= not late[pair]
                        late[pair] += 1
                    else:
                        prompt[now].append(pair)
        if others:
            self.edges = self._both_ways(pair for pair, count in late.items() if count)
        return others

    def _ends_in_time(self, given: Mapping[int, int], *, anew: bool) -> bool:
        """Whether the schedule ends in time after actions were moved from these ticks, run between
        the ticks that changed, or anew; keeps its times if it does."""
        starts, tails, ticks = self.starts, self.tails, self.ticks
        length = 1 + max(map(ticks.__getitem__, self.before[len(self.actions) :]))
        if anew or length + 1 != len(tails):
            first, last, tails = 0, length, [[0.0] * len(self.rows) for _ in range(length + 1)]
        else:
            changed = [*given.values(), *map(ticks.__getitem__, given)]
            # The message that an action reads ends the tick before.
            first, last = max(0, min(changed) - 1), max(changed) + 1
        fresh = [*self._run(starts[first], first, last)]
        end: float = max(map(operator.add, fresh[-1], tails[last]))
        ran = last - first
        if end <= self.limit:
            starts[first + 1 : last + 1 if tails is self.tails else None] = fresh
            self.end, self.tails = end, tails
            for tick, now in enumerate(self._run(fresh[-1], last, length), last + 1):
                ran += 1
                if now == starts[tick]:
                    break
                starts[tick] = now
            for tick, now in self._run_back(tails[last], last):
                ran += 1
                if tick < first and now == tails[tick]:
                    break
                tails[tick] = now
            if end < self.best_end * (1 - _ROUNDING):
                self.best_end, self.since = end, 0
                self._save()
        self.left -= _RUN * ran * (len(self.rows) + len(self.edges))
        return end <= self.limit

    def _both_ways(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Lists who waits for a message after whom: if senders wait, both after both."""
        if not self.rendezvous:
            return [*pairs]
        return [(waiting, sender) for pair in pairs for waiting in pair for sender in pair]

    def _run(self, now: list[float], first: int, last: int) -> Iterator[list[float]]:
        """Computes when stages start the ticks after these, as
        `jaxpipe.schedule.device_clock.replay` does."""
        message, late = self.message, self.edges
        for work, prompt in zip(self.work[first:last], self.prompt[first:last], strict=True):
            come = [*map(operator.add, now, work)]
            for sender, receiver in late:
                arrival = now[sender] + message
                if arrival > come[receiver]:
                    come[receiver] = arrival
            now = come
            if prompt:
                now = come[:]
                for sender, receiver in self._both_ways(prompt) if self.rendezvous else prompt:
                    arrival = come[sender] + message
                    if arrival > now[receiver]:
                        now[receiver] = arrival
            yield now

    def _run_back(self, now: list[float], last: int) -> Iterator[tuple[int, list[float]]]:
        """Computes the times from the starts of the ticks before one to the end, given its own: the
        same backwards, with messages in the other direction."""
        message, late = self.message, self.edges
        for tick in reversed(range(last)):
            if prompt := self.prompt[tick]:
                come, now = now, now[:]
                for sender, receiver in self._both_ways(prompt) if self.rendezvous else prompt:
                    arrival = come[receiver] + message
                    if arrival > now[sender]:
                        now[sender] = arrival
            come, now = now, [*map(operator.add, now, self.work[tick])]
            for sender, receiver in late:
                arrival = come[receiver] + message
                if arrival > now[sender]:
                    now[sender] = arrival
            yield tick, now
