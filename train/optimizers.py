"""The optimizer of a run: AdamW, or any optimizer of optax by its name and arguments.

`jaxpipe.Pipeline` runs a transformation as if every layer were a tree of its own, whatever the
layout (``docs/design/004-optimizers.md``), so that optimizers that look at the shape of a
parameter, such as muon and adafactor, are right.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from train.config import Config, OptimizerConfig
from train.errors import Failure

AVERAGE = "average"
"""The entry of the optimizer's state with the moving average of the weights, if there is one."""
_ADAMW, _MUON, _WARMUP_COSINE = "adamw", "muon", "warmup_cosine"
_UNFIT = frozenset(
    {
        *("dpsgd", "_deprecated_dpsgd"),  # need the gradient of every row
        *("schedule_free_adamw", "schedule_free_sgd"),  # evaluate other weights than they train
        *("noisy_sgd", "optimistic_adam"),  # warn that they will change
    }
)
_OF_ADAMW = ("weight_decay", "beta1", "beta2")
_OF_WARMUP_COSINE = ("peak_lr", "warmup_steps", "min_lr_ratio")


def named() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Lists the optimizers of optax by name; each takes a learning rate."""
    optimizers: dict[str, Callable[..., optax.GradientTransformation]] = {}
    for module in (optax.contrib, optax):
        for name, function in vars(module).items():
            fits = name not in _UNFIT and not name.startswith("scale_by_")
            if fits and name.islower() and inspect.isfunction(function):
                parameters = inspect.signature(function).parameters
                if "learning_rate" in parameters and "base_optimizer" not in parameters:
                    optimizers[name] = function
    return optimizers


def named_schedules() -> dict[str, Callable[..., optax.Schedule]]:
    """Lists the schedules of optax by name."""
    return {
        name: function
        for name, function in vars(optax.schedules).items()
        if name.endswith(("_schedule", "_decay")) and inspect.isfunction(function)
    }


def failures(config: Config) -> Iterator[Failure]:
    """Says which names and arguments optax does not take, and which fields have no effect."""
    settings = config.optimizer
    own = OptimizerConfig()
    groups: list[tuple[str, str, str, Mapping[str, Any], tuple[str, ...]]] = [
        ("name", "arguments", _ADAMW, {_ADAMW: None} | named(), _OF_ADAMW),
        (
            "schedule", "schedule_arguments", _WARMUP_COSINE,
            {_WARMUP_COSINE: None} | named_schedules(), _OF_WARMUP_COSINE,
        ),
    ]  # fmt: skip
    for field, arguments, default, known, fields in groups:
        name, path, given = getattr(settings, field), f"optimizer.{field}", f"optimizer.{arguments}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.0)
            yield config.failure(
                f"${path} is none of optax that takes numbers alone. Nearest valid: "
                f"{' or '.join(near)}."
            )
        elif name == default and getattr(settings, arguments):
            yield config.failure(
                f"${given} has no effect with ${path}, which has fields of its own: "
                f"{', '.join(f'optimizer.{part}' for part in fields)}."
            )
        elif name != default:
            for part in fields:
                if getattr(settings, part) != getattr(own, part):
                    yield config.failure(
                        f"$optimizer.{part} has no effect with ${path}. Nearest valid: an entry of "
                        f"{given} instead."
                    )
            if rule := _refusal(config, field):
                yield config.failure(f"${given} does not suit ${path} ({rule}).")


def _refusal(config: Config, field: str) -> str:
    """Tries the arguments on a small tree of shapes; returns what optax says against them."""
    settings = config.optimizer
    try:
        if field == "schedule":
            rate = learning_rate(settings, num_steps=config.train.steps)
            jax.eval_shape(rate, jax.ShapeDtypeStruct((), "int32"))
        else:
            made = _named(settings, 1e-3)
            shape = {"layers": jax.ShapeDtypeStruct((4, 4), "float32")}
            state = jax.eval_shape(made.init, shape)
            jax.eval_shape(made.update, shape, state, shape)
    except Exception as error:  # optax's functions raise many types for wrong arguments
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def learning_rate(config: OptimizerConfig, *, num_steps: int) -> optax.Schedule:
    """Makes the learning rate: a linear warm-up from 0 to the peak, then a cosine decay; or a
    schedule of optax.

    Args:
      config: peak, length of the warm-up, last value; or a name and arguments.
      num_steps: optimizer steps of the run, at least 1; the decay ends there.

    Example:
      >>> float(learning_rate(OptimizerConfig(peak_lr=1.0, warmup_steps=2), num_steps=9)(1))
      0.5
    """
    if config.schedule != _WARMUP_COSINE:
        return named_schedules()[config.schedule](**config.schedule_arguments)
    if config.warmup_steps == num_steps:  # optax's cosine needs at least one step
        return optax.linear_schedule(0.0, config.peak_lr, num_steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.peak_lr,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.peak_lr * config.min_lr_ratio,
    )


def make_optimizer(
    config: OptimizerConfig,
    rate: optax.Schedule,
    *,
    clips: bool = True,
    last: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Makes the optimizer, after clipping by the norm of the whole gradient.

    With AdamW, only matrices and kernels decay.

    Args:
      config: its name and numbers.
      rate: the learning rate of a step.
      clips: False leaves clipping to an asynchronous pipeline; the state is the same.
      last: what follows the optimizer, as of `train.task.Task.last_transformation`.
    """
    clip = optax.identity()
    if clips and config.clip_norm:
        clip = optax.clip_by_global_norm(config.clip_norm)
    if config.name != _ADAMW:
        made = optax.chain(clip, _named(config, rate))
    else:
        made = optax.chain(clip, *_adamw(config, rate))
    if last is not None:
        made = optax.chain(made, last)
    if not config.ema_decay:
        return made
    return optax.named_chain(("optimizer", made), (AVERAGE, _average(config.ema_decay)))


def _named(config: OptimizerConfig, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    own = {"muon_weight_dimension_numbers": _matrices} if config.name == _MUON else {}
    return named()[config.name](rate, **own, **config.arguments)


def _matrices(params: Any) -> Any:
    """The matrices that Muon trains: those of layers, of every expert each; AdamW has the rest."""

    def dimensions(path: Any, weight: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        if path[0].key != "layers" or "bias" in str(path[-1]) or weight.ndim not in (2, 3):
            return None
        return optax.contrib.MuonDimensionNumbers(weight.ndim - 2, weight.ndim - 1)

    return jax.tree.map_with_path(dimensions, params)


def _average(decay: float) -> optax.GradientTransformation:
    """Keeps the moving average of the weights after each step, as `optax.ema` does of updates."""
    ema = optax.ema(decay)

    def update(updates: Any, state: optax.EmaState, params: Any) -> tuple[Any, optax.EmaState]:
        _, state = ema.update(optax.apply_updates(params, updates), state)
        return updates, state

    return optax.GradientTransformation(ema.init, update)


def _adamw(config: OptimizerConfig, rate: optax.Schedule) -> Sequence[optax.GradientTransformation]:
    def decay(updates: Any, params: Any) -> Any:
        return jax.tree.map(
            lambda update, weight: (
                update + config.weight_decay * weight if weight.ndim >= 2 else update
            ),
            updates,
            params,
        )

    return [
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2),
        optax.stateless(decay),
        optax.scale_by_learning_rate(rate),
    ]
