"""Checks before anything is compiled: arguments and trees that do not fit a pipeline.

Every function returns or yields one `Problem` or text per problem, so that callers can report all
of them at once.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxpipe.runtime import filters
from jaxpipe.runtime.float8 import E4M3
from jaxpipe.runtime.layers.model import Model, misfits
from jaxpipe.runtime.layout import splits
from jaxpipe.runtime.layout.whole_model import SHARED
from jaxpipe.runtime.mesh import Axes
from jaxpipe.runtime.options import Options, is_number, is_wider
from jaxpipe.runtime.trees import (
    describe,
    describe_leaf,
    is_sequence,
    num_layers,
    shape_of,
    shapes_of,
)
from jaxpipe.runtime.types import Key, Params, Shapes, States, Tree
from jaxpipe.schedule.actions import GUESTS, Kind, Schedule
from jaxpipe.schedule.problems import Problem, counted

# What a pipeline is built from.


def arguments(
    model: Model,
    params: Params,
    schedule: Schedule | None,
    *,
    mesh: Mesh,
    axes: Axes,
    states: States,
    options: Options,
) -> Iterator[Problem | str]:
    """Yields everything that does not fit among the arguments of `Pipeline`.

    ``schedule`` is None if none could be built from its name, for reasons that are known.
    """
    # Later checks rely on what earlier ones vouch for: precision on well-formed parameters, splits
    # also on a mesh, the numbers of layers on all. What is malformed keeps them from running.
    malformed_mesh = list(axes.problems(mesh))
    yield from malformed_mesh
    if schedule is not None:
        yield from _schedule(schedule, mesh, None if malformed_mesh else axes)
    yield from options.problems(mesh)
    if not isinstance(model, Model):
        yield f"model is a {type(model).__name__}; it must be a jaxpipe.Model."
        return
    yield from misfits(model)
    yield from _pairs(schedule, options)
    yield from _moved(model, options)
    yield from _slices(model, schedule)
    malformed = list(_parameters(model, params, options))
    if not malformed:
        malformed += _precision(params, options)
    if not malformed and not malformed_mesh:
        malformed += splits.problems(model, params, mesh, axes)
    if model.stateful != (states is not None):
        yield (
            f"Model.stateful={model.stateful}, but Pipeline was given "
            f"{'no states' if states is None else 'states'}: a stateful model needs the initial "
            "states of its layers, and no other model takes states."
        )
    elif model.stateful and schedule is not None:
        yield from _microbatch_order(schedule)
    if states is not None:
        malformed += _states(states)
    malformed = malformed or list(_layer_numbers(params, states, schedule, options.layer_counts))
    if not (malformed or malformed_mesh or schedule is None):
        malformed += _places(model, params, schedule, options)
    yield from malformed


def _places(
    model: Model, params: Params, schedule: Schedule, options: Options
) -> Iterator[Problem]:
    """Yields options that need arrays for every layer, where these cannot have them."""
    if model.layers_are_alike or not (names := options.of_places):
        return
    misread = options.misread(params, schedule)
    for name in names:
        value = getattr(options, name)
        if misread is not None:
            rule = (
                "needs one dtype for each array that layers at the same place of their chunks "
                "share, and layers {} and {} read one in different dtypes"
            )
            nearest = {"weights": "stacked"} if name == "weights" else (None,)
            yield Problem(name, value, rule.format(*misread), nearest)
        elif options.weights == "stacked":
            rule = "cannot be combined with $weights if layers differ"
            others = {"weights": "stacked"}
            yield Problem(name, value, rule, {"weights": "unrolled"}, others)


def _schedule(schedule: Schedule, mesh: Mesh, axes: Axes | None) -> Iterator[Problem]:
    """Yields why a schedule cannot run on a mesh; ``axes`` is None if the mesh has none such."""
    if axes is not None and axes.num_stages(mesh) != schedule.num_stages:
        rule = f"the schedule was built for {schedule.num_stages} stages"
        nearest = {axes.stage: schedule.num_stages}
        yield Problem("mesh", dict(mesh.shape), rule, nearest, schedule=schedule.name)
    if schedule.name in GUESTS:
        rule = "is asynchronous: run it with AsyncPipeline, made from a synchronous Pipeline"
        yield Problem("schedule", schedule.name, rule, ("1f1b",))


def _pairs(schedule: Schedule | None, options: Options) -> Iterator[Problem]:
    if not options.pair_layers:
        return
    if schedule is not None and not schedule.overlapped:
        rule = f"has no effect: schedule {schedule.name!r} overlaps no forward with a backward"
        note = "It overlaps them where there are more microbatches than stages."
        nearest = {"schedule": "dualpipe-v-published"}
        yield Problem("pair_layers", True, rule, nearest, note=note)


def _moved(model: Model, options: Options) -> Iterator[Problem]:
    if isinstance(options.residuals, str):
        return
    near = ("device", "host")
    if not model.layers_are_alike:
        rule = "needs layers that are alike, and Model.layer is a tuple"
        yield Problem("residuals", options.residuals, rule, near)
    if options.pair_layers:
        rule = "moves them while single layers run; it cannot be combined with $pair_layers"
        yield Problem("residuals", options.residuals, rule, near, {"pair_layers": True})


def _slices(model: Model, schedule: Schedule | None) -> Iterator[str]:
    """Says why a model cannot run sequences slice by slice."""
    if schedule is None or schedule.num_slices == 1:
        return
    cut = f"Schedule {schedule.name!r} cuts sequences into {schedule.num_slices} slices"
    if model.stateful:
        yield f"{cut}, and Model.stateful=True: layers may have a carry or a state, not both."
    elif model.carry is None:
        yield (
            f"{cut}, and Model.carry is None: say what a layer hands from slice to slice; "
            "`carry=lambda x, microbatch, num_slices: ()` if it does not mix tokens."
        )
    elif isinstance(model.carry, tuple) and (
        model.layers_are_alike or len(model.carry) != len(model.layer)
    ):
        yield "Model.carry is a tuple: Model.layer must be a tuple of the same length."


_PARTS = ("embed", "layers", "head")


def _parameters(model: Model, params: Params, options: Options) -> Iterator[Problem | str]:
    if not isinstance(params, dict) or set(params) - {SHARED} != set(_PARTS):
        found = f"a {type(params).__name__}."
        if isinstance(params, dict):
            found = " ".join([f"the keys {list(params)}.", *_wrong_keys(params)])
        yield f'params must be {{"embed": ..., "layers": ..., "head": ...}}; found {found}'
        return
    if others := [*not_arrays("params", params), *filters.untrainable(options.trainable, params)]:
        yield from others
    elif is_sequence(params["layers"]) or not model.layers_are_alike:
        yield from _separate(model, params["layers"])
    else:
        yield from _stacked("params['layers']", params["layers"])


def _wrong_keys(params: Params) -> Iterator[str]:
    """Says which parts are missing, and what is none."""
    for part in _PARTS:
        if part not in params:
            empty = "" if part == "layers" else "; without parameters it is {}"
            yield f"params[{part!r}] is missing{empty}."
    for key in [key for key in params if key not in (*_PARTS, SHARED)]:
        yield (
            f"params[{key!r}] belongs to no function of the model: put it under 'embed' or 'head', "
            "which both `Model.embed` and `Model.head_loss` see, or under 'shared', which all "
            "layers see."
        )


def not_arrays(name: str, tree: Tree) -> Iterator[str]:
    for path, leaf in jax.tree.leaves_with_path(tree):
        if shape_of(leaf) is None:
            yield f"{name}{jax.tree_util.keystr(path)} is {describe_leaf(leaf)}."


def _stacked(name: str, layers: Tree) -> Iterator[str]:
    """Yields problems of the arrays of layers that are alike."""
    leaves = jax.tree.leaves_with_path(shapes_of(layers))
    leading = {leaf.shape[:1] for _, leaf in leaves}
    if len(leading) != 1 or () in leading:
        found = [f"{name}{jax.tree_util.keystr(path)} is {describe(leaf)}" for path, leaf in leaves]
        yield (
            f"{name} must stack every layer on the leading dimension; found "
            f"{', '.join(found) or 'no array'}."
        )


def _separate(model: Model, layers: Params) -> Iterator[str]:
    """Yields problems of layers that have a tree each."""
    if model.layers_are_alike:
        yield (
            f"params['layers'] is a {type(layers).__name__} and Model.layer is not: {_FORMS} Stack "
            "them with `jax.tree.map(lambda *w: jnp.stack(w), *layers)`, or give Model.layer "
            f"{len(layers)} functions."
        )
    elif not is_sequence(layers):
        yield f"Model.layer is a tuple and params['layers'] is not: {_FORMS}"
    elif len(layers) != len(model.layer):
        yield (
            f"Model.layer has {len(model.layer)} functions and params['layers'] {len(layers)} "
            "trees; each layer needs one of both."
        )


_FORMS = (
    "layers that differ have a function and a tree of parameters each; layers that are alike share "
    "one function and have stacked parameters."
)


def _precision(params: Params, options: Options) -> Iterator[Problem | str]:
    """Yields what is wrong with the dtypes in which layers are to compute."""
    layers = {"layers": shapes_of(params["layers"])}
    excepted = options.full_precision
    if options.compute_dtype is not None:
        yield from _of_compute_dtype(options.compute_dtype, layers)
    elif options.fp8 == () and excepted != ():
        yield "full_precision needs compute_dtype or fp8: it exempts parameters from them."
        return
    unknown: list[str] = []
    for name, chosen in (("fp8", options.fp8), ("full_precision", excepted)):
        if chosen != ():
            unknown += filters.problems(name, chosen, layers)
    yield from unknown
    if options.fp8 != () and not unknown:
        yield from _of_fp8(options, layers)


def _of_compute_dtype(dtype: DTypeLike, layers: Shapes) -> Iterator[Problem]:
    examples = ("bfloat16", "float16")
    try:
        narrow = jnp.dtype(dtype)
    except TypeError:
        yield Problem("compute_dtype", dtype, "is not a dtype", examples)
        return
    if not jnp.issubdtype(narrow, jnp.floating):
        yield Problem("compute_dtype", str(narrow), "is not floating point", examples)
    elif narrow.itemsize == 1:
        rule = "needs scales: choose the weights to quantize by fp8"
        yield Problem("compute_dtype", str(narrow), rule, ({"fp8": "*kernel"},))
    elif not any(is_wider(leaf, narrow) for leaf in jax.tree.leaves(layers)):
        rule = "is not narrower than the layers' parameters and would have no effect"
        yield Problem("compute_dtype", str(narrow), rule, (None,))


def _of_fp8(options: Options, layers: Shapes) -> Iterator[Problem | str]:
    named = [(filters.name_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(layers)]
    quantized = [(name, leaf) for name, leaf in named if options.quantizes(name, leaf)]
    if not quantized:
        yield Problem("fp8", options.fp8, "chooses no weight", ((),))
    for name, leaf in quantized:
        if not is_wider(leaf, E4M3):
            yield f"fp8 chooses {name}, which is {describe(leaf)}; only wider floats are quantized."


def _microbatch_order(schedule: Schedule) -> Iterator[str]:
    """Says it if a stateful layer would not see the microbatches in their order."""
    latest: dict[int, int] = {}
    for order in schedule.orders:
        for action in order:
            if action.kind is not Kind.F:
                continue
            if action.microbatch < latest.get(action.virtual_stage, -1):
                yield (
                    f"Schedule {schedule.name!r} runs {action} after a later microbatch; the "
                    "states of a stateful model are updated in microbatch order."
                )
                return
            latest[action.virtual_stage] = action.microbatch


def _states(states: States) -> list[str]:
    problems = [*not_arrays("states", states), *filters.overwritten("states", states)]
    if problems or is_sequence(states):
        return problems
    return list(_stacked("states", states))


def _layer_numbers(
    params: Params, states: States, schedule: Schedule | None, layer_counts: Sequence[int] | None
) -> Iterator[Problem | str]:
    """Yields disagreements about the number of layers."""
    depth = num_layers(params["layers"])
    if states is not None and num_layers(states) != depth:
        yield f"states holds {num_layers(states)} layers and params['layers'] {depth}."
    if schedule is None:
        return
    virtual_stages = schedule.placement.num_virtual_stages
    if layer_counts is None:
        if depth < virtual_stages:
            yield (
                f"params['layers'] holds {counted(depth, 'layer')}, and schedule "
                f"{schedule.name!r} has {virtual_stages} virtual stages: each needs a layer. Use "
                "fewer stages or chunks, or give layer_counts with 0 for those that stay empty."
            )
        return
    if not (is_sequence(layer_counts) and all(map(is_number, layer_counts))):
        yield Problem("layer_counts", layer_counts, "is not a list or tuple of whole numbers")
    elif len(layer_counts) != virtual_stages or sum(layer_counts) != depth or min(layer_counts) < 0:
        rule = (
            f"must be {virtual_stages} numbers, one per virtual stage of schedule "
            f"{schedule.name!r}, that add up to the {depth} layers of params['layers']"
        )
        yield Problem("layer_counts", tuple(layer_counts), rule)


# What a pipeline is called with.


def key(rng: Key) -> Iterator[str]:
    """Says it if a step's random key is none."""
    if rng is None:
        return
    shape = shape_of(rng)
    if shape is not None and jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        fits = shape.shape == ()
    else:
        fits = shape is not None and shape.dtype == jnp.uint32 and len(shape.shape) == 1
    if not fits:
        yield f"rng is {describe_leaf(rng)}; it must be one random key, such as jax.random.key(0)."


def rows_of(tree: Tree) -> tuple[dict[str, int], list[str]]:
    """Counts the rows of a batch's arrays by their paths, and says what is wrong with them."""
    rows: dict[str, int] = {}
    problems: list[str] = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        at, shape = f"batch{jax.tree_util.keystr(path)}", shape_of(leaf)
        expected = "expected an array whose first dimension is rows"
        if shape is None:
            problems.append(f"{at} is {describe_leaf(leaf)}; {expected}.")
        elif not shape.shape:
            remedy = "Repeat it for every row, as `jnp.full(rows, value)` does."
            problems.append(f"{at} is {describe_leaf(leaf)}; {expected}. {remedy}")
        else:
            rows[at] = shape.shape[0]
    if len(set(rows.values())) > 1:
        found = ", ".join(f"{at} has {n}" for at, n in rows.items())
        problems.append(f"The arrays of a batch must have equally many rows, but {found}.")
    return rows, problems


def batch(tree: Tree, schedule: Schedule, num_shards: int) -> Iterator[str]:
    num_microbatches = schedule.num_microbatches
    unit = f"{num_microbatches} microbatches x {num_shards} data shards"
    rows, problems = rows_of(tree)
    yield from problems
    if not jax.tree.leaves(tree):
        yield f"batch holds no array; expected arrays whose rows can be split evenly into {unit}."
    if len(set(rows.values())) != 1:
        return
    at, n = next(iter(rows.items()))  # the others have as many
    step = num_microbatches * num_shards
    if n == 0 or n % step:
        below, above = n // step * step, max(-(-n // step), 1) * step
        valid = ", ".join(str(n) for n in (below, above) if n)
        remedy = " Or add masked rows: `pipe.pad_batch(batch)`." if n else ""
        yield f"{at} has {n} rows, which cannot be split evenly into {unit}."
        yield f"Nearest valid: {valid}.{remedy}"
    if schedule.num_slices > 1:
        yield from _sequences(tree, schedule.num_slices)


def _sequences(tree: Tree, num_slices: int) -> Iterator[str]:
    """Says why the sequences of a batch cannot be cut into slices."""
    leaves = [(path, shape_of(leaf)) for path, leaf in jax.tree.leaves_with_path(tree)]
    lengths = {
        f"batch{jax.tree_util.keystr(path)}": leaf.shape[1]
        for path, leaf in leaves
        if leaf is not None and len(leaf.shape) > 1
    }
    distinct = sorted(set(lengths.values()))
    if len(distinct) != 1:
        lengths_found = ", ".join(f"{at}: {n}" for at, n in lengths.items()) or "no sequence"
        yield (
            f"The schedule cuts sequences into {num_slices} slices, so the arrays of a batch must "
            "be [rows] or [rows, sequence, ...], with one sequence length; found "
            f"{lengths_found}."
        )
    elif length := distinct[0] % num_slices:
        below = distinct[0] - length
        valid = ", ".join(str(n) for n in (below, below + num_slices) if n)
        yield (
            f"The sequences of a batch have {distinct[0]} positions, which do not divide into "
            f"{num_slices} slices.\nNearest valid: {valid}."
        )
