"""Checks whether a configuration can run: all rules that need no device, all failures at once.

A rule yields `Failure`s that name the fields it reads. A failure that reads a field without a
usable value is left out, so that each mistake is reported once.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import get_args

from jaxpipe import schedules
from jaxpipe.errors import shortened, shown
from jaxpipe.schedule import is_users
from models.validation import nearest_divisors
from train import adapters, errors, initial, optimizers, pipeline_section, publish, tasks
from train.config import AsynchronousConfig, Config, Range, Section
from train.data.folder import prepare_hint
from train.errors import Failure
from train.processes import distributed
from train.runs import run_folder
from train.watch import noise, profile

Rule = Callable[[Config], Iterator[Failure]]

_FOLDERS = ("run_dir", "data.path", "data.rows", "init_from", "lora.init_from")
_PATHS, _LONGEST = (*_FOLDERS, "pipeline.schedule"), 255
"""Fields that name files, and the longest name of one."""

_MOST_LAYERS = 10_000
"""Most layers of a model: more are a mistake, as `auto` looks at each."""

_MAX_PASSES = 100_000
"""Forward passes of the largest schedule: building that of zb-v takes about 10 seconds."""

_LARGEST = 2**63 - 1
_INTEGERS = Range(-_LARGEST - 1, _LARGEST)
"""The range of an integer field without a range of its own."""

_FAMILIES = {
    "tensor": "gpt, bert and transformer",
    "context": "gpt",
    "expert": "gpt with model.num_experts",
}

_NOT_ASYNCHRONOUS = (
    ("weights", "stacked", "keeps several versions of the weights"),
    ("compute_dtype", None, "keeps several versions of the weights"),
    ("fp8", None, "keeps several versions of the weights"),
    ("residuals", "device", "keeps residuals from step to step"),
    ("sequence_slices", 1, "runs whole sequences"),
    ("update", "step", "updates every stage as soon as its gradient is complete"),
)
"""Fields of ``pipeline``, the value that each must have, and what asynchronous schedules do."""


def check(
    config: Config, *, resume: bool = False, writes: bool = True, reads: bool = True
) -> list[Failure]:
    """Applies every rule.

    Args:
      config: its names and types are right.
      resume: the run folder may hold a run.
      writes: the run folder will be written to.
      reads: the data will be read. If not, it need not exist, but must fit if it does.

    Returns:
      The failures; empty if there are none.
    """
    given = config.flat()
    config, failures = in_range(config)
    unfit = list(_text(config))
    failures += unfit
    config = config.reset(field for failure in unfit for field in failure.fields)
    config, wrong_model = _with_a_model(config)
    failures += wrong_model
    wrong = {field for failure in failures for field in failure.fields}
    wrong |= {field for field, value in config.flat().items() if value != given[field]}
    rules: list[Rule] = [
        replicas,
        shared_axes,
        _schedule,
        _asynchronous,
        balanced,
        slices,
        _alike,
        _compute_dtype,
        _update,
        _partition,
        _batch,
        _documents,
        _data,
        lambda config: tasks.make(config).unread_options(),
        _warmup,
        _kept_checkpoints,
        optimizers.failures,
        adapters.failures,
        publish.failures,
        profile.failures,
        noise.failures,
        _processes,
        _copies,
        _wandb,
    ]
    if wrong_model or not (reads or Path(config.data.path).exists()):
        rules.remove(_data)
    rules.append(lambda config: initial.failures(config, resume=resume))
    if writes:
        rules.append(lambda config: run_folder.failures(config, resume=resume))
    for rule in rules:
        failures += [failure for failure in rule(config) if not wrong.intersection(failure.fields)]
    return [errors.in_short(failure, given.values()) for failure in failures]


def without(failures: Iterable[Failure], broken: Iterable[Failure]) -> list[Failure]:
    """Leaves out failures that read a field which another failure already reports.

    Args:
      failures: from `check`, of a configuration with defaults in the broken fields.
      broken: failures of names, types and ranges.
    """
    fields = {field for failure in broken for field in failure.fields}

    def is_hidden(path: str) -> bool:
        return path in fields or path.split(".")[0] in fields

    return [failure for failure in failures if not any(map(is_hidden, failure.fields))]


def device_failures(config: Config, *, num_devices: int, platform: str) -> list[Failure]:
    """Compares the mesh with the devices of all processes.

    Args:
      config: the configuration.
      num_devices: number of devices that there are.
      platform: such as "cpu" or "gpu".
    """
    sizes, needed = config.mesh.sizes(), config.mesh.num_devices
    if needed <= num_devices:
        return []
    simulate = (
        " Leave --xla_force_host_platform_device_count out of XLA_FLAGS, and they are simulated."
        if platform == "cpu"
        else " JAX_PLATFORMS=cpu simulates them."
    )
    product = " x ".join(f"{path}={size}" for path, size in sizes.items())
    return [
        Failure(
            f"{product} needs {needed} devices, but there "
            f"are {num_devices} ({platform}). Nearest valid: "
            f"{distributed.nearest_meshes(config, num_devices)}.{simulate}",
            tuple(sizes),
        )
    ]


def _with_a_model(config: Config) -> tuple[Config, list[Failure]]:
    """Replaces numbers that make no model by defaults, and says what is wrong with them."""
    failures = list(_model(config))
    usable = config.reset(field for failure in failures for field in failure.fields)
    # The default of one field may not fit the others.
    return config.reset(["model"]) if any(_model(usable)) else usable, failures


def _model(config: Config) -> Iterator[Failure]:
    try:
        layers = config.num_layers
    except ValueError as error:
        yield from errors.of_model(error)
        return
    if layers > _MOST_LAYERS:
        given = " and ".join(f"{path}={config.flat()[path]}" for path in _depth(config))
        yield Failure(
            f"{given} makes {layers} layers. Nearest valid: at most {_MOST_LAYERS} layers.",
            tuple(_depth(config)),
        )


def _text(config: Config) -> Iterator[Failure]:
    for path, value in config.flat().items():
        if not isinstance(value, str):
            continue
        bad = next((c for c in value if c == "\0" or "\ud800" <= c <= "\udfff"), None)
        if bad is not None:
            yield Failure(f"{path}={value!r} contains {bad!r}, which text cannot have.", (path,))
        elif path in _FOLDERS and not value.strip():
            default = Config().flat()[path] or "null"
            yield Failure(f"{path}={value!r} names no folder. Nearest valid: {default}.", (path,))
        elif path in _PATHS and any(len(part.encode()) > _LONGEST for part in value.split("/")):
            rule = f"has a name of more than {_LONGEST} bytes, which no folder can have"
            yield Failure(f"{path}={value} {rule}.", (path,))


def _schedule(config: Config) -> Iterator[Failure]:
    limit, residuals = config.pipeline.memory_limit, config.pipeline.residuals
    if limit is not None and pipeline_section.limit_of_memory(config) == "residuals":
        yield Failure(
            f"pipeline.memory_limit={limit} has no effect with pipeline.schedule=auto and "
            f"pipeline.residuals={residuals}, which is the limit. Nearest valid: "
            "pipeline.memory_limit=null, or pipeline.residuals=device.",
            ("pipeline.memory_limit", "pipeline.residuals", "pipeline.schedule"),
        )
    layers, chunks = config.num_layers, config.pipeline.chunks or 1
    # A placement of too few layers cannot be searched, which is said below.
    if layers >= config.mesh.stage or not pipeline_section.chooses_placement(config):
        try:
            order = pipeline_section.any_order(config)
        except ValueError as error:
            memory = pipeline_section.limit_of_memory(config)
            yield from errors.of_pipeline(error, config.pipeline.schedule, memory=memory)
        else:
            chunks = order.num_chunks
            if config.pipeline.pair_layers and not order.overlapped:
                yield Failure(
                    f"pipeline.pair_layers=true has no effect: pipeline.schedule="
                    f"{config.pipeline.schedule} overlaps no forward with a backward. Nearest "
                    "valid: null, or pipeline.schedule=dualpipe-v-published with more microbatches "
                    "than stages.",
                    ("pipeline.pair_layers", "pipeline.schedule"),
                )
    needed = config.mesh.stage * chunks
    if layers < needed:
        fields = _depth(config)
        # A further layer of model.mtp_loss is not among them.
        counted = fields == ["model.num_layers"] and config.flat()[fields[0]] == layers
        own = f"{fields[0]}={layers}" if counted else f"task={config.task} with {layers} layers"
        valid = [f"{fields[0]}={needed}"] if counted else []
        valid.append(f"mesh.stage={max(layers // chunks, 1)}")
        yield Failure(
            f"{own} cannot fill mesh.stage={config.mesh.stage} x pipeline.chunks={chunks}: each of "
            f"the {needed} chunks needs a layer. Nearest valid: {' or '.join(valid)}.",
            (*fields, "mesh.stage", "pipeline.chunks"),
        )


def _depth(config: Config) -> list[str]:
    """The fields that decide how many layers there are."""
    return [f"model.{name}" for name in tasks.find(config.task).depth]


def _alike(config: Config) -> Iterator[Failure]:
    """Finds a setting that needs layers that are alike."""
    residuals = config.pipeline.residuals
    if isinstance(residuals, str):
        return
    if not tasks.make(config).model(train=True, axis=None).layers_are_alike:
        yield Failure(
            f"pipeline.residuals={residuals} needs layers that are alike; those of "
            f"task={config.task} differ. Nearest valid: host.",
            ("pipeline.residuals", "task"),
        )


def _compute_dtype(config: Config) -> Iterator[Failure]:
    dtype = config.pipeline.compute_dtype
    if dtype is None:
        return
    own = getattr(config.model, "dtype", None)
    if own != dtype:
        yield Failure(
            f"pipeline.compute_dtype={dtype} would round the weights of layers that compute in "
            f"model.dtype={own}. Nearest valid: model.dtype={dtype}, or "
            "pipeline.compute_dtype=null.",
            ("pipeline.compute_dtype", "model.dtype"),
        )


def _update(config: Config) -> Iterator[Failure]:
    if config.pipeline.update == "step" or pipeline_section.is_asynchronous(config):
        return
    if config.optimizer.clip_norm:
        yield Failure(
            "pipeline.update=chunk updates a chunk before the gradients of all others are known, "
            f"and optimizer.clip_norm={config.optimizer.clip_norm} needs the norm of all. Nearest "
            "valid: optimizer.clip_norm=0, or pipeline.update=step.",
            ("pipeline.update", "optimizer.clip_norm"),
        )
    if config.pipeline.weights == "unrolled":
        yield Failure(
            "pipeline.update=chunk updates a chunk piece by piece in stacked arrays, and "
            "pipeline.weights=unrolled keeps one array per layer. Nearest valid: "
            "pipeline.weights=stacked, or pipeline.update=step.",
            ("pipeline.update", "pipeline.weights"),
        )


def _partition(config: Config) -> Iterator[Failure]:
    rule = config.pipeline.partition
    try:
        counts = pipeline_section.own_counts(config)
    except ValueError:
        yield Failure(
            f"pipeline.partition={rule!r} must be equal, flops, measured, or the number of layers "
            'of each chunk, such as "3,2,2,3".',
            ("pipeline.partition",),
        )
        return
    if counts is None:
        return
    try:
        needed = pipeline_section.order(config).placement.num_virtual_stages
    except ValueError:
        return  # another rule says why
    if len(counts) != needed or min(counts) < 1 or sum(counts) != config.num_layers:
        yield Failure(
            f"pipeline.partition={rule!r} must be {needed} counts of at least 1 (one for each of "
            f"mesh.stage x pipeline.chunks) that add up to the {config.num_layers} layers.",
            ("pipeline.partition", "mesh.stage", "pipeline.chunks", *_depth(config)),
        )


def _batch(config: Config) -> Iterator[Failure]:
    size, count, shards = (
        config.train.batch_size,
        config.pipeline.microbatches,
        config.mesh.data,
    )
    sizes = _multiples(size, count * shards)
    fields = ("train.batch_size", "pipeline.microbatches")
    if size % count:
        yield Failure(
            f"pipeline.microbatches={count} does not divide train.batch_size={size}. Nearest "
            f"valid: pipeline.microbatches={_divisors(size, count)}, or train.batch_size={sizes}.",
            fields,
        )
    elif size // count % shards:
        yield Failure(
            f"mesh.data={shards} does not divide the {size // count} rows of a microbatch "
            f"(train.batch_size={size} / pipeline.microbatches={count}). Nearest valid: "
            f"mesh.data={_divisors(size // count, shards)}, or train.batch_size={sizes}.",
            (*fields, "mesh.data"),
        )


def _divisors(whole: int, value: int) -> str:
    return " or ".join(map(str, nearest_divisors(whole, value)))


def _multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n)


def _documents(config: Config) -> Iterator[Failure]:
    tokens = config.data.document_tokens
    if tokens is not None and config.data.documents == "joined":
        yield Failure(
            f"data.document_tokens={tokens} has no effect with data.documents=joined, where tokens "
            "also see earlier documents. Nearest valid: data.document_tokens=null, or "
            "data.documents=packed.",
            ("data.document_tokens", "data.documents"),
        )


def _data(config: Config) -> Iterator[Failure]:
    folder, task = Path(config.data.path), tasks.make(config)
    if task.data_kind is None or folder.is_dir():
        yield from task.data_failures()
        return
    hint = prepare_hint(folder, config.data.prepare or task.data_kind)
    yield Failure(f"data.path={folder} is not a folder. {hint}", ("data.path",))


def _warmup(config: Config) -> Iterator[Failure]:
    warmup, steps = config.optimizer.warmup_steps, config.train.steps
    if warmup > steps and config.optimizer.schedule == "warmup_cosine":
        yield Failure(
            f"optimizer.warmup_steps={warmup} is longer than train.steps={steps}. "
            f"Nearest valid: {steps}.",
            ("optimizer.warmup_steps", "train.steps"),
        )


def _kept_checkpoints(config: Config) -> Iterator[Failure]:
    every, saved = config.train.keep_every, config.train.checkpoint_every
    if every is not None and every % saved:
        yield Failure(
            f"train.keep_every={every} is not a multiple of train.checkpoint_every={saved}, so not "
            f"all of its steps have a checkpoint. Nearest valid: {_multiples(every, saved)}.",
            ("train.keep_every", "train.checkpoint_every"),
        )


def _processes(config: Config) -> Iterator[Failure]:
    settings = config.distributed
    count, number = settings.num_processes, settings.process_id
    paths = ("distributed.coordinator", "distributed.num_processes", "distributed.process_id")
    if settings.coordinator is None and (count is not None or number is not None):
        yield Failure(
            f"distributed.num_processes={errors.in_yaml(count)} and distributed.process_id="
            f"{errors.in_yaml(number)} need distributed.coordinator, such as localhost:12345.",
            paths,
        )
    if settings.coordinator is not None:
        host, _, port = settings.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            yield Failure(
                f"distributed.coordinator={settings.coordinator!r} must be HOST:PORT, such as "
                "localhost:12345.",
                paths[:1],
            )
    if count is not None and number is not None and number >= count:
        yield Failure(
            f"distributed.process_id={number} must be below distributed.num_processes={count}. "
            f"Nearest valid: {count - 1}.",
            paths[1:],
        )


def _copies(config: Config) -> Iterator[Failure]:
    """Finds copies in memory that could not be continued."""
    every = config.distributed.copy_every
    if every and pipeline_section.is_asynchronous(config):
        yield Failure(
            f"distributed.copy_every={every} needs a pipeline that drains in every step, and "
            f"pipeline.schedule={config.pipeline.schedule} does not: the residuals in flight would "
            "not fit a smaller mesh. Nearest valid: 0, or pipeline.schedule=1f1b.",
            ("distributed.copy_every", "pipeline.schedule"),
        )
    if every and not hasattr(os, "memfd_create"):
        yield Failure(
            f"distributed.copy_every={every} needs Linux, which has files in memory. Nearest "
            "valid: 0.",
            ("distributed.copy_every",),
        )


def _wandb(config: Config) -> Iterator[Failure]:
    if config.wandb.project is not None and importlib.util.find_spec("wandb") is None:
        yield Failure(
            f"wandb.project={config.wandb.project!r} needs a package that is not installed: "
            "pip install wandb, or leave wandb.project out.",
            ("wandb.project",),
        )


def in_range(config: Config) -> tuple[Config, list[Failure]]:
    """Applies the ranges of single fields, so that later rules may divide by a count.

    Args:
      config: its names and types are right.

    Returns:
      The configuration with defaults in fields that are out of range, and what is wrong.
    """
    failures = list(_ranges(config))
    config = config.reset(field for failure in failures for field in failure.fields)
    too_large = list(_size(config))
    failures += too_large
    return config.reset(field for failure in too_large for field in failure.fields), failures


def limits(section: Section, prefix: str = "") -> Iterator[tuple[str, Range]]:
    """Yields the path and the range of every field that has a range, or whose values have one."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from limits(value, f"{prefix}{name}.")
        of_values = (getattr(kind, "__metadata__", ()) for kind in get_args(field.annotation))
        for note in itertools.chain(field.metadata, *of_values):
            if isinstance(note, Range):
                yield f"{prefix}{name}", note


def _ranges(config: Config) -> Iterator[Failure]:
    ranges = dict(limits(config))
    for path, value in config.flat().items():
        parts = value if isinstance(value, dict) else {None: value}
        for key, number in parts.items():
            range_ = ranges.get(path, _INTEGERS if type(number) is int else None)
            if range_ is None or number is None or isinstance(number, str):
                continue
            if rule := _broken(number, range_):
                name = path if key is None else f"{path}.{shortened(key)}"
                yield Failure(f"{name}={shown(number)} must be {rule}", (path,))


def _broken(number: float, range_: Range) -> str:
    """Writes the rule that a number breaks, and the nearest legal number; empty if it is legal."""
    high, below = range_.high, range_.below
    if high is None:
        high, below = (_LARGEST, False) if isinstance(number, int) else (math.inf, True)
    fits_low = number > range_.low if range_.above else number >= range_.low
    fits_high = number < high if below else number <= high
    if fits_low and fits_high:
        return ""
    rule = f"{'above' if range_.above else 'at least'} {range_.low}"
    if high == math.inf:
        rule += " and finite" * (number == math.inf)
    elif range_.high is not None or not fits_high:
        rule += f" and {'below' if below else 'at most'} {high}"
    bound, is_open = (high, below) if fits_low else (range_.low, range_.above)
    return f"{rule}." if is_open else f"{rule}. Nearest valid: {bound}."


def _size(config: Config) -> Iterator[Failure]:
    """Refuses schedules that would take minutes to build, and more to compile."""
    pipeline, stages = config.pipeline, config.mesh.stage
    if stages * (pipeline.chunks or 1) * pipeline.microbatches > _MAX_PASSES:
        chunks = "" if pipeline.chunks is None else f" x pipeline.chunks={pipeline.chunks}"
        yield Failure(
            f"mesh.stage={stages}{chunks} x pipeline.microbatches={pipeline.microbatches} is more "
            f"than a schedule can hold. Nearest valid: a product of at most {_MAX_PASSES}.",
            ("mesh.stage", "pipeline.chunks", "pipeline.microbatches"),
        )


def replicas(config: Config) -> Iterator[Failure]:
    """Checks that replicas divide data shards, and that experts divide a replica's shards."""
    data, replica, expert = config.mesh.data, config.mesh.replica, config.mesh.expert
    if data % replica:
        yield Failure(
            f"mesh.replica={replica} does not divide mesh.data={data}. Nearest valid: "
            f"mesh.replica={_divisors(data, replica)}.",
            ("mesh.replica", "mesh.data"),
        )
    elif data // replica % expert:
        yield Failure(
            f"mesh.expert={expert} does not divide mesh.data={data} / mesh.replica={replica}. "
            f"Nearest valid: mesh.expert={_divisors(data // replica, expert)}.",
            ("mesh.expert", "mesh.data", "mesh.replica"),
        )


def shared_axes(config: Config) -> Iterator[Failure]:
    """Checks that devices that share a layer have equal parts of it."""
    for axis, devices in config.mesh.shared_axes().items():
        field = f"mesh.{axis}"
        if pipeline_section.is_asynchronous(config):
            yield Failure(
                f"{field}={devices} is not supported with pipeline.schedule="
                f"{config.pipeline.schedule}, which splits no layer over devices. Nearest valid: "
                f"{field}=1, or pipeline.schedule=1f1b.",
                (field, "pipeline.schedule"),
            )
        counts = tasks.make(config).shared(axis)
        if not counts:
            yield Failure(
                f"{field}={devices} is not supported for task={config.task}, only for task="
                f"{_FAMILIES[axis]}. Nearest valid: {field}=1.",
                (field, "task"),
            )
        for name, count in counts.items():
            yield from _shared(config, axis, f"model.{name}", count)


def _shared(config: Config, axis: str, field: str, count: int) -> Iterator[Failure]:
    """Checks that ``count`` divides over devices; those of a context have two parts each."""
    devices = config.mesh.shared_axes()[axis]
    parts, rule, fields = devices, f"mesh.{axis}={devices}, whose devices share it", [field]
    if axis == "context":
        parts = devices * math.lcm(2, config.mesh.tensor)
        rule = f"{parts}: each of mesh.context={devices} devices has an early and a late part of it"
        if config.mesh.tensor > 1:
            rule += f", which mesh.tensor={config.mesh.tensor} devices share"
            fields.append("mesh.tensor")
    elif field == "model.sequence_length" and config.mesh.context > 1:
        return  # the rule of context is the stricter one
    if count % parts == 0:
        return
    valid = [f"{field}={_multiples(count, parts)}"]
    per_device = parts // devices
    if count % per_device == 0:
        valid.append(f"mesh.{axis}={_divisors(count // per_device, devices)}")
    yield Failure(
        f"{field}={count} is not divisible by {rule}. Nearest valid: {', or '.join(valid)}.",
        (*fields, f"mesh.{axis}"),
    )


def balanced(config: Config) -> Iterator[Failure]:
    """Checks that states of whole layers can change biases or weights once per step."""
    for field, what in (("bias_speed", "moves biases"), ("qk_clip", "clips weights")):
        path = f"model.{field}"
        if (value := getattr(config.model, field, None)) is None:
            continue
        for axis in ("tensor", "context"):
            if (devices := getattr(config.mesh, axis)) > 1:
                yield Failure(
                    f"mesh.{axis}={devices} cannot be combined with {path}={value}, which needs "
                    f"whole layers on each device. Nearest valid: mesh.{axis}=1, or {path}=null.",
                    (f"mesh.{axis}", path),
                )
        if pipeline_section.is_asynchronous(config):
            schedule = config.pipeline.schedule
            yield Failure(
                f"{path}={value} {what} at the end of each step, and pipeline.schedule={schedule} "
                f"never ends a step. Nearest valid: {path}=null, or pipeline.schedule=1f1b.",
                (path, "pipeline.schedule"),
            )
        if field == "qk_clip" and config.pipeline.update == "chunk":
            yield Failure(
                f"{path}={value} {what} after all microbatches, and pipeline.update=chunk updates "
                f"earlier. Nearest valid: {path}=null, or pipeline.update=step.",
                (path, "pipeline.update"),
            )


def slices(config: Config) -> Iterator[Failure]:
    """Checks that sequences can be cut into slices, and these over devices."""
    path, number = "pipeline.sequence_slices", config.pipeline.sequence_slices
    if number == 1:
        return
    family = tasks.find(config.task)
    if not family.slices:
        yield Failure(
            f"{path}={number}: layers of task={config.task} run whole sequences; only those of "
            f"task=gpt run slices. Nearest valid: {path}=1.",
            (path, "task"),
        )
        return
    for field in ("bias_speed", "qk_clip", "mtp_loss"):
        if (value := getattr(config.model, field, None)) is not None:
            yield Failure(
                f"{path}={number} cannot be combined with model.{field}={value}, which needs whole "
                f"sequences. Nearest valid: {path}=1, or model.{field}=null.",
                (path, f"model.{field}"),
            )
    length, context = tasks.make(config).units_per_row, config.mesh.context
    parts = number * (
        context * math.lcm(2, config.mesh.tensor) if context > 1 else config.mesh.tensor
    )
    if length % parts:
        rule = f"{path}={number}"
        if parts > number:
            rule += ", each of which devices along mesh.context and mesh.tensor share"
        yield Failure(
            f"model.sequence_length={length} is not divisible by {parts}: {rule}. Nearest valid: "
            f"model.sequence_length={_multiples(length, parts)}.",
            (path, "model.sequence_length"),
        )


def _asynchronous(config: Config) -> Iterator[Failure]:
    """Finds settings without effect, with too few steps, or that asynchronous training refuses."""
    settings, name = config.asynchronous, config.pipeline.schedule
    if not pipeline_section.is_asynchronous(config):
        if name not in {entry.name for entry in schedules.entries()} and not is_users(name):
            return  # another rule says so
        for field, default in AsynchronousConfig().model_dump().items():
            if getattr(settings, field) != default:
                yield Failure(
                    f"asynchronous.{field}={getattr(settings, field)} has no effect: "
                    f"pipeline.schedule={name} drains the pipeline in every step, so no weights "
                    f"are late. Nearest valid: {errors.in_yaml(default)}, or "
                    "pipeline.schedule=pipemare.",
                    (f"asynchronous.{field}", "pipeline.schedule"),
                )
        return
    yield from _refused(config)
    try:
        pipeline_section.steady_state(config)
    except ValueError as error:
        yield from errors.of_pipeline(error, name)
    if settings.discrepancy_decay and name != "pipemare":
        yield Failure(
            f"asynchronous.discrepancy_decay={settings.discrepancy_decay} corrects what the "
            f"backward of pipeline.schedule=pipemare reads; with {name} it reads the weights of "
            "its forward. Nearest valid: 0.",
            ("asynchronous.discrepancy_decay", "pipeline.schedule"),
        )
    if settings.warmup_steps >= config.train.steps:
        yield Failure(
            f"asynchronous.warmup_steps={settings.warmup_steps} leaves none of train.steps="
            f"{config.train.steps} for pipeline.schedule={name}. Nearest valid: "
            f"{config.train.steps - 1}, or pipeline.schedule=1f1b.",
            ("asynchronous.warmup_steps", "train.steps"),
        )


def _refused(config: Config) -> Iterator[Failure]:
    for name, needed, why in _NOT_ASYNCHRONOUS:
        value = getattr(config.pipeline, name)
        if value not in (needed, "auto"):
            path, schedule = f"pipeline.{name}", f"pipeline.schedule={config.pipeline.schedule}"
            yield Failure(
                f"{path}={value} is not supported with {schedule}, which {why}. Nearest valid: "
                f"{errors.in_yaml(needed)}.",
                (path, "pipeline.schedule"),
            )
