"""The shape of a GPT."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import jax.numpy as jnp

from jaxpipe.errors import Problem
from models import validation


@dataclasses.dataclass(frozen=True)
class GPTConfig(validation.Validated):
    """The shape of a GPT.

    Args:
      vocab_size: rows of the embedding table.
      sequence_length: the longest input, in tokens.
      num_layers: transformer blocks.
      width: size of the residual stream, a multiple of ``num_heads``.
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of ``num_heads``; None means ``num_heads``.
      mlp_width: hidden size of the MLP; None means 4 width for gelu, and for swiglu 8/3 width
        rounded up to a multiple of 64 (equal parameters: Shazeer 2020, section 2).
      positions: "rotary" (Su et al. 2021; the two halves of a head are rotated against each other)
        or "learned".
      norm: "rms" or "layer".
      activation: "gelu" (tanh approximation, as GPT-2) or "swiglu".
      tied: one table for embedding and unembedding.
      bias: biases in linear layers and in LayerNorm.
      dropout: probability, in [0, 1), for the embedding and for both residual branches. Attention
        weights are never dropped, since flash attention does not store them.
      dtype: compute dtype, "float32" or "bfloat16".
      rope_theta: base of the rotary wavelengths.
      norm_epsilon: added to the variance.

    Raises:
      ValueError: values that do not fit together, all of them in one message.
    """

    vocab_size: int
    sequence_length: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int | None = None
    mlp_width: int | None = None
    positions: Literal["rotary", "learned"] = "rotary"
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["gelu", "swiglu"] = "swiglu"
    tied: bool = True
    bias: bool = False
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    def problems(self) -> Iterator[Problem]:
        counts = ("vocab_size", "sequence_length", "num_layers", "width", "num_heads")
        small = validation.small_counts(self, *counts, "num_kv_heads", "mlp_width")
        yield from small
        yield from validation.wrong_choices(self)
        yield from validation.not_positive(self, "rope_theta", "norm_epsilon")
        yield from validation.wrong_probability(self, "dropout")
        if small:
            return
        if self.width % self.num_heads:
            yield validation.not_a_divisor("num_heads", self.num_heads, "width", self.width)
        elif self.positions == "rotary" and self.head_width % 2:
            heads, width = self.num_heads, self.width
            rule = (
                f"with $num_heads gives heads of {self.head_width}, but rotary positions need an "
                "even size"
            )
            nearest = [w for w in (width - heads, width + heads) if w > 0]
            yield Problem("width", width, rule, nearest, {"num_heads": heads})
        if self.num_heads % self.kv_heads:
            yield validation.not_a_divisor(
                "num_kv_heads", self.kv_heads, "num_heads", self.num_heads
            )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def hidden_width(self) -> int:
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.activation == "gelu" else math.ceil(self.width / 24) * 64

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @classmethod
    def gpt2_124m(cls) -> GPTConfig:
        """GPT-2 small (Radford et al. 2019, table 2), without dropout: 124,439,808 parameters."""
        return cls(
            vocab_size=50257, sequence_length=1024, num_layers=12, width=768, num_heads=12,
            positions="learned", norm="layer", activation="gelu", tied=True, bias=True,
        )  # fmt: skip

    @classmethod
    def llama_7b(cls) -> GPTConfig:
        """Llama 7B (Touvron et al. 2023, table 2): 6,738,415,616 parameters."""
        return cls(
            vocab_size=32000, sequence_length=2048, num_layers=32, width=4096, num_heads=32,
            mlp_width=11008, tied=False, norm_epsilon=1e-6,
        )  # fmt: skip
