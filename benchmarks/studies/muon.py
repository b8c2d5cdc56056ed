"""Muon with a pipeline and with FSDP: the best plans of both on 64 and 512 H100s, modelled.

Muon's update multiplies whole matrices. It is timed as jaxpipe runs it, where every matrix has a
home among the devices that share it, and where each of these gathers and multiplies all of them.

    python -m benchmarks.studies.muon
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax
import tyro

from benchmarks import harness
from benchmarks.studies import common
from jaxpipe.planning import cost, counting, devices
from jaxpipe.planning.plans import MASTER_BYTES, PlacedPlan
from jaxpipe.planning.sizes import ModelSizes
from models import gpt

MODELS = {
    "8B": {"num_layers": 32, "width": 4096, "num_heads": 32, "mlp_width": 14336},
    "70B": {"num_layers": 80, "width": 8192, "num_heads": 64, "mlp_width": 28672},
}
STAGES = (1, 2, 8)
SCHEDULES = ("1f1b-fused", "interleaved-fused", "zb-v", "breadth-first-fused")


def sizes(name: str) -> ModelSizes:
    """A model of Llama 3's shape, which Muon trains."""
    shared = {"vocab_size": 128256, "sequence_length": 4096, "num_kv_heads": 8}
    config = gpt.GPTConfig(**shared, **MODELS[name], dtype="bfloat16")
    layers = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))["layers"]
    layer = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), layers)
    flops = counting.update_flops(optax.contrib.muon(1e-3), [layer])
    return dataclasses.replace(common.sizes(name, config), moments=1, update_flops=flops)


def on_every_device(placed: PlacedPlan) -> float:
    """Seconds in which a device gathers and multiplies all layers of its stage."""
    layers = placed.model.num_layers / placed.plan.stage
    gathered = MASTER_BYTES * (placed.plan.tensor * placed.layer_parameters - placed.layer_part)
    multiplied = sum(placed.model.update_flops) / (cost.WIDE * placed.cluster.flops)
    return layers * (multiplied + gathered / placed.data_link)


def rows_of(model: ModelSizes, count: int, batch: int) -> list[dict[str, Any]]:
    """The best plan of each number of stages, and what the update takes of its step."""
    rows = []
    for stages in STAGES:
        found = common.best(
            model,
            devices.cluster("h100", count),
            [batch],
            lambda plan, stages=stages: plan.stage == stages and plan.schedule in SCHEDULES,
        )
        if found is None:
            continue
        at_homes, everywhere = cost.at_homes(found.placed), on_every_device(found.placed)
        rest = found.step_seconds - at_homes
        row = {"model": model.name, "H100s": count, "plan": common.in_words(found.plan)}
        row["rest of a step"] = f"{rest:.2f} s"
        for label, seconds in (("at homes", at_homes), ("everywhere", everywhere)):
            row[label] = f"{seconds:.2f} s, {seconds / (rest + seconds):.1%}"
        harness.note(f"{row}")
        rows.append(row)
    return rows


def main(counts: tuple[int, ...] = (64, 512), batch: int = 1024) -> None:
    """Prints the table of the page.

    Args:
      counts: H100s.
      batch: rows of a step, of 4,096 tokens.
    """
    harness.simulate(common.MOST_SHARING)
    models = list(map(sizes, MODELS))
    found = [row for model in models for n in counts for row in rows_of(model, n, batch)]
    print(common.markdown(found))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
