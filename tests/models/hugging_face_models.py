"""Small models for the tests of Hugging Face folders."""

import dataclasses
import functools
import json

import jax
import numpy as np
import safetensors.numpy

from models import bert, gpt, resnet
from models.bert import BERTConfig
from models.gpt import GPTConfig
from models.resnet import ResNetConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

GPT2 = GPTConfig(
    vocab_size=37, sequence_length=12, num_layers=2, width=16, num_heads=4, positions="learned",
    norm="layer", activation="gelu", bias=True,
)  # fmt: skip
LLAMA = GPTConfig(
    vocab_size=37, sequence_length=12, num_layers=2, width=16, num_heads=4, num_kv_heads=2,
    mlp_width=24, tied=False, bias=True,
)  # fmt: skip
BERT = BERTConfig(
    vocab_size=37, sequence_length=12, num_layers=2, width=16, num_heads=4, mlp_width=24,
    next_sentence=True,
)  # fmt: skip
RESNET = ResNetConfig(depth=18, num_classes=7, style="imagenet", norm="batch", width=4)
_LLAMA3 = GPTConfig(
    vocab_size=37, sequence_length=24, num_layers=2, width=32, num_heads=4, num_kv_heads=2,
    mlp_width=48, tied=False, rope_theta=500.0, norm_epsilon=1e-6, rope_factor=8.0,
    rope_original_length=12, rope_high_freq_factor=2.5,
)  # fmt: skip
_PLAIN = dataclasses.replace(
    _LLAMA3, rope_factor=1.0, rope_original_length=None, rope_high_freq_factor=4.0
)
_GEMMA2 = dataclasses.replace(
    _PLAIN, num_layers=4, head_size=12, activation="geglu", post_norm=True, scaled_embedding=True,
    norms_from_zero=True, tied=True, query_scalar=20, attention_soft_cap=0.5, logit_soft_cap=6.0,
    window=5, global_every=2,
)  # fmt: skip
DECODERS = {
    "llama": _LLAMA3,
    "qwen2": dataclasses.replace(_PLAIN, qkv_bias=True, tied=True),
    "qwen3": dataclasses.replace(_PLAIN, qk_norm=True, head_size=12),
    "gemma2": _GEMMA2,
    "gemma3_text": dataclasses.replace(
        _GEMMA2, qk_norm=True, attention_soft_cap=None, logit_soft_cap=None, num_layers=5,
        global_every=3, local_rope_theta=100.0, rope_factor=4.0,
    ),
    "mixtral": dataclasses.replace(
        _PLAIN, num_experts=4, experts_per_token=2, balance_loss=0.01, window=7
    ),
    "qwen2_moe": dataclasses.replace(
        _PLAIN, num_layers=4, qkv_bias=True, num_experts=5, experts_per_token=3, expert_width=16,
        expert_every=2, shared_width=24, shared_gate=True, normalized_scores=False,
        balance_loss=0.01,
    ),
    "qwen3_moe": dataclasses.replace(
        _PLAIN, qk_norm=True, head_size=12, num_experts=5, experts_per_token=2, expert_width=16,
        balance_loss=0.01,
    ),
    "gpt_oss": dataclasses.replace(
        _PLAIN, num_layers=4, head_size=12, activation="clamped_swiglu", bias=True,
        attention_sinks=True, window=5, global_every=2, num_experts=4, experts_per_token=2,
        expert_bias=True, balance_loss=0.01, rope_factor=8.0, rope_original_length=12,
        rope_ramp="yarn", rope_mscale=1.0, rope_high_freq_factor=32.0,
    ),
    "qwen3_next": dataclasses.replace(  # more than a chunk; norms that do not magnify rounding
        _PLAIN, sequence_length=80, norm_epsilon=1e-3, num_layers=5, head_size=16, rotary_size=4,
        qk_norm=True, norms_from_zero=True, attention_gate=True, linear_heads=2,
        linear_value_heads=6, linear_key_size=8, linear_value_size=10, linear_conv=3,
        global_every=2, num_experts=5, expert_width=16, shared_width=24, shared_gate=True,
        balance_loss=0.01,
    ),
    "deepseek_v3": dataclasses.replace(
        _PLAIN, num_layers=3, num_kv_heads=4, head_size=6, kv_rank=10, query_rank=14, rotary_size=4,
        value_size=8, dense_layers=1, num_experts=8, experts_per_token=3, expert_width=16,
        shared_width=32, router="sigmoid", expert_groups=4, groups_per_token=2, score_factor=2.5,
        bias_speed=0.001, rope_factor=4.0, rope_original_length=12, rope_ramp="yarn_whole",
        rope_mscale=0.7, rope_high_freq_factor=3.0,
    ),
}  # fmt: skip
"""Models of decoder families, by ``model_type``."""
_LAYER = dataclasses.replace(_PLAIN, norm="layer", bias=True, activation="exact_gelu")
FURTHER = {
    "mistral": dataclasses.replace(_PLAIN, window=6),
    "phi3": dataclasses.replace(
        _PLAIN, rotary_size=6, rope_magnitude=1.5, rope_original_length=12,
        rope_short_factors=(1.0, 1.5, 2.0), rope_long_factors=(2.0, 3.0, 5.0),
    ),
    "olmo": dataclasses.replace(
        _PLAIN, norm="layer", norm_scale=False, norm_epsilon=1e-5, qkv_bias=True, out_bias=True
    ),
    "olmo3": dataclasses.replace(
        _PLAIN, pre_norm=False, post_norm=True, qk_norm=True, qk_norm_scope="all", num_layers=3,
        window=5, global_layers=(1, 3), local_rope_theta=500.0,
    ),
    "smollm3": dataclasses.replace(
        _PLAIN, unrotated_layers=(2,), rope_ramp="dynamic", rope_factor=4.0
    ),
    "granitemoe": dataclasses.replace(
        _PLAIN, num_experts=4, attention_scale=0.25, embedding_scale=3.0, residual_scale=0.5,
        logit_scale=0.125,
    ),
    "glm4_moe": dataclasses.replace(
        _PLAIN, rotary_size=4, num_experts=4, expert_width=8, shared_width=16, router="sigmoid",
        bias_speed=0.001, dense_layers=1, mtp_loss=0.1,
    ),
    "cohere": dataclasses.replace(
        _PLAIN, norm="layer", residual="parallel", qk_norm=True, qk_norm_scope="each",
        logit_scale=0.25,
    ),
    "nemotron": dataclasses.replace(
        _PLAIN, norm="layer", norm_bias=True, norms_from_zero=True, activation="relu2",
        rotary_size=4,
    ),
    "ernie4_5_moe": dataclasses.replace(
        _PLAIN, num_layers=4, num_experts=4, expert_width=8, bias_speed=0.001, expert_every=2
    ),
    "hunyuan_v1_dense": dataclasses.replace(_PLAIN, qk_norm=True, qk_norm_scope="rotated"),
    "apertus": dataclasses.replace(_PLAIN, qk_norm=True, activation="xielu"),
    "gpt_neox": dataclasses.replace(
        _LAYER, num_kv_heads=None, rotary_size=2, residual="parallel_norms"
    ),
    "falcon": dataclasses.replace(
        _LAYER, bias=False, norm_bias=True, residual="parallel_norms"
    ),
    "stablelm": dataclasses.replace(
        _PLAIN, norm="layer", norm_bias=True, qk_norm=True, qk_norm_scope="each", rotary_size=2
    ),
    "phi": dataclasses.replace(_LAYER, residual="parallel", head_bias=True, rotary_size=4),
    "opt": dataclasses.replace(
        _LAYER, num_kv_heads=None, positions="learned", first_position=2, activation="relu",
        norm_epsilon=1e-5, rope_theta=10_000.0,
    ),
}  # fmt: skip
"""Models of further families, which have every option of a GPT at least once."""
_MOE = {"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2}
_MOE |= {"moe_intermediate_size": 20}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_YARN |= {"rope_theta": 1e4}
_LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 3.0, 4.0]}
_LONG |= {"original_max_position_embeddings": 12, "partial_rotary_factor": 0.75, "rope_theta": 1e4}
_MIXED = ["full_attention", "sliding_attention", "full_attention"]
_TOKENS = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
_LLAMA = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 24}
_THEIRS = {
    "mistral": {"sliding_window": 6, "head_dim": 12},
    "ministral": {"sliding_window": 6, "head_dim": 8, "layer_types": _MIXED},
    "ministral3": {"head_dim": 12, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.3}
                   | {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "phi3": {"sliding_window": 6, "rope_parameters": _LONG, "tie_word_embeddings": True},
    "olmo": {"attention_bias": True},
    "olmo2": {"num_key_value_heads": 4},
    "olmo3": {"sliding_window": 5, "layer_types": _MIXED, "rope_parameters": {
        "full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "olmoe": _MOE | {"norm_topk_prob": True},
    "flex_olmo": _MOE,
    "smollm3": {"no_rope_layers": [1, 0, 1], "rope_parameters": _YARN | {"attention_factor": 0.9}},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "mlp_bias": True,
                "residual_multiplier": 0.3, "logits_scaling": 7.0, "tie_word_embeddings": True},
    "granitemoe": _MOE | {"attention_bias": True},
    "granitemoeshared": _MOE | {"shared_intermediate_size": 24, "logits_scaling": 3.0},
    "glm": {"head_dim": 16, "attention_bias": True},
    "glm4": {"head_dim": 16, "num_key_value_heads": 1},
    "glm4_moe": _MOE | {"head_dim": 16, "use_qk_norm": True, "n_group": 2, "topk_group": 1,
                        "first_k_dense_replace": 1, "n_shared_experts": 2},
    "dots1": _MOE | {"n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True},
    "deepseek_v2": _MOE | {"num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": None,
                           "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
                           "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy",
                           "n_shared_experts": 1, "routed_scaling_factor": 1.5},
    "minimax_m2": _MOE | {"head_dim": 16, "rotary_dim": 8},
    "cohere": {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.25},
    "cohere2": {"sliding_window": 5, "layer_types": _MIXED, "head_dim": 12},
    "nemotron": {"attention_bias": True, "tie_word_embeddings": True},
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 2, "rope_parameters": _YARN},
    "ernie4_5": {"use_bias": True, "head_dim": 12},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20,
                     "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    "hunyuan_v1_dense": {"head_dim": 12, "rope_parameters": {
        "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 6, "moe_topk": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4}},
    "seed_oss": {"head_dim": 12, "attention_out_bias": True, "residual_dropout": 0.0},
    "apertus": {"attention_bias": True},
    "qwen3_next": {"num_experts": 6, "moe_intermediate_size": 20, "num_hidden_layers": 4,
                   "shared_expert_intermediate_size": 12, "mlp_only_layers": [0],
                   "attention_bias": True, "head_dim": 16, "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 8, "num_experts_per_tok": 2,
                   "linear_value_head_dim": 12, "max_position_embeddings": 72},
    "arcee": {"mlp_bias": True},
    "starcoder2": {"sliding_window": 6, "use_bias": False},
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": _GPT | {"rotary_dim": 4},
    "gpt_bigcode": _GPT | {"multi_query": True},
    "gpt_neo": {"num_hidden_layers": 4, "window_size": 5,
                "attention_types": [[["global", "local"], 2]]},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "phi": {"qk_layernorm": True, "tie_word_embeddings": True},
    "persimmon": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": {"head_dim": 12},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "helium": {"head_dim": 8, "mlp_bias": True},
    "llama": {"attention_bias": True, "rope_parameters": _YARN | {"rope_type": "dynamic"}},
}  # fmt: skip
THEIRS = {
    name: _TOKENS | (fields if "n_embd" in fields else _LLAMA | fields)
    for name, fields in _THEIRS.items()
}
"""Fields of models that the library makes, by ``model_type``."""
KIMI = dataclasses.replace(
    DECODERS["deepseek_v3"], expert_groups=1, groups_per_token=1, score_factor=2.827
)
MTP = dataclasses.replace(DECODERS["deepseek_v3"], mtp_loss=0.1)
_INIT = {GPTConfig: gpt.init, BERTConfig: bert.init, ResNetConfig: resnet.init}


@functools.cache
def _shapes(config):
    params = jax.eval_shape(lambda key: _INIT[type(config)](config, key), jax.random.key(0))
    module = {GPTConfig: gpt, ResNetConfig: resnet}.get(type(config))
    return params, None if module is None else module.init_state(config)


def drawn(config, seed=1):
    """Parameters, and statistics of a ResNet, no two leaves of which are alike."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        if path[-1].key == "counts":  # between steps
            return np.zeros(x.shape, np.float32)
        # Positive, since some of them are variances, and of a matrix's usual size.
        size = 0.1 if len(x.shape) > 1 else 1.0
        return rng.uniform(0.5 * size, size, x.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, _shapes(config))


def shard(folder, names=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")):
    """Splits the weights of a folder into two files with an index, as the library does."""
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        held = sorted(tensors)[i::2]
        safetensors.numpy.save_file({tensor: tensors[tensor] for tensor in held}, folder / name)
        weight_map |= dict.fromkeys(held, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rewrite(folder, change):
    """Replaces the tensors of a folder by ``change(tensors)``; returns what they were."""
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    safetensors.numpy.save_file(change(dict(tensors)), folder / WEIGHTS)
    return {name: x for name, x in tensors.items() if not name.endswith("num_batches_tracked")}
