"""`auto`: the first to end on devices under its memory limit, on every placement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.schedule import catalog
from jaxpipe.schedule.check.validate import peak_in_flight, validate
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.partition import cut_layers
from jaxpipe.schedule.search import order_search
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.bounds import lower_bound
from jaxpipe.schedule.simulate import Costs

COSTS = Costs(1, 1.2, 0.8)


def on_devices(schedule, layers: list[Costs]):
    """A schedule of a model on the device clock."""
    return device_clock(schedule, cut_layers(layers, schedule.placement)[1])


@contextlib.contextmanager
def short_search() -> Iterator[None]:
    """Few rules and moves: for what holds however far a search comes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPIPE_NO_CACHE", "1")
        patch.setattr(order_search, "_RULE_ACTIONS", 5_000)
        patch.setattr(order_search, "_MOVED_ACTIONS", 20_000)
        yield


@pytest.mark.parametrize(
    ("p", "memory_limit", "bar"),
    [(4, 4, 0.037), pytest.param(4, 3, 0.072, marks=pytest.mark.slow)],
)
def test_bubble_on_devices(p, memory_limit, bar):
    found = auto(p, 4 * p, costs=COSTS, memory_limit=memory_limit)
    validate(found)
    assert on_devices(found, [COSTS] * 2 * p).bubble_ratio <= bar
    assert max(peak_in_flight(found)) <= memory_limit * found.num_chunks


@settings(max_examples=8)
@given(
    p=st.integers(1, 3),
    m=st.integers(1, 4),
    chunks=st.integers(1, 4),
    limit=st.sampled_from([1, 1.5, 2, 3.5, None]),
    prices=st.sampled_from([COSTS, Costs(1, 1, 1), Costs(1, 3, 0.5, 0.2)]),
)
def test_any_shape_and_limit_gives_a_schedule_that_runs(p, m, chunks, limit, prices):
    with short_search():
        found = auto(p, m, layer_costs=[prices] * p * chunks, memory_limit=limit)
    validate(found)
    assert found.name == "auto"
    assert found.peak_in_flight == peak_in_flight(found)
    assert max(peak_in_flight(found)) <= (limit or p) * found.num_chunks
    lower(found, [2] * found.placement.num_virtual_stages)


@settings(max_examples=5)
@given(
    p=st.integers(1, 3),
    m=st.integers(1, 4),
    layers=st.lists(st.sampled_from([0.5, 1, 1.75]), min_size=3, max_size=6),
    message=st.sampled_from([0, 0.1, 1]),
    limit=st.sampled_from([1, 1.5, 3]),
)
def test_nothing_ends_before_the_bound(p, m, layers, message, limit):
    layer_costs = [Costs(f, 1.2, 2 - f, message) for f in layers]
    with short_search():
        found = auto(p, m, layer_costs=layer_costs, memory_limit=limit)
    validate(found)
    timeline, peak = on_devices(found, layer_costs), max(peak_in_flight(found))
    assert peak <= limit * found.num_chunks
    assert lower_bound(found.placement, m, timeline.costs, cap=peak) <= timeline.makespan + 1e-9


@pytest.mark.parametrize("kind", ["f", "b", "w"])
def test_costs_so_far_apart_that_short_actions_are_lost_in_sums(kind):
    with short_search():
        validate(auto(4, 8, costs=Costs(**({"f": 1, "b": 1, "w": 1} | {kind: 2.0**63}))))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"memory_limit=0\.5 .*\nNearest valid: 1\."):
        auto(2, 4, memory_limit=0.5)
    with pytest.raises(ValueError, match="2 layers cannot fill num_stages=3: each needs a layer"):
        auto(3, 4, layer_costs=[Costs(1, 1, 1)] * 2)


def test_costs_of_every_layer_are_planned_with():
    layers = [Costs(1, 1.2, 0.8)] * 3 + [Costs(3, 3.6, 2.4)] * 3
    with short_search():
        found, blind = (
            auto(3, 5, layer_costs=costs, memory_limit=2) for costs in (layers, [COSTS] * 6)
        )
    validate(found)
    assert max(peak_in_flight(found)) <= 2 * found.num_chunks
    assert on_devices(found, layers).makespan <= on_devices(blind, layers).makespan


@pytest.mark.parametrize(("message", "interleaves"), [(0, True), (5, False)])
def test_the_placement_depends_on_the_time_of_messages(message, interleaves):
    layers = [Costs(1, 1.2, 0.8, message)] * 4
    with short_search():
        found = auto(2, 4, layer_costs=layers)
        assert found == auto(2, 4, costs=layers[0])
    validate(found)
    assert (found.num_chunks > 1) == interleaves


@pytest.mark.parametrize(
    ("p", "m", "layers", "message", "limit"),
    [(2, 5, 4, 0.1, 1.5), (3, 4, 6, 0, 3)],
)
def test_no_named_schedule_of_the_same_model_in_the_same_memory_ends_before(
    p, m, layers, message, limit
):
    layer_costs = [Costs(1, 1.2, 0.8, message)] * layers
    with short_search():
        found = auto(p, m, layer_costs=layer_costs, memory_limit=limit)
    ends = on_devices(found, layer_costs).makespan
    fitting = 0
    for entry in catalog.BUILT_IN:
        chunks = entry.default_chunks
        if entry.name == "auto" or chunks * p > layers:
            continue
        reads = {"memory_limit": limit} if "memory_limit" in entry.defaults else {}
        for suffix in ("", "-published")[: 1 + entry.reordered]:
            name = entry.name + suffix
            shape = {"stages": p, "microbatches": m, "layer_costs": layer_costs}
            try:
                schedule = catalog.build(name, **shape, **reads)
            except ValueError:  # it needs more memory
                continue
            if max(peak_in_flight(schedule)) <= limit * schedule.num_chunks:
                fitting += 1
                assert ends <= on_devices(schedule, layer_costs).makespan + 1e-9
    assert fitting


def test_no_placement_of_more_virtual_stages_than_are_searched_is_tried():
    assert auto(2, 2, layer_costs=[Costs(1, 1, 1)] * 2000).num_chunks <= 128


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
        text = capsys.readouterr().out
        assert "above the optimum on this placement at this peak" in text
        assert "half a microbatch more" not in text
        small = ["--stages", "2", "--microbatches", "6", "--memory-limit", "1"]
        assert main(["show", "auto", *small]) == 0
    told = "half a microbatch more, --memory-limit 1.5: 20.4% sooner (interleaved)"
    assert told in capsys.readouterr().out
