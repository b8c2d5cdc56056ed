"""What a pipeline refuses before anything is compiled: arguments and trees that do not fit it.

Every function returns or yields one `Problem` or text per problem, so that callers can report all
of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.layers.split import unknown_remat
from jaxpipe.runtime.layout.whole_model import LAYOUTS
from jaxpipe.runtime.mesh import DATA, STAGE
from jaxpipe.runtime.trees import describe, describe_leaf, mismatches, shape_of, shapes_of
from jaxpipe.runtime.types import Params, Shapes, States, Tree
from jaxpipe.schedule.actions import Kind, Schedule
from jaxpipe.schedule.check.validate import simulated_only
from jaxpipe.schedule.problems import Problem


def num_layers(layers: Params) -> int:
    """How many layers canonical ``params["layers"]`` hold."""
    return len(layers) if isinstance(layers, tuple) else jax.tree.leaves(layers)[0].shape[0]


# What a pipeline is built from.


def arguments(
    model: Model,
    params: Params,
    states: States,
    schedule: Schedule,
    mesh: Mesh,
    remat: str,
    zero: int,
    weights: str,
    weight_slots: int,
    layer_counts: Sequence[int] | None,
) -> Iterator[Problem | str]:
    """Everything that does not fit among the arguments of `Pipeline`."""
    if set(mesh.axis_names) != {DATA, STAGE}:
        yield (
            f"mesh has axes {mesh.axis_names}; it must have {DATA!r} and {STAGE!r} "
            "(jaxpipe.make_mesh)."
        )
    elif mesh.shape[STAGE] != schedule.num_stages:
        rule = f"it was built for {schedule.num_stages} stages"
        nearest = {STAGE: schedule.num_stages}
        yield Problem("mesh", dict(mesh.shape), rule, nearest, schedule=schedule.name)
    yield from simulated_only(schedule)
    if schedule.minibatches is not None:
        rule = (
            "updates weights as it runs: AsyncPipeline executes it, made from a Pipeline of one "
            "step"
        )
        yield Problem("schedule", schedule.name, rule, ("1f1b",))
    yield from unknown_remat(remat)
    if zero not in (0, 1, 2, 3):
        yield Problem("zero", zero, "is not a level", (min(max(zero, 0), 3),))
    if weights not in LAYOUTS:
        rule = f"is no layout; choose one of {', '.join(LAYOUTS)}"
        yield Problem("weights", weights, rule)
    if weight_slots < 1:
        yield Problem("weight_slots", weight_slots, "holds no chunk", (1,))
    malformed = list(_parameters(model, params, weights))
    if model.stateful != (states is not None):
        yield (
            f"Model.stateful={model.stateful}, but Pipeline was given "
            f"{'no states' if states is None else 'states'}: a stateful model needs the initial "
            "states of its layers, another takes none."
        )
    elif model.stateful:
        yield from _order(schedule)
    if states is not None:
        malformed += _states(states)
    yield from malformed or _counts(params, states, schedule, layer_counts)


def _parameters(model: Model, params: Params, weights: str) -> Iterator[Problem | str]:
    """What is wrong with the parameters a pipeline is built from."""
    parts = ("embed", "layers", "head")
    if not isinstance(params, dict) or set(params) != set(parts):
        found = f"a {type(params).__name__}"
        if isinstance(params, dict):
            found = f"the keys {list(params)}"
        yield f'params must be {{"embed": ..., "layers": ..., "head": ...}}; found {found}.'
        return
    if others := list(_not_arrays("params", params)):
        yield from others
    elif isinstance(params["layers"], tuple) or isinstance(model.layer, tuple):
        yield from _tuples(model, params["layers"], weights)
    else:
        yield from _stacked("params['layers']", params["layers"])


def _not_arrays(name: str, tree: Tree) -> Iterator[str]:
    for path, leaf in jax.tree.leaves_with_path(tree):
        if shape_of(leaf) is None:
            yield f"{name}{jax.tree_util.keystr(path)} is {describe_leaf(leaf)}."


def _stacked(name: str, layers: Params) -> Iterator[str]:
    """What is wrong with what layers that are alike have."""
    leaves = jax.tree.leaves_with_path(shapes_of(layers))
    leading = {leaf.shape[:1] for _, leaf in leaves}
    if len(leading) != 1 or () in leading:
        found = [f"{name}{jax.tree_util.keystr(path)} is {describe(leaf)}" for path, leaf in leaves]
        yield (
            f"{name} must stack every layer on the leading dimension; found "
            f"{', '.join(found) or 'no array'}."
        )


def _tuples(model: Model, layers: Params, weights: str) -> Iterator[Problem | str]:
    """What is wrong with the layers of a model whose layers differ."""
    if weights == "unrolled":
        rule = (
            "needs layers that are alike, and these are a tuple: layers that differ share flat "
            "arrays"
        )
        yield Problem("weights", weights, rule, {"weights": "stacked"})
    if not (isinstance(layers, tuple) and isinstance(model.layer, tuple)):
        one, other = ("params['layers']", "Model.layer")
        if isinstance(model.layer, tuple):
            one, other = other, one
        yield (
            f"{one} is a tuple and {other} is not: layers that differ have a function and a tree "
            "of parameters each, layers that are alike one function and stacked parameters."
        )
    elif len(layers) != len(model.layer):
        yield (
            f"Model.layer has {len(model.layer)} functions and params['layers'] {len(layers)} "
            "trees; each layer needs one of both."
        )


def _order(schedule: Schedule) -> Iterator[str]:
    """A stateful layer must see the microbatches in their order."""
    latest: dict[int, int] = {}
    for order in schedule.orders:
        for action in order:
            if action.kind is not Kind.F:
                continue
            if action.microbatch < latest.get(action.virtual_stage, -1):
                yield (
                    f"Schedule {schedule.name!r} runs {action} after a later microbatch; the "
                    "states of a stateful model are renewed in microbatch order."
                )
                return
            latest[action.virtual_stage] = action.microbatch


def _states(states: States) -> list[str]:
    """What is wrong with the states a pipeline is built from."""
    problems = list(_not_arrays("states", states))
    if problems or isinstance(states, tuple):
        return problems
    return list(_stacked("states", states))


def _counts(
    params: Params, states: States, schedule: Schedule, layer_counts: Sequence[int] | None
) -> Iterator[Problem | str]:
    """What disagrees about the number of layers."""
    depth = num_layers(params["layers"])
    if states is not None and num_layers(states) != depth:
        yield f"states holds {num_layers(states)} layers and params['layers'] {depth}."
    if layer_counts is None:
        return
    virtual_stages = schedule.placement.num_virtual_stages
    if len(layer_counts) != virtual_stages or sum(layer_counts) != depth or min(layer_counts) < 0:
        rule = (
            f"must be {virtual_stages} numbers, one per virtual stage of schedule "
            f"{schedule.name!r}, that add up to the {depth} layers of params['layers']"
        )
        yield Problem("layer_counts", tuple(layer_counts), rule)


# What a pipeline is called with.


def canonical(
    name: str, tree: Tree, expected: Shapes, placed: Shapes, *, dtypes: bool = True
) -> list[str]:
    """What is wrong with canonical parameters or states.

    Args:
      name: the argument's name.
      tree: what was given.
      expected: shapes of what fits.
      placed: shapes of the same when placed.
      dtypes: whether dtypes must agree, too.
    """
    lines = mismatches(name, tree, expected, dtypes=dtypes)
    if not lines:
        return []
    if not mismatches(name, tree, placed, dtypes=False):
        return [f"{name} is placed already."]
    if not mismatches(name, tree, expected, dtypes=False):
        return [*lines, f"Cast {name} to these dtypes."]
    return [*_other_layers(name, tree, expected), *lines]


def placed(
    name: str,
    tree: Tree,
    expected: Shapes,
    canonical: Shapes,
    *,
    method: str,
    dtypes: bool = True,
) -> list[str]:
    """What is wrong with placed parameters or states; ``method`` places them, and the other
    arguments are those of `canonical`.
    """
    lines = mismatches(name, tree, expected, dtypes=dtypes)
    if not lines:
        return []
    if not mismatches(name, tree, canonical, dtypes=False):
        return [f"{name} is in canonical order, not placed; call `{method}` first."]
    return [*lines, f"{name} must be as `{method}` returns it."]


def optimizer_state(name: str, tree: Tree, expected: Shapes) -> list[str]:
    """What is wrong with an optimizer's state; its dtypes may be any."""
    lines = mismatches(name, tree, expected, dtypes=False)
    return [*lines, f"{name} must be as `pipe.init` returns it."] if lines else []


def _other_layers(name: str, tree: Tree, expected: Shapes) -> Iterator[str]:
    """Says it if layers are given in the other form, or too many or too few of them."""
    if not isinstance(tree, dict) or "layers" not in tree:
        return
    at, layers, depth = f"{name}['layers']", tree["layers"], num_layers(expected["layers"])
    if isinstance(layers, tuple) != isinstance(expected["layers"], tuple):
        forms = "a tuple of one tree per layer", "one tree whose arrays stack all layers"
        found, wanted = forms if isinstance(layers, tuple) else forms[::-1]
        yield f"{at} is {found}; expected {wanted}."
    elif isinstance(layers, tuple):
        if len(layers) != depth:
            yield f"{at} holds {len(layers)} layers; expected {depth}."
    else:
        leading = {leaf.shape[:1] for leaf in jax.tree.leaves(shapes_of(layers))}
        if len(leading) == 1 and leading.isdisjoint({(), (depth,)}):
            yield f"{at} holds {leading.pop()[0]} layers; expected {depth}."


def batch(tree: Tree, *, num_microbatches: int, num_shards: int) -> Iterator[str]:
    """What is wrong with a batch."""
    unit = f"{num_microbatches} microbatches x {num_shards} data shards"
    rows: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        at, shape = f"batch{jax.tree_util.keystr(path)}", shape_of(leaf)
        if shape is None or not shape.shape:
            yield f"{at} is {describe_leaf(leaf)}; expected an array whose first dimension is rows."
        else:
            rows[at] = shape.shape[0]
    if not jax.tree.leaves(tree):
        yield f"batch holds no array; expected arrays whose rows divide into {unit}."
    if len(set(rows.values())) > 1:
        found = ", ".join(f"{at} has {n}" for at, n in rows.items())
        yield f"The arrays of a batch must have equally many rows, but {found}."
        return
    step = num_microbatches * num_shards
    for at, n in list(rows.items())[:1]:  # the others have as many
        if n == 0 or n % step:
            below, above = n // step * step, max(-(-n // step), 1) * step
            valid = ", ".join(str(n) for n in (below, above) if n)
            yield f"{at} has {n} rows, which do not divide into {unit}.\nNearest valid: {valid}."
