"""Breadth-first: every microbatch through a chunk before the next chunk's turn."""

import dataclasses

from jaxpipe.schedule.actions import Action, Kind, Schedule, nth_backward
from jaxpipe.schedule.placement import looped


def breadth_first(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 2,
    group: int | None = None,
    num_slices: int = 1,
    descending: bool = False,
    fused: bool = False,
) -> Schedule:
    """Orders all forwards of chunk 0, of chunk 1, ..., then all backwards of the chunks in reverse.

    Weights sharded over the data axis are gathered, and gradients reduced, once per chunk and pass,
    whatever the number of microbatches. The split form puts W directly after its B.

    Every group has a bubble of its own and keeps all of its chunks in flight, which is meant for m
    near p.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", arXiv 2211.05953.

    Args:
      group: microbatches that go through the whole schedule before the next ones start, at least 1;
        the last group may be smaller. None for all: one group.
      descending: run the backwards of a chunk in descending order of microbatches.

    Example:
      >>> [str(action) for action in breadth_first(1, 2, fused=True).orders[0]]
      ['0F0', '0F1', '1F0', '1F1', '1BW0', '1BW1', '0BW0', '0BW1']
    """
    group = min(group or num_microbatches, num_microbatches)
    placement = looped(num_stages, num_chunks=num_chunks)
    passes, span = range(num_microbatches * num_slices), group * num_slices
    backward = (Kind.BW,) if fused else (Kind.B, Kind.W)
    orders: list[list[Action]] = [[] for _ in range(num_stages)]
    for first in passes[::span]:
        going = passes[first : first + span]
        returning = going[::-1] if descending else [nth_backward(i, num_slices) for i in going]
        for order, own_stages in zip(orders, placement.virtual_stages, strict=True):
            order += [Action(s, Kind.F, i) for s in own_stages for i in going]
            order += [
                Action(s, k, i) for s in own_stages[::-1] for i in returning for k in backward
            ]
    return Schedule(
        name="breadth-first" + "-descending" * descending + "-fused" * fused,
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(tuple(order) for order in orders),
        peak_in_flight=(span * num_chunks,) * num_stages,
        num_slices=num_slices,
    )


def gpipe(
    num_stages: int, num_microbatches: int, *, num_slices: int = 1, fused: bool = False
) -> Schedule:
    """Orders every forward before every backward.

    The split form puts W directly after its B: running all B first would not end sooner and would
    keep the values that B passes to W for every microbatch. With slices it is TeraPipe.

    Source: Huang et al., "GPipe", arXiv 1811.06965; slices: Li et al., "TeraPipe", arXiv
    2102.07988.

    Example:
      >>> [str(action) for action in gpipe(1, 2).orders[0]]
      ['0F0', '0F1', '0B0', '0W0', '0B1', '0W1']
    """
    ordered = breadth_first(
        num_stages, num_microbatches, num_chunks=1, num_slices=num_slices, fused=fused
    )
    return dataclasses.replace(ordered, name="gpipe-fused" if fused else "gpipe")


def modular(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 2,
    num_slices: int = 1,
    fused: bool = False,
) -> Schedule:
    """Runs layered gradient accumulation over a modular pipeline: layer l on stage l mod p.

    It is breadth-first with one layer per chunk, so that a layer's gradient is complete and can be
    reduced as soon as all microbatches have passed it. `Pipeline.train_step` with
    ``update="chunk"`` then updates it too.

    Source: Lamy-Poirier, "Layered gradient accumulation and modular pipeline parallelism", arXiv
    2106.02679.

    Example:
      >>> modular(4, 8, num_chunks=4).peak_in_flight
      (32, 32, 32, 32)
    """
    layered = breadth_first(
        num_stages, num_microbatches, num_chunks=num_chunks, num_slices=num_slices, fused=fused
    )
    return dataclasses.replace(layered, name="modular-fused" if fused else "modular")
