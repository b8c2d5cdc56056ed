"""The GPT's training step without a pipeline: on one GPU, and with data shards alone (FSDP).

A loop over microbatches of `jax.value_and_grad` of a loop over layers, as one writes it in plain
JAX. Layers cast their float32 weights to bfloat16 themselves.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.layers.remat import REMAT_POLICIES
from models import gpt

DATA = "data"
_GATHERED = "gathered"


def plain_step(
    config: gpt.GPTConfig, remat: str, device: Any, tokens: tuple[int, ...]
) -> jax.stages.Compiled:
    """The step of one GPU, compiled for tokens ``[microbatches, rows, sequence + 1]``."""
    mesh = _mesh([device])

    def layer(model: Any, params: Any, x: jax.Array) -> jax.Array:
        return model.layer(params, x, None, None)

    return _compiled(functools.partial(_step, config, remat, layer), config, mesh, P(), tokens)


def sharded_step(
    config: gpt.GPTConfig, remat: str, devices: Any, tokens: tuple[int, ...]
) -> jax.stages.Compiled:
    """The step of data shards that hold a part of every weight, compiled for tokens
    ``[microbatches, rows, sequence + 1]`` of all shards together.

    A layer's weights are gathered in bfloat16 before its forward and again before its backward; its
    gradient is reduced in float32 after each microbatch.
    """
    mesh = _mesh(devices)

    def layer(model: Any, params: Any, x: jax.Array) -> jax.Array:
        return model.layer(jax.tree.map(_gather, params), x, None, None)

    def step(params: Any, tokens: jax.Array) -> Any:
        outer = {name: jax.tree.map(_gather, params[name]) for name in ("embed", "head")}
        loss, gradients = _step(config, remat, layer, params | outer, tokens)
        mean = functools.partial(lax.psum_scatter, axis_name=DATA, tiled=True)
        outer = {name: jax.tree.map(mean, gradients[name]) for name in outer}
        return lax.pmean(loss, DATA), gradients | outer

    specs = {"embed": P(DATA), "layers": P(None, DATA), "head": P(DATA)}
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P(None, DATA)), out_specs=(P(), specs), check_vma=False
    )
    return _compiled(sharded, config, mesh, specs, tokens)


def _mesh(devices: Any) -> jax.sharding.Mesh:
    return jax.make_mesh((len(devices),), (DATA,), devices=devices, axis_types=(AxisType.Auto,))


def _compiled(step: Any, config: gpt.GPTConfig, mesh: Any, specs: Any, tokens: Any) -> Any:
    shapes = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))

    def placed(tree: Any, spec: P) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding), tree
        )

    whole = isinstance(specs, P)
    params = {name: placed(tree, specs if whole else specs[name]) for name, tree in shapes.items()}
    rows = placed(jax.ShapeDtypeStruct(tokens, jnp.int32), P() if whole else P(None, DATA))
    return jax.jit(step).lower(params, rows).compile()


def _step(config: gpt.GPTConfig, remat: str, layer: Any, params: Any, tokens: jax.Array) -> Any:
    """Loss and gradients, summed over microbatches."""
    model = gpt.model(config)
    policy = REMAT_POLICIES[remat]
    if remat == "none":
        policy = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
    # In a loop nothing is computed twice, so that no barrier is needed against it.
    run = jax.checkpoint(functools.partial(layer, model), policy=policy, prevent_cse=False)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        microbatch = {"tokens": tokens}
        x = model.embed(params, microbatch, None)
        x, _ = lax.scan(lambda x, weights: (run(weights, x), None), x, params["layers"])
        return model.head_loss(params, x, microbatch, None)

    def add(sums: Any, tokens: jax.Array) -> Any:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, tokens)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return lax.scan(add, zeros, tokens)[0]


@jax.custom_vjp
def _gather(shard: jax.Array) -> jax.Array:
    """The whole weight, in bfloat16 read as float32."""
    whole = lax.all_gather(shard.astype(jnp.bfloat16), DATA, tiled=True)
    return checkpoint_name(whole, _GATHERED).astype(jnp.float32)


_gather.defvjp(
    lambda shard: (_gather(shard), None),
    lambda _, gradient: (lax.psum_scatter(gradient, DATA, tiled=True),),
)
