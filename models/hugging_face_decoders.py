"""Decoders with rotary positions, as the transformers library names them: Llama and later ones.

A family maps fields of ``config.json`` to fields of `GPTConfig`, and fixes others of these; all
further fields must have `GPTConfig`'s default values.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any

from models import gpt, hugging_face_rope
from models.gpt_config import GPTConfig
from models.hugging_face_family import Family, unlike
from models.hugging_face_fields import Fields, TokenIds

_COMMON = {
    "vocab_size": "vocab_size",
    "sequence_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "width": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "mlp_width": "intermediate_size",
    "tied": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
_RESOLVED = {"num_kv_heads": "kv_heads", "head_size": "head_width", "mlp_width": "hidden_width"}
"""Properties with the values that None stands for."""
OF_TRAINING = {"dropout", "dtype", "z_loss", "qk_clip"}
"""Fields that ``config.json`` does not keep."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """One architecture.

    Args:
      name: name of the library's class.
      fixed: fields of `GPTConfig` that all its models share, if they are not the default.
      fields: further fields of ours with theirs, beside `_COMMON`; several of theirs must agree.
      needed: fields of ours that must not be None.
      required: fields of theirs that must have one of some values; the first is written.
      defaults: values that the library assumes for fields that ``config.json`` lacks.
      alternates: number of layers from one global layer to the next, if ``config.json`` does not
        say; None without local and global layers.
      two_thetas: whether local layers have rotary wavelengths of their own.
    """

    name: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)
    needed: tuple[str, ...] = ()
    required: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alternates: int | None = None
    two_thetas: bool = False

    def misfits(self, config: GPTConfig) -> list[str]:
        """Names the fields of a config of ours that no model of this family has so."""
        free = {*_COMMON, *hugging_face_rope.OURS, *self.fields, *OF_TRAINING}
        free |= {"global_every"} if self.alternates else set()
        free |= {"local_rope_theta"} if self.two_thetas else set()
        missing = [name for name in self.needed if getattr(config, name) is None]
        rope = hugging_face_rope.misfits(config, two_thetas=self.two_thetas)
        return [*missing, *rope, *unlike(config, beside(free, self.fixed))]

    def read(self, fields: Fields, names: set[str]) -> GPTConfig:
        """Makes our config from theirs."""
        del names
        fields = fields.completed(**self.defaults)
        if "num_experts" in self.fields:  # some versions write this name for all families
            fields = fields.completed(num_experts=fields.get("num_local_experts", None))
        fields.extended(rope_type=hugging_face_rope.parts(fields).kind).require(
            **self.required, rope_type=hugging_face_rope.KINDS
        )
        kinds = typing.get_type_hints(GPTConfig)
        values = {
            ours: _value(fields, theirs, kinds[ours], needed=ours in (*self.needed, "mlp_width"))
            for ours, theirs in {**_COMMON, **self.fields}.items()
        }
        if values["head_size"] == values["width"] // values["num_heads"]:
            values["head_size"] = None
        if self.alternates:
            values["global_every"] = _global_every(fields, values["num_layers"], self.alternates)
        if self.two_thetas:
            local = fields.part("rope_parameters").part("sliding_attention")
            values["local_rope_theta"] = local.number(
                "rope_theta", fields.number("rope_local_base_freq")
            )
        values |= hugging_face_rope.read(fields, latent="kv_rank" in self.fields)
        return GPTConfig(**values, **self.fixed)

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Makes their fields from our config."""
        written = {
            name: getattr(config, _RESOLVED.get(ours, ours))
            for ours, theirs in {**_COMMON, **self.fields}.items()
            for name in _names(theirs)
        }
        if self.alternates:
            written["layer_types"] = [_LAYER_TYPES[kind.is_local] for kind in config.layer_kinds]
        required = {name: values[0] for name, values in self.required.items()}
        rope = hugging_face_rope.write(config, two_thetas=self.two_thetas)
        return {"architectures": [self.name], **written, **required, **rope}


def beside(free: Collection[str], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Lists the fields of `GPTConfig` that are not free, as they are fixed or by default."""
    return {
        field.name: fixed.get(field.name, field.default)
        for field in dataclasses.fields(GPTConfig)
        if field.name not in free
    }


_LAYER_TYPES = {False: "full_attention", True: "sliding_attention"}


def _names(theirs: str | tuple[str, ...]) -> tuple[str, ...]:
    return (theirs,) if isinstance(theirs, str) else theirs


def _value(fields: Fields, theirs: str | tuple[str, ...], kind: Any, *, needed: bool) -> Any:
    """Reads a field of ``config.json``, with the type of ours."""
    name, *copies = _names(theirs)
    for copy in copies:
        fields.require(**{name: (fields.flag(copy),)})
    if name == "num_hidden_layers":
        return fields.layers(name)
    if kind is bool:
        return fields.flag(name)
    may_be_none = type(None) in typing.get_args(kind) and not needed
    if may_be_none and fields.get(name, None) is None:
        return None
    return fields.number(name) if float in (kind, *typing.get_args(kind)) else fields.size(name)


def _global_every(fields: Fields, num_layers: int, default: int) -> int | None:
    """Finds the number of layers from one global layer to the next."""
    types = fields.get("layer_types", None)
    if types is None:
        return fields.completed(sliding_window_pattern=default).size("sliding_window_pattern")
    whole = _LAYER_TYPES[False]
    every = types.index(whole) + 1 if isinstance(types, list) and whole in types else None
    numbers = range(1, num_layers + 1)
    fields.require(layer_types=([_LAYER_TYPES[every is None or n % every != 0] for n in numbers],))
    return every


Modules = dict[str, str | tuple[str, ...]]
LLAMA: Modules = {
    "attention_norm": "input_layernorm",
    "attention/qkv": tuple(f"self_attn.{name}_proj" for name in "qkv"),
    "attention/out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp/up": "mlp.up_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/down": "mlp.down_proj",
}
"""Modules of a layer."""
_QK_NORMS: Modules = {
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
}
_FOUR_NORMS: Modules = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


_MIXTRAL: Modules = {
    "mlp/router": "block_sparse_moe.gate",
    "mlp/experts/up": "block_sparse_moe.experts.{}.w3",
    "mlp/experts/gate": "block_sparse_moe.experts.{}.w1",
    "mlp/experts/down": "block_sparse_moe.experts.{}.w2",
}
_QWEN_MOE: Modules = {
    "mlp/router": "mlp.gate",
    "mlp/experts/up": "mlp.experts.{}.up_proj",
    "mlp/experts/gate": "mlp.experts.{}.gate_proj",
    "mlp/experts/down": "mlp.experts.{}.down_proj",
    "mlp/shared/up": "mlp.shared_expert.up_proj",
    "mlp/shared/gate": "mlp.shared_expert.gate_proj",
    "mlp/shared/down": "mlp.shared_expert.down_proj",
    "mlp/shared_gate": "mlp.shared_expert_gate",
}
_GPT_OSS: Modules = {
    "attention/sinks": "self_attn.sinks",
    "mlp/router": "mlp.router",
    **{f"mlp/experts/{name}": f"mlp.experts.{name}" for name in ("up", "gate", "down")},
}
_GPT_OSS_JOINED = (
    (".self_attn.sinks", (".self_attn.sinks.weight",)),
    (".mlp.experts.gate_up_proj", (".mlp.experts.gate.weight", ".mlp.experts.up.weight")),
    (".mlp.experts.gate_up_proj_bias", (".mlp.experts.gate.bias", ".mlp.experts.up.bias")),
    (".mlp.experts.down_proj", (".mlp.experts.down.weight",)),
    (".mlp.experts.down_proj_bias", (".mlp.experts.down.bias",)),
)


def family(decoder: Decoder, modules: Modules, **options: Any) -> Family:
    """Makes a family whose layers have these modules; ``options`` are further fields of it."""
    of_layer = {
        f"layers/{ours}": tuple(f"model.layers.{{}}.{name}" for name in _names(theirs))
        for ours, theirs in modules.items()
    }
    outer = {"embed/table": "model.embed_tokens", "head/norm": "model.norm"}
    return Family(
        kind=GPTConfig,
        misfits=decoder.misfits,
        read=decoder.read,
        write=decoder.write,
        modules=lambda config: {**outer, "head/table": "lm_head", **of_layer},
        init=gpt.init,
        unread=(".rotary_emb.inv_freq", "lm_head.weight"),
        **options,
    )


SILU = {"hidden_act": ("silu",)}
_NO_WINDOW = {"use_sliding_window": (False,)}
_EXPERTS = {
    "experts_per_token": "num_experts_per_tok",
    "balance_loss": "router_aux_loss_coef",
}
_QWEN_EXPERTS = _EXPERTS | {
    "num_experts": "num_experts",
    "expert_width": "moe_intermediate_size",
    "expert_every": "decoder_sparse_step",
    "normalized_scores": "norm_topk_prob",
}
_QWEN_MOE_REQUIRED: dict[str, tuple[Any, ...]]
_QWEN_MOE_REQUIRED = {**SILU, **_NO_WINDOW, "mlp_only_layers": ([], None)}
_QWEN_MOE_DEFAULTS = {"decoder_sparse_step": 1, "router_aux_loss_coef": 0.001}
_GEMMA = {
    "activation": "geglu",
    "post_norm": True,
    "scaled_embedding": True,
}
_GEMMA_FIELDS = {
    "query_scalar": "query_pre_attn_scalar",
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
    "window": "sliding_window",
}
_GEMMA_REQUIRED = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False, None),
}
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256}

DECODERS = {
    "llama": family(
        Decoder(
            "LlamaForCausalLM",
            fields={"bias": ("attention_bias", "mlp_bias")},
            required=SILU,
        ),
        LLAMA,
        token_ids=TokenIds(1, 2),
    ),
    "qwen2": family(
        Decoder("Qwen2ForCausalLM", fixed={"qkv_bias": True}, required=SILU | _NO_WINDOW),
        LLAMA,
        token_ids=TokenIds(),
    ),
    "qwen3": family(
        Decoder(
            "Qwen3ForCausalLM",
            fixed={"qk_norm": True},
            required=SILU | _NO_WINDOW | {"attention_bias": (False,)},
            defaults={"head_dim": 128},
        ),
        LLAMA | _QK_NORMS,
        token_ids=TokenIds(),
    ),
    "gemma2": family(
        Decoder(
            "Gemma2ForCausalLM",
            fixed=_GEMMA,
            fields=_GEMMA_FIELDS,
            needed=("window", "query_scalar"),
            required=_GEMMA_REQUIRED,
            defaults=_GEMMA_DEFAULTS
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
            | {"sliding_window": 4096},
            alternates=2,
        ),
        LLAMA | _FOUR_NORMS,
        token_ids=TokenIds(2, 1, 0),
        norms_from_zero=True,
    ),
    "gemma3_text": family(
        Decoder(
            "Gemma3ForCausalLM",
            fixed=_GEMMA | {"qk_norm": True},
            fields=_GEMMA_FIELDS,
            needed=("window", "query_scalar"),
            required=_GEMMA_REQUIRED,
            defaults=_GEMMA_DEFAULTS
            | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096},
            alternates=6,
            two_thetas=True,
        ),
        LLAMA | _FOUR_NORMS | _QK_NORMS,
        token_ids=TokenIds(2, 1, 0),
        norms_from_zero=True,
    ),
    "mixtral": family(
        Decoder(
            "MixtralForCausalLM",
            fields=_EXPERTS | {"num_experts": "num_local_experts", "window": "sliding_window"},
            needed=("num_experts",),
            required=SILU | {"router_jitter_noise": (0.0,)},
            defaults={"rope_theta": 1e6, "router_aux_loss_coef": 0.001},
        ),
        LLAMA | _MIXTRAL,
        token_ids=TokenIds(1, 2),
    ),
    "qwen2_moe": family(
        Decoder(
            "Qwen2MoeForCausalLM",
            fixed={"qkv_bias": True, "shared_gate": True},
            fields=_QWEN_EXPERTS | {"shared_width": "shared_expert_intermediate_size"},
            needed=("num_experts", "shared_width", "expert_width"),
            required=_QWEN_MOE_REQUIRED | {"qkv_bias": (True,)},
            defaults=_QWEN_MOE_DEFAULTS,
        ),
        LLAMA | _QWEN_MOE,
        token_ids=TokenIds(),
    ),
    "qwen3_moe": family(
        Decoder(
            "Qwen3MoeForCausalLM",
            fixed={"qk_norm": True},
            fields=_QWEN_EXPERTS,
            needed=("num_experts", "expert_width"),
            required=_QWEN_MOE_REQUIRED | {"attention_bias": (False,)},
            defaults=_QWEN_MOE_DEFAULTS,
        ),
        LLAMA | _QK_NORMS | _QWEN_MOE,
        token_ids=TokenIds(),
    ),
    "gpt_oss": family(
        Decoder(
            "GptOssForCausalLM",
            fixed={"activation": "clamped_swiglu", "attention_sinks": True, "bias": True}
            | {"expert_bias": True},
            fields=_EXPERTS | {"num_experts": "num_local_experts", "window": "sliding_window"},
            needed=("num_experts", "window"),
            required=SILU
            | {"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
            defaults={"head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0}
            | {"router_aux_loss_coef": 0.001},
            alternates=2,
        ),
        LLAMA | _GPT_OSS,
        token_ids=TokenIds(),
        joined=_GPT_OSS_JOINED,
    ),
}
"""The families by their ``model_type``."""
