"""The search for orders and ticks that end early on the device clock, under a memory limit.

The order that ends first on the free-running clock may wait for late messages, and one that ends
later may not. So this search changes all at once: an action moves to another place in its order,
skips ticks, or, if it is a W, shares the tick of the action before. A change that delays the end
is undone. Most changes are of actions on the longest chain, since only they can shorten it.
"""

import bisect
import dataclasses
import itertools
import random
from collections.abc import Sequence

from jaxpipe.schedule.actions import Schedule, may_share_tick, split_action, split_backwards
from jaxpipe.schedule.pacing import Replay, replayed
from jaxpipe.schedule.search.order_search import NumberedActions
from jaxpipe.schedule.simulate import Costs, ticks

_ON_CHAIN, _MOVES, _SKIPS = 0.8, 0.5, 0.3
"""Shares of changes to actions of the longest chain, and of changes that move an action and that
skip ticks; the others let a W share a tick."""
_FARTHEST = 6
"""Places that an action moves at most."""
_SKIPPED = (0, 0, 0, 1, 2)
"""Ticks that are skipped before an action."""
_CHOSEN, _RUN = 4.0, 1.0
"""Microseconds that it takes to choose a change, and per action to run all in ticks."""
_NONE = -1
"""No tick yet."""
_ROUNDING = 1e-9


def improve_on_devices(
    schedule: Schedule, costs: Sequence[Costs], *, cap: int, bound: float, seconds: float
) -> tuple[Schedule, float]:
    """Looks for orders and ticks of a schedule, split, that end sooner on the device clock.

    Args:
      costs: costs of every virtual stage.
      cap: the most chunks in flight on a stage.
      bound: no schedule ends before this.
      seconds: about the time that this takes, as for `search_orders`.

    Returns:
      The schedule, with its ticks, and when it ends.
    """
    search = _TickSearch(schedule, costs, cap)
    end, ran = search.best(bound, seconds)
    rows = tuple(tuple(ran[number] for number in row) for row in search.rows)
    orders = search.orders(search.rows)
    return dataclasses.replace(schedule, orders=orders, ticks=rows, peak_in_flight=None), end


class _TickSearch(NumberedActions):
    """Orders, and how actions follow from them in ticks.

    Attributes:
      skips: ticks that the stage of an action skips before it, beyond those in which it cannot run.
      shares: whether an action runs in the tick of the one before, if it may.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[Costs], cap: int) -> None:
        super().__init__(split_backwards(schedule), costs)
        self.cap = cap
        self.message = max(cost.message for cost in costs)
        self.rendezvous = any(cost.rendezvous for cost in costs)
        self.senders = [
            [other for other, _ in inputs if self.stages[other] != self.stages[number]]
            for number, inputs in enumerate(self.inputs)
        ]
        self.skips, self.shares = [0] * len(self.actions), [False] * len(self.actions)
        # `random` is the same on every Python since 3.2; `randrange` is not.
        self.random = random.Random(0).random
        given = {
            self.numbers[part]: tick
            for order, row in zip(schedule.orders, ticks(schedule), strict=True)
            for action, tick in zip(order, row, strict=True)
            for part in split_action(action)
        }
        for row in self.rows:
            last = _NONE
            for number in row:
                self.shares[number] = given[number] == last
                earliest = max([last, *(given[sender] for sender in self.senders[number])]) + 1
                self.skips[number] = max(0, given[number] - earliest)
                last = given[number]

    def best(self, bound: float, seconds: float) -> tuple[float, list[int]]:
        """The end of the best schedule, and the tick of every action; its orders are in `rows`."""
        ran = self._ticks()
        replay = replayed(self, ran)
        chain = self._longest_chain(replay)
        left = 1e6 * seconds
        while left > 0 and replay.end > bound * (1 + _ROUNDING):
            number = self._chosen(chain, ran)
            stage = self.stages[number]
            before = self.rows[stage][:], self.skips[number], self.shares[number]
            left -= _CHOSEN
            if self._change(number):
                left -= _RUN * len(self.actions)
                later = self._ticks()
                if _NONE not in later:
                    after = replayed(self, later)
                    if after.end <= replay.end * (1 + _ROUNDING):
                        ran, replay, chain = later, after, self._longest_chain(after)
                        continue
            self.rows[stage], self.skips[number], self.shares[number] = before
        return replay.end, ran

    def _below(self, number: int) -> int:
        return int(self.random() * number)

    def _chosen(self, chain: Sequence[tuple[int, int]], ran: Sequence[int]) -> int:
        """Chooses an action to change: mostly the last one of a stage up to a tick of the chain."""
        if self.random() < _ON_CHAIN:
            stage, tick = chain[self._below(len(chain))]
            place = bisect.bisect_right(self.rows[stage], tick, key=ran.__getitem__) - 1
            return self.rows[stage][max(0, place)]
        return self._below(len(self.actions))

    def _change(self, number: int) -> bool:
        """Changes how an action runs, at random; says whether that is allowed."""
        kind = self.random()
        if kind < _MOVES:
            return self._move(number, self._below(2 * _FARTHEST + 1) - _FARTHEST)
        if kind < _MOVES + _SKIPS:
            skipped = _SKIPPED[self._below(len(_SKIPPED))]
            changed, self.skips[number] = skipped != self.skips[number], skipped
            return changed
        self.shares[number] = not self.shares[number]
        row = self.rows[self.stages[number]]
        place = row.index(number)
        return place > 0 and self._may_share(row[place - 1], number)

    def _move(self, number: int, places: int) -> bool:
        """Moves an action so many places on."""
        row = self.rows[self.stages[number]]
        place = row.index(number)
        to = place + places
        if not 0 <= to < len(row) or to == place:
            return False
        passed = row[place + 1 : to + 1] or row[to:place]
        pairs = ((number, other) if to > place else (other, number) for other in passed)
        if any(self.in_turn(*pair) for pair in pairs):
            return False
        row.insert(to, row.pop(place))
        return max(itertools.accumulate(self.held[number] for number in row)) <= self.cap

    def _may_share(self, first: int, second: int) -> bool:
        return may_share_tick((self.actions[first], self.actions[second]))

    def _ticks(self) -> list[int]:
        """Computes the ticks in which actions run; `_NONE` for those that wait for each other."""
        ran, senders, skips = [_NONE] * len(self.actions), self.senders, self.skips
        places, lasts = [0] * len(self.rows), [_NONE] * len(self.rows)
        waiting = True
        while waiting:
            waiting = False
            for stage, row in enumerate(self.rows):
                place, last = places[stage], lasts[stage]
                for number in itertools.islice(row, place, None):
                    tick = last + 1
                    for sender in senders[number]:
                        if ran[sender] == _NONE:
                            break
                        tick = max(tick, ran[sender] + 1)
                    else:
                        alone = not (
                            self.shares[number]
                            and place
                            and self._may_share(row[place - 1], number)
                        )
                        if alone:
                            last = tick + skips[number]
                        ran[number], waiting = last, True
                        place += 1
                        continue
                    break
                places[stage], lasts[stage] = place, last
        return ran

    def _longest_chain(self, replay: Replay) -> list[tuple[int, int]]:
        """Lists stages and ticks of the actions on the longest chain, and of those around the late
        messages that it waits for."""

        def awaited(stage: int, pairs: set[tuple[int, int]], come: Sequence[float]) -> int:
            both = (one for pair in pairs if stage in pair for one in pair)
            senders = (sender for sender, to in pairs if to == stage)
            return max(both if self.rendezvous else senders, key=come.__getitem__)

        after, chain = replay.done, list[tuple[int, int]]()
        stage = after.index(max(after))
        for tick in reversed(range(len(replay.times))):
            starts, ends, come = replay.times[tick]
            if after[stage] > come[stage]:
                stage = awaited(stage, replay.prompt[tick], come)
            if come[stage] > ends[stage]:
                chain.append((stage, tick))
                stage = awaited(stage, replay.late, starts)
                chain.append((stage, tick - 1))
            elif ends[stage] > starts[stage]:
                chain.append((stage, tick))
            after = starts
        return chain
