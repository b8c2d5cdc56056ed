"""Is the memory that `jaxpipe plan` predicts what its plans compile into?

For each model the best plans that differ in mesh, schedule or rematerialization, as ``jaxpipe plan
--measure`` compiles them: whole training steps for H100s that need not exist, without devices. What
was compiled is kept in benchmarks/results/plan_memory_compiled.json, so that an interrupted run
goes on: remove it when the program of a step has changed.

The exit status is 1 if a plan takes more than its prediction and the margin that the search leaves,
or exceeds its limit.

    .venv-gpu/bin/python -m benchmarks.plan_memory [--models llama-7b ...] [--plans 20]
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import tyro

from benchmarks import harness
from jaxpipe.planning import cost, search
from jaxpipe.planning.configurations import read
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.devices import cluster
from jaxpipe.planning.search import Goal

CONFIGS = Path(__file__).parents[1] / "configs"
DEVICES = {"gpt2-1.5b": 16, "llama-7b": 64, "llama3-8b": 32, "gpt-52b": 64, "mixtral-8x7b": 64}
COMPILED = harness.RESULTS / "plan_memory_compiled.json"


def row_of(found: Prediction, taken: int) -> dict[str, object]:
    """A plan, its prediction, and what it compiled into."""
    plan = found.plan
    predicted = sum(found.bytes.values())
    options = f"ZeRO-{plan.zero}, {plan.weights}, {plan.weight_slots} slots"
    return {
        "plan": f"{plan.stage}x{plan.data}x{plan.tensor} {plan.schedule} v={plan.chunks}",
        "microbatches": f"{plan.microbatches} x {plan.rows}",
        "options": f"{plan.remat}, {options}",
        "predicted GB": predicted / 1e9,
        "compiled GB": taken / 1e9,
        "predicted / compiled": predicted / taken,
        "beyond the limit": taken > found.placed.cluster.memory_bytes,
    }


def main(models: tuple[str, ...] = tuple(DEVICES), plans: int = 20) -> None:
    """Compiles plans, and prints and writes a table for every model.

    Args:
      models: configurations, by name.
      plans: of each.
    """
    known = json.loads(COMPILED.read_text("utf-8")) if COMPILED.exists() else {}
    missed = []
    for name in models:
        configured, devices = read(CONFIGS / f"{name}.yaml"), cluster("h100", DEVICES[name])
        sizes = configured.sizes(1, 1, lambda share: None)
        goal = Goal(None, (sizes.batch_rows,))
        rows = []
        for found in search.search(sizes, [devices], goal, finalists=plans).best:
            costs = cost.chunk_costs(found.placed)
            text = configured.write(found.plan, costs, None)
            key = hashlib.sha256(text.encode()).hexdigest()[:16]
            if key not in known:
                began = time.perf_counter()
                known[key] = configured.compiled_bytes(found.plan, costs, "h100")
                COMPILED.parent.mkdir(exist_ok=True)
                COMPILED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
                harness.note(f"compiled in {time.perf_counter() - began:.0f} s")
            rows.append(row_of(found, known[key]))
            harness.note(f"{name}: {rows[-1]}")
        harness.report(
            f"plan-memory-{name}",
            rows,
            title=f"{name} on {devices.count} H100s",
            label=["plan"],
            bars=["predicted GB", "compiled GB"],
            axis="GB of a device",
        )
        missed += [
            f"{name}: {row['plan']}: {row['predicted / compiled']:.3f} of what was compiled"
            for row in rows
            if row["predicted / compiled"] * search.MARGIN < 1 or row["beyond the limit"]
        ]
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
