"""One nnx module as a pure function and a tree of arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jaxpipe.runtime.types import Key, Params, States, Tree
from jaxpipe.schedule.problems import below_one, refuse

OTHER = nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))
"""A module's state that is neither a parameter nor a random stream, nor kept by `sow`."""


def functional(
    module: nnx.Module, *, method: Callable[..., Tree] | None = None
) -> tuple[Callable[..., Tree], Params]:
    """Splits a module into a pure function and its parameters.

    Args:
      module: any nnx module whose only state is parameters (`nnx.Param`) and random streams;
        concrete, or abstract as `nnx.eval_shape` returns it.
      method: what to call, with the module as its first argument, such as a method of its class;
        None for the module itself.

    Returns:
      ``(apply, params)``. ``apply(params, *args, rng=None)`` calls the module. With ``rng``, one
      jax key, the module's random streams (dropout) derive from that key alone; with None it runs
      deterministically, as after `nnx.Module.eval`. ``params`` is a nested dict of arrays (shapes,
      for an abstract module).

    Raises:
      ValueError: no nnx module, or one that holds other state, such as running statistics.

    Example:
      >>> apply, params = functional(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> jax.tree.map(jnp.shape, params)
      {'bias': (3,), 'kernel': (2, 3)}
      >>> apply(params, jnp.ones((5, 2))).shape
      (5, 3)
    """
    flat = nnx.to_flat_state(nnx.state(checked(module), OTHER))
    if flat:
        kept = ", ".join(f"{'.'.join(map(str, path))} ({type(v).__name__})" for path, v in flat)
        raise ValueError(
            f"{type(module).__name__} keeps state besides its parameters: {kept}. A pipelined "
            "layer must be a pure function of parameters, input and key; use one without running "
            "state (for example GroupNorm instead of BatchNorm), or convert it with "
            "jaxpipe.nnx.stateful."
        )
    apply_stateful, params, _ = stateful(module, method=method)

    def apply(params: Params, *args: Tree, rng: Key = None) -> Tree:
        return apply_stateful(params, {}, *args, rng=rng)[0]

    return apply, params


def stateful(
    module: nnx.Module, *, method: Callable[..., Tree] | None = None
) -> tuple[Callable[..., Tree], Params, States]:
    """Splits a module that keeps running statistics into a pure function and two trees.

    Args:
      module: as for `functional`; all state that is neither a parameter nor a random stream (such
        as the mean and variance of `nnx.BatchNorm`) becomes the second tree.
      method: as for `functional`.

    Returns:
      ``(apply, params, state)``. ``apply(params, state, *args, rng=None, train=True)`` returns the
      module's output and its new state. ``rng`` is as in `functional`; with ``train`` False the
      running statistics are used (`use_running_average`) and ``state`` comes back as it was.

    Example:
      >>> apply, params, state = stateful(nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0)))
      >>> _, state = apply(params, state, jnp.full((4, 2), 6.0))
      >>> state["mean"].tolist()
      [3.0, 3.0]
    """

    graphs = {
        (train, deterministic): nnx.split(view(module, train, deterministic))[0]
        for train in (True, False)
        for deterministic in (True, False)
    }
    _, *parts = nnx.split(module, nnx.Param, nnx.RngState, ...)
    param_state, rng_state, other_state = parts
    params_tree, state_tree = jax.tree.structure(param_state), jax.tree.structure(other_state)

    def apply(
        params: Params, state: States, *args: Tree, rng: Key = None, train: bool = True
    ) -> tuple[Tree, States]:
        merged = nnx.merge(
            graphs[train, rng is None],
            jax.tree.unflatten(params_tree, jax.tree.leaves(params)),
            streams(rng_state, rng),
            jax.tree.unflatten(state_tree, jax.tree.leaves(state)),
        )
        output = merged(*args) if method is None else method(merged, *args)
        return output, nnx.to_pure_dict(nnx.state(merged, OTHER))

    return apply, nnx.to_pure_dict(param_state), nnx.to_pure_dict(other_state)


def axis_split(module: nnx.Module) -> Tree:
    """Reads from a module's own metadata which mesh axes split its parameters.

    Args:
      module: as for `functional`. Its parameters are made with ``out_sharding``, in
        `nnx.use_eager_sharding(False)`, so that they are not split already.

    Returns:
      A `jax.sharding.PartitionSpec` for every parameter, as `jaxpipe.Model.axis_split` has them.

    Example:
      >>> with nnx.use_eager_sharding(False):
      ...     column = {"out_sharding": (None, "tensor")}
      ...     linear = nnx.Linear(2, 3, kernel_metadata=column, rngs=nnx.Rngs(0))
      >>> axis_split(linear)
      {'bias': P(), 'kernel': P(None, 'tensor')}
    """
    return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(checked(module), nnx.Param)))


def stack(
    make_module: Callable[[nnx.Rngs], nnx.Module], *, num_layers: int, rngs: nnx.Rngs
) -> tuple[Callable[..., Tree], Params]:
    """Makes equal layers, stacked as ``params["layers"]`` wants them.

    Each layer draws its own initial values. Works under `jax.jit` and `jax.eval_shape`.

    Args:
      make_module: ``make_module(rngs)`` returns one layer.
      num_layers: how many layers, at least 1.
      rngs: where the layers' initial values come from; its ``params`` stream is advanced once.

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
    apply, _ = functional(nnx.eval_shape(lambda: checked(make_module(nnx.Rngs(0)))))

    def initial(key: jax.Array) -> Params:
        return functional(make_module(nnx.Rngs(key)))[1]

    return apply, jax.vmap(initial)(jax.random.split(rngs.params(), num_layers))


def checked(module: nnx.Module) -> nnx.Module:
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


def view(module: nnx.Module, train: bool, deterministic: bool) -> Tree:
    """Views a module in training or evaluation, with or without dropout; variables are shared."""
    return nnx.view(
        module,
        only=nnx.Module,  # `nnx.Rngs` has streams by any name, and would draw from "set_view"
        use_running_average=not train,
        deterministic=deterministic,
        raise_if_not_found=False,
    )


def streams(state: Tree, rng: Key) -> Tree:
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
