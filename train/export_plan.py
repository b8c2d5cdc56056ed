"""Writes a plan for another system: ``python -m train.export_plan --config PLAN --to maxtext``.

Megatron-LM and torchtitan take options of their command lines, MaxText a YAML file. Written are the
mesh, schedule, microbatches, sharding and rematerialization, and the model where its shape is an
option there. What a system cannot express is refused; what it does in another way is said.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from models.gpt_config import GPTConfig
from train import checks, command_line, configured, tasks
from train.config import Config
from train.errors import ConfigError, Failure, refused

System = Literal["megatron", "torchtitan", "maxtext"]

_TORCHTITAN = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "1f1b-fused": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-fused": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "breadth-first": "LoopedBFS",
    "breadth-first-fused": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
    "dualpipe-v-published": "DualPipeV",
}
"""Names of schedules in PyTorch; it reads others from a CSV file."""
_CHOSEN_LATER = ("auto", configured.PLAN)
"""Schedules whose order and chunks are found when a run starts."""
_MEGATRON = ("1f1b-fused", "1f1b", "interleaved-fused", "interleaved")
_MAXTEXT = ("gpipe", "breadth-first-fused", "breadth-first")
"""MaxText differentiates its pipeline: all forward passes come before all backward passes."""

_SIZES = dict.fromkeys(
    (
        "vocab_size", "sequence_length", "num_layers", "width", "num_heads", "num_kv_heads",
        "head_size", "mlp_width", "tied", "dtype", "dropout", "rope_theta", "norm_epsilon",
        "num_experts", "experts_per_token", "expert_width", "balance_loss",
    ),
    None,
)  # fmt: skip
_EXPRESSED: Mapping[str, Mapping[str, Collection[Any] | None]] = {
    "megatron": _SIZES
    | dict.fromkeys(("positions", "norm", "bias", "qkv_bias", "qk_norm", "z_loss"), None)
    | {"activation": ("swiglu", "gelu")},
    "maxtext": _SIZES | {"activation": ("swiglu", "gelu")},
}
"""Options of a GPT that are written, with the values a system has for them, None for all; other
options must be at their default."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """A configuration of another system.

    Args:
      options: values by the option's name there; True is an option without a value.
      notes: sentences on what differs from the configuration here.
    """

    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """A checked configuration that is exported, and the shape of its GPT."""

    config: Config
    shape: GPTConfig

    @property
    def rows(self) -> int:
        """Rows of a microbatch on one data shard."""
        config = self.config
        return config.train.batch_size // (config.pipeline.microbatches * config.mesh.data)

    @property
    def chunks(self) -> int:
        """Chunks of layers per stage; without stages, none are told apart."""
        stages = self.config.mesh.stage
        if stages == 1:
            return 1
        return configured.order(self.config).placement.num_virtual_stages // stages


def megatron(source: Source) -> Exported:
    """Writes options of Megatron-LM's ``pretrain_gpt.py``."""
    config, shape = source.config, source.shape
    mesh, pipeline = config.mesh, config.pipeline
    options = {
        "num-layers": shape.num_layers,
        "hidden-size": shape.width,
        "ffn-hidden-size": shape.hidden_width,
        "num-attention-heads": shape.num_heads,
        "kv-channels": shape.head_width,
        "seq-length": shape.sequence_length,
        "max-position-embeddings": shape.sequence_length,
        "normalization": "RMSNorm" if shape.norm == "rms" else "LayerNorm",
        "norm-epsilon": shape.norm_epsilon,
        "position-embedding-type": {"rotary": "rope", "learned": "learned_absolute"}[
            shape.positions
        ],
        "rotary-base": round(shape.rope_theta),
        "swiglu": shape.activation == "swiglu",
        "untie-embeddings-and-output-weights": not shape.tied,
        "disable-bias-linear": not shape.bias,
        "add-qkv-bias": shape.qkv_bias and not shape.bias,
        "qk-layernorm": shape.qk_norm,
        "hidden-dropout": shape.dropout,
        "attention-dropout": 0.0,
        "bf16": config.pipeline.compute_dtype == "bfloat16" or shape.dtype == "bfloat16",
        "tensor-model-parallel-size": mesh.tensor,
        "sequence-parallel": mesh.tensor > 1,
        "context-parallel-size": mesh.context,
        "pipeline-model-parallel-size": mesh.stage,
        "micro-batch-size": source.rows,
        "global-batch-size": config.train.batch_size,
    }
    if shape.kv_heads != shape.num_heads:
        options |= {"group-query-attention": True, "num-query-groups": shape.kv_heads}
    if shape.num_experts is not None:
        options |= {
            "num-experts": shape.num_experts,
            "moe-router-topk": shape.experts_per_token,
            "moe-ffn-hidden-size": shape.expert_hidden_width,
            "moe-aux-loss-coeff": shape.balance_loss,
            "moe-z-loss-coeff": shape.z_loss,
            "moe-grouped-gemm": True,
            "expert-model-parallel-size": mesh.expert,
        }
    if source.chunks > 1:
        options["num-virtual-stages-per-pipeline-rank"] = source.chunks
        options["microbatch-group-size-per-virtual-pipeline-stage"] = pipeline.group or mesh.stage
    if pipeline.zero:
        options |= dict.fromkeys(
            ("use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"), True
        )
    if pipeline.remat == "full":
        options |= {
            "recompute-granularity": "full", "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }  # fmt: skip
    notes = ["Megatron-LM pads the vocabulary to what its tensor devices divide."]
    if pipeline.remat == "dots":
        options |= {"recompute-granularity": "selective", "recompute-modules": "core_attn"}
        notes.append("Of what remat=dots recomputes, selective recomputation has attention alone.")
    return Exported(options, tuple(notes))


def torchtitan(source: Source) -> Exported:
    """Writes options of torchtitan's ``run_train.sh``; models are its own configurations."""
    config, shape = source.config, source.shape
    mesh, pipeline = config.mesh, config.pipeline
    fsdp = pipeline.zero >= 2
    options: dict[str, Any] = {
        "parallelism.pipeline_parallel_degree": mesh.stage,
        "parallelism.data_parallel_replicate_degree": mesh.replica if fsdp else mesh.data,
        "parallelism.data_parallel_shard_degree": mesh.data // mesh.replica if fsdp else 1,
        "parallelism.fsdp_reshard_after_forward": "always" if pipeline.zero == 3 else "never",
        "parallelism.tensor_parallel_degree": mesh.tensor,
        "parallelism.context_parallel_degree": mesh.context,
        "parallelism.expert_parallel_degree": mesh.expert,
        "training.max_context_length": shape.sequence_length,
        "training.num_tokens_per_microbatch_per_dp_rank": source.rows * shape.sequence_length,
        "training.num_tokens_per_train_step": config.train.batch_size * shape.sequence_length,
        "training.steps": config.train.steps,
    }
    policy = {"none": "none", "dots": "selective", "full": "full"}[pipeline.remat]
    notes = [f"Add activation-checkpoint:{policy} after the options."]
    if mesh.stage > 1:
        options |= {
            "parallelism.num_pp_microbatches": pipeline.microbatches,
            "parallelism.pipeline_parallel_first_stage_less_layers": 0,
            "parallelism.pipeline_parallel_last_stage_less_layers": 0,
            "parallelism.pipeline_parallel_layers_per_stage": (
                shape.num_layers // (mesh.stage * source.chunks)
            ),
        }
        if (name := _TORCHTITAN.get(pipeline.schedule)) is not None:
            options["parallelism.pipeline_parallel_schedule"] = name
        else:
            options["parallelism.pipeline_parallel_schedule_csv"] = "schedule.csv"
            notes.append(f"`{_show(config)} --out schedule.csv` writes the schedule.")
    notes.append(
        "Choose the configuration whose model has "
        f"{shape.num_layers} layers of width {shape.width}; its shape is no option."
    )
    return Exported(options, tuple(notes))


def _show(config: Config) -> str:
    """Writes the command that prints the order of a configuration as CSV."""
    pipeline, costs = config.pipeline, configured.costs(config)
    command = f"jaxpipe show {pipeline.schedule} --stages {config.mesh.stage} "
    command += f"--microbatches {pipeline.microbatches} --format csv"
    for option in ("chunks", "group", "memory_limit"):
        if (value := getattr(pipeline, option)) is not None:
            command += f" --{option.replace('_', '-')} {value:g}"
    return f"{command} --costs {costs.f:g},{costs.b:g},{costs.w:g},{costs.message:g}"


def maxtext(source: Source) -> Exported:
    """Writes values of MaxText's ``base.yml``."""
    config, shape = source.config, source.shape
    mesh, pipeline = config.mesh, config.pipeline
    devices = mesh.num_devices
    options: dict[str, Any] = {
        "base_emb_dim": shape.width,
        "base_num_query_heads": shape.num_heads,
        "base_num_kv_heads": shape.kv_heads,
        "base_mlp_dim": shape.hidden_width,
        "base_num_decoder_layers": shape.num_layers,
        "head_dim": shape.head_width,
        "mlp_activations": ["silu", "linear"] if shape.activation == "swiglu" else ["gelu"],
        "normalization_layer_epsilon": shape.norm_epsilon,
        "vocab_size": shape.vocab_size,
        "dropout_rate": shape.dropout,
        "max_target_length": shape.sequence_length,
        "logits_via_embedding": shape.tied,
        "rope_max_timescale": round(shape.rope_theta),
        "dtype": pipeline.compute_dtype or shape.dtype,
        "per_device_batch_size": config.train.batch_size / devices,
        "steps": config.train.steps,
        "ici_pipeline_parallelism": mesh.stage,
        "ici_data_parallelism": mesh.replica if pipeline.zero == 3 else mesh.data // mesh.expert,
        "ici_fsdp_parallelism": (
            mesh.data // mesh.replica // mesh.expert if pipeline.zero == 3 else 1
        ),
        "ici_expert_parallelism": mesh.expert,
        "ici_context_parallelism": mesh.context,
        "ici_tensor_parallelism": mesh.tensor,
        "shard_optimizer_over_data": pipeline.zero == 1,
        "remat_policy": {"none": "minimal_with_context", "dots": "minimal", "full": "full"}[
            pipeline.remat
        ],
    }
    if shape.num_experts is not None:
        options |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "base_moe_mlp_dim": shape.expert_hidden_width,
            "load_balance_loss_weight": shape.balance_loss,
        }
    if mesh.stage > 1:
        per_chunk = shape.num_layers // (mesh.stage * source.chunks)
        options |= {
            "num_pipeline_microbatches": pipeline.microbatches,
            "num_layers_per_pipeline_stage": per_chunk,
            "num_pipeline_repeats": source.chunks,
        }
    else:
        options["gradient_accumulation_steps"] = pipeline.microbatches
        options["per_device_batch_size"] /= pipeline.microbatches
    notes = ["Axes are those of one slice; move what crosses slices to dcn_*_parallelism."]
    if pipeline.remat == "none":
        notes.append("MaxText always recomputes something; minimal_with_context is the least.")
    return Exported(options, tuple(notes))


def failures(source: Source, system: System) -> Iterator[Failure]:
    """Yields what a system has no option for."""
    config, shape = source.config, source.shape
    mesh, pipeline = config.mesh, config.pipeline
    if pipeline.remat == "auto":
        yield _failure(config, "pipeline.remat", "is decided by the devices", "none, dots, full")
    if pipeline.schedule in _CHOSEN_LATER or configured.is_asynchronous(config):
        rule = "has no order before a run starts, or none that ends"
        yield _failure(config, "pipeline.schedule", rule, "zb-h1, 1f1b")
        return
    counts = configured.own_counts(config)
    if counts is not None and len(set(counts)) > 1:
        rule = "is not expressed: chunks have equally many layers there"
        yield _failure(config, "pipeline.partition", rule, "equal")
    if pipeline.sequence_slices > 1:
        rule = f"is not expressed in {system}, whose pipelines run whole sequences"
        yield _failure(config, "pipeline.sequence_slices", rule, "1")
    if config.data.documents == "packed":
        rule = f"is not expressed: {system} packs its data in its own way"
        yield _failure(config, "data.documents", rule, "joined, apart")
    if pipeline.fp8:
        rule = f"is not written for {system}, whose recipe is its own"
        yield _failure(config, "pipeline.fp8", rule, "none")
    if mesh.stage > 1 and shape.num_layers % (mesh.stage * source.chunks):
        rule = f"does not split evenly into {mesh.stage * source.chunks} chunks"
        yield Failure(f"model.num_layers={shape.num_layers} {rule}.", ("model.num_layers",))
    if system != "torchtitan" and mesh.stage > 1:
        names = _MEGATRON if system == "megatron" else _MAXTEXT
        if pipeline.schedule not in names:
            rule = f"is not a schedule of {system}"
            yield _failure(config, "pipeline.schedule", rule, ", ".join(names))
    levels = {"megatron": (0, 1), "torchtitan": (0, 2, 3), "maxtext": (0, 1, 3)}[system]
    if pipeline.zero not in levels:
        rule = f"is not a way in which {system} shards"
        yield _failure(config, "pipeline.zero", rule, ", ".join(map(str, levels)))
    if mesh.replica > 1 and (system == "megatron" or pipeline.zero == 1):
        rule = "is not expressed: the optimizer is sharded over all data shards"
        yield _failure(config, "mesh.replica", rule, "1")
    if system != "torchtitan":
        yield from _shape_failures(shape, system)


def _shape_failures(shape: GPTConfig, system: System) -> Iterator[Failure]:
    """Yields options of the model that are not written and not at their default."""
    for field in dataclasses.fields(shape):
        value = getattr(shape, field.name)
        valid = _EXPRESSED[system].get(field.name, (field.default,)) if field.compare else None
        if valid is not None and value not in valid:
            near = ", ".join(map(str, valid))
            message = f"model.{field.name}={value} is not expressed in {system}. Valid: {near}."
            yield Failure(message, (f"model.{field.name}",))


def _failure(config: Config, path: str, rule: str, nearest: str) -> Failure:
    section, name = path.split(".")
    value = getattr(getattr(config, section), name)
    return Failure(f"{path}={value} {rule}. Nearest valid: {nearest}.", (path,))


_SYSTEMS: Mapping[System, Callable[[Source], Exported]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "maxtext": maxtext,
}


def export(config: Config, system: System) -> str:
    """Writes a checked configuration of a GPT as a system takes it.

    Raises:
      ConfigError: the system cannot express it; every reason is named.
    """
    task = tasks.make(config)
    if not isinstance(task.shape, GPTConfig):
        raise refused(f"task={config.task!r} cannot be exported. Valid: 'gpt'.", "task")
    source = Source(config, task.shape)
    if problems := [*checks.check(config, writes=False, reads=False)]:
        raise ConfigError(problems)
    if problems := [*failures(source, system)]:
        raise ConfigError(problems)
    exported = _SYSTEMS[system](source)
    notes = "".join(f"# {note}\n" for note in exported.notes)
    if system == "maxtext":
        return notes + yaml.safe_dump(dict(exported.options), sort_keys=False)
    lines = []
    for name, value in exported.options.items():
        if value is not False:
            lines.append(f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}")
    return notes + " \\\n".join(lines) + "\n"


def main(
    config: Annotated[Path, tyro.conf.arg(help="YAML file, such as `jaxpipe plan --out` writes")],
    to: System,
) -> int:
    """Prints a configuration as options of Megatron-LM or torchtitan, or as MaxText's YAML.

    Args:
      to: the system.
    """
    try:
        print(export(command_line.parse(["--config", str(config)]).config, to), end="")
    except ConfigError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m train.export_plan"))
