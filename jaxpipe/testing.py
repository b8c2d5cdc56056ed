"""Tools for tests of your own models and schedules, on simulated devices."""

import collections
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpipe import cpu_threads
from jaxpipe.runtime import unpipelined
from jaxpipe.runtime.filters import split_trainable
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.mesh import make_mesh
from jaxpipe.runtime.not_finite import NotFinite as NotFinite
from jaxpipe.runtime.not_finite import find_nan as find_nan
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.trees import combine
from jaxpipe.runtime.types import Batch, Key, Params, States, Tree
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.lowering.lower import forward_only
from jaxpipe.schedule.problems import below_one, refuse

_HANG = "--xla_cpu_collective_call_terminate_timeout_seconds"
"""Seconds after which XLA ends a process whose devices wait for each other at a collective."""
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


def simulate_devices(num_devices: int = 8) -> None:
    """Makes jax see this many CPU devices, on any machine, in the whole process.

    Call it before the first array, such as at the top of ``conftest.py``. There may be more devices
    than cores; XLA gets two threads per device (``PJRT_NPROC``). jax's persistent compilation cache
    is switched off, because cached programs for several CPU devices deadlock. A collective that
    hangs ends the process after 5 minutes.

    Args:
      num_devices: number of devices, at least 1.

    Raises:
      RuntimeError: jax already has other devices.

    Example:
      >>> simulate_devices(1)
    """
    refuse(below_one(num_devices=num_devices))
    config: Any = jax.config  # its stubs name no settings
    try:
        config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        devices = jax.devices()
        if devices[0].platform == "cpu" and len(devices) >= num_devices:
            return
        raise RuntimeError(
            f"simulate_devices({num_devices}) comes too late: jax has begun to use {len(devices)} "
            f"devices ({devices[0].platform}), and keeps them. Call it before anything makes an "
            "array or asks for devices: right after `import jax`, or at the top of conftest.py."
        ) from error
    config.update("jax_platforms", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if _HANG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_HANG}=300".strip()
    cpu_threads.suffice()
    if num_devices > 1:
        config.update("jax_enable_compilation_cache", False)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Yields a list that receives the name of every function compiled within the block.

    Example:
      >>> step = jax.jit(lambda x: x + 1)
      >>> x = jax.numpy.ones(3)
      >>> with compilations() as found:
      ...     y = step(step(x))
      >>> len(found)
      1
    """
    found: list[str] = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(details["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def collectives(function: Callable[..., Tree], *args: Tree) -> collections.Counter[str]:
    """Counts the collectives in a compiled function, by XLA's names, such as "all-gather".

    A collective inside a loop counts once, however often the loop runs. Nothing is executed.

    Args:
      function: the function to compile, such as a step of `Pipeline.train_step`.
      args: its arguments, or their shapes with shardings.

    Example:
      >>> collectives(lambda x: x + 1, jax.numpy.ones(3))
      Counter()
    """
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    return collections.Counter(re.findall(rf" ({'|'.join(_COLLECTIVES)})(?:-start)?\(", text))


def assert_matches_unpipelined(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    schedules: Sequence[Schedule | str] = ("gpipe", "1f1b", "zb-h1"),
    meshes: Sequence[Mesh] | None = None,
    rng: Key = None,
    states: States = None,
    reference: Callable[..., Tree] | None = None,
    tolerance: float = 1e-5,
    floor: float = 0.0,
    **options: Any,
) -> list[Pipeline]:
    """Runs every schedule on every mesh and compares all results with the unpipelined model's.

    The comparison covers loss, metrics, new states and every gradient of a step, and loss and
    metrics of an evaluation. Bubbles are filled with NaN, so that a leak from them is noticed.

    Args:
      model: as for `Pipeline`.
      params: canonical parameters.
      batch: leaves ``[rows, ...]``; rows must be a multiple of microbatches x data shards.
      schedules: schedules or their names.
      meshes: meshes; by default 2 stages on one data shard and on two.
      rng: the step's key, or None.
      states: the layers' states, for a stateful model.
      reference: a function with the arguments of `unpipelined.loss` after the model; by default
        `unpipelined.loss` itself. Pass your own for a model that uses a mesh axis, or to find
        mistakes in the model's functions.
      tolerance: the largest allowed difference of an element, relative to the largest absolute
        value of its array in the reference.
      floor: a lower limit for this largest value, for gradients that are zero except for rounding,
        such as that of the bias of an attention's keys.
      options: further arguments of `Pipeline`, such as ``zero=3`` or ``remat="full"``.

    Returns:
      The compared pipelines, by mesh and schedule.

    Raises:
      AssertionError: the results differ; the message has the path of the worst array, its largest
        difference, and the configuration. Or the loss is a sum and not a mean, so that cutting the
        batch into n parts divides it by n.

    Example:
      >>> pipes = assert_matches_unpipelined(model, params, batch, zero=3)  # doctest: +SKIP
    """
    import chex

    reference = reference or _own_reference(model)
    if meshes is None:
        meshes = make_mesh(stage=2), make_mesh(stage=2, data=2)
    refuse(_no_cases(schedules=schedules, meshes=meshes))
    given = {"states": states, "poison": True, **options}
    pipes = [
        Pipeline(model, params, schedule=schedule, mesh=mesh, **given)
        for mesh in meshes
        for schedule in schedules
    ]
    evaluations: dict[Tree, Tree] = {}
    args = params, batch, rng, states
    compared: list[_Compared] = []
    of_whole = float(_loss_of_whole(*args, reference=reference))
    for pipe in pipes:
        case = f"schedule {pipe.schedule.name!r} on {dict(pipe.mesh.shape)}"
        got, want = _results(pipe, reference, evaluations, args)
        _check_mean(pipe, float(got["loss"]), of_whole, case)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, want, custom_message=f"with {case}")
        for name, tree in want.items():
            compared += _compared(case, name, got[name], tree, floor)
    if max(array.relative for array in compared) > tolerance:
        raise AssertionError(_report(compared, tolerance))
    return pipes


def _no_cases(**given: object) -> Iterator[str]:
    for name, cases in given.items():
        if isinstance(cases, (str, Mesh)) or not cases:
            yield f"{name} is {cases!r}; give at least one, in a list."


def _own_reference(model: Model) -> Callable[..., Tree]:
    if model.stage_split is not None or model.uses_axes:
        of = "mesh axes (Model.axes)" if model.uses_axes else "stages (Model.stage_split)"
        raise ValueError(
            f"The model splits parameters over {of}, which its functions "
            "cannot do without a mesh. Give what to compare with: reference="
            "functools.partial(jaxpipe.unpipelined.loss, model_with_whole_parameters)."
        )
    return functools.partial(unpipelined.loss, model)


@functools.partial(jax.jit, static_argnames="reference")
def _loss_of_whole(
    params: Params, batch: Batch, rng: Key, states: States, *, reference: Callable[..., Tree]
) -> Tree:
    """Computes the loss of the whole batch as one microbatch."""
    value = reference(params, batch, rng, num_microbatches=1, data_shards=1, states=states)
    return value[0] if isinstance(value, tuple) else value


def _check_mean(pipe: Pipeline, loss: float, of_whole: float, case: str) -> None:
    """Raises AssertionError for a loss that shrinks by as much as the batch is cut."""
    parts = pipe.schedule.num_passes * pipe.axes.num_shards(pipe.mesh)
    if parts > 1 and of_whole and np.isclose(parts * loss, of_whole, rtol=1e-2):
        raise AssertionError(
            f"The loss of the batch is {of_whole:.6g} in one microbatch, and {loss:.6g} in {parts} "
            f"with {case}: it is a sum. A step takes the mean of what Model.head_loss returns for "
            "microbatches and data shards, and so divides the sum over all rows by their number. "
            "Return the mean over a microbatch, or jaxpipe.Weighted(total, weight)."
        )


@functools.partial(jax.jit, static_argnames=("reference", "num_microbatches", "data_shards"))
def _reference(
    trained: Params,
    frozen: Params,
    batch: Batch,
    rng: Key,
    states: States,
    *,
    reference: Callable[..., Tree],
    num_microbatches: int,
    data_shards: int,
) -> tuple[Tree, Tree]:
    """Computes value and gradients without a pipeline, in one program for equal references."""

    def loss(trained: Params) -> tuple[jax.Array, Tree]:
        shape = {"num_microbatches": num_microbatches, "data_shards": data_shards}
        value = reference(combine(trained, frozen), batch, rng, **shape, states=states)
        return value[0] if isinstance(value, tuple) else value, value

    (_, value), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
    return value, gradients


def _results(
    pipe: Pipeline,
    reference: Callable[..., Tree],
    evaluations: dict[Tree, Tree],
    args: tuple[Params, Batch, Key, States],
) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Computes the results of the pipeline and of the reference, by the same names."""
    params, batch, rng, states = args
    placed, placed_states = pipe.place(params), None
    if states is not None:
        placed_states = pipe.place_states(states)
    value, gradients = jax.jit(pipe.value_and_grad)(placed, batch, rng, states=placed_states)
    # The forwards of many schedules are one program.
    forwards = dataclasses.replace(forward_only(pipe.schedule), name="")
    program = pipe.mesh, forwards, pipe.table.layer_counts
    if program not in evaluations:
        evaluations[program] = jax.jit(pipe.loss)(placed, batch, rng, states=placed_states)
    evaluation = evaluations[program]
    has = {"metrics": isinstance(evaluation, tuple), "states": states is not None}
    got = _named(value, has) | {"gradients": pipe.unplace(gradients)}
    if states is not None:
        got["states"] = pipe.unplace_states(got["states"])
    expected, gradients = _reference(
        *split_trainable(params, pipe.options.trainable),
        batch,
        rng,
        states,
        reference=reference,
        num_microbatches=pipe.schedule.num_microbatches,
        data_shards=pipe.axes.num_shards(pipe.mesh),
    )
    if isinstance(expected, tuple) != isinstance(value, tuple):
        raise ValueError(
            "reference and model do not return the same: one a loss, the other a loss and metrics "
            "or states. A reference returns what jaxpipe.unpipelined.loss would return."
        )
    want = _named(expected, has) | {"gradients": gradients}
    evaluated = _named(evaluation, has | {"states": False})
    got |= {f"evaluated {name}": tree for name, tree in evaluated.items()}
    return got, want | {f"evaluated {name}": want[name] for name in evaluated}


def _named(value: Tree, has: dict[str, bool]) -> dict[str, Tree]:
    """Names loss, metrics and states in what a step returns beside the gradients."""
    names = [name for name, there in has.items() if there]
    if not names:
        return {"loss": value}
    loss, aux = value
    return {"loss": loss} | dict(zip(names, aux if len(names) == 2 else [aux], strict=True))


@dataclasses.dataclass(frozen=True)
class _Compared:
    """The distance of an array of one configuration from the reference.

    Args:
      relative: the largest difference, relative to the array's scale.
      scale: the largest absolute value in the reference.
    """

    case: str
    path: str
    relative: float
    scale: float
    text: str


def _compared(case: str, name: str, got: Tree, want: Tree, floor: float) -> Iterator[_Compared]:
    """Compares all arrays of two trees of the same structure."""
    leaves = jax.tree.leaves_with_path(want)
    for (path, expected), found in zip(leaves, jax.tree.leaves(got), strict=True):
        a, b = (np.asarray(w).astype(np.float64) for w in (found, expected))
        with np.errstate(invalid="ignore"):
            off = np.where(a == b, 0, np.abs(a - b))  # infinities are equal
        off = np.where(np.isnan(off), np.inf, off)
        if off.size == 0:
            continue
        at = np.unravel_index(off.argmax(), off.shape)
        worst = float(off[at])
        scale = float(np.abs(b[np.isfinite(b)]).max(initial=0))
        allowed = max(scale, floor) if jnp.issubdtype(expected.dtype, jnp.inexact) else 0
        relative = worst / allowed if allowed else np.inf if worst else 0.0
        place = f" at {[int(n) for n in at]}" if at else ""
        text = f"{a[at]:.7g}{place}, expected {b[at]:.7g}: off by {worst:.1e}, {relative:.1e} of "
        text += f"the largest value {scale:.1e}"
        yield _Compared(case, name + jax.tree_util.keystr(path), relative, scale, text)


def _report(compared: list[_Compared], tolerance: float) -> str:
    """Writes what differs, the worst array first."""
    cases = list(dict.fromkeys(array.case for array in compared))
    worst = {
        case: max((a for a in compared if a.case == case), key=lambda a: a.relative)
        for case in cases
    }
    wrong = [array for array in compared if array.relative > tolerance]
    first = max(wrong, key=lambda array: array.relative)
    lines = [
        f"{len({array.case for array in wrong})} of {len(cases)} configurations differ from the "
        f"reference by more than {tolerance:g} of an array's largest value.",
        f"Worst: {first.path} is {first.text}, with {first.case}.",
        "The worst array of each configuration:",
        *(f"  {case}: {array.path} {array.relative:.1e}" for case, array in worst.items()),
    ]
    same_case = sorted((a for a in wrong if a.case == first.case), key=lambda a: -a.relative)
    lines += [f"All that differ with {first.case}:"]
    lines += [f"  {array.path}: {array.relative:.1e}" for array in same_case]
    largest = max(array.scale for array in compared if array.path.startswith("gradients"))
    if first.path.startswith("gradients") and first.scale < 1e-5 * largest:
        lines.append(
            f"{first.path} is less than 1e-5 of the largest gradient, {largest:.1e}. If it is "
            f"only the rounding of what cancels, give floor={1e-2 * largest:.0e}."
        )
    return "\n".join(lines)
