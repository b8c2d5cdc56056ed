"""Families as the transformers library names them: GPT-2, BERT, ResNet, and a file of decoders."""

from __future__ import annotations

from typing import Any

from models import bert, gpt, hugging_face_rope, resnet
from models.bert import BERTConfig
from models.gpt import GPTConfig
from models.hugging_face_decoders import DECODERS, OF_TRAINING, beside
from models.hugging_face_deepseek import DEEPSEEK
from models.hugging_face_family import Family, unlike
from models.hugging_face_fields import Fields, TokenIds
from models.resnet import ResNetConfig

Config = GPTConfig | BERTConfig | ResNetConfig


def _read_gpt2(fields: Fields, names: set[str]) -> GPTConfig:
    fields.require(
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True,),
    )
    return GPTConfig(
        vocab_size=fields.size("vocab_size"),
        sequence_length=fields.size("n_positions"),
        num_layers=fields.layers("n_layer"),
        width=fields.size("n_embd"),
        num_heads=fields.size("n_head"),
        mlp_width=fields.size_or_none("n_inner"),
        positions="learned",
        norm="layer",
        activation="gelu",
        bias=True,
        dropout=fields.number("resid_pdrop", 0.1),
        norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
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


_GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}
_GPT2_FREE = {
    *("vocab_size", "sequence_length", "num_layers", "width", "mlp_width", "norm_epsilon"),
    *("num_heads", "num_kv_heads", "head_size", "local_rope_theta"),
    *(*hugging_face_rope.OURS, *OF_TRAINING),
}


def _gpt2_misfits(config: GPTConfig) -> list[str]:
    heads = {"kv_heads": config.num_heads, "head_width": config.width // config.num_heads}
    return unlike(config, beside(_GPT2_FREE, _GPT2) | heads)


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


def _read_bert(fields: Fields, names: set[str]) -> BERTConfig:
    fields.require(
        hidden_act=("gelu",),
        is_decoder=(False,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True,),
        position_embedding_type=("absolute",),
    )
    return BERTConfig(
        vocab_size=fields.size("vocab_size"),
        sequence_length=fields.size("max_position_embeddings"),
        num_layers=fields.layers("num_hidden_layers"),
        width=fields.size("hidden_size"),
        num_heads=fields.size("num_attention_heads"),
        mlp_width=fields.size("intermediate_size"),
        num_segments=fields.size("type_vocab_size"),
        # The config does not say which heads the weights have.
        next_sentence="cls.seq_relationship.weight" in names,
        dropout=fields.number("hidden_dropout_prob"),
        norm_epsilon=fields.number("layer_norm_eps"),
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


def _read_resnet(fields: Fields, names: set[str]) -> ResNetConfig:
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
        kind=GPTConfig,
        misfits=_gpt2_misfits,
        read=_read_gpt2,
        write=_write_gpt2,
        modules=_gpt2_modules,
        init=gpt.init,
        prefix="transformer.",
        kernels_as_ours=True,
        unread=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
        token_ids=TokenIds(50256, 50256),
    ),
    **DECODERS,
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,  # Kimi K2 has DeepSeek-V3's architecture, as which it is written
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
