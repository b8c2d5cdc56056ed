"""Pipelines by how their layers lie: stacked or unrolled (the toy), or in a tuple (uneven)."""

from __future__ import annotations

import toy
import uneven

import jaxpipe
from jaxpipe.runtime.tables import Tables

LAYOUTS = ("stacked", "unrolled", "tuple")


def params(layers: str) -> dict:
    return uneven.params() if layers == "tuple" else toy.params(tied=True, num_layers=5)


def batch(layers: str) -> dict:
    return (uneven if layers == "tuple" else toy).batch(16)


def pipeline(schedule: str, layers: str, zero: int, **options) -> jaxpipe.Pipeline:
    model = uneven.model() if layers == "tuple" else toy.model(tied=True, axis="stage")
    weights = "unrolled" if layers == "unrolled" else "stacked"
    given = {"schedule": schedule, "zero": zero, "weights": weights, "poison": True, **options}
    return jaxpipe.Pipeline(model, params(layers), **given)


def compute_together(monkeypatch) -> None:
    """Has all stages compute embedding and head together, as if stages split their parameters."""
    of = Tables.of
    together = {"together": True}
    monkeypatch.setattr(Tables, "of", lambda *args, **given: of(*args, **(given | together)))
