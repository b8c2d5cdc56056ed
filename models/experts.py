"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017; Fedus et al. 2022).

    weights = router(x)                       [tokens, experts], 0 for experts that are not chosen
    y = sum over experts of weight * expert(x)   [+ shared(x)]

Every expert computes every token, and the weights of experts that were not chosen are 0. Shapes do
not depend on the routing, no token is dropped, and each expert's weights lie along the first
dimension of the kernels. Dimension suffixes: T tokens, X experts, K chosen experts, E width, F
hidden width of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.blocks import ACTIVATIONS, INIT_STDDEV, Linear, einsum
from models.gpt_config import GPTConfig


class Routing(NamedTuple):
    """What the router decides for a group of tokens.

    Args:
      weights: float32 [tokens, experts], by which the outputs of the experts are multiplied.
      loss: of the layer, float32; None if the config asks for none.
    """

    weights: jax.Array
    loss: jax.Array | None


class Router(nnx.Module):
    """Chooses experts for every token by their scores, which are computed in float32."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        assert config.num_experts is not None
        self.config = config
        shape = (config.width, config.num_experts)
        self.kernel = nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape))

    def __call__(self, x_TE) -> Routing:
        config = self.config
        logits_TX = x_TE.astype(jnp.float32) @ self.kernel[...]
        sigmoid = config.router == "sigmoid"
        scores_TX = jax.nn.sigmoid(logits_TX) if sigmoid else jax.nn.softmax(logits_TX)
        scores_TK, chosen_TK = jax.lax.top_k(scores_TX, config.experts_per_token)
        if config.normalized_scores:
            scores_TK = scores_TK / scores_TK.sum(axis=-1, keepdims=True)
        is_chosen_TKX = jax.nn.one_hot(chosen_TK, logits_TX.shape[-1])
        weights_TX = jnp.einsum("tk,tkx->tx", scores_TK, is_chosen_TKX)
        if not config.has_layer_losses:
            return Routing(weights_TX, None)
        shares_TX = scores_TX / scores_TX.sum(axis=-1, keepdims=True)
        balance = balance_loss(shares_TX, is_chosen_TKX.sum(axis=1))
        z_loss = jnp.mean(jax.nn.logsumexp(logits_TX, axis=-1) ** 2)
        return Routing(weights_TX, config.balance_loss * balance + config.z_loss * z_loss)


def balance_loss(shares_TX: jax.Array, is_chosen_TX: jax.Array) -> jax.Array:
    """Experts times the sum of the products of mean share and mean use (Fedus et al. 2022, eq. 4).

    If all experts are used alike, it is the number of experts per token.
    """
    return shares_TX.shape[-1] * jnp.sum(shares_TX.mean(axis=0) * is_chosen_TX.mean(axis=0))


class _ExpertLinear(nnx.Module):
    """One matrix per expert, [experts, in, out]."""

    def __init__(self, num_experts: int, shape: tuple[int, int], stddev: float, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(stddev * jax.random.normal(rngs.params(), (num_experts, *shape)))


class Experts(nnx.Module):
    """The MLPs of all experts, without biases."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        count, width, hidden = config.num_experts, config.width, config.expert_hidden_width
        assert count is not None
        gated, self.activation = ACTIVATIONS[config.activation]
        self.up = _ExpertLinear(count, (width, hidden), INIT_STDDEV, rngs=rngs)
        self.gate = (
            _ExpertLinear(count, (width, hidden), INIT_STDDEV, rngs=rngs)
            if gated
            else nnx.data(None)
        )
        self.down = _ExpertLinear(count, (hidden, width), config.residual_stddev, rngs=rngs)

    def __call__(self, x_TE, weights_TX):
        """The weighted sum of all experts' outputs."""
        hidden_TXF = einsum("te,xef->txf", x_TE, self.up.kernel[...])
        if self.gate is None:
            hidden_TXF = self.activation(hidden_TXF)
        else:
            gate_TXF = einsum("te,xef->txf", x_TE, self.gate.kernel[...])
            hidden_TXF = self.activation(gate_TXF) * hidden_TXF
        hidden_TXF = hidden_TXF * weights_TX[..., None].astype(x_TE.dtype)
        return einsum("txf,xfe->te", hidden_TXF, self.down.kernel[...])


class Mixture(nnx.Module):
    """Router, experts, and an MLP that sees every token if ``config.shared_width`` is given.

    Args:
      config: the model's shape.
      shared: that MLP, or None.
      rngs: draws the parameters.
    """

    def __init__(self, config: GPTConfig, shared: nnx.Module | None, *, rngs: nnx.Rngs):
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        self.shared = nnx.data(shared)
        self.shared_gate = (
            Linear(config.width, 1, bias=False, stddev=INIT_STDDEV, rngs=rngs)
            if config.shared_gate
            else nnx.data(None)
        )

    def __call__(self, x_BSE) -> tuple[jax.Array, jax.Array | None]:
        """The output, and the loss of the layer or None."""
        x_TE = x_BSE.reshape(-1, x_BSE.shape[-1])
        routing = self.router(x_TE)
        y_BSE = self.experts(x_TE, routing.weights).reshape(x_BSE.shape)
        if self.shared is not None:
            shared_BSE = self.shared(x_BSE)
            if self.shared_gate is not None:
                shared_BSE = jax.nn.sigmoid(self.shared_gate(x_BSE)) * shared_BSE
            y_BSE = y_BSE + shared_BSE
        return y_BSE, routing.loss
