"""The cost of a pipeline's program on one GPU, and rates that it attains beside those assumed.

Without a GPU the same runs in small on the CPU. What is worth most comes first; no row is begun
when the minutes are over. It prints tables, and writes them to ``results/gpu_check.json`` after
every row:

1. Training steps of a GPT on one device: plain jitted ones (`benchmarks/plain_steps.py`), and
   single stages of pipelines (`benchmarks/one_stage.py`): what idle ticks, slots, chunks and split
   backwards cost. "of plain" is the time per layer and microbatch by that of the best plain step;
   the stages of the first and the last layer compute embedding and head as well. On a GPU the
   roofline model stands beside the clock.
2. The same with other command buffers (CUDA graphs), and without XLA's autotuning.
3. Rates of simple programs beside what the models of this project assume: matmuls by shape,
   attention, copies, fp8 and grouped matmuls. ``results/gpu_check_device.json`` holds the device
   with these rates, for ``jaxpipe plan --device``.

    make gpu-check      # all of it, and 20 steps of the trainer: 12 minutes with installation
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from jaxpipe import gpu_flags

    gpu_flags.apply()

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxpipe
from benchmarks import harness
from benchmarks.modelled_steps import modelled
from benchmarks.one_stage import stage_of_pipeline
from benchmarks.plain_steps import by_layer, plain_step
from jaxpipe.planning.devices import DEVICES, Device, Efficiency, known
from jaxpipe.runtime.layers.split import REMAT_POLICIES
from jaxpipe.runtime.memory import bytes_beside_arguments, compiled
from models import gpt
from models.grouped_matmul import grouped_matmul

_BF16, _FP8 = jnp.bfloat16, jnp.float8_e4m3fn
_OPTIONS = {
    "no loops in command buffers": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN"
    },
    "no command buffers": {"xla_gpu_enable_command_buffer": ""},
    "not autotuned": {"xla_gpu_autotune_level": "0"},
}
"""Options of XLA beside those of `jaxpipe.gpu_flags`."""

Row = dict[str, Any]
Run = tuple[str, Callable[[], Row]]
"""A row's name, and the function that times it."""


class Stage(NamedTuple):
    """One stage of a pipeline: stage ``number`` of ``stages``."""

    schedule: str
    stages: int
    number: int
    remat: str = "dots"
    weights: str = "unrolled"

    def __str__(self) -> str:
        return (
            f"{self.schedule}, stage {self.number} of {self.stages}, {self.weights}, {self.remat}"
        )


class Amounts(NamedTuple):
    """How much is run.

    Args:
      config: the GPT of the plain steps; every stage has as many layers.
      rows: of a microbatch.
      microbatches: of a plain step, and per stage of a pipeline.
      stages: of pipelines.
      matmuls: shapes ``(m, k, n)``.
      groups: number of experts of the grouped matmul.
      copied: bytes of the array that is copied.
      repeats: runs of a kernel that are timed together.
      steps: likewise of a step.
    """

    config: gpt.GPTConfig
    rows: int
    microbatches: int
    stages: tuple[Stage, ...]
    matmuls: tuple[tuple[int, int, int], ...]
    groups: int
    copied: int
    repeats: int
    steps: int


LARGE = Amounts(
    gpt.GPTConfig(
        vocab_size=32768, sequence_length=2048, num_layers=4, width=2048, num_heads=16,
        dtype="bfloat16",
    ),
    rows=2, microbatches=4,
    stages=(
        Stage("1f1b-fused", 8, 4), Stage("zb-v", 8, 4), Stage("1f1b-fused", 1, 0),
        Stage("1f1b", 8, 4), Stage("dualpipe-v", 8, 4), Stage("breadth-first", 8, 4),
        Stage("1f1b-fused", 8, 0), Stage("1f1b-fused", 8, 7), Stage("zb-v", 8, 0),
        Stage("zb-v", 8, 7), Stage("dualpipe-v-published", 8, 4), Stage("1f1b-fused", 4, 2),
        Stage("zb-v", 4, 2),
    ),
    matmuls=(
        (4096, 2048, 2048), (4096, 2048, 8192), (8192, 8192, 8192), (8192, 8192, 28672),
        (1024, 1024, 1024),
    ),
    groups=8, copied=2**30, repeats=20, steps=3,
)  # fmt: skip
SMALL = Amounts(
    gpt.GPTConfig(
        vocab_size=64, sequence_length=16, num_layers=2, width=32, num_heads=2, dtype="bfloat16"
    ),
    rows=1, microbatches=2, stages=(Stage("1f1b-fused", 4, 1), Stage("zb-v", 2, 1)),
    matmuls=((32, 32, 32),), groups=2, copied=2**12, repeats=1, steps=1,
)  # fmt: skip


def seconds(run: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Wall time of one of several runs that the device is given at once: the median of three
    times, after one that warms up."""

    def several() -> Any:
        for _ in range(repeats - 1):
            run(*args)
        return run(*args)

    _, *timed = (harness.seconds(several)[0] / repeats for _ in range(4))
    return statistics.median(timed)


# Rates.


def rates(amounts: Amounts, device: Device) -> Iterator[Run]:
    """Programs of one kernel each; attained FLOPs or bytes per second beside the assumed."""
    flops = device.flops * device.efficiency.flops
    bandwidth = device.bandwidth * device.efficiency.memory

    def row(name: str, work: float, assumed: float, run: Any, *args: Any) -> Run:
        def measure() -> Row:
            taken = seconds(jax.jit(run), *args, repeats=amounts.repeats)
            attained = work / taken
            return {
                "ms": taken * 1e3,
                "T/s": attained / 1e12,
                "of the assumed": attained / assumed,
            }

        return name, measure

    def random(*shape: int, dtype: Any = _BF16) -> jax.Array:
        return jax.random.normal(jax.random.key(len(shape)), shape).astype(dtype)

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w, preferred_element_type=_BF16)

    def multiply_transposed(x: jax.Array, w: jax.Array) -> jax.Array:
        return multiply(x, w.T)  # as fp8 kernels take it

    for m, k, n in amounts.matmuls:
        work = 2.0 * m * k * n
        yield row(f"matmul {m} x {k} x {n}", work, flops, multiply, random(m, k), random(k, n))
    m, k, n = max(amounts.matmuls, key=math.prod)
    fp8 = random(m, k, dtype=_FP8), random(n, k, dtype=_FP8)
    name = f"fp8 matmul {m} x {k} x {n}"
    yield row(name, 2.0 * m * k * n, 2 * flops, multiply_transposed, *fp8)
    sizes = jnp.full(amounts.groups, m // amounts.groups, jnp.int32)
    grouped = random(m, k), random(amounts.groups, k, n), sizes
    name = f"grouped matmul of {amounts.groups}, {m} x {k} x {n}"
    multiply_groups = functools.partial(grouped_matmul, expected_rows=m)
    yield row(name, 2.0 * m * k * n, flops, multiply_groups, *grouped)
    config = amounts.config
    heads = amounts.rows, config.sequence_length, config.num_heads, config.width // config.num_heads
    q, k_, v = (random(*heads) for _ in range(3))

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kernel = "cudnn" if _on_gpu() else None
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)

    # Two matmuls of the causal half of the scores; five in the backward.
    causal = 2.0 * amounts.rows * config.sequence_length**2 * config.width
    yield row("attention, forward", causal, 0.6 * flops, attention, q, k_, v)
    backward = jax.grad(lambda *args: attention(*args).astype(jnp.float32).sum(), (0, 1, 2))
    yield row("attention, forward and backward", 3.5 * causal, 0.6 * flops, backward, q, k_, v)
    array = jnp.zeros(amounts.copied // 4)
    yield row("copy", 2.0 * amounts.copied, bandwidth, lambda x: x + 1, array)


# Steps.


def timed(amounts: Amounts, program: jax.stages.Compiled, *args: Any, **kw: Any) -> Row:
    """Times a compiled step, and says how much memory it takes beside its arguments."""
    taken = seconds(functools.partial(program, **kw), *args, repeats=amounts.steps)
    return {"ms": taken * 1e3, "GB": bytes_beside_arguments(program) / 1e9}


def plain(amounts: Amounts, remat: str) -> Row:
    """Times the step without a pipeline; a layer is what a step takes more with twice as many."""

    def of(num_layers: int) -> Row:
        config = dataclasses.replace(amounts.config, num_layers=num_layers)
        tokens = _tokens(amounts, amounts.microbatches)
        tokens = tokens.reshape(amounts.microbatches, amounts.rows, -1)
        program = plain_step(config, remat, jax.devices()[0], tokens.shape)
        return timed(amounts, program, by_layer(gpt.init(config, jax.random.key(0))), tokens)

    depth = amounts.config.num_layers
    row, more = of(depth), of(2 * depth)
    return row | {"ms per layer": (more["ms"] - row["ms"]) / (depth * amounts.microbatches)}


def staged(amounts: Amounts, stage: Stage, **xla: str) -> Row:
    """Times one stage's step, compiled with these options of XLA, and models it for an H100."""
    microbatches = amounts.microbatches * stage.stages
    schedule = jaxpipe.schedules.build(
        stage.schedule, stages=stage.stages, microbatches=microbatches
    )
    depth = amounts.config.num_layers
    pipe = stage_of_pipeline(
        dataclasses.replace(amounts.config, num_layers=depth * stage.stages),
        schedule,
        stage.number,
        device=jax.devices()[0],
        remat=stage.remat,
        weights=stage.weights,
        compute_dtype="bfloat16",
    )
    batch = {"tokens": _tokens(amounts, microbatches)}
    program = compiled(pipe, batch, options=xla or None)
    params = pipe.place(gpt.init(amounts.config, jax.random.key(0)))
    row = timed(amounts, program, params, batch, None, states=None)
    row["ms per layer"] = row["ms"] / (depth * microbatches)
    if _on_gpu():
        row["modelled ms"] = modelled(pipe, program, amounts.config).seconds * 1e3
    return row


def steps(amounts: Amounts) -> Iterator[Run]:
    """All steps, plain ones first."""
    for remat in REMAT_POLICIES:
        yield f"plain, {remat}", functools.partial(plain, amounts, remat)
    for stage in amounts.stages:
        yield str(stage), functools.partial(staged, amounts, stage)


def options(amounts: Amounts) -> Iterator[Run]:
    """The first two stages with other options of XLA."""
    for stage, (name, xla) in itertools.product(amounts.stages[:2], _OPTIONS.items()):
        own = xla if _on_gpu() else {}  # CPUs have no such options
        yield f"{stage}, {name}", functools.partial(staged, amounts, stage, **own)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _tokens(amounts: Amounts, microbatches: int) -> jax.Array:
    config = amounts.config
    shape = amounts.rows * microbatches, config.sequence_length + 1
    return jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)


def attained(device: Device, found: list[Row]) -> Device:
    """The device with the rates of its best matmul, of 8 bits, attention and a copy; its links keep
    their figures."""

    def rate(program: str) -> float:
        rates = [row["T/s"] for row in found if row["name"].startswith(program)]
        return max(rates) * 1e12

    matmul = rate("matmul")
    efficiency = Efficiency(
        flops=matmul / device.flops,
        memory=rate("copy") / device.bandwidth,
        link=device.efficiency.link,
        attention=rate("attention, forward and backward") / matmul,
    )
    source = f"benchmarks/gpu_check.py on one {jax.devices()[0].device_kind}"
    fp8 = rate("fp8 matmul") / matmul
    return dataclasses.replace(device, efficiency=efficiency, fp8=fp8, source=source)


def main(
    amounts: Amounts, folder: Path = harness.RESULTS, minutes: float = math.inf
) -> dict[str, list[Row]]:
    """Runs what the minutes suffice for, prints it and writes it to the folder; returns the tables
    by name."""
    end, complete = time.monotonic() + 60 * minutes, True
    kind = jax.devices()[0].device_kind
    device, console = known(kind) or DEVICES["cpu"], Console(width=130)
    console.print(f"{kind}, jax {jax.__version__}; assumed rates: those of {device.name}")
    folder.mkdir(exist_ok=True)
    tables: dict[str, list[Row]] = {}
    contents = {"device": kind, "jax": jax.__version__, "tables": tables}
    wanted = {"steps": steps(amounts), "options": options(amounts), "rates": rates(amounts, device)}
    for title, runs in wanted.items():
        tables[title] = []
        for name, run in runs:
            if time.monotonic() >= end:
                complete = False
                console.print(f"Left out after {minutes:g} minutes: {name}")
                continue
            harness.note(name)
            try:
                row = run()
            except (
                Exception
            ) as error:  # of one program: the others may be all that there is time for
                complete = False
                console.print(f"{name}: {error}", markup=False)
                continue
            tables[title].append({"name": name} | row)
            (folder / "gpu_check.json").write_text(json.dumps(contents, indent=1) + "\n")
        _beside_plain(tables[title], tables["steps"])
        _print(console, title, tables[title])
    if complete:
        path = folder / "gpu_check_device.json"
        measured = dataclasses.asdict(attained(device, tables["rates"]))
        path.write_text(json.dumps({"device": measured}))
        console.print(f"jaxpipe plan ... --device {path}")
    console.print(f"Written to {folder}")
    return tables


def _beside_plain(rows: list[Row], found: list[Row]) -> None:
    """Adds the time per layer by that of the best plain step."""
    plain = [row["ms per layer"] for row in found if row["name"].startswith("plain")]
    for row in rows if plain else ():
        if "ms per layer" in row:
            row["of plain"] = row["ms per layer"] / min(plain)


def _print(console: Console, title: str, rows: list[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title)
    for row in rows:
        values = (row.get(name, "") for name in columns)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else v for v in values))
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=math.inf, help="to begin new rows in")
    parser.add_argument("--small", action="store_true", help="small shapes, as without a GPU")
    chosen = parser.parse_args()
    small = chosen.small or not _on_gpu()
    main(SMALL if small else LARGE, minutes=chosen.minutes)
