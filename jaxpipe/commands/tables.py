"""``jaxpipe schedules`` and ``jaxpipe compare``: many schedules in one table, in time alone or on
devices, by the cost model of `jaxpipe plan`.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxpipe.asynchronous import ASYNCHRONOUS_METHODS
from jaxpipe.commands.options import (
    DEFAULT_COSTS,
    check_size,
    check_table,
    layers_of_model,
    message,
    read_sizes,
    say_written,
)
from jaxpipe.commands.printing import output_console, print_parts, print_table, progress_bar, say
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.devices import cluster, find
from jaxpipe.planning.plans import (
    SCHEDULES,
    Offload,
    PlacedPlan,
    Plan,
    layout_of,
    who_computes_ends,
)
from jaxpipe.planning.search import fits, predicted
from jaxpipe.planning.sizes import ModelSizes, Variant
from jaxpipe.runtime.zero import Zero
from jaxpipe.schedule import catalog
from jaxpipe.schedule.device_clock import timelines
from jaxpipe.schedule.offload import kept_on_devices, parts_of
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.problems import ArgumentError, Problem, below_one, plain, refuse
from jaxpipe.schedule.show.page import page
from jaxpipe.schedule.simulate import Costs, Timeline


@dataclasses.dataclass(frozen=True)
class OnDevices:
    """A model on devices.

    Args:
      layer_model: file that `jaxpipe plan --write-sizes` wrote; the options below need it.
      batch: rows of a step; by default those of the configuration.
      data: data shards.
      replica: groups of data shards that hold the same parts.
      expert: data shards over which a layer's experts are split.
      context: devices that share a layer's sequence.
      tensor: devices that share a layer's weights.
      zero: arrays sharded over data: none (0), optimizer state (1), also gradients (2), also
        weights (3).
      remat: none, dots (the default of training on GPUs) or full.
      on_host: what host memory holds: state (the optimizer's), residuals, or state,residuals.
      device: as for `plan`.
      link: links within hosts and between them, as for `plan`.
      exposed: factor for the time that a step waits for collectives within layers: 1 for jaxpipe's
        programs, about 0.1 for systems that hide more of them.
    """

    layer_model: Path | None = None
    batch: int | None = None
    data: int = 1
    replica: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 0
    remat: str = "dots"
    on_host: str = ""
    device: str = "h100"
    link: str | None = None
    exposed: float = 1.0

    def problems(self, rows: int, microbatches: int) -> list[Problem]:
        """Lists what is out of range, or does not fit microbatches of so many rows."""
        axes = {"replica": self.replica, "expert": self.expert}
        if problems := below_one(data=self.data, context=self.context, tensor=self.tensor, **axes):
            return problems
        least = microbatches * self.data
        if rows < 1 or rows % least:
            rule = f"must be rows for $microbatches on $data shards, a multiple of {least}"
            others: dict[str, object] = {"microbatches": microbatches, "data": self.data}
            nearest = (max(1, rows // least) * least,)
            problems.append(Problem("batch", rows, rule, nearest, others))
        if self.data % (self.replica * self.expert):
            rule = "and $expert must divide $data shards together"
            others = {"expert": self.expert, "data": self.data}
            problems.append(Problem("replica", self.replica, rule, (1,), others))
        if unknown := [name for name in self.host_names if name not in Offload._fields]:
            rule = f"has {', '.join(unknown)}, which cannot lie there"
            places = (*Offload._fields, ",".join(Offload._fields))
            problems.append(Problem("on_host", self.on_host, rule, places))
        if not 0 <= self.exposed <= 1:
            problems.append(Problem("exposed", self.exposed, "must be a share, 0 to 1", (0.1, 1)))
        if self.zero not in range(4):
            problems.append(Problem("zero", self.zero, "is not a level of ZeRO", (0, 1, 2, 3)))
        return problems

    def uncounted(self, model: ModelSizes, slices: int) -> list[Problem]:
        """Lists what the file of sizes does not know, of sequences in so many slices."""
        if self.variant(slices) in model.variants:
            return []
        columns = zip(Variant._fields, zip(*sorted(model.variants), strict=True), strict=True)
        known = (f"--{name} {', '.join(map(str, dict.fromkeys(n)))}" for name, n in columns)
        others = self.variant(slices)._asdict()
        rule = "with $context, $expert, $remat and $slices was not counted; the file knows "
        return [Problem("tensor", self.tensor, f"{rule}{'; '.join(known)}", (), others)]

    def variant(self, slices: int) -> Variant:
        """The options that decide the sizes of the model's layers."""
        return Variant(self.context, self.tensor, self.remat, self.expert, slices)

    @property
    def host_names(self) -> list[str]:
        return self.on_host.split(",") if self.on_host else []


def of_schedules(
    options: Mapping[str, Mapping[str, int]],
    on: OnDevices,
    *,
    stages: int,
    microbatches: int,
) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Predicts what each schedule takes on one mesh, and says why the others do not fit it.

    Args:
      options: names of schedules, each with its "chunks" and "slices" where these are given.
    """
    assert on.layer_model is not None
    model = read_sizes(on.layer_model, option="layer_model")
    rows = model.batch_rows if on.batch is None else on.batch
    refuse(on.problems(rows, microbatches))
    count = stages * on.data * on.context * on.tensor
    attained = cluster(find(on.device), count, link=on.link)
    devices = dataclasses.replace(attained, exposed=on.exposed)
    shape = Plan(
        stage=stages, data=on.data, context=on.context, tensor=on.tensor, replica=on.replica,
        schedule="", chunks=1, microbatches=microbatches, rows=rows // (microbatches * on.data),
        remat=on.remat, zero=Zero(on.zero), weight_slots=1, weights="", expert=on.expert,
        on_host=Offload(**dict.fromkeys(on.host_names, True)),
    )  # fmt: skip
    shape = shape._replace(zero=shape.level(on.zero))
    predictions: dict[str, Prediction] = {}
    reasons: dict[str, str] = {}
    entries = {entry.name: entry for entry in catalog.entries()}
    for name, given in options.items():
        default = entries[name].default_chunks if name in entries else 1
        chunks, slices = given.get("chunks", default), given.get("slices", 1)
        refuse(on.uncounted(model, slices))
        if stages * chunks > model.num_layers:
            reasons[name] = f"{stages * chunks} chunks need as many layers"
            continue
        variant, slots = on.variant(slices), 2 if shape.zero.shards_gradients and chunks > 1 else 1
        plan = shape._replace(
            schedule=name, chunks=chunks, slices=slices, weight_slots=slots,
            weights=layout_of(model, variant, stages, chunks),
        )  # fmt: skip
        try:
            choices = [
                predicted(PlacedPlan(plan._replace(ends=ends), model, devices))
                for ends in who_computes_ends(model, variant, stages)
            ]
        except ArgumentError as error:
            reasons[name] = message(error)
            continue
        predictions[name] = min(choices, key=lambda one: (not fits(one), one.step_seconds))
    return predictions, reasons


_NO_DEVICES = OnDevices()

_COMPARED = (
    "All schedules run one model: chunks share the work of a stage. v: chunks per stage. peak: "
    "activations in flight on the stage that keeps most, in microbatches of a full stage; kept, "
    "with --offload: the fewest that a device must keep. free: the bubble on the free-running "
    "clock, as in papers; device: on the device clock, which follows the program. makespan: of a "
    "step on the device clock, in the unit of the stage's costs (`show` takes costs of a chunk)."
)


def schedules() -> None:
    """List the schedules, with their sources; `compare` shows their bubbles and peaks."""
    console = output_console()
    rows = [(entry.name, entry.summary, entry.source) for entry in catalog.entries()]
    print_table(console, ("name", "what it does", "source"), rows)
    methods = list(ASYNCHRONOUS_METHODS)
    say(
        console,
        f"Asynchronous: {', '.join(methods[:-1])} and {methods[-1]}. They never drain the pipeline "
        "and have no bubble if all stages cost the same; "
        f"`jaxpipe show {methods[0]} --stages 4 --microbatches 8` draws the steady state, and "
        "train.py trains with them (pipeline.schedule).",
    )


def compare(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    slices: int | None = None,
    stage_costs: str | None = None,
    layer_costs: str | None = None,
    layers: int | None = None,
    offload: float | None = None,
    devices: Annotated[OnDevices, tyro.conf.arg(name="")] = _NO_DEVICES,
    out: Path | None = None,
) -> None:
    """Compare schedules of one model and mesh: bubble, time and peak in flight.

    With --layer-model, the cost model of `jaxpipe plan` predicts step time and memory per device,
    by part, including transfers that nothing hides.

    Args:
      names: the schedules, as for `show`; by default all that fit.
      stages: p, pipeline stages.
      microbatches: m, microbatches per batch.
      chunks: v, chunks per stage, for schedules with any number; by default each schedule's own.
      slices: k, slices per sequence, for schedules that support them; the slices share the work and
        the messages of a microbatch.
      stage_costs: time of F,B,W of a full stage, and optionally of one message: 1,1.2,0.8,0.1. The
        stage's chunks share it. 1,1,1 if neither this nor --layer-costs is given.
      layer_costs: time of F,B,W of one of the model's layers, in place of --stage-costs.
      layers: layers of the whole model; by default two per stage, or per chunk with --chunks.
      offload: time to move the residuals of an F to the host, or back, as a share of F: 0.8. A
        column then shows the fewest microbatches that a device must keep.
      devices: a traced model on devices, in place of costs.
      out: an .html page to write, with the schedules one above the other, each as `show` draws it.
    """
    counts = {"chunks": chunks, "slices": slices}
    if offload is not None and not offload > 0:
        refuse([Problem("offload", offload, "must be above 0")])
    refuse(below_one(counts, stages=stages, microbatches=microbatches))
    check_size(stages, microbatches * (slices or 1), chunks or 1)
    chosen = {
        entry.name: {o: n for o, n in counts.items() if n and f"num_{o}" in entry.defaults}
        for entry in catalog.entries()
    }
    for option, number in counts.items():
        if number and names and not any(option in chosen.get(name, ()) for name in names):
            rule = f"has no effect: none of {', '.join(names)} reads it"
            refuse([Problem(option, number, rule, (None,))])
    if out is not None and out.suffix.lower() != ".html":
        rule = "must end in .html: it is a page for a browser"
        refuse([Problem("out", str(out), rule, (str(out.with_suffix(".html")),))])
    if devices.layer_model is not None:
        given = {"stage_costs": stage_costs, "layer_costs": layer_costs, "layers": layers}
        refuse(_instead(**given, offload=offload, out=out))
        wanted = {name: chosen.get(name, {}) for name in names or SCHEDULES}
        shape = {"stages": stages, "microbatches": microbatches}
        _print_predictions(*of_schedules(wanted, devices, **shape))
        return
    if stage_costs is None and layer_costs is None:
        stage_costs = DEFAULT_COSTS
    costs = {"stage_costs": stage_costs, "layer_costs": layer_costs}
    model = layers_of_model(stages, layers=layers, chunks=chunks or 1, **costs)
    assert model is not None
    compared, reasons = [], {}
    every = names or tuple(entry.name for entry in catalog.entries())
    with progress_bar() as bar:
        done = bar.add_task("", total=len(every))
        for number, name in enumerate(every):
            bar.update(done, description=name, completed=number)
            own: dict[str, Any] = chosen.get(name, {})
            layers_of_pass = [_of_slice(cost, own.get("slices", 1)) for cost in model]
            try:
                schedule = catalog.build(
                    name,
                    stages=stages,
                    microbatches=microbatches,
                    layer_costs=layers_of_pass,
                    **own,
                )
                _, priced = cut_layers(layers_of_pass, schedule.placement)
            except ValueError as error:
                if names:
                    raise
                reasons[name] = message(error)
                continue
            check_table(schedule)
            compared.append(timelines(schedule, priced))
    if not compared:
        raise ValueError("\n".join(dict.fromkeys(reasons.values())))
    console = output_console()
    _print_rows(console, compared, offload)
    say(console, _COMPARED)
    if out is not None:
        out.write_text(page(compared), encoding="utf-8")
        say_written(out)
    for name, reason in reasons.items():
        say(console, f"{name} does not fit: {reason}")


def _of_slice(cost: Costs, num_slices: int) -> Costs:
    """The share of a layer's costs that an average slice has."""
    shares = {name: getattr(cost, name) / num_slices for name in ("f", "b", "w", "message")}
    return dataclasses.replace(cost, **shares)


def _print_predictions(predictions: Mapping[str, Prediction], reasons: Mapping[str, str]) -> None:
    rows = [
        (f"{name}, {plan.slices} slices" if (plan := one.plan).slices > 1 else name, one)
        for name, one in sorted(predictions.items(), key=lambda item: item[1].step_seconds)
    ]
    parts = ("ms of a step", "seconds", 1e3), ("GB of a device", "bytes", 1e-9)
    console = output_console()
    for title, which, scale in parts if rows else ():
        print_parts(console, title, "schedule", rows, which, scale)
    if rows:
        print("transfers: over data, if nothing hides them. waits: for other stages and messages.")
    for name, prediction in rows:
        limit = prediction.placed.cluster.memory_bytes
        if prediction.device_bytes > limit:
            print(f"{name} takes more than the {limit / 1e9:.3g} GB that a plan may use")
    for name, reason in reasons.items():
        print(f"{name} does not fit: {reason}")


def _instead(**given: object) -> list[Problem]:
    """Lists the options that --layer-model replaces, or cannot be combined with."""
    others = {"layer_model": None}
    return [
        Problem(name, value, "cannot be combined with $layer_model", (None,), others)
        for name, value in given.items()
        if value is not None
    ]


def _print_rows(
    console: Console, compared: Sequence[tuple[Timeline, Timeline]], offload: float | None
) -> None:
    sliced = any(free.schedule.num_slices > 1 for free, _ in compared)
    counted = ("k",) * sliced, ("peak", "kept")[: 2 if offload else 1]
    columns = "schedule", "v", *itertools.chain(*counted), "free", "device", "makespan"
    rows = []
    for free, device in compared:
        peak = free.in_full_stages(max(free.peak_in_flight))
        cells = [free.schedule.name, str(free.schedule.num_chunks)]
        cells += [str(free.schedule.num_slices)] if sliced else []
        cells.append(f"{peak:g}")
        if offload is not None:
            kept = kept_on_devices(free.schedule, parts_of(offload, free.costs))
            cells.append(f"{free.in_full_stages(max(kept)):g}")
        cells.append(f"{free.bubble_ratio:.1%}")
        cells += [f"{device.bubble_ratio:.1%}", plain(device.makespan)]
        rows.append(cells)
    print_table(console, columns, rows)
