"""What does it cost to have data shards across hosts? Models gpt-52b on 64 H100s; needs no GPU.

The model and the schedule are those of `configs/gpt-52b.yaml`, compiled for 8 hosts of 8 GPUs and
modelled as in `benchmarks/gpu_roofline.py`: with the shards of a stage on one host, where
`jaxpipe.make_mesh` puts them, and with every pipeline on one.

    .venv-gpu/bin/python benchmarks/gpu_hosts.py [--microbatches 8 16 32]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import jaxpipe
from benchmarks import modelled_steps
from benchmarks.kernels import Use
from benchmarks.roofline import total
from jaxpipe.planning.without_devices import GPUS_PER_HOST, attention_of_gpus, gpus, use_gpu_flags
from models import gpt

CONFIG = gpt.GPTConfig(
    vocab_size=32000, sequence_length=1024, num_layers=64, width=8192, num_heads=64,
    positions="learned", norm="layer", activation="gelu", bias=True, dtype="bfloat16",
)  # fmt: skip
STAGES = DATA = HOSTS = CHUNKS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="*", default=[8, 16, 32])
    options = parser.parse_args()
    use_gpu_flags()
    steps(options.microbatches)


@attention_of_gpus()
def steps(counts: Sequence[int]) -> None:
    devices = gpus("h100", HOSTS * GPUS_PER_HOST)
    in_order = np.asarray(devices, object).reshape(DATA, STAGES)
    for microbatches in counts:
        for name, order in (("within hosts", devices), ("across hosts", in_order)):
            pipe = jaxpipe.Pipeline(
                gpt.model(CONFIG, vocabulary_axis="stage"),
                jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0))),
                schedule=jaxpipe.schedules.build(
                    "breadth-first-fused", stages=STAGES, microbatches=microbatches, chunks=CHUNKS
                ),
                mesh=jaxpipe.make_mesh(stage=STAGES, data=DATA, devices=order),
                remat="full",
                zero=3,
                weights="stacked",
                compute_dtype="bfloat16",
            )
            step = modelled_steps.pipeline_step(pipe, DATA * microbatches, CONFIG)
            layer = sum(map(total, step.passes.values()))
            layers = layer * CONFIG.num_layers / STAGES * microbatches
            shown = (step.seconds, step.spent[Use.TRANSFERS], layers)
            step_ms, exposed, layers_ms = (f"{1e3 * seconds:.0f}" for seconds in shown)
            print(
                f"{microbatches} microbatches, shards {name}: {step_ms} ms, transfers exposed "
                f"{exposed} ms, layers alone {layers_ms} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
