"""The registry: every schedule by the name that configurations and the command line use.

A schedule is a function ``generate(num_stages, num_microbatches, **options)``; the options it reads
are its keyword-only parameters. Your own joins with `register`, or from an installed package by an
entry point of the group ``jaxpipe.schedules``.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial, wraps
from importlib.metadata import entry_points
from typing import Any

from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.formats import user
from jaxpipe.schedule.generators.breadth_first import breadth_first, modular
from jaxpipe.schedule.generators.chimera import chimera
from jaxpipe.schedule.generators.dualpipe import dualpipe_v
from jaxpipe.schedule.generators.gpipe import gpipe
from jaxpipe.schedule.generators.hanayo import hanayo
from jaxpipe.schedule.generators.interleaved import interleaved
from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
from jaxpipe.schedule.generators.pipemare import METHODS
from jaxpipe.schedule.generators.v_schedules import one_f_one_b_v, v_half, v_min, v_zb, zb_v
from jaxpipe.schedule.generators.zero_bubble import interleaved_zb, zb_h1, zb_h2
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.cache import cached
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from jaxpipe.schedule.simulate import Costs

Generate = Callable[..., Schedule]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule of the registry: how to generate it, and its row in the documentation.

    Args:
      name: what users write in ``pipeline.schedule``.
      generate: called as ``generate(num_stages, num_microbatches, **options)``. It reads the
        options that are its keyword-only parameters: ``num_chunks``, ``group``, ``memory_limit``,
        ``costs``, ``layers_per_chunk``.
      summary: one line.
      bubble: what the schedule adds to m(F+B+W) of work, free-running; F, B, W of a full stage. A
        formula without them is for F=B=W=1. Conditions follow a semicolon.
      peak: in flight on stage d, in microbatches of a full stage; for m large enough.
      constraints: on p, m and v.
      source: the paper.
      chunks: v if the schedule does not read ``num_chunks``; None if only the schedule knows it.
      multiples: numbers that must be multiples of another, by their parameter in `build`.
      executable: whether the runtime can execute it; if not, it can only be simulated.
    """

    name: str
    generate: Generate
    summary: str
    bubble: str
    peak: str
    constraints: str
    source: str
    chunks: int | None = 1
    multiples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    executable: bool = True

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options that ``generate`` reads, by parameter name, with their default values.

        A required option has ``inspect.Parameter.empty``.
        """
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.generate).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name in _PATHS
        }

    @property
    def default_chunks(self) -> int:
        """The v used unless another is requested; 1 if only the schedule knows it."""
        own = self.defaults.get("num_chunks")
        return own if isinstance(own, int) else self.chunks or 1


_PATHS = {
    "num_chunks": "pipeline.chunks",
    "group": "pipeline.group",
    "memory_limit": "pipeline.memory_limit",
    "costs": "costs",
    "layers_per_chunk": "pipeline.layers_per_chunk",
}
"""Configuration paths of the options, by the parameter of the generator."""
_MEASURES = ("costs", "layers_per_chunk")
"""Options that describe the machine and the model, whatever the schedule."""


def _hanayo(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 2,
    memory_limit: float | None = None,
    fused: bool = False,
) -> Schedule:
    return hanayo(
        num_stages,
        num_microbatches,
        num_waves=num_chunks // 2,
        memory_limit=memory_limit,
        fused=fused,
    )


def _chimera(num_stages: int, num_microbatches: int, *, fused: bool = False) -> Schedule:
    return chimera(num_stages, num_microbatches // 2, fused=fused)


_ANY = "p >= 1, m >= 1, v = 1"
_CHUNKS = "p >= 1, m >= 1, v >= 1"
_GROUPS = "p >= 1, m >= 1 (best: p divides m), v >= 1"
_LAYERS = "p >= 1, m >= 1, v = layers of a stage"
_WAVES = "p >= 1, m >= 1, v even"
_V = "p >= 1, m >= 1 (best from 2p), v = 2"
_COPIES = "p >= 1, m even, v = 1; simulation only"


def _with_fused(entry: Entry, bubble: str) -> tuple[Entry, Entry]:
    """An entry with split backwards and its fused variant, which has a different bubble."""
    return entry, dataclasses.replace(
        entry,
        name=f"{entry.name}-fused",
        generate=partial(entry.generate, fused=True),
        summary=f"{entry.summary}; fused backwards",
        bubble=bubble,
    )


_BUILT_IN = (
    *_with_fused(
        Entry(
            *("gpipe", gpipe, "All forwards, then all backwards"),
            *("(p-1)(F+B)", "m", _ANY, "arXiv 1811.06965"),
        ),
        "(p-1)(F+B+W)",
    ),
    *_with_fused(
        Entry(
            *("1f1b", one_f_one_b, "One forward, one backward in turn"),
            *("(p-1)(F+B)", "min(m, p-d)", _ANY, "arXiv 2006.09503"),
        ),
        "(p-1)(F+B+W)",
    ),
    *_with_fused(
        Entry(
            *("interleaved", interleaved, "1F1B over chunks, depth-first"),
            *("(p-1)(F+B)/v; p divides m, W <= F", "(2(p-d-1)+(v-1)p+1)/v", _GROUPS),
            "arXiv 2104.04473",
        ),
        "(p-1)(F+B+W)/v; p divides m",
    ),
    *_with_fused(
        Entry(
            *("breadth-first", breadth_first, "All microbatches, chunk by chunk"),
            *("(p-1)(F+B)/v; m >= p", "m", _CHUNKS, "arXiv 2211.05953"),
        ),
        "(p-1)(F+B+W)/v; m >= p",
    ),
    Entry(
        *("breadth-first-descending", partial(breadth_first, descending=True)),
        *("Breadth-first, last microbatch's backward first", "(p-1)(F+B)/v; m >= p", "m", _CHUNKS),
        "arXiv 2211.05953",
    ),
    *_with_fused(
        Entry(
            *("modular", modular, "Breadth-first, one layer per chunk"),
            *("(p-1)(F+B)/v; m >= p", "m", _LAYERS, "arXiv 2106.02679"),
        ),
        "(p-1)(F+B+W)/v; m >= p",
    ),
    *_with_fused(
        Entry(
            *("hanayo", _hanayo, "v/2 waves down and up the stages"),
            *("(p-1)/v; m = p", "min(m, p)", _WAVES, "arXiv 2308.15762"),
            multiples={"chunks": 2},
        ),
        "2(p-1); v = 2, m >= p",
    ),
    Entry(
        *("zb-h1", zb_h1, "1F1B, W deferred until memory is level"),
        *("(p-1)(F+B-W); m >= p, W <= F, W <= B", "min(m, p)", _ANY, "arXiv 2401.10241"),
    ),
    Entry(
        *("zb-h2", zb_h2, "1F1B with twice the warm-up, W fills the cool-down"),
        *("(p-1) max(F, F+B-2W); m >= 2p-1, W <= F, W <= B", "min(m, 2p-1)", _ANY),
        "arXiv 2401.10241",
    ),
    Entry(
        *("interleaved-zb", interleaved_zb, "1F1B over chunks, W deferred"),
        *("(p-1)(F+B-W)/v; p divides m, W <= F, W <= B", "(2(p-1)-d+(v-1)p+1)/v", _GROUPS),
        "arXiv 2401.10241",
    ),
    Entry(
        *("dualpipe-v", dualpipe_v, "Forward of one chunk beside backward of the other"),
        *("(p-1)/2; m >= 2p", "p+1/2", "p >= 1, m >= 1 (best from 2p), v = 2"),
        *("arXiv 2412.19437",),
        chunks=2,
    ),
    Entry(
        *("zb-v", zb_v, "Zero bubble in a stage's span on the V placement", "(p-1)/2; m >= p"),
        *("p", _V, "arXiv 2401.10241"),
        chunks=2,
    ),
    Entry(
        *("v-zb", v_zb, "The V block with ZB-V's strides", "(p-1)/2; m >= p", "p", _V),
        "arXiv 2405.15362",
        chunks=2,
    ),
    Entry(
        *("v-half", v_half, "Half of 1F1B's activations"),
        *("(3p-7)/2, odd p (3p-4)/2; m >= p >= 3", "floor((p+2)/2)", _V, "arXiv 2405.15362"),
        chunks=2,
    ),
    Entry(
        *("v-min", v_min, "A third of 1F1B's activations"),
        *("(4p-5)/2, if 3 divides p (4p-7)/2; m >= p >= 2", "floor((p+4)/3)", _V),
        "arXiv 2405.15362",
        chunks=2,
    ),
    Entry(
        *("1f1b-v", one_f_one_b_v, "Two thirds of 1F1B's activations; fused backwards"),
        *("at most 3(p-1)", "floor(2p/3)+1", _V, "arXiv 2405.15362"),
        chunks=2,
    ),
    Entry(
        *("controllable-memory", cached(controllable_memory)),
        "Searched V block under a memory limit",
        *("max(6p-1-3k, 3p-1-k)/2; m >= p, limit k/2 <= p", "memory_limit", _V),
        "arXiv 2405.15362",
        chunks=2,
    ),
    Entry(
        *("auto", cached(auto), "Order and slices searched for the lock-step clock"),
        *("searched", "memory_limit, p by default", _V, "jaxpipe"),
        chunks=2,
    ),
    *_with_fused(
        Entry(
            *("chimera", _chimera, "Two model copies, opposite directions"),
            *("about p/2-1; m >= p", "at most p+1", _COPIES, "arXiv 2107.06925"),
            multiples={"microbatches": 2},
            executable=False,
        ),
        "2(p-2); m = p",
    ),
)
_entries = {entry.name: entry for entry in _BUILT_IN}


def entries() -> tuple[Entry, ...]:
    """Returns every schedule: the built-in ones in the documentation's order, then others."""
    _load_installed()
    return tuple(_entries.values())


def executable() -> tuple[Entry, ...]:
    """Returns those of `entries` that the runtime can execute."""
    return tuple(entry for entry in entries() if entry.executable)


def register(name: str) -> Callable[[Generate], Generate]:
    """Adds a schedule of your own to the registry, for this process.

    A package can do so for everyone who installs it with an entry point of the group
    ``jaxpipe.schedules``, whose name is the schedule's. The returned schedule is validated.

    Args:
      name: what users write in ``pipeline.schedule``; no built-in or asynchronous name, and
        nothing that the command would take for a file or a function.

    Returns:
      A decorator for a function ``(num_stages, num_microbatches, **options) -> Schedule``, whose
      keyword-only parameters say which options of `build` it reads.

    Raises:
      ValueError: the name is taken or cannot be one.

    Example:
      >>> @register("mine")
      ... def mine(num_stages, num_microbatches):
      ...     return gpipe(num_stages, num_microbatches)
      >>> build("mine", stages=2, microbatches=2).num_microbatches
      2
    """
    if not name:
        raise ValueError("A schedule needs a name.\nNearest valid: 'mine'.")
    if name in {entry.name for entry in _BUILT_IN} or name in METHODS:
        kind = "an asynchronous method" if name in METHODS else "a built-in schedule"
        raise ValueError(f"The name {name!r} belongs to {kind}.\nNearest valid: 'my-{name}'.")
    if user.is_users(name):
        kind = "a function" if ":" in name else "a file"
        valid = re.sub(r"\.csv$", "", name, flags=re.IGNORECASE).replace(":", "-")
        raise ValueError(
            f"The name {name!r} looks like {kind}.\nNearest valid: {valid or 'mine'!r}."
        )

    def add(function: Generate) -> Generate:
        @wraps(function)
        def generate(stages: int, microbatches: int, **options: Any) -> Schedule:
            return user.call(name, function, stages, microbatches, **options)

        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        source = f"{function.__module__}.{function.__qualname__}"
        _entries[name] = Entry(name, generate, summary, "", "", "", source, chunks=None)
        return function

    return add


@cache
def _load_installed() -> None:
    for point in entry_points(group="jaxpipe.schedules"):
        # One broken package must not take the schedules of all others away.
        try:
            register(point.name)(point.load())
        except Exception as error:
            package = f"package {point.dist.name!r}" if point.dist else "some package"
            warnings.warn(
                f"Schedule {point.name!r} = {point.value!r} of {package} is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


def build(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    group: int | None = None,
    memory_limit: float | None = None,
    costs: Costs | None = None,
    layers_per_chunk: int | None = None,
) -> Schedule:
    """Builds a schedule by name.

    Args:
      name: a registered name, such as "1f1b" (``pipeline.schedule``).
      stages: p, at least 1 (``mesh.stage``).
      microbatches: m, at least 1 (``pipeline.microbatches``).
      chunks: v, the chunks per stage, at least 1 (``pipeline.chunks``). For this and the next
        two: None for the schedule's own default; a schedule that does not read one refuses it.
      group: microbatches that stay together, at least 1 (``pipeline.group``).
      memory_limit: peak in flight per stage, in microbatches of a full stage, above 0
        (``pipeline.memory_limit``).
      costs: of one chunk, for schedules that are searched with them; others ignore it.
      layers_per_chunk: at least 1, for schedules that cut actions into slices; others ignore it.

    Returns:
      The schedule.

    Raises:
      ValueError: the name is unknown or a number does not fit it; all failures in one message.

    Example:
      >>> build("1f1b", stages=4, microbatches=8).peak_in_flight
      (4, 3, 2, 1)
      >>> build("interleaved", stages=4, microbatches=8, chunks=2).peak_in_flight
      (11, 9, 7, 5)
    """
    found = {entry.name: entry for entry in entries()}.get(name)
    values = {
        "num_chunks": chunks,
        "group": group,
        "memory_limit": memory_limit,
        "costs": costs,
        "layers_per_chunk": layers_per_chunk,
    }
    options = {option: value for option, value in values.items() if value is not None}
    problems = [] if found else [_unknown(name)]
    problems += range_problems(
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        group=group,
        layers_per_chunk=layers_per_chunk,
        memory_limit=memory_limit,
    )
    if found is not None:
        problems += _misfits(found, options, {"microbatches": microbatches, "chunks": chunks})
    if found is None or problems:
        raise ValueError("\n".join(problems))
    reads = found.defaults
    return found.generate(
        stages, microbatches, **{option: options[option] for option in options if option in reads}
    )


def range_problems(*, memory_limit: float | None = None, **counts: int | None) -> list[str]:
    """Lists the numbers that are out of range for every schedule.

    Args:
      memory_limit: as in `build`; None if not given.
      counts: the counts of `build`; None if not given.
    """
    paths = {"stages": "mesh.stage"}
    problems = [
        f"{paths.get(name, f'pipeline.{name}')}={count} must be at least 1.\nNearest valid: 1."
        for name, count in counts.items()
        if count is not None and count < 1
    ]
    if memory_limit is not None and not memory_limit > 0:
        problems.append(f"pipeline.memory_limit={memory_limit} must be above 0.")
    return problems


def _misfits(
    entry: Entry, options: Mapping[str, Any], numbers: Mapping[str, int | None]
) -> list[str]:
    """What this schedule refuses, beyond what every schedule refuses."""
    problems = [
        f"{_PATHS[option]} is missing: schedule {entry.name!r} needs it."
        for option, default in entry.defaults.items()
        if default is inspect.Parameter.empty and option not in options
    ]
    for option, value in options.items():
        if option in entry.defaults or option in _MEASURES:
            continue
        if option == "num_chunks" and value == entry.chunks:
            continue
        rule, nearest = "it does not read it", "leave it out"
        if option == "num_chunks" and entry.chunks is not None:
            held = "1 chunk" if entry.chunks == 1 else f"{entry.chunks} chunks"
            rule, nearest = f"each of its stages holds {held}", f"{entry.chunks}"
        problems.append(
            f"{_PATHS[option]}={value} does not fit schedule {entry.name!r}: {rule}.\n"
            f"Nearest valid: {nearest}."
        )
    for name, factor in entry.multiples.items():
        number = numbers[name]
        if number is not None and number >= 1 and number % factor:
            below = number - number % factor
            nearest = ", ".join(str(n) for n in (below, below + factor) if n)
            problems.append(
                f"pipeline.{name}={number} does not fit schedule {entry.name!r}: it must be a "
                f"multiple of {factor}.\nNearest valid: {nearest}."
            )
    return problems


def _unknown(name: str) -> str:
    if name in METHODS:
        return (
            f"pipeline.schedule={name!r} never drains the pipeline, so no order of actions "
            "describes it: AsyncPipeline and train.py train with it.\nNearest valid: '1f1b'."
        )
    names = [*(entry.name for entry in entries()), *METHODS]
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)
    return (
        f"pipeline.schedule={name!r} is not a known schedule.\n"
        f"Nearest valid: {near[0]!r}. All: {', '.join(names)}."
    )
