"""DualPipe-V: the V-shaped half of DeepSeek's DualPipe, with one copy of the weights."""

import collections
import dataclasses
import itertools

from jaxpipe.schedule.actions import Action, Kind, Schedule, split_backwards
from jaxpipe.schedule.placement import wave


def dualpipe_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Alternates the forward of one chunk with the backward of the other, on the V placement.

    It is :func:`dualpipe_v_published` with all backwards split and nothing overlapped, so that no
    gradient waits for a W, nor for a forward beside it.

    Example:
      >>> dualpipe_v(4, 8).peak_in_flight
      (9, 9, 9, 9)
    """
    published = dualpipe_v_published(num_stages, num_microbatches)
    return dataclasses.replace(split_backwards(published), name="dualpipe-v")


def dualpipe_v_published(num_stages: int, num_microbatches: int) -> Schedule:
    """Runs the forward of one chunk together with the backward of the other, on the V placement.

    Each stage has eight phases. In the middle ones every forward is overlapped with a backward
    (`Schedule.overlapped`), which hides their communication on hardware that runs two passes at
    once. Only warm-up and cool-down split backwards: there the stages upstream want their gradients
    first, and some W wait until the end.

    For m < 2p the schedule is that of 2p microbatches without the surplus ones.

    Source: DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437; DualPipe-V is the "cut in half" form
    published with its code, and PyTorch's ScheduleDualPipeV.

    Example:
      >>> schedule = dualpipe_v_published(4, 8)
      >>> schedule.peak_in_flight, [str(action) for action in schedule.overlapped[:2]]
      ((9, 9, 9, 9), ['0F7', '7F4'])
    """
    planned = max(num_microbatches, 2 * num_stages)
    rows = []
    for d in range(num_stages):
        units = (
            tuple(action for action in unit if action.microbatch < num_microbatches)
            for unit in _units(d, num_stages, planned)
        )
        rows.append([unit for unit in units if unit])
    return Schedule(
        name="dualpipe-v-published",
        placement=wave(num_stages),
        num_microbatches=num_microbatches,
        orders=tuple(tuple(itertools.chain.from_iterable(row)) for row in rows),
        peak_in_flight=(min(2 * num_microbatches, 2 * num_stages + 1),) * num_stages,
        overlapped=tuple(unit[0] for row in rows for unit in row if len(unit) > 1),
    )


def _units(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[Action, ...]]:
    """Lists the units of eight phases, as long as the stages before and behind require."""
    behind, upto = num_stages - stage - 1, stage + 1
    virtual_stages = (stage, 2 * num_stages - stage - 1)
    done: collections.Counter[tuple[bool, int]] = collections.Counter()
    waiting: collections.deque[Action] = collections.deque()
    units: list[tuple[Action, ...]] = []

    def action(kind: Kind, chunk: int) -> Action:
        counter = kind is Kind.F, chunk
        done[counter] += 1
        return Action(virtual_stages[chunk], kind, done[counter] - 1)

    def run(*passes: tuple[Kind, int]) -> None:
        units.append(tuple(action(kind, chunk) for kind, chunk in passes))
        last = units[-1][-1]
        if last.kind is Kind.B:
            waiting.append(Action(last.virtual_stage, Kind.W, last.microbatch))

    def weights() -> None:
        units.append((waiting.popleft(),))

    forwards, backwards = [(Kind.F, chunk) for chunk in (0, 1)], [(Kind.BW, c) for c in (0, 1)]
    for _ in range(2 * behind):
        run(forwards[0])
    for _ in range(upto):
        run(forwards[0])
        run(forwards[1])
    for _ in range(behind):
        run((Kind.B, 1))
        weights()
        run(forwards[1])
    for k in range(num_microbatches - 2 * num_stages + upto):
        # The last stage turns: its first backward here waits for the forward just before.
        if k == 0 and behind == 0:
            run(forwards[0])
            run(backwards[1])
        else:
            run(forwards[0], backwards[1])
        run(forwards[1], backwards[0])
    for _ in range(behind):
        run(backwards[1])
        run(forwards[1], backwards[0])
    for k in range(2 * upto):
        run((Kind.B if k >= upto else Kind.BW, 1 - k % 2))
    for _ in range(behind):
        weights()
        run((Kind.B, 0))
    while waiting:
        weights()
    return units
