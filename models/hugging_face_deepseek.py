"""DeepSeek-V3 as the transformers library names it: latent attention and balanced experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from models import gpt
from models.gpt_config import GPTConfig
from models.hugging_face_decoders import LLAMA, SILU, Decoder, Modules, family
from models.hugging_face_family import Family
from models.hugging_face_fields import Fields, TokenIds

_DECODER = Decoder(
    "DeepseekV3ForCausalLM",
    fixed={"router": "sigmoid"},
    fields={
        "head_size": "qk_nope_head_dim",
        "rotary_size": "qk_rope_head_dim",
        "value_size": "v_head_dim",
        "kv_rank": "kv_lora_rank",
        "query_rank": "q_lora_rank",
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "expert_groups": "n_group",
        "groups_per_token": "topk_group",
        "normalized_scores": "norm_topk_prob",
        "score_factor": "routed_scaling_factor",
        "dense_layers": "first_k_dense_replace",
        "shared_width": "shared_width",
        "bias_speed": "router_bias_update_rate",
    },
    needed=(
        "rotary_size", "value_size", "kv_rank", "num_experts", "expert_width", "shared_width",
        "bias_speed",
    ),
    required=SILU
    | {
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "num_nextn_predict_layers": (0, 1),
    },
    defaults={"norm_topk_prob": True, "router_bias_update_rate": 0.001},
)  # fmt: skip
_SHARED = "mlp.shared_experts"
_MODULES: Modules = {
    **{name: LLAMA[name] for name in ("attention_norm", "mlp_norm")},
    **{f"mlp/{name}": f"mlp.{name}_proj" for name in ("up", "gate", "down")},
    **{f"mlp/experts/{name}": f"mlp.experts.{{}}.{name}_proj" for name in ("up", "gate", "down")},
    **{f"mlp/shared/{name}": f"{_SHARED}.{name}_proj" for name in ("up", "gate", "down")},
    "mlp/router": "mlp.gate",
    "mlp/router/selection": "mlp.gate",
    "attention/latent": "self_attn.kv_a_proj_with_mqa",
    "attention/latent_norm": "self_attn.kv_a_layernorm",
    "attention/key_value": "self_attn.kv_b_proj",
    "attention/query_down": "self_attn.q_a_proj",
    "attention/query_norm": "self_attn.q_a_layernorm",
    "attention/query": "self_attn.q_b_proj",
    "attention/out": "self_attn.o_proj",
    "hidden_norm": "hnorm",
    "embedding_norm": "enorm",
    "projection": "eh_proj",
    "further_norm": "shared_head.norm",
}
_MTP_LOSS = 0.1
"""Coefficient at the end of DeepSeek-V3's training (section 4.2), which folders do not keep."""


def _read(fields: Fields, names: set[str]) -> GPTConfig:
    width = fields.size("n_shared_experts") * fields.size("moe_intermediate_size")
    dense = fields.get("first_k_dense_replace") or None
    fields = fields.extended(shared_width=width, first_k_dense_replace=dense)
    # The library writes the number of further layers, but not their weights.
    has_further = f"model.layers.{fields.layers('num_hidden_layers')}.eh_proj.weight" in names
    config = _DECODER.read(fields, names)
    return dataclasses.replace(config, mtp_loss=_MTP_LOSS if has_further else None)


def _write(config: GPTConfig) -> dict[str, Any]:
    written = _DECODER.write(config)
    written["n_shared_experts"] = written.pop("shared_width") // config.expert_hidden_width
    written["num_nextn_predict_layers"] = 0 if config.mtp_loss is None else 1
    return written | {"first_k_dense_replace": config.dense_layers or 0}


def _misfits(config: GPTConfig) -> list[str]:
    found = _DECODER.misfits(dataclasses.replace(config, mtp_loss=None))
    shared = config.shared_width or 0  # it must be there
    return ["shared_width"] if not found and shared % config.expert_hidden_width else found


def _modules(config: GPTConfig) -> Modules:
    """Names the last norm of a model with a further layer, where it lies in that layer, and
    queries' projection as the library does without a small vector for queries."""
    modules = _FAMILY.modules(config) | {"layers/final_norm": "model.norm"}
    if config.query_rank is not None:
        return modules
    return {**modules, "layers/attention/query": ("model.layers.{}.self_attn.q_proj",)}


_FAMILY = family(
    _DECODER,
    _MODULES,
    token_ids=TokenIds(0, 1),
    init_state=gpt.init_state,
    joined=((".mlp.gate.e_score_correction_bias", (".mlp.gate.bias",)),),
)
DEEPSEEK: Family = dataclasses.replace(
    _FAMILY,
    read=_read,
    write=_write,
    misfits=_misfits,
    modules=_modules,
    unread=(*_FAMILY.unread, ".embed_tokens.weight", ".shared_head.head.weight"),
)
"""The family."""
