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
from train import adapters, errors, initial, optimizers, pipeline_section, tasks
from train.config import AsynchronousConfig, Config, Range, Section
from train.data.folder import prepare_hint
from train.errors import Failure
from train.processes import distributed
from train.runs import run_folder

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

_drains_never = pipeline_section.is_asynchronous


def _updates_chunks(config: Config) -> bool:
    return config.pipeline.update == "chunk" and not _drains_never(config)


_CONFLICTS: tuple[tuple[Callable[[Config], object], str], ...] = (
    (
        lambda c: c.pipeline.memory_limit and pipeline_section.limit_of_memory(c) == "residuals",
        "$pipeline.memory_limit has no effect with $pipeline.schedule and $pipeline.residuals, "
        "which is the limit. Nearest valid: pipeline.memory_limit=null, or "
        "pipeline.residuals=device.",
    ),
    (
        lambda c: _updates_chunks(c) and c.optimizer.clip_norm,
        "$pipeline.update updates a chunk before the gradients of all others are known, and "
        "$optimizer.clip_norm needs the norm of all. Nearest valid: optimizer.clip_norm=0, or "
        "pipeline.update=step.",
    ),
    (
        lambda c: _updates_chunks(c) and c.pipeline.weights == "unrolled",
        "$pipeline.update updates a chunk piece by piece in stacked arrays, and $pipeline.weights "
        "keeps one array per layer. Nearest valid: pipeline.weights=stacked, or "
        "pipeline.update=step.",
    ),
    (
        lambda c: c.data.document_tokens and c.data.documents == "joined",
        "$data.document_tokens has no effect with $data.documents, where tokens also see earlier "
        "documents. Nearest valid: data.document_tokens=null, or data.documents=packed.",
    ),
    (
        lambda c: c.optimizer.max_skipped and c.pipeline.update == "chunk",
        "$optimizer.max_skipped needs all gradients of a step before one is used, and "
        "$pipeline.update never has all. Nearest valid: optimizer.max_skipped=0, or "
        "pipeline.update=step.",
    ),
    (
        lambda c: c.optimizer.offload and c.pipeline.update == "chunk",
        "$optimizer.offload fetches the optimizer's state when all gradients are there, and "
        "$pipeline.update updates before. Nearest valid: optimizer.offload=false, or "
        "pipeline.update=step.",
    ),
    (
        lambda c: c.optimizer.offload and c.optimizer.max_skipped,
        "$optimizer.offload returns the optimizer's state after the update, and "
        "$optimizer.max_skipped chooses between the old state and the new one. Nearest valid: "
        "optimizer.offload=false, or optimizer.max_skipped=0.",
    ),
    (
        lambda c: c.optimizer.offload and _drains_never(c),
        "$optimizer.offload fetches the optimizer's state once per step, and $pipeline.schedule "
        "updates each stage at another time. Nearest valid: optimizer.offload=false.",
    ),
    (
        lambda c: c.optimizer.ema_decay and _drains_never(c),
        "$optimizer.ema_decay averages weights as the optimizer leaves them, and "
        "$pipeline.schedule scales its updates after that. Nearest valid: optimizer.ema_decay=0.",
    ),
    (
        lambda c: c.optimizer.skip_above and not c.optimizer.max_skipped,
        "$optimizer.skip_above has no effect with $optimizer.max_skipped. Nearest valid: "
        "optimizer.max_skipped=10, or optimizer.skip_above=0.",
    ),
    (
        lambda c: c.train.noise_every and _drains_never(c),
        "$train.noise_every compares gradients of the same weights, and those of "
        "$pipeline.schedule are of several. Nearest valid: train.noise_every=0.",
    ),
    (
        lambda c: c.train.noise_every and c.pipeline.update == "chunk",
        "$train.noise_every needs the norm of the whole gradient, which $pipeline.update does not "
        "know. Nearest valid: pipeline.update=step.",
    ),
    (
        lambda c: c.train.noise_every and c.pipeline.microbatches < 2,
        "$train.noise_every compares a microbatch with all of them, and there is one: "
        "$pipeline.microbatches. Nearest valid: pipeline.microbatches=2.",
    ),
    (
        lambda c: c.train.timeline_at and _drains_never(c),
        "$train.timeline_at cannot be combined with $pipeline.schedule, which never drains: no "
        "call is a whole step. Nearest valid: null.",
    ),
    (
        lambda c: c.distributed.copy_every and _drains_never(c),
        "$distributed.copy_every needs a pipeline that drains in every step, and "
        "$pipeline.schedule does not: the residuals in flight would not fit a smaller mesh. "
        "Nearest valid: 0, or pipeline.schedule=1f1b.",
    ),
    (
        lambda c: c.distributed.copy_every and not hasattr(os, "memfd_create"),
        "$distributed.copy_every needs Linux, which has files in memory. Nearest valid: 0.",
    ),
    (
        lambda c: c.publish.path and not tasks.find(c.task).adapts,
        "$publish.path: servers read decoders, and $task trains none. Nearest valid: "
        "publish.path=null.",
    ),
)
"""Conditions of a configuration that cannot run, and the rules that it breaks."""

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
        _partition,
        _batch,
        _data,
        lambda config: tasks.make(config).unread_options(),
        _warmup,
        _kept_checkpoints,
        optimizers.failures,
        adapters.failures,
        _profile,
        _processes,
        _wandb,
        lambda config: (config.failure(rule) for breaks, rule in _CONFLICTS if breaks(config)),
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
    """Compares the mesh with the devices of all processes."""
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
        given = " and ".join(f"${path}" for path in _depth(config))
        nearest = f"Nearest valid: at most {_MOST_LAYERS} layers."
        yield config.failure(f"{given} makes {layers} layers. {nearest}")


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
                yield config.failure(
                    "$pipeline.pair_layers has no effect: $pipeline.schedule overlaps no forward "
                    "with a backward. Nearest valid: null, or pipeline.schedule="
                    "dualpipe-v-published with more microbatches than stages."
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
    if isinstance(config.pipeline.residuals, str):
        return
    if not tasks.make(config).model(train=True, axis=None).layers_are_alike:
        yield config.failure(
            "$pipeline.residuals needs layers that are alike; those of $task differ. Nearest "
            "valid: host."
        )


def _compute_dtype(config: Config) -> Iterator[Failure]:
    dtype = config.pipeline.compute_dtype
    if dtype is not None and getattr(config.model, "dtype", None) != dtype:
        yield config.failure(
            "$pipeline.compute_dtype would round the weights of layers that compute in "
            f"$model.dtype. Nearest valid: model.dtype={dtype}, or pipeline.compute_dtype=null."
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
    size, count, shards = config.train.batch_size, config.pipeline.microbatches, config.mesh.data
    sizes = _multiples(size, count * shards)
    if size % count:
        yield config.failure(
            "$pipeline.microbatches does not divide $train.batch_size. Nearest valid: "
            f"pipeline.microbatches={_divisors(size, count)}, or train.batch_size={sizes}."
        )
    elif size // count % shards:
        yield config.failure(
            f"$mesh.data does not divide the {size // count} rows of a microbatch "
            "($train.batch_size / $pipeline.microbatches). Nearest valid: "
            f"mesh.data={_divisors(size // count, shards)}, or train.batch_size={sizes}."
        )


def _divisors(whole: int, value: int) -> str:
    return " or ".join(map(str, nearest_divisors(whole, value)))


def _multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n)


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
        yield config.failure(
            f"$optimizer.warmup_steps is longer than $train.steps. Nearest valid: {steps}."
        )


def _kept_checkpoints(config: Config) -> Iterator[Failure]:
    every, saved = config.train.keep_every, config.train.checkpoint_every
    if every is not None and every % saved:
        yield config.failure(
            "$train.keep_every is not a multiple of $train.checkpoint_every, so not all of its "
            f"steps have a checkpoint. Nearest valid: {_multiples(every, saved)}."
        )


def _profile(config: Config) -> Iterator[Failure]:
    first, last = config.train.profile_from, config.train.profile_to
    if last is not None and (first is None or last < first):
        yield config.failure(
            "$train.profile_to must not lie before $train.profile_from. Nearest valid: "
            f"train.profile_from={last}."
        )


def _processes(config: Config) -> Iterator[Failure]:
    settings = config.distributed
    count, number = settings.num_processes, settings.process_id
    if settings.coordinator is None and (count is not None or number is not None):
        yield config.failure(
            "$distributed.num_processes and $distributed.process_id need distributed.coordinator, "
            "such as localhost:12345."
        )
    if settings.coordinator is not None:
        host, _, port = settings.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            yield Failure(
                f"distributed.coordinator={settings.coordinator!r} must be HOST:PORT, such as "
                "localhost:12345.",
                ("distributed.coordinator",),
            )
    if count is not None and number is not None and number >= count:
        yield config.failure(
            "$distributed.process_id must be below $distributed.num_processes. Nearest valid: "
            f"{count - 1}."
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
        chunks = "" if pipeline.chunks is None else " x $pipeline.chunks"
        yield config.failure(
            f"$mesh.stage{chunks} x $pipeline.microbatches is more than a schedule can hold. "
            f"Nearest valid: a product of at most {_MAX_PASSES}."
        )


def replicas(config: Config) -> Iterator[Failure]:
    """Checks that replicas divide data shards, and that experts divide a replica's shards."""
    data, replica, expert = config.mesh.data, config.mesh.replica, config.mesh.expert
    if data % replica:
        yield config.failure(
            "$mesh.replica does not divide $mesh.data. Nearest valid: mesh.replica="
            f"{_divisors(data, replica)}."
        )
    elif data // replica % expert:
        yield config.failure(
            "$mesh.expert does not divide $mesh.data / $mesh.replica. Nearest valid: mesh.expert="
            f"{_divisors(data // replica, expert)}."
        )


def shared_axes(config: Config) -> Iterator[Failure]:
    """Checks that devices that share a layer have equal parts of it."""
    for axis in config.mesh.shared_axes():
        field = f"mesh.{axis}"
        if _drains_never(config):
            yield config.failure(
                f"${field} is not supported with $pipeline.schedule, which splits no layer over "
                f"devices. Nearest valid: {field}=1, or pipeline.schedule=1f1b."
            )
        counts = tasks.make(config).shared(axis)
        if not counts:
            yield config.failure(
                f"${field} is not supported for $task, only for task={_FAMILIES[axis]}. Nearest "
                f"valid: {field}=1."
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
        if getattr(config.model, field, None) is None:
            continue
        for axis in ("tensor", "context"):
            if getattr(config.mesh, axis) > 1:
                yield config.failure(
                    f"$mesh.{axis} cannot be combined with ${path}, which needs whole layers on "
                    f"each device. Nearest valid: mesh.{axis}=1, or {path}=null."
                )
        if _drains_never(config):
            yield config.failure(
                f"${path} {what} at the end of each step, and $pipeline.schedule never ends a "
                f"step. Nearest valid: {path}=null, or pipeline.schedule=1f1b."
            )
        if field == "qk_clip" and config.pipeline.update == "chunk":
            yield config.failure(
                f"${path} {what} after all microbatches, and $pipeline.update updates earlier. "
                f"Nearest valid: {path}=null, or pipeline.update=step."
            )


def slices(config: Config) -> Iterator[Failure]:
    """Checks that sequences can be cut into slices, and these over devices."""
    path, number = "pipeline.sequence_slices", config.pipeline.sequence_slices
    if number == 1:
        return
    if not tasks.find(config.task).slices:
        yield config.failure(
            f"${path}: layers of $task run whole sequences; only those of task=gpt run slices. "
            f"Nearest valid: {path}=1."
        )
        return
    for field in ("bias_speed", "qk_clip", "mtp_loss"):
        if getattr(config.model, field, None) is not None:
            yield config.failure(
                f"${path} cannot be combined with $model.{field}, which needs whole sequences. "
                f"Nearest valid: {path}=1, or model.{field}=null."
            )
    length, context = tasks.make(config).units_per_row, config.mesh.context
    parts = number * (
        context * math.lcm(2, config.mesh.tensor) if context > 1 else config.mesh.tensor
    )
    if length % parts:
        rule = f"${path}"
        if parts > number:
            rule += ", each of which devices along mesh.context and mesh.tensor share"
        yield config.failure(
            f"$model.sequence_length is not divisible by {parts}: {rule}. Nearest valid: "
            f"model.sequence_length={_multiples(length, parts)}."
        )


def _asynchronous(config: Config) -> Iterator[Failure]:
    """Finds settings without effect, with too few steps, or that asynchronous training refuses."""
    settings, name = config.asynchronous, config.pipeline.schedule
    if not _drains_never(config):
        if name not in {entry.name for entry in schedules.entries()} and not is_users(name):
            return  # another rule says so
        for field, default in AsynchronousConfig().model_dump().items():
            if getattr(settings, field) != default:
                yield config.failure(
                    f"$asynchronous.{field} has no effect: $pipeline.schedule drains the pipeline "
                    "in every step, so no weights are late. Nearest valid: "
                    f"{errors.in_yaml(default)}, or pipeline.schedule=pipemare."
                )
        return
    yield from _refused(config)
    try:
        pipeline_section.steady_state(config)
    except ValueError as error:
        yield from errors.of_pipeline(error, name)
    if settings.discrepancy_decay and name != "pipemare":
        yield config.failure(
            "$asynchronous.discrepancy_decay corrects what the backward of pipeline.schedule="
            "pipemare reads; with $pipeline.schedule it reads the weights of its forward. Nearest "
            "valid: 0."
        )
    if settings.warmup_steps >= config.train.steps:
        yield config.failure(
            "$asynchronous.warmup_steps leaves none of $train.steps for pipeline.schedule="
            f"{name}. Nearest valid: {config.train.steps - 1}, or pipeline.schedule=1f1b."
        )


def _refused(config: Config) -> Iterator[Failure]:
    for name, needed, why in _NOT_ASYNCHRONOUS:
        if getattr(config.pipeline, name) not in (needed, "auto"):
            yield config.failure(
                f"$pipeline.{name} is not supported with $pipeline.schedule, which {why}. Nearest "
                f"valid: {errors.in_yaml(needed)}."
            )
