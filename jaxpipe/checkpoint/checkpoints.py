"""Checkpoints in canonical order: they restore onto any mesh, schedule and ZeRO level.

Saving is asynchronous and atomic: a checkpoint appears under its name when it is whole, with a
checksum of every file. The latest few and the one with the lowest held-out loss are kept. Restoring
takes the newest one that is still whole. Damaged ones are moved aside, never deleted.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import logging
import math
import numbers
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxpipe.checkpoint import integrity
from jaxpipe.checkpoint.integrity import DATA, RUN, STATE, DamagedError, Fetch, Found
from jaxpipe.checkpoint.processes import from_first
from jaxpipe.files import read_json
from jaxpipe.runtime.layout.placed import Placed, orders
from jaxpipe.runtime.layout.placing import Placing
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.trees import bare_shapes, leaf_mismatches
from jaxpipe.runtime.types import OptimizerState, Shapes, States, Tree
from jaxpipe.schedule.problems import Problem, below_one, refuse

_LOG = logging.getLogger(__name__)

_PARAMS, _OPTIMIZER, _STATES = "params", "optimizer", "layers"
"""Parts of a saved training run; the states of the layers are there if the model keeps some."""

_BELONG_TO = {
    _PARAMS: "another model",
    _OPTIMIZER: "another optimizer, or other parameters are trained",
    _STATES: "a model whose layers keep other states",
}
_MOST_LINES = 5
_EVAL_LOSS = "eval_loss"
_ORDERS = "orders of placed trees"
"""The entry of the saved data with the orders in which arrays that are not canonical lie."""
LOSS_FILE = "metrics/metrics"
"""The file of a checkpoint with its held-out loss."""


class Restored(NamedTuple):
    """A training run as it was saved, placed for a pipeline.

    Args:
      step: optimizer steps done.
      params: placed parameters.
      state: the optimizer's state.
      data: the loop's own data, as given to `save`.
      states: placed states of the layers; None for a model without.
    """

    step: int
    params: Placed
    state: OptimizerState
    data: dict[str, Any]
    states: States


class Checkpoints:
    """The checkpoints of one run. Use it as a context manager, which waits for pending writes when
    it exits. Otherwise call `wait`; a program that ends also waits, but only prints errors.

    Entering the context or saving renames damaged checkpoints and removes half-written ones of a
    killed run. Nothing changes before that. With several processes, each must make the same calls
    on a folder that all of them see.

    Args:
      folder: absolute or relative path; created when first needed.
      keep: number of latest checkpoints to keep, at least 1; the best one is kept as well.
      keep_every: keep the checkpoints of all steps that are multiples of this; None keeps none.
      read_only: never write.
      fetch: completes the files of a step, for folders that only have the files needed to choose
        which checkpoints to keep. Process 0 calls it with a step before any process reads it.

    Raises:
      ValueError: the folder is a file or a URL, or ``keep`` is below 1.

    Example:
      >>> with jaxpipe.Checkpoints("runs/one", keep=3) as checkpoints:  # doctest: +SKIP
      ...     if found := checkpoints.restore(pipe, optimizer):
      ...         first, params, state = found.step, found.params, found.state
      ...     for n in range(first, 1000):
      ...         loss, params, state = step(params, state, batch(n))
      ...         if n % 100 == 99:
      ...             checkpoints.save(n + 1, pipe, optimizer, params, state)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 1,
        keep_every: int | None = None,
        read_only: bool = False,
        fetch: Fetch | None = None,
    ) -> None:
        self._folder, self._keep, self._keep_every = Path(folder).resolve(), keep, keep_every
        self._read_only, self._fetch = read_only, fetch
        problems: list[Problem | str] = [*below_one({"keep_every": keep_every}, keep=keep)]
        if "://" in str(folder):
            problems.append(f"folder={str(folder)!r} is a URL; checkpoints need a folder.")
        is_file = self._folder.exists() and not self._folder.is_dir()
        if is_file:
            name = f"folder={str(folder)!r}"
            problems.append(f"{name} is a file; checkpoints need a folder of their own.")
        refuse(problems)
        self._manager: ocp.CheckpointManager | None = None
        self._writing = 0  # the step being written, for its checksums
        self._left = False  # as a context manager

    def __enter__(self) -> Checkpoints:
        if not self._read_only and (self._manager is None or self._left):
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._manager is not None:
            self._left = True
            _WRITERS.pop(self._folder, None)
            self._manager.close()

    # Checkpoints in the folder.

    @functools.cached_property
    def found(self) -> Found:
        """The checkpoints that the folder held at first. Every process must read this property;
        process 0 reads the newest files.

        Only process 0 decides which are damaged, so that all processes resume from the same step.
        """
        find = functools.partial(integrity.find, self._folder, self._fetch)
        latest, damaged = from_first(find)  # lists, after a round trip through JSON
        return Found(latest, tuple(itertools.starmap(integrity.Damaged, damaged)))

    @property
    def latest(self) -> int | None:
        """The newest step whose checkpoint is whole, or None."""
        return self.found.latest if self._manager is None else self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Every step that has a checkpoint, whole or not, in ascending order."""
        return integrity.steps(self._folder)

    @property
    def best(self) -> int | None:
        """The step with the lowest held-out loss, or None if none was evaluated."""
        losses = {step: _loss(self._folder / str(step)) for step in self.steps}
        evaluated = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
        # The newest of equals, as `_LatestAndBest` keeps it.
        return min(reversed(evaluated), key=evaluated.__getitem__, default=None)

    def shapes(self, step: int) -> Shapes:
        """Shapes and dtypes of the saved arrays, in dictionaries and lists."""
        folder, handler = self._folder / str(step), ocp.PyTreeCheckpointHandler()
        with integrity.reading(f"the checkpoint {folder}"):
            saved = _object(handler.metadata(folder / STATE).tree)
            handler.close()
            return bare_shapes(saved)

    # Training runs.

    def save(
        self,
        step: int,
        pipe: Pipeline,
        optimizer: optax.GradientTransformation,
        params: Placed,
        state: OptimizerState,
        *,
        states: States = None,
        data: Mapping[str, object] | None = None,
        loss: float | None = None,
    ) -> None:
        """Starts to save a training run; returns as soon as training may continue.

        Arrays are copied to host memory in canonical order, an eighth or 64 MiB at a time, of which
        each device holds its share. They stay there until the files are written.

        Args:
          step: optimizer steps done.
          pipe: the pipeline that placed parameters and states.
          optimizer: the optax transformation of the state.
          params: placed parameters.
          state: the optimizer's state.
          states: placed states of the layers, for a stateful model.
          data: values that JSON can hold, such as the position in the data and the seed.
          loss: held-out loss at this step; the checkpoint with the lowest is also kept.

        Raises:
          ValueError: trees that differ from the pipeline's or are not placed; a step that is not
            after the latest.
          RuntimeError: the program is ending.
          TypeError: data that JSON cannot hold.
        """
        _require_json("data", data or {})
        refuse(pipe.states_problems(states))
        trees = {_PARAMS: params, _OPTIMIZER: state, _STATES: states}
        placings = _placings(pipe, optimizer)
        arrays = {name: placing.to_host(trees[name]) for name, placing in placings.items()}
        self.save_arrays(step, arrays, data=data or {}, loss=loss)

    def restore(
        self,
        pipe: Pipeline,
        optimizer: optax.GradientTransformation,
        *,
        step: int | None = None,
    ) -> Restored | None:
        """Reads a training run and places it for a pipeline of the same model.

        The mesh, the schedule, the ZeRO level, ``weights`` and ``layer_counts`` may differ from
        those of the saved run. Every device reads its own share.

        Args:
          pipe: the pipeline for which to place the run.
          optimizer: the optax transformation that continues; its state must have the same arrays.
          step: one of `steps`; the newest whole one by default.

        Returns:
          The saved run; None if the folder holds no checkpoint. A warning in the log then names
          folders with similar names, or inside or around it, that hold checkpoints.

        Raises:
          ValueError: all checkpoints are damaged, or that of ``step`` is; the checkpoint is of
            another model or optimizer; the folder does not exist, with ``read_only``.
        """
        self.wait()
        step = self._newest() if step is None else self.whole(step)
        if step is None:
            return None
        placings = _placings(pipe, optimizer)
        expected = {name: placing.canonical for name, placing in placings.items()}
        refuse(_differences(self._folder / str(step), self.shapes(step), expected))
        arrays, data = self.restore_arrays(step, expected)
        placed = {name: placing.place(arrays.pop(name)) for name, placing in placings.items()}
        return Restored(step, placed[_PARAMS], placed[_OPTIMIZER], data, placed.get(_STATES))

    def _newest(self) -> int | None:
        """The newest whole checkpoint; raises ValueError if there are only damaged ones."""
        if self.latest is not None:
            return self.latest
        name, parent = f"folder={str(self._folder)!r}", self._folder.parent
        if self.found.damaged:
            raise ValueError(
                f"{name} holds no whole checkpoint ({self.found.reasons}). "
                "Fetch one from a backup, or begin in another folder."
            )
        by_name = {path.name: path for path in parent.glob("*")}
        by_run = {path.parent.name: path for path in parent.parent.glob(f"*/{self._folder.name}")}
        near = [
            paths[like]
            for own, paths in ((self._folder, by_name), (parent, by_run))
            for like in difflib.get_close_matches(own.name, paths)
        ]
        # A run's folder in place of that of its checkpoints, or the folder of one step.
        near += [*self._folder.glob("*"), parent]
        listed = ", ".join(str(path) for path in near if integrity.steps(path))
        hint = f" Nearest with checkpoints: {listed}." if listed else ""
        if self._read_only and not self._folder.is_dir():
            refuse([f"{name} does not exist, and read_only=True makes none.{hint}"])
        if listed and jax.process_index() == 0:
            _LOG.warning("%s holds no checkpoint to restore.%s", name, hint)
        return None

    def whole(self, step: int) -> int:
        """Returns the step if its checkpoint is whole; every process must ask.

        Raises:
          ValueError: it is damaged, or there is none.
        """
        have = ", ".join(map(str, self.steps)) or "none"
        folder = f"folder={str(self._folder)!r}"
        if step not in self.steps:
            refuse([f"step={step} has no checkpoint in {folder}; it holds {have}."])
        damage = from_first(lambda: self._damage(step))
        if damage is not None:
            refuse([f"The checkpoint of step={step} in {folder} is damaged: {damage}."])
        return step

    def _damage(self, step: int) -> str | None:
        if self._fetch is not None:
            self._fetch(step)
        try:
            integrity.verify(self._folder / str(step))
        except DamagedError as error:
            return str(error)
        return None

    # Any arrays.

    def save_arrays(
        self,
        step: int,
        arrays: Tree,
        *,
        data: Mapping[str, object],
        run: Mapping[str, object] | None = None,
        loss: float | None = None,
    ) -> None:
        """Starts to save arrays as they are; returns like `save`.

        Args:
          step: optimizer steps done.
          arrays: a tree whose root is a dictionary, such as the state of an `AsyncPipeline`. The
            arrays must not be donated while they are written.
          data: as for `save`.
          run: a description of the run, for JSON; `read_run` returns it.
          loss: as for `save`.
        """
        if self._left:
            raise ValueError(
                f"folder={str(self._folder)!r} was left: save inside `with Checkpoints(...)`, and "
                "with the `Checkpoints` of this folder that was made last."
            )
        if not threading.main_thread().is_alive():
            raise RuntimeError(
                f"step={step} comes too late: the program is ending, and its threads take no more "
                "work. Save before the main thread ends; it can `join` a thread that saves."
            )
        if not isinstance(step, numbers.Integral) or step < 0:
            refuse([f"step={step!r} must be a whole number, the optimizer steps done."])
        loss = None if loss is None else float(loss)  # JSON holds no array
        _require_json("data", data)
        _require_json("run", run or {})
        manager = self._manager or self._open()
        # The checksums of the step before must be written first.
        manager.wait_until_finished()
        self._writing = int(step)  # JSON holds no numbers of numpy
        latest = manager.latest_step()
        if latest is not None and self._writing <= latest:
            refuse(
                [
                    f"step={step} is not after step={latest}, which folder={str(self._folder)!r} "
                    "holds: `restore` goes on from the latest, and none is replaced. Name another "
                    "folder."
                ]
            )
        items = {
            STATE: ocp.args.StandardSave(arrays),
            DATA: ocp.args.JsonSave({**data, _ORDERS: _orders(arrays)}),
            RUN: ocp.args.JsonSave(dict(run or {})),
        }
        metrics = {_EVAL_LOSS: math.inf if loss is None else loss}
        manager.save(self._writing, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def restore_arrays(self, step: int, shapes: Shapes) -> tuple[Tree, dict[str, Any]]:
        """Reads the arrays of a step, given their shapes with shardings, and its data.

        Raises:
          ValueError: placed trees of a pipeline that orders its layers otherwise.
        """
        items = {STATE: ocp.args.StandardRestore(shapes), DATA: ocp.args.JsonRestore()}
        restored = _restore(self._folder / str(step), **items)
        data = restored[DATA]
        if data.pop(_ORDERS, expected := _orders(shapes)) != expected:
            raise ValueError(
                f"The checkpoint of step={step} in folder={str(self._folder)!r} holds placed trees "
                "of a pipeline that orders its layers otherwise. Restore them with the shapes of "
                "that pipeline and `unplace` them; what `save` saves fits any."
            )
        return restored[STATE], data

    def restore_parts(self, step: int, shapes: Shapes) -> Tree:
        """Reads some of the arrays, such as parameters without the optimizer's state, given their
        shapes with shardings in the dictionary of all arrays."""
        like = ocp.checkpoint_utils.construct_restore_args(shapes)
        args = ocp.args.PyTreeRestore(shapes, restore_args=like, partial_restore=True)
        return _restore(self._folder / str(step), **{STATE: args})[STATE]

    def read_run(self, step: int) -> dict[str, Any]:
        """The description of the run that was saved."""
        run: dict[str, Any]
        run = _restore(self._folder / str(step), **{RUN: ocp.args.JsonRestore()})[RUN]
        return run

    # Writing.

    def check(self) -> None:
        """Raises the error of a write that has failed since the last call."""
        if self._manager is not None:
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Waits until what was saved in the folder is on disk."""
        writer = _WRITERS.get(self._folder)
        if writer is not None and writer._manager is not None:
            writer._manager.wait_until_finished()

    def _open(self) -> ocp.CheckpointManager:
        """Makes the folder ready to be written to."""
        if self._read_only:
            raise ValueError(f"folder={str(self._folder)!r} was opened with read_only=True.")
        if (writer := _WRITERS.get(self._folder)) is not None:  # such as that of a notebook's cell
            writer.__exit__()
        _WRITERS[self._folder] = self
        # What the folder held at first is moved once: later, its steps may be saved again.
        damaged = self.found.damaged if self._manager is None else ()
        self._left = False
        from_first(lambda: integrity.move_aside(self._folder, damaged))
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_LatestAndBest(self._folder, self._keep, self._keep_every),
                # Without this the losses are not saved, and a run that resumes does not know them.
                best_fn=operator.itemgetter(_EVAL_LOSS),
                best_mode="min",
                cleanup_tmp_directories=True,
                # Otherwise orbax reads the files of every step, and stops at a damaged one.
                lightweight_initialize=True,
                async_options=ocp.AsyncOptions(
                    # Otherwise, where a folder cannot be made, threads wait for it, and the program
                    # does not end for five minutes.
                    create_directories_asynchronously=False,
                    # Called when all processes have written, before the folder has its final name.
                    post_finalization_callback=self._write_checksums,
                ),
            ),
        )
        return self._manager

    def _write_checksums(self) -> None:
        (written,) = self._folder.glob(f"{self._writing}{ocp.utils.TMP_DIR_SUFFIX}*")
        integrity.write_checksums(written, self._writing)


_WRITERS: dict[Path, Checkpoints] = {}
"""The one that writes to a folder: it would take another's unfinished files for a killed run's."""


def _finish() -> None:
    """Waits for everything that was saved, whatever goes wrong with some of it."""
    with contextlib.ExitStack() as stack:
        for writer in _WRITERS.values():
            stack.callback(writer.wait)


# This runs while the threads that write still take work; `atexit` would be too late.
threading._register_atexit(_finish)  # type: ignore[attr-defined]


def _require_json(argument: str, fields: Mapping[str, object]) -> None:
    for name, value in fields.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"{argument}[{name!r}] must be what JSON can hold ({error}). Numbers go in as "
                "float(x) or int(x), small arrays as x.tolist(), a random key as "
                "jax.random.key_data(key).tolist(); `save_arrays` saves trees of large arrays."
            ) from error


def _orders(arrays: Tree) -> dict[str, str]:
    return {path: str(order) for path, order in orders(arrays).items()}


def _restore(folder: Path, **items: ocp.args.CheckpointArgs) -> dict[str, Any]:
    with (
        integrity.reading(f"the checkpoint {folder}"),
        ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader,
    ):
        restored = reader.restore(folder, args=ocp.args.Composite(**items))
        return {name: _object(restored[name]) for name in items}


def _object(saved: object) -> dict[str, Any]:
    """Returns an item of a checkpoint if it is a dictionary, as all are; else raises TypeError."""
    if isinstance(saved, dict):
        return saved
    raise TypeError(f"a {type(saved).__name__} in place of a dictionary")


def _placings(pipe: Pipeline, optimizer: optax.GradientTransformation) -> dict[str, Placing]:
    placings = {_PARAMS: pipe.params_placing, _OPTIMIZER: pipe.optimizer_placing(optimizer)}
    return placings if pipe.states_placing is None else placings | {_STATES: pipe.states_placing}


def _differences(path: Path, saved: Shapes, expected: dict[str, Shapes]) -> Iterator[str]:
    """Says why a checkpoint is not of this model and optimizer; nothing if it is. Shapes that were
    ``saved`` are in dictionaries and lists, those that a pipeline would save are as it has them."""
    for part in _BELONG_TO:
        wanted = ocp.tree.serialize_tree(expected.get(part), keep_empty_nodes=True)
        if lines := list(leaf_mismatches(part, saved.get(part), _raw_keys(wanted))):
            yield f"The checkpoint {path} is of {_BELONG_TO[part]}:"
            yield from lines[:_MOST_LINES]
            if len(lines) > _MOST_LINES:
                yield f"... and {len(lines) - _MOST_LINES} further differences."
            return


def _raw_keys(shapes: Tree) -> Shapes:
    """Replaces the shapes of random keys by those of the data that is written of them."""

    def raw(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf

    return jax.tree.map(raw, shapes)


class _LatestAndBest:
    """Keeps the latest few, the one with the lowest held-out loss, and one every so many steps."""

    def __init__(self, folder: Path, num_latest: int, every: int | None) -> None:
        self._folder, self._num_latest, self._every = folder, num_latest, every

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        del context
        # An earlier run's checkpoints come without metrics.
        losses = [_loss(self._folder / str(info.step), info.metrics) for info in checkpoints]
        newest_first = range(len(losses) - 1, -1, -1)
        best = min(newest_first, key=losses.__getitem__, default=None)
        first = len(losses) - self._num_latest
        return [
            number >= first
            or number == best
            or (self._every is not None and checkpoint.step % self._every == 0)
            for number, checkpoint in enumerate(checkpoints)
        ]


def _loss(folder: Path, metrics: Mapping[str, float] | None = None) -> float:
    """Finds the held-out loss of a checkpoint in its metrics, which are read if they are None;
    infinite if not evaluated, or not readable."""
    try:
        if metrics is None:
            metrics = read_json(folder / LOSS_FILE)
            if (folder / integrity.CHECKSUMS_FILE).exists():
                integrity.verify_checksums(folder, [LOSS_FILE])
        return loss if math.isfinite(loss := metrics[_EVAL_LOSS]) else math.inf
    except (OSError, ValueError, KeyError, TypeError, DamagedError):
        return math.inf
