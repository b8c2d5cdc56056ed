"""A decoder whose linear layers have constant int8 weights and low-rank adapters (QLoRA, LoRA)."""

import math

import jax.numpy as jnp
from flax import nnx

from third_party.decoder import Decoder


class AdaptedLinear(nnx.Module):
    """In place of `nnx.Linear` or `nnx.LinearGeneral`: weights rounded to int8, and an adapter."""

    def __init__(self, linear, rank, *, rngs):
        def sizes(features):
            return tuple(features) if isinstance(features, (tuple, list)) else (features,)

        inputs, self.outputs = sizes(linear.in_features), sizes(linear.out_features)
        self.num_inputs, size = len(inputs), math.prod(inputs)
        kernel = linear.kernel[...].reshape(size, -1)
        scale = jnp.abs(kernel).max(0, keepdims=True) / 127
        self.kernel = nnx.Param(jnp.round(kernel / scale).astype(jnp.int8))
        self.scale = nnx.Param(scale)
        initial = nnx.initializers.lecun_normal()
        self.lora_a = nnx.Param(initial(rngs.params(), (size, rank)))
        self.lora_b = nnx.Param(jnp.zeros((rank, kernel.shape[1])))

    def __call__(self, x):
        rows = x.shape[: x.ndim - self.num_inputs]
        x = x.reshape(*rows, -1)
        y = x @ (self.kernel[...].astype(x.dtype) * self.scale[...])
        y = y + (x @ self.lora_a[...]) @ self.lora_b[...]
        return y.reshape(*rows, *self.outputs)


def adapt(module, rank, *, rngs):
    """Puts an adapted layer in place of every linear layer of a module, at any depth."""
    for name, part in list(vars(module).items()):
        if isinstance(part, (nnx.Linear, nnx.LinearGeneral)):
            setattr(module, name, AdaptedLinear(part, rank, rngs=rngs))
        elif isinstance(part, nnx.Module):
            adapt(part, rank, rngs=rngs)


def adapted_decoder(rank, *, rngs, **shape):
    """A decoder with adapters on all linear layers of its blocks."""
    net = Decoder(**shape, rngs=rngs)
    for layer in net.layers:
        adapt(layer, rank, rngs=rngs)
    return net
