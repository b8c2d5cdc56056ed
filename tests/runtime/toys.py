"""The small models of these tests by name, each with what it is compared with, and that comparison.

Their layers are stacked (or unrolled, as the weights are placed) or in a tuple.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import adapted
import jax
import jax.numpy as jnp
import mixture
import numpy as np
import optax
import split_toy
import toy
import uneven

import jaxpipe
from jaxpipe.runtime.tables import Tables
from jaxpipe.testing import assert_matches_unpipelined

LAYOUTS = ("stacked", "unrolled", "tuple")
NAMES = (
    *("tied", "untied", "ends", "uneven", "stateful", "adapted", "adapted tuple"),
    *("mixture", "mixture mean", "mixture tuple", "mixture stateful"),
    *("split", "split tuple", "split ends"),
)


class Toy(NamedTuple):
    """A model as a pipeline takes it, its whole form as a loss, and further arguments."""

    model: jaxpipe.Model
    reference: Callable[..., Any]
    params: dict
    batch: Callable[[int], dict]
    options: dict


@functools.cache
def named(name: str, num_layers: int = 9) -> Toy:
    """A toy; many tests share its reference and so one compiled program."""
    kind, *rest = name.split()
    differ, options = rest[:1] in (["tuple"], ["stateful"]) or kind in ("uneven", "stateful"), {}
    if kind in ("tied", "untied", "ends"):
        tied = kind == "tied"
        whole = toy.model(tied=tied, axis=None)
        model = whole if kind == "ends" else toy.model(tied=tied, axis="stage")
        params, batch = toy.params(tied=tied, num_layers=num_layers), toy.batch
    elif kind in ("uneven", "stateful"):
        model = whole = uneven.model(stateful=kind == "stateful")
        params, batch = uneven.params(), uneven.batch
        options = {"states": uneven.states()} if kind == "stateful" else {}
    elif kind == "adapted":
        model = whole = adapted.model(differ=differ)
        params, batch = adapted.params(differ=differ), adapted.batch
        options = {"trainable": adapted.TRAINABLE}
    elif kind == "mixture":
        head = mixture.mean_loss if rest == ["mean"] else mixture.head_loss
        model = whole = mixture.model(head, differ=differ, stateful=rest == ["stateful"])
        params, batch = mixture.params(differ=differ), mixture.batch
        options = {"states": mixture.states()} if rest == ["stateful"] else {}
    else:
        model = split_toy.model(split=True, differ=4 * differ, ends=rest == ["ends"])
        whole = split_toy.model(split=False, differ=4 * differ)
        params, batch = split_toy.params(4, differ=differ), split_toy.batch
        if rest == ["ends"]:  # devices share whole rows, of padding too
            for part in (params["embed"], params["head"]):
                part["table"] = np.pad(part["table"], ((0, 1), (0, 0)))
    return Toy(model, functools.partial(jaxpipe.unpipelined.loss, whole), params, batch, options)


def check(
    name: str,
    schedule: str,
    sizes: dict[str, int],
    *,
    microbatches: int = 4,
    keyed: bool = False,
    num_layers: int = 9,
    **options,
) -> jaxpipe.Pipeline:
    """Compares a pipeline on a mesh of these sizes with the whole model; returns it.

    With a key, layers drop out.
    """
    model, reference, params, batch, given = named(name, num_layers)
    if name.startswith("split"):
        sizes = sizes | {"tensor": 2}
    (pipe,) = assert_matches_unpipelined(
        model,
        params,
        batch(2 * sizes.get("data", 1) * microbatches),
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(**sizes)],
        microbatches=microbatches,
        rng=jax.random.key(7) if keyed else None,
        reference=reference,
        **given,
        **options,
    )
    return pipe


def params(layout: str) -> dict:
    return named("uneven" if layout == "tuple" else "tied", 5).params


def batch(layout: str) -> dict:
    return named("uneven" if layout == "tuple" else "tied", 5).batch(16)


def pipeline(schedule: str, layout: str, zero: int, **options) -> jaxpipe.Pipeline:
    """A pipeline of the uneven toy or the tied one, by how the layers lie."""
    weights = "unrolled" if layout == "unrolled" else "stacked"
    given = {"schedule": schedule, "zero": zero, "weights": weights, "poison": True, **options}
    model = named("uneven" if layout == "tuple" else "tied", 5).model
    return jaxpipe.Pipeline(model, params(layout), **given)


def compute_together(monkeypatch) -> None:
    """Has all stages compute embedding and head together, as if stages split their parameters."""
    of = Tables.of
    together = {"together": True}
    monkeypatch.setattr(Tables, "of", lambda *args, **given: of(*args, **(given | together)))


def updated(pipe: jaxpipe.Pipeline, optimizer, params: dict, gradients: dict) -> dict:
    """Canonical parameters after two updates with these gradients; no step is compiled.

    At ZeRO levels 0 and 3, where gradients lie as parameters do.
    """
    placed, placed_gradients = pipe.place(params), pipe.place(gradients)
    state = pipe.init(optimizer, placed)
    for _ in range(2):
        placed, state = pipe.update(optimizer, placed_gradients, state, placed)
    return pipe.unplace(placed)


def expected_update(optimizer, params: dict, gradients: dict) -> dict:
    """The same by optax alone, on one tree for each of the stacked layers."""
    count = len(jax.tree.leaves(params["layers"])[0])

    def apart(tree: dict) -> dict:
        layers = [jax.tree.map(lambda w, n=n: w[n], tree["layers"]) for n in range(count)]
        return tree | {"layers": layers}

    @jax.jit
    def run(params: dict, gradients: dict) -> dict:
        new, given = apart(params), apart(gradients)
        state = optimizer.init(new)
        for _ in range(2):
            updates, state = optimizer.update(given, state, new)
            new = optax.apply_updates(new, updates)
        return new | {"layers": jax.tree.map(lambda *w: jnp.stack(w), *new["layers"])}

    return run(params, gradients)


def reader(params: dict) -> Callable[..., Any]:
    """Reads a part of canonical parameters, or a layer of them."""

    def read(name: str, n: int | None = None) -> Any:
        part = params[name]
        if n is None:
            return part
        return part[n] if isinstance(part, tuple) else jax.tree.map(lambda w: w[n], part)

    return read
