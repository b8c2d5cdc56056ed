"""Weights for a server while a run trains, written by all processes at the same time.

A step's weights are copied on the devices, whole layers to a stage, and training goes on. A thread
of each process brings its layers to the host and writes them as one file of a Hugging Face folder;
that of process 0 waits for all files, adds the index, and moves the link ``latest``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.files import write_whole
from models import hugging_face
from models.adapters import merged
from models.hugging_face_fields import TokenIds
from models.hugging_face_files import CONFIG, INDEX, library
from models.types import PyTree
from train.errors import refused
from train.step import Setup, TrainState

LATEST = "latest"
_PATIENCE_SECONDS = 600.0
"""Time for which process 0 waits for the files of the others."""


class Publisher:
    """Publishes the weights of a run.

    Raises:
      ConfigError: the folder is not there and cannot be made, or no family of the transformers
        library has the model's shape.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, settings = setup, setup.config.publish
        self._keep = settings.keep
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._pending: concurrent.futures.Future[None] | None = None
        self._folder = None if settings.path is None else Path(settings.path)
        if self._folder is None:
            return
        try:
            shape = setup.task.shape
            self._adapted, self._shape = shape, dataclasses.replace(shape, adapters=None)
            self._tokenizer = setup.task.exported_tokenizer(Path(setup.config.data.path))
            ids = TokenIds(**self._tokenizer.token_ids) if self._tokenizer else None
            self._fields = hugging_face.config_fields(self._shape, ids)
            self._folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise refused(f"publish.path={self._folder}: {error}", "publish.path") from error
        stages = setup.config.mesh.stage

        def place(leaf: jax.ShapeDtypeStruct, *, stacked: bool) -> NamedSharding:
            split = stacked and leaf.shape[0] % stages == 0
            return NamedSharding(setup.mesh, P("stage") if split else P())

        self._stacked = not isinstance(setup.shapes["layers"], tuple)
        shapes = setup.canonical_shapes
        of_params = {
            part: jax.tree.map(lambda w, p=part: place(w, stacked=self._stacked and p == "layers"),
                               tree)
            for part, tree in shapes.params.items()
        }  # fmt: skip
        of_states = jax.tree.map(lambda w: place(w, stacked=False), shapes.layers)

        def copied(state: TrainState, values: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
            params, states = setup.to_canonical_weights(state)
            return params, states, _are_finite((params, states, values))

        whole = NamedSharding(setup.mesh, P())
        self._copy = jax.jit(copied, out_shardings=(of_params, of_states, whole))

    def begin(self, step: int, state: TrainState, values: PyTree = None) -> None:
        """Begins to publish the weights after a step; returns when the state may be donated.

        Nothing is published if a weight or one of the values is not finite.

        Args:
          values: its loss and the norm of its gradient, on the devices.

        Raises:
          ConfigError: the last ones could not be written.
        """
        self.wait()
        params, states, is_finite = self._copy(state, values)
        self._pending = self._thread.submit(self._write, step, params, states, is_finite)

    def wait(self) -> None:
        """Waits for the thread, and raises ConfigError with what it failed of."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except OSError as error:
            raise refused(f"publish.path={self._folder}: {error}", "publish.path") from error

    def _write(self, step: int, params: PyTree, states: PyTree, is_finite: jax.Array) -> None:
        assert self._folder is not None
        if not is_finite:
            return
        folder = self._folder / f"step_{step}"
        partial = self._folder / f"partial_{step}"
        partial.mkdir(exist_ok=True)
        number, count = jax.process_index(), jax.process_count()
        tensors = {n: w for part in self._own(params, states) for n, w in part.items()}
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        library().numpy.save_file(tensors, partial / f".{name}", metadata={"format": "pt"})
        os.replace(partial / f".{name}", partial / name)
        if number:
            return
        names = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while missing := [name for name in names if not (partial / name).exists()]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{missing} did not appear in {partial}")
            time.sleep(0.1)
        self._complete(partial, names)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        link = self._folder / f".{LATEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self._folder / LATEST)
        kept = sorted(self._folder.glob("step_*"), key=lambda path: int(path.name[5:]))
        for old in kept[: -self._keep]:
            shutil.rmtree(old)

    def _complete(self, partial: Path, names: list[str]) -> None:
        """Adds what makes files of weights a folder."""
        weight_map, size = dict[str, str](), 0
        for name in names:
            with library().safe_open(partial / name, framework="numpy") as file:
                weight_map |= dict.fromkeys(file.keys(), name)
            size += (partial / name).stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_whole(partial / INDEX, json.dumps(index).encode())
        for name, content in (self._tokenizer.files if self._tokenizer else {}).items():
            (partial / name).write_bytes(content)
        write_whole(partial / CONFIG, json.dumps(self._fields, indent=2).encode())

    def _own(self, params: PyTree, states: PyTree) -> Iterator[dict[str, np.ndarray]]:
        """Yields the tensors of this process: its stages' layers, or its share of those that differ
        or do not divide; those of embedding and head on process 0."""
        number, count = jax.process_index(), jax.process_count()
        if number == 0:
            outer = {name: _whole(part) for name, part in params.items() if name != "layers"}
            trees = {"params": outer}
            if states is not None:
                trees["state"] = {"layers": _whole(states)}
            yield self._named(trees, 0)
        layers = params["layers"]
        if not self._stacked:
            first, end = (n * len(layers) // count for n in (number, number + 1))
            own = [None] * len(layers)
            own[first:end] = merged(self._adapted, tuple(map(_whole, layers[first:end])))
            yield self._named({"params": {"layers": tuple(own)}}, first)
            return
        leaves, tree = jax.tree.flatten(layers)
        for shards in zip(*(leaf.addressable_shards for leaf in leaves), strict=True):
            if shards[0].replica_id == 0:
                arrays = [np.asarray(shard.data) for shard in shards]
                own = merged(self._adapted, jax.tree.unflatten(tree, arrays))
                yield self._named({"params": {"layers": own}}, shards[0].index[0].start or 0)

    def _named(self, trees: PyTree, first: int) -> dict[str, np.ndarray]:
        return hugging_face.tensors_of(self._shape, trees, first_layer=first)


def _whole(tree: PyTree) -> PyTree:
    """Brings replicated arrays to the host."""
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), tree)


def _are_finite(tree: PyTree) -> jax.Array:
    """Whether all floating-point numbers of a tree are finite."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]))
