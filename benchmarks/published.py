"""Published training runs beside what the planner's model predicts for them.

Two predictions per run tell errors of the model and losses of the program apart: one for the system
that ran (its order on the free-running clock, with what it overlaps), and one for jaxpipe's own
program on the same mesh (its tick table on the device clock, where layers wait for collectives).
Both count layers from the same traces, and take the same rates of the devices.

    python -m benchmarks.published

``published_runs.csv`` and ``published_models.csv`` hold the runs, with their sources.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from inspect import get_annotations
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from scipy.optimize import least_squares

from benchmarks import harness
from benchmarks.studies import common
from jaxpipe.planning import devices
from jaxpipe.planning.cost import Prediction, kernel_seconds
from jaxpipe.planning.devices import Cluster, Efficiency
from jaxpipe.planning.plans import PlacedPlan, Plan, who_computes_ends
from jaxpipe.planning.search import fits, predicted
from jaxpipe.planning.sizes import Kernel, Linear, ModelSizes, Pass, Sizes
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.simulate import Costs, simulate
from models import gpt

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "published.md"
MOST_SHARING = 16
"""Devices that share a layer, at most: 8 over tensor, 2 over context."""
RANGE = 0.1, 1.0
"""Range in which rates are fitted."""
_AT_AN_END = 0.0005
"""Distance at which a rate is printed like an end of the range."""
FITTED = 2
"""Rates are fitted to the runs of every third model, from the third on."""


# Runs.


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model of the runs.

    Args:
      layers, width, heads, kv_heads, mlp_width, vocabulary, length: of a transformer.
      activation: "gelu" or "swiglu"; what takes as many matmuls stands for other functions.
      experts, experts_per_token: of a mixture; 0 for one MLP.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    activation: str
    vocabulary: int
    length: int
    experts: int
    experts_per_token: int

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    def config(self) -> gpt.GPTConfig:
        """The model as jaxpipe's trainer has it; all layers are alike, and two are traced."""
        more: dict[str, Any] = {}
        if not self.gated:
            more |= {"positions": "learned", "norm": "layer", "bias": True}
        if self.experts:
            # As many as a token is sent to, so that a device computes what balanced ones do.
            chosen = self.experts_per_token
            more |= {"num_experts": chosen, "experts_per_token": chosen, "capacity_factor": 1.0}
        return gpt.GPTConfig(
            vocab_size=self.vocabulary, sequence_length=self.length, num_layers=2,
            width=self.width, num_heads=self.heads, num_kv_heads=self.kv_heads,
            mlp_width=self.mlp_width, activation=self.activation, tied=not self.gated,
            dtype="bfloat16", **more,
        )  # fmt: skip


class Run(NamedTuple):
    """A row of the file: configuration, measurements (None where the source has none), source.

    Args:
      layers, length: where they are not the model's.
      gbits: of a GPU's port between hosts, Gb/s.
      chunks: per stage.
      rows, batch: of a microbatch on a data shard, and of a step.
      attention: "flash", one kernel, or "written", with scores in memory.
      sequence_parallel, tensor_overlap, message_overlap, data_overlap: "yes" if the system splits
        norms over tensor devices, and hides these collectives and messages under layers.
      zero: 1 for a distributed optimizer.
      ends_in_layers: "yes" if embedding and loss count as a layer each.
      step_seconds, mfu, tflops, memory_gb: measured; MFU in % of the peak of the precision, and
        TFLOP/s of a GPU as the source counts them.
    """

    id: str
    model: str
    layers: int | None
    length: int | None
    device: str
    gbits: float
    gpus: int
    tensor: int
    stages: int
    chunks: int
    context: int
    expert: int
    data: int
    rows: int
    batch: int
    schedule: str
    precision: str
    remat: str
    attention: str
    sequence_parallel: str | None
    tensor_overlap: str | None
    message_overlap: str | None
    data_overlap: str | None
    zero: int
    ends_in_layers: str | None
    step_seconds: float | None
    mfu: float | None
    tflops: float | None
    memory_gb: float | None
    source: str

    @property
    def microbatches(self) -> int:
        return self.batch // (self.data * self.rows)

    @property
    def local_rows(self) -> float:
        """Rows of a microbatch on a device: half a row where two share a sequence."""
        return self.rows / self.context

    @property
    def shape(self) -> Shape:
        """The model, as the run cuts it."""
        own = {"layers": self.layers, "length": self.length}
        given = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(shapes()[self.model], **given)

    @property
    def measured(self) -> float:
        """Seconds of a step; from the FLOPs that the source counts where it gives only a rate."""
        if self.step_seconds is not None:
            return self.step_seconds
        assert self.tflops is not None
        return sc21_flops(self.shape, self.batch) / (self.tflops * 1e12 * self.gpus)


def _typed(annotation: Any, text: str) -> Any:
    annotation = getattr(annotation, "__forward_arg__", annotation)
    if text == "" and "None" in annotation:
        return None
    return {"int": int, "float": float, "str": str}[annotation.split()[0]](text)


def runs() -> tuple[Run, ...]:
    """Reads the runs of ``published_runs.csv``."""
    types = get_annotations(Run)
    with (FOLDER / "published_runs.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Run(**{name: _typed(types[name], row[name]) for name in types})
            for row in csv.DictReader(file)
        )


@functools.cache
def shapes() -> Mapping[str, Shape]:
    """Reads the models of ``published_models.csv``, by name."""
    types = get_annotations(Shape)
    with (FOLDER / "published_models.csv").open(encoding="utf-8", newline="") as file:
        return {
            row["name"]: Shape(**{name: _typed(types[name], row[name]) for name in types})
            for row in csv.DictReader(file)
        }


def sc21_flops(shape: Shape, batch: int) -> float:
    """FLOPs of a step with a recomputed forward (Narayanan et al. 2021, section 5.1).

    96 B s l h^2 (1 + s / 6 h + V / 16 l h).
    """
    s, n, h, v = shape.length, shape.layers, shape.width, shape.vocabulary
    return 96 * batch * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))


def dgxc_flops(shape: Shape, batch: int) -> float:
    """FLOPs of a step as NVIDIA/dgxc-benchmarking counts them: attention is not halved."""
    s, n, h, v = shape.length, shape.layers, shape.width, shape.vocabulary
    f, keys = shape.mlp_width, shape.kv_heads / shape.heads
    if shape.gated:
        of_layers = 12 * n * h**2 * (1 + keys + s / h) + 18 * n * f * h
    else:
        of_layers = 24 * n * h**2 + 12 * n * h * s + 48 * n * h**2
    return batch * s * (of_layers + 6 * h * v)


# Rates of the devices.


class Rates(NamedTuple):
    """The numbers that are fitted, all shares.

    Args:
      h100_matmul, a100_matmul: of the peak, which large matmuls attain.
      memory: of the memory's bandwidth.
      exposed: of tensor collectives, for which a system waits that overlaps them.
    """

    h100_matmul: float = 0.70
    a100_matmul: float = 0.85
    memory: float = 0.90
    exposed: float = 0.40


ATTENTION = 0.75
"""Of the rate of matmuls, which fused attention attains: cuDNN's causal forward on an H100 at heads
of 128 and 8192 tokens, 529 TFLOP/s (Shah et al. 2024, arXiv 2407.08608, figure 5)."""
LOADS = 1.0
"""Share of a matmul's bytes beside its FLOPs. At 1, W of 1024 tokens attains .95 of the rate of
6144, as in table 6 of Qi et al. 2024 (arXiv 2401.10241)."""
MESSAGE_SECONDS, MESSAGE_RATE = 0.25e-3, 80e9
"""Of a message of Megatron between stages, and bytes per second beyond it: the line through the
messages of that table, 10.5 to 28 MB on A100s."""
FP8_SPEED = 2.0
"""Of matmuls in 8 bits, by the data sheet."""
CAST_BYTES = 4
"""Per element that is cast to 8 bits: read, and written twice, the second time transposed."""
STATE_BYTES = 18
"""Per parameter, in mixed precision with Adam (Rajbhandari et al. 2020, section 3.1), with sums of
gradients in float32."""
UPDATE_BYTES = 30
"""Per parameter that an update reads and writes: three float32 numbers there and back, the
gradient, and the parameter in 16 bits."""


def cluster_of(run: Run, rates: Rates) -> Cluster:
    """Makes the devices of a run, with what they attain."""
    device = devices.DEVICES[run.device]
    attained = Efficiency(
        flops=getattr(rates, f"{run.device}_matmul"),
        memory=rates.memory,
        attention=ATTENTION,
        loads=LOADS,
    )
    device = dataclasses.replace(device, efficiency=attained)
    return devices.cluster(device, run.gpus, link=f"nvlink:8,ib:{run.gbits:g}")


# Layers.


@functools.cache
def counted(
    config: gpt.GPTConfig, tensor: int, remat: str, attention: str, context: int = 1
) -> ModelSizes:
    """Traces two layers, with attention as one kernel ("flash"), or with scores in memory."""
    name = f"width {config.width}, {tensor} x {context}, {remat}, {attention}"
    written = mock.patch.object(jax.nn, "dot_product_attention", _written_attention)
    with written if attention == "written" else contextlib.nullcontext():
        return common.sizes(name, config, tensors=(tensor,), remats=(remat,), context=context)


def _written_attention(q: Any, k: Any, v: Any, *, scale: float, **options: Any) -> Any:
    """Causal attention in 16 bits before there was a fused one."""
    del options
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


class Work(NamedTuple):
    """A pass of a layer or of the head on one device, of a system that is not jaxpipe.

    Args:
      kernels: in 16 bits.
      cast: elements that are cast, in a system that multiplies in 8 bits.
      sent: bytes over the tensor axis.
      exchanged: bytes between the devices of different experts.
    """

    kernels: tuple[Kernel, ...]
    cast: float
    sent: float
    exchanged: float = 0.0


def _work(layer_pass: Pass, rows: float, least: float) -> Work:
    """Takes what grows with rows of kernels that are no matmuls: casts of weights run once per step
    in systems that keep a copy of 16 bits. Those that move less than an activation are part of
    others where kernels are written by hand."""
    kernels = tuple(
        kernel
        if kernel.kind == "matmul"
        else kernel._replace(bytes=Linear(0.0, kernel.bytes.per_row))
        for kernel in layer_pass.kernels
        if kernel.kind != "other" or kernel.bytes.per_row >= least
    )
    sent = sum(c.sent.at(rows) for c in layer_pass.collectives if "tensor" in c.axis)
    return Work(kernels, 0.0, sent)


@functools.cache
def works(run: Run) -> tuple[Work, ...]:
    """Counts F, B and W of a layer, and the head.

    Kernels beside fused attention are fused as with rematerialization of all but weight matmuls,
    and none is computed again. Without sequence parallelism every device computes all of what heads
    and hidden units do not split: the kernels of a layer that has next to none of these.
    """

    def passes(config: gpt.GPTConfig, remat: str) -> list[Work]:
        sizes = sizes_of(counted(config, run.tensor, remat, run.attention))
        least = sizes.message.per_row
        return [_work(one, run.local_rows, least) for one in (*sizes.layers[0].passes, sizes.head)]

    shape, config = run.shape, run.shape.config()
    *layer, head = passes(config, run.remat)
    if run.attention == "flash":
        fused = passes(config, "dots")
        layer = [
            work._replace(kernels=_of(work, "matmul", "attention") + _of(other, "other"))
            for work, other in zip(layer, fused, strict=False)
        ]
    if run.tensor > 1 and not run.sequence_parallel:
        few = {"num_heads": run.tensor, "num_kv_heads": run.tensor, "head_size": 8}
        narrow = dataclasses.replace(config, mlp_width=8 * run.tensor, **few)
        layer = [
            work._replace(kernels=work.kernels + (run.tensor - 1) * _of(other, "other"))
            for work, other in zip(layer, passes(narrow, run.remat), strict=False)
        ]
    if run.precision == "fp8":
        hidden = (2 if shape.gated else 1) * shape.mlp_width
        per_token = 2 * shape.width + (shape.width + hidden) / run.tensor
        cast = run.local_rows * shape.length * per_token
        layer = [work._replace(cast=cast) for work in layer[:2]] + [layer[2]._replace(cast=1.0)]
    if run.expert > 1:
        # Tokens go to their experts, and come back.
        tokens = run.local_rows * shape.length / run.tensor * shape.experts_per_token
        exchanged = 2 * 2 * tokens * shape.width * (run.expert - 1) / run.expert
        layer = [work._replace(exchanged=exchanged) for work in layer[:2]] + layer[2:]
    return *layer, head


def _of(work: Work, *kinds: str) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in work.kernels if kernel.kind in kinds)


def sizes_of(model: ModelSizes) -> Sizes:
    """Takes the only sizes of a model."""
    (sizes,) = model.variants.values()
    return sizes


class Parts(NamedTuple):
    """Seconds of a pass: kernels, and collectives that nothing hides."""

    kernels: float
    collectives: float


def pass_seconds(work: Work, run: Run, rates: Rates) -> Parts:
    """Times a pass of the system that ran."""
    cluster = cluster_of(run, rates)
    seconds = CAST_BYTES * work.cast / cluster.bandwidth
    for kernel in work.kernels:
        if work.cast and kernel.kind == "matmul":
            kernel = kernel._replace(flops=Linear(*(n / FP8_SPEED for n in kernel.flops)))
        seconds += kernel_seconds(kernel, run.local_rows, cluster)
    shown = rates.exposed if run.tensor_overlap else 1.0
    collectives = shown * work.sent / cluster.within
    return Parts(seconds, collectives + work.exchanged / cluster.link(run.expert * run.tensor))


# Steps of other systems.


@functools.lru_cache(maxsize=256)
def order_of(run: Run, microbatches: int) -> Schedule:
    """Builds the order of a run, for so many microbatches; ZB-2p is taken for ZB-H2."""
    name = run.schedule.replace("zb-2p", "zb-h2")
    return catalog.build(name, stages=run.stages, microbatches=microbatches, chunks=run.chunks)


def layer_counts(run: Run) -> list[int]:
    """Counts the layers of every virtual stage; embedding and loss may count as one each."""
    count = run.stages * run.chunks
    per_chunk, left = divmod(run.shape.layers + (2 if run.ends_in_layers else 0), count)
    if left:
        raise ValueError(f"{run.id}: {run.shape.layers} layers do not fill {count} chunks")
    layers = [per_chunk] * count
    if run.ends_in_layers:
        layers[0] -= 1
        layers[-1] -= 1
    return layers


def pipeline_seconds(run: Run, layer: Costs, head: float) -> float:
    """Times a step's layers and head on the free-running clock, in the order of the run.

    Long steps lie on the line through two shorter ones, as in `jaxpipe.planning.cost`.
    """
    p, m, longest = run.stages, run.microbatches, 3 * run.stages + run.microbatches % run.stages
    if p == 1:
        return m * (run.shape.layers * (layer.f + layer.b + layer.w) + head)
    cases = [(m, 1.0)]
    if m > longest + p:
        periods = (m - longest) / p
        cases = [(longest, 1 + periods), (longest - p, -periods)]
    return sum(weight * _makespan(run, layer, head, short) for short, weight in cases)


def _makespan(run: Run, layer: Costs, head: float, microbatches: int) -> float:
    # A system whose messages are not hidden waits for them in F and in B.
    waits = 0.0 if run.message_overlap else layer.message
    hidden, least = layer.message - waits, 1e-9  # costs are above 0
    chunks = [
        Costs(n * layer.f + waits + least, n * layer.b + waits + least, n * layer.w + least, hidden)
        for n in layer_counts(run)
    ]
    last, third = chunks[-1], head / 3
    chunks[-1] = Costs(last.f + third, last.b + third, last.w + third, last.message)
    timeline = simulate(order_of(run, microbatches), chunks)
    # Each stage of Zero Bubble enters the next step on its own (its section 4).
    return max(timeline.stage_spans) if run.schedule.startswith("zb") else timeline.makespan


def system_seconds(run: Run, rates: Rates) -> dict[str, float]:
    """Predicts a step of the system that ran, by part."""
    *layer, head = (pass_seconds(work, run, rates) for work in works(run))
    costs = Costs(*map(sum, layer), message_seconds(run))
    pipeline = pipeline_seconds(run, costs, sum(head))
    passes = run.microbatches * run.shape.layers / run.stages
    kernels, collectives = (passes * sum(values) for values in zip(*layer, strict=True))
    return {
        "kernels": kernels,
        "collectives": collectives,
        "waits": pipeline - kernels - collectives,
        "data": data_seconds(run, rates),
    }


def message_seconds(run: Run) -> float:
    """Times a message between stages, of which every tensor device sends a part."""
    if run.stages == 1:
        return 0.0
    size = 2 * run.local_rows * run.shape.length * run.shape.width / run.tensor
    return MESSAGE_SECONDS + size / MESSAGE_RATE


def parameters(run: Run) -> float:
    """Counts the parameters of a device: a stage's layers, and embedding or head."""
    shape = run.shape
    sizes = sizes_of(counted(shape.config(), run.tensor, run.remat, run.attention))
    outer = shape.vocabulary * shape.width / run.tensor
    more = shape.experts / run.expert - shape.experts_per_token
    of_experts = more * 3 * shape.width * shape.mlp_width / run.tensor
    return shape.layers / run.stages * (sizes.layers[0].parameters + of_experts) + outer


def data_seconds(run: Run, rates: Rates) -> float:
    """Times the optimizer, and what nothing hides of the sums of gradients and of the gathers of
    parameters, both in 16 bits: those of a chunk in systems that overlap them."""
    cluster, sharers = cluster_of(run, rates), run.data * run.context
    updated = parameters(run) / (sharers if run.zero else 1)
    update = UPDATE_BYTES * updated / cluster.bandwidth
    # Devices of a host that are in one group send through its ports together.
    per_host = max(1, min(cluster.per_host // run.tensor, sharers))
    link = min(cluster.within, per_host * cluster.across)
    if run.gpus == cluster.per_host:
        link = cluster.within
    sent = 2 * 2 * parameters(run) * (sharers - 1) / sharers
    chunks = run.chunks if run.stages > 1 else run.shape.layers
    return update + sent / link / (chunks if run.data_overlap else 1)


def system_bytes(run: Run) -> float:
    """Predicts the memory of the stage that needs most: its state, and activations in flight.

    A layer keeps s b h (34 + 5 a s / h) bytes (Korthikanti et al. 2022, equation 1).
    """
    shape, order = run.shape, order_of(run, min(run.microbatches, 4 * run.stages))
    s, h, a = shape.length, shape.width, shape.heads
    kept = run.rows * s * h * (34 + 5 * a * s / h)
    by_stage = np.array(layer_counts(run)).reshape(run.chunks, run.stages).sum(axis=0)
    own = 12 * h**2 * by_stage.astype(float)
    own[[0, -1]] += shape.vocabulary * h
    in_flight = np.array(order.peak_in_flight) / run.chunks * by_stage
    return float((STATE_BYTES * own + kept * in_flight).max())


# Steps of jaxpipe.


def own_prediction(run: Run, rates: Rates) -> Prediction:
    """Predicts jaxpipe's program of the mesh: the fastest that fits, or else of the leanest.

    Rematerialization, who computes the ends, and ZeRO-2 in place of 1 may be chosen; schedule and
    microbatches are those of the run.
    """
    made = []
    for remat in ("full",) if run.remat == "full" else ("none", "dots", "full"):
        traced = counted(run.shape.config(), run.tensor, remat, "flash", run.context)
        (variant, sizes), *_ = traced.variants.items()
        sizes = sizes._replace(kind_of=(0,) * run.shape.layers)
        model = dataclasses.replace(traced, variants={variant: sizes})
        choices = itertools.product(
            who_computes_ends(model, variant, run.stages),
            (1, 2) if run.zero and run.data > 1 else (0,),
        )
        for ends, zero in choices:
            chunks = min(run.chunks, run.shape.layers // run.stages)
            plan = Plan(
                stage=run.stages, data=run.data, context=run.context, tensor=run.tensor,
                replica=1, schedule=run.schedule.replace("zb-2p", "zb-h2"), chunks=chunks,
                microbatches=run.microbatches, rows=run.rows, remat=remat, zero=zero,
                weight_slots=min(zero or 1, chunks), weights="unrolled", ends=ends,
            )  # fmt: skip
            made.append(predicted(PlacedPlan(plan, model, cluster_of(run, rates))))
    least = min(one.device_bytes for one in made)
    allowed = list(filter(fits, made)) or [m for m in made if m.device_bytes <= _NEAR * least]
    return min(allowed, key=lambda one: one.step_seconds)


_NEAR = 1.1
"""Factor of the least memory up to which a program is among the leanest."""


def own_seconds(prediction: Prediction) -> dict[str, float]:
    """The parts of `system_seconds`, and copies into slots, out of them, and of weights."""
    placed, seconds = prediction.placed, prediction.seconds
    plan, cluster = placed.plan, placed.cluster
    passes = plan.microbatches * placed.model.num_layers / plan.stage
    layer = placed.sizes.layers[0].passes
    kernels = sum(kernel_seconds(k, plan.rows, cluster) for one in layer for k in one.kernels)
    collectives = sum(
        c.sent.at(plan.rows) / placed.sharing_links.along(c.axis)
        for one in layer
        for c in one.collectives
    )
    return {
        "kernels": passes * kernels,
        "collectives": passes * collectives,
        "copies": seconds["layers"] - passes * (kernels + collectives),
        "waits": seconds["waits"] + seconds["head"],
        "data": seconds["transfers"] + seconds["update"],
    }


# The board.


def thirds(every: Sequence[Run]) -> list[list[Run]]:
    """Splits the dense runs by their models, of which every third is in the same part."""
    dense = [run for run in every if not run.shape.experts]
    names = list(dict.fromkeys(run.model for run in dense))
    return [[run for run in dense if names.index(run.model) % 3 == part] for part in range(3)]


def fit(runs: Sequence[Run], start: Rates) -> Rates:
    """Fits the rates to the logarithms of steps."""

    def errors(values: np.ndarray) -> list[float]:
        return [math.log1p(_error(run, Rates(*values))) for run in runs]

    found = least_squares(errors, start, bounds=RANGE, diff_step=1e-3, ftol=1e-4, xtol=1e-3)
    return Rates(*map(float, found.x))


def _error(run: Run, rates: Rates) -> float:
    return sum(system_seconds(run, rates).values()) / run.measured - 1


class Row(NamedTuple):
    """A row of the board.

    Args:
      run: the published run.
      fitted: whether the rates were fitted to it.
      system: seconds of the system that ran, by part.
      prediction: of jaxpipe's program of the same mesh; None for mixtures.
      gigabytes: memory predicted for the system; None where the source has none.
    """

    run: Run
    fitted: bool
    system: Mapping[str, float]
    prediction: Prediction | None
    gigabytes: float | None

    @property
    def predicted(self) -> float:
        return sum(self.system.values())

    @property
    def error(self) -> float:
        return self.predicted / self.run.measured - 1

    def cells(self) -> dict[str, str]:
        """Makes the cells of the table, by column."""
        cells = {
            "run": self.run.id + ("*" if self.fitted else ""),
            "measured": f"{self.run.measured:.3g}",
            "predicted": f"{self.predicted:.3g}",
            "error": f"{100 * self.error:+.0f}%",
        }
        if self.prediction is None:
            return cells | dict.fromkeys(("jaxpipe", "ratio", "loses"), "")
        plan, own = self.prediction.plan, own_seconds(self.prediction)
        more = {name: seconds - self.system.get(name, 0.0) for name, seconds in own.items()}
        causes = [name for name in sorted(more, key=lambda name: -more[name]) if more[name] > 0]
        ratio = sum(own.values()) / self.predicted
        gigabytes = self.prediction.device_bytes / 1e9
        words = [f"{name} {more[name]:.2g}" for name in causes[:_CAUSES]]
        words += [] if fits(self.prediction) else [f"{gigabytes:.0f} GB"]
        return cells | {
            "jaxpipe": f"{sum(own.values()):.3g}, {plan.remat}"
            + (f", ZeRO-{plan.zero}" if plan.zero else ""),
            "ratio": f"{ratio:.2f}",
            "loses": ", ".join(words) if ratio > 1 else "",
        }


_CAUSES = 2
"""Parts that are named per run."""


def board(every: Sequence[Run], rates: Rates) -> list[Row]:
    """Makes a row per run."""
    rows, fitted = [], thirds(every)[FITTED]
    for run in every:
        prediction = None if run.shape.experts else own_prediction(run, rates)
        gigabytes = None if run.memory_gb is None else system_bytes(run) / 1e9
        rows.append(Row(run, run in fitted, system_seconds(run, rates), prediction, gigabytes))
        harness.note(f"{run.id}: {run.measured:.4g} s, predicted {rows[-1].predicted:.4g}")
    return rows


def ranked(rows: Sequence[Row]) -> tuple[int, int]:
    """Counts pairs of schedules, of one model and batch, that are ordered as measured, and all."""
    right = total = 0
    for one, other in itertools.combinations(rows, 2):
        same = (one.run.model, one.run.batch) == (other.run.model, other.run.batch)
        if same and one.run.gpus == other.run.gpus and one.run.schedule != other.run.schedule:
            total += 1
            by = one.run.measured - other.run.measured, one.predicted - other.predicted
            right += by[0] * by[1] >= 0
    return right, total


def summary(rows: Sequence[Row], rates: Rates) -> list[str]:
    """Says in words how good the predictions are."""
    dense, every = [row for row in rows if not row.run.shape.experts], [row.run for row in rows]
    fitted = sum(row.fitted for row in dense)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in rates._asdict().items())
    least, most = RANGE
    ends = [name for name, n in rates._asdict().items() if min(n - least, most - n) < _AT_AN_END]
    if ends:
        shown += f" ({' and '.join(ends)} at an end of the range, {least} to {most})"
    lines = [
        f"Fitted to {fitted} dense runs, those of every third model, marked *: {shown}. The "
        f"absolute error of the other {len(dense) - fitted}: "
        f"{_quantiles([row.error for row in dense if not row.fitted])}."
    ]
    for part in (0, 1):
        of_part = thirds(every)[part]
        other = fit(of_part, rates)
        errors = [_error(run, other) for run in every if not run.shape.experts | (run in of_part)]
        lines.append(
            f"Fitted to the {len(of_part)} of the {('first', 'second')[part]} of three models "
            f"instead: {_quantiles(errors)}."
        )
    mixtures = [row.error for row in rows if row.run.shape.experts]
    pairs, memory = ranked(rows), [row for row in rows if row.gigabytes is not None]
    off = [abs(row.gigabytes / row.run.memory_gb - 1) for row in memory]
    room = devices.DEVICES["a100"].memory_bytes / 1e9
    wrong = sum(row.gigabytes > room for row in memory)
    return [
        *lines,
        f"{len(mixtures)} mixtures, none fitted: {_quantiles(mixtures)}.",
        f"Of {pairs[1]} pairs of schedules with the same model and batch, {pairs[0]} are ordered "
        "as measured.",
        f"Memory of {len(off)} runs: {np.median(off):.1%} off in the median, {max(off):.1%} at "
        f"most; {wrong} that ran are predicted not to fit. No source names a run out of memory.",
    ]


def _quantiles(errors: Sequence[float]) -> str:
    off = np.abs(errors)
    return (
        f"median {np.median(off):.1%}, 90th percentile {np.quantile(off, 0.9):.1%}, "
        f"{np.mean(off <= 0.15):.0%} within 15%"
    )


_INTRODUCTION = """\
# Published runs

`make published` writes this page. Seconds of a step that others measured stand beside two
predictions: for the system that ran, and for jaxpipe's program on the same mesh. Both count layers
from traces ([planner](design/009-planner.md)) and take the same rates. The system's order runs on
the free-running clock, its communication overlaps as noted below, and nothing is copied into
slots. jaxpipe's program runs its tick table in 16 bits with cuDNN's attention and weights unrolled;
of policies, and of ZeRO-1 and 2, it has the fastest for which at most 68 of 80 GB are predicted, as
`jaxpipe plan` allows, or else of the leanest. "ratio" is jaxpipe's step by that predicted for the
system. Where it is above 1, the last column names what loses most, in seconds, and the memory if it
is more:

- kernels: XLA fuses less, computes again, or lacks 8 bits;
- collectives: layers wait for all of theirs;
- copies: values into slots and out of them, and sums of gradients;
- waits: for other stages, messages and the head;
- data: over data shards, and the optimizer.

Rates are shares: of the peak, for large matmuls on H100s and A100s; of the memory's bandwidth; and
of tensor collectives, how much is exposed in systems that overlap them.

"""
_ENDING = """
A are runs on H100s (NVIDIA/dgxc-benchmarking), D Megatron-LM of 2021 on A100s with full
rematerialization, F Zero Bubble (arXiv 2401.10241) on A100s, whose ZB-2p, a searched order, is
predicted as ZB-H2. It is assumed that A overlaps its tensor collectives and messages, and that D
and 1F1B of F wait for messages. Configurations and sources: `benchmarks/published_runs.csv` and
`published_models.csv`.
"""


def page(rows: Sequence[Row], said: Sequence[str]) -> str:
    """Writes docs/published.md."""
    cells = [row.cells() for row in rows]
    lines = [cells[0], dict.fromkeys(cells[0], "---"), *cells]
    lines[0] = {name: name for name in cells[0]}
    table = "\n".join(f"|{'|'.join(line.values())}|" for line in lines)
    return f"{_INTRODUCTION}{textwrap.fill(' '.join(said), 100)}\n\n{table}\n{_ENDING}"


def main() -> None:
    """Prints the board, and writes docs/published.md."""
    every = runs()
    harness.simulate(MOST_SHARING)
    rates = fit(thirds(every)[FITTED], Rates())
    rows = board(every, rates)
    drawn, (axes,) = common.figure(columns=1)
    axes.plot([row.run.measured for row in rows], [row.predicted for row in rows], ".")
    axes.set_xlabel("seconds of a step, measured", fontsize=8)
    axes.set_ylabel("predicted", fontsize=8)
    axes.loglog()
    details = [
        {"run": row.run.id, "system": row.system}
        | ({"jaxpipe": own_seconds(row.prediction)} if row.prediction else {})
        for row in rows
    ]
    cells = [row.cells() for row in rows]
    title = "published runs, seconds of a step"
    harness.write("published", cells, title=title, figure=drawn, details=details)
    said = summary(rows, rates)
    print("\n".join(said))
    PAGE.write_text(page(rows, said), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
