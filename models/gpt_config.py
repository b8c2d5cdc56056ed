"""The shape of a GPT."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, Self

import jax.numpy as jnp

from jaxpipe.errors import Problem
from models import validation
from models.adapters import Adapters
from models.blocks import GATED, INIT_STDDEV

_EXPERT_COUNTS = (
    "num_experts", "experts_per_token", "expert_width", "expert_every", "shared_width",
    "expert_groups", "groups_per_token", "choices_per_group",
)  # fmt: skip
_LATENT = ("query_rank", "value_size")
_LINEAR = ("linear_value_heads", "linear_key_size", "linear_value_size", "linear_conv")
_NOT_TOGETHER = [
    ("pre_norm", "residual"), ("residual_streams", "residual"), ("residual_streams", "mtp_loss"),
    ("mtp_loss", "head_bias"), ("norms_from_zero", "norm_scale"), ("rotary_size", "positions"),
    ("attention_scale", "query_scalar"), ("attention_sinks", "attention_soft_cap"),
    ("qk_clip", "qk_norm"), ("qk_clip", "attention_soft_cap"),
    ("device_capacity_factor", "capacity_factor"),
    *((name, "kv_rank") for name in (
        "qk_norm", "bias", "qkv_bias", "out_bias", "query_scalar", "attention_scale", "positions",
        "unrotated_layers", "attention_gate", "attention_sinks",
    )),
]  # fmt: skip
"""Fields that exclude each other, unless one of them has its default value."""
BIASES = ("qkv", "out", "mlp", "norm")
"""The parts of a layer that may have biases."""


class LayerKind(NamedTuple):
    """The kind of a layer of a GPT.

    Args:
      is_local: whether the layer only sees a window of tokens.
      has_experts: whether the layer has a mixture of experts in place of its MLP.
      is_further: whether the layer predicts the token after the next, behind the model's last one.
      is_rotated: whether queries and keys have rotary positions, if those of the model have.
      is_linear: whether the layer has linear attention.
    """

    is_local: bool
    has_experts: bool
    is_further: bool = False
    is_rotated: bool = True
    is_linear: bool = False


@dataclasses.dataclass(frozen=True)
class GPTConfig(validation.Validated):
    """The shape of a GPT. Options of several families compose; `docs/fine-tuning.md`.

    Args:
      vocab_size: rows of the embedding table.
      sequence_length: the longest input, in tokens.
      num_layers: transformer blocks.
      width: size of the residual stream; a multiple of ``num_heads`` unless ``head_size`` is given.
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of ``num_heads``; None means ``num_heads``.
      head_size: width of a head; None means ``width / num_heads``.
      mlp_width: hidden size of the MLP; None means 4 width for gelu, and for gated activations
        8/3 width rounded up to a multiple of 64 (equal parameters: Shazeer 2020, section 2).
      positions: "rotary" (Su et al. 2021; the two halves of a head are rotated against each other)
        or "learned".
      first_position: row of the table of learned positions for the first token (OPT).
      norm: "rms" or "layer".
      norm_scale: whether norms of the residual stream have a scale (OLMo has none).
      norms_from_zero: scales of norms are kept as their difference from 1 (Gemma, Nemotron).
      pre_norm: norms before attention and MLP (OLMo 2 has none).
      post_norm: norms after attention and MLP, before their residual sums (Gemma 2, OLMo 2).
      residual: attention and the MLP follow one another ("sequential"), or both see the layer's
        input: through one norm ("parallel": Cohere) or one each ("parallel_norms": GPT-NeoX).
      residual_streams: residual streams of each token, which small matrices mix in every layer
        (`models.streams`): copies of the embedding at first, averaged before the head.
      qk_norm: norms of queries and keys, of the kind that ``norm`` names.
      qk_norm_scope: numbers that are normalized together: those of a head, with one scale for all
        heads, before the rotation ("head": Qwen 3, Gemma 3) or after it ("rotated": Hunyuan), or
        with a scale for each head ("each": Cohere); or those of all heads ("all": OLMo 2).
      activation: "gelu" (tanh approximation, as GPT-2), "exact_gelu", "relu", "relu2" (squared) or
        "xielu" (Huang and Schlag 2024; a layer learns two numbers of it), or gated: "swiglu",
        "geglu", or "clamped_swiglu" (GPT-OSS).
      tied: one table for embedding and unembedding.
      scaled_embedding: embeddings are multiplied by the square root of ``width`` (Gemma).
      embedding_scale: further factor of embeddings (Granite).
      residual_scale: factor of both residual branches (Granite).
      logit_scale: factor of logits (Granite, Cohere).
      bias: biases in linear layers and in LayerNorm.
      qkv_bias: biases of queries, keys and values, also without ``bias`` (Qwen 2).
      out_bias: biases of attention's output map; None takes the value of ``bias``.
      mlp_bias: biases of the MLP; None takes the value of ``bias``.
      norm_bias: biases of LayerNorm; None takes the value of ``bias``.
      head_bias: a bias of every logit (Phi).
      dropout: probability, in [0, 1), for the embedding and for both residual branches. Attention
        weights are never dropped, since flash attention does not store them.
      dtype: compute dtype, "float32" or "bfloat16".
      query_scalar: attention scores are divided by its square root; None means the width of a head.
      attention_scale: factor of attention scores in place of ``query_scalar`` (Granite); None for
        none.
      attention_soft_cap: scores s become ``cap * tanh(s / cap)`` (Gemma 2); None means none.
      logit_soft_cap: the same for logits.
      attention_gate: attention's values are multiplied by sigmoids of the token, one for each
        number (Qwen3-Next).
      window: tokens that a local layer sees, its own included; None if all layers are global.
      linear_heads: key heads of linear attention by the gated delta rule (Yang et al. 2024;
        Qwen3-Next), which layers that are not global then have; None for none.
      linear_value_heads: value heads of linear attention, a multiple of ``linear_heads``; None for
        as many.
      linear_key_size: width of a key head of linear attention.
      linear_value_size: width of a value head of linear attention.
      linear_conv: tokens of the convolution before linear attention, the token's own included.
      attention_sinks: a learned logit per head in the denominator of the softmax (GPT-OSS).
      kv_rank: size of the latent vector from which a token's keys and values are made (DeepSeek-AI
        2024, section 2.1); None for keys and values of its own.
      query_rank: likewise for queries; None makes them from the residual stream.
      rotary_size: how many numbers of a head are rotated, from the first on; None for all. With
        ``kv_rank`` they come on top of ``head_size``.
      value_size: width of a head's values with ``kv_rank``.
      global_every: layer n is global if this divides n, counted from 1, and local otherwise (Gemma
        2: 2, Gemma 3: 6); None with a window or linear attention means that no layer is global.
      global_layers: numbers of the global layers, counted from 1, in place of ``global_every``.
      unrotated_layers: numbers of the layers without rotary positions (SmolLM 3, Cohere 2).
      rope_theta: base of the rotary wavelengths.
      local_rope_theta: base of the wavelengths of local layers, which are then not stretched (Gemma
        3); None for the wavelengths of global layers.
      rope_factor: factor by which rotary wavelengths are stretched.
      rope_original_length: stretch only wavelengths that do not fit often enough into so many
        tokens (Llama 3); None stretches all of them (Gemma 3).
      rope_ramp: between both factors, the stretch changes linearly with how often a wavelength fits
        ("llama3"), or with its number among a head's wavelengths ("yarn": Peng et al. 2023, section
        3.2); "yarn_whole" rounds the ends of that ramp outwards to whole numbers. "dynamic"
        stretches nothing up to ``sequence_length``, and is kept for longer texts.
      rope_mscale: scores are multiplied by (1 + 0.1 rope_mscale ln(rope_factor)) squared (YaRN).
      rope_magnitude: factor of the rotated numbers of queries and keys, except in local layers with
        wavelengths of their own.
      query_growth: queries at position p are multiplied by 1 + query_growth ln(1 + floor(p /
        rope_original_length)) (Ministral 3).
      rope_short_factors: factor of each wavelength (LongRoPE: Ding et al. 2024); None for
        ``rope_factor``.
      rope_long_factors: the same for sequences longer than ``rope_original_length``.
      rope_low_freq_factor: wavelengths that fit less often than this are stretched in full.
      rope_high_freq_factor: wavelengths that fit more often than this are kept; in between, both
        are mixed.
      norm_epsilon: added to the variance.
      num_experts: experts of a layer, each an MLP without biases; None for one MLP.
      expert_bias: biases of experts and of the router (GPT-OSS).
      experts_per_token: number of experts that a token is sent to.
      expert_width: hidden size of an expert; None means that of the MLP.
      expert_every: layer n has experts if this divides n, counted from 1, and an MLP otherwise.
      dense_layers: layers at the beginning that have an MLP in place of experts; None or 0: none.
      shared_width: hidden size of an MLP that sees every token beside the experts; None for none.
      shared_gate: multiply the shared MLP's output by a sigmoid of the token (Qwen2-MoE).
      router: function from the router's logits to scores: "softmax" over all experts, or "sigmoid".
      normalized_scores: the scores of the chosen experts are divided by their sum.
      score_factor: factor of the chosen experts' scores (DeepSeek-V3).
      expert_groups: equal groups of experts.
      choices_per_group: how many of the best scores in a group make up the group's score: 2
        (DeepSeek-V3) or 1 (DeepSeek-V2).
      groups_per_token: groups with the best scores, among whose experts a token's are chosen.
      bias_speed: each expert has a bias, added to its score only when experts are chosen, which
        `models.gpt.end_step` moves by so much towards equal use (Wang et al. 2024); None for none.
      capacity_factor: the most tokens of a device that an expert computes, as a multiple of the
        number it would be sent if all experts were used alike, rounded up. Further tokens are
        dropped, first choices last. None drops nothing.
      device_capacity_factor: without ``capacity_factor``, tokens are sent to the devices of their
        experts, once to each. A device has room for a multiple of the tokens from each device, and
        of all choices, that it would be sent if all experts were used alike; further ones are
        dropped. None gathers the tokens of all devices and drops nothing.
      balance_loss: coefficient of the loss that balances the use of experts (Fedus et al. 2022).
      z_loss: coefficient of the router's squared log-sum-exp (Zoph et al. 2022).
      qk_clip: bound on the attention scores of a head: after a step in which one is larger, the
        head's query and key weights are scaled down (`models.qk_clip`); None for no bound.
      mtp_loss: coefficient of the loss of a further layer, which predicts the token after the next
        from the last layer's output and the next token's embedding (multi-token prediction:
        DeepSeek-AI 2024, section 2.2). The layer is not counted in ``num_layers``; None for none.
      adapters: low-rank adapters of the layers' linear maps; None trains the maps themselves.
      model_type: the family of the transformers library from which `models.hugging_face` read the
        model. It is written as that family if the shape still fits. Configs that differ only in
        this field are equal.

    Raises:
      ValueError: values that do not fit together, all of them in one message.
    """

    vocab_size: int
    sequence_length: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int | None = None
    head_size: int | None = None
    mlp_width: int | None = None
    positions: Literal["rotary", "learned"] = "rotary"
    first_position: int = 0
    norm: Literal["rms", "layer"] = "rms"
    norm_scale: bool = True
    norms_from_zero: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    residual: Literal["sequential", "parallel", "parallel_norms"] = "sequential"
    residual_streams: int = 1
    qk_norm: bool = False
    qk_norm_scope: Literal["head", "rotated", "each", "all"] = "head"
    activation: Literal[
        "gelu", "exact_gelu", "relu", "relu2", "xielu", "swiglu", "geglu", "clamped_swiglu"
    ] = "swiglu"
    tied: bool = True
    scaled_embedding: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    bias: bool = False
    qkv_bias: bool = False
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_bias: bool | None = None
    head_bias: bool = False
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    query_scalar: int | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    attention_sinks: bool = False
    attention_gate: bool = False
    kv_rank: int | None = None
    query_rank: int | None = None
    rotary_size: int | None = None
    value_size: int | None = None
    window: int | None = None
    linear_heads: int | None = None
    linear_value_heads: int | None = None
    linear_key_size: int = 128
    linear_value_size: int = 128
    linear_conv: int = 4
    global_every: int | None = None
    global_layers: tuple[int, ...] | None = None
    unrotated_layers: tuple[int, ...] = ()
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    rope_factor: float = 1.0
    rope_original_length: int | None = None
    rope_ramp: Literal["llama3", "yarn", "yarn_whole", "dynamic"] = "llama3"
    rope_mscale: float = 0.0
    rope_magnitude: float = 1.0
    query_growth: float = 0.0
    rope_short_factors: tuple[float, ...] | None = None
    rope_long_factors: tuple[float, ...] | None = None
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    norm_epsilon: float = 1e-5
    num_experts: int | None = None
    experts_per_token: int = 2
    expert_width: int | None = None
    expert_every: int = 1
    expert_bias: bool = False
    dense_layers: int | None = None
    shared_width: int | None = None
    shared_gate: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalized_scores: bool = True
    score_factor: float = 1.0
    expert_groups: int = 1
    choices_per_group: int = 2
    groups_per_token: int = 1
    bias_speed: float | None = None
    capacity_factor: float | None = None
    device_capacity_factor: float | None = None
    balance_loss: float = 0.0
    z_loss: float = 0.0
    qk_clip: float | None = None
    mtp_loss: float | None = None
    adapters: Adapters | None = None
    model_type: str | None = dataclasses.field(default=None, compare=False)

    def problems(self) -> Iterator[Problem]:
        counts = ("vocab_size", "sequence_length", "num_layers", "width", "num_heads")
        optional = ("num_kv_heads", "head_size", "mlp_width", "query_scalar", "window")
        more = ("global_every", "rope_original_length", "rotary_size", "kv_rank", *_LATENT)
        dense = () if self.dense_layers == 0 else ("dense_layers",)
        small = validation.small_counts(
            self, *counts, "residual_streams", *optional, *more, "linear_heads", *_LINEAR, *dense,
            *_EXPERT_COUNTS,
        )  # fmt: skip
        yield from small
        yield from validation.wrong_choices(self)
        yield from validation.not_positive(
            self, "rope_factor", "norm_epsilon", "attention_soft_cap", "logit_soft_cap",
            "capacity_factor", "device_capacity_factor", "score_factor", "qk_clip",
            "attention_scale", "embedding_scale", "residual_scale", "logit_scale", "rope_magnitude",
        )  # fmt: skip
        yield from validation.wrong_probability(self, "dropout")
        yield from validation.without_effect(self, "window", "local_rope_theta")
        if self.linear_heads is None:
            yield from validation.without_effect(self, "window", "global_every", "global_layers")
        yield from validation.without_effect(self, "linear_heads", *_LINEAR)
        yield from self._layer_problems()
        yield from self._contradictions()
        yield from validation.negative(self, "mtp_loss", "first_position")
        yield from self._rotary_problems()
        yield from self._factor_problems()
        if self.rope_ramp != "dynamic":
            yield from validation.without_effect(self, "rope_original_length", "rope_ramp")
        if small:
            return
        yield from self._expert_problems()
        yield from self._latent_problems()
        yield from self._linear_problems()
        if self.kv_rank is not None:
            return
        if self.head_size is None and self.width % self.num_heads:
            yield validation.not_a_divisor("num_heads", self.num_heads, "width", self.width)
        elif self.rotary_size is not None:
            yield from self._rotary_size_problems(self.head_width)
        elif self.positions == "rotary" and self.head_width % 2:
            yield self._odd_heads()
        if self.num_heads % self.kv_heads:
            yield validation.not_a_divisor(
                "num_kv_heads", self.kv_heads, "num_heads", self.num_heads
            )

    def _layer_problems(self) -> Iterator[Problem]:
        """Yields numbers of layers that do not exist, and two rules for the same layers."""
        for name in ("global_layers", "unrotated_layers"):
            numbers = getattr(self, name) or ()
            if not all(1 <= number <= self.num_layers for number in numbers):
                others = {"num_layers": self.num_layers}
                yield Problem(name, numbers, "must be numbers from 1 to $num_layers", (), others)
        if self.global_layers is not None and self.global_every is not None:
            rule, others = "says the same as $global_every", {"global_every": self.global_every}
            yield Problem("global_layers", self.global_layers, rule, (None,), others)

    def _contradictions(self) -> Iterator[Problem]:
        """Yields values that another option leaves without effect or without a meaning."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        given = {n: value for n in default if (value := getattr(self, n)) != default[n]}
        wrong = [(one, other) for one, other in _NOT_TOGETHER if one in given and other in given]
        if self.norm == "rms" and not self.norm_scale:
            wrong.append(("norm_scale", "norm"))
        if "qk_norm_scope" in given and not self.qk_norm:
            wrong.append(("qk_norm_scope", "qk_norm"))
        if self.activation == "xielu" and self.num_experts is not None:
            wrong.append(("activation", "num_experts"))
        if self.first_position and self.positions == "rotary":
            wrong.append(("first_position", "positions"))
        for name, other in wrong:
            rule, others = f"cannot be combined with ${other}", {other: getattr(self, other)}
            yield Problem(name, given[name], rule, (default[name],), others)

    def _rotary_size_problems(self, most: int | None) -> Iterator[Problem]:
        """Yields a number of rotated numbers that is odd, or larger than heads."""
        size = self.rotary_size
        assert size is not None
        if size % 2:
            yield Problem(
                "rotary_size", size, "must be even", [n for n in (size - 1, size + 1) if n]
            )
        if most is not None and size > most:
            yield Problem(
                "rotary_size", size, f"must be at most {most}, the size of a head", (most,)
            )

    def _factor_problems(self) -> Iterator[Problem]:
        """Yields what is wrong with the factors of single wavelengths."""
        names = ("rope_short_factors", "rope_long_factors")
        given = {name: getattr(self, name) for name in names}
        if set(given.values()) == {None}:
            return
        for name, other in (names, names[::-1]):
            if given[name] is None:
                yield Problem(name, None, f"must be given with ${other}", (), {other: given[other]})
            elif min(given[name], default=0) <= 0:
                yield Problem(name, given[name], "must be above 0")
            elif len(given[name]) != (half := self.rotated_width // 2):
                yield Problem(name, given[name], f"must be {half} factors, one for each wavelength")
        if self.rope_factor == 1 and self.rope_original_length is None:
            rule = "must be given with $rope_short_factors"
            others = {names[0]: given[names[0]]}
            yield Problem("rope_original_length", None, rule, (), others)

    def _odd_heads(self) -> Problem:
        why = "but rotary positions need an even size"
        if self.head_size is not None:
            rule, size = f"is odd, {why}", self.head_size
            return Problem("head_size", size, rule, [s for s in (size - 1, size + 1) if s > 0])
        heads, width = self.num_heads, self.width
        rule = f"with $num_heads gives heads of {self.head_width}, {why}"
        nearest = [w for w in (width - heads, width + heads) if w > 0]
        return Problem("width", width, rule, nearest, {"num_heads": heads})

    def _rotary_problems(self) -> Iterator[Problem]:
        if self.positions != "rotary":
            others: dict[str, object] = {"positions": self.positions}
            for name in (field.name for field in dataclasses.fields(self) if "rope" in field.name):
                value, default = getattr(self, name), getattr(type(self), name)
                if value != default:
                    yield Problem(name, value, "has no effect with $positions", (default,), others)
        for name in ("rope_theta", "local_rope_theta"):
            theta = getattr(self, name)
            if theta is not None and theta <= 1:
                yield Problem(name, theta, "must be above 1: wavelengths grow by its powers")
        yield from validation.negative(self, "rope_mscale", "query_growth")
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if not 0 < low < high:
            rule = "must be above 0 and below $rope_high_freq_factor"
            others = {"rope_high_freq_factor": high}
            yield Problem("rope_low_freq_factor", low, rule, (), others)
        yield from validation.without_effect(
            self, "rope_original_length", "rope_low_freq_factor", "rope_high_freq_factor",
            "rope_mscale", "query_growth",
        )  # fmt: skip

    def _latent_problems(self) -> Iterator[Problem]:
        yield from validation.without_effect(self, "kv_rank", *_LATENT)
        if self.kv_rank is None:
            return
        given = {"kv_rank": self.kv_rank}
        for name in ("rotary_size", "value_size"):
            if getattr(self, name) is None:
                yield Problem(name, None, "must be given with $kv_rank", (), given)
        if self.kv_heads != self.num_heads:
            rule, others = "must be $num_heads with $kv_rank", {"num_heads": self.num_heads}
            near = (self.num_heads,)
            yield Problem("num_kv_heads", self.kv_heads, rule, near, others | given)
        if self.rotary_size is None or self.value_size is None:
            return
        yield from self._rotary_size_problems(None)
        if self.value_size > self.score_width:
            rule = "must be at most $head_size + $rotary_size"
            others = {"head_size": self.head_width, "rotary_size": self.rotary_size}
            yield Problem("value_size", self.value_size, rule, (self.score_width,), others)

    def _linear_problems(self) -> Iterator[Problem]:
        if self.linear_heads is None:
            return
        given = {"linear_heads": self.linear_heads}
        for name in ("window", "qk_clip"):
            if (value := getattr(self, name)) is not None:
                yield Problem(name, value, "does not go with $linear_heads", (None,), given)
        if self.value_heads % self.linear_heads:
            yield validation.not_a_divisor(
                "linear_heads", self.linear_heads, "linear_value_heads", self.value_heads
            )
        if self.linear_conv < 2:
            yield Problem("linear_conv", self.linear_conv, "must be at least 2", (2,))

    def _expert_problems(self) -> Iterator[Problem]:
        of_experts = (
            *_EXPERT_COUNTS[1:], "shared_gate", "router", "normalized_scores", "expert_bias",
            "dense_layers", "score_factor", "bias_speed",
        )  # fmt: skip
        yield from validation.without_effect(
            self, "num_experts", *of_experts, "capacity_factor", "balance_loss", "z_loss",
            "device_capacity_factor",
        )  # fmt: skip
        yield from validation.without_effect(self, "shared_width", "shared_gate")
        yield from validation.negative(self, "balance_loss", "z_loss", "bias_speed")
        if self.num_experts is None:
            return
        pairs = [("experts_per_token", "num_experts"), ("expert_every", "num_layers")]
        pairs.append(("groups_per_token", "expert_groups"))
        for name, most in pairs:
            value, limit = getattr(self, name), getattr(self, most)
            if value > limit:
                yield Problem(name, value, f"must be at most ${most}", (limit,), {most: limit})
        # The last layer with experts, counted from 1; 0 if there is none.
        last = self.num_layers - self.num_layers % self.expert_every
        if self.dense_layers is not None and self.dense_layers >= last > 0:
            others = {"num_layers": self.num_layers}
            rule, near = "leaves none of $num_layers layers with experts", (last - 1 or None,)
            yield Problem("dense_layers", self.dense_layers, rule, near, others)
        if self.num_experts % self.expert_groups:
            yield validation.not_a_divisor(
                "expert_groups", self.expert_groups, "num_experts", self.num_experts
            )
        choice = self.groups_per_token * (self.num_experts // self.expert_groups)
        if choice < self.experts_per_token <= self.num_experts:
            rule = "must be at most the experts of $groups_per_token groups"
            others = {"groups_per_token": self.groups_per_token}
            yield Problem("experts_per_token", self.experts_per_token, rule, (choice,), others)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads if self.head_size is None else self.head_size

    @property
    def rotated_width(self) -> int:
        """Numbers of a query or key head that are rotated."""
        return self.head_width if self.rotary_size is None else self.rotary_size

    @property
    def score_width(self) -> int:
        """Width of a query or key head."""
        return self.head_width + ((self.rotary_size or 0) if self.kv_rank is not None else 0)

    @property
    def score_scale(self) -> float:
        """Factor by which scores are multiplied before the softmax."""
        stretched = 1 + 0.1 * self.rope_mscale * math.log(self.rope_factor)
        if self.attention_scale is not None:
            return stretched**2 * self.attention_scale
        return stretched**2 / math.sqrt(self.query_scalar or self.score_width)

    @property
    def value_heads(self) -> int:
        """Value heads of linear attention."""
        return self.linear_value_heads or self.linear_heads or 0

    @property
    def linear_group(self) -> int:
        """Value heads of each key head of linear attention."""
        return self.value_heads // (self.linear_heads or 1)

    @property
    def linear_widths(self) -> tuple[int, int]:
        """Columns of keys, and of queries, and of values in linear attention."""
        keys = (self.linear_heads or 0) * self.linear_key_size
        return keys, self.value_heads * self.linear_value_size

    @property
    def hidden_width(self) -> int:
        if self.mlp_width is not None:
            return self.mlp_width
        return math.ceil(self.width / 24) * 64 if self.activation in GATED else 4 * self.width

    @property
    def qkv_widths(self) -> dict[str, int]:
        """Columns of queries with their gates, keys and values in the kernel that joins them."""
        keys, queries = self.kv_heads * self.head_width, self.num_heads * self.head_width
        return {"query": queries * (1 + self.attention_gate), "key": keys, "value": keys}

    def has_bias(self, part: str) -> bool:
        """Whether a part of a layer, one of `BIASES`, has biases."""
        if part == "qkv":
            return self.bias or self.qkv_bias
        own = getattr(self, f"{part}_bias")
        return self.bias if own is None else own

    @property
    def expert_hidden_width(self) -> int:
        return self.hidden_width if self.expert_width is None else self.expert_width

    def device_capacity(self, num_tokens: int) -> int | None:
        """Number of choices, of those of this many tokens per device, that a device's experts
        compute at most; None for all."""
        if self.device_capacity_factor is None:
            return None
        return math.ceil(self.device_capacity_factor * num_tokens * self.experts_per_token)

    def device_tokens(self, num_tokens: int, num_devices: int) -> int:
        """Number of tokens, of this many, that another device with a part of the experts is sent at
        most: ``device_capacity_factor`` times those of an even use, rounded up."""
        assert self.num_experts is not None
        assert self.device_capacity_factor is not None
        of_group = self.num_experts // self.expert_groups
        own, chosen = self.num_experts // num_devices, self.groups_per_token
        groups, own = max(1, own // of_group), min(own, of_group)
        ways = math.comb(self.expert_groups, chosen) * math.comb(
            chosen * of_group, self.experts_per_token
        )
        # Choices of groups, with some of the device's among them, and of experts, none of its own.
        elsewhere = sum(
            math.comb(groups, n)
            * math.comb(self.expert_groups - groups, chosen - n)
            * math.comb(chosen * of_group - n * own, self.experts_per_token)
            for n in range(min(groups, chosen) + 1)
        )
        wanted = self.device_capacity_factor * num_tokens * (1 - elsewhere / ways)
        return min(num_tokens, math.ceil(wanted))

    def expert_capacity(self, num_tokens: int) -> int:
        """Number of tokens, of this many, that an expert computes at most."""
        assert self.num_experts is not None
        assert self.capacity_factor is not None
        wanted = self.capacity_factor * num_tokens * self.experts_per_token / self.num_experts
        return min(num_tokens, math.ceil(wanted))

    @property
    def residual_stddev(self) -> float:
        """Deviation for two branches per layer that are summed (Radford et al. 2019, sec. 2.3)."""
        return INIT_STDDEV / math.sqrt(2 * self.num_layers)

    @property
    def has_states(self) -> bool:
        """Whether layers keep states."""
        return self.bias_speed is not None or self.qk_clip is not None

    @property
    def has_layer_losses(self) -> bool:
        return self.balance_loss > 0 or self.z_loss > 0

    def without_layer_losses(self) -> Self:
        """Makes the model as it is evaluated: its loss is only that of the tokens."""
        mtp_loss = None if self.mtp_loss is None else 0.0
        return dataclasses.replace(self, balance_loss=0.0, z_loss=0.0, mtp_loss=mtp_loss)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, the further one included."""
        return tuple(
            LayerKind(
                self.window is not None and not self._is_global(n),
                self._has_experts(n),
                is_further=n > self.num_layers,
                is_rotated=n not in self.unrotated_layers,
                is_linear=self.linear_heads is not None and not self._is_global(n),
            )
            for n in range(1, self.num_layers + self.num_further + 1)
        )

    @property
    def main_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer but the further one."""
        return self.layer_kinds[: self.num_layers]

    @property
    def num_further(self) -> int:
        """Number of layers behind the last that predict further tokens: 1 or 0."""
        return int(self.mtp_loss is not None)

    @property
    def layers_are_alike(self) -> bool:
        return len(set(self.layer_kinds)) == 1

    def in_pieces(self, kind: LayerKind) -> bool:
        """Whether layers of a kind can run in pieces of the sequence (`models.pieces`)."""
        is_usual = self.pre_norm and self.residual == "sequential" and self.residual_scale == 1
        is_usual = is_usual and self.residual_streams == 1
        is_dense = self.kv_rank is None and not (kind.has_experts or kind.is_linear)
        return is_usual and is_dense and self.adapters is None and not self.dropout

    def _has_experts(self, number: int) -> bool:
        if self.num_experts is None or number <= (self.dense_layers or 0):
            return False
        return number % self.expert_every == 0

    def _is_global(self, number: int) -> bool:
        if self.global_layers is not None:
            return number in self.global_layers
        return self.global_every is not None and number % self.global_every == 0

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
