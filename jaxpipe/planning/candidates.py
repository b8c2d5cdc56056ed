"""The plans that there are for a model on a cluster: meshes, microbatches, schedules, options."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpipe.planning.devices import Cluster
from jaxpipe.planning.plans import NOTHING, UNROLLED_LAYERS, OnHost, Plan, divisors
from jaxpipe.planning.sizes import ModelSizes


class Searched(NamedTuple):
    """A schedule that is searched: its chunks per stage, and how many microbatches of a full stage
    are in flight at least, as a share of the stages; None for all of them."""

    chunks: tuple[int, ...]
    in_flight: float | None


SCHEDULES: Mapping[str, Searched] = {
    "1f1b-fused": Searched((1,), 1),
    "1f1b": Searched((1,), 1),
    "zb-h1": Searched((1,), 1),
    "zb-h2": Searched((1,), 1.5),
    "zb-v": Searched((2,), 1),
    "v-half": Searched((2,), 1 / 2),
    "v-min": Searched((2,), 1 / 3),
    "dualpipe-v": Searched((2,), 1),
    "interleaved-fused": Searched((2, 4, 8), 1),
    "interleaved": Searched((2, 4), 1),
    "breadth-first-fused": Searched((2, 4, 8, 16, 32, 64), None),
    "breadth-first": Searched((2, 4), None),
}
"""The others of the registry equal one of these at these costs, or are searched for a memory limit,
which takes minutes."""

_WITHOUT_STAGES = ("1f1b-fused", "breadth-first-fused")
"""Of one stage: accumulation with microbatches outside, or with layers outside."""
MOST_ROWS = 64
"""Of a microbatch on one data shard."""
MOST_STAGES = 64


def on_host(model: ModelSizes, cluster: Cluster) -> Sequence[OnHost]:
    """What may lie on the host: first the state, which moves once per step."""
    if not (model.may_offload and cluster.has_host_memory):
        return [NOTHING]
    return NOTHING, OnHost(state=True), OnHost(state=True, residuals=True)


def plans(
    model: ModelSizes,
    cluster: Cluster,
    batches: Sequence[int],
    excluded: Counter[str],
    *,
    on_host: Sequence[OnHost] = (NOTHING,),
) -> Iterator[Plan]:
    """All plans with these ``on_host``; those that cannot exist are counted in ``excluded``."""
    sharing = sorted({variant.mesh for variant in model.variants})
    remats = sorted({variant.remat for variant in model.variants})
    for context, tensor, expert in sharing:
        if cluster.count % (context * tensor) or tensor > cluster.per_host:
            continue
        for stage in divisors(cluster.count // (context * tensor)):
            if stage > min(model.num_layers, MOST_STAGES):
                excluded["layers"] += 1
                continue
            data = cluster.count // (context * tensor) // stage
            if data % expert:
                continue
            for batch, rows in itertools.product(batches, _powers(MOST_ROWS)):
                if batch % (rows * data):
                    excluded["rows"] += 1
                    continue
                shape = stage, data, context, tensor, expert, batch // (rows * data), rows
                for remat in remats:
                    yield from _options(model, cluster, shape, remat, on_host, excluded)


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _options(
    model: ModelSizes,
    cluster: Cluster,
    shape: tuple[int, ...],
    remat: str,
    on_host: Sequence[OnHost],
    excluded: Counter[str],
) -> Iterator[Plan]:
    """Schedules, ZeRO levels, replicas and slots of one mesh, microbatch and policy."""
    stage, data, context, tensor, expert, microbatches, rows = shape
    per_stage = -(-model.num_layers // stage)
    weights = "unrolled" if per_stage <= UNROLLED_LAYERS else "stacked"
    near = max(1, cluster.per_host // (context * tensor))
    replicated = data > near and data % near == near % expert == 0
    replicas = (1, data // near) if replicated else (1,)
    for name, searched in SCHEDULES.items():
        if stage == 1 and name not in _WITHOUT_STAGES:
            continue
        for chunks in searched.chunks:
            if stage * chunks > model.num_layers:
                excluded["layers"] += 1
                continue
            for zero in (0, 1, 2, 3) if data > 1 else (0,):
                for replica in replicas if zero else (1,):
                    for slots in (1, 2) if zero >= 2 and chunks > 1 else (1,):
                        for one in on_host:
                            yield Plan(
                                stage, data, context, tensor, replica, name, chunks, microbatches,
                                rows, remat, zero, slots, weights, on_host=one, expert=expert,
                            )  # fmt: skip
