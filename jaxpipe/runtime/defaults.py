"""Defaults that depend on the devices and on layers. The planner knows them without jax."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.lowering.table import TickTable

_Form = TypeVar("_Form", bound=Hashable)

FUSES_SLICES = tuple(map(int, version("jax").split(".")[:2])) >= (0, 12)
"""Whether XLA for GPUs lets matmuls read and write slices of a stack where they lie."""
UNROLLED_LAYERS = 16
"""Layers per stage up to which one array per layer is worth compiling (studies/h100.md)."""
MOST_EXCESS = 0.1
"""Most of the room of packed layers that unrolled ones may take in excess (design/014)."""
MOST_COPIES, MOST_CROSSING = 450, 300
"""Largest number of layers in the loops of a program that knows all slots, or those from B to W,
which gains less; each takes 0.3 to 0.7 s to compile. See docs/design/001-executor.md."""

RESIDUALS_OF_F = ("until_b", "until_w")
RESIDUALS = (*RESIDUALS_OF_F, "crossing")
"""Residuals of a layer by their reader: B alone, B and W, and W alone, which B makes."""
RESIDUALS_OF = {
    Kind.F: RESIDUALS_OF_F,
    Kind.R: RESIDUALS_OF_F,
    Kind.B: RESIDUALS,
    Kind.BW: RESIDUALS_OF_F,
    Kind.W: ("until_w", "crossing"),
}
"""Names of the residuals that an action reads or writes."""


class Size(NamedTuple):
    """Bytes of an array, and the group of those that may lie behind each other in one array."""

    group: Hashable
    bytes: int


Sizes: TypeAlias = Mapping[Any, Size]
"""A layer's arrays; layers at one place share those that are equal."""


def numbered(arrays: Iterable[tuple[_Form, Size]]) -> dict[tuple[_Form, int], Size]:
    """Tells a layer's arrays of equal form apart by their number among these."""
    counts, found = Counter[_Form](), dict[tuple[_Form, int], Size]()
    for form, size in arrays:
        found[form, counts[form]] = size
        counts[form] += 1
    return found


class Room(NamedTuple):
    """Bytes of a stage's layers on a device: unrolled, and packed."""

    unrolled: int
    packed: int

    @property
    def in_excess(self) -> bool:
        """Whether unrolled layers take too much more than packed ones."""
        return self.unrolled > (1 + MOST_EXCESS) * self.packed


def weights(*, platform: str, in_excess: bool, num_layers: int, num_stages: int) -> str:
    """The layout of a stage's weights: "stacked" or "unrolled"."""
    few = num_layers <= UNROLLED_LAYERS * num_stages
    return "unrolled" if platform == "gpu" and not in_excess and few else "stacked"


def room(stages: Sequence[Sequence[Sequence[int]]], layers: Sequence[Sizes]) -> Room:
    """Computes the room of layers that may differ.

    Unrolled, a place of a chunk has the arrays of every layer that a stage has there. Packed, a
    stage has room, in every group, for the layers of the stage that has most. Places that a shorter
    chunk misses count as used, since layers that are alike have room there, too: if all layers at
    each place are alike, both take the same.

    Args:
      stages: of every stage its chunks, and of these their layers, by number.
      layers: the arrays of every layer on a device.
    """
    places = range(max(len(chunk) for stage in stages for chunk in stage))
    rows = [
        [chunk[place] if place < len(chunk) else None for chunk in stage for place in places]
        for stage in stages
    ]
    at_rows = [{n for n in at if n is not None} for at in zip(*rows, strict=True)]
    arrays = [{key: size for n in at for key, size in layers[n].items()} for at in at_rows]
    packed = 0
    for group in {size.group for layer in layers for size in layer.values()}:
        own = [sum(n for of, n in layer.values() if of == group) for layer in layers]
        most = [max((own[n] for n in at), default=0) for at in at_rows]
        packed += max(
            sum(top if n is None else own[n] for n, top in zip(stage, most, strict=True))
            for stage in rows
        )
    return Room(sum(size.bytes for at in arrays for size in at.values()), packed)


def weight_slots(platform: str) -> int:
    """Chunks of gathered weights and of gradient sums that a stage keeps at once."""
    return 1 if platform == "cpu" else 2


def known_fields(kind: Kind, known: Collection[str]) -> tuple[str, ...]:
    """Names the fields of a kind's cells that a program knows, if it knows these slots."""
    return "chunk", "layers", *(name for name in RESIDUALS_OF[kind] if name in known)


def known_slots(
    table: TickTable, num_layers: Callable[[int, int], int], *, gathers: bool, reduces: bool
) -> tuple[str, ...]:
    """Chooses the residuals whose slots a program knows that knows its chunks: all, or what goes
    from B to W, which is most of what is copied in place of them, or none.

    Args:
      num_layers: counts the layers in a loop, from the number of a chunk and of its layers.
      gathers, reduces: as for `TickTable.parts`.
    """
    ticks = table.parts(gathers=gathers, reduces=reduces)
    bodies = {parts: np.asarray([one == parts for one in ticks]) for parts in dict.fromkeys(ticks)}

    def copies(known: tuple[str, ...]) -> int:
        """Counts the layers in the loops of all bodies of ticks."""
        count = 0
        for kind in table.passes:
            fields = known_fields(kind, known)
            numbers, cells = table.cell_numbers(kind, fields), table.cells(kind, fields).items()
            sizes = {n: num_layers(cell["chunk"], cell["layers"]) for n, cell in cells}
            of_bodies = (numbers[own] for parts, own in bodies.items() if parts.has(kind))
            count += sum(sizes.get(n, 0) for own in of_bodies for n in np.unique(own).tolist())
        return count

    choices = (RESIDUALS, MOST_COPIES), (RESIDUALS[-1:], MOST_CROSSING)
    return next((known for known, most in choices if copies(known) <= most), ())
