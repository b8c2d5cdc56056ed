"""Adapters and frozen parameters of a run: the rules of ``lora`` and ``train.trainable``."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import gpt, hugging_face
from models.adapters import BLOCK, THEIRS, Adapters, beside
from models.gpt_config import GPTConfig
from models.types import PyTree
from train import pipeline_section, tasks
from train.config import Config, LoraConfig
from train.errors import Failure

_SHAPE = ("rank", "alpha", "targets", "base")
"""Fields of ``lora`` that decide what the weights of a run mean."""


def failures(config: Config) -> Iterator[Failure]:
    """Says which parameters cannot be trained alone, and what needs all to be trained."""
    lora, own = config.lora, LoraConfig()
    if not lora.rank:
        for name in ("alpha", "targets", "dropout", "init_from", "base"):
            if getattr(lora, name) != getattr(own, name):
                yield config.failure(
                    f"$lora.{name} has no effect with $lora.rank. Nearest valid: lora.rank=8."
                )
    elif not tasks.find(config.task).adapts:
        yield config.failure(
            "$lora.rank: layers of $task have no adapters; those of task=gpt do. Nearest valid: "
            "lora.rank=0."
        )
        return
    else:
        yield from _targets(config)
        yield from _base(config)
    if pipeline_section.trainable(config) is not None:
        yield from _patterns(config)
        yield from _unfit(config, "lora.rank" if lora.rank else "train.trainable")


def _targets(config: Config) -> Iterator[Failure]:
    """Finds patterns of ``lora.targets`` that name no linear map."""
    shape = tasks.make(config).shape
    names = gpt.linear_map_names(shape)
    theirs = [name for own in names for name in THEIRS.get(own.rpartition("/")[2], ())]
    shown = ", ".join(names)
    if shape.num_experts is not None:
        shown += "; experts and routers have no adapters"
    if not config.lora.targets:
        yield Failure(f"lora.targets=[] adapts nothing. Nearest valid: {shown}.", ("lora.targets",))
    for target in config.lora.targets:
        if not any(Adapters(1, 1.0, (target,)).adapts(name) for name in names):
            near = difflib.get_close_matches(target, dict.fromkeys([*names, *theirs]), n=2)
            nearest = f" Nearest valid: {' or '.join(near)}." if near else ""
            yield Failure(
                f"lora.targets={target!r} is not a linear map of a layer.{nearest} Linear maps: "
                f"{shown}.",
                ("lora.targets",),
            )


def _base(config: Config) -> Iterator[Failure]:
    """Finds what rounded kernels and dropout of adapters do not go with."""
    lora = config.lora
    if lora.base != "float32" and config.pipeline.fp8:
        yield config.failure(
            f"$lora.base keeps kernels in {'8' if lora.base == 'int8' else '4'} bits already, and "
            "$pipeline.fp8 would round them again. Nearest valid: pipeline.fp8=null."
        )
    shape = dataclasses.replace(tasks.make(config).shape, adapters=None)
    if lora.base == "nf4":
        layers = jax.eval_shape(lambda: gpt.init(shape, jax.random.key(0)))["layers"]
        inputs = {
            key[-2].key: leaf.shape[-2]
            for key, leaf in jax.tree_util.tree_leaves_with_path(layers)
            if key[-1].key == "kernel"
        }
        odd = [f"{name} has {count}" for name, count in inputs.items() if count % 2]
        if odd:
            yield config.failure(
                f"$lora.base keeps two inputs of a linear map in a byte, and {', '.join(odd)} "
                "inputs. Nearest valid: int8."
            )
        blocks = {name: inputs[name] // math.gcd(inputs[name], BLOCK)
                  for name in ("out", "down") if name in inputs}  # fmt: skip
        uneven = [f"{n} of {name}" for name, n in blocks.items() if n % config.mesh.tensor]
        if uneven and not odd:
            yield config.failure(
                f"$mesh.tensor does not divide the blocks of up to {BLOCK} inputs that $lora.base "
                f"keeps a scale for ({', '.join(uneven)}). Nearest valid: lora.base=int8, or "
                "mesh.tensor=1."
            )
    for axis in ("tensor", "context"):
        if lora.dropout and getattr(config.mesh, axis) > 1:
            yield config.failure(
                f"$lora.dropout cannot be combined with $mesh.{axis}, whose devices have parts of "
                f"what an adapter reads. Nearest valid: lora.dropout=0, or mesh.{axis}=1."
            )


def _patterns(config: Config) -> Iterator[Failure]:
    """Finds patterns of ``train.trainable`` that name nothing, or numbers that are no floats."""
    path, given = "train.trainable", config.train.trainable
    if given is None:
        return
    init = tasks.make(config).init
    # A key outside of the trace would be an array, and devices could not be simulated any more.
    leaves = _by_path(jax.eval_shape(lambda: init(jax.random.key(0))))
    if not given and not config.lora.rank:
        yield Failure(f"{path}=[] trains nothing. Nearest valid: null, for all.", (path,))
    for pattern in given:
        chosen = fnmatch.filter(leaves, pattern)
        if not chosen:
            near = difflib.get_close_matches(pattern, leaves, n=3, cutoff=0.0)
            yield Failure(
                f"{path}={pattern!r} is the path of no parameter. Nearest valid: "
                f"{' or '.join(near)}.",
                (path,),
            )
        whole = [n for n in chosen if not jnp.issubdtype(leaves[n].dtype, jnp.floating)]
        if whole:
            yield Failure(
                f"{path}={pattern!r} names {whole[0]}, which lora.base={config.lora.base} keeps in "
                "whole numbers. Nearest valid: lora.base=float32, or a pattern without it.",
                (path, "lora.base"),
            )


def _by_path(params: PyTree) -> dict[str, Any]:
    """Lists parameters by their paths, as `jaxpipe.Pipeline` matches them."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def num_trained(patterns: Sequence[str], params: PyTree) -> int:
    """Counts the parameters that patterns choose.

    Args:
      patterns: from `train.pipeline_section.trainable`.
      params: canonical parameters, or their shapes.
    """
    leaves = _by_path(params)
    chosen = {name for pattern in patterns for name in fnmatch.filter(leaves, pattern)}
    return sum(leaves[name].size for name in chosen)


def _unfit(config: Config, path: str) -> Iterator[Failure]:
    """Finds settings that need all parameters to be trained."""
    never_drains = pipeline_section.is_asynchronous(config)
    clips = getattr(config.model, "qk_clip", None) is not None
    for other, is_set, why, valid in (
        ("pipeline.schedule", never_drains, "keeps versions of all", "1f1b"),
        ("optimizer.ema_decay", config.optimizer.ema_decay, "averages all", 0),
        ("model.qk_clip", clips, "scales weights of queries and keys", "null"),
    ):
        if is_set:
            yield config.failure(
                f"${path} freezes parameters, and ${other} {why}. Nearest valid: {other}={valid}."
            )


def others(before: Config, config: Config, of: str) -> Iterator[Failure]:
    """Says which fields of ``lora`` the weights of another run do not have.

    Args:
      before: configuration of the run that has the weights.
      of: the run, or its checkpoint, in words.
    """
    for name in _SHAPE:
        then, now = getattr(before.lora, name), getattr(config.lora, name)
        if then != now:
            yield Failure(
                f"lora.{name}={now} is not that of {of}. Nearest valid: {then}; or write its model "
                "with python -m train.export, and begin with that folder.",
                (f"lora.{name}",),
            )


def other_targets(config: Config, shape: GPTConfig) -> Iterator[Failure]:
    """Says how the adapters of ``lora.init_from`` differ from those of the run's shape."""
    folder, own = config.lora.init_from, shape.adapters
    assert folder is not None
    assert own is not None
    plain = dataclasses.replace(shape, adapters=None)
    try:
        found = hugging_face.load_adapters(folder, plain).config.adapters
    except ValueError as error:
        yield Failure(f"lora.init_from={folder}: {error}", ("lora.init_from",))
        return
    assert found is not None
    names = gpt.linear_map_names(shape)
    theirs, ours = ([name for name in names if of.adapts(name)] for of in (found, own))
    for name, then, now, differs in (
        ("rank", found.rank, own.rank, found.rank != own.rank),
        ("alpha", found.alpha, own.alpha, not math.isclose(found.alpha, own.alpha)),
        ("targets", theirs, ours, theirs != ours),
    ):
        if differs:
            yield Failure(
                f"lora.{name}={now} is not that of the adapters of lora.init_from={folder}. "
                f"Nearest valid: {then}.",
                (f"lora.{name}", "lora.init_from"),
            )


def reader(config: Config, shape: Any, read: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Lets ``read``, as `jaxpipe.load_params` takes it, also return adapters of a GPT's layers.

    Args:
      config: the run; its seed draws adapters that no folder has. Those of a layer do not depend
        on who reads it.
      read: reads the parameters without adapters.
    """
    if not isinstance(shape, GPTConfig) or shape.adapters is None:
        return read
    given: dict[str, np.ndarray] = {}
    if (folder := config.lora.init_from) is not None:
        plain = dataclasses.replace(shape, adapters=None)
        given = hugging_face.load_adapters(folder, plain).leaves
    alike, key = shape.layers_are_alike, jax.random.key(config.train.seed)

    def with_adapters(part: str, *number: int) -> PyTree:
        found = read(part, *number)
        if part != "layers":
            return found
        (n,) = number
        layer = gpt.with_adapters(shape, n, found, jax.random.fold_in(key, n))
        start = "layers/" if alike else f"layers/{n}/"
        own = {path.removeprefix(start): leaf[n] if alike else leaf
               for path, leaf in given.items() if path.startswith(start)}  # fmt: skip
        return beside(layer, own)

    return with_adapters
