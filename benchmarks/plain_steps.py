"""The GPT's training step without a pipeline: on one GPU, and with data shards alone (FSDP).

A loop over microbatches of `jax.value_and_grad`, as one writes it in plain JAX, in two forms. The
shorter one scans over layers whose float32 weights are stacked, and layers cast them to bfloat16
themselves. The other one is a Python loop over layers with arrays of their own, which the step
casts once: nothing is cut out of a stack, and matmuls add their gradients to the sums.
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

from jaxpipe.runtime.layers.split import REMAT_POLICIES
from jaxpipe.runtime.trees import widened
from models import gpt

DATA = "data"
_GATHERED = "gathered"


def plain_step(
    config: gpt.GPTConfig, remat: str, device: Any, tokens: tuple[int, ...], *, stacked: bool
) -> jax.stages.Compiled:
    """The step of one GPU, compiled for tokens ``[microbatches, rows, sequence + 1]``.

    Args:
      stacked: whether layers are a scan over stacked weights, or a Python loop over arrays of their
        own.
    """
    mesh = _mesh([device])

    def layer(model: Any, params: Any, x: jax.Array) -> jax.Array:
        return model.layer(params, x, None, None)

    def step(params: Any, tokens: jax.Array) -> Any:
        if not stacked:
            cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"])
            params = params | {"layers": cast}
        return _step(config, remat, layer, params, tokens)

    shapes = _shapes(config)
    if not stacked:
        one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), shapes["layers"])
        shapes = shapes | {"layers": [one] * config.num_layers}
    return _compiled(step, shapes, mesh, P(), tokens)


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
    return _compiled(sharded, _shapes(config), mesh, specs, tokens)


def _mesh(devices: Any) -> jax.sharding.Mesh:
    return jax.make_mesh((len(devices),), (DATA,), devices=devices, axis_types=(AxisType.Auto,))


def _shapes(config: gpt.GPTConfig) -> Any:
    return jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))


def _compiled(step: Any, shapes: Any, mesh: Any, specs: Any, tokens: Any) -> Any:
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
    model, in_python = gpt.model(config), isinstance(params["layers"], list)
    run, policy = functools.partial(layer, model), REMAT_POLICIES[remat]
    if remat == "none":
        policy = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
    if remat != "none" or not in_python:
        # In a scan nothing is computed twice, so that no barrier is needed against it.
        run = jax.checkpoint(run, policy=policy, prevent_cse=in_python)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        microbatch = {"tokens": tokens}
        x = model.embed(params, microbatch, None)
        if in_python:
            for weights in params["layers"]:
                x = run(weights, x)
        else:
            x, _ = lax.scan(lambda x, weights: (run(weights, x), None), x, params["layers"])
        return model.head_loss(params, x, microbatch, None)

    def add(sums: Any, tokens: jax.Array) -> Any:
        # Layers see weights that are bfloat16 as float32, and so are their gradients.
        gradients = jax.value_and_grad(loss)(widened(params), tokens)
        return jax.tree.map(jnp.add, sums, gradients), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, jax.eval_shape(widened, params))
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
