"""The registry: every schedule by the name that configurations and the command line use.

A schedule is a function ``generate(num_stages, num_microbatches, **options)``; the options it reads
are its keyword-only parameters. Your own joins with `register`, or from an installed package by an
entry point of the group ``jaxpipe.schedules``. `docs/schedules.md` has the bubbles and peaks of the
built-in ones.
"""

import dataclasses
import difflib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial, wraps
from importlib.metadata import entry_points
from typing import Any

from jaxpipe.schedule import formats
from jaxpipe.schedule.actions import GUESTS, Schedule
from jaxpipe.schedule.generators.breadth_first import breadth_first, gpipe, modular
from jaxpipe.schedule.generators.depth_first import (
    eager_1f1b,
    interleaved,
    interleaved_overlapped,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from jaxpipe.schedule.generators.dualpipe import dualpipe_v, dualpipe_v_published
from jaxpipe.schedule.generators.eager import in_time
from jaxpipe.schedule.generators.hanayo import hanayo
from jaxpipe.schedule.generators.v_schedules import one_f_one_b_v, v_half, v_min, v_zb, zb_v
from jaxpipe.schedule.pacing import of_ticks, soonest_on_devices
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.problems import ArgumentError, Problem, below_one, counted, in_python, refuse
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from jaxpipe.schedule.simulate import UNIT, Costs

Generate = Callable[..., Schedule]

MEASURES = ("costs", "layer_costs")
"""Options that describe the machine and the model, whatever the schedule."""
PUBLISHED = "-published"
"""Suffix of the name under which a reordered schedule keeps its own order, whatever the costs."""
OPTIONS = ("num_chunks", "group", "num_slices", "memory_limit", "offload", *MEASURES)
"""Options of schedules beyond stages and microbatches."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule of the registry.

    Args:
      name: the name for users.
      generate: called as ``generate(num_stages, num_microbatches, **options)``. Its keyword-only
        parameters are the `OPTIONS` that it reads.
      summary: one line.
      source: the paper.
      chunks: v if the schedule does not read ``num_chunks``; None if only the schedule knows it.
      reordered: whether `build` reorders it for the given costs.
    """

    name: str
    generate: Generate
    summary: str
    source: str
    chunks: int | None = 1
    reordered: bool = False

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options that ``generate`` reads, by parameter name, with their default values.

        A required option has ``inspect.Parameter.empty``.
        """
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.generate).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name in OPTIONS
        }

    @property
    def default_chunks(self) -> int:
        """The default number of chunks; 1 if only the schedule knows it."""
        own = self.defaults.get("num_chunks")
        return own if isinstance(own, int) else self.chunks or 1


def _split_and_fused(
    name: str, generate: Generate, summary: str, source: str, **options: Any
) -> tuple[Entry, Entry]:
    """Makes the entry of a schedule with split backwards, and that of its fused variant."""
    fused = f"{name}-fused", partial(generate, fused=True), f"{summary}; fused backwards"
    return Entry(name, generate, summary, source, **options), Entry(*fused, source, **options)


_LAMY_POIRIER, _ZERO_BUBBLE = "arXiv 2211.05953", "arXiv 2401.10241"
_ALPA = "arXiv 2211.05322"
_DUALPIPE, _CONTROLLABLE_MEMORY = "arXiv 2412.19437", "arXiv 2405.15362"
_reordered, _on_v = partial(Entry, reordered=True), partial(Entry, chunks=2)
_reordered_v = partial(_on_v, reordered=True)

BUILT_IN = (
    *_split_and_fused("gpipe", gpipe, "All forwards, then all backwards", "arXiv 1811.06965"),
    *_split_and_fused("1f1b", one_f_one_b, "One forward, one backward in turn", "arXiv 2006.09503"),
    *_split_and_fused(
        "eager-1f1b", eager_1f1b, "1F1B with twice the warm-up, for slow messages", _ALPA
    ),
    *_split_and_fused(
        "interleaved", interleaved, "1F1B over chunks, depth-first", "arXiv 2104.04473"
    ),
    *_split_and_fused(
        "interleaved-overlapped",
        interleaved_overlapped,
        "1F1B over chunks, forward and backward in pairs",
        "Megatron-LM",
    ),
    *_split_and_fused(
        "breadth-first", breadth_first, "All microbatches, chunk by chunk", _LAMY_POIRIER
    ),
    Entry(
        "breadth-first-descending",
        partial(breadth_first, descending=True),
        "Breadth-first, last microbatch's backward first",
        _LAMY_POIRIER,
    ),
    *_split_and_fused("modular", modular, "Breadth-first, one layer per chunk", "arXiv 2106.02679"),
    *_split_and_fused(
        "hanayo", hanayo, "v/2 waves down and up the stages", "arXiv 2308.15762", reordered=True
    ),
    _reordered("zb-h1", zb_h1, "1F1B with split backwards, 1F1B's activations", _ZERO_BUBBLE),
    _reordered("zb-h2", zb_h2, "1F1B with twice the warm-up, W fills the cool-down", _ZERO_BUBBLE),
    _reordered("interleaved-zb", interleaved_zb, "1F1B over chunks, W deferred", _ZERO_BUBBLE),
    _on_v("dualpipe-v", dualpipe_v, "Forward of one chunk beside backward of the other", _DUALPIPE),
    _on_v(
        "dualpipe-v-published",
        dualpipe_v_published,
        "Forward and backward in pairs, as published",
        _DUALPIPE,
    ),
    _reordered_v("zb-v", zb_v, "Zero bubble on a V placement, 1F1B's activations", _ZERO_BUBBLE),
    _reordered_v("v-zb", v_zb, "ZB-V as a V building block", _CONTROLLABLE_MEMORY),
    _reordered_v("v-half", v_half, "Half of 1F1B's activations", _CONTROLLABLE_MEMORY),
    _reordered_v("v-min", v_min, "A third of 1F1B's activations", _CONTROLLABLE_MEMORY),
    _reordered_v(
        "1f1b-v",
        one_f_one_b_v,
        "Two thirds of 1F1B's activations; fused backwards",
        _CONTROLLABLE_MEMORY,
    ),
    _on_v(
        "controllable-memory",
        controllable_memory,
        "Searched V block under a memory limit",
        _CONTROLLABLE_MEMORY,
    ),
    Entry("auto", auto, "Placement and order searched for devices", "jaxpipe", chunks=None),
)

_entries = {entry.name: entry for entry in BUILT_IN}


def entries() -> tuple[Entry, ...]:
    """Returns every schedule: the built-in ones in the documentation's order, then others."""
    _load_installed()
    return tuple(_entries.values())


def register(name: str) -> Callable[[Generate], Generate]:
    """Adds a schedule of your own to the registry, for this process.

    A package can register a schedule for everyone who installs it: with an entry point in the group
    ``jaxpipe.schedules`` that has the schedule's name. Returned schedules are validated.

    Args:
      name: the name for users. It must not be a built-in or asynchronous name, nor look like a file
        or a function to the command.

    Returns:
      A decorator for a function ``(num_stages, num_microbatches, **options) -> Schedule``, whose
      keyword-only parameters are the options of `build` that it reads.

    Raises:
      ValueError: the name is taken or not allowed.

    Example:
      >>> from jaxpipe.schedule.generators.breadth_first import gpipe
      >>> @register("mine")
      ... def mine(num_stages, num_microbatches):
      ...     return gpipe(num_stages, num_microbatches)
      >>> build("mine", stages=2, microbatches=2).num_microbatches
      2
    """
    free = re.sub(r"\.csv$", "", name, flags=re.IGNORECASE).replace(":", "-") or "mine"
    for wrong, rule, nearest in (
        (not name, "is empty: a schedule needs a name", free),
        (name in GUESTS, "belongs to an asynchronous method", f"my-{name}"),
        (name in {e.name for e in BUILT_IN}, "belongs to a built-in schedule", f"my-{name}"),
        (":" in name, "looks like a function", free),
        (formats.is_file(name), "looks like a file", free),
    ):
        if wrong:
            refuse([Problem("name", name, rule, (nearest,))])

    def add(function: Generate) -> Generate:
        @wraps(function)
        def generate(stages: int, microbatches: int, **options: Any) -> Schedule:
            return formats.call_user(name, function, stages, microbatches, **options)

        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        source = f"{function.__module__}.{function.__qualname__}"
        _entries[name] = Entry(name, generate, summary, source, chunks=None)
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
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    group: int | None = None,
    slices: int | None = None,
    memory_limit: float | None = None,
    offload: float | None = None,
    costs: Costs | None = None,
    layer_costs: Sequence[Costs] | None = None,
    seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Schedule:
    """Builds a schedule by name.

    Args:
      name: a registered name, such as "1f1b"; or your own schedule: "PATH.csv" in PyTorch's format
        of pipeline actions, or "module:function" with a function as for `register`. "-published"
        after the name of a reordered schedule (`Entry`) keeps its order whatever the costs.
      stages: p, at least 1. For a file, None takes the file's number, also for ``microbatches``.
      microbatches: m, at least 1.
      chunks: v, the chunks per stage, at least 1. Here and in the next three, None is the
        schedule's default, and a schedule that does not read the option refuses it.
      group: microbatches that stay together, at least 1.
      slices: k, the slices into which the sequences of a microbatch are cut, at least 1.
      memory_limit: peak in flight per stage, in microbatches of a full stage, above 0.
      offload: time in which residuals move to the host, or back, as a share of their F, above 0;
        the limit is then of what a device keeps (`auto`).
      costs: costs of one chunk, or, for `auto`, which chooses the number of chunks, of half a
        stage. A searched or reordered schedule is either the published order, which is for equal
        costs and free messages, or an order for these costs: the one that ends first on the device
        clock. Costs also decide the ticks in which any schedule runs (`jaxpipe.schedule.pacing`).
      layer_costs: costs of every layer of the model, in order, instead of ``costs``. All schedules
        are then of the same model, whatever their chunks.
      seconds: approximate time of a search by `auto`; 0 takes the first schedule that fits, and
        None is 2.
      progress: called with a few words about the next step of `auto`.

    Raises:
      ArgumentError: the name is unknown or a number does not fit it; all failures in one message.
      ValueError: your own schedule cannot be loaded, or cannot run.

    Example:
      >>> build("1f1b", stages=4, microbatches=8).peak_in_flight
      (4, 3, 2, 1)
      >>> build("interleaved", stages=4, microbatches=8, chunks=2).peak_in_flight
      (11, 9, 7, 5)
    """
    counts = {
        "num_stages": stages,
        "num_microbatches": microbatches,
        "num_chunks": chunks,
        "group": group,
        "num_slices": slices,
    }
    known = {entry.name: entry for entry in entries()}
    plain = name.removesuffix(PUBLISHED)
    as_published = name not in known and plain in known and known[plain].reordered
    chosen, is_own = known.get(plain if as_published else name), formats.is_users(name)
    problems = [] if chosen or is_own else [_unknown(name)]
    problems += below_one(counts)
    if memory_limit is not None and not memory_limit > 0:
        problems.append(Problem("memory_limit", memory_limit, "must be above 0"))
    others = {
        "memory_limit": memory_limit,
        "offload": offload,
        "costs": costs,
        "layer_costs": layer_costs,
    }
    given = {name: value for name, value in (counts | others).items() if value is not None}
    if chosen is not None:
        problems += [formats.no_shape(name)] if None in (stages, microbatches) else []
        problems += _misfits(chosen, given)
    if chosen is not None and chosen.generate is auto:
        chosen = dataclasses.replace(
            chosen, generate=partial(auto, seconds=seconds, progress=progress)
        )
    try:
        refuse(problems)
        return _built(name, chosen, given, published=as_published)
    except ArgumentError as error:
        # A generator knows its own name, not that of the variant that the user asked for.
        raise ArgumentError([_named(name, problem) for problem in error.problems], _spell) from None


def _built(name: str, entry: Entry | None, given: dict[str, Any], *, published: bool) -> Schedule:
    """Builds a schedule of the registry, or the user's own, from the arguments that were given."""
    layers = given.get("layer_costs")

    def paced(*schedules: Schedule) -> Schedule:
        costs = cut_layers(layers, schedules[0].placement)[1] if layers else given.get("costs")
        return schedules[0] if costs is None else soonest_on_devices(schedules, costs)[0]

    if entry is None:
        others = {option: value for option, value in given.items() if option not in MEASURES}
        measures = {option: given[option] for option in MEASURES if option in given}
        return paced(formats.load(name, **others, clock=measures))
    if layers and "layer_costs" not in entry.defaults:
        given = given | _of_average_chunk(entry, layers, given)
    shape = given["num_stages"], given["num_microbatches"]
    reads = {option: value for option, value in given.items() if option in entry.defaults}
    of_paper = {option: value for option, value in reads.items() if option not in MEASURES}
    if published:
        return paced(dataclasses.replace(entry.generate(*shape, **of_paper), name=name))
    costs = given.get("costs")
    if not entry.reordered or costs is None or costs == UNIT:
        return paced(entry.generate(*shape, **reads))
    plain = entry.generate(*shape, **of_paper)

    def ordered(costs: Costs) -> Schedule:
        if "costs" in entry.defaults:
            return entry.generate(*shape, **of_paper, costs=costs)
        return in_time(plain, costs)

    in_ticks = dict.fromkeys((costs, of_ticks(costs)))
    return paced(*map(ordered, in_ticks), plain)


def _of_average_chunk(
    entry: Entry, layer_costs: Sequence[Costs], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Averages a model's layers for a schedule with a fixed number of chunks."""
    chunks = given["num_stages"] * given.get("num_chunks", entry.default_chunks)
    if len(layer_costs) < chunks:
        layers = counted(len(layer_costs), "layer")
        rule = f"{layers} cannot fill {chunks} chunks: each needs a layer"
        near = f"Nearest valid: {chunks} layers."
        refuse([Problem("layer_costs", None, rule, schedule=entry.name, note=near)])
    f, b, w = (math.fsum(getattr(c, kind) for c in layer_costs) / chunks for kind in "fbw")
    message = max(cost.message for cost in layer_costs)
    return {"costs": dataclasses.replace(layer_costs[0], f=f, b=b, w=w, message=message)}


def _named(name: str, problem: Problem | str) -> Problem | str:
    if isinstance(problem, str) or problem.schedule is None:
        return problem
    return dataclasses.replace(problem, schedule=name)


def _spell(argument: str, value: object) -> str:
    """Writes an argument as `build` names it, without the ``num_`` of functions that it calls."""
    return in_python(argument.removeprefix("num_"), value)


def _misfits(entry: Entry, given: Mapping[str, Any]) -> list[Problem]:
    """Lists what this schedule refuses, beyond what every schedule refuses."""
    problems = [
        Problem(option, None, f"is missing: schedule {entry.name!r} needs it")
        for option, default in entry.defaults.items()
        if default is inspect.Parameter.empty and option not in given
    ]
    for option in OPTIONS:
        if option not in given or option in (*entry.defaults, *MEASURES):
            continue
        readers = ", ".join(other.name for other in entries() if option in other.defaults)
        rule, nearest, note = "the schedule has no such option", None, f"Used by {readers}."
        if option == "num_chunks" and entry.chunks is not None:
            rule = f"each of its stages holds {counted(entry.chunks, 'chunk')}"
            nearest, note = entry.chunks, ""
        if given[option] != nearest:
            near, of = (nearest,), entry.name
            problems.append(Problem(option, given[option], rule, near, schedule=of, note=note))
    return problems


def _unknown(name: str) -> Problem:
    if name in GUESTS:
        rule = "never drains the pipeline, so it has no order of actions"
        rule += ": use it with AsyncPipeline or train.py"
        return Problem("name", name, rule, ("1f1b",))
    names = [*(entry.name for entry in entries()), *GUESTS]
    near = _nearest(name, names)
    return Problem("name", name, "is not a known schedule", near, note=f"All: {', '.join(names)}.")


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Finds known names that may be meant, at most three, by letters or by words of a summary."""
    letters = {re.sub("[^a-z0-9]", "", known): known for known in names}
    asked = re.sub("[^a-z0-9]", "", name.lower())
    plain = re.sub("(fused|published)$", "", asked)
    if same := letters.get(asked) or letters.get(plain):
        return [same]
    within = [known for known in letters if known in asked]
    longest = [known for known in within if not any(known in o for o in within if o != known)]
    near = longest or difflib.get_close_matches(asked, letters, n=1, cutoff=0.6)
    near = near or sorted((known for known in letters if asked and asked in known), key=len)
    words = re.findall("[a-z]{4,}", name.lower())
    said = [e.name for e in entries() if words and all(w in e.summary.lower() for w in words)]
    return ([letters[known] for known in near] or said)[:3]
