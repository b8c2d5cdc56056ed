"""The description of one architecture for `models.hugging_face`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from models.hugging_face_fields import Fields, TokenIds
from models.hugging_face_files import Joined

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
      kind: class of its configs here.
      misfits: names the fields of a config of this class that no model of the family has so.
      read: makes our config from the fields of ``config.json`` and the names of all tensors.
      write: makes the fields of ``config.json`` from our config.
      modules: their module (or table) by the path of ours; "{}" stands for the number of the layer,
        and a second one for that of the expert. A tuple of theirs is joined along the output
        dimension, experts along a new first one. Layers that differ but are named alike need no
        number in our path.
      init: makes parameters, from which their shapes are taken.
      init_state: makes states of the layers, for the same purpose; None without any.
      prefix: prefix of their names, in files that hold a head beside the bare model.
      kernels_as_ours: whether kernels are stored as [in, out] there as well.
      joined: endings of tensors whose last dimension holds the numbers of several in turn, or that
        are named otherwise than a module's, and the endings of those: `hugging_face_files.apart`.
      norms_from_zero: whether scales of norms are stored as their difference from 1.
      unread: endings of further names that files may hold: buffers, and copies of tied tables.
      token_ids: ids of the library where ``config.json`` has none; None for a model without tokens.
    """

    kind: type
    misfits: Callable[[Any], list[str]]
    read: Callable[[Fields, set[str]], Any]
    write: Callable[[Any], dict[str, Any]]
    modules: Callable[[Any], dict[str, str | tuple[str, ...]]]
    init: Callable[[Any, jax.Array], PyTree]
    init_state: Callable[[Any], PyTree] | None = None
    prefix: str = ""
    kernels_as_ours: bool = False
    joined: Joined = ()
    norms_from_zero: bool = False
    unread: tuple[str, ...] = ()
    token_ids: TokenIds | None = None


def unlike(config: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Names the fields of a config that have other values than these."""
    return [name for name, value in wanted.items() if getattr(config, name) != value]
