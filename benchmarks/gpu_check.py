"""Rates that one GPU attains, and the cost of a pipeline on it, beside what the models assume.

It takes four minutes on an H100 machine; without a GPU the same runs in small on the CPU. It prints
three tables and writes them to ``results/gpu_check.json``:

1. Rates of simple programs beside what the models of this project assume: matmuls by shape,
   attention, copies, fp8 and grouped matmuls.
2. Training steps of a GPT on one device: two plain jitted ones (`benchmarks/plain_steps.py`), and
   pipelines of one stage, by rematerialization, schedule and layout of the weights, with their
   memory as compiled and as predicted. On a GPU the roofline model stands beside the clock.
3. The fastest pipeline's step with XLA's autotuning and without.

``results/gpu_check_device.json`` holds the device with these rates, for ``jaxpipe plan --device``.
With one device there are no data shards: every ZeRO level is the same program.

    make gpu-check
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
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
from benchmarks.hlo import HloProgram
from benchmarks.modelled_steps import modelled
from benchmarks.plain_steps import plain_step
from jaxpipe.planning.devices import DEVICES, Device, Efficiency, known
from jaxpipe.runtime.measure import bytes_beside_arguments, compiled, predicted_bytes
from models import gpt
from models.grouped_matmul import grouped_matmul

_BF16, _FP8 = jnp.bfloat16, jnp.float8_e4m3fn
_NO_AUTOTUNING = {"xla_gpu_autotune_level": "0"}
Row = dict[str, Any]


class Amounts(NamedTuple):
    """How much is run.

    Args:
      config: the GPT of the steps.
      rows: of a microbatch.
      microbatches: of a step.
      remats: policies of rematerialization.
      schedules, weights: of the pipelines.
      matmuls: shapes ``(m, k, n)``.
      groups: number of experts of the grouped matmul.
      copied: bytes of the array that is copied.
      repeats: runs of a kernel that are timed together.
      steps: likewise of a step.
    """

    config: gpt.GPTConfig
    rows: int
    microbatches: int
    remats: tuple[str, ...]
    schedules: tuple[str, ...]
    weights: tuple[str, ...]
    matmuls: tuple[tuple[int, int, int], ...]
    groups: int
    copied: int
    repeats: int
    steps: int


LARGE = Amounts(
    gpt.GPTConfig(
        vocab_size=32768, sequence_length=2048, num_layers=8, width=2048, num_heads=16,
        dtype="bfloat16",
    ),
    rows=2, microbatches=8, remats=("none", "dots", "full"),
    schedules=("1f1b-fused", "1f1b"), weights=("unrolled", "stacked"),
    matmuls=(
        (4096, 2048, 2048), (4096, 2048, 8192), (8192, 8192, 8192), (8192, 8192, 28672),
        (1024, 1024, 1024),
    ),
    groups=8, copied=2**30, repeats=20, steps=5,
)  # fmt: skip
SMALL = Amounts(
    gpt.GPTConfig(
        vocab_size=64, sequence_length=16, num_layers=2, width=32, num_heads=2, dtype="bfloat16"
    ),
    rows=1, microbatches=2, remats=("dots",), schedules=("1f1b",), weights=("unrolled",),
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


def rates(amounts: Amounts, device: Device) -> Iterator[Row]:
    """Times programs of one kernel each; attained FLOPs or bytes per second beside the assumed."""
    flops = device.flops * device.efficiency.flops
    bandwidth = device.bandwidth * device.efficiency.memory

    def row(name: str, work: float, assumed: float, run: Any, *args: Any) -> Row:
        taken = seconds(jax.jit(run), *args, repeats=amounts.repeats)
        attained = work / taken
        return {"program": name, "ms": taken * 1e3, "T/s": attained / 1e12,
                "of the assumed": attained / assumed}  # fmt: skip

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


def timed(amounts: Amounts, name: str, program: jax.stages.Compiled, *args: Any, **kw: Any) -> Row:
    """Times a compiled step, and says how much memory it takes beside its arguments."""
    harness.note(name)
    taken = seconds(functools.partial(program, **kw), *args, repeats=amounts.steps)
    tokens = amounts.microbatches * amounts.rows * amounts.config.sequence_length
    gigabytes = bytes_beside_arguments(program) / 1e9
    return {"step": name, "ms": taken * 1e3, "tokens/s": tokens / taken, "GB": gigabytes}


def plain(amounts: Amounts, remat: str) -> Iterator[Row]:
    """Times the two steps without a pipeline."""
    config, params = amounts.config, gpt.init(amounts.config, jax.random.key(0))
    shape = amounts.microbatches, amounts.rows, config.sequence_length + 1
    tokens = _tokens(amounts).reshape(shape)
    for name in ("scan", "loop"):
        stacked = name == "scan"
        program = plain_step(config, remat, jax.devices()[0], shape, stacked=stacked)
        if not stacked:
            split = [jax.tree.map(lambda w, n=n: w[n], params["layers"])
                     for n in range(config.num_layers)]  # fmt: skip
            params = params | {"layers": split}
        yield timed(amounts, f"plain {name}, {remat}", program, params, tokens)


def pipeline(amounts: Amounts, schedule: str, weights: str, remat: str) -> jaxpipe.Pipeline:
    """Makes a pipeline of one stage."""
    return jaxpipe.Pipeline(
        gpt.model(amounts.config),
        jax.eval_shape(lambda: gpt.init(amounts.config, jax.random.key(0))),
        schedule=schedule,
        mesh=jaxpipe.make_mesh(stage=1, devices=jax.devices()[:1]),
        microbatches=amounts.microbatches,
        remat=remat,
        weights=weights,
        compute_dtype="bfloat16",
    )


def pipelined(amounts: Amounts, name: str, pipe: jaxpipe.Pipeline, **xla: str) -> Row:
    """Times a pipeline's step, compiled with these options of XLA, and models it for an H100."""
    batch, params = {"tokens": _tokens(amounts)}, gpt.init(amounts.config, jax.random.key(0))
    program = compiled(pipe, batch, options=xla or None)
    row = timed(amounts, name, program, pipe.place(params), batch, None, states=None)
    if _on_gpu():
        step = modelled(pipe, HloProgram(program.as_text()), amounts.config)
        row["modelled ms"] = step.seconds * 1e3
    return row


def steps(amounts: Amounts) -> Iterator[Row]:
    """Times all steps; "of plain" is the time by that of the faster plain step with that policy."""
    for remat in amounts.remats:
        found = list(plain(amounts, remat))
        best = min(row["ms"] for row in found)
        for schedule, weights in itertools.product(amounts.schedules, amounts.weights):
            pipe = pipeline(amounts, schedule, weights, remat)
            row = pipelined(amounts, f"{schedule}, {weights}, {remat}", pipe)
            predicted = predicted_bytes(pipe, {"tokens": _tokens(amounts)})
            row |= {
                "predicted GB": sum(predicted.values()) / 1e9,
                "options": (schedule, weights, remat),
            }
            found.append(row)
        yield from (row | {"of plain": row["ms"] / best} for row in found)


def autotuning(amounts: Amounts, fastest: tuple[str, str, str]) -> Iterator[Row]:
    """Times the fastest pipeline with XLA's autotuning and without it."""
    name = ", ".join(fastest)
    yield pipelined(amounts, f"{name}, autotuned", pipeline(amounts, *fastest))
    # CPUs have no such option.
    without = _NO_AUTOTUNING if _on_gpu() else {}
    yield pipelined(amounts, f"{name}, not autotuned", pipeline(amounts, *fastest), **without)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _tokens(amounts: Amounts) -> jax.Array:
    config = amounts.config
    shape = amounts.rows * amounts.microbatches, config.sequence_length + 1
    return jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)


def attained(device: Device, found: list[Row]) -> Device:
    """The device with the rates of its best matmul, of 8 bits, attention and a copy; its links keep
    their figures."""

    def rate(program: str) -> float:
        rates = [row["T/s"] for row in found if row["program"].startswith(program)]
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


def main(amounts: Amounts, folder: Path = harness.RESULTS) -> dict[str, list[Row]]:
    """Runs everything, prints it and writes it to the folder; returns the tables by name."""
    kind = jax.devices()[0].device_kind
    device, console = known(kind) or DEVICES["cpu"], Console(width=110)
    console.print(f"{kind}, jax {jax.__version__}; assumed rates: those of {device.name}")
    tables = {"rates": list(rates(amounts, device))}
    _print(console, "Rates", tables["rates"])
    tables["steps"] = list(steps(amounts))
    _print(console, "Steps", tables["steps"])
    piped = [row for row in tables["steps"] if "options" in row]
    fastest = min(piped, key=lambda row: row["ms"])["options"]
    tables["autotuning"] = list(autotuning(amounts, fastest))
    _print(console, "Autotuning", tables["autotuning"])
    folder.mkdir(exist_ok=True)
    contents = {"device": kind, "jax": jax.__version__, **tables}
    (folder / "gpu_check.json").write_text(json.dumps(contents, indent=1) + "\n")
    path = folder / "gpu_check_device.json"
    path.write_text(json.dumps({"device": dataclasses.asdict(attained(device, tables["rates"]))}))
    console.print(f"Written to {folder}. jaxpipe plan ... --device {path}")
    return tables


def _print(console: Console, title: str, rows: list[Row]) -> None:
    columns = [name for name in max(rows, key=len) if name != "options"]
    table = Table(*columns, title=title)
    for row in rows:
        values = (row.get(name, "") for name in columns)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else v for v in values))
    console.print(table)


if __name__ == "__main__":
    main(LARGE if _on_gpu() else SMALL)
