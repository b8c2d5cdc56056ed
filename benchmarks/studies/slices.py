"""When do slices of a sequence and context devices pay? Predicted by the planner; needs no device.

Llama 3 8B and 70B, 4 million tokens per step, on 64 and 512 H100s: the best plan of whole
sequences and the best of sliced ones, without and with devices that share sequences.

    make study-slices
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import tyro

from benchmarks import harness
from jaxpipe.errors import ArgumentError
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.devices import cluster
from jaxpipe.planning.plans import Plan
from jaxpipe.planning.search import Goal, search
from jaxpipe.planning.sizes import ModelSizes, Variant
from train.config import Config
from train.plan import Planned, read

LLAMA = Path("configs/llama3-8b.yaml")
MODELS = {
    "8B": {},
    "70B": {"num_layers": 80, "width": 8192, "num_heads": 64, "mlp_width": 28_672},
}
TOKENS = 2**22
"""Tokens of a step."""
SLICES = 1, 4, 16, 64
REMATS = "dots", "full"
WAYS: dict[str, Callable[[Plan], bool]] = {
    "whole": lambda plan: plan.slices == plan.context == 1,
    "slices": lambda plan: plan.slices > 1 == plan.context,
    "context": lambda plan: plan.slices == 1 < plan.context,
    "both": lambda plan: plan.slices > 1 and plan.context > 1,
}


def variants(length: int, most_context: int) -> Iterator[Variant]:
    """The choices that are counted: tensor devices of a host, and context devices."""
    shared = [(1, 1), (1, 8)]
    shared += [(2**n, tensor) for n in range(1, most_context.bit_length()) for tensor in (1, 8)]
    for context, tensor in shared:
        for slices in SLICES:
            if length // slices >= 2048:  # shorter slices leave most of a GPU idle
                for remat in REMATS:
                    yield Variant(context, tensor, remat, slices=slices)


@functools.cache
def model(name: str, length: int, most_context: int) -> ModelSizes:
    """Counts a model for sequences of this many tokens."""
    config = read(LLAMA).config
    shape = config.model.model_copy(update={"sequence_length": length, **MODELS[name]})
    batch = config.train.model_copy(update={"batch_size": TOKENS // length})
    changed: Config = config.model_copy(update={"model": shape, "train": batch})
    planned = Planned(changed, f"Llama 3 {name}")
    return planned.counted(list(variants(length, most_context)), lambda share: None)


def best(sizes: ModelSizes, gpus: int, allowed: Callable[[Plan], bool]) -> Prediction | None:
    """The plan of the shortest step that fits; None if none does."""
    goal = Goal(None, (sizes.batch_rows,))
    try:
        return search(sizes, [cluster("h100", gpus)], goal, allowed=allowed).best[0]
    except ArgumentError:
        return None


def main(
    models: tuple[str, ...] = tuple(MODELS),
    lengths: tuple[int, ...] = (8192, 131_072, 1_048_576),
    gpus: tuple[int, ...] = (64, 512),
    most_context: int = 8,
) -> None:
    """Prints a table of the best plans, and how long their steps take.

    Args:
      models: of MODELS.
      lengths: tokens of a sequence.
      gpus: numbers of H100s, 8 per host.
      most_context: most devices that share a sequence.
    """
    harness.simulate(8 * most_context)
    print(
        "| model | tokens | GPUs | way | plan | s | MFU | GB |\n|---|---|---|---|---|---|---|---|"
    )
    for name in models:
        for length in lengths:
            sizes = model(name, length, 1 if length <= 8192 else most_context)
            for count in gpus:
                for way, allowed in WAYS.items():
                    found = best(sizes, count, allowed)
                    cells = ["nothing fits", "", "", ""] if found is None else described(found)
                    print("|", " | ".join([name, str(length), str(count), way, *cells]), "|")


def described(found: Prediction) -> list[str]:
    """The plan in words, seconds of a step, share of the peak, and GB of a device."""
    plan = found.plan
    axes = dataclasses.asdict(plan) | {"data": plan.data}
    mesh = " x ".join(
        f"{axes[axis]} {axis}" for axis in ("stage", "data", "context", "tensor") if axes[axis] > 1
    )
    schedule = plan.schedule if plan.stage > 1 else ""
    cut = f", {plan.slices} slices" if plan.slices > 1 else ""
    host = f", {plan.on_host} on the host" if any(plan.on_host) else ""
    words = f"{mesh}, {schedule}{cut}, {plan.remat}, ZeRO-{plan.zero}{host}".replace(", ,", ",")
    share = f"{found.model_flops_share:.0%}"
    return [words, f"{found.step_seconds:.1f}", share, f"{found.device_bytes / 1e9:.0f}"]


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
