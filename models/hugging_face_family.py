"""The description of one architecture for `models.hugging_face`, and how one of decoders is read.

A `Decoder` maps fields of ``config.json`` to fields of `GPTConfig`, one by one or, where the two do
not say the same, by a `Meaning`; further fields are fixed, or have `GPTConfig`'s default values.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from models.gpt_config import BIASES, GPTConfig
from models.hugging_face_fields import NUM_LAYERS, Fields, TokenIds
from models.hugging_face_files import Fused
from models.types import PyTree

Modules = dict[str, str | tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
      kind: class of its configs here.
      misfits: names the fields of a config of this class that no model of the family has so.
      read: makes our config from the fields of ``config.json``.
      write: makes the fields of ``config.json`` from our config.
      modules: their module (or table) by the path of ours; "{}" stands for the number of the layer,
        and a second one for that of the expert, or of the head. A tuple of theirs is joined along
        the output dimension, experts along a new first one. Layers that differ but are named alike
        need no number in our path. A name that begins with "=" is that of a tensor.
      init: makes parameters, from which their shapes are taken.
      init_state: makes states of the layers, for the same purpose; None without any.
      prefix: prefix of their names, in files that hold a head beside the bare model.
      kernels_as_ours: whether kernels are stored as [in, out] there as well.
      fused: tensors that hold several modules, or one in another form.
      order: makes, for each of our columns of queries, keys and values, the number of theirs.
      layer: name of a layer; "{}" stands for its number.
      constants: further tensors of each layer, by the ending of their names.
      unread: endings of further names that files may hold: buffers, and copies of tied tables; one
        that ends with a dot is a beginning.
      token_ids: ids of the library where ``config.json`` has none; None for a model without tokens.
    """

    kind: type
    misfits: Callable[[Any], list[str]]
    read: Callable[[Fields], Any]
    write: Callable[[Any], dict[str, Any]]
    modules: Callable[[Any], Modules]
    init: Callable[[Any, jax.Array], PyTree]
    init_state: Callable[[Any], PyTree] | None = None
    prefix: str = ""
    kernels_as_ours: bool = False
    fused: tuple[Fused, ...] = ()
    order: Callable[[Any], np.ndarray] | None = None
    layer: str = ""
    constants: tuple[tuple[str, float], ...] = ()
    unread: tuple[str, ...] = ()
    token_ids: TokenIds | None = None


def unlike(config: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Names the fields of a config that have other values than these."""
    return [name for name, value in wanted.items() if getattr(config, name) != value]


class Meaning(NamedTuple):
    """Fields of ours that are not one field of theirs each.

    Args:
      ours: names of ours.
      read: makes their values.
      write: makes fields of theirs.
      misfits: names those of ours that a config of the family cannot have so.
    """

    ours: tuple[str, ...]
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[GPTConfig], dict[str, Any]]
    misfits: Callable[[GPTConfig], list[str]] = lambda config: []


_COMMON: dict[str, str | tuple[str, ...] | None] = {
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
_RESOLVED = {
    "num_kv_heads": "kv_heads", "head_size": "head_width", "mlp_width": "hidden_width",
    "linear_value_heads": "value_heads",
}  # fmt: skip
"""Properties with the values that None stands for."""
_UNKEPT = {"dropout", "dtype", "z_loss", "qk_clip", "model_type"}
"""Fields that ``config.json`` does not keep."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """One architecture.

    Args:
      name: name of the library's class.
      fixed: fields of `GPTConfig` that all its models share, if they are not the default.
      fields: further fields of ours with theirs, beside `_COMMON`. Of several names, the first that
        is there is read, and the first is written; None where the family has no such field.
      meanings: the fields that are not simply one of theirs.
      needed: fields of ours that must not be None.
      optional: fields of ours whose None is None there as well.
      required: fields of theirs that must have one of some values; the first is written.
      defaults: values that the library assumes for fields that ``config.json`` lacks.
    """

    name: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, str | tuple[str, ...] | None] = dataclasses.field(default_factory=dict)
    meanings: tuple[Meaning, ...] = ()
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    required: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of theirs for each field of ours that is one of theirs."""
        both = {**_COMMON, **self.fields}
        return {
            ours: (theirs,) if isinstance(theirs, str) else theirs
            for ours, theirs in both.items()
            if theirs is not None
        }

    def misfits(self, config: GPTConfig) -> list[str]:
        """Names the fields of a config of ours that no model of this family has so."""
        free = {*self.names, *_UNKEPT, *(n for m in self.meanings for n in m.ours)}
        wanted = {
            field.name: self.fixed.get(field.name, field.default)
            for field in dataclasses.fields(GPTConfig)
            if field.name not in free
        }
        if "num_kv_heads" not in free:
            wanted["num_kv_heads"] = wanted["num_kv_heads"] or config.num_heads
            config = dataclasses.replace(config, num_kv_heads=config.kv_heads)
        if "head_size" not in free and config.head_width * config.num_heads == config.width:
            del wanted["head_size"]
        missing = [name for name in self.needed if getattr(config, name) is None]
        others = [name for meaning in self.meanings for name in meaning.misfits(config)]
        return list(dict.fromkeys([*missing, *others, *unlike(config, wanted)]))

    def read(self, fields: Fields) -> GPTConfig:
        """Makes our config from theirs."""
        fields = fields.completed(**self.defaults)
        fields.require(**self.required)
        kinds = typing.get_type_hints(GPTConfig)
        values = dict(self.fixed)
        needed = {*self.needed, "mlp_width"} - {*self.optional}
        for ours, theirs in self.names.items():
            values[ours] = read_value(fields, theirs, kinds[ours], needed=ours in needed)
        for meaning in self.meanings:
            values |= meaning.read(fields)
        if values.get("head_size") == values["width"] // values["num_heads"]:
            values["head_size"] = None
        return GPTConfig(**values)

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Makes their fields from our config."""
        written = {
            theirs[0]: getattr(config, ours if ours in self.optional else _RESOLVED.get(ours, ours))
            for ours, theirs in self.names.items()
        }
        for meaning in self.meanings:
            written |= meaning.write(config)
        required = {name: values[0] for name, values in self.required.items()}
        return {"architectures": [self.name], **written, **required}


def read_value(fields: Fields, names: tuple[str, ...], kind: Any, *, needed: bool) -> Any:
    """Reads a field of ``config.json``, with the type of ours."""
    name = next((n for n in names if fields.get(n, None) is not None), names[0])
    if name in NUM_LAYERS:
        return fields.layers(name)
    if kind is bool:
        return fields.flag(name)
    may_be_none = type(None) in typing.get_args(kind) and not needed
    if may_be_none and fields.get(name, None) is None:
        return None
    return fields.number(name) if float in (kind, *typing.get_args(kind)) else fields.size(name)


# Meanings that several families share.

SILU = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
"""Activations of an MLP with a gate; the first of each kind is written."""
GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}
GELU |= {"gelu": "exact_gelu", "relu": "relu", "relu2": "relu2"}
"""Activations of an MLP without a gate."""


def activation(names: Mapping[str, str] = SILU, field: str = "hidden_act") -> Meaning:
    """The activation of the MLP, by the library's names."""
    first = {ours: theirs for theirs, ours in reversed([*names.items()])}

    def read(fields: Fields) -> dict[str, Any]:
        fields.require(**{field: tuple(names)})
        return {"activation": names[fields.get(field, next(iter(names)))]}

    def misfits(config: GPTConfig) -> list[str]:
        return [] if config.activation in first else ["activation"]

    return Meaning(("activation",), read, lambda config: {field: first[config.activation]}, misfits)


def biases(
    *,
    qkv: bool | str = False,
    out: bool | str = False,
    mlp: bool | str = False,
    norm: bool | str | None = None,
) -> Meaning:
    """Reads the parts of a layer that have biases: all models' do, or a field says so.

    ``norm`` is None for RMSNorm, which has none.
    """
    parts = {"qkv": qkv, "out": out, "mlp": mlp} | ({} if norm is None else {"norm": norm})
    by_field = {field for field in parts.values() if isinstance(field, str)}

    def read(fields: Fields) -> dict[str, Any]:
        has = {
            part: fields.flag(says) if isinstance(says, str) else says
            for part, says in parts.items()
        }
        bias = has["qkv"] and has["mlp"]
        own = {f"{part}_bias": has[part] for part in has if part != "qkv" and has[part] != bias}
        return {"bias": bias, "qkv_bias": has["qkv"] and not bias, **own}

    def write(config: GPTConfig) -> dict[str, Any]:
        return {says: config.has_bias(p) for p, says in parts.items() if says in by_field}

    def misfits(config: GPTConfig) -> list[str]:
        says = write(config)
        wrong = [p for p, kind in parts.items() if config.has_bias(p) != says.get(str(kind), kind)]
        return [name if getattr(config, name) else "bias" for name in (f"{p}_bias" for p in wrong)]

    return Meaning(("bias", *(f"{part}_bias" for part in BIASES)), read, write, misfits)


def shared_experts(theirs: str) -> Meaning:
    """The number of experts that see every token, which here are one MLP."""
    ours, unit = "shared_width", "moe_intermediate_size"

    def read(fields: Fields) -> dict[str, Any]:
        count = fields.count_or_none(theirs)
        return {ours: None if count is None else count * fields.size(unit)}

    def write(config: GPTConfig) -> dict[str, Any]:
        return {theirs: (config.shared_width or 0) // config.expert_hidden_width}

    def misfits(config: GPTConfig) -> list[str]:
        return [ours] if (config.shared_width or 0) % config.expert_hidden_width else []

    return Meaning((ours,), read, write, misfits)


def dense_first(theirs: str = "first_k_dense_replace", *, end: str | None = None) -> Meaning:
    """The first layers, which have an MLP in place of experts; all behind them have experts.

    ``end`` is the field with the number of the last one with experts, counted from 0.
    """

    def read(fields: Fields) -> dict[str, Any]:
        if end is not None:
            last = fields.layers("num_hidden_layers") - 1
            fields.require(**{end: (-1, last)})
        return {"dense_layers": fields.count_or_none(theirs)}

    def write(config: GPTConfig) -> dict[str, Any]:
        ends = {} if end is None else {end: config.num_layers - 1}
        return {theirs: config.dense_layers or 0, **ends}

    return Meaning(("dense_layers",), read, write)


def chosen_by_bias() -> Meaning:
    """Biases of the choice of experts, whose speed only folders from here keep."""
    ours, theirs = "bias_speed", "router_bias_update_rate"
    speed = 0.001  # of DeepSeek-V3's training (section 4.2)
    return Meaning(
        (ours,),
        lambda fields: {ours: fields.number(theirs, speed)},
        lambda config: {theirs: config.bias_speed},
        lambda config: [ours] if config.bias_speed is None else [],
    )


def further_layer() -> Meaning:
    """A further layer, which is there if its weights are: the library writes the number alone."""
    name = "num_nextn_predict_layers"
    loss = 0.1  # at the end of DeepSeek-V3's training (section 4.2); folders do not keep it

    def read(fields: Fields) -> dict[str, Any]:
        fields.require(**{name: (0, 1)})
        number = fields.layers("num_hidden_layers")
        has_further = f"model.layers.{number}.eh_proj.weight" in fields.tensors
        return {"mtp_loss": loss if has_further else None}

    return Meaning(("mtp_loss",), read, lambda config: {name: config.num_further})


def dropout(*theirs: str, default: float = 0.0) -> Meaning:
    """Dropout of the residual branches, which here is that of the embedding as well."""
    return Meaning(
        ("dropout",),
        lambda fields: {"dropout": fields.number(theirs[0], default)},
        lambda config: dict.fromkeys(theirs, config.dropout),
    )


def flag(theirs: str, *, default: bool = False, **on: Any) -> Meaning:
    """Fields of ours that have these values if a field is true, and else `GPTConfig`'s."""
    off = {ours: getattr(GPTConfig, ours) for ours in on}

    def read(fields: Fields) -> dict[str, Any]:
        return on if fields.completed(**{theirs: default}).flag(theirs) else off

    def misfits(config: GPTConfig) -> list[str]:
        return min(unlike(config, on), unlike(config, off), key=len)

    return Meaning(tuple(on), read, lambda config: {theirs: not unlike(config, on)}, misfits)


def unrotated() -> Meaning:
    """Layers without rotary positions: a list with 1 for each that has some, and 0."""

    def read(fields: Fields) -> dict[str, Any]:
        count = fields.layers("num_hidden_layers")
        if fields.get("no_rope_layers", None) is None:
            every = fields.completed(no_rope_layer_interval=4).size("no_rope_layer_interval")
            return {"unrotated_layers": tuple(range(every, count + 1, every))}
        flags = fields.choices("no_rope_layers", (0, 1), count)
        return {"unrotated_layers": tuple(n for n, flag in enumerate(flags, 1) if not flag)}

    def write(config: GPTConfig) -> dict[str, Any]:
        return {"no_rope_layers": [int(kind.is_rotated) for kind in config.main_kinds]}

    return Meaning(("unrotated_layers",), read, write)


def divisor(ours: str, theirs: str) -> Meaning:
    """A factor of ours that is a divisor there."""
    return Meaning(
        (ours,),
        lambda fields: {ours: 1 / fields.number(theirs, 1.0)},
        lambda config: {theirs: 1 / getattr(config, ours)},
    )


_TYPES = ("full_attention", "sliding_attention")
_GLOBAL = ("global_every", "global_layers")
_LAYERS = ("window", *_GLOBAL)


def _of_type(fields: Fields, field: str, names: tuple[str, str]) -> tuple[int, ...]:
    """Lists the numbers of the layers of the first of two types."""
    kinds = fields.choices(field, names, fields.num_layers)
    return tuple(n for n, kind in enumerate(kinds, 1) if kind == names[0])


def _global_layers(layers: tuple[int, ...], count: int) -> dict[str, Any]:
    """Says which of so many layers are global, by a rule if there is one."""
    is_rule = not layers or layers == tuple(range(layers[0], count + 1, layers[0]))
    if is_rule:
        return {"global_every": layers[0] if layers else None, "global_layers": None}
    return {"global_every": None, "global_layers": layers}


def linear_layers(every: int) -> Meaning:
    """Says which layers have full attention and which linear; by default every so many are full."""
    field, names = "layer_types", (_TYPES[0], "linear_attention")

    def read(fields: Fields) -> dict[str, Any]:
        count = fields.num_layers
        if fields.get(field, None) is not None:
            return _global_layers(_of_type(fields, field, names), count)
        step = fields.completed(full_attention_interval=every).size("full_attention_interval")
        return _global_layers(tuple(range(step, count + 1, step)), count)

    def write(config: GPTConfig) -> dict[str, Any]:
        return {field: [names[kind.is_linear] for kind in config.main_kinds]}

    return Meaning(_GLOBAL, read, write)


def windows(
    every: int | None = None,
    *,
    switch: str | None = None,
    unrotated: bool = False,
    field: str = "sliding_window",
    types: str = "layer_types",
    names: tuple[str, str] = _TYPES,
) -> Meaning:
    """The window of local layers, and which these are.

    Args:
      every: from one global layer to the next, where the types of layers are not given; None if
        all are local then.
      switch: field without which no layer is local, and the first ``max_window_layers`` are not.
      unrotated: whether global layers have no rotary positions if there are local ones.
      field: theirs with the window.
      types: theirs with the type of each layer.
      names: a global layer's type, and a local one's.
    """

    def global_layers(fields: Fields, count: int) -> tuple[int, ...]:
        numbers = range(1, count + 1)
        fields = fields.completed(max_window_layers=28)
        first = 0 if fields.get("max_window_layers") == 0 else fields.size("max_window_layers")
        if fields.get(types, None) is not None:
            return _of_type(fields, types, names)
        if switch is not None:
            return tuple(n for n in numbers if n <= first)
        step = fields.completed(sliding_window_pattern=every).size_or_none("sliding_window_pattern")
        return () if step is None else tuple(range(step, count + 1, step))

    def read(fields: Fields) -> dict[str, Any]:
        count = fields.num_layers
        window, layers = fields.size_or_none(field), global_layers(fields, count)
        if switch is not None and not fields.flag(switch):
            window = None
        if window is None:
            fields.require(**{types: (None, [names[0]] * count)})
        if window is None or len(layers) == count:
            is_turned = window is None or not unrotated
            return dict.fromkeys(_LAYERS) | ({} if is_turned else {"unrotated_layers": layers})
        values = {"window": window, **_global_layers(layers, count)}
        return values | ({"unrotated_layers": layers} if unrotated else {})

    def write(config: GPTConfig) -> dict[str, Any]:
        is_local = [kind.is_local for kind in config.main_kinds]
        written = {field: config.window, types: [names[local] for local in is_local]}
        if switch is None:
            if config.window is None and (config.unrotated_layers or not unrotated):
                written[field] = config.sequence_length  # which no layer uses
            return written
        first = is_local.index(True) if any(is_local) else config.num_layers
        return written | {switch: config.window is not None, "max_window_layers": first}

    def misfits(config: GPTConfig) -> list[str]:
        layers = tuple(n for n, kind in enumerate(config.main_kinds, 1) if not kind.is_local)
        fits = config.unrotated_layers == layers
        if config.window is None:
            fits = fits or not config.unrotated_layers
        return [] if fits else ["unrotated_layers"]

    if not unrotated:
        return Meaning(_LAYERS, read, write)
    return Meaning((*_LAYERS, "unrotated_layers"), read, write, misfits)


# Rotary positions.

_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
_LENGTH = "original_max_position_embeddings"
_ROTARY = (
    "rope_theta", "rope_factor", "rope_original_length", "rope_low_freq_factor",
    "rope_high_freq_factor", "rope_ramp", "rope_mscale", "rope_magnitude", "rope_short_factors",
    "rope_long_factors",
)  # fmt: skip


class _Parts(NamedTuple):
    """The rotary fields of global layers, those of the stretching, and its kind."""

    rope: Fields
    scaling: Fields
    kind: Any


def _parts(fields: Fields) -> _Parts:
    """Finds the rotary fields, where versions before and since 5 write them."""
    rope = fields.part("rope_parameters")
    if rope.get(_TYPES[0], None) is not None:
        rope = rope.part(_TYPES[0])
    if fields.get("rope_scaling", None) is None:
        return _Parts(rope, rope, rope.get("rope_type", "default"))
    older = fields.part("rope_scaling")
    kind = older.get("type" if older.get("rope_type", None) is None else "rope_type")
    return _Parts(rope, older, "longrope" if kind == "su" else kind)


def rotary(
    part: str | None = None,
    *,
    share: float = 1.0,
    size: str | None = None,
    theta: str = "rope_theta",
    two_thetas: bool = False,
    some: bool = False,
    latent: bool = False,
    growth: str | None = None,
    kinds: tuple[str, ...] = _KINDS,
) -> Meaning:
    """Rotary wavelengths, how they are stretched for longer texts, and the numbers that have them.

    Args:
      part: older name of the field with the share of a head that is rotated, beside that of
        ``rope_parameters``; None if heads are rotated whole.
      share: the share where no field says it.
      size: name of a field with the number of rotated numbers, which comes first.
      theta: older name of the field with the base of the wavelengths.
      two_thetas: whether local layers have wavelengths of their own.
      some: whether only some layers are rotated.
      latent: whether attention is latent, whose whole heads are multiplied by what others multiply
        rotated numbers by.
      growth: name of the field with the growth of queries behind the original length.
      kinds: the kinds of stretching that the family has.
    """

    def head(fields: Fields) -> int:
        size = fields.size_or_none("head_dim")
        return size or fields.size("hidden_size") // fields.size("num_attention_heads")

    def read(fields: Fields) -> dict[str, Any]:
        rope, scaling, kind = _parts(fields)
        fields.extended(rope_type=kind).require(rope_type=kinds)
        base = rope.number("rope_theta", fields.number(theta, 10_000.0))
        values: dict[str, Any] = {"rope_theta": base}
        if growth is not None:
            values["query_growth"] = rope.number(growth, 0.0)
        if size is not None and fields.get(size, None) is not None:
            values["rotary_size"] = fields.size(size)
        elif part is not None:
            ratio = rope.number("partial_rotary_factor", fields.number(part, share))
            if not 0 < ratio <= 1:
                raise fields.wrong("partial_rotary_factor", ratio, "above 0 and at most 1")
            values["rotary_size"] = None if ratio == 1 else int(head(fields) * ratio)
        if kind == "longrope":
            values |= _read_longrope(fields, scaling)
        elif kind != "default":
            values["rope_factor"] = scaling.number("factor")
        if kind == "dynamic":
            values["rope_ramp"] = "dynamic"
            if scaling.get("alpha", None):  # Hunyuan's, with which the length does not matter
                width = head(fields)
                stretched = base * scaling.number("alpha") ** (width / (width - 2))
                return {"rope_theta": stretched}
        if kind in ("llama3", "yarn"):
            values["rope_original_length"] = scaling.size(_LENGTH)
        if kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor"):
                values[f"rope_{name}"] = scaling.number(name)
        if kind == "yarn":
            is_whole = scaling.completed(truncate=True).flag("truncate")
            values["rope_ramp"] = "yarn_whole" if is_whole else "yarn"
            values["rope_low_freq_factor"] = scaling.number("beta_slow", 1.0)
            values["rope_high_freq_factor"] = scaling.number("beta_fast", 32.0)
            is_partial = some or two_thetas or values.get("rotary_size") is not None
            values |= _read_magnitude(scaling, values["rope_factor"], latent, is_partial)
        if two_thetas and fields.get("sliding_window", None) is not None:
            local = fields.part("rope_parameters").part(_TYPES[1])
            local.require(rope_type=("default",))
            older = fields.number("rope_local_base_freq", base)
            values["local_rope_theta"] = local.number("rope_theta", older)
        return values

    def misfits(config: GPTConfig) -> list[str]:
        found = []
        if config.rope_ramp in ("llama3", "dynamic"):
            fits = config.rope_mscale == 0
        elif latent:
            fits = config.rope_mscale > 0
        else:
            is_whole = not (some or two_thetas) and config.rotary_size is None
            is_usual = config.rope_mscale == config.rope_magnitude == 1
            fits = config.rope_mscale == 0 or (is_whole and is_usual)
        if not fits and config.rope_factor != 1:
            found.append("rope_mscale")
        if config.rope_factor != 1 and _kind(config) not in kinds:
            found.append("rope_factor")
        stretched = config.rope_factor != 1 or config.rope_short_factors is not None
        if two_thetas and stretched and config.local_rope_theta is None and config.window:
            found.append("local_rope_theta")
        return found

    def write(config: GPTConfig) -> dict[str, Any]:
        scaling = _scaling(config, latent)
        if growth is not None:
            scaling[growth] = config.query_growth
        stretched = scaling["rope_type"] != "default"
        older: dict[str, Any] = {
            theta: config.rope_theta, "rope_scaling": scaling if stretched else None
        }  # fmt: skip
        rope = {**scaling, "rope_theta": config.rope_theta}
        if part is not None:
            rope["partial_rotary_factor"] = older[part] = config.rotated_width / config.head_width
        if config.rope_short_factors is not None:
            older[_LENGTH] = config.rope_original_length
        if not two_thetas:
            return {**older, "rope_parameters": rope}
        local = config.local_rope_theta or config.rope_theta
        of_kinds = {_TYPES[0]: rope, _TYPES[1]: {"rope_type": "default", "rope_theta": local}}
        return {**older, "rope_local_base_freq": local, "rope_parameters": of_kinds}

    ours = (*_ROTARY, *(["rotary_size"] if part or latent else []))
    ours += ("query_growth",) if growth else ()
    return Meaning((*ours, *(["local_rope_theta"] if two_thetas else [])), read, write, misfits)


def _read_magnitude(
    scaling: Fields, factor: float, latent: bool, is_partial: bool
) -> dict[str, float]:
    """Reads the factors of scores and of rotated numbers that YaRN has beside its wavelengths."""
    usual = 1 + 0.1 * math.log(factor)
    if latent:
        mscale = scaling.number("mscale_all_dim")
        # Otherwise rotated numbers have another factor than the rest of a head.
        scaling.require(attention_factor=(None,), mscale_all_dim=(mscale or 1.0,), mscale=(mscale,))
        return {"rope_mscale": mscale}
    if scaling.get("attention_factor", None) is not None:
        return {"rope_magnitude": scaling.number("attention_factor")}
    if (mscale := scaling.get("mscale_all_dim", None)) is not None:
        scaling.require(mscale_all_dim=(scaling.number("mscale_all_dim"),), mscale=(mscale,))
        return {"rope_magnitude": 1.0}
    scaling.require(mscale=(None,))
    return {"rope_magnitude": usual} if is_partial else {"rope_mscale": 1.0}


def _read_longrope(fields: Fields, scaling: Fields) -> dict[str, Any]:
    """Reads the factors of every wavelength, and that of rotated numbers."""
    length = scaling.completed(**{_LENGTH: fields.get(_LENGTH, None)}).size(_LENGTH)
    longer = fields.size("max_position_embeddings") / length
    if scaling.get("factor", None) is not None:
        longer = scaling.number("factor")
    usual = 1.0 if longer <= 1 else math.sqrt(1 + math.log(longer) / math.log(length))
    given = scaling.get("attention_factor", None) is not None
    return {
        "rope_original_length": length,
        "rope_magnitude": scaling.number("attention_factor") if given else usual,
        "rope_short_factors": scaling.numbers("short_factor"),
        "rope_long_factors": scaling.numbers("long_factor"),
    }


def _kind(config: GPTConfig) -> str:
    """Returns the library's name of how wavelengths are stretched."""
    if config.rope_short_factors is not None:
        return "longrope"
    if config.rope_factor == 1:
        return "default"
    if config.rope_ramp == "dynamic":
        return "dynamic"
    if config.rope_original_length is None:
        return "linear"
    return "llama3" if config.rope_ramp == "llama3" else "yarn"


def _scaling(config: GPTConfig, latent: bool) -> dict[str, Any]:
    kind = _kind(config)
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind == "longrope":
        scaling["short_factor"] = list(config.rope_short_factors or ())
        scaling["long_factor"] = list(config.rope_long_factors or ())
    elif kind != "default":
        scaling["factor"] = config.rope_factor
    if kind in ("llama3", "yarn", "longrope"):
        scaling[_LENGTH] = config.rope_original_length
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if kind == "llama3":
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        is_whole = config.rope_ramp == "yarn_whole"
        scaling |= {"beta_slow": low, "beta_fast": high, "truncate": is_whole}
    if kind == "yarn" and latent:
        scaling |= {"mscale": config.rope_mscale, "mscale_all_dim": config.rope_mscale}
    elif kind == "longrope" or (kind == "yarn" and config.rope_mscale == 0):
        scaling["attention_factor"] = config.rope_magnitude
    return scaling
