"""Small sets of cases that still hold every pair of values."""

from __future__ import annotations

import itertools


def covering(cases: list[tuple]) -> list[tuple]:
    """A subset in which every pair of values that occurs together in ``cases`` still does."""

    def pairs(case: tuple) -> set:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
