"""Flax nnx modules in a pipeline: whole models, and single functions.

`docs/design/005-losses-and-outputs.md` gives the reasons.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jaxpipe.runtime.filters import OVERWRITE, OVERWRITE_RULE
from jaxpipe.runtime.layers import losses
from jaxpipe.runtime.layers.model import Model
from jaxpipe.runtime.trees import form_of, is_sequence, mismatches, shapes_of
from jaxpipe.runtime.types import Activation, Batch, Key, LayerParams, Params, Path, States, Tree
from jaxpipe.schedule.problems import below_one, refuse

_LOG = logging.getLogger(__name__)

_OTHER = nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))
"""A module's state that is neither a parameter nor a random stream, nor kept by `sow`."""


def functional(
    module: nnx.Module, *, method: Callable[..., Tree] | None = None
) -> tuple[Callable[..., Tree], LayerParams]:
    """Splits a module into a pure function and its parameters.

    Args:
      module: any nnx module whose only state is parameters (`nnx.Param`) and random streams;
        concrete, or abstract as `nnx.eval_shape` returns it.
      method: the function to call with the module as its first argument, such as a method of its
        class; None calls the module itself.

    Returns:
      ``(apply, params)``. ``apply(params, *args, rng=None)`` calls the module. With ``rng``, one
      jax key, the module's random streams (dropout) derive from that key alone; with None it runs
      deterministically, as after `nnx.Module.eval`. ``params`` is a nested dict of arrays (shapes,
      for an abstract module).

    Raises:
      ValueError: not an nnx module, or one with other state, such as running statistics.

    Example:
      >>> apply, params = functional(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> jax.tree.map(jnp.shape, params)
      {'bias': (3,), 'kernel': (2, 3)}
      >>> apply(params, jnp.ones((5, 2))).shape
      (5, 3)
    """
    flat = nnx.to_flat_state(nnx.state(_checked(module), _OTHER))
    if flat:
        kept = ", ".join(f"{'.'.join(map(str, path))} ({type(v).__name__})" for path, v in flat)
        raise ValueError(
            f"{type(module).__name__} keeps state besides its parameters: {kept}. A pipelined "
            "layer must be a pure function of parameters, input and key; use one without running "
            "state (for example GroupNorm instead of BatchNorm), or convert it with "
            "jaxpipe.nnx.stateful."
        )
    apply_stateful, params, _ = stateful(module, method=method)

    def apply(params: LayerParams, *args: Tree, rng: Key = None) -> Tree:
        return apply_stateful(params, {}, *args, rng=rng)[0]

    return apply, params


def stateful(
    module: nnx.Module, *, method: Callable[..., Tree] | None = None
) -> tuple[Callable[..., Tree], LayerParams, States]:
    """Splits a module that keeps running statistics into a pure function and two trees.

    Args:
      module: as for `functional`. All state that is neither a parameter nor a random stream, such
        as the mean and variance of `nnx.BatchNorm`, goes into the second tree.
      method: as for `functional`.

    Returns:
      ``(apply, params, state)``. ``apply(params, state, *args, rng=None, train=True)`` returns the
      module's output and its new state. ``rng`` is as in `functional`. With ``train=False`` the
      module uses the running statistics (`use_running_average`), and ``state`` is unchanged.

    Example:
      >>> apply, params, state = stateful(nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0)))
      >>> _, state = apply(params, state, jnp.full((4, 2), 6.0))
      >>> state["mean"].tolist()
      [3.0, 3.0]
    """

    graphs = {
        (train, deterministic): nnx.split(_view(module, train, deterministic))[0]
        for train in (True, False)
        for deterministic in (True, False)
    }
    _, *parts = nnx.split(module, nnx.Param, nnx.RngState, ...)
    param_state, rng_state, other_state = parts
    params_tree, state_tree = jax.tree.structure(param_state), jax.tree.structure(other_state)

    def apply(
        params: LayerParams, state: States, *args: Tree, rng: Key = None, train: bool = True
    ) -> tuple[Tree, States]:
        merged = nnx.merge(
            graphs[train, rng is None],
            jax.tree.unflatten(params_tree, jax.tree.leaves(params)),
            _streams(rng_state, rng),
            jax.tree.unflatten(state_tree, jax.tree.leaves(state)),
        )
        output = merged(*args) if method is None else method(merged, *args)
        return output, nnx.to_pure_dict(nnx.state(merged, _OTHER))

    return apply, nnx.to_pure_dict(param_state), nnx.to_pure_dict(other_state)


def axis_split(module: nnx.Module) -> Tree:
    """Reads the mesh axes that split a module's parameters from the module's metadata.

    Args:
      module: as for `functional`. Create its parameters with ``out_sharding`` within
        `nnx.use_eager_sharding(False)`, so that they are not split yet.

    Returns:
      A `jax.sharding.PartitionSpec` per parameter, for `jaxpipe.Model.axis_split`.

    Example:
      >>> with nnx.use_eager_sharding(False):
      ...     column = {"out_sharding": (None, "tensor")}
      ...     linear = nnx.Linear(2, 3, kernel_metadata=column, rngs=nnx.Rngs(0))
      >>> axis_split(linear)
      {'bias': P(), 'kernel': P(None, 'tensor')}
    """
    return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(_checked(module), nnx.Param)))


def stack(
    make_module: Callable[[nnx.Rngs], nnx.Module], *, num_layers: int, rngs: nnx.Rngs
) -> tuple[Callable[..., Tree], LayerParams]:
    """Makes equal layers, stacked for ``params["layers"]``.

    Each layer draws its own initial values. Works under `jax.jit` and `jax.eval_shape`.

    Args:
      make_module: ``make_module(rngs)`` returns one layer.
      num_layers: number of layers, at least 1.
      rngs: source of the layers' initial values; its ``params`` stream is advanced once.

    Returns:
      ``(apply, params)``: ``apply(layer_params, *args, rng=None)`` runs one layer, as in
      `functional`; every leaf of ``params`` is [num_layers, ...].

    Raises:
      ValueError: ``num_layers`` below 1, or a module that `functional` refuses.

    Example:
      >>> def make(rngs):
      ...     return nnx.Linear(4, 4, rngs=rngs)
      >>> apply, layers = stack(make, num_layers=3, rngs=nnx.Rngs(0))
      >>> layers["kernel"].shape
      (3, 4, 4)
    """
    refuse(below_one(num_layers=num_layers))
    apply, _ = functional(nnx.eval_shape(lambda: _checked(make_module(nnx.Rngs(0)))))

    def initial(key: jax.Array) -> LayerParams:
        return functional(make_module(nnx.Rngs(key)))[1]

    return apply, jax.vmap(initial)(jax.random.split(rngs.params(), num_layers))


def _checked(module: nnx.Module) -> nnx.Module:
    """Returns the module; raises ValueError if it is no nnx module."""
    if isinstance(module, nnx.Module):
        return module
    if isinstance(module, type):
        remedy = f"give an instance, such as {module.__name__}(..., rngs=nnx.Rngs(0))"
    elif isinstance(module, linen.Module):
        remedy = (
            "a linen module is a pure function already, `module.apply({'params': params}, x)`, "
            "and `module.init` returns its parameters"
        )
    else:
        remedy = "a pure function of parameters and input needs no conversion"
    raise ValueError(f"module is {module!r}, no flax nnx module: {remedy}.")


def _view(module: nnx.Module, train: bool, deterministic: bool) -> Tree:
    """Views a module in training or evaluation, with or without dropout; variables are shared."""
    return nnx.view(
        module,
        only=nnx.Module,  # `nnx.Rngs` has streams by any name, and would draw from "set_view"
        use_running_average=not train,
        deterministic=deterministic,
        raise_if_not_found=False,
    )


def _streams(state: Tree, rng: Key) -> Tree:
    """Gives each random stream of ``state`` its own key, folded from ``rng``, and count 0.

    Without a key the module is deterministic, and any key will do.
    """
    if rng is None:
        rng = jax.random.key(0)
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(rng)
    leaves, tree = jax.tree.flatten(state)
    filled = [
        jax.random.fold_in(rng, i)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, filled)


# Whole models.


class Converted(NamedTuple):
    """The result of `model`: a model made from modules.

    Args:
      model: the model for `Pipeline`.
      params: canonical parameters: those of the layers in ``params["layers"]``, stacked if all
        layers are alike, and all others in ``params["embed"]``.
      states: a tree for each layer, or None if no layer keeps a state.
    """

    model: Model
    params: Params
    states: States


def model(
    module: nnx.Module,
    *,
    layers: Sequence[nnx.Module],
    embed: Callable[[nnx.Module, Batch], Activation],
    loss: Callable[[nnx.Module, Activation, Batch], Tree],
    layer: Callable[[nnx.Module, Activation, Batch], Tree] = lambda layer, x, batch: layer(x),
    output: Callable[[nnx.Module, Activation, Batch], Tree] = lambda module, x, batch: x,
    train: bool = True,
    axes: tuple[str, ...] = (),
) -> Converted:
    """Makes a model from modules, which stay unchanged.

    The functions are the three parts of the module's own ``__call__``. Random streams (dropout)
    derive from the key of a step; without a key, modules are deterministic. Running statistics
    become states.

    Args:
      module: the module that embedding, head and loss use, or a dictionary or list of several. It
        may contain the layers. Modules are concrete, or abstract as from `nnx.eval_shape`.
      layers: the modules that run one after another, alike or not.
      embed: ``embed(module, microbatch) -> x``, the input of the first layer.
      loss: ``loss(module, x, microbatch)``, where x is the output of the last layer; it returns the
        same as `jaxpipe.Model.head_loss`.
      layer: ``layer(layers[n], x, microbatch) -> x``, or ``jaxpipe.WithLoss(x, loss)``.
      output: ``output(module, x, microbatch)`` for `Pipeline.outputs`; by default x.
      train: False for a model for evaluation, which reads running statistics
        (`use_running_average`) and does not change them.
      axes: model axes, as in `jaxpipe.Model`, that the modules name in collectives. The split of
        parameters is then read from the modules' metadata by `jaxpipe.nnx.axis_split`.

    Raises:
      ValueError: a parameter that two layers share, or a layer and the rest of the model; running
        statistics outside the layers.

    Example:
      >>> embedding = nnx.Embed(5, 4, rngs=nnx.Rngs(0))
      >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(n)) for n in range(3)]
      >>> converted = model(
      ...     embedding,
      ...     layers=layers,
      ...     embed=lambda embedding, batch: embedding(batch["tokens"]),
      ...     layer=lambda linear, x, batch: x + jax.nn.relu(linear(x)),
      ...     loss=lambda embedding, x, batch: jnp.mean(embedding.attend(x) ** 2),
      ... )
      >>> converted.params["layers"]["kernel"].shape
      (3, 4, 4)
    """
    split = _split(module, layers)
    is_stateful = bool(jax.tree.leaves(split.states))
    functions = _layer_functions(layers, layer, train, is_stateful)
    alike = len(set(functions)) == 1 and _same(split.params) and _same(split.states)
    if not alike and _same(split.params) and _same(split.states):
        _tell_difference(layers)
    call = _caller(module, split, train)
    of_layers = _stacked(split.params) if alike else tuple(split.params)
    specs: Tree = None
    if axes:
        of_each = tuple(map(axis_split, layers))
        outer = nnx.to_pure_dict(nnx.get_partition_spec(split.outer))
        specs = {"embed": outer, "layers": of_each[0] if alike else of_each}
    made = Model(
        embed=lambda outer, batch, rng: call(embed, outer, rng, batch),
        layer=functions[0] if alike else tuple(functions),
        head_loss=lambda outer, x, batch, rng: call(loss, outer, rng, x, batch),
        output=lambda outer, x, batch, rng: call(output, outer, rng, x, batch),
        stateful=is_stateful,
        axes=axes,
        axis_split=specs,
    )
    params = {"embed": nnx.to_pure_dict(split.outer), "layers": of_layers, "head": {}}
    return Converted(made, params, tuple(split.states) if is_stateful else None)


def update(
    module: nnx.Module,
    params: Params,
    *,
    layers: Sequence[nnx.Module],
    states: States | None = None,
) -> None:
    """Writes trained parameters back into the modules, which may be abstract.

    Args:
      module, layers: the arguments of `model`.
      params: canonical parameters, from `Pipeline.unplace`.
      states: the layers' states, from `Pipeline.unplace_states`.

    Raises:
      ValueError: trees that differ from those that `model` returned.

    Example:
      >>> linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      >>> params = {"embed": {}, "layers": {"bias": jnp.ones((1, 4))}, "head": {}}
      >>> params["layers"]["kernel"] = jnp.ones((1, 4, 4))
      >>> update({}, params, layers=[linear])
      >>> linear(jnp.ones(4)).tolist()
      [5.0, 5.0, 5.0, 5.0]
    """
    split = _split(module, layers)
    expected = {"embed": nnx.to_pure_dict(split.outer), "layers": tuple(split.params), "head": {}}
    of_layers = params.get("layers") if isinstance(params, dict) else None
    if isinstance(of_layers, list):
        params = params | {"layers": tuple(of_layers)}
    elif of_layers is not None and not is_sequence(of_layers) and _same(split.params):
        expected["layers"] = _stacked(shapes_of(split.params))
    problems = mismatches("params", params, shapes_of(expected))
    if states is not None:
        problems += mismatches("states", tuple(states), shapes_of(tuple(split.states)))
    refuse(problems)
    assert of_layers is not None  # or it would be missing
    if not is_sequence(of_layers):
        of_layers = [jax.tree.map(lambda w, n=n: w[n], of_layers) for n in range(len(layers))]
    nnx.update(module, _like(split.outer, params["embed"]))
    for n, part in enumerate(layers):
        nnx.update(part, _like(nnx.state(part, nnx.Param), of_layers[n]))
        if states is not None:
            nnx.update(part, _like(nnx.state(part, _OTHER), states[n]))


def reference(
    module: nnx.Module,
    loss: Callable[[nnx.Module, Batch], Tree],
    *,
    layers: Sequence[nnx.Module],
) -> Callable[..., Tree]:
    """Makes a reference for `jaxpipe.testing.assert_matches_unpipelined` from a module's own loss.

    It finds parts of ``__call__`` that are missing in the functions given to `model`.

    Args:
      module, layers: the arguments of `model`; the module contains the layers.
      loss: ``loss(module, batch)`` of a whole batch, by the module's own ``__call__``.

    Returns:
      A function of parameters and batch. It raises ValueError for states, and for a random key,
      from which the module would draw different numbers.

    Example:
      >>> net = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(n)) for n in range(4)))
      >>> own = reference(net, lambda net, x: jnp.mean(net(x) ** 2), layers=net.layers[1:3])
    """

    def of_params(
        params: Params, batch: Batch, rng: Key = None, *, states: States = None, **_: int
    ) -> Tree:
        if rng is not None or states is not None:
            raise ValueError("A module's own loss is a reference without rng and without states.")
        copy, parts = nnx.clone((module, list(layers)))
        update(copy, params, layers=parts)
        result = jax.tree.map(jnp.asarray, loss(_view(copy, True, True), batch))
        return losses.values(losses.addable(result))

    return of_params


@dataclasses.dataclass(frozen=True)
class _Split:
    """The state of modules, by who owns it.

    Args:
      params: parameters of each layer, in plain dictionaries.
      in_layer: whether a leaf of the module belongs to a layer: a filter of `nnx.split`.
      outer: the parameters of the module that belong to no layer.
    """

    params: list[LayerParams]
    states: list[States]
    in_layer: Callable[[Path, object], bool]
    outer: Tree


def _split(module: nnx.Module, layers: Sequence[nnx.Module]) -> _Split:
    """Sorts state by its owner; raises ValueError for what is shared or must not be there."""
    if isinstance(layers, nnx.Module) and not isinstance(layers, nnx.List):
        raise ValueError(f"layers is a {type(layers).__name__}; give a sequence of modules.")
    if not layers:
        raise ValueError("layers is empty; a pipeline needs at least one.")
    owned: dict[int, nnx.Variable[Any]] = {}
    problems = []
    for n, part in enumerate(map(_checked, layers)):
        for path, leaf in _leaves(part):
            if not isinstance(leaf, nnx.RngState) and id(leaf) in owned:
                problems.append(f"layers[{n}]{path} is a parameter of another layer, too")
            owned[id(leaf)] = leaf
            if _is_overwritten(leaf):
                problems.append(f"layers[{n}]{path} {OVERWRITE_RULE}")
    for path, leaf in _leaves(module, without=layers):
        if isinstance(leaf, nnx.Param | nnx.RngState):
            if isinstance(leaf, nnx.Param) and id(leaf) in owned:
                problems.append(f"module{path} is a parameter of a layer, too")
        elif _is_overwritten(leaf):
            problems.append(f"module{path} {OVERWRITE_RULE}")
        else:
            problems.append(
                f"module{path} is state ({type(leaf).__name__}) outside the layers; only layers "
                "may keep running statistics. Make the module that holds it one of the layers"
            )
    if any(problem.endswith("too") for problem in problems):
        problems.append("What layers share goes into params['shared'] of a jaxpipe.Model, by hand")
    refuse([f"{problem}." for problem in problems])

    def in_layer(path: Path, leaf: object) -> bool:
        return id(leaf) in owned

    return _Split(
        params=[nnx.to_pure_dict(nnx.state(part, nnx.Param)) for part in layers],
        states=[nnx.to_pure_dict(nnx.state(part, _OTHER)) for part in layers],
        in_layer=in_layer,
        outer=nnx.state(module, nnx.All(nnx.Param, nnx.Not(in_layer))),
    )


def _leaves(
    node: object,
    path: str = "",
    *,
    without: Iterable[nnx.Module] = (),
    seen: set[int] | None = None,
) -> Iterator[tuple[str, nnx.Variable[Any]]]:
    """Yields variables that a module reaches other than through some of its parts."""
    seen = {id(part) for part in without} if seen is None else seen
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, nnx.Variable):
        yield path, node
        return
    children: Iterable[tuple[str, object]] = ()
    if isinstance(node, dict):
        children = ((f"[{key!r}]", child) for key, child in node.items())
    elif isinstance(node, list | tuple | nnx.List):
        children = ((f"[{key}]", child) for key, child in enumerate(node))
    elif isinstance(node, nnx.Pytree):
        children = ((f".{key}", child) for key, child in vars(node).items())
    for key, child in children:
        yield from _leaves(child, path + key, seen=seen)


def _is_overwritten(leaf: nnx.Variable[Any]) -> bool:
    return type(leaf).__name__ == OVERWRITE  # a type that flax makes of linen's collection


def _layer_functions(
    layers: Sequence[nnx.Module], method: Callable[..., Tree], train: bool, is_stateful: bool
) -> list[Callable[..., Tree]]:
    """Makes a function for each layer, as for `Model`; layers unlike only in arrays share one."""
    kinds: list[tuple[object, Callable[..., Tree]]] = []
    functions = []
    for part in layers:
        graph, _ = nnx.split(part)
        function = next((function for known, function in kinds if known == graph), None)
        if function is None:
            function = _layer_function(part, method, train, is_stateful)
            kinds.append((graph, function))
        functions.append(function)
    return functions


_MISSING = object()


def _tell_difference(layers: Sequence[nnx.Module]) -> None:
    """Warns of layers that could be stacked but for attributes that are no arrays."""
    parts = [dict(_attributes(part)) for part in layers]
    differ = [
        path
        for path in dict.fromkeys(itertools.chain(*parts))
        if any(part.get(path, _MISSING) != parts[0].get(path, _MISSING) for part in parts)
    ]
    if differ:
        _LOG.warning(
            "The layers have arrays alike and differ in %s, so that each is compiled by itself. If "
            "nothing depends on it, give it the same value in all layers before they are "
            "converted, such as `layer%s = None`; then they are stacked, and compiled once.",
            ", ".join(path.removeprefix(".") for path in differ),
            differ[0],
        )


def _attributes(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields by path what a module holds beside arrays, in its parts too, with their metadata."""
    values = node.get_metadata() if isinstance(node, nnx.Variable) else vars(node)
    for name, value in values.items():
        place = f"{path}[{name}]" if name.isdigit() else f"{path}.{name}"
        if isinstance(value, nnx.Pytree | nnx.Variable):
            yield from _attributes(value, place)
        elif not name.startswith("_pytree__") and not isinstance(value, jax.Array | np.ndarray):
            yield place, value


def _layer_function(
    part: nnx.Module, method: Callable[..., Tree], train: bool, is_stateful: bool
) -> Callable[..., Tree]:
    apply, _, _ = stateful(part, method=method)

    def with_state(w: LayerParams, x: Activation, batch: Batch, rng: Key, state: States) -> Tree:
        return apply(w, state, x, batch, rng=rng, train=train)

    def layer(w: LayerParams, x: Activation, batch: Batch, rng: Key) -> Tree:
        return apply(w, {}, x, batch, rng=rng, train=train)[0]

    return with_state if is_stateful else layer


def _caller(module: nnx.Module, split: _Split, train: bool) -> Callable[..., Tree]:
    """Makes ``call(method, outer, rng, *args)``, which runs ``method(module, *args)``.

    It does not have the layers' arrays: these are shapes in the module.
    """
    graphs = {d: nnx.split(_view(module, train, d))[0] for d in (True, False)}
    _, *parts = nnx.split(module, split.in_layer, nnx.Param, nnx.RngState, ...)
    of_layers, params, rngs, constants = parts
    # The caller has the arrays.
    of_layers, params = shapes_of(of_layers), jax.tree.structure(params)

    def call(method: Callable[..., Tree], outer: Tree, rng: Key, *args: Tree) -> Tree:
        given = jax.tree.unflatten(params, jax.tree.leaves(outer["embed"]))
        graph = graphs[rng is None]
        merged = nnx.merge(graph, of_layers, given, _streams(rngs, rng), constants)
        return method(merged, *args)

    return call


def _same(trees: Sequence[Tree]) -> bool:
    """Whether all have the same structure, shapes and dtypes."""
    return len(set(map(form_of, trees))) == 1


def _stacked(trees: Sequence[Tree]) -> Tree:
    """Stacks the trees' leaves on a leading dimension: arrays, or their shapes."""

    def stack(trees: Sequence[Tree]) -> Tree:
        return jax.tree.map(lambda *w: jnp.stack(w), *trees)

    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trees))
    return jax.eval_shape(stack, trees) if abstract else stack(trees)


def _like(state: Tree, tree: Tree) -> Tree:
    """Makes a state with the arrays of a plain dictionary."""
    return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(tree))
