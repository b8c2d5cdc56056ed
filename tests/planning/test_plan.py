"""The search for a plan, the command, and the trainer's reader and writer."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from importlib.metadata import EntryPoint

import pytest

from jaxpipe import cli
from jaxpipe.commands import plan as plan_command
from jaxpipe.errors import ArgumentError
from jaxpipe.planning import configurations, cost, devices, plans, search
from jaxpipe.planning.plans import Offload, PlacedPlan, Plan
from jaxpipe.planning.search import Goal
from jaxpipe.planning.sizes import Kernel, LayerSizes, Linear, ModelSizes, Pass, Sizes, Variant
from train import checks, configured, plan
from train.command_line import parse


def synthetic(layers: int = 4, width: int = 4096) -> ModelSizes:
    """A model of equal layers, in round numbers; with full rematerialization B runs F again."""
    weights, nothing = 12 * width**2, Linear(0, 0)
    activation = Linear(0, 2 * 2048 * width)

    def matmuls(times: int) -> Pass:
        flops = Linear(0, 2.0 * times * weights * 2048)
        return Pass((Kernel(flops, Linear(2.0 * weights, 0)),), nothing, ())

    def sizes(times: int, kept: int) -> Sizes:
        until = Linear(0, kept * activation.per_row)
        layer = LayerSizes(
            *(matmuls(1), matmuls(times), matmuls(1), weights),
            *(until, nothing, activation),
            *(until, ((12 * width, width),)),
        )
        vocabulary = 32000 * width
        return Sizes(
            (layer,), (0,) * layers, activation, vocabulary, vocabulary, matmuls(1), activation
        )

    variants = {Variant(1, 1, "none"): sizes(1, 16), Variant(1, 1, "full"): sizes(2, 1)}
    return ModelSizes("synthetic", 2048, 4, 2, 2, 32, 8192, variants)


def exhaustive(model: ModelSizes, cluster: devices.Cluster, goal: Goal):
    """Every plan that fits, with its published order."""
    skipped = Counter[str]()
    on_host = plans.on_host(model, cluster)
    every = plans.families(model, cluster, goal.batches, skipped, on_host=on_host)
    predictions = [search.evaluated(one, goal, skipped) for family in every for one in family]
    return [one for one in predictions if one is not None]


def as_run(plan: Plan, model: ModelSizes, cluster: devices.Cluster) -> cost.Prediction:
    """The plan as it would run, with embedding and head where that is faster."""
    choices = (dataclasses.replace(plan, ends=ends) for ends in (False, True))
    predictions = (search.predicted(PlacedPlan(choice, model, cluster)) for choice in choices)
    return min(predictions, key=lambda one: one.step_seconds)


@pytest.fixture(scope="module")
def model() -> ModelSizes:
    return synthetic()


def test_model_flops_count_no_recomputation(model):
    """Also where only a policy that recomputes was counted, as far as it is known."""
    cluster, goal = devices.cluster("h100", 4, memory=60e9), Goal(None, (16,))
    best = search.search(model, [cluster], goal).best
    matmul = 2.0 * 12 * 4096**2 * 2048
    for found in best:
        per_row = (3 * model.num_layers + 1) * matmul
        spent = per_row * 16 / (found.step_seconds * 4 * cluster.device.flops)
        assert found.model_flops_share == pytest.approx(spent)
    full = {key: one for key, one in model.variants.items() if key.remat == "full"}
    alone = dataclasses.replace(model, variants=full)
    assert search.search(alone, [cluster], goal).best[0].model_flops_share > 0


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_no_plan_is_missed(model, objective):
    cluster = devices.cluster("h100", 4, memory=60e9)
    goal = Goal(1e9, (16,), objective=objective)
    result = search.search(model, [cluster], goal)

    def value(prediction: cost.Prediction) -> float:
        return goal.value(prediction.measures)

    everything = exhaustive(model, cluster, goal)
    least = min(map(value, everything))
    # Of the finalists, each with the order that would run, one had the least with published orders.
    again = [search.evaluated(one.placed, goal, Counter()) for one in result.best]
    assert min(value(one) for one in again if one is not None) == least
    assert [*map(value, result.best)] == sorted(map(value, result.best))
    assert all(one.device_bytes <= 60e9 for one in (*result.best, *result.front))
    shown = {one.plan for one in (*result.best, *result.front)}
    assert result.considered == result.excluded.total() + len(shown)


def test_the_front_is_one(model):
    cluster = devices.cluster("h100", 4)
    front = search.search(model, [cluster], Goal(1e9, (16,))).front
    for one, other in itertools.permutations(front, 2):
        assert one.train_seconds < other.train_seconds or one.device_bytes < other.device_bytes
    assert len(front) > 1


def test_no_plan_is_much_better_than_those_that_were_looked_at(model):
    """In time, memory and cost at once: what is left out promises no more than a quarter."""
    cluster, goal = devices.cluster("h100", 2, memory=60e9), Goal(1e9, (16,))
    on_host = plans.on_host(model, cluster)
    every = list(plans.families(model, cluster, goal.batches, Counter(), on_host=on_host))
    excluded = Counter[str]()
    looked_at = search.screen(every, goal, 2, excluded)
    assert excluded["slower"] > 0
    assert len(looked_at) + excluded.total() == sum(map(len, every))
    for one in exhaustive(model, cluster, goal):
        assert any(
            near.train_seconds <= 1.25 * one.train_seconds
            and near.device_bytes <= 1.25 * one.device_bytes
            for near in looked_at
        )


def test_what_a_plan_needs_at_least_is_never_more_than_it_needs(model):
    cluster = devices.cluster("h100", 4)
    goal = Goal(None, (16,))
    for one in exhaustive(model, cluster, goal)[::7]:
        least = cost.least_bytes(one.placed)
        assert least <= one.device_bytes or least == pytest.approx(one.device_bytes, rel=1e-12)
        program = cost.program_of(one.placed, published=True)
        bounds = cost.least_seconds(one.placed), cost.least_seconds(one.placed, program)
        assert max(bounds) <= one.step_seconds * (1 + 1e-9)


def test_what_a_family_needs_at_least_is_never_more_than_its_plans_do(model):
    cluster = devices.cluster("h100", 16, link="nvlink:4,ib:400")
    on_host = plans.on_host(model, cluster)
    every = list(plans.families(model, cluster, (64,), Counter(), on_host=on_host))
    assert {family[0].plan.replica for family in every} == {1, 2, 4}
    for family in every[::5]:
        seconds = cost.least_of_family(family[0])
        memory = min(map(cost.least_bytes, plans.leanest(family)))
        for placed in family:
            assert seconds <= cost.least_seconds(placed) * (1 + 1e-9)
            assert memory <= cost.least_bytes(placed) * (1 + 1e-9)


def test_compiled_memory_replaces_what_was_predicted(model):
    cluster = devices.cluster("h100", 4, memory=60e9)
    goal = Goal(1e9, (16,))
    result = search.search(model, [cluster], goal)
    first, second, *_ = result.best
    taken = {first.plan: 61e9, second.plan: 30e9}
    found = search.compiled(result, lambda one: taken[one.plan], count=2, goal=goal)
    assert [(one.plan, one.device_bytes) for one in found.best] == [(second.plan, 30e9)]
    assert found.excluded["compiled"] == 1
    assert first.plan not in {one.plan for one in found.front}
    with pytest.raises(ArgumentError, match=r"2 plans that were compiled: the leanest takes"):
        search.compiled(result, lambda one: 61e9, count=2, goal=goal)


def test_too_little_memory_is_refused(model):
    cluster = devices.cluster("h100", 4, memory=1e9)
    with pytest.raises(ArgumentError, match="is too little for any plan: the leanest needs"):
        search.search(model, [cluster], Goal(None, (32,)))


def test_the_best_plan_without_stages_stands_beside_the_best(model):
    cluster, goal = devices.cluster("h100", 4), Goal(None, (32,))
    plain = search.search(model, [cluster], goal).without_stages
    of_one_stage = search.search(model, [cluster], goal, allowed=lambda plan: plan.stage == 1)
    assert plain == of_one_stage.best[0] == of_one_stage.without_stages


def test_words_about_stages_fit_the_devices_and_the_batch(model):
    """One device has no other axes, and a batch of 4 rows no 8 data shards."""

    def words(devices_: int, rows: int) -> list[str]:
        goal, cluster = Goal(None, (rows,)), devices.cluster("h100", devices_)
        return list(plan_command._in_words(search.search(model, [cluster], goal), goal))

    on_one = search.search(model, [devices.cluster("h100", 1)], Goal(None, (32,)))
    assert all(one.plan.chunks == 1 for one in (*on_one.best, *on_one.front))
    (alone,) = words(1, 32)
    assert alone.startswith("best: one device, ")
    best, plain = words(8, 4)
    assert "stages" in best
    assert "the batch has too few rows" in plain


def test_small_models_and_steps_are_shown_in_as_many_digits(tmp_path, capsys, monkeypatch):
    """Titles stand above tables in whole lines."""
    monkeypatch.setenv("COLUMNS", "100")
    path = tmp_path / "sizes.json"
    path.write_text(synthetic(width=64).to_json())
    assert cli.main(["plan", "--sizes", str(path), "--devices", "4", "--device", "h100"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    _, columns, _, row, *_ = lines[lines.index("GB of a device") :]
    assert "parameters" in columns
    assert "0.00 " not in row
    assert not re.search(r"step, s 0\.00\d\b", printed)
    assert any(line.startswith("best plans; a mesh is") for line in lines)


def test_axes_of_a_mesh_multiply_to_its_devices(model, tmp_path, capsys):
    """Experts are split over data shards, and are no axis of their own."""
    (sizes,) = (one for variant, one in model.variants.items() if variant.remat == "none")
    mixture = dataclasses.replace(model, variants={Variant(1, 1, "none", 2): sizes})
    path = tmp_path / "sizes.json"
    path.write_text(mixture.to_json())
    assert cli.main(["plan", "--sizes", str(path), "--devices", "4", "--device", "h100"]) == 0
    printed = capsys.readouterr().out
    assert "with experts over 2 data shards" in printed
    assert "expert 2" in printed
    assert "x expert" not in printed
    meshes = re.findall(r"^\d+ +(\d+) x (\d+) ", printed, re.MULTILINE)
    assert meshes
    assert all(int(stages) * int(shards) == 4 for stages, shards in meshes)


def test_the_command_reads_a_file_of_sizes(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    path = tmp_path / "sizes.json"
    path.write_text(model.to_json())
    arguments = ["plan", "--sizes", str(path), "--devices", "2", "4", "--device", "h100"]
    assert cli.main([*arguments, "--tokens", "1e9"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "best: ",
        "best plans",
        "no other plan is better",
        "milliseconds of a step",
        "are out:",
    ):
        assert text in printed
    assert "host nothing" in printed  # once for all plans
    assert not re.search(r"…|\de-\d", printed)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (["--on-host", "state,residuals"], {"on_host": Offload(state=True, residuals=True)}),
        (["--replica", "2"], {"replica": 2}),
        (["--context", "2", "--expert", "4"], {"context": 2, "expert": 4}),
    ],
)
def test_a_compared_mesh_has_every_axis_and_may_use_the_host(
    options, changes, model, tmp_path, capsys
):
    one = Plan(2, 4, 1, 1, 1, "1f1b", 1, 4, 2, "none", 3, 1, "unrolled")
    one = dataclasses.replace(one, **changes)
    variant = Variant(one.context, one.tensor, one.remat, one.expert)
    model = dataclasses.replace(model, variants={variant: model.variants[Variant(1, 1, "none")]})
    path = tmp_path / "sizes.json"
    path.write_text(model.to_json())
    mesh = ["--stages", "2", "--microbatches", "4", "--data", "4", "--zero", "3", "--remat", "none"]
    assert cli.main(["compare", "1f1b", "--layer-model", str(path), *mesh, *options]) == 0
    printed = capsys.readouterr().out
    cluster = devices.cluster("h100", 8 * one.context)
    exact = as_run(one, model, cluster)
    assert f"{1e3 * exact.step_seconds:.3g}" in printed
    assert f"{1e-9 * exact.device_bytes:.3g}" in printed


def test_schedules_are_compared_on_a_mesh(model, tmp_path, capsys):
    path = tmp_path / "sizes.json"
    path.write_text(model.to_json())
    mesh = ["--stages", "2", "--microbatches", "4", "--data", "2", "--zero", "3", "--remat", "none"]
    arguments = ["compare", "1f1b", "zb-v", "1f1b-v", "--layer-model", str(path), *mesh]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    plan_of_it = Plan(2, 2, 1, 1, 1, "1f1b", 1, 4, 4, "none", 3, 1, "unrolled")
    exact = as_run(plan_of_it, model, devices.cluster("h100", 4))
    whole = f"{1e3 * exact.step_seconds:.3g}"
    (row,) = [line for line in printed.splitlines() if "1f1b " in line and whole in line]
    assert f"{1e3 * exact.seconds['transfers']:.3g}" in row
    assert cli.main(["compare", "1f1b", *arguments[4:]]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert row.split() in rows
    chunks = ["compare", "interleaved", *arguments[4:], "--chunks", "8"]
    assert cli.main(chunks) == 0
    assert capsys.readouterr().out == "interleaved does not fit: 16 chunks need as many layers\n"
    for wrong, text in (
        (["--chunks", "0"], "--chunks 0 must be at least 1"),
        (["--batch", "31"], "--batch 31 must be rows for --microbatches 4 on --data 2 shards"),
        (["--layers", "4"], "--layers 4 does not go with --layer-model"),
        (
            ["--remat", "dots"],
            "--tensor 1 with --context 1, --expert 1, --remat dots",
        ),
        (["--slices", "2"], "--remat none and --slices 2 was not counted"),
        (["--expert", "3"], "--replica 1 and --expert 3 must divide --data 2 shards together"),
        (["--on-host", "weights"], "--on-host weights has weights, which cannot lie there"),
    ):
        assert cli.main([*arguments, *wrong]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--config or --sizes must be given"),
        (["--sizes", "x", "--out", "y"], "--out y needs --config"),
        (["--sizes", "x", "--critical-batch", "1e6"], "--critical-batch 1000000.0 decides how"),
        (["--sizes", "x", "--measure", "1"], "--measure 1 needs --config"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, text, capsys):
    assert cli.main(["plan", "--devices", "4", "--device", "h100", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_without_a_reader_the_command_says_so(monkeypatch, tmp_path):
    missing = EntryPoint("other", "no_such_module:read", configurations.GROUP)
    monkeypatch.setattr(configurations, "entry_points", lambda group: [missing])
    with pytest.raises(ArgumentError, match=r"no_such_module.*--sizes FILE"):
        configurations.read(tmp_path / "config.yaml")


# What `make train` prepares has another vocabulary.
CONFIG = """
data: {path: not-prepared}
model: {vocab_size: 256, sequence_length: 64, num_layers: 4, width: 48, num_heads: 3}
mesh: {stage: 3}
train: {batch_size: 16, steps: 40}
"""


def test_the_trainer_reads_and_writes_configurations(monkeypatch, tmp_path, capsys):
    point = EntryPoint("train", "train.plan:read", configurations.GROUP)
    monkeypatch.setattr(configurations, "entry_points", lambda group: [point])
    config, out = tmp_path / "config.yaml", tmp_path / "plan.yaml"
    arguments = ["plan", "--config", str(config), "--devices", "2", "--device", "cpu"]
    config.write_text(f"{CONFIG}pipeline: {{fp8: '*kernels'}}")
    assert cli.main(arguments) == 2
    assert "*kernels" in capsys.readouterr().err
    config.write_text(f"{CONFIG}pipeline: {{fp8: '*kernel'}}")
    assert cli.main([*arguments, "--measure", "1", "--out", str(out)]) == 0
    assert "compiled" in capsys.readouterr().out
    written = parse(["--config", str(out)])
    assert not written.failures
    assert written.config.mesh.num_devices == 2
    assert written.config.train.batch_size == 16
    assert written.config.model.num_layers == 4
    assert written.config.pipeline.fp8 == "*kernel"


def test_mistakes_of_a_configuration_are_the_trainers(monkeypatch, tmp_path, capsys):
    point = EntryPoint("train", "train.plan:read", configurations.GROUP)
    monkeypatch.setattr(configurations, "entry_points", lambda group: [point])
    config = tmp_path / "config.yaml"
    config.write_text("model: {width: 63}")
    assert cli.main(["plan", "--config", str(config), "--devices", "8", "--device", "h100"]) == 2
    assert "model.width=63" in capsys.readouterr().err


def test_the_trainer_chooses_a_schedule_for_its_mesh(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("stage: 3", "stage: 4, data: 1"))
    config = configured.without_choice(parse(["--config", str(path)]).config)
    chosen, why = plan.choose(config)
    assert chosen.mesh == config.mesh
    assert chosen.train == config.train
    assert chosen.pipeline.schedule in plans.SCHEDULES
    assert chosen.pipeline.zero == config.pipeline.zero
    assert chosen.train.batch_size % chosen.pipeline.microbatches == 0
    assert why.startswith(f"pipeline.schedule=plan on cpus: {chosen.pipeline.schedule}, ")
    assert "then" in why
    assert not checks.check(chosen, writes=False, reads=False)
