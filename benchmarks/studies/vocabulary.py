"""Who computes embedding and head? Predicted steps of three answers, on 4 and 8 H100s.

All stages together, each with a part of the tables; the first and the last stage, with as many
layers as others; or these with fewer layers.

    python -m benchmarks.studies.vocabulary
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tyro

from benchmarks.studies import common
from jaxpipe.planning.devices import cluster
from jaxpipe.planning.plans import PlacedPlan, Plan
from jaxpipe.planning.search import evaluated
from jaxpipe.planning.sizes import ModelSizes
from jaxpipe.runtime.zero import Zero
from models.gpt_config import GPTConfig

MODELS = {
    "8B, vocabulary 128k": GPTConfig(
        vocab_size=128256, sequence_length=4096, num_layers=32, width=4096, num_heads=32,
        num_kv_heads=8, mlp_width=14336, dtype="bfloat16",
    ),
    "1B, vocabulary 256k": GPTConfig(
        vocab_size=262144, sequence_length=4096, num_layers=32, width=1152, num_heads=4,
        head_size=256, num_kv_heads=1, mlp_width=6912, tied=True, dtype="bfloat16",
    ),
}  # fmt: skip
SCHEDULES = {"1f1b-fused": 1, "interleaved-fused": 2, "zb-v": 2}
"""Chunks per stage by schedule."""
ANSWERS = "all stages", "the ends, equal layers", "the ends, fewer layers"


def predicted(model: ModelSizes, stages: int, schedule: str, answer: str) -> str:
    """Milliseconds of a step, and GB of the device that holds most."""
    plan = Plan(
        stage=stages, data=1, context=1, tensor=1, replica=1, schedule=schedule,
        chunks=SCHEDULES[schedule], microbatches=4 * stages, rows=1, remat="dots",
        zero=Zero(0), weight_slots=1, weights="unrolled", ends=answer != "all stages",
    )  # fmt: skip
    placed = PlacedPlan(plan, model, cluster("h100", stages, memory=1e12))
    if answer == "the ends, equal layers":
        vars(placed)["head_layers"] = 0.0  # the partition then does not know the head
    found = evaluated(placed, common.ONE_STEP, Counter())
    assert found is not None
    return f"{1e3 * found.step_seconds:.0f} ms, {found.device_bytes / 1e9:.0f} GB"


def rows_of(model: ModelSizes, stages: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each number of stages and schedule."""
    return [
        {"model": model.name, "stages": p, "schedule": schedule}
        | {answer: predicted(model, p, schedule, answer) for answer in ANSWERS}
        for p in stages
        for schedule in SCHEDULES
    ]


def main(stages: tuple[int, ...] = (4, 8)) -> None:
    """Prints the table of the page.

    Args:
      stages: H100s, one per stage.
    """
    models = [
        common.sizes(name, config, tensors=(1,), remats=("dots",))
        for name, config in MODELS.items()
    ]
    print(common.markdown([row for model in models for row in rows_of(model, stages)]))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
