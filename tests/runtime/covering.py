"""Which of many cases every run of the tests tries: the others are slow."""

import itertools
from collections.abc import Iterable, Sequence

import pytest


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


def some(cases: Iterable[Sequence], *kept: Sequence) -> list:
    """All cases for `pytest.mark.parametrize`; all but ``kept`` are slow."""
    return [
        pytest.param(*case, marks=() if tuple(case) in kept else pytest.mark.slow) for case in cases
    ]
