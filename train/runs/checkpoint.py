"""The contents of a run's checkpoints, and the rules by which a run may continue one.

The state of training is saved in canonical order, and restores onto any mesh, schedule and ZeRO
level. A pipeline in mid-flight is the exception: its arrays are saved as they are, and fit only the
layout that it was saved in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxpipe import Checkpoints
from jaxpipe.checkpoint import DamagedError, Found, reading
from models.types import PyTree
from train import adapters, pipeline_section, tasks
from train.config import Config, upgraded
from train.errors import Failure, in_yaml, refused
from train.optimizers import AVERAGE
from train.step import TrainState

IN_FLIGHT = "in_flight"
"""The entry of the description with the layout of a pipeline in mid-flight; None if drained."""


def save(
    checkpoints: Checkpoints,
    step: int,
    state: TrainState | dict[str, Any],
    *,
    data: dict[str, Any],
    run: dict[str, Any],
    eval_loss: float | None = None,
) -> None:
    """Starts to save; returns as soon as the state may change again.

    Args:
      state: in canonical order; or the arrays of a pipeline in mid-flight, by name.
      run: from `describe`.
      eval_loss: held-out loss at this step, if it was evaluated.
    """
    checkpoints.save_arrays(step, _as_dict(state), data=data, run=run, loss=eval_loss)


def restore(checkpoints: Checkpoints, step: int, shapes: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Reads a checkpoint.

    Args:
      shapes: shapes of what was saved, with shardings.

    Returns:
      What was saved, and the position in the data. Arrays by name may be fewer than asked for:
      older versions saved fewer of a pipeline in mid-flight.

    Raises:
      ConfigError: the files hold something else than what was saved.
    """
    with readable(step):
        if isinstance(shapes, dict):
            saved = checkpoints.shapes(step).keys()
            return checkpoints.restore_arrays(
                step, {name: shapes[name] for name in shapes if name in saved}
            )
        state, data = checkpoints.restore_arrays(step, _as_dict(shapes))
        return TrainState(**state), data


def restore_weights(
    checkpoints: Checkpoints, step: int, shapes: dict[str, PyTree], *, averaged: bool
) -> dict[str, PyTree]:
    """Reads the weights of a checkpoint, without the rest of the optimizer's state.

    Args:
      shapes: shapes of ``params`` and, if the layers have states, ``layers``, with shardings.
      averaged: read the moving average of the parameters in their place, without the bias towards
        zero with which it begins; states of layers are the latest.

    Returns:
      The arrays by the same names.

    Raises:
      ValueError: the run kept no average.
    """
    if not averaged:
        return checkpoints.restore_parts(step, shapes)
    decay = Config(**description(checkpoints, step)["config"]).optimizer.ema_decay
    if not decay:
        raise ValueError("The run keeps no average of its weights: its optimizer.ema_decay is 0.")
    average = {"count": np.zeros((), np.int32), "ema": shapes["params"]}
    states = {name: shapes[name] for name in shapes.keys() - {"params"}}
    arrays = checkpoints.restore_parts(step, states | {"optimizer": {AVERAGE: average}})
    average = arrays.pop("optimizer")[AVERAGE]
    share = 1 - decay ** int(average["count"])
    return arrays | {"params": jax.tree.map(lambda leaf: leaf / share, average["ema"])}


@contextlib.contextmanager
def readable(step: int) -> Iterator[None]:
    """Turns all errors of a checkpoint whose files hold something else into one kind.

    Raises:
      ConfigError: something was raised.
    """
    try:
        with reading(f"checkpoint {step}"):
            yield
    except DamagedError as error:
        remedy = "Fetch it from a backup, or remove it to continue from an older one."
        raise refused(f"{error}. {remedy}", "run_dir") from error


def none_whole(search: Found, config: Config) -> Iterator[Failure]:
    """Says why no checkpoint can be continued although some exist; nothing if none exists."""
    if search.damaged:
        yield config.failure(
            f"$run_dir has no whole checkpoint to resume from ({search.reasons}). Nearest valid: "
            "one of these from a backup, or another --run-dir to start from step 0."
        )


def other_layout(layout: dict[str, Any], now: dict[str, Any], *, step: int) -> Iterator[Failure]:
    """Says why a pipeline in mid-flight cannot be continued; nothing if it can."""
    for path, value in layout.items():
        if now.get(path) != value:
            yield Failure(
                f"{path}={now.get(path)} does not fit the asynchronous checkpoint of step {step}, "
                f"which was saved in mid-flight with {path}={value}. Nearest valid: {value}. To "
                "change it, resume with the old values and train.steps of at least "
                f"{step + 1} first: the end of a run drains the pipeline, and its last checkpoint "
                "fits any layout.",
                (path,),
            )


def require_drained(saved: dict[str, Any], step: int) -> None:
    """Raises ValueError for a pipeline in mid-flight, whose weights are of several steps."""
    if saved[IN_FLIGHT] is not None:
        raise ValueError(
            f"checkpoint {step} is of an asynchronous pipeline in mid-flight, which has several "
            f"versions of its weights. Let its run end with --resume --train.steps {step + 1}: the "
            "end of a run drains the pipeline."
        )


def describe(config: Config, *, data_sha256: str) -> dict[str, Any]:
    """Describes a run for its checkpoints: the whole configuration and a digest of its data.

    Args:
      data_sha256: digest of the tokenizer, or of the data if it has no tokenizer.
    """
    return {"config": config.to_record(), "data_sha256": data_sha256}


def description(checkpoints: Checkpoints, step: int) -> dict[str, Any]:
    """Reads what a checkpoint says about its run, in today's names: see `train.config.upgraded`.

    Raises:
      ConfigError: it says nothing that this version understands.
    """
    with readable(step):
        saved = checkpoints.read_run(step)
        own, config = f"{saved['config']['task']}.", upgraded(saved["config"])
        Config(**config)
        layout = {
            f"model.{path.removeprefix(own)}" if path.startswith(own) else path: value
            for path, value in (saved.get(IN_FLIGHT) or {}).items()
        }
        today = {"config": config, IN_FLIGHT: layout or None}
        return saved | today | {"data_sha256": saved["data_sha256"]}  # which must be there


def other_model(saved: dict[str, Any], config: Config, *, data_sha256: str) -> Iterator[Failure]:
    """Says why a checkpoint cannot be continued with this configuration; nothing if it can."""
    before, here = Config(**saved["config"]), f"the checkpoint in run_dir={config.run_dir}"
    if before.task != config.task:
        yield config.failure(
            f"$task is not that of {here}. Nearest valid: {before.task}, or another --run-dir."
        )
        return
    task, now, then = tasks.find(config.task), config.flat(), before.flat()
    for path in now:
        section, _, field = path.partition(".")
        if section == "model" and field not in task.free and then[path] != now[path]:
            yield config.failure(
                f"${path} is not the model of {here}: it has {path}={in_yaml(then[path])}. "
                f"Nearest valid: {in_yaml(then[path])}, or another --run-dir."
            )
    for path, what in (
        ("optimizer.name", "the state"),
        ("optimizer.arguments", "the state"),
        ("optimizer.ema_decay", "the state"),
        ("train.trainable", "the optimizer state"),
        ("data.rows", "the order"),
    ):
        if now[path] != then[path] and (path != "data.rows" or None in (now[path], then[path])):
            yield config.failure(
                f"${path} cannot continue {what} of {here}, which has {path}="
                f"{in_yaml(then[path])}. Nearest valid: {in_yaml(then[path])}; or begin another "
                f"--run-dir with the same weights: --init-from {config.run_dir}."
            )
    yield from adapters.others(before, config, here)
    if saved["data_sha256"] != data_sha256:
        what = "other images" if task.data_kind == "images" else "another tokenizer"
        yield config.failure(
            f"$data.path has {what} than {here} was trained with. Nearest valid: data.path="
            f"{before.data.path}, or another --run-dir."
        )


def changes(saved: dict[str, Any], config: Config) -> list[str]:
    """Lists fields that affect the losses and differ from the checkpoint's: "train.seed 0 -> 1"."""
    free = (
        *("run_dir", "init_from", "lora.init_from", "data.prepare"),
        *("sample", "publish", "distributed", "wandb"),
        *("pipeline.weights", "pipeline.weight_slots", "pipeline.residuals", "pipeline.gpu_flags"),
        *("pipeline.pair_layers", "optimizer.offload"),
    )
    before, now = map(pipeline_section.recorded, (Config(**saved["config"]), config))
    return [
        f"{path} {before.get(path)} -> {now[path]}"  # another task's model has other fields
        for path in now
        if not path.startswith(free) and before.get(path) != now[path]
    ]


def _as_dict(state: TrainState | dict[str, Any]) -> dict[str, Any]:
    if isinstance(state, dict):
        return state
    kept = {"params": state.params, "optimizer": state.optimizer}
    return kept if state.layers is None else kept | {"layers": state.layers}
