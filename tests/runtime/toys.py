"""The small models of these tests by name, their pipelines, and what those are compared with."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import adapted
import chex
import jax
import jax.numpy as jnp
import mixture
import numpy as np
import optax
import places
import split_toy
import toy
import uneven

import jaxpipe
from jaxpipe.runtime.assembly import Assembly
from jaxpipe.testing import assert_matches_unpipelined

LAYOUTS = ("tied", "unrolled", "uneven")
"""Toys whose layers lie in stacks, in an array each, and in a tuple."""
STAGES, ON_DATA = {"stage": 2}, {"stage": 2, "data": 2}
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
    if kind in ("tied", "unrolled", "untied", "ends"):
        tied = kind in ("tied", "unrolled")
        options = {"weights": "unrolled"} if kind == "unrolled" else {}
        whole = toy.model(tied=tied, axis=None)
        model = whole if kind == "ends" else toy.model(tied=tied, axis="stage")
        params, batch = toy.params(tied=tied, num_layers=num_layers), toy.batch
    elif kind in ("uneven", "stateful"):
        model = whole = uneven.model(stateful=kind == "stateful")
        params, batch = uneven.params(), uneven.batch
        options = {"states": uneven.states()} if kind == "stateful" else {}
    elif kind == "places":
        model = whole = places.model(num_layers)
        params, batch, options = places.params(num_layers), places.batch, {"weights": "unrolled"}
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


def mesh(name: str, sizes: dict[str, int]) -> jax.sharding.Mesh:
    """A mesh of these sizes; two devices share a toy that is split."""
    return jaxpipe.make_mesh(**({"tensor": 2} if name.startswith("split") else {}) | sizes)


def pipeline(
    name: str, schedule="1f1b", sizes: dict[str, int] = STAGES, *, num_layers: int = 9, **options
) -> jaxpipe.Pipeline:
    """A pipeline of a toy on a mesh of these sizes."""
    toy = named(name, num_layers)
    given = {"schedule": schedule, "mesh": mesh(name, sizes), "poison": True}
    return jaxpipe.Pipeline(toy.model, toy.params, **given | toy.options | options)


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
    toy = named(name, num_layers)
    (pipe,) = assert_matches_unpipelined(
        toy.model,
        toy.params,
        toy.batch(2 * sizes.get("data", 1) * microbatches),
        schedules=[schedule],
        meshes=[mesh(name, sizes)],
        rng=jax.random.key(7) if keyed else None,
        reference=toy.reference,
        microbatches=microbatches,
        **toy.options | options,
    )
    return pipe


def assert_close(got, expected):
    """An element may be off by what rounds off the largest one of its array."""
    chex.assert_trees_all_equal_structs(got, expected)
    chex.assert_trees_all_equal_dtypes(got, expected)
    for (path, value), want in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        scale = np.abs(want).max(initial=1e-30)
        np.testing.assert_allclose(
            value, want, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path)
        )


def compute_together(monkeypatch) -> None:
    """Has all stages compute embedding and head together, as if stages split their parameters."""
    monkeypatch.setattr(Assembly, "_together", True)


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
