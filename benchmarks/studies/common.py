"""What the studies share: traced models, the best plan of a method, critical batches, pictures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import jaxpipe
from benchmarks import harness
from jaxpipe.planning import cost, counting, without_devices
from jaxpipe.planning.cost import Prediction
from jaxpipe.planning.devices import Cluster
from jaxpipe.planning.memory import least_bytes
from jaxpipe.planning.plans import PlacedPlan, Plan, Program, families, grown, table_of
from jaxpipe.planning.search import Goal, evaluated
from jaxpipe.planning.sizes import ModelSizes, Variant
from jaxpipe.schedule.simulate import Costs, simulate
from models import gpt

IMAGES = Path(__file__).parent / "images"
ONE_STEP = Goal(None, (1,))
MOST_SHARING = 8
"""Devices that share a layer, at most: those of a host."""

Allowed = Callable[[Plan], bool]
Timed = Callable[[Prediction], Mapping[str, float]]


def gpt_of(layers: int, width: int, heads: int, length: int) -> gpt.GPTConfig:
    """A GPT as they were in 2021 and 2022: LayerNorm, biases, GELU and a tied table."""
    return gpt.GPTConfig(
        vocab_size=32000, sequence_length=length, num_layers=layers, width=width, num_heads=heads,
        positions="learned", norm="layer", activation="gelu", bias=True, dtype="bfloat16",
    )  # fmt: skip


def sizes(
    name: str,
    config: gpt.GPTConfig,
    *,
    tensors: Sequence[int] = (1, 2, 4, 8),
    remats: Sequence[str] = ("none", "full"),
    context: int = 1,
    fp8: Sequence[str] = (),
) -> ModelSizes:
    """Traces a GPT that Adam trains with float32 sums; `harness.simulate` made the devices."""
    shared = {"context": context} if context > 1 else {}
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    length = config.sequence_length

    def batch(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}

    def counted(tensor: int) -> Any:
        axes = shared | ({"tensor": tensor} if tensor > 1 else {})
        names = {f"{name}_axis": name for name in axes}
        pipe = jaxpipe.Pipeline(
            gpt.model(config, vocabulary_axis="stage", **names).in_pairs(),  # whole, not in pieces
            params,
            schedule="1f1b",
            microbatches=2,
            mesh=jaxpipe.make_mesh(stage=1, **axes),
            fp8=fp8,
            remat="none",
        )
        return counting.sizes(pipe, batch, compute_bytes=2, remats=remats)

    with without_devices.attention_of_gpus():
        variants = {
            Variant(context, t, remat): few for t in tensors for remat, few in counted(t).items()
        }
    harness.note(f"traced {name}")
    return ModelSizes(
        name=name, tokens_per_row=length, parameter_bytes=4, compute_bytes=2, moments=2,
        batch_rows=1, row_bytes=4 * (length + 1), variants=variants,
        in_pieces=all(map(config.in_pieces, config.layer_kinds)),
    )  # fmt: skip


def best(
    model: ModelSizes,
    cluster: Cluster,
    batches: Sequence[int],
    allowed: Allowed,
    *,
    goal: Goal = ONE_STEP,
    timed: Timed = lambda found: found.seconds,
) -> Prediction | None:
    """The plan of the shortest training (of one step, if the goal has no tokens) that fits the
    memory; None if none does. Orders are the published ones, on the free-running clock.

    Args:
      batches: rows of a step that may be chosen.
      allowed: which plans the method has.
      timed: seconds of a plan by part, not below `cost.least_seconds` in sum.
    """
    excluded: Counter[str] = Counter()
    fitting = [
        placed
        for family in families(model, cluster, batches, excluded)
        for placed in family
        if not placed.plan.ends
        and allowed(placed.plan)
        and least_bytes(placed) <= cluster.memory_bytes
    ]
    bounds = {one: _steps(goal, one) * cost.least_seconds(one) for one in fitting}
    found = None
    for one in sorted(fitting, key=bounds.__getitem__):
        if found is not None and bounds[one] >= found.train_seconds:
            break
        plan = evaluated(one, goal, excluded)
        if plan is None:
            continue
        plan = plan._replace(seconds=timed(plan))
        if found is None or plan.train_seconds < found.train_seconds:
            found = plan
    return found


def _steps(goal: Goal, placed: PlacedPlan) -> float:
    return goal.steps(placed.plan.batch_rows * placed.model.tokens_per_row)


def hidden(found: Prediction) -> Mapping[str, float]:
    """Seconds by part if messages travel while stages compute and delay only who waits for them."""

    return on_free_clock(found, lambda layers, layer: layer.times(layers))


def on_free_clock(found: Prediction, chunk: Callable[[int, Costs], Costs]) -> Mapping[str, float]:
    """Seconds by part of a plan's published order on the free-running clock.

    Args:
      chunk: the costs of a chunk of so many layers, from those of a layer.
    """
    layer = cost.layer_costs(found.placed)

    def makespan(one: Program) -> float:
        table = table_of(one)
        costs = [chunk(layers, layer) for layers in table.layer_counts]
        return simulate(table.schedule, costs).makespan

    program = cost.program_of(found.placed, published=True)
    return {**found.seconds, "waits": grown(program, makespan) - found.seconds["layers"]}


def in_words(plan: Plan) -> str:
    """A plan as the tables of the pages have it.

    Example:
      >>> from jaxpipe.runtime.zero import Zero
      >>> in_words(Plan(8, 2, 1, 4, 1, "1f1b-fused", 1, 16, 2, "full", Zero(1), 1, "stacked"))
      '8 x 2 x 4, m=16 x 2, full, ZeRO-1'
    """
    chunks = f", v={plan.chunks}" if plan.chunks > 1 and plan.stage > 1 else ""
    zero = f", ZeRO-{plan.zero}" if plan.zero.shards_state else ""
    return (
        f"{plan.stage} x {plan.data} x {plan.tensor}{chunks}, m={plan.microbatches} x {plan.rows}, "
        f"{plan.remat}{zero}"
    )


def critical_tokens(parameters: float) -> float:
    """The critical batch of a language model at the loss that its size allows.

    Kaplan et al. 2020 (arXiv 2001.08361): B_crit = 2e8 / L^(1 / .21) tokens (equation 1.4) at the
    loss L = (8.8e13 / N)^.076 (equation 1.1).

    Example:
      >>> f"{critical_tokens(52e9):.2g}"
      '1.4e+07'
    """
    loss = (8.8e13 / parameters) ** 0.076
    return 2e8 / loss ** (1 / 0.21)


def figure(columns: int = 2, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A row of empty plots."""
    drawn = Figure(figsize=(4.4 * columns, height), layout="constrained")
    FigureCanvasAgg(drawn)
    plots = list(drawn.subplots(1, columns, squeeze=False)[0])
    for axes in plots:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return drawn, plots


def publish(name: str, tables: Mapping[str, Sequence[Mapping[str, Any]]], drawn: Figure) -> None:
    """Writes the results, prints their tables, which the page sums up, and draws its picture.

    Args:
      name: of the study, as in its page's file.
      tables: rows by title.
      drawn: the picture.
    """
    for number, (title, rows) in enumerate(tables.items()):
        harness.write(f"study-{name}-{number}", rows, title=title, figure=drawn)
        print(f"\n{title}\n\n{markdown(rows)}\n")
    print(f"picture: {harness.save(drawn, IMAGES / f'study-{name}.svg')}")


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table of a page.

    Example:
      >>> print(markdown([{"p": 4, "bubble": 0.25}]))
      | p | bubble |
      |---|---|
      | 4 | 0.25 |
    """

    def line(cells: Iterable[object]) -> str:
        return f"| {' | '.join(f'{c:.3g}' if isinstance(c, float) else str(c) for c in cells)} |"

    return "\n".join(
        [line(rows[0]), "|---" * len(rows[0]) + "|", *(line(r.values()) for r in rows)]
    )


def with_peak(cluster: Cluster, share: float) -> Cluster:
    """The cluster if matmuls attain another share of the peak."""
    efficiency = dataclasses.replace(cluster.device.efficiency, flops=share)
    device = dataclasses.replace(cluster.device, efficiency=efficiency)
    return dataclasses.replace(cluster, device=device)
