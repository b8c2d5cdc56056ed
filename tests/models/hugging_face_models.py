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
    tied=True, query_scalar=20, attention_soft_cap=0.5, logit_soft_cap=6.0, window=5,
    global_every=2,
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
    "deepseek_v3": dataclasses.replace(
        _PLAIN, num_layers=3, num_kv_heads=4, head_size=6, kv_rank=10, query_rank=14, rotary_size=4,
        value_size=8, dense_layers=1, num_experts=8, experts_per_token=3, expert_width=16,
        shared_width=32, router="sigmoid", expert_groups=4, groups_per_token=2, score_factor=2.5,
        bias_speed=0.001, rope_factor=4.0, rope_original_length=12, rope_ramp="yarn_whole",
        rope_mscale=0.7, rope_high_freq_factor=3.0,
    ),
}  # fmt: skip
"""Models of decoder families, by ``model_type``."""
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
