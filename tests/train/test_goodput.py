"""The time of a run by cause, over the processes that continued it."""

import pytest

from train.watch import goodput
from train.watch.goodput import CHECKPOINT, COMPILE, LOST, RESTART, STEP, Goodput


class Hand:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now

    monotonic = time


@pytest.fixture
def hand(monkeypatch):
    hand = Hand()
    monkeypatch.setattr(goodput, "time", hand)
    return hand


def _run(hand, steps, *, compile_seconds=7.0, saves=(), goodput=None):
    """Runs steps of a second, after a start of 5 seconds; returns a record of each."""
    goodput = goodput or Goodput()
    hand.now += 5.0
    with goodput.on(COMPILE):
        hand.now += compile_seconds
    goodput.enter(STEP)
    records = []
    for step in steps:
        hand.now += 1.0
        records.append({"step": step, "seconds": goodput.seconds(), "unix_time": hand.now})
        if step in saves:
            with goodput.on(CHECKPOINT):
                hand.now += 0.5
    return records


def test_every_second_has_one_cause(hand):
    records = _run(hand, range(1, 11), saves=(5, 10))
    assert sum(records[-1]["seconds"].values()) == hand.now - 1000.0 - 0.5
    assert records[-1]["seconds"] == {
        **dict.fromkeys(goodput.CAUSES, 0.0),
        "start": 5.0,
        COMPILE: 7.0,
        STEP: 10.0,
        CHECKPOINT: 0.5,
    }


def test_what_a_killed_process_did_after_its_checkpoint_is_lost(hand):
    records = _run(hand, range(1, 9), saves=(5,))
    del records[-1]["seconds"]  # the step after the last printed line
    hand.now += 100.0
    second = Goodput()
    second.resume(records, step=5, ended=False)
    records = records[:5] + _run(hand, range(6, 11), goodput=second)
    seconds = records[-1]["seconds"]
    assert seconds[STEP] == 10.0
    assert seconds[LOST] == 3.0
    assert seconds[RESTART] == 100.0
    assert (seconds["start"], seconds[COMPILE], seconds[CHECKPOINT]) == (10.0, 14.0, 0.5)
    assert sum(seconds.values()) == pytest.approx(hand.now - 1000.0)
    assert second.share == pytest.approx(10.0 / (hand.now - 1000.0))


@pytest.mark.parametrize(("step", "kept"), [(0, 0.0), (8, 8.0)])
def test_a_process_continues_from_any_step(hand, step, kept):
    records = _run(hand, range(1, 9))
    second = Goodput()
    second.resume(records, step=step, ended=False)
    assert second.seconds()[STEP] == kept
    assert second.seconds()[LOST] == 8.0 - kept


def test_a_run_that_was_done_has_no_restart_and_records_without_a_clock_add_nothing(hand):
    records = _run(hand, range(1, 9))
    hand.now += 1e6
    second = Goodput()
    second.resume(records, step=8, ended=True)
    assert second.seconds()[RESTART] == 0.0
    older = Goodput()
    older.resume([{"step": 1, "loss": 3.0}], step=1, ended=False)
    assert sum(older.seconds().values()) == 0.0
