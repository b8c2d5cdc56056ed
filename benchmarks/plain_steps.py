"""The GPT's training step without a pipeline: on one GPU, and with data shards alone (FSDP).

What a careful user writes in plain JAX: a loop over microbatches of `jax.value_and_grad`, and in it
a Python loop over layers whose weights are arrays of their own, cast to bfloat16 once per step.
Gradients are float32, and matmuls add them to their sums. `jax.checkpoint` keeps the bfloat16
weights by name; otherwise it would keep float32 ones, and cast them twice per microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layers.split import REMAT_POLICIES
from jaxpipe.runtime.trees import widened
from models import gpt

DATA = "data"
_OWN, _GATHERED = "own weights", "gathered weights"


def by_layer(params: Any) -> Any:
    """Canonical parameters with a list of one tree per layer in place of stacked arrays."""
    count = len(jax.tree.leaves(params["layers"])[0])
    layers = [jax.tree.map(lambda w, n=n: w[n], params["layers"]) for n in range(count)]
    return params | {"layers": layers}


def plain_step(
    config: gpt.GPTConfig, remat: str, device: Any, tokens: tuple[int, ...]
) -> jax.stages.Compiled:
    """The step of one GPU, compiled for parameters `by_layer` and tokens
    ``[microbatches, rows, sequence + 1]``."""
    step = functools.partial(_step, config, _whole, REMAT_POLICIES[remat])
    return _compiled(step, config, _mesh([device]), P(), tokens)


def sharded_step(
    config: gpt.GPTConfig, remat: str, devices: Any, tokens: tuple[int, ...]
) -> jax.stages.Compiled:
    """The step of data shards that hold a part of every weight, compiled for parameters `by_layer`
    and tokens ``[microbatches, rows, sequence + 1]`` of all shards together.

    A layer's weights are gathered in bfloat16 before its forward and again before its backward; XLA
    starts a gather under the layer before. Gradients are reduced in float32 after each microbatch.
    """
    policy = REMAT_POLICIES[remat]
    if policy is None:
        policy = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)

    def step(params: Any, tokens: jax.Array) -> Any:
        outer = {name: jax.tree.map(_gathered, params[name]) for name in ("embed", "head")}
        loss, gradients = _step(config, _gathered, policy, params | outer, tokens)
        mean = functools.partial(lax.psum_scatter, axis_name=DATA, tiled=True)
        outer = {name: jax.tree.map(mean, gradients[name]) for name in outer}
        return lax.pmean(loss, DATA), gradients | outer

    mesh, specs = _mesh(devices), (P(DATA), P(None, DATA))
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(P(), P(DATA)), check_vma=False
    )
    return _compiled(sharded, config, mesh, P(DATA), tokens)


def _mesh(devices: Any) -> jax.sharding.Mesh:
    return jax.make_mesh((len(devices),), (DATA,), devices=devices, axis_types=(AxisType.Auto,))


def _compiled(step: Any, config: gpt.GPTConfig, mesh: Any, spec: P, tokens: Any) -> Any:
    """The step, compiled for parameters that lie as ``spec`` says."""

    def placed(tree: Any, spec: P) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding), tree
        )

    params = jax.eval_shape(lambda: by_layer(gpt.init(config, jax.random.key(0))))
    rows = placed(jax.ShapeDtypeStruct(tokens, jnp.int32), P(None, *spec))
    return jax.jit(step).lower(placed(params, spec), rows).compile()


def _step(
    config: gpt.GPTConfig,
    whole: Callable[[jax.Array], jax.Array],
    policy: Any,
    params: Any,
    tokens: jax.Array,
) -> Any:
    """Loss and float32 gradients, summed over microbatches.

    Args:
      whole: makes a layer's weights of what the step holds of them.
      policy: of `jax.checkpoint`, for every layer; None to keep everything.
    """
    model = gpt.model(config)

    def layer(weights: Any, x: jax.Array) -> jax.Array:
        return model.layer(jax.tree.map(whole, weights), x, None, None)

    if policy is not None:
        own = jax.checkpoint_policies.save_only_these_names(_OWN)
        kept = jax.checkpoint_policies.save_from_both_policies(policy, own)
        layer = jax.checkpoint(layer, policy=kept)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        microbatch = {"tokens": tokens}
        x = model.spread(model.embed(params, microbatch, None))
        for weights in params["layers"]:
            x = layer(weights, x)
        return model.head_loss(params, model.merge(x), microbatch, None)

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    layers = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"])

    def add(sums: Any, tokens: jax.Array) -> Any:
        # Read as float32, so that their gradients are: layers cast them back, which costs nothing
        # within the loop, but is done for every microbatch if the float32 arrays are made before.
        wide = params | {"layers": widened(layers)}
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(wide, tokens)), None

    return lax.scan(add, zeros, tokens)[0]


# A policy does not see names in the call of a function that has rules for its gradient, but in the
# rule for its forward.


def _named(weight: jax.Array) -> jax.Array:
    return checkpoint_name(weight.astype(jnp.bfloat16), _OWN)


def _named_whole(weight: jax.Array) -> tuple[jax.Array, None]:
    return _named(weight).astype(jnp.float32), None


@jax.custom_vjp
def _whole(weight: jax.Array) -> jax.Array:
    """The weight itself, whose gradient is never rounded."""
    return _named_whole(weight)[0]


_whole.defvjp(_named_whole, lambda _, gradient: (gradient,))


def _named_gathered(shard: jax.Array) -> tuple[jax.Array, None]:
    whole = lax.all_gather(_named(shard), DATA, tiled=True)
    return checkpoint_name(whole, _GATHERED).astype(jnp.float32), None


@jax.custom_vjp
def _gathered(shard: jax.Array) -> jax.Array:
    """The whole weight, whose gradient is reduced in float32."""
    return _named_gathered(shard)[0]


_gathered.defvjp(
    _named_gathered, lambda _, gradient: (lax.psum_scatter(gradient, DATA, tiled=True),)
)
