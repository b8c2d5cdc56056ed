"""The search for a plan, and what the commands print of plans."""

import dataclasses
import itertools
import re
from collections import Counter
from typing import Any

import pytest
from synthetic import FULL, NONE, synthetic

from jaxpipe import cli
from jaxpipe.commands import plan as plan_command
from jaxpipe.errors import ArgumentError
from jaxpipe.planning import cost, devices, plans, search
from jaxpipe.planning.memory import least_bytes
from jaxpipe.planning.plans import Offload, PlacedPlan, Plan
from jaxpipe.planning.search import Goal
from jaxpipe.planning.sizes import Kernel, LayerSizes, Linear, ModelSizes, Pass, Sizes, Variant
from jaxpipe.runtime.zero import Zero


def exhaustive(model: ModelSizes, cluster: devices.Cluster, goal: Goal):
    """Every plan that fits, with its published order."""
    skipped = Counter[str]()
    on_host = plans.on_host(model, cluster)
    every = plans.families(model, cluster, goal.batches, skipped, on_host=on_host)
    predictions = [search.evaluated(one, goal, skipped) for family in every for one in family]
    return [one for one in predictions if one is not None]


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
    assert search.search(synthetic(FULL), [cluster], goal).best[0].model_flops_share > 0


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
    assert len(result.front) > 1
    for one, other in itertools.permutations(result.front, 2):
        assert one.train_seconds < other.train_seconds or one.device_bytes < other.device_bytes


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


@pytest.mark.parametrize("count", [4, 128])
def test_what_a_plan_needs_at_least_is_never_more_than_it_needs(model, count):
    cluster = devices.cluster("h100", count, link="nvlink:1,ib:400")
    goal, shares = Goal(None, (4 * count,)), []
    for one in exhaustive(model, cluster, goal)[::7]:
        least = least_bytes(one.placed)
        assert least <= one.device_bytes or least == pytest.approx(one.device_bytes, rel=1e-12)
        program = cost.program_of(one.placed, published=True)
        bounds = cost.least_seconds(one.placed), cost.least_seconds(one.placed, program)
        assert max(bounds) <= one.step_seconds * (1 + 1e-9)
        time = search._least([one.placed], goal).time
        share, doubt = time / one.measures.time, cost.doubt_of_hosts(one.placed)
        assert share <= 1 + 1e-9
        assert time >= (bounds[0] + doubt) * (1 - 1e-9)
        if doubt:
            assert share > 0.62  # 0.61 at most without the doubt
        shares.append(share)
    assert max(shares) > 0.945  # on 128 devices, stragglers make 2% of it


def test_what_a_family_needs_at_least_is_never_more_than_its_plans_do(model):
    cluster = devices.cluster("h100", 16, link="nvlink:4,ib:400")
    on_host = plans.on_host(model, cluster)
    every = list(plans.families(model, cluster, (64,), Counter(), on_host=on_host))
    assert {family[0].plan.replica for family in every} == {1, 2, 4}
    assert all(one.plan.zero == one.plan.level(one.plan.zero) for family in every for one in family)
    mixed = {schedule for family in every for schedule in {one.plan.schedule for one in family}}
    assert mixed > {"v-min", "zb-v", "interleaved-fused"}
    for family in every[::5]:
        # Halves have the later schedules of a family, or a schedule's leaner options.
        for part in (family, family[: len(family) // 2], family[len(family) // 3 :]):
            least = search._least(part, search.ONE_STEP)
            for placed in part:
                assert least.time <= search._least([placed], search.ONE_STEP).time * (1 + 1e-9)
                assert least.memory <= least_bytes(placed) * (1 + 1e-9)


@pytest.mark.parametrize("stages", [3, 8])
@pytest.mark.parametrize("name", plans.SCHEDULES)
def test_schedules_keep_at_least_what_searches_say_before_they_are_made(name, stages):
    for chunks in plans.SCHEDULES[name].chunks[:2]:
        for microbatches in (1, stages - 1, stages + 1, 2 * stages, 5 * stages):
            program = plans.Program(name, stages, chunks, microbatches, stages * chunks, None)
            plan = Plan(
                *(stages, 1, 1, 1, 1, name, chunks, microbatches, 1, "none", Zero(0), 1, "stacked")
            )
            slots = plans.lowering_of(program).num_slots
            assert 0 < plan.in_flight(name) <= slots["until_w"]
            assert plan.in_flight(name) <= slots["until_b"]
            assert plan.crossing(name) <= slots["crossing"]
            if microbatches == 5 * stages and name.startswith(("1f1b", "zb", "inter")):
                assert plan.in_flight(name) == slots["until_w"]


def test_layers_that_differ_are_unrolled_where_they_need_little_more_room():
    """Every third of 12 layers is of another kind: chunks of 6 and 3 layers agree, of 4 not."""
    alike = synthetic(NONE, layers=12)
    (variant,), (sizes,) = alike.variants, alike.variants.values()

    def weights(**layer: Any) -> dict[int, str]:
        layers = sizes.layers[0], sizes.layers[0]._replace(**layer)
        found = sizes._replace(layers=layers, kind_of=(0, 0, 1) * 4)
        model = dataclasses.replace(alike, variants={variant: found})
        every = plans.families(model, devices.cluster("h100", 12), [24], Counter())
        chosen = [one.plan for family in every for one in family]
        return {plan.num_chunks: plan.weights for plan in chosen}

    unrolled = dict.fromkeys((1, 2, 3, 4, 6, 8, 12), "unrolled")
    shapes = sizes.layers[0].shapes
    assert weights() == weights(shapes=(*shapes, (2, 2))) == unrolled
    other = {"shapes": tuple((n + 1, k) for n, k in shapes)}
    assert weights(**other) == unrolled | dict.fromkeys((3, 6, 8, 12), "stacked")
    assert weights(**other, quantized=100) == unrolled


def test_with_fewer_stages_a_step_is_a_little_shorter():
    """So a search may leave out what is too slow even then."""
    cluster = devices.cluster("h100", 16, link="nvlink:4,ib:200")
    families = plans.families(synthetic(NONE, layers=64), cluster, (32,), Counter())
    alike = {
        (one.plan.schedule, one.plan.chunks, one.plan.ends): one
        for family in families
        for one in family
        if one.plan.stage == 16 and one.plan.rows == 1
    }
    assert {schedule for schedule, *_ in alike} > {"v-half", "1f1b", "interleaved-fused"}
    for placed in alike.values():
        whole = cost.least_seconds(placed, cost.program_of(placed, published=True))
        assert cost.least_seconds(placed) < cost.coarse_seconds(placed)[0] <= whole * (1 + 1e-9)


def test_chunks_with_the_head_have_the_layers_of_their_partition():
    """A head of a third of a layer makes none of several equal chunks larger."""
    model, cluster = synthetic(NONE, layers=16, width=1024), devices.cluster("h100", 4)
    families = plans.families(model, cluster, (64,), Counter())
    at_ends = {one.plan.num_chunks: one for family in families for one in family if one.plan.ends}
    for num_chunks, one in at_ends.items():
        program = cost.program_of(one, published=True)
        assert one.layers_per_chunk == max(plans.lowering_of(program).layer_counts)
        assert one.layers_per_chunk == 16 // num_chunks < 16 / num_chunks + one.head_layers


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


def test_plans_whose_room_would_not_do_put_the_state_on_the_host():
    """Devices hold a little less here than the leanest plan with its state on them."""
    nothing = Linear(0, 0)
    matmul = Pass((Kernel(Linear(0, 1e9), nothing),), nothing, ())
    kept = Linear(0, 1e7), nothing, nothing, nothing
    layer = LayerSizes(matmul, matmul, matmul, 10**6, *kept, ((1000, 1000),))
    sizes = Sizes((layer,), (0,) * 4, *[Linear(0, 1.0)] * 2, 2 * 10**6, 0, matmul, nothing)
    model = ModelSizes("equal", 64, 4, 4, 2, 32, 1, {NONE: sizes})
    cluster, goal = devices.cluster("h100", 2), Goal(None, (16,))
    leanest = min(
        one.device_bytes for one in exhaustive(model, cluster, goal) if not any(one.plan.on_host)
    )
    limited = dataclasses.replace(cluster, memory_bytes=leanest - 1)
    assert all(one.plan.on_host.state for one in search.search(model, [limited], goal).best)
    stays = dataclasses.replace(model, may_offload=False)
    with pytest.raises(ArgumentError, match="is too little for any plan: the leanest needs"):
        search.search(stays, [limited], goal)
    shared = devices.cluster("cpu", 4)  # whose memory is that of the host
    assert [*plans.on_host(model, shared)] == [plans.NOTHING]


def test_the_best_plan_without_stages_stands_beside_the_best(model):
    cluster, goal = devices.cluster("h100", 4), Goal(None, (32,))
    plain = search.search(model, [cluster], goal).without_stages
    of_one_stage = search.search(model, [cluster], goal, allowed=lambda plan: plan.stage == 1)
    both = of_one_stage.best[0], of_one_stage.without_stages
    assert {(one.plan, one.measures) for one in both} == {(plain.plan, plain.measures)}


def test_words_about_stages_fit_the_devices_and_the_batch(model):
    """One device has no other axes, and a batch of 4 rows no 8 data shards."""

    def words(count: int, rows: int) -> list[str]:
        goal = Goal(None, (rows,))
        found = search.search(model, [devices.cluster("h100", count)], goal)
        assert count > 1 or all(one.plan.chunks == 1 for one in (*found.best, *found.front))
        return list(plan_command._in_words(found, goal))

    (alone,) = words(1, 32)
    assert alone.startswith("best: one device, ")
    best, plain, usual = words(8, 4)
    assert "stages" in best
    assert "the batch has too few rows" in plain
    assert usual.startswith("as Megatron-LM is mostly run, with 1F1B and ZeRO-1: ")
    assert "it takes" in usual


def test_only_schedules_with_stages_that_can_cut_sequences_do():
    cut = NONE._replace(slices=4)
    families = plans.families(synthetic(NONE, cut), devices.cluster("h100", 4), [32], Counter())
    every = [one.plan for family in families for one in family]
    found = {(plan.schedule, plan.slices) for plan in every if plan.stage > 1}
    assert {("zb-v", 1), ("1f1b", 1), ("1f1b", 4), ("interleaved-fused", 4)} < found
    assert ("zb-v", 4) not in found


def test_plans_that_nobody_has_run_are_ranked_by_what_they_may_take(model):
    """ZeRO-3 over 128 hosts is doubted, over 64 it is not; two microbatches are, eight are not."""

    def doubted(**changes) -> tuple[float, float]:
        plan = COMPARED._replace(**changes)
        cluster = devices.cluster("h100", plan.stage * plan.data, link="nvlink:8,ib:400")
        one = search.predicted(PlacedPlan(plan, model, cluster))
        least, most = one.range_seconds
        assert least < one.step_seconds < most
        assert one.measures.time == pytest.approx(one.step_seconds + one.doubt)
        return one.doubt, cost.transfer(one.placed).gather

    far, near = (doubted(stage=1, data=8 * hosts) for hosts in (128, 64))
    assert far[0] > 0 == near[0]
    assert far[1] > near[1]  # a ring of twice as many hosts
    few, many = (doubted(microbatches=m, zero=Zero(1))[0] for m in (2, 8))
    assert few > 0 == many


@pytest.fixture
def sizes_of(tmp_path):
    """Writes a model's file of sizes, and returns its path."""

    def write(model: ModelSizes) -> str:
        path = tmp_path / "sizes.json"
        path.write_text(model.to_json())
        return str(path)

    return write


def test_the_command_reads_a_file_of_sizes(sizes_of, capsys, monkeypatch):
    """Titles stand above tables in whole lines, small numbers in as many digits as large ones."""
    monkeypatch.setenv("COLUMNS", "100")
    arguments = ["--devices", "2", "4", "--device", "h100", "--tokens", "1e9"]
    assert cli.main(["plan", "--sizes", sizes_of(synthetic(width=64)), *arguments]) == 0
    printed = capsys.readouterr().out
    texts = (
        "best: ",
        "no other plan is better",
        "milliseconds of a step",
        "are out:",
        "host nothing",
    )
    for text in texts:
        assert text in printed
    lines = printed.splitlines()
    assert any(line.startswith("best plans; a mesh is") for line in lines)
    _, columns, _, row, *_ = lines[lines.index("GB of a device") :]
    assert "parameters" in columns
    assert "0.00 " not in row
    assert not re.search(r"step, s 0\.00\d\b|…|\de-\d", printed)


def test_axes_of_a_mesh_multiply_to_its_devices(sizes_of, capsys):
    """Experts are split over data shards, and are no axis of their own."""
    path = sizes_of(synthetic(NONE._replace(expert=2)))
    assert cli.main(["plan", "--sizes", path, "--devices", "4", "--device", "h100"]) == 0
    printed = capsys.readouterr().out
    assert "with experts over 2 data shards" in printed
    assert "expert 2" in printed
    assert "x expert" not in printed
    meshes = re.findall(r"^\d+ +(\d+) x (\d+) ", printed, re.MULTILINE)
    assert meshes
    assert all(int(stages) * int(shards) == 4 for stages, shards in meshes)


COMPARED = Plan(2, 4, 1, 1, 1, "1f1b", 1, 4, 2, "none", Zero(3), 1, "unrolled")
MESH = ["--stages", "2", "--microbatches", "4", "--data", "4", "--zero", "3", "--remat", "none"]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ([], {}),
        (["--on-host", "state,residuals"], {"on_host": Offload(state=True, residuals=True)}),
        (["--replica", "2"], {"replica": 2}),
        (["--replica", "4", "--context", "2"], {"replica": 4, "context": 2}),
        (["--context", "2", "--expert", "4"], {"context": 2, "expert": 4}),
    ],
)
def test_schedules_are_compared_on_any_mesh_as_plans_run_there(options, changes, sizes_of, capsys):
    """The same row alone and beside others, with embedding and head where that is faster."""
    plan = COMPARED._replace(**changes)
    model = synthetic(Variant(plan.context, 1, "none", plan.expert))
    cluster = devices.cluster("h100", 8 * plan.context)
    exact = min(
        (
            search.predicted(PlacedPlan(plan._replace(ends=ends), model, cluster))
            for ends in (False, True)
        ),
        key=lambda one: one.step_seconds,
    )
    rows = []
    for names in (["1f1b"], ["1f1b", "zb-v", "1f1b-v"]):
        asked = ["compare", *names, "--layer-model", sizes_of(model), *MESH, *options]
        assert cli.main(asked) == 0
        lines = capsys.readouterr().out.splitlines()
        rows.append([line.split() for line in lines if line.startswith("1f1b ")])
    (seconds, in_bytes), (beside, _) = rows
    assert seconds == beside
    milliseconds = 1e3 * exact.seconds["transfers"], 1e3 * exact.step_seconds
    assert {float(f"{x:.3g}") for x in milliseconds} < {*map(float, seconds[1:])}
    assert float(in_bytes[-1]) == pytest.approx(1e-9 * exact.device_bytes, rel=5e-3)


def test_a_compared_schedule_of_too_many_chunks_does_not_fit(model, sizes_of, capsys):
    chunks = ["--layer-model", sizes_of(model), *MESH, "--chunks", "8"]
    assert cli.main(["compare", "interleaved", *chunks]) == 0
    assert capsys.readouterr().out == "interleaved does not fit: 16 chunks need as many layers\n"


ON_DEVICES = ["plan", "--devices", "4", "--device", "h100"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--chunks", "0"], "--chunks 0 must be at least 1"),
        (["--batch", "31"], "--batch 31 must be rows for --microbatches 4 on --data 4 shards"),
        (["--layers", "4"], "--layers 4 cannot be combined with --layer-model"),
        (["--remat", "dots"], "--tensor 1 with --context 1, --expert 1, --remat dots"),
        (["--slices", "2"], "--remat none and --slices 2 was not counted"),
        (["--expert", "3"], "--replica 1 and --expert 3 must divide --data 4 shards together"),
        (["--on-host", "weights"], "--on-host weights has weights, which cannot lie there"),
        (ON_DEVICES, "--config or --sizes must be given"),
        ([*ON_DEVICES, "--sizes", "x", "--out", "y"], "--out y needs --config"),
        ([*ON_DEVICES, "--config", "x.yaml", "--out", "y.json"], "--out y.json must end in .yaml"),
        (
            [*ON_DEVICES, "--sizes", "x", "--critical-batch", "1e6"],
            "--critical-batch 1000000.0 decides how",
        ),
        ([*ON_DEVICES, "--sizes", "x", "--measure", "1"], "--measure 1 needs --config"),
        (["measure", "--out", "m.yaml"], "--out m.yaml must end in .json"),
        (["measure", "--out", "m.json", "--devices", "1"], "--devices 1 must be at least 2"),
    ],
)
def test_the_commands_say_what_is_wrong(arguments, text, model, sizes_of, capsys):
    if arguments[0].startswith("-"):
        arguments = ["compare", "1f1b", "--layer-model", sizes_of(model), *MESH, *arguments]
    assert cli.main(arguments) == 2
    assert text in capsys.readouterr().err
