"""Rotary fields of a ``config.json``: wavelengths, and how they are stretched for longer texts."""

from __future__ import annotations

from typing import Any, NamedTuple

from models.gpt_config import GPTConfig
from models.hugging_face_fields import Fields

OURS = (
    "rope_theta", "rope_factor", "rope_original_length", "rope_low_freq_factor",
    "rope_high_freq_factor", "rope_ramp", "rope_mscale",
)  # fmt: skip
KINDS = ("default", "linear", "llama3", "yarn")
_LENGTH = "original_max_position_embeddings"


class Parts(NamedTuple):
    """The rotary fields of global layers, those of the stretching, and its kind."""

    rope: Fields
    scaling: Fields
    kind: Any


def parts(fields: Fields) -> Parts:
    """Finds the rotary fields, where versions before and since 5 write them."""
    rope = fields.part("rope_parameters")
    if rope.get("full_attention", None) is not None:
        rope = rope.part("full_attention")
    if fields.get("rope_scaling", None) is None:
        return Parts(rope, rope, rope.get("rope_type", "default"))
    older = fields.part("rope_scaling")
    name = "type" if older.get("rope_type", None) is None else "rope_type"
    return Parts(rope, older, older.get(name))


def read(fields: Fields, *, latent: bool) -> dict[str, Any]:
    """Makes our fields from theirs.

    Args:
      fields: those of ``config.json``; their kind is one of `KINDS`.
      latent: whether the model has latent attention, whose whole heads are multiplied by what
        others multiply rotated numbers by.
    """
    rope, scaling, kind = parts(fields)
    theta = fields.number("rope_theta", 10_000.0)
    values: dict[str, Any] = {"rope_theta": rope.number("rope_theta", theta)}
    if kind != "default":
        values["rope_factor"] = scaling.number("factor")
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
        values["rope_mscale"] = _mscale(scaling, latent)
    return values


def _mscale(scaling: Fields, latent: bool) -> float:
    if not latent:
        scaling.require(attention_factor=(None,), mscale=(None,), mscale_all_dim=(None,))
        return 1.0
    mscale = scaling.number("mscale_all_dim")
    # Otherwise rotated numbers have another factor than the rest of a head.
    scaling.require(attention_factor=(None,), mscale_all_dim=(mscale or 1.0,), mscale=(mscale,))
    return mscale


def misfits(config: GPTConfig, *, two_thetas: bool) -> list[str]:
    """Names the fields whose stretching the library does not have; arguments as of `write`."""
    mscale = config.rope_mscale
    if config.rope_ramp == "llama3":
        fits = mscale == 0
    else:
        fits = mscale > 0 if config.kv_rank is not None else mscale == 1
    found = [] if fits else ["rope_mscale"]
    if two_thetas and config.rope_factor != 1 and config.local_rope_theta is None:
        found.append("local_rope_theta")
    return found


def write(config: GPTConfig, *, two_thetas: bool) -> dict[str, Any]:
    """Makes their fields from ours, as versions before and since 5 read them.

    Args:
      config: the model's shape.
      two_thetas: whether local layers have wavelengths of their own.
    """
    scaling = _scaling(config)
    theta = {"rope_theta": config.rope_theta}
    older = {**theta, "rope_scaling": None if config.rope_factor == 1 else scaling}
    if not two_thetas:
        return {**older, "rope_parameters": {**scaling, **theta}}
    local = config.local_rope_theta or config.rope_theta
    of_kinds = {
        "full_attention": {**scaling, **theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return {**older, "rope_local_base_freq": local, "rope_parameters": of_kinds}


def _scaling(config: GPTConfig) -> dict[str, Any]:
    if config.rope_factor == 1:
        return {"rope_type": "default"}
    scaling: dict[str, Any] = {"rope_type": "linear", "factor": config.rope_factor}
    if config.rope_original_length is None:
        return scaling
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    scaling[_LENGTH] = config.rope_original_length
    if config.rope_ramp == "llama3":
        return scaling | {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high}
    is_whole = config.rope_ramp == "yarn_whole"
    scaling |= {"rope_type": "yarn", "beta_slow": low, "beta_fast": high, "truncate": is_whole}
    if config.kv_rank is not None:
        scaling |= {"mscale": config.rope_mscale, "mscale_all_dim": config.rope_mscale}
    return scaling
