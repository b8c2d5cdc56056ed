"""Does compiled memory follow the schedule's prediction, and its promise against 1F1B?

Memory is temporaries and returned gradients: what a step takes beside its arguments. Compiles (does
not run) a GPT of width 256, sequence 128, 4 rows per microbatch, float32. First 16 layers on 4
simulated stages x 2 data shards, for several numbers of microbatches; then 16 layers on 8 stages,
whose activation memory is compared with 1F1B's; then 16 layers on 2 stages, a whole training step
with the update after the backward and within it; then one of all parameters and of adapters alone,
on 4 stages. Fails if a case is more than 5% off, or if more
microbatches take more memory although the schedule says they need not.

    python -m benchmarks.memory [--all]
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from typing import Annotated, Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxpipe
from benchmarks import harness
from jaxpipe.runtime.layers.split import REMAT_POLICIES
from jaxpipe.runtime.memory import compiled_bytes, predicted_bytes
from jaxpipe.schedule import catalog
from models import gpt

CONFIG = gpt.GPTConfig(
    vocab_size=2048, sequence_length=128, num_layers=16, width=256, num_heads=4, dtype="float32"
)
ROWS = 4
STAGES, DATA = 4, 2
FAMILY_STAGES, FAMILY_MICROBATCHES = 8, 32
FAMILY = ("1f1b", "zb-v", "v-zb", "v-half", "v-min", "1f1b-v", "auto")
"""Compared with 1F1B: the papers promise them equal, equal, 1/2, 1/3 and 2/3 of its activations."""
MICROBATCHES = (8, 32, 128)
TOLERANCE = 0.05
PARTS = {"residuals MB": ("until_b", "until_w"), "B to W MB": ("crossing",)}
"""Parts of the activations: values that F leaves for B and W, and those that B leaves for W."""
LABEL = ("schedule", "remat", "ZeRO", "m")
Case = tuple[str, str, int, int]
"""Schedule, remat policy, ZeRO level, number of microbatches."""
Table = Literal["prediction", "family", "updates", "trainable"]
RANK = 8


def subset() -> list[Case]:
    """A selection that runs in minutes: each remat policy and level, and each schedule family."""
    remats = [("1f1b", remat, zero, 8) for remat in REMAT_POLICIES for zero in (0, 3)]
    remats += [("1f1b", "none", zero, 8) for zero in (1, 2)]
    flat = [("1f1b-fused", "full", 3, m) for m in MICROBATCHES]
    names = ("gpipe", "interleaved", "breadth-first", "hanayo", "zb-h2", "v-half", "auto")
    return [*remats, *flat, ("zb-v", "full", 3, 8), *((name, "none", 3, 8) for name in names)]


def pipeline(
    case: Case, *, stages: int, data: int, **options: int
) -> tuple[jaxpipe.Pipeline, dict[str, jax.ShapeDtypeStruct]]:
    """The pipeline of a case, and the shapes of its batch."""
    name, remat, zero, microbatches = case
    pipe = jaxpipe.Pipeline(
        gpt.model(CONFIG, vocabulary_axis="stage"),
        jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0))),
        schedule=jaxpipe.schedules.build(name, stages=stages, microbatches=microbatches, **options),
        mesh=jaxpipe.make_mesh(stage=stages, data=data),
        remat=remat,
        zero=zero,
    )
    rows = (ROWS * microbatches * data, CONFIG.sequence_length + 1)
    return pipe, {"tokens": jax.ShapeDtypeStruct(rows, jnp.int32)}


def measure(case: Case, *, stages: int, data: int) -> dict[str, Any]:
    """Predicted and compiled memory of one case, in MB on each device."""
    pipe, batch = pipeline(case, stages=stages, data=data)
    buffers = predicted_bytes(pipe, batch)
    predicted, compiled = sum(buffers.values()), compiled_bytes(pipe, batch)
    return {
        **dict(zip(LABEL, case, strict=True)),
        "predicted MB": predicted / 1e6,
        "compiled MB": compiled / 1e6,
        "compiled / predicted": compiled / predicted,
        **{part: sum(buffers[name] for name in names) / 1e6 for part, names in PARTS.items()},
    }


def updates() -> list[dict[str, Any]]:
    """Temporaries of a training step that updates after the backward, and of one that does so
    within it, chunk by chunk."""
    found: list[dict[str, Any]] = []
    adam = optax.adam(1e-3)
    for data, zero in ((1, 0), (2, 0), (2, 3)):
        harness.note(f"update within the step: {data} data shards, ZeRO-{zero}")
        case = ("modular-fused", "full", zero, MICROBATCHES[0])
        pipe, batch = pipeline(case, stages=2, data=data, chunks=8)
        params, state = pipe.placed_params, pipe.optimizer_placing(adam).placed

        def temporaries(update: str, pipe=pipe, arguments=(params, state, batch)) -> float:
            lowered = pipe.train_step(adam, update=update).lower(*arguments)
            memory = lowered.compile().memory_analysis()
            assert memory is not None, "the CPU backend knows its memory"
            return memory.temp_size_in_bytes / 1e6

        row = {"data": data, "ZeRO": zero, "after MB": temporaries("step")}
        found.append(row | {"within MB": temporaries("chunk")})
    return found


def adapted(dtype: Any) -> tuple[jaxpipe.Model, dict[str, Any]]:
    """The GPT with low-rank adapters on every matrix of its layers, which are of ``dtype``; and
    the shapes of its parameters."""
    plain = gpt.model(CONFIG, vocabulary_axis="stage")
    params = jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0)))

    def parts(w: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
        if w.ndim < 3:  # a norm
            return {"base": w}
        layers, rows, columns = w.shape
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        return {
            "base": jax.ShapeDtypeStruct(w.shape, dtype),
            "scale": shape((layers, 1, columns)),
            "lora_a": shape((layers, rows, RANK)),
            "lora_b": shape((layers, RANK, columns)),
        }

    def kernel(w: dict[str, jax.Array]) -> jax.Array:
        if "lora_a" not in w:
            return w["base"]
        return w["base"].astype(jnp.float32) * w["scale"] + w["lora_a"] @ w["lora_b"]

    def layer(w: Any, x: Any, batch: Any, rng: Any) -> Any:
        return plain.layer(jax.tree.map(kernel, w, is_leaf=lambda n: "base" in n), x, batch, rng)

    layers = jax.tree.map(parts, params["layers"])
    return dataclasses.replace(plain, layer=layer), params | {"layers": layers}


def adapters() -> list[dict[str, Any]]:
    """A training step of all parameters, and of adapters on float32 and on int8 weights."""
    adam, found = optax.adam(1e-3), []
    plain = gpt.model(CONFIG, vocabulary_axis="stage")
    params = jax.eval_shape(lambda: gpt.init(CONFIG, jax.random.key(0)))
    cases = {
        "all parameters": (plain, params, None),
        "adapters on float32": (*adapted(jnp.float32), "*lora_*"),
        "adapters on int8": (*adapted(jnp.int8), "*lora_*"),
    }
    for zero, (name, (model, shapes, trainable)) in itertools.product((0, 3), cases.items()):
        harness.note(f"{name}: ZeRO-{zero}")
        pipe = jaxpipe.Pipeline(
            model,
            shapes,
            schedule=jaxpipe.schedules.build("1f1b-fused", stages=STAGES, microbatches=8),
            mesh=jaxpipe.make_mesh(stage=STAGES, data=DATA),
            trainable=trainable,
            remat="full",
            zero=zero,
        )
        rows = (ROWS * 8 * DATA, CONFIG.sequence_length + 1)
        batch = {"tokens": jax.ShapeDtypeStruct(rows, jnp.int32, sharding=pipe.batch_sharding)}
        state = pipe.optimizer_placing(adam).placed
        step = pipe.train_step(adam).lower(pipe.placed_params, state, batch).compile()
        memory = step.memory_analysis()
        assert memory is not None, "the CPU backend knows its memory"
        sizes = {
            "arguments MB": memory.argument_size_in_bytes / 1e6,
            "temporaries MB": memory.temp_size_in_bytes / 1e6,
        }
        found.append({"trained": name, "ZeRO": zero, **sizes, "together MB": sum(sizes.values())})
    return found


def peak(name: str, stages: int, microbatches: int) -> float:
    """In flight, in microbatches of a full stage: the schedule's own count."""
    schedule = catalog.build(name, stages=stages, microbatches=microbatches)
    assert schedule.peak_in_flight is not None  # every built-in schedule promises one
    return max(schedule.peak_in_flight) / schedule.num_chunks


def against_1f1b() -> list[dict[str, Any]]:
    """Residuals of the V family over those of 1F1B, beside the ratio of their promised peaks.

    The promise is rounded when stages are few; the last column is the same ratio at 64 stages.
    """
    found: list[dict[str, Any]] = []
    for name in FAMILY:
        harness.note(f"p={FAMILY_STAGES}: {name}")
        case = (name, "none", 0, FAMILY_MICROBATCHES)
        row = measure(case, stages=FAMILY_STAGES, data=1)
        row["of 1F1B's"] = row["residuals MB"] / (found or [row])[0]["residuals MB"]
        row["promised"] = peak(name, FAMILY_STAGES, FAMILY_MICROBATCHES) / FAMILY_STAGES
        row["promised, p=64"] = peak(name, 64, 128) / 64 if name != "auto" else float("nan")
        found.append(row)
    return found


def grows(rows: list[dict[str, Any]]) -> list[str]:
    """Cases whose compiled memory grows with the microbatches although the prediction does not."""
    problems = []
    by_case = {tuple(row[key] for key in LABEL): row for row in rows}
    for (*case, m), row in by_case.items():
        first = by_case.get((*case, MICROBATCHES[0]), row)
        more = row["compiled MB"] / first["compiled MB"]
        expected = row["predicted MB"] / first["predicted MB"]
        if abs(more / expected - 1) > TOLERANCE / 5:
            problems.append(f"{case}: {more:.3f} times as much at m={m}, predicted {expected:.3f}")
    return problems


def off(rows: list[dict[str, Any]]) -> list[str]:
    """Cases whose compiled memory differs from the prediction."""
    return [
        f"{[row[key] for key in LABEL]}: compiled / predicted {row['compiled / predicted']:.3f}"
        for row in rows
        if abs(row["compiled / predicted"] - 1) > TOLERANCE
    ]


def prediction(everything: bool) -> list[dict[str, Any]]:
    """Every case at ``STAGES`` stages."""
    cases = subset()
    if everything:
        names = harness.every_schedule()
        cases = list(itertools.product(names, REMAT_POLICIES, (0, 3), MICROBATCHES))
    found = []
    for number, case in enumerate(cases):
        harness.note(f"compiling {number + 1} of {len(cases)}: {case}")
        found.append(measure(case, stages=STAGES, data=DATA))
    return found


def main(
    everything: Annotated[bool, tyro.conf.arg(name="all")] = False,
    tables: tuple[Table, ...] = get_args(Table),
) -> int:
    """Prints the tables, writes them, and returns 1 if a case is off.

    Args:
      everything: every schedule, remat policy, ZeRO 0 and 3 and number of microbatches; takes
        hours.
      tables: which of them to make.
    """
    harness.simulate(FAMILY_STAGES)
    jax.config.update("jax_disable_most_optimizations", True)  # of LLVM: nothing runs
    report = functools.partial(
        harness.report, bars=["predicted MB", "compiled MB"], axis="MB on each device"
    )
    problems = []
    if "prediction" in tables:
        found = prediction(everything)
        problems += [*grows(found), *off(found)]
        title = f"memory beside arguments, p={STAGES}, {DATA} data shards"
        report("memory", found, title=title, label=LABEL)
    if "family" in tables:
        family = against_1f1b()
        title = f"memory beside arguments, p={FAMILY_STAGES} m={FAMILY_MICROBATCHES}, against 1F1B"
        report("memory-family", family, title=title, label=["schedule"])
        problems += off(family)
    if "updates" in tables:
        harness.report(
            "memory-updates",
            updates(),
            title="temporaries of a training step: the update after it, and within it",
            label=["data", "ZeRO"],
            bars=["after MB", "within MB"],
            axis="MB on each device",
        )
    if "trainable" in tables:
        harness.report(
            "memory-trainable",
            adapters(),
            title=f"a training step of all parameters, and of adapters of rank {RANK}",
            label=["trained", "ZeRO"],
            bars=["arguments MB", "temporaries MB"],
            axis="MB on each device",
        )
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
