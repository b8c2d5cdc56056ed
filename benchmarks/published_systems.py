"""Published training runs, and what the planner's model predicts for the systems that ran.

Layers are counted from the traces of jaxpipe's models; a system's order runs on the free-running
clock, with what it overlaps. ``published_runs.csv`` and ``published_models.csv`` hold the runs,
with their sources.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from inspect import get_annotations
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.studies import common
from jaxpipe.planning import devices
from jaxpipe.planning.cost import kernel_seconds
from jaxpipe.planning.devices import Cluster
from jaxpipe.planning.sizes import Kernel, Linear, ModelSizes, Pass, Sizes
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.simulate import Costs, simulate
from models import gpt

FOLDER = Path(__file__).parent


# Runs.


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model of the runs.

    Args:
      layers, width, heads, kv_heads, mlp_width, vocabulary, length: of a transformer.
      activation: "gelu" or "swiglu"; what takes as many matmuls stands for other functions.
      experts, experts_per_token: of a mixture, whose ``mlp_width`` is an expert's; 0 for one MLP.
      further: layers that predict further tokens, each with a head of its own.
      more: other fields of `models.gpt.GPTConfig`, "name=number" apart by spaces. First layers that
        are dense are taken for mixtures, which multiply as much.
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
    further: int
    more: str

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    def config(self) -> gpt.GPTConfig:
        """The model as jaxpipe's trainer has it; layers of every kind are traced."""
        given = (field.split("=") for field in self.more.split())
        more: dict[str, Any] = {name: int(number) for name, number in given}
        if not self.gated:
            more |= {"positions": "learned", "norm": "layer", "bias": True}
        if self.experts:
            # As many as a token is sent to, so that a device computes what balanced ones do.
            chosen = self.experts_per_token
            more |= {"num_experts": chosen, "experts_per_token": chosen, "capacity_factor": 1.0}
        return gpt.GPTConfig(
            vocab_size=self.vocabulary, sequence_length=self.length,
            num_layers=more.get("global_every", 2),
            width=self.width, num_heads=self.heads, num_kv_heads=self.kv_heads,
            mlp_width=self.mlp_width, activation=self.activation, tied=not self.gated,
            dtype="bfloat16", **more,
        )  # fmt: skip


class Run(NamedTuple):
    """A row of the file: configuration, measurements (None where the source has none), source.

    Args:
      date: of its software, or of the source: year and month.
      layers, length: where they are not the model's.
      gbits: of a GPU's port between hosts, Gb/s.
      per_host: GPUs that NVLink joins.
      chunks: per stage.
      rows, batch: of a microbatch on a data shard, and of a step.
      attention: "flash", one kernel, or "written", with scores in memory.
      sequence_parallel, tensor_overlap, message_overlap, data_overlap: "yes" if the system splits
        norms over tensor devices, and hides these collectives and messages under layers.
      grouped: share of a plain matmul's rate that those of experts attain alone, where it is known:
        Pallas' on an H100 with 64 experts (benchmarks/studies/h100.md).
      zero: 1 for a distributed optimizer, 3 where weights lie apart, too (FSDP).
      ends_in_layers: "yes" if embedding and loss count as a layer each.
      step_seconds, mfu, tflops, memory_gb: measured; MFU in % of the peak of the precision, and
        TFLOP/s of a GPU as the source counts them. All None for a run out of memory.
    """

    id: str
    date: str
    model: str
    layers: int | None
    length: int | None
    device: str
    gbits: float
    per_host: int
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
    grouped: float | None
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
    def fits(self) -> bool:
        """Whether it ran at all."""
        return self.step_seconds is not None or self.tflops is not None

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


# Rates of the devices.


class Rates(NamedTuple):
    """The numbers that are fitted; all others are measured alone.

    Args:
      sustained: share of the rate of matmuls alone that steps attain (`devices.SUSTAINED`).
      exposed: of tensor collectives, for which a system waits that overlaps them.
      straggling: share of a step per doubling beyond 8 GPUs (`devices.STRAGGLING`).
    """

    sustained: float = devices.SUSTAINED
    exposed: float = 0.42
    straggling: float = devices.STRAGGLING


MESSAGE_SECONDS, MESSAGE_RATE = 0.25e-3, 80e9
"""Seconds of a message of Megatron between stages, and bytes per second beyond: the line through
the messages of that table, 10.5 to 28 MB on A100s."""
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
    attained = dataclasses.replace(device.efficiency, sustained=rates.sustained)
    device = dataclasses.replace(device, efficiency=attained)
    return devices.cluster(device, run.gpus, link=f"nvlink:{run.per_host},ib:{run.gbits:g}")


# Layers.


@functools.cache
def counted(
    config: gpt.GPTConfig,
    tensor: int,
    remat: str,
    attention: str,
    context: int = 1,
    precision: str = "bf16",
) -> ModelSizes:
    """Traces two layers, with attention as one kernel ("flash"), or with scores in memory."""
    name = f"width {config.width}, {tensor} x {context}, {remat}, {attention}, {precision}"
    chosen = () if precision == "bf16" else ("*kernel",)
    written = mock.patch.object(jax.nn, "dot_product_attention", _written_attention)
    with written if attention == "written" else contextlib.nullcontext():
        return common.sizes(
            name, config, tensors=(tensor,), remats=(remat,), context=context, fp8=chosen
        )


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
      cast: elements that are cast, in a system that multiplies in 8 or 4 bits.
      sent: bytes over the tensor axis.
      exchanged: bytes between the devices of different experts.
      of_experts: FLOPs of their matmuls.
    """

    kernels: tuple[Kernel, ...]
    cast: float
    sent: float
    exchanged: float = 0.0
    of_experts: float = 0.0


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
    """Counts F, B and W of a layer, the mean if attention differs, and the head.

    Kernels beside fused attention are fused as with rematerialization of all but weight matmuls,
    and none is computed again. Without sequence parallelism every device computes all of what heads
    and hidden units do not split: the kernels of a layer that has next to none of these.
    """

    def passes(config: gpt.GPTConfig, remat: str) -> list[Work]:
        sizes = sizes_of(counted(config, run.tensor, remat, run.attention))
        least = sizes.message.per_row
        of_kinds = [
            [_work(one, run.local_rows, least) for one in layer.passes] for layer in sizes.layers
        ]
        shares = [sizes.kind_of.count(n) / len(sizes.kind_of) for n in range(len(of_kinds))]
        mean = [_mean(works, shares) for works in zip(*of_kinds, strict=True)]
        return [*mean, _work(sizes.head, run.local_rows, least)]

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
    if run.precision != "bf16":
        hidden = (2 if shape.gated else 1) * shape.mlp_width * max(shape.experts_per_token, 1)
        per_token = 2 * shape.width + (shape.width + hidden) / run.tensor
        cast = run.local_rows * shape.length * per_token
        layer = [work._replace(cast=cast) for work in layer[:2]] + [layer[2]._replace(cast=1.0)]
    if run.expert > 1:
        # Tokens go to their experts, and come back.
        tokens = run.local_rows * shape.length / run.tensor * shape.experts_per_token
        exchanged = 2 * 2 * tokens * shape.width * (run.expert - 1) / run.expert
        f, b, w = layer
        again = 2 if run.remat == "full" else 1
        layer = [f._replace(exchanged=exchanged), b._replace(exchanged=again * exchanged), w]
    if shape.experts:  # a device reads all of its experts, of which the trace has the chosen ones
        more = max(0.0, 2 * _other_experts(run))
        read = Kernel(Linear(0.0, 0.0), Linear(more, 0.0))
        flops = 6 * run.local_rows * shape.length * shape.width * shape.mlp_width / run.tensor
        flops *= shape.experts_per_token
        times = (1, 2 if run.remat == "full" else 1, 1)
        layer = [
            work._replace(kernels=(*work.kernels, read), of_experts=n * flops)
            for work, n in zip(layer, times, strict=True)
        ]
    return *layer, head


def _mean(works: Sequence[Work], shares: Sequence[float]) -> Work:
    """Makes the work of a layer whose share of attention is the mean of several kinds'."""
    first, flops = works[0], 0.0
    for work, share in zip(works, shares, strict=True):
        flops += share * sum(kernel.flops.at(1) for kernel in _of(work, "attention"))
    own = sum(kernel.flops.at(1) for kernel in _of(first, "attention"))
    kernels = tuple(
        kernel._replace(flops=Linear(0.0, kernel.flops.at(1) * flops / own))
        if kernel.kind == "attention"
        else kernel
        for kernel in first.kernels
    )
    return first._replace(kernels=kernels)


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
    if run.grouped is not None:
        seconds += (1 / run.grouped - 1) * work.of_experts / cluster.flops
    for kernel in work.kernels:
        if work.cast and kernel.kind == "matmul":
            kernel = kernel._replace(kind="fp4" if run.precision == "nvfp4" else "fp8")
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
    """Counts the layers of every virtual stage: one more in the first where they do not divide,
    one less at the ends where embedding and loss count as one each."""
    count, shape = run.stages * run.chunks, run.shape
    ends = 2 if run.ends_in_layers else 0
    per_chunk, left = divmod(shape.layers + shape.further + ends, count)
    layers = [per_chunk + (chunk < left) for chunk in range(count)]
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
        layers = run.shape.layers + run.shape.further
        return m * (layers * (layer.f + layer.b + layer.w) + head)
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
    costs, shape = Costs(*map(sum, layer), message_seconds(run)), run.shape
    pipeline = pipeline_seconds(run, costs, (1 + shape.further) * sum(head))
    passes = run.microbatches * (shape.layers + shape.further) / run.stages
    kernels, collectives = (passes * sum(values) for values in zip(*layer, strict=True))
    parts = {
        "kernels": kernels,
        "collectives": collectives,
        "waits": pipeline - kernels - collectives,
        "data": data_seconds(run, rates, pipeline),
    }
    waits = rates.straggling * math.log2(max(1.0, run.gpus / 8)) * sum(parts.values())
    return parts | {"waits": parts["waits"] + waits}


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
    layers = (shape.layers + shape.further) / run.stages
    return layers * (sizes.layers[0].parameters + _other_experts(run)) + outer


def _other_experts(run: Run) -> float:
    """Counts a device's parameters of a layer's experts, less those that are traced."""
    shape = run.shape
    more = shape.experts / run.expert - shape.experts_per_token
    return more * 3 * shape.width * shape.mlp_width / run.tensor


def data_seconds(run: Run, rates: Rates, pipeline: float) -> float:
    """Times the optimizer, and what nothing hides of the sums of gradients and of the gathers of
    parameters, both in 16 bits: those of a chunk in systems that overlap them. With FSDP they lie
    under the layers of each microbatch, but for one layer's."""
    cluster, sharers = cluster_of(run, rates), run.data * run.context
    own = parameters(run)
    update = UPDATE_BYTES * own / (sharers if run.zero else 1) / cluster.bandwidth
    # Devices of a host that are in one group send through its ports together.
    per_host = max(1, min(cluster.per_host // (run.tensor * run.expert), sharers))
    link = min(cluster.within, per_host * cluster.across)
    if run.gpus <= cluster.per_host:
        link = cluster.within
    part = 2 * own * (sharers - 1) / sharers / link
    if run.zero == 3:
        moved = 3 * part * run.microbatches
        return update + max(moved / run.shape.layers, moved - pipeline)
    chunks = run.chunks if run.stages > 1 else run.shape.layers
    return update + 2 * part / (chunks if run.data_overlap else 1)


def system_bytes(run: Run) -> float:
    """Predicts the memory of the stage that needs most: its state, and activations in flight.

    A layer keeps s b h (34 + 5 a s / h) bytes (Korthikanti et al. 2022, equation 1); with full
    rematerialization its input, and one layer, or the head, works at a time.
    """
    if run.remat == "full":
        sizes = sizes_of(counted(run.shape.config(), run.tensor, "full", run.attention))
        working = max(sizes.layers[0].live.at(run.local_rows), sizes.head_live.at(run.local_rows))
        kept = run.shape.layers * sizes.message.at(run.local_rows)
        sharers = run.data * run.context if run.zero == 3 else 1
        return STATE_BYTES * parameters(run) / sharers + kept + working
    shape, order = run.shape, order_of(run, min(run.microbatches, 4 * run.stages))
    s, h, a = shape.length, shape.width, shape.heads
    kept = run.rows * s * h * (34 + 5 * a * s / h)
    by_stage = np.array(layer_counts(run)).reshape(run.chunks, run.stages).sum(axis=0)
    own = 12 * h**2 * by_stage.astype(float)
    own[[0, -1]] += shape.vocabulary * h
    in_flight = np.array(order.peak_in_flight) / run.chunks * by_stage
    return float((STATE_BYTES * own + kept * in_flight).max())
