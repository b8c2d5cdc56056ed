"""The configuration of a run: its sections and their fields.

`train.command_line` reads it from a YAML file and options; `train.checks` checks that its values
fit together. Neither touches a device.

The model's section has the fields that the family of ``task`` declares (`train.task`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pydantic_core
import yaml

from train import object_store, tasks
from train.errors import Failure, in_yaml

Number = bool | int | float | str | None
"""An argument of a function of optax; text names a dtype, for example."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of legal numbers of a field; `train.checks` applies it.

    Args:
      low: the smallest legal number.
      high: the largest, or None.
      above: the number must be larger than ``low``, not equal to it.
      below: the number must be smaller than ``high``, not equal to it.
    """

    low: float
    high: float | None = None
    above: bool = False
    below: bool = False


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Weight = Annotated[float, Range(1e-6, 1e6)]
Beta = Annotated[float, Range(0, 1, below=True)]

_MARKED = re.compile(r"\$(\w+(?:\.\w+)*)")
_LAUNCH = frozenset({"coordinator", "num_processes", "process_id"})
"""Fields of ``distributed`` that say how a run is started, and not what it is."""


class Section(pydantic.BaseModel):
    """A part of the configuration: no unknown keys, no conversion of types."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # dictionaries have no hash


class DataConfig(Section):
    """The data to train on."""

    path: str = "data/stdlib"
    """Folder that ``python -m train.prepare`` wrote."""
    prepare: str | None = None
    """Arguments with which ``python -m train.prepare`` writes the folder, such as "images --source
    mnist"; ``python -m train.prepare --config FILE`` reads them from here."""
    mix: dict[str, Weight] = {}
    """More folders with the same tokenizer, each with a weight, such as {data/code: 2.5}. Rows are
    drawn in proportion to the weights; path has weight 1. All held-out rows come from path."""
    domains: dict[str, str] = {}
    """More folders with the same tokenizer, by name, such as {code: data/code}. Each evaluation
    also reports the loss and perplexity of their held-out rows."""
    rows: str | None = None
    """Texts that the run reads and tokenizes while it trains, instead of those of path: Parquet or
    JSON Lines in a file or folder, or module:function that returns a Hugging Face IterableDataset.
    The tokenizer and the held-out texts come from path; held-out texts are not trained on."""
    column: str = "text"
    """Column of rows that holds the texts."""
    documents: Literal["joined", "apart", "packed"] = "joined"
    """Documents that a GPT's tokens see: all earlier ones in the row ("joined"), or only their own
    ("apart"). "packed" is "apart" with whole documents in rows, unless they are longer than a row,
    and about equal amounts of attention in each row."""
    document_tokens: Count | None = None
    """Mean length of a document in tokens, weighted by its tokens, for documents that are apart or
    packed. Plans compute the cost of attention from it; the default is the length of a row."""


class MeshConfig(Section):
    """The devices: stage x data x context x tensor of them."""

    stage: Count = 4
    """Pipeline stages."""
    data: Count = 2
    """Data shards."""
    replica: Count = 1
    """Groups of data shards, such as hosts, within which pipeline.zero shards: each group splits
    the arrays over data / replica devices. Weights are gathered within a group, and gradients are
    summed between groups in parts."""
    expert: Count = 1
    """Number of neighboring data shards that each hold some of a layer's experts, and exchange
    tokens; a divisor of data / replica."""
    context: Count = 1
    """Devices that share the sequence of every microbatch. Each has an early and a late part of
    it. They exchange heads, or gather keys and values."""
    tensor: Count = 1
    """Devices that share every layer: heads, hidden units, the vocabulary, and between matmuls the
    sequence. They communicate in every layer, so they should be in one host."""

    def sizes(self) -> dict[str, int]:
        """Returns the sizes whose product is the number of devices, by path."""
        sizes = {"mesh.stage": self.stage, "mesh.data": self.data}
        return sizes | {f"mesh.{name}": size for name, size in self.model_axes().items()}

    def model_axes(self) -> dict[str, int]:
        """Returns the sizes of the axes along which devices share layers, by name."""
        sizes = {"context": self.context, "tensor": self.tensor}
        return {name: size for name, size in sizes.items() if size > 1}

    def shared_axes(self) -> dict[str, int]:
        """Returns the sizes of `model_axes`, and that of experts, which is a part of data."""
        return self.model_axes() | ({"expert": self.expert} if self.expert > 1 else {})

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes().values())


class PipelineConfig(Section):
    """The schedule, and how it runs on the stages."""

    schedule: str = "auto"
    """Name of the schedule; ``jaxpipe schedules`` lists them. pipemare, pipedream and 2bw are
    asynchronous. PATH.csv or module:function is a schedule of your own. "plan" predicts which
    schedule, chunks, microbatches and remat are fastest on the mesh, and says why."""
    chunks: Annotated[int | None, Range(1)] = None
    """Chunks of layers per stage; null for the schedule's own number."""
    microbatches: Count = 8
    """Microbatches per batch."""
    group: Annotated[int | None, Range(1)] = None
    """Microbatches that stay together, for schedules that group them."""
    sequence_slices: Count = 1
    """Slices into which long sequences of a microbatch are cut (task gpt). A slice keeps only its
    share of a microbatch's activations, and bubbles are shorter by the same factor. Keys and values
    of earlier slices stay on their stage. Experts are balanced, and their capacities counted, slice
    by slice. gpipe, 1f1b, eager-1f1b, interleaved, breadth-first, modular, zb-h1, zb-h2,
    interleaved-zb and auto support it. It must divide model.sequence_length."""
    memory_limit: Annotated[float | None, Range(0, above=True)] = None
    """Most microbatches in flight per stage, in microbatches of a full stage, for schedules with a
    limit."""
    partition: str = "flops"
    """Rule that splits layers into chunks: "equal" numbers, equal "flops", equal times as
    "measured" on a device, or counts such as "3,2,2,3"."""
    vocabulary: Literal["auto", "split", "ends"] = "auto"
    """Stages that compute embedding and head. "split": all stages together, each with a part of the
    tables. "ends": only the stages of the first and the last layer, which wait for no other stage,
    but every stage has whole tables during a step. The partition then counts the time of embedding
    and head, unless equal chunks are faster. "auto" chooses the shortest step on the device
    clock."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """Values that the backward recomputes: "none", all but matmuls ("dots"), or all ("full").
    "auto" is "dots" on GPUs, where it takes less memory and about as long. Elsewhere, and for
    asynchronous schedules, whose checkpoints hold the residuals, it is "none"."""
    zero: Annotated[int, Range(0, 3)] = 3
    """Arrays sharded over data: none (0), optimizer state (1), also gradients (2), also weights
    (3)."""
    weights: Literal["auto", "stacked", "unrolled"] = "auto"
    """Whether a stage stores each parameter in one array for all its layers ("stacked") or in one
    per layer ("unrolled"), which saves copies on GPUs but takes longer to compile. "auto" is
    unrolled on GPUs, up to 16 layers per stage, if layers are updated after the step and, where
    they differ, take at most 10% more memory so; otherwise stacked."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Dtype of copies of the layers' weights that stages keep and data shards gather. They are cast
    once per step, not by every layer for every microbatch. It must be the model's own dtype.
    Parameters, gradients and the optimizer stay float32. The copies take half the memory of the
    weights; with zero 3 they halve the gathered bytes instead."""
    fp8: str | None = None
    """Weights of layers whose matmuls run in 8-bit floats: patterns of their paths, such as
    "*kernel", or "*mlp*kernel,*qkv/kernel" for some. They are quantized and gathered in E4M3.
    Activations are quantized in E4M3, and gradients at a matmul's output in E5M2. Layers that
    differ are unrolled, and layers may only multiply by these weights, which excludes norms, and
    experts without model.capacity_factor. `jaxpipe plan` keeps the patterns and
    predicts with them."""
    fp8_recipe: Literal["tensorwise", "mxfp8"] = "tensorwise"
    """Scales of these matmuls: one per tensor ("tensorwise"), or one per 32 values of each sum
    ("mxfp8"), which needs GPUs of Blackwell. With "mxfp8" weights are gathered in compute_dtype."""
    gpu_flags: Literal["all", "no-command-buffers", "off"] = "all"
    """XLA flags for GPUs that the trainer sets: all that a pipeline needs, all but the one that
    puts loops into CUDA graphs, or none. A flag that is already in XLA_FLAGS stays."""
    residuals: Literal["device", "host"] | Annotated[float, Range(0, above=True)] = "device"
    """Memory in which residuals wait for their backward: the device's or the host's. remat=none
    moves most to the host, and remat=full least. Or a number: microbatches of a full stage whose
    residuals a device keeps at once, as --offload of `jaxpipe show` counts them. Of the others,
    those that wait longest move to the host and back while layers run. Layers must be alike.
    ``auto`` takes the number as its memory_limit and reads costs.offload."""
    pair_layers: bool | None = None
    """Whether forwards and backwards that the schedule overlaps, as interleaved-overlapped and
    dualpipe-v-published do, run layer by layer in one loop, in which matmuls of one hide
    communication of the other. null is true on GPUs with tensor, context or expert axes, if layers
    are alike or unrolled."""
    update: Literal["step", "chunk"] = "step"
    """Time at which the optimizer runs: after the "step", with the gradients of all layers, or for
    each "chunk" as soon as its gradient is complete, which keeps only the gradients of unfinished
    chunks. "chunk" needs optimizer.clip_norm 0 and a schedule that finishes one chunk before the
    next, such as modular or breadth-first. It reports no gradient norm. --dry-run shows the memory
    that it saves."""
    weight_slots: Annotated[int | None, Range(1)] = None
    """Chunks of gathered weights (zero 3) and of gradient sums (zero 2 and 3) that a stage keeps at
    once. With 2 or more, GPUs and TPUs gather and reduce chunks while they compute the layers of
    other chunks, and less often; --dry-run shows how often. null is 2 on GPUs and TPUs with
    update=step, and otherwise 1, which takes the least memory."""


class AsynchronousConfig(Section):
    """Training that never drains the pipeline; only for schedules pipemare, pipedream and 2bw."""

    rescheduling_steps: Annotated[int | None, Range(0)] = None
    """T1: steps during which layers whose weights are late have a lower learning rate, which rises
    to the schedule's. 0 switches it off. null is 5 x optimizer.warmup_steps with pipemare, and 0
    with the others."""
    discrepancy_decay: Annotated[float | None, Range(0, 1, below=True)] = None
    """T2: decay of the mean step that corrects the weights of the backward. 0 switches it off. null
    is 0.135 with pipemare, and 0 with the others."""
    recompute_segment: Annotated[int | None, Range(1)] = None
    """Stages per segment. Only a segment's input is kept, and the segment runs forward again just
    before its backward. null keeps all residuals instead."""
    warmup_steps: Natural = 0
    """T3: steps of synchronous 1f1b before asynchronous training begins with the same parameters
    and optimizer state."""


class CostsConfig(Section):
    """Costs of a microbatch on a chunk, in any unit, for which schedules and ticks are made.

    If chunks differ, these are their means; the printed bubble counts the costs of each chunk. For
    ``auto``, which chooses the chunks, they are the costs of half a stage.
    """

    f: Positive = 1.0
    """Forward."""
    b: Positive = 1.2
    """Backward for the input; attention makes it more expensive than the forward."""
    w: Positive = 0.8
    """Backward for the weights."""
    message: NonNegative = 0.0
    """One message between stages."""
    attention: Annotated[float, Range(0, 1)] = 0.0
    """Share of attention in f and b. Attention takes longer for later slices of a sequence
    (pipeline.sequence_slices)."""
    rendezvous: bool = False
    """Whether the sender of a message waits for its receiver."""
    offload: Positive = 1.0
    """Time in which the residuals of a chunk move to the host, or back, as a share of f. Only for
    ``auto`` with a number as pipeline.residuals."""


class OptimizerConfig(Section):
    """AdamW with a linear warm-up and a cosine decay of the learning rate, or those of optax."""

    name: str = "adamw"
    """AdamW, or any optimizer of optax or optax.contrib by its name there, such as muon or lion."""
    arguments: dict[str, Number] = {}
    """Arguments of an optimizer of optax, such as {weight_decay: 0.1}; AdamW has its own fields."""
    schedule: str = "warmup_cosine"
    """Linear warm-up and cosine decay, or one of optax, such as warmup_constant_schedule."""
    schedule_arguments: dict[str, Number] = {}
    """Arguments of a schedule of optax, such as {init_value: 0.0, peak_value: 1.0e-3}."""

    peak_lr: Positive = 3e-3
    """Learning rate at the end of the warm-up."""
    warmup_steps: Natural = 20
    """Steps over which the learning rate rises; at most train.steps."""
    min_lr_ratio: Annotated[float, Range(0, 1)] = 0.1
    """Learning rate after the last step, as a share of the peak."""
    weight_decay: NonNegative = 0.1
    """Weight decay of matrices; vectors do not decay."""
    beta1: Beta = 0.9
    """Decay of the running mean of gradients."""
    beta2: Beta = 0.95
    """Decay of the running mean of squared gradients."""
    clip_norm: NonNegative = 1.0
    """Largest norm of the whole gradient; in asynchronous training, of the newest gradients of all
    parts together. 0 switches clipping off."""
    max_skipped: Natural = 0
    """Steps in a row that may be skipped because their loss or gradient is not finite, or because
    of skip_above. A skipped step changes nothing. 0 ends the run at the first."""
    skip_above: NonNegative = 0.0
    """Also skip steps whose gradient has a larger norm, before clipping. 0 skips none."""
    ema_decay: Beta = 0.0
    """Decay of an exponential moving average of the weights. It is a part of the optimizer's state
    and takes 4 bytes per parameter. init_from, --evaluate and train.export read it as FOLDER@ema.
    0 keeps none."""
    offload: bool = False
    """Keep the optimizer's state in host memory, and fetch it for the update of every step."""


class TrainConfig(Section):
    """The length of training, and the intervals of printing, evaluating and saving."""

    steps: Count = 300
    """Optimizer steps."""
    batch_size: Count = 32
    """Rows per batch, over all processes: a multiple of pipeline.microbatches x mesh.data."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the initial weights, the order of the data, dropout and the sample."""
    log_every: Count = 10
    """Steps from one printed line to the next; metrics.jsonl has every step."""
    eval_every: Annotated[int, Range(0)] = 50
    """Steps from one evaluation to the next; the last step is always evaluated. With 0 there is no
    evaluation, and so no best checkpoint."""
    eval_batches: Count = 4
    """Held-out batches per evaluation."""
    checkpoint_every: Count = 50
    """Steps from one checkpoint to the next; the last step is always saved."""
    checkpoint_minutes: Annotated[float | None, Range(0, above=True)] = None
    """Also save at the first printed line this many minutes after the last checkpoint."""
    keep: Count = 2
    """Number of the latest checkpoints to keep; the best one is kept as well."""
    keep_every: Annotated[int | None, Range(1)] = None
    """Keep the checkpoints of all steps that are multiples of this; null keeps none of them."""
    trainable: list[str] | None = None
    """Patterns of the parameters that are trained, such as "layers/*norm*" or "head/*"; others have
    neither gradients nor optimizer state. null trains all, or with lora.rank the adapters alone."""
    dpo_beta: Positive = 0.1
    """DPO's beta, the weight of a pair's margin (task train.preferences:DPO)."""
    noise_every: Natural = 0
    """Steps from one estimate of the noise scale to the next. Each takes the time of a step. 0
    makes none."""
    profile_from: Annotated[int | None, Range(1)] = None
    """First step of a profile by jax.profiler, written to the run's folder "profile"."""
    profile_to: Annotated[int | None, Range(1)] = None
    """Last step of the profile; null for the first step only."""
    timeline_at: Annotated[int | None, Range(1)] = None
    """Step before which a timeline of the stages is measured: timeline.html."""


class LoraConfig(Section):
    """Low-rank adapters on the linear maps of frozen layers (task gpt). Only the adapters and the
    parameters that train.trainable names are trained."""

    rank: Natural = 0
    """Rank of the adapters; 0 for none."""
    alpha: Positive = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: list[str] = ["*"]
    """Linear maps with adapters: names of the transformers library, such as "q_proj", or patterns
    of paths in a layer, such as "attention/*". By default all, except experts and routers."""
    dropout: Beta = 0.0
    """Probability with which an element of an adapter's input is dropped."""
    init_from: str | None = None
    """Folder of the peft library with the adapters that the run begins with, on the Hugging Face
    model of init_from. null draws them."""
    base: Literal["float32", "int8", "nf4"] = "float32"
    """Form of the kernels of all linear maps: float32, int8 with a scale per output, or 4-bit
    NormalFloat with a scale per output and 64 inputs."""


class PublishConfig(Section):
    """Weights for a server, such as vLLM or SGLang, written during training (task gpt)."""

    path: str | None = None
    """Folder that all processes and the server see. step_N is a Hugging Face folder with the model
    after step N, and the link "latest" points to the newest. null publishes nothing."""
    every: Count = 100
    """Steps from one model to the next. If one is still being written when the next is due, the run
    waits for it."""
    keep: Count = 2
    """Number of the newest models to keep."""


class SampleConfig(Section):
    """The text that the trained GPT writes."""

    at_checkpoints: bool = False
    """Also write a sample at every checkpoint, samples/step_N.txt."""
    prompt: str = "def "
    """Text that the GPT continues."""
    num_tokens: Natural = 200
    """Tokens to write; 0 for none."""
    temperature: NonNegative = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: Annotated[int | None, Range(1)] = 40
    """Sample from the k likeliest tokens only; null for all."""


class DistributedConfig(Section):
    """Several processes. Slurm needs none of these fields, and Open MPI at most the coordinator."""

    coordinator: str | None = None
    """HOST:PORT of process 0; an IPv6 address in brackets."""
    num_processes: Annotated[int | None, Range(1)] = None
    """Number of processes; needs distributed.coordinator."""
    process_id: Annotated[int | None, Range(0)] = None
    """Number of this process, from 0; needs distributed.coordinator."""
    patience_seconds: Positive = 60.0
    """Seconds without a sign of life after which the other processes name a process and end with
    status 75. A step may take this much longer than the longest one so far."""
    copy_every: Natural = 0
    """Optimizer steps from one copy of the state in host memory to the next; 0 makes none. With
    copies, the others continue without a lost process, on fewer data shards."""


class WandbConfig(Section):
    """Weights & Biases, in addition to TensorBoard."""

    project: str | None = None
    """Project to log to; null logs nothing there."""


class Config(Section):
    """The whole configuration of a run."""

    run_dir: str = "runs/gpt"
    """Folder of the run, with its configuration, metrics, checkpoints and picture of the schedule;
    or s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, of which TMPDIR holds a copy during training."""
    task: str = "gpt"
    """Task to train: the name of a file in train/tasks, or module:Class of your own."""
    init_from: str | None = None
    """Initial weights: a Hugging Face folder, or the folder of a run for its latest checkpoint, or
    FOLDER@best or FOLDER@STEP. A further @ema reads the moving average of the weights. Fields of
    the model that you do not set come from the weights. null draws random weights."""
    data: DataConfig = DataConfig()
    model: pydantic.SerializeAsAny[Section] = pydantic.Field(
        default_factory=dict, validate_default=True
    )
    """The shape of the model: the fields that the task's family has."""
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    costs: CostsConfig = CostsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    train: TrainConfig = TrainConfig()
    publish: PublishConfig = PublishConfig()
    sample: SampleConfig = SampleConfig()
    distributed: DistributedConfig = DistributedConfig()
    wandb: WandbConfig = WandbConfig()

    @pydantic.field_validator("task")
    @classmethod
    def _known(cls, task: str) -> str:
        try:
            tasks.find(task)
        except tasks.UnknownTaskError as error:
            raise pydantic_core.PydanticKnownError(
                "literal_error", {"expected": error.expected}
            ) from error
        return task

    @pydantic.field_validator("model", mode="plain")
    @classmethod
    def _of_task(cls, value: Any, info: pydantic.ValidationInfo) -> Section:
        if "task" not in info.data:  # it is unknown, and so are the fields
            return Section()
        return tasks.find(info.data["task"]).section().model_validate(value)

    @property
    def folder(self) -> Path:
        """Folder on this machine where the run reads and writes its files."""
        return object_store.local_folder(self.run_dir)

    @property
    def num_layers(self) -> int:
        """Layers of the pipeline.

        Raises:
          ValueError: the model's numbers do not fit together.
        """
        return tasks.make(self).num_layers

    def flat(self) -> dict[str, Any]:
        """Returns every field's value by its path, such as ``mesh.stage``."""
        return dict(_leaves(self))

    def failure(self, rule: str) -> Failure:
        """Makes the failure of a rule, in whose text ``$mesh.stage`` is that field with its value.

        Example:
          >>> Config().failure("$mesh.stage needs as many layers.").message
          'mesh.stage=4 needs as many layers.'
        """
        values = self.flat()
        fields = [path for path in _MARKED.findall(rule) if path in values]
        given = {path: f"{path}={in_yaml(values[path])}" for path in fields}
        message = _MARKED.sub(lambda match: given.get(match[1], match[0]), rule)
        return Failure(message, tuple(dict.fromkeys(fields)))

    def reset(self, paths: Iterable[str]) -> Config:
        """Returns the configuration with defaults in some fields or sections."""
        values = self.model_dump()
        for path in paths:
            remove(values, path.split("."))
        return Config.model_validate(values)

    def changed(self, **sections: Mapping[str, Any]) -> Config:
        """Returns the configuration with other values in some sections.

        Example:
          >>> Config().changed(mesh={"stage": 2, "data": 1}).mesh.num_devices
          2
        """
        update = {name: getattr(self, name).model_copy(update=w) for name, w in sections.items()}
        return self.model_copy(update=update)

    def to_record(self) -> dict[str, Any]:
        """Returns the fields as a run records them: without those that say how it was started."""
        return self.model_dump(exclude={"distributed": set(_LAUNCH)})

    def to_yaml(self) -> str:
        """Returns the configuration as a file that `parse` reads back, as a run records it."""
        return yaml.safe_dump(self.to_record(), sort_keys=False)


def upgraded(raw: dict[str, Any]) -> dict[str, Any]:
    """Brings the content of an older file or checkpoint into today's form.

    Every family except the GPT used to have a section with its own name, and a file held those of
    all families. Now the section of the task is ``model``. The others never had an effect. There
    used to be ``pipeline.slices`` and ``pipeline.stage_memory`` as well, which no loss depended on.
    Runs used to record how they were started, with the number of the process that wrote the file.

    Example:
      >>> upgraded({"task": "resnet", "model": {"width": 8}, "resnet": {"depth": 20}, "bert": {}})
      {'task': 'resnet', 'model': {'depth': 20}}
    """
    kept = {name: value for name, value in raw.items() if name not in tasks.names()}
    if isinstance(pipeline := kept.get("pipeline"), dict):
        former = "slices", "stage_memory"
        kept["pipeline"] = {name: value for name, value in pipeline.items() if name not in former}
    if names_process(kept):
        kept["distributed"] = {n: v for n, v in kept["distributed"].items() if n not in _LAUNCH}
    task = raw.get("task", "gpt")
    own = raw.get(task) if task in tasks.names() else None
    return kept if own is None else kept | {"model": own}


def names_process(raw: dict[str, Any]) -> bool:
    """Says whether a file names the process that wrote it, as an older version's runs do."""
    distributed = raw.get("distributed")
    return isinstance(distributed, dict) and distributed.get("process_id") is not None


def remove(tree: dict[Any, Any], keys: Sequence[int | str]) -> None:
    """Removes the entry that a path of keys leads to, if it is there."""
    for key in keys[:-1]:
        tree = tree.get(key, {})
    tree.pop(keys[-1], None)


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
