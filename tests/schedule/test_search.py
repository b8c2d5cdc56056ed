"""Searches for orders: beside proven optima, the papers' tables, bounds and named schedules."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.schedule import catalog, search
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.check import peak_in_flight, validate
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.generators.events import Rule, dispatch
from jaxpipe.schedule.generators.v_schedules import v_half, v_min, v_zb, zb_v
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.pacing import soonest_on_devices
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.placement import Placement, linear, looped, wave
from jaxpipe.schedule.search.auto import PlacedModel, auto, find_soonest, lower_bound
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from jaxpipe.schedule.search.order_search import improve, search_orders
from jaxpipe.schedule.search.tick_search import TickSearch, read_promptly
from jaxpipe.schedule.simulate import UNIT, Costs, simulate

COSTS = Costs(1, 1.2, 0.8)
OPTIMA = json.loads((Path(__file__).parent / "optima.json").read_text())
"""By `benchmarks/proven_optima.py`."""


def peak(schedule: Schedule) -> int:
    return max(peak_in_flight(schedule))


def on_devices(schedule: Schedule, layers: list[Costs]):
    """A schedule of a model on the device clock."""
    return device_clock(schedule, cut_layers(layers, schedule.placement)[1])


@contextlib.contextmanager
def short_search() -> Iterator[None]:
    """A short search: for what holds however far one comes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search.auto, "_SECONDS", 0.3)
        yield


# Orders on one placement.


def known(record: dict) -> tuple[Placement, int, int, list[Costs]]:
    placement = Placement(tuple(record["placement"]))
    costs = [Costs(*record["costs"])] * placement.num_virtual_stages
    return placement, record["microbatches"], record["limit_chunks"], costs


def above_optimum(record: dict) -> float:
    """How much later than a proven optimum, of any clock, a search ends on the device clock."""
    placement, m, cap, costs = known(record)
    bound = lower_bound(placement, m, costs, cap=cap)
    found = find_soonest([PlacedModel(placement, m, tuple(costs), cap, bound)])
    validate(found.schedule)
    assert peak(found.schedule) <= cap
    assert found.makespan == pytest.approx(device_clock(found.schedule, costs).makespan)
    return found.makespan / record["optimum"] - 1


@pytest.mark.parametrize("step", [65, pytest.param(1, marks=pytest.mark.slow)])
def test_close_to_proven_optima(step):
    found = [above_optimum(record) for record in OPTIMA[::step]]
    assert min(found) > -1e-9
    assert mean(found) <= 0.01
    assert max(found) <= 0.02


def test_a_search_counts_its_work_and_says_what_it_does():
    """Seconds of the machine do not matter: the same budget gives the same schedule."""
    said: list[str] = []
    model = {"costs": Costs(1, 1.3, 0.7, 0.2), "memory_limit": 2}
    with short_search():
        first = auto(3, 7, **model, progress=said.append)
        assert auto(3, 7, **model) == first
    assert any(text.startswith("searching orders, 2 chunks per stage") for text in said)
    longer = auto(3, 7, **model)
    ends = [on_devices(found, [model["costs"]] * 6).makespan for found in (longer, first)]
    assert ends[0] <= ends[1]


def test_nothing_is_searched_where_nothing_can_be_won():
    said: list[str] = []
    found = auto(2, 64, costs=UNIT, memory_limit=2, progress=said.append)
    assert not any("search" in text for text in said)
    bound = lower_bound(found.placement, 64, [UNIT] * 4, cap=peak(found))
    assert on_devices(found, [UNIT] * 4).makespan <= 1.005 * bound


def test_no_proven_optimum_is_below_the_bound():
    for record in OPTIMA:
        placement, m, cap, costs = known(record)
        assert lower_bound(placement, m, costs, cap=cap) <= record["optimum"] + 1e-9


def test_one_microbatch_at_a_time_is_not_one_after_another():
    found, *_ = search_orders(wave(8), 9, costs=[UNIT] * 16, cap=2)
    assert peak(found) == 2
    assert simulate(found, UNIT).makespan <= 193


placements = st.sampled_from(
    [linear(1), linear(3), wave(1), wave(2), wave(4), wave(2, num_waves=2), wave(1, num_waves=3)]
    + [looped(p, num_chunks=v) for p, v in ((2, 2), (3, 2), (2, 4))]
)
rules = st.builds(
    Rule,
    st.sampled_from([0.0, 0.5, 1.3]),
    st.sampled_from([0.0, 1.0, 8.0]),
    st.sampled_from([0.0, 0.5, 0.99]),
    *(st.booleans(), st.booleans()),
)


@settings(max_examples=25)
@given(placements, st.integers(1, 7), st.integers(0, 4), rules, st.data())
def test_any_rule_and_limit_gives_an_order_that_runs_and_can_be_improved(
    placement, m, extra, rule, data
):
    times = st.sampled_from([0.5, 1.0, 2.7])
    costs = [
        Costs(*(data.draw(times) for _ in range(3)), data.draw(st.sampled_from([0, 0.4])))
        for _ in range(placement.num_virtual_stages)
    ]
    cap = placement.num_chunks + extra
    first = Schedule("made", placement, m, dispatch(placement, m, costs, cap, rule))
    better = improve(first, costs, cap=cap, moves=40, bound=0)
    for schedule in (first, better):
        validate(schedule)
        assert peak(schedule) <= cap
    bound = lower_bound(placement, m, costs, cap=cap)
    ends = [simulate(schedule, costs).makespan for schedule in (better, first)]
    assert bound - 1e-9 <= ends[0] <= ends[1] + 1e-9
    ticks = TickSearch(first, costs, cap)
    ticks.improve(bound, seconds=0.02)
    sooner, end = ticks.found(), ticks.end
    validate(sooner)
    assert peak(sooner) <= cap
    assert end == pytest.approx(device_clock(sooner, costs).makespan)
    assert bound - 1e-9 <= end <= device_clock(first, costs).makespan * (1 + 1e-6)
    lower(sooner, [1] * placement.num_virtual_stages)
    if (prompt := read_promptly(first, costs)) is not None:
        validate(prompt[0])
        assert peak(prompt[0]) <= cap
        assert not late_edges(prompt[0])
        assert prompt[1] == pytest.approx(device_clock(prompt[0], costs).makespan)


def late_edges(schedule: Schedule) -> list[tuple[int, int]]:
    table = lower(schedule, [1] * schedule.placement.num_virtual_stages)
    return [edge for channel in table.channels for edge in channel.late_edges]


def test_prompt_messages_delay_stages_as_little_as_on_the_free_running_clock():
    schedule = catalog.build("1f1b", stages=4, microbatches=6)
    costs = [Costs(1, 2, 3, 6)] * 4
    _, paced = soonest_on_devices([schedule], costs)
    found, end = read_promptly(schedule, costs)
    assert not late_edges(found)
    assert simulate(schedule, costs).makespan <= end < paced


@pytest.mark.parametrize(
    ("name", "p", "m", "costs", "cap"),
    [
        ("zb-h2-published", 5, 3, Costs(2, 6, 3, 3), 3),
        # Its backwards are fused.
        ("1f1b-v-published", 2, 4, Costs(1, 3, 2, 2, rendezvous=True), 4),
    ],
)
def test_other_orders_and_ticks_wait_less_for_messages(name, p, m, costs, cap):
    schedule = catalog.build(name, stages=p, microbatches=m)
    _, paced = soonest_on_devices([schedule], costs)
    every = [costs] * schedule.placement.num_virtual_stages
    search = TickSearch(schedule, every, cap)
    search.improve(bound=0, seconds=0.2)
    found = search.found()
    validate(found)
    assert peak(found) <= cap
    assert search.end == pytest.approx(device_clock(found, costs).makespan)
    assert search.end < paced


# `auto`: every placement.


@pytest.mark.parametrize(
    ("p", "memory_limit", "bar"),
    [(4, 4, 0.037), pytest.param(4, 3, 0.072, marks=pytest.mark.slow)],
)
def test_bubble_on_devices(p, memory_limit, bar):
    found = auto(p, 4 * p, costs=COSTS, memory_limit=memory_limit)
    validate(found)
    assert on_devices(found, [COSTS] * 2 * p).bubble_ratio <= bar
    assert peak(found) <= memory_limit * found.num_chunks


@settings(max_examples=10)
@given(
    p=st.integers(1, 3),
    m=st.integers(1, 4),
    layers=st.lists(st.sampled_from([0.5, 1, 1.75]), min_size=3, max_size=6),
    message=st.sampled_from([0, 0.1, 1]),
    limit=st.sampled_from([1, 1.5, 3, None]),
)
def test_any_shape_and_limit_gives_a_schedule_that_runs(p, m, layers, message, limit):
    """And none ends before the bound."""
    layer_costs = [Costs(f, 1.2, 2 - f, message) for f in layers]
    with short_search():
        found = auto(p, m, layer_costs=layer_costs, memory_limit=limit)
    validate(found)
    assert found.name == "auto"
    assert found.peak_in_flight == peak_in_flight(found)
    assert peak(found) <= (limit or p) * found.num_chunks
    timeline = on_devices(found, layer_costs)
    bound = lower_bound(found.placement, m, timeline.costs, cap=peak(found))
    assert bound <= timeline.makespan + 1e-9
    lower(found, [2] * found.placement.num_virtual_stages)


@pytest.mark.parametrize("kind", ["f", "b", "w"])
def test_costs_so_far_apart_that_short_actions_are_lost_in_sums(kind):
    with short_search():
        validate(auto(4, 8, costs=Costs(**({"f": 1, "b": 1, "w": 1} | {kind: 2.0**63}))))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"memory_limit=0\.5 .*\nNearest valid: 1\."):
        auto(2, 4, memory_limit=0.5)
    with pytest.raises(ValueError, match="2 layers cannot fill num_stages=3: each needs a layer"):
        auto(3, 4, layer_costs=[UNIT] * 2)
    with pytest.raises(ValueError, match=r"memory_limit=1 .*\nNearest valid: 1\.375\."):
        catalog.build("auto", stages=4, microbatches=4, slices=4, memory_limit=1)


def test_costs_of_every_layer_are_planned_with():
    layers = [COSTS] * 3 + [COSTS.times(3)] * 3
    with short_search():
        found, blind = (auto(3, 5, layer_costs=c, memory_limit=2) for c in (layers, [COSTS] * 6))
    assert on_devices(found, layers).makespan <= on_devices(blind, layers).makespan


@pytest.mark.parametrize(("message", "interleaves"), [(0, True), (5, False)])
def test_the_placement_depends_on_the_time_of_messages(message, interleaves):
    layers = [Costs(1, 1.2, 0.8, message)] * 4
    with short_search():
        found = auto(2, 4, layer_costs=layers)
        assert found == auto(2, 4, costs=layers[0])
    assert (found.num_chunks > 1) == interleaves


@pytest.mark.parametrize(
    ("p", "m", "layers", "slices", "costs", "limit"),
    [
        (2, 5, 4, 1, Costs(1, 1.2, 0.8, 0.1), 1.5),
        (3, 4, 6, 1, COSTS, 3),
        (4, 4, 8, 4, Costs(1, 1.2, 0.8, 0.05, attention=0.5), 2.0),
        (4, 4, 8, 4, Costs(1, 1.2, 0.8, 0.05), None),
    ],
)
def test_no_named_schedule_of_the_same_model_in_the_same_memory_ends_before(
    p, m, layers, slices, costs, limit
):
    shape = {"stages": p, "microbatches": m, "layer_costs": [costs] * layers}
    shape |= {"slices": slices} if slices > 1 else {}
    limited = {} if limit is None else {"memory_limit": limit}
    with short_search():
        found = catalog.build("auto", **shape, **limited)
    validate(found)
    timeline, cap = on_devices(found, [costs] * layers), peak(found)
    bound = lower_bound(found.placement, m, timeline.costs, cap=cap, num_slices=slices)
    assert bound <= timeline.makespan + 1e-9
    fitting = 0
    for entry in catalog.BUILT_IN:
        if entry.name == "auto" or entry.default_chunks * p > layers:
            continue
        reads = limited if "memory_limit" in entry.defaults else {}
        for suffix in ("", "-published")[: 1 + entry.reordered]:
            try:
                schedule = catalog.build(entry.name + suffix, **shape, **reads)
            except ValueError:  # it needs more memory, or cuts no sequences
                continue
            if peak(schedule) <= (limit or p) * slices * schedule.num_chunks:
                fitting += 1
                ends = on_devices(schedule, [costs] * layers).makespan
                assert timeline.makespan <= ends + 1e-9
    assert fitting
    assert cap <= (limit or p) * slices * found.num_chunks


def test_no_placement_of_more_virtual_stages_than_are_searched_is_tried():
    assert auto(2, 2, layer_costs=[UNIT] * 2000).num_chunks <= 128


def test_costs_alone_leave_the_placement_open_and_memory_that_would_pay_is_told(capsys):
    """The V alone once took 171.3, ZB-H2 of the same model 158.4."""
    shape, half = ["--stages", "4", "--microbatches", "10"], Costs(1.75, 2.7, 2.01, 0.5)
    whole = half.times(2)
    best = device_clock(catalog.build("zb-h2", stages=4, microbatches=10, costs=whole), whole)
    costs = ["--costs", "1.75,2.7,2.01,0.5", "--memory-limit", "8"]
    with short_search():
        found = catalog.build("auto", stages=4, microbatches=10, costs=half, memory_limit=8)
        assert on_devices(found, [half] * 8).makespan <= best.makespan
        assert main(["show", "auto", *shape, *costs]) == 0
        text, progress = capsys.readouterr()
        assert "above the optimum on this placement at this peak" in text
        assert progress.startswith("auto: named schedules, 2 chunks per stage V\n")
        assert "half a microbatch more" not in text
        small = ["--stages", "2", "--microbatches", "6", "--memory-limit", "1"]
        assert main(["show", "auto", *small]) == 0
    told = "half a microbatch more, --memory-limit 1.5: 20.4% sooner (interleaved)"
    assert told in capsys.readouterr().out


# The controllable-memory family.


def family(p: int, m: int, chunks: int, costs: Costs = UNIT) -> Schedule:
    """The best block at most so many chunks of which are in flight."""
    return controllable_memory(p, m, memory_limit=chunks / 2, costs=costs)


def excess(schedule: Schedule, costs: Costs = UNIT) -> tuple[float, float]:
    """Longest span of a stage and makespan, less a stage's own work."""
    timeline = simulate(schedule, costs)
    work = 2 * schedule.num_microbatches * (costs.f + costs.b + costs.w)
    return max(timeline.stage_spans) - work, timeline.makespan - work


@pytest.mark.parametrize(
    ("p", "table"),
    [
        (4, {v_min: (11, 4), v_half: (5, 6), v_zb: (0, 8), zb_v: (0, 8)}),
        (5, {v_min: (15, 6), v_half: (11, 6), v_zb: (0, 10), zb_v: (0, 10)}),
        (6, {v_min: (17, 6), v_half: (11, 8), v_zb: (0, 12), zb_v: (0, 12)}),
        (8, {v_min: (27, 8), v_half: (17, 10), v_zb: (0, 16), zb_v: (0, 16)}),
    ],
)
def test_bubble_and_peak_of_the_papers_table(p, table):
    for generate, expected in table.items():
        for extra in (0, 1, 13):
            schedule = generate(p, 2 * p + extra)
            assert (excess(schedule)[0], peak(schedule)) == expected


FRONTIER = {(p, k): 6 * p - 1 - 3 * k for p in range(4, 13) for k in range(max(p, 6), 2 * p - 1)}
FRONTIER |= {(p, 2 * p - 1): 3 for p in range(4, 13)} | {(p, 2 * p): 0 for p in range(4, 13)}
FRONTIER[4, 4], FRONTIER[4, 5] = 11, 8


@pytest.mark.parametrize(
    "stages", [(4,), pytest.param(range(4, 13), marks=pytest.mark.slow)], ids=["sample", "all"]
)
def test_search_reaches_the_frontier(stages):
    for p, k in sorted(FRONTIER):
        if p in stages:
            schedule = family(p, 2 * p, k)
            validate(schedule)
            assert peak(schedule) <= k
            assert schedule.peak_in_flight == (k,) * p
            assert excess(schedule)[0] == FRONTIER[p, k]


@pytest.mark.parametrize(
    ("generate", "costs"),
    [(v_min, COSTS), (v_half, Costs(1, 1, 1, 0.5)), (v_zb, Costs(1, 1.2, 0.8, 0.5))],
)
def test_search_is_never_worse_than_the_named_schedules(generate, costs):
    named = generate(4, 14)
    found = family(4, 14, peak(named), costs)
    assert simulate(found, costs).makespan <= simulate(named, costs).makespan


def test_search_uses_the_costs():
    """Twice the backward, as without recomputation: the order for equal costs is far worse."""
    costs = Costs(1, 2, 1)
    assert excess(family(4, 24, 6, costs), costs)[1] <= 13 < excess(family(4, 24, 6), costs)[1]


@settings(max_examples=8)
@given(p=st.integers(1, 5), m=st.integers(1, 9), halves=st.integers(0, 8))
def test_search_with_few_microbatches_and_any_limit_that_fits(p, m, halves):
    k = min(peak(v_min(p, 2 * p)), 2 * m) + halves
    schedule = family(p, m, k)
    validate(schedule)
    assert peak(schedule) <= min(k, 2 * m)


@pytest.mark.parametrize("limit", [0, 1.5, 3.9, float("nan")])
def test_limits_below_every_block_get_the_nearest(limit):
    with pytest.raises(ValueError, match=r"^memory_limit=.*num_stages=8 .*\nNearest valid: 4\.$"):
        controllable_memory(8, 32, memory_limit=limit)
