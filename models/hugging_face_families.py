"""The families of the transformers library that can be read and written: a table.

An entry of a decoder says, beside the names of fields and modules, what all its models share. What
one field of theirs means, see `models.hugging_face_family`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from models import bert, gpt, resnet
from models.bert import BERTConfig
from models.blocks import XIELU
from models.gpt_config import GPTConfig
from models.hugging_face_family import (
    GELU,
    Decoder,
    Family,
    Meaning,
    Modules,
    activation,
    biases,
    chosen_by_bias,
    dense_first,
    divisor,
    dropout,
    flag,
    further_layer,
    linear_layers,
    read_value,
    rotary,
    shared_experts,
    unlike,
    unrotated,
    windows,
)
from models.hugging_face_fields import Fields, TokenIds
from models.hugging_face_files import Fused
from models.resnet import ResNetConfig

Config = GPTConfig | BERTConfig | ResNetConfig


def _experts(shared: str = "shared_experts", **others: str | tuple[str, ...]) -> Modules:
    """Names the modules of a mixture of experts."""
    kinds = ("up", "gate", "down")
    return {
        "mlp/router": "mlp.gate",
        "mlp/router/selection/bias": "=mlp.gate.e_score_correction_bias",
        **{f"mlp/experts/{kind}": f"mlp.experts.{{}}.{kind}_proj" for kind in kinds},
        **{f"mlp/shared/{kind}": f"mlp.{shared}.{kind}_proj" for kind in kinds},
        **{f"mlp/{ours}": theirs for ours, theirs in others.items()},
    }


def _neox(attention: str) -> Modules:
    """Names the modules of GPT-NeoX, and of those that call its attention differently."""
    return {
        "attention_norm": "input_layernorm", "attention/qkv": f"{attention}.query_key_value",
        "attention/out": f"{attention}.dense", "mlp_norm": "post_attention_layernorm",
        "mlp/up": "mlp.dense_h_to_4h", "mlp/down": "mlp.dense_4h_to_h",
    }  # fmt: skip


def _neighbors(config: GPTConfig) -> np.ndarray:
    """Orders heads whose rotary positions turn neighboring numbers; ours turn two halves."""
    width, rotated = config.head_width, config.rotated_width
    turned = np.arange(width)
    turned[:rotated] = turned[:rotated].reshape(-1, 2).T.reshape(-1)
    heads = [turned] * (config.num_heads + config.kv_heads) + [np.arange(width)] * config.kv_heads
    return (np.arange(len(heads))[:, None] * width + np.stack(heads)).reshape(-1)


def _groups(config: GPTConfig) -> np.ndarray:
    """Orders heads that lie by groups there: some queries, then their key and their value."""
    count = config.num_heads // config.kv_heads
    shape = (config.kv_heads, count + 2, config.head_width)
    rows = np.arange(np.prod(shape)).reshape(shape)
    parts = rows[:, :count], rows[:, count], rows[:, count + 1]
    return np.concatenate([part.reshape(-1) for part in parts])


def _gates(config: GPTConfig) -> np.ndarray:
    """Orders queries each of which has its gate beside it there."""
    widths = config.qkv_widths
    numbers = np.arange(sum(widths.values()))
    queries = numbers[: widths["query"]].reshape(config.num_heads, 2, -1).swapaxes(0, 1)
    return np.concatenate((queries.reshape(-1), numbers[widths["query"] :]))


def _falcon() -> Meaning:
    """Falcon's three architectures: their norms, and how many heads their keys have."""

    def read(fields: Fields) -> dict[str, Any]:
        heads = fields.size("num_attention_heads")
        fields = fields.completed(parallel_attn=True, multi_query=True)
        is_parallel, is_multi = fields.flag("parallel_attn"), fields.flag("multi_query")
        if not fields.flag("new_decoder_architecture"):
            residual = "parallel" if is_parallel else "sequential"
            return {"num_kv_heads": 1 if is_multi else heads, "residual": residual}
        fields.require(parallel_attn=(True,), num_ln_in_parallel_attn=(None, 2, 1))
        has_one = fields.get("num_ln_in_parallel_attn", None) == 1
        residual = "parallel" if has_one else "parallel_norms"
        return {"num_kv_heads": fields.size_or_none("num_kv_heads") or heads, "residual": residual}

    def is_new(config: GPTConfig) -> bool:
        return config.kv_heads not in (1, config.num_heads) or config.residual == "parallel_norms"

    def write(config: GPTConfig) -> dict[str, Any]:
        norms = 1 if config.residual == "parallel" else 2
        return {
            "new_decoder_architecture": is_new(config),
            "multi_query": config.kv_heads == 1,
            "num_kv_heads": config.kv_heads if is_new(config) else config.num_heads,
            "parallel_attn": config.residual != "sequential",
            "num_ln_in_parallel_attn": norms if is_new(config) else None,
        }

    def misfits(config: GPTConfig) -> list[str]:
        return ["residual"] if is_new(config) and config.residual == "sequential" else []

    return Meaning(("num_kv_heads", "residual"), read, write, misfits)


def _whole_queries(config: GPTConfig) -> Modules:
    return {} if config.query_rank is not None else {"attention/query": "self_attn.q_proj"}


def _falcon_norms(config: GPTConfig) -> Modules:
    if config.residual != "parallel_norms":
        return {}
    return {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


def _hunyuan_experts() -> Meaning:
    """As many experts for each token in all layers, and a shared one as wide as each."""

    def read(fields: Fields) -> dict[str, Any]:
        if isinstance(choices := fields.get("moe_topk"), list) and choices:
            fields.require(moe_topk=(choices[:1] * fields.layers("num_hidden_layers"),))
            fields = fields.extended(moe_topk=choices[0])
        return {
            "experts_per_token": fields.size("moe_topk"),
            "shared_width": fields.size("intermediate_size"),
        }

    return Meaning(
        ("experts_per_token", "shared_width"),
        read,
        lambda config: {"moe_topk": config.experts_per_token},
        lambda config: [] if config.shared_width == config.hidden_width else ["shared_width"],
    )


def _limited_groups() -> Meaning:
    """DeepSeek-V2's groups of experts, each as good as its best one; or none."""
    ours, method = ("expert_groups", "groups_per_token"), "topk_method"
    limited = "group_limited_greedy"

    def read(fields: Fields) -> dict[str, Any]:
        fields.require(**{method: ("greedy", limited)})
        if fields.get(method, "greedy") != limited:
            return {}
        counts = fields.size("n_group"), fields.size("topk_group")
        return {**dict(zip(ours, counts, strict=True)), "choices_per_group": 1}

    def misfits(config: GPTConfig) -> list[str]:
        fits = config.expert_groups == 1 or config.choices_per_group == 1
        return [] if fits else ["choices_per_group"]

    def write(config: GPTConfig) -> dict[str, Any]:
        method_is = "greedy" if config.expert_groups == 1 else limited
        counts = {"n_group": config.expert_groups, "topk_group": config.groups_per_token}
        return {method: method_is, **counts}

    return Meaning((*ours, "choices_per_group"), read, write, misfits)


def _mlp_only_layers() -> Meaning:
    """Layers without experts, of which only the first ones can be read."""
    name = "mlp_only_layers"

    def read(fields: Fields) -> dict[str, Any]:
        layers = fields.get(name, None)
        count = len(layers) if isinstance(layers, list) else 0
        fields.require(**{name: (list(range(count)), None)})
        return {"dense_layers": count or None}

    return Meaning(
        ("dense_layers",), read, lambda config: {name: list(range(config.dense_layers or 0))}
    )


# What several decoders share.
# fmt: off
_ENDS: Modules = {
    "embed/table": "model.embed_tokens", "head/norm": "model.norm", "head/table": "lm_head",
    "head/bias": "=lm_head.bias",
}
_LLAMA: Modules = {
    "attention_norm": "input_layernorm",
    "attention/qkv": tuple(f"self_attn.{name}_proj" for name in "qkv"),
    "attention/out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    **{f"mlp/{name}": f"mlp.{name}_proj" for name in ("up", "gate", "down")},
}
_QK_NORMS: Modules = {
    "attention/query_norm": "self_attn.q_norm", "attention/key_norm": "self_attn.k_norm",
}
_QK_LAYERNORMS: Modules = {
    "attention/query_norm": "self_attn.q_layernorm", "attention/key_norm": "self_attn.k_layernorm",
}
_HUNYUAN_NORMS: Modules = {
    "attention/query_norm": "self_attn.query_layernorm",
    "attention/key_norm": "self_attn.key_layernorm",
}
_POST_NORMS: Modules = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_FOUR_NORMS: Modules = _POST_NORMS | {"mlp_norm": "pre_feedforward_layernorm"}
_MIXTRAL: Modules = {
    "mlp/router": "block_sparse_moe.gate", "mlp/experts/up": "block_sparse_moe.experts.{}.w3",
    "mlp/experts/gate": "block_sparse_moe.experts.{}.w1",
    "mlp/experts/down": "block_sparse_moe.experts.{}.w2",
    "mlp/router/selection/bias": "=block_sparse_moe.e_score_correction_bias",
}
_GRANITE_MOE: Modules = {
    "mlp/router": "block_sparse_moe.router.layer",
    **{f"mlp/experts/{kind}": f"experts.{kind}" for kind in ("up", "gate", "down")},
    **{f"mlp/shared/{kind}": f"shared_mlp.{kind}" for kind in ("up", "gate")},
    "mlp/shared/down": "shared_mlp.output_linear",
}
_LATENT: Modules = {
    "attention/latent": "self_attn.kv_a_proj_with_mqa",
    "attention/latent_norm": "self_attn.kv_a_layernorm",
    "attention/key_value": "self_attn.kv_b_proj", "attention/query_down": "self_attn.q_a_proj",
    "attention/query_norm": "self_attn.q_a_layernorm", "attention/query": "self_attn.q_b_proj",
}
_LINEAR: Modules = {
    **{f"linear_attention/{name}": f"linear_attn.in_proj_{name}" for name in ("qkvz", "ba")},
    "linear_attention/conv": "linear_attn.conv1d", "linear_attention/norm": "linear_attn.norm",
    "linear_attention/a_log": "=linear_attn.A_log", "linear_attention/dt_bias":
    "=linear_attn.dt_bias", "linear_attention/out": "linear_attn.out_proj",
}
_FURTHER: Modules = {
    "hidden_norm": "hnorm", "embedding_norm": "enorm", "projection": "eh_proj",
    "further_norm": "shared_head.norm",
}
_GPT: Modules = {
    "attention_norm": "ln_1", "attention/qkv": "attn.c_attn", "attention/out": "attn.c_proj",
    "mlp_norm": "ln_2", "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj",
}
_GPT_ENDS: Modules = {
    "embed/table": "transformer.wte", "embed/positions": "transformer.wpe",
    "head/norm": "transformer.ln_f",
}
_GATE_UP = (Fused(".mlp.gate_up_proj.weight", (".mlp.gate_proj.weight", ".mlp.up_proj.weight")),)
_GRANITE_FUSED = (
    Fused(".block_sparse_moe.input_linear.weight", (".experts.gate.weight", ".experts.up.weight"),
          axis=1, turn=(1, 2, 0)),
    Fused(".block_sparse_moe.output_linear.weight", (".experts.down.weight",), axis=1,
          turn=(1, 2, 0)),
    Fused(".shared_mlp.input_linear.weight", (".shared_mlp.gate.weight", ".shared_mlp.up.weight")),
)
_GPT_OSS_FUSED = (
    Fused(".mlp.experts.gate_up_proj", (".mlp.experts.gate.weight", ".mlp.experts.up.weight"),
          axis=-1, alternate=True, turn=(2, 1, 0)),
    Fused(".mlp.experts.gate_up_proj_bias", (".mlp.experts.gate.bias", ".mlp.experts.up.bias"),
          axis=-1, alternate=True),
    Fused(".mlp.experts.down_proj", (".mlp.experts.down.weight",), axis=-1, turn=(2, 1, 0)),
    Fused(".mlp.experts.down_proj_bias", (".mlp.experts.down.bias",), axis=-1),
)
_GPT_NAMES: dict[str, Any] = {
    "sequence_length": "n_positions", "num_layers": "n_layer", "width": "n_embd",
    "num_heads": "n_head", "mlp_width": "n_inner", "norm_epsilon": "layer_norm_epsilon",
    "num_kv_heads": None, "head_size": None,
}
_LAYER_NORM_EPS = {"norm_epsilon": "layer_norm_eps"}
_NO_HEAD_SIZE = {"head_size": None}
_WINDOW = {"window": "sliding_window"}
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
}
_NO_MULTIPLIERS = dict.fromkeys((*_MULTIPLIERS.values(), "logits_scaling"), 1.0)
_CHOICES = {"experts_per_token": "num_experts_per_tok"}
_EXPERTS: dict[str, Any] = {
    **_CHOICES, "num_experts": ("num_experts", "num_local_experts"),
    "balance_loss": "router_aux_loss_coef",
}
_LOCAL_EXPERTS = _EXPERTS | {"num_experts": "num_local_experts"}
_QWEN_EXPERTS = _EXPERTS | {
    "expert_width": "moe_intermediate_size", "expert_every": "decoder_sparse_step",
    "normalized_scores": "norm_topk_prob",
}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}
_QWEN_MOE_DEFAULTS = {"decoder_sparse_step": 1, "router_aux_loss_coef": 0.001}
_DEEPSEEK_EXPERTS: dict[str, Any] = _CHOICES | {
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "expert_width": "moe_intermediate_size", "expert_groups": "n_group",
    "groups_per_token": "topk_group", "normalized_scores": "norm_topk_prob",
    "score_factor": "routed_scaling_factor",
}
_DEEPSEEK_DEFAULTS = {
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}
_DEEPSEEK_MEANINGS = (shared_experts("n_shared_experts"), dense_first(), chosen_by_bias())
_LATENT_FIELDS = {
    "head_size": "qk_nope_head_dim", "rotary_size": "qk_rope_head_dim", "value_size": "v_head_dim",
    "kv_rank": "kv_lora_rank", "query_rank": "q_lora_rank",
}
_LINEAR_FIELDS = {
    "linear_heads": "linear_num_key_heads", "linear_value_heads": "linear_num_value_heads",
    "linear_key_size": "linear_key_head_dim", "linear_value_size": "linear_value_head_dim",
    "linear_conv": "linear_conv_kernel_dim",
}
_LINEAR_DEFAULTS = dict(zip(_LINEAR_FIELDS.values(), (16, 32, 128, 128, 4), strict=True))
_LATENT_NEEDED = ("rotary_size", "value_size", "kv_rank", "num_experts", "expert_width")
_OF_LAYER_NORM = {"norm": "layer"}
_OF_OLMO_2 = {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_scope": "all"}
_ROTARY, _SILU, _NO_BIASES = rotary(), activation(), biases()
_ATTENTION_BIASES = biases(qkv="attention_bias", out="attention_bias")
_ATTENTION_AND_MLP = biases(qkv="attention_bias", out="attention_bias", mlp="mlp_bias")
_ALL_BIASES = biases(qkv=True, out=True, mlp=True, norm=True)
_GEMMA = {"scaled_embedding": True, "norms_from_zero": True}
_GEMMA_2 = _GEMMA | {"activation": "geglu", "post_norm": True}
_GEMMA_FIELDS = {
    "query_scalar": "query_pre_attn_scalar", "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
}
_GEMMA_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,),
    "use_bidirectional_attention": (False, None),
}
_GEMMA_DEFAULTS = {
    "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_2_DEFAULTS = _GEMMA_DEFAULTS | {
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}
# fmt: on


def _decoder(
    name: str,
    modules: Modules,
    *meanings: Meaning,
    rope: Meaning | None = _ROTARY,
    act: Meaning | None = _SILU,
    bias: Meaning = _NO_BIASES,
    fixed: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    needed: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    required: Mapping[str, tuple[Any, ...]] | None = None,
    defaults: Mapping[str, Any] | None = None,
    layer: str = "model.layers.{}",
    ends: Modules | None = None,
    renamed: Callable[[GPTConfig], Modules] = lambda config: {},
    unread: tuple[str, ...] = (),
    **options: Any,
) -> Family:
    """Makes a family of decoders; ``options`` are further fields of `Family`.

    ``modules`` are those of a ``layer``, ``ends`` those outside that are not named as Llama's, and
    ``renamed`` names those of a layer again that depend on the model.
    """
    given = tuple(meaning for meaning in (rope, act, bias, *meanings) if meaning is not None)
    decoder = Decoder(
        name, fixed or {}, fields or {}, given, needed, optional, required or {}, defaults or {}
    )

    def all_modules(config: GPTConfig) -> Modules:
        named = {**_ENDS, **(ends or {})}
        for ours, theirs in {**modules, **renamed(config)}.items():
            names = (theirs,) if isinstance(theirs, str) else theirs
            named[f"layers/{ours}"] = tuple(
                f"={layer}.{one[1:]}" if one.startswith("=") else f"{layer}.{one}" for one in names
            )
        if config.mtp_loss is not None:  # the last norm of the model lies in the further layer
            named["layers/final_norm"] = named["head/norm"]
        return named

    return Family(
        kind=GPTConfig,
        misfits=decoder.misfits,
        read=decoder.read,
        write=decoder.write,
        modules=all_modules,
        init=gpt.init,
        layer=layer,
        unread=(".rotary_emb.inv_freq", "lm_head.weight", *unread),
        **options,
    )


# fmt: off
DECODERS = {
    "gpt2": _decoder(
        "GPT2LMHeadModel", _GPT, dropout("resid_pdrop", "embd_pdrop", default=0.1), rope=None,
        act=activation({"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}, "activation_function"),
        bias=_ALL_BIASES, fixed=_OF_LAYER_NORM | {"positions": "learned"}, fields=_GPT_NAMES,
        required={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,), "tie_word_embeddings": (True,)},
        optional=("mlp_width",),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}, layer="h.{}",
        ends={"embed/table": "wte", "embed/positions": "wpe", "head/norm": "ln_f"},
        prefix="transformer.", kernels_as_ours=True, unread=(".attn.bias", ".attn.masked_bias"),
        token_ids=TokenIds(50256, 50256),
    ),
    "llama": _decoder(
        "LlamaForCausalLM", _LLAMA, bias=_ATTENTION_AND_MLP, token_ids=TokenIds(1, 2),
    ),
    "qwen2": _decoder(
        "Qwen2ForCausalLM", _LLAMA, windows(switch="use_sliding_window"), bias=biases(qkv=True),
        token_ids=TokenIds(),
    ),
    "qwen3": _decoder(
        "Qwen3ForCausalLM", _LLAMA | _QK_NORMS, windows(switch="use_sliding_window"),
        bias=_ATTENTION_BIASES, fixed={"qk_norm": True}, defaults={"head_dim": 128},
        token_ids=TokenIds(),
    ),
    "gemma2": _decoder(
        "Gemma2ForCausalLM", _LLAMA | _FOUR_NORMS, windows(2), act=None, fixed=_GEMMA_2,
        fields=_GEMMA_FIELDS, needed=("window", "query_scalar"), required=_GEMMA_REQUIRED,
        defaults=_GEMMA_2_DEFAULTS, token_ids=TokenIds(2, 1, 0),
    ),
    "gemma3_text": _decoder(
        "Gemma3ForCausalLM", _LLAMA | _FOUR_NORMS | _QK_NORMS, windows(6),
        rope=rotary(two_thetas=True), act=None, fixed=_GEMMA_2 | {"qk_norm": True},
        fields=_GEMMA_FIELDS, needed=("window", "query_scalar"), required=_GEMMA_REQUIRED,
        defaults=_GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 131_072}, token_ids=TokenIds(2, 1, 0),
    ),
    "mixtral": _decoder(
        "MixtralForCausalLM", _LLAMA | _MIXTRAL, fields=_LOCAL_EXPERTS | _WINDOW,
        needed=("num_experts",), required={"router_jitter_noise": (0.0,)},
        defaults={"rope_theta": 1e6, "router_aux_loss_coef": 0.001}, token_ids=TokenIds(1, 2),
    ),
    "qwen2_moe": _decoder(
        "Qwen2MoeForCausalLM",
        _LLAMA | _experts("shared_expert", shared_gate="mlp.shared_expert_gate"),
        _mlp_only_layers(), bias=biases(qkv="qkv_bias"), fixed={"shared_gate": True},
        fields=_QWEN_EXPERTS | {"shared_width": "shared_expert_intermediate_size"},
        needed=("num_experts", "shared_width", "expert_width"), required=_NO_WINDOW,
        defaults=_QWEN_MOE_DEFAULTS | {"qkv_bias": True}, token_ids=TokenIds(),
    ),
    "qwen3_moe": _decoder(
        "Qwen3MoeForCausalLM", _LLAMA | _QK_NORMS | _experts(), _mlp_only_layers(),
        bias=_ATTENTION_BIASES, fixed={"qk_norm": True}, fields=_QWEN_EXPERTS,
        needed=("num_experts", "expert_width"), required=_NO_WINDOW, defaults=_QWEN_MOE_DEFAULTS,
        token_ids=TokenIds(),
    ),
    "qwen3_next": _decoder(
        "Qwen3NextForCausalLM",
        _LLAMA | _QK_NORMS | _LINEAR |
            _experts("shared_expert", shared_gate="mlp.shared_expert_gate"),
        _mlp_only_layers(), linear_layers(4), rope=rotary("partial_rotary_factor", share=0.25),
        act=activation({"silu": "swiglu"}), bias=_ATTENTION_BIASES,
        fixed={"shared_gate": True, "qk_norm": True, "norms_from_zero": True,
            "attention_gate": True},
        fields=_QWEN_EXPERTS | _LINEAR_FIELDS | {"shared_width": "shared_expert_intermediate_size"},
        needed=("num_experts", "shared_width", "expert_width", "linear_heads"),
        defaults=_QWEN_MOE_DEFAULTS | _LINEAR_DEFAULTS, order=_gates, unread=("mtp.",),
        token_ids=TokenIds(),
    ),
    "gpt_oss": _decoder(
        "GptOssForCausalLM",
        _LLAMA | {"attention/sinks": "=self_attn.sinks", "mlp/router": "mlp.router",
            **{f"mlp/experts/{name}": f"mlp.experts.{name}" for name in ("up", "gate", "down")}},
        windows(2), act=None, bias=biases(qkv=True, out=True, mlp=True),
        fixed={"activation": "clamped_swiglu", "attention_sinks": True, "expert_bias": True},
        fields=_LOCAL_EXPERTS, needed=("num_experts", "window"),
        required={"hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,)},
        defaults={"head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0,
            "router_aux_loss_coef": 0.001}, token_ids=TokenIds(), fused=_GPT_OSS_FUSED,
    ),
    "deepseek_v3": _decoder(
        "DeepseekV3ForCausalLM", _LLAMA | _LATENT | _experts() | _FURTHER, *_DEEPSEEK_MEANINGS,
        further_layer(), rope=rotary(latent=True), fixed={"router": "sigmoid"},
        fields=_DEEPSEEK_EXPERTS | _LATENT_FIELDS, needed=(*_LATENT_NEEDED, "shared_width"),
        required={"attention_bias": (False,), "rope_interleave": (True,),
            "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
        defaults={"norm_topk_prob": True},
        renamed=_whole_queries,
        unread=(".embed_tokens.weight", ".shared_head.head.weight"), token_ids=TokenIds(0, 1),
        init_state=gpt.init_state,
    ),
    "mistral": _decoder(
        "MistralForCausalLM", _LLAMA, fields=_WINDOW, defaults={"sliding_window": 4096},
        token_ids=TokenIds(1, 2),
    ),
    "ministral": _decoder("MinistralForCausalLM", _LLAMA, windows(), token_ids=TokenIds(1, 2)),
    "ministral3": _decoder(
        "Ministral3ForCausalLM", _LLAMA, rope=rotary(growth="llama_4_scaling_beta"), fields=_WINDOW,
        token_ids=TokenIds(1, 2),
    ),
    "cwm": _decoder("CwmForCausalLM", _LLAMA, windows(4), token_ids=TokenIds(128000)),
    "phi3": _decoder(
        "Phi3ForCausalLM", _LLAMA | {"attention/qkv": "self_attn.qkv_proj"},
        dropout("resid_pdrop", "embd_pdrop"),
        rope=rotary("partial_rotary_factor", kinds=("default", "longrope")),
        fields=_NO_HEAD_SIZE | _WINDOW, fused=_GATE_UP, token_ids=TokenIds(1, 32000, 32000),
    ),
    "olmo": _decoder(
        "OlmoForCausalLM", _LLAMA,
        bias=biases(qkv="attention_bias", out="attention_bias", norm=False),
        fixed=_OF_LAYER_NORM | {"norm_scale": False}, fields=_NO_HEAD_SIZE | {"norm_epsilon": None},
        required={"clip_qkv": (None,)}, token_ids=TokenIds(None, 50279, 1),
    ),
    "olmo2": _decoder(
        "Olmo2ForCausalLM", _LLAMA | _QK_NORMS | _POST_NORMS, bias=_ATTENTION_BIASES,
        fixed=_OF_OLMO_2,
        fields=_NO_HEAD_SIZE, token_ids=TokenIds(None, 50279, 1),
    ),
    "olmo3": _decoder(
        "Olmo3ForCausalLM", _LLAMA | _QK_NORMS | _POST_NORMS, windows(4),
        rope=rotary(two_thetas=True), bias=_ATTENTION_BIASES,
        fixed=_OF_OLMO_2,
        fields=_NO_HEAD_SIZE, defaults={"sliding_window": 4096}, token_ids=TokenIds(None, 50279, 1),
    ),
    "olmoe": _decoder(
        "OlmoeForCausalLM", _LLAMA | _QK_NORMS | _experts(), bias=_ATTENTION_BIASES,
        fixed={"qk_norm": True, "qk_norm_scope": "all"},
        fields=_EXPERTS | _NO_HEAD_SIZE | {"normalized_scores": "norm_topk_prob"},
        needed=("num_experts",), required={"clip_qkv": (None,)},
        defaults={"router_aux_loss_coef": 0.01}, token_ids=TokenIds(None, 50279, 1),
    ),
    "flex_olmo": _decoder(
        "FlexOlmoForCausalLM", _LLAMA | _QK_NORMS | _experts() | _POST_NORMS,
        bias=_ATTENTION_BIASES,
        fixed=_OF_OLMO_2,
        fields=_EXPERTS | _NO_HEAD_SIZE | {"normalized_scores": "norm_topk_prob"},
        needed=("num_experts",), defaults={"router_aux_loss_coef": 0.01},
        token_ids=TokenIds(None, 100257, 100277),
    ),
    "smollm3": _decoder(
        "SmolLM3ForCausalLM", _LLAMA, unrotated(), windows(switch="use_sliding_window"),
        rope=rotary(some=True), bias=_ATTENTION_AND_MLP,
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
        token_ids=TokenIds(128000, 128001, 128004),
    ),
    "granite": _decoder(
        "GraniteForCausalLM", _LLAMA, divisor("logit_scale", "logits_scaling"),
        bias=_ATTENTION_AND_MLP, fields=_MULTIPLIERS | _NO_HEAD_SIZE, needed=("attention_scale",),
        defaults=_NO_MULTIPLIERS, token_ids=TokenIds(1, 2),
    ),
    "granitemoe": _decoder(
        "GraniteMoeForCausalLM", _LLAMA | _GRANITE_MOE, divisor("logit_scale", "logits_scaling"),
        bias=_ATTENTION_BIASES, fields=_MULTIPLIERS | _LOCAL_EXPERTS | _NO_HEAD_SIZE,
        needed=("attention_scale", "num_experts"),
        defaults=_NO_MULTIPLIERS | {"router_aux_loss_coef": 0.001}, fused=_GRANITE_FUSED,
        token_ids=TokenIds(1, 2),
    ),
    "granitemoeshared": _decoder(
        "GraniteMoeSharedForCausalLM", _LLAMA | _GRANITE_MOE,
        divisor("logit_scale", "logits_scaling"), bias=_ATTENTION_BIASES,
        fields=_MULTIPLIERS | _LOCAL_EXPERTS | _NO_HEAD_SIZE |
            {"shared_width": "shared_intermediate_size"},
        needed=("attention_scale", "num_experts", "shared_width"),
        defaults=_NO_MULTIPLIERS | {"router_aux_loss_coef": 0.001}, fused=_GRANITE_FUSED,
        token_ids=TokenIds(1, 2),
    ),
    "hyperclovax": _decoder(
        "HyperCLOVAXForCausalLM",
        _LLAMA | {"attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"},
        divisor("logit_scale", "logits_scaling"), bias=_ATTENTION_AND_MLP,
        fixed={"post_norm": True}, fields=_MULTIPLIERS, needed=("attention_scale",),
        required={"use_post_norm": (True,)}, token_ids=TokenIds(),
    ),
    "glm": _decoder(
        "GlmForCausalLM", _LLAMA, rope=rotary("partial_rotary_factor", share=0.5),
        bias=biases(qkv="attention_bias"), defaults={"head_dim": 128}, fused=_GATE_UP,
        order=_neighbors, token_ids=TokenIds(None, None, 151329),
    ),
    "glm4": _decoder(
        "Glm4ForCausalLM",
        _LLAMA | {"attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm"}, rope=rotary("partial_rotary_factor", share=0.5),
        bias=biases(qkv="attention_bias"), fixed={"post_norm": True}, defaults={"head_dim": 128},
        fused=_GATE_UP, order=_neighbors, token_ids=TokenIds(None, None, 151329),
    ),
    "glm4_moe": _decoder(
        "Glm4MoeForCausalLM", _LLAMA | _QK_NORMS | _experts() | _FURTHER, *_DEEPSEEK_MEANINGS,
        further_layer(), flag("use_qk_norm", qk_norm=True),
        rope=rotary("partial_rotary_factor", share=0.5), bias=biases(qkv="attention_bias"),
        fixed={"router": "sigmoid"}, fields=_DEEPSEEK_EXPERTS,
        needed=("num_experts", "expert_width", "shared_width"), defaults=_DEEPSEEK_DEFAULTS,
        unread=(".embed_tokens.weight", ".shared_head.head.weight"), token_ids=TokenIds(),
        init_state=gpt.init_state,
    ),
    "dots1": _decoder(
        "Dots1ForCausalLM", _LLAMA | _QK_NORMS | _experts(), *_DEEPSEEK_MEANINGS,
        windows(switch="use_sliding_window"), bias=_ATTENTION_BIASES,
        fixed={"qk_norm": True, "router": "sigmoid"}, fields=_DEEPSEEK_EXPERTS,
        needed=("num_experts", "expert_width", "shared_width"), defaults=_DEEPSEEK_DEFAULTS,
        token_ids=TokenIds(), init_state=gpt.init_state,
    ),
    "deepseek_v2": _decoder(
        "DeepseekV2ForCausalLM", _LLAMA | _LATENT | _experts(), shared_experts("n_shared_experts"),
        dense_first(), _limited_groups(), rope=rotary(latent=True),
        fixed={"normalized_scores": False},
        fields=_DEEPSEEK_EXPERTS | _LATENT_FIELDS | dict.fromkeys(("normalized_scores",
            "expert_groups", "groups_per_token")), needed=(*_LATENT_NEEDED, "shared_width"),
        required={"attention_bias": (False,), "scoring_func": ("softmax",),
            "norm_topk_prob": (False,), "moe_layer_freq": (1,)}, defaults=_DEEPSEEK_DEFAULTS,
        renamed=_whole_queries, token_ids=TokenIds(100000, 100001),
    ),
    "minimax_m2": _decoder(
        "MiniMaxM2ForCausalLM", _LLAMA | _QK_NORMS | _MIXTRAL, chosen_by_bias(),
        rope=rotary("partial_rotary_factor", size="rotary_dim"),
        fixed={"qk_norm": True, "qk_norm_scope": "all", "router": "sigmoid"}, fields=_LOCAL_EXPERTS,
        needed=("num_experts",), required={"router_jitter_noise": (0.0,)},
        defaults={"router_aux_loss_coef": 0.001, "rope_theta": 5e6}, token_ids=TokenIds(),
        init_state=gpt.init_state,
    ),
    "cohere": _decoder(
        "CohereForCausalLM", _LLAMA | _QK_NORMS,
        flag("use_qk_norm", qk_norm=True, qk_norm_scope="each"),
        bias=biases(qkv="attention_bias", out="attention_bias", norm=False),
        fixed=_OF_LAYER_NORM | {"residual": "parallel"},
        fields=_LAYER_NORM_EPS | _NO_HEAD_SIZE | {"logit_scale": "logit_scale"},
        defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5},
        order=_neighbors, token_ids=TokenIds(5, 255001, 0),
    ),
    "cohere2": _decoder(
        "Cohere2ForCausalLM", _LLAMA, windows(4, unrotated=True), rope=rotary(some=True),
        bias=biases(qkv="attention_bias", out="attention_bias", norm=False),
        fixed=_OF_LAYER_NORM | {"residual": "parallel"},
        fields=_LAYER_NORM_EPS | {"logit_scale": "logit_scale"},
        defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5,
            "sliding_window": 4096}, order=_neighbors, token_ids=TokenIds(5, 255001, 0),
    ),
    "nemotron": _decoder(
        "NemotronForCausalLM", _LLAMA, rope=rotary("partial_rotary_factor", share=0.5),
        act=activation(GELU),
        bias=biases(qkv="attention_bias", out="attention_bias", mlp="mlp_bias", norm=True),
        fixed=_OF_LAYER_NORM | {"norms_from_zero": True}, fields={"norm_epsilon": "norm_eps"},
        defaults={"hidden_act": "relu2", "norm_eps": 1e-5}, token_ids=TokenIds(2, 3),
    ),
    "exaone4": _decoder(
        "Exaone4ForCausalLM", _LLAMA | _QK_NORMS | _POST_NORMS, windows(4, unrotated=True),
        rope=rotary(some=True), fixed={"pre_norm": False, "post_norm": True, "qk_norm": True},
        token_ids=TokenIds(0, 2),
    ),
    "ernie4_5": _decoder(
        "Ernie4_5ForCausalLM", _LLAMA, bias=biases(qkv="use_bias", out="use_bias", mlp="use_bias"),
        defaults={"head_dim": 128, "tie_word_embeddings": True, "rope_theta": 5e5},
        order=_neighbors, token_ids=TokenIds(1, 2, 0),
    ),
    "ernie4_5_moe": _decoder(
        "Ernie4_5_MoeForCausalLM", _LLAMA | _experts(), shared_experts("moe_num_shared_experts"),
        dense_first("moe_layer_start_index", end="moe_layer_end_index"), chosen_by_bias(),
        fields={"num_experts": "moe_num_experts", "experts_per_token": "moe_k",
            "expert_width": "moe_intermediate_size", "expert_every": "moe_layer_interval",
            "balance_loss": "router_aux_loss_coef", "head_size": None},
        needed=("num_experts", "expert_width"), required={"use_bias": (False,)},
        defaults={"tie_word_embeddings": True, "rope_theta": 5e5, "moe_layer_interval": 1,
            "router_aux_loss_coef": 0.001}, order=_neighbors,
        fused=(Fused(".mlp.moe_statics.e_score_correction_bias",
            (".mlp.gate.e_score_correction_bias",), row=True,),), token_ids=TokenIds(1, 2, 0),
        init_state=gpt.init_state,
    ),
    "hunyuan_v1_dense": _decoder(
        "HunYuanDenseV1ForCausalLM", _LLAMA | _HUNYUAN_NORMS, bias=_ATTENTION_BIASES,
        fixed={"qk_norm": True, "qk_norm_scope": "rotated"}, token_ids=TokenIds(1, 2, 0),
    ),
    "hunyuan_v1_moe": _decoder(
        "HunYuanMoEV1ForCausalLM",
        _LLAMA | _HUNYUAN_NORMS | _experts("shared_mlp", router="mlp.gate.wg"), _hunyuan_experts(),
        bias=_ATTENTION_BIASES, fixed={"qk_norm": True, "qk_norm_scope": "rotated"},
        fields={"num_experts": "num_experts"}, needed=("num_experts", "shared_width"),
        token_ids=TokenIds(1, 2, 0),
    ),
    "seed_oss": _decoder(
        "SeedOssForCausalLM", _LLAMA, dropout("residual_dropout", default=0.1),
        bias=biases(qkv="attention_bias", out="attention_out_bias", mlp="mlp_bias"),
        defaults={"attention_bias": True, "head_dim": 128}, token_ids=TokenIds(),
    ),
    "apertus": _decoder(
        "ApertusForCausalLM",
        _LLAMA | _QK_NORMS | {"attention_norm": "attention_layernorm",
            "mlp_norm": "feedforward_layernorm"} |
            {f"mlp/{name}": f"=mlp.act_fn.alpha_{name[0]}" for name in ("positive", "negative")},
        act=activation({"xielu": "xielu"}), bias=_ATTENTION_BIASES, fixed={"qk_norm": True},
        fields=_NO_HEAD_SIZE,
        constants=tuple((f".mlp.act_fn.{name}", value) for name, value in XIELU.items()),
        token_ids=TokenIds(1, 2, 3),
    ),
    "arcee": _decoder(
        "ArceeForCausalLM", _LLAMA, act=activation(GELU), bias=_ATTENTION_AND_MLP,
        defaults={"hidden_act": "relu2"}, token_ids=TokenIds(128000, 128001),
    ),
    "jais2": _decoder(
        "Jais2ForCausalLM", _LLAMA, act=activation(GELU),
        bias=biases(qkv="attention_bias", out="attention_bias", mlp="mlp_bias", norm=True),
        fixed=_OF_LAYER_NORM, fields=_LAYER_NORM_EPS,
        defaults={"attention_bias": True, "mlp_bias": True, "hidden_act": "relu2"},
        token_ids=TokenIds(),
    ),
    "starcoder2": _decoder(
        "Starcoder2ForCausalLM", _LLAMA | {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"},
        dropout("residual_dropout", "embedding_dropout"), act=activation(GELU),
        bias=biases(qkv="use_bias", out="use_bias", mlp="use_bias", norm=True),
        fixed=_OF_LAYER_NORM, fields=_NO_HEAD_SIZE | _WINDOW | {"norm_epsilon": "norm_epsilon"},
        defaults={"tie_word_embeddings": True, "use_bias": True, "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh"}, token_ids=TokenIds(50256, 50256),
    ),
    "gpt_neox": _decoder(
        "GPTNeoXForCausalLM", _neox("attention"), dropout("hidden_dropout"),
        flag("use_parallel_residual", default=True, residual="parallel_norms"),
        rope=rotary("rotary_pct", share=0.25, theta="rotary_emb_base"), act=activation(GELU),
        bias=biases(qkv="attention_bias", out="attention_bias", mlp=True, norm=True),
        fixed=_OF_LAYER_NORM, fields=_LAYER_NORM_EPS | _NO_HEAD_SIZE | {"num_kv_heads": None},
        defaults={"attention_bias": True, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
        layer="gpt_neox.layers.{}",
        ends={"embed/table": "gpt_neox.embed_in", "head/norm": "gpt_neox.final_layer_norm",
            "head/table": "embed_out"}, order=_groups,
        unread=("embed_out.weight", ".attention.bias", ".attention.masked_bias"),
        token_ids=TokenIds(0, 2),
    ),
    "gptj": _decoder(
        "GPTJForCausalLM",
        _GPT | {"attention/qkv": tuple(f"attn.{name}_proj" for name in "qkv")} |
            {"attention/out": "attn.out_proj", "mlp/up": "mlp.fc_in", "mlp/down": "mlp.fc_out"},
        dropout("resid_pdrop", "embd_pdrop"), rope=None,
        act=activation(GELU, "activation_function"), bias=biases(mlp=True, norm=True),
        fixed=_OF_LAYER_NORM | {"residual": "parallel", "head_bias": True},
        fields=_GPT_NAMES | {"rotary_size": "rotary_dim"}, optional=("mlp_width",),
        defaults={"layer_norm_epsilon": 1e-5},
        layer="transformer.h.{}", ends=_GPT_ENDS, order=_neighbors,
        unread=(".attn.bias", ".attn.masked_bias"), token_ids=TokenIds(50256, 50256),
    ),
    "gpt_bigcode": _decoder(
        "GPTBigCodeForCausalLM", _GPT, dropout("resid_pdrop", "embd_pdrop", default=0.1),
        flag("multi_query", default=True, num_kv_heads=1), rope=None,
        act=activation(GELU, "activation_function"), bias=_ALL_BIASES,
        fixed=_OF_LAYER_NORM | {"positions": "learned"}, fields=_GPT_NAMES,
        required={"scale_attn_weights": (True,), "add_cross_attention": (False,)},
        optional=("mlp_width",),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        layer="transformer.h.{}", ends=_GPT_ENDS, order=_groups, unread=(".attn.bias",),
        token_ids=TokenIds(50256, 50256),
    ),
    "gpt_neo": _decoder(
        "GPTNeoForCausalLM",
        _GPT | {"attention/qkv": tuple(f"attn.attention.{name}_proj" for name in "qkv")} |
            {"attention/out": "attn.attention.out_proj"}, dropout("resid_dropout", "embed_dropout"),
        windows(field="window_size", types="attention_layers", names=("global", "local")),
        rope=None, act=activation(GELU, "activation_function"),
        bias=biases(out=True, mlp=True, norm=True),
        fixed=_OF_LAYER_NORM | {"positions": "learned", "attention_scale": 1.0},
        fields=_GPT_NAMES | {"sequence_length": "max_position_embeddings",
            "num_layers": "num_layers", "width": "hidden_size", "num_heads": "num_heads",
            "mlp_width": "intermediate_size"},
        optional=("mlp_width",),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        layer="transformer.h.{}", ends=_GPT_ENDS,
        unread=(".attn.attention.bias", ".attn.attention.masked_bias"),
        token_ids=TokenIds(50256, 50256),
    ),
    "falcon": _decoder(
        "FalconForCausalLM", _neox("self_attention"), dropout("hidden_dropout"), _falcon(),
        act=activation(GELU, "activation"),
        bias=biases(qkv="bias", out="bias", mlp="bias", norm=True), fixed=_OF_LAYER_NORM,
        fields=_NO_HEAD_SIZE | {"num_kv_heads": None, "mlp_width": "ffn_hidden_size",
            "norm_epsilon": "layer_norm_epsilon"}, required={"alibi": (False,)},
        optional=("mlp_width",),
        defaults={"activation": "gelu", "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048}, layer="transformer.h.{}",
        ends=_GPT_ENDS | {"embed/table": "transformer.word_embeddings"}, renamed=_falcon_norms,
        order=_groups, token_ids=TokenIds(11, 11),
    ),
    "stablelm": _decoder(
        "StableLmForCausalLM",
        _LLAMA | {"attention/query_norm": "self_attn.q_layernorm.norms.{}",
            "attention/key_norm": "self_attn.k_layernorm.norms.{}"}, dropout("hidden_dropout"),
        flag("use_parallel_residual", residual="parallel"),
        flag("qk_layernorm", qk_norm=True, qk_norm_scope="each"),
        rope=rotary("partial_rotary_factor", share=0.25),
        bias=biases(qkv="use_qkv_bias", norm=True), fixed=_OF_LAYER_NORM,
        fields=_LAYER_NORM_EPS | _NO_HEAD_SIZE, defaults={"layer_norm_eps": 1e-5},
        token_ids=TokenIds(0, 0),
    ),
    "phi": _decoder(
        "PhiForCausalLM",
        _LLAMA | _QK_LAYERNORMS | {"attention/out": "self_attn.dense", "mlp/up": "mlp.fc1",
            "mlp/down": "mlp.fc2"}, dropout("resid_pdrop", "embd_pdrop"),
        flag("qk_layernorm", qk_norm=True), rope=rotary("partial_rotary_factor", share=0.5),
        act=activation(GELU), bias=_ALL_BIASES,
        fixed=_OF_LAYER_NORM | {"residual": "parallel", "head_bias": True},
        fields=_LAYER_NORM_EPS | _NO_HEAD_SIZE, defaults={"layer_norm_eps": 1e-5},
        ends={"head/norm": "model.final_layernorm"}, token_ids=TokenIds(1, 2),
    ),
    "persimmon": _decoder(
        "PersimmonForCausalLM",
        _neox("self_attn") | _QK_LAYERNORMS, dropout("hidden_dropout"),
        flag("qk_layernorm", default=True, qk_norm=True),
        rope=rotary("partial_rotary_factor", share=0.5), act=activation(GELU), bias=_ALL_BIASES,
        fixed=_OF_LAYER_NORM, fields=_LAYER_NORM_EPS | _NO_HEAD_SIZE | {"num_kv_heads": None},
        defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5},
        ends={"head/norm": "model.final_layernorm"}, order=_groups, token_ids=TokenIds(1, 2),
    ),
    "opt": _decoder(
        "OPTForCausalLM",
        _LLAMA | {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm",
            "attention/out": "self_attn.out_proj", "mlp/up": "fc1", "mlp/down": "fc2"},
        dropout("dropout", default=0.1), rope=None, act=activation(GELU, "activation_function"),
        bias=biases(qkv="enable_bias", out="enable_bias", mlp="enable_bias", norm=True),
        fixed=_OF_LAYER_NORM | {"positions": "learned", "first_position": 2},
        fields={"mlp_width": "ffn_dim", "num_kv_heads": None, "norm_epsilon": None} | _NO_HEAD_SIZE,
        required={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,)},
        defaults={"tie_word_embeddings": True, "enable_bias": True, "activation_function": "relu"},
        layer="model.decoder.layers.{}",
        ends={"embed/table": "model.decoder.embed_tokens",
            "embed/positions": "model.decoder.embed_positions",
            "head/norm": "model.decoder.final_layer_norm"}, token_ids=TokenIds(2, 2, 1),
    ),
    "gemma": _decoder(
        "GemmaForCausalLM", _LLAMA, fixed=_GEMMA,
        required={"attention_bias": (False,), "use_bidirectional_attention": (False, None)},
        defaults={"tie_word_embeddings": True, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
        token_ids=TokenIds(2, 1, 0),
    ),
    "vaultgemma": _decoder(
        "VaultGemmaForCausalLM", _LLAMA | {"mlp_norm": "pre_feedforward_layernorm"}, windows(2),
        act=None, fixed=_GEMMA | {"activation": "geglu"}, fields=_GEMMA_FIELDS,
        needed=("window", "query_scalar"), required=_GEMMA_REQUIRED, defaults=_GEMMA_2_DEFAULTS,
        token_ids=TokenIds(2, 1, 0),
    ),
    "helium": _decoder(
        "HeliumForCausalLM", _LLAMA, bias=biases(qkv="attention_bias", mlp="mlp_bias"),
        defaults={"head_dim": 128}, order=_neighbors, token_ids=TokenIds(1, 2, 3),
    ),
}
# fmt: on
"""Decoders by their ``model_type``. Of several that a config fits, the first is written."""


# BERT and ResNets.


_BERT = {
    "vocab_size": "vocab_size", "sequence_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers", "width": "hidden_size", "num_heads": "num_attention_heads",
    "mlp_width": "intermediate_size", "num_segments": "type_vocab_size",
    "dropout": "hidden_dropout_prob", "norm_epsilon": "layer_norm_eps",
}  # fmt: skip


def _read_bert(fields: Fields) -> BERTConfig:
    fields.require(
        hidden_act=("gelu",),
        is_decoder=(False,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True,),
        position_embedding_type=("absolute",),
    )
    kinds = typing.get_type_hints(BERTConfig)
    values = {
        ours: read_value(fields, (theirs,), kinds[ours], needed=True)
        for ours, theirs in _BERT.items()
    }
    # The config does not say which heads the weights have.
    return BERTConfig(next_sentence="cls.seq_relationship.weight" in fields.tensors, **values)


def _write_bert(config: BERTConfig) -> dict[str, Any]:
    head = "BertForPreTraining" if config.next_sentence else "BertForMaskedLM"
    whole = dataclasses.replace(config, mlp_width=config.hidden_width)
    return {
        "architectures": [head],
        **{theirs: getattr(whole, ours) for ours, theirs in _BERT.items()},
        "hidden_act": "gelu",
        "attention_probs_dropout_prob": 0.0,
    }


def _bert_modules(config: BERTConfig) -> Modules:
    layer, head = "bert.encoder.layer.{}.", "cls.predictions"
    return {
        "embed/table": "bert.embeddings.word_embeddings",
        "embed/positions": "bert.embeddings.position_embeddings",
        "embed/segments": "bert.embeddings.token_type_embeddings",
        "embed/norm": "bert.embeddings.LayerNorm",
        "layers/attention/query": layer + "attention.self.query",
        "layers/attention/key": layer + "attention.self.key",
        "layers/attention/value": layer + "attention.self.value",
        "layers/attention/out": layer + "attention.output.dense",
        "layers/attention_norm": layer + "attention.output.LayerNorm",
        "layers/mlp/up": layer + "intermediate.dense",
        "layers/mlp/down": layer + "output.dense",
        "layers/mlp_norm": layer + "output.LayerNorm",
        "head": head,
        "head/transform/linear": head + ".transform.dense",
        "head/transform/norm": head + ".transform.LayerNorm",
        "head/next_sentence/pooler": "bert.pooler.dense",
        "head/next_sentence/classifier": "cls.seq_relationship",
    }


def _read_resnet(fields: Fields) -> ResNetConfig:
    fields.require(layer_type=("bottleneck", "basic"))
    bottleneck = fields.get("layer_type", "bottleneck") == "bottleneck"
    depths = {
        blocks: depth
        for depth, blocks in resnet.IMAGENET_BLOCKS.items()
        if (depth >= 50) == bottleneck
    }
    fields.require(
        depths=tuple(map(list, depths)),
        hidden_act=("relu",),
        downsample_in_first_stage=(False,),
        downsample_in_bottleneck=(False,),
    )
    config = ResNetConfig(
        depth=depths[tuple(fields.get("depths"))],
        num_classes=fields.part("id2label").count or 2,
        style="imagenet",
        channels=fields.size("num_channels"),
        width=fields.size("embedding_size"),
        norm="batch",
    )
    fields.require(hidden_sizes=(list(config.group_channels),))
    return config


def _write_resnet(config: ResNetConfig) -> dict[str, Any]:
    labels = {str(i): f"LABEL_{i}" for i in range(config.num_classes)}
    return {
        "architectures": ["ResNetForImageClassification"],
        "depths": list(config.blocks),
        "embedding_size": config.first_width,
        "hidden_sizes": list(config.group_channels),
        "layer_type": "bottleneck" if config.bottleneck else "basic",
        "hidden_act": "relu",
        "num_channels": config.channels,
        "id2label": labels,
        "label2id": {label: int(i) for i, label in labels.items()},
    }


def _resnet_modules(config: ResNetConfig) -> Modules:
    parts = {"conv": "convolution", "norm": "normalization"}
    names: Modules = {"head": "classifier.1"}
    for part, theirs in parts.items():
        names[f"layers/0/conv/{part}"] = f"resnet.embedder.embedder.{theirs}"
    blocks = [(g, b) for g, count in enumerate(config.blocks) for b in range(count)]
    for layer, (group, block) in enumerate(blocks, start=1):
        there = f"resnet.encoder.stages.{group}.layers.{block}"
        for part, theirs in parts.items():
            names[f"layers/{layer}/shortcut/conv/{part}"] = f"{there}.shortcut.{theirs}"
            for i in range(3 if config.bottleneck else 2):
                names[f"layers/{layer}/convs/{i}/{part}"] = f"{there}.layer.{i}.{theirs}"
    return names


FAMILIES = {
    **DECODERS,
    "kimi_k2": DECODERS["deepseek_v3"],  # has that architecture, as which it is written
    "bert": Family(
        kind=BERTConfig,
        misfits=lambda config: [],
        read=_read_bert,
        write=_write_bert,
        modules=_bert_modules,
        init=bert.init,
        unread=(".position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
                "bert.pooler.dense.weight", "bert.pooler.dense.bias"),
        token_ids=TokenIds(pad=0),
    ),
    "resnet": Family(
        kind=ResNetConfig,
        misfits=lambda config: unlike(config, {"style": "imagenet", "norm": "batch"}),
        read=_read_resnet,
        write=_write_resnet,
        modules=_resnet_modules,
        init=resnet.init,
        init_state=resnet.init_state,
        unread=(".num_batches_tracked",),
    ),
}  # fmt: skip
"""The families by their ``model_type``."""
MULTIMODAL = ("gemma3", "mistral3")
"""Models of several kinds of input, whose ``text_config`` is that of one of these decoders."""
