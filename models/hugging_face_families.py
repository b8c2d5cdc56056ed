"""GPT-2, Llama, BERT and ResNet as the transformers library names them: configs and modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from models import bert, gpt, resnet
from models.bert import BERTConfig
from models.gpt import GPTConfig
from models.resnet import ResNetConfig

PyTree = Any
Config = GPTConfig | BERTConfig | ResNetConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
      holds: whether a config of ours is of this family.
      read: our config from the fields of ``config.json`` and the names of all tensors.
      write: the fields of ``config.json`` from our config.
      modules: our module (or table) to theirs, by path; "{}" stands for the number of the layer. A
        tuple of theirs is joined along the output dimension.
      init: makes parameters, from which their shapes are taken.
      init_state: makes running statistics, for the same purpose; None without any.
      prefix: before their names, in files that hold a head beside the bare model.
      kernels_as_ours: kernels are stored as [in, out] there as well.
      unread: ends of further names that files may hold: buffers, and copies of tied tables.
    """

    holds: Callable[[Any], bool]
    read: Callable[[Mapping[str, Any], set[str]], Any]
    write: Callable[[Any], dict[str, Any]]
    modules: Callable[[Any], dict[str, str | tuple[str, ...]]]
    init: Callable[[Any, jax.Array], PyTree]
    init_state: Callable[[Any], PyTree] | None = None
    prefix: str = ""
    kernels_as_ours: bool = False
    unread: tuple[str, ...] = ()


def _refuse(fields: Mapping[str, Any], **allowed: tuple) -> None:
    """Raises unless every field has an allowed value; a missing field has the first of them."""
    failures = [
        f"config.json has {name}={fields[name]!r}; it can only be read with "
        f"{' or '.join(map(repr, values))}."
        for name, values in allowed.items()
        if fields.get(name, values[0]) not in values
    ]
    if failures:
        raise ValueError("\n".join(failures))


def _read_gpt2(fields, names) -> GPTConfig:
    _refuse(
        fields,
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True,),
    )
    return GPTConfig(
        vocab_size=fields["vocab_size"],
        sequence_length=fields["n_positions"],
        num_layers=fields["n_layer"],
        width=fields["n_embd"],
        num_heads=fields["n_head"],
        mlp_width=fields.get("n_inner"),
        positions="learned",
        norm="layer",
        activation="gelu",
        bias=True,
        dropout=fields.get("resid_pdrop", 0.1),
        norm_epsilon=fields.get("layer_norm_epsilon", 1e-5),
    )


def _write_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.sequence_length,
        "n_layer": config.num_layers,
        "n_embd": config.width,
        "n_head": config.num_heads,
        "n_inner": config.mlp_width,
        "activation_function": "gelu_new",
        "tie_word_embeddings": config.tied,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": config.norm_epsilon,
    }


def _gpt2_modules(config) -> dict[str, str | tuple[str, ...]]:
    return {
        "embed/table": "wte",
        "embed/positions": "wpe",
        "layers/attention_norm": "h.{}.ln_1",
        "layers/attention/qkv": "h.{}.attn.c_attn",
        "layers/attention/out": "h.{}.attn.c_proj",
        "layers/mlp_norm": "h.{}.ln_2",
        "layers/mlp/up": "h.{}.mlp.c_fc",
        "layers/mlp/down": "h.{}.mlp.c_proj",
        "head/norm": "ln_f",
    }


def _read_llama(fields, names) -> GPTConfig:
    rope = fields.get("rope_parameters") or {}
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    _refuse(
        {**fields, "rope_type": rope.get("rope_type", "default")},
        hidden_act=("silu",),
        rope_type=("default",),
        rope_scaling=(None,),
        head_dim=(width // heads, None),
        attention_bias=(fields.get("mlp_bias", False),),
    )
    return GPTConfig(
        vocab_size=fields["vocab_size"],
        sequence_length=fields["max_position_embeddings"],
        num_layers=fields["num_hidden_layers"],
        width=width,
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads"),
        mlp_width=fields["intermediate_size"],
        tied=fields.get("tie_word_embeddings", False),
        bias=fields.get("attention_bias", False),
        rope_theta=rope.get("rope_theta", fields.get("rope_theta", 10_000.0)),
        norm_epsilon=fields["rms_norm_eps"],
    )


def _write_llama(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_length,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.width,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.hidden_width,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,  # read by versions before 5
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def _llama_modules(config) -> dict[str, str | tuple[str, ...]]:
    layer = "model.layers.{}."
    return {
        "embed/table": "model.embed_tokens",
        "layers/attention_norm": layer + "input_layernorm",
        "layers/attention/qkv": tuple(layer + f"self_attn.{name}_proj" for name in "qkv"),
        "layers/attention/out": layer + "self_attn.o_proj",
        "layers/mlp_norm": layer + "post_attention_layernorm",
        "layers/mlp/up": layer + "mlp.up_proj",
        "layers/mlp/gate": layer + "mlp.gate_proj",
        "layers/mlp/down": layer + "mlp.down_proj",
        "head/norm": "model.norm",
        "head/table": "lm_head",
    }


def _read_bert(fields, names) -> BERTConfig:
    _refuse(
        fields,
        hidden_act=("gelu",),
        is_decoder=(False,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True,),
        position_embedding_type=("absolute",),
    )
    return BERTConfig(
        vocab_size=fields["vocab_size"],
        sequence_length=fields["max_position_embeddings"],
        num_layers=fields["num_hidden_layers"],
        width=fields["hidden_size"],
        num_heads=fields["num_attention_heads"],
        mlp_width=fields["intermediate_size"],
        num_segments=fields["type_vocab_size"],
        # The config does not say which heads the weights have.
        next_sentence="cls.seq_relationship.weight" in names,
        dropout=fields["hidden_dropout_prob"],
        norm_epsilon=fields["layer_norm_eps"],
    )


def _write_bert(config: BERTConfig) -> dict[str, Any]:
    head = "BertForPreTraining" if config.next_sentence else "BertForMaskedLM"
    return {
        "architectures": [head],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_length,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.width,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.hidden_width,
        "type_vocab_size": config.num_segments,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_epsilon,
    }


def _bert_modules(config) -> dict[str, str | tuple[str, ...]]:
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


def _read_resnet(fields, names) -> ResNetConfig:
    bottleneck = fields["layer_type"] == "bottleneck"
    depths = {
        blocks: depth
        for depth, blocks in resnet.IMAGENET_BLOCKS.items()
        if (depth >= 50) == bottleneck
    }
    _refuse(
        fields,
        depths=tuple(map(list, depths)),
        hidden_act=("relu",),
        downsample_in_first_stage=(False,),
        downsample_in_bottleneck=(False,),
    )
    config = ResNetConfig(
        depth=depths[tuple(fields["depths"])],
        num_classes=len(fields["id2label"]) if "id2label" in fields else 2,
        style="imagenet",
        channels=fields["num_channels"],
        width=fields["embedding_size"],
        norm="batch",
    )
    _refuse(fields, hidden_sizes=(list(config.group_channels),))
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


def _resnet_modules(config) -> dict[str, str | tuple[str, ...]]:
    parts = {"conv": "convolution", "norm": "normalization"}
    names: dict[str, str | tuple[str, ...]] = {"head": "classifier.1"}
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
    "gpt2": Family(
        holds=lambda config: (
            isinstance(config, GPTConfig)
            and (config.positions, config.norm, config.activation) == ("learned", "layer", "gelu")
            and config.bias
            and config.kv_heads == config.num_heads
            and config.tied
        ),
        read=_read_gpt2,
        write=_write_gpt2,
        modules=_gpt2_modules,
        init=gpt.init,
        prefix="transformer.",
        kernels_as_ours=True,
        unread=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
    ),
    "llama": Family(
        holds=lambda config: (
            isinstance(config, GPTConfig)
            and (config.positions, config.norm, config.activation) == ("rotary", "rms", "swiglu")
        ),
        read=_read_llama,
        write=_write_llama,
        modules=_llama_modules,
        init=gpt.init,
        unread=(".rotary_emb.inv_freq", "lm_head.weight"),
    ),
    "bert": Family(
        holds=lambda config: isinstance(config, BERTConfig),
        read=_read_bert,
        write=_write_bert,
        modules=_bert_modules,
        init=bert.init,
        unread=(".position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
                "bert.pooler.dense.weight", "bert.pooler.dense.bias"),
    ),
    "resnet": Family(
        holds=lambda config: (
            isinstance(config, ResNetConfig)
            and (config.style, config.norm) == ("imagenet", "batch")
        ),
        read=_read_resnet,
        write=_write_resnet,
        modules=_resnet_modules,
        init=resnet.init,
        init_state=resnet.init_state,
        unread=(".num_batches_tracked",),
    ),
}  # fmt: skip
"""The families by their ``model_type``."""
