"""Residuals that wait on the host: which leave, what a device keeps, and where they lie."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Kind
from jaxpipe.schedule.check import peak_in_flight, validate
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.lowering.lower import lower
from jaxpipe.schedule.offload import choose, kept_on_devices, within_limit
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.simulate import Costs

NAMES = ("1f1b", "1f1b-fused", "zb-v", "1f1b-v", "interleaved", "breadth-first", "v-half")


def replay(table) -> None:
    """Follows every part of every chunk's residuals through the slots of devices and hosts."""
    schedule, parts = table.schedule, table.residual_parts
    for stage in range(schedule.num_stages):
        device: dict[tuple[str, int], list] = {}
        host: dict[int, list] = {}
        for tick in range(table.num_ticks):
            for kind in (kind for kind in Kind if kind in table.passes):
                cell = table.passes[kind]
                at = tick, stage
                if cell.microbatch[at] < 0:
                    continue
                own, moved = (cell.chunk[at], cell.microbatch[at]), cell.moved
                moves = moved is not None and moved.on_host[at] < table.num_slots["on_host"] - 1
                slots = {name: getattr(moved, name)[at] for name in ("until_b", "until_w") if moves}
                if moves and kind is Kind.F:
                    place = host.setdefault(moved.on_host[at], [None] * parts)
                    for slot in slots.items():
                        place[moved.part[at]] = device[slot][moved.part[at]]
                reads = ("until_w",) if kind is Kind.W else ("until_b", "until_w")
                for name in reads:
                    slot = name, getattr(cell, name)[at]
                    if kind is Kind.F:
                        device[slot] = [own] * max(parts, 1)
                    assert device[slot] == [own] * max(parts, 1)
                if moves and kind is not Kind.F:
                    for slot in slots.items():
                        device.setdefault(slot, [None] * parts)
                        device[slot] = list(device[slot])
                        device[slot][moved.part[at]] = host[moved.on_host[at]][moved.part[at]]


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(0, 6), st.data())
def test_a_device_keeps_no_more_than_the_limit_and_every_action_reads_its_own(name, p, more, data):
    chunks = {"chunks": 2} if name in ("interleaved", "breadth-first") else {}
    schedule = catalog.build(name, stages=p, microbatches=2 * p + more * p, **chunks)
    peak, v = max(peak_in_flight(schedule)), schedule.num_chunks
    limit = data.draw(st.integers(1, peak))
    schedule = within_limit(schedule, limit=limit, parts=1)
    if schedule is None:
        assert limit <= 3 * v
        return
    validate(schedule)
    counts = [2] * schedule.placement.num_virtual_stages
    table = lower(schedule, counts, residuals=limit / v)
    assert max(table.num_slots["until_b"], table.num_slots["until_w"]) <= limit
    assert table.residual_parts == 0 or table.num_slots["until_w"] == limit
    replay(table)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 2), st.data())
def test_what_leaves_waits_at_least_as_long_as_what_could_have_left_instead(name, p, parts, data):
    chunks = {"chunks": 3} if name in ("interleaved", "breadth-first") else {}
    schedule = catalog.build(name, stages=p, microbatches=4 * p, **chunks)
    order = schedule.orders[data.draw(st.integers(0, p - 1))]
    counts = [1] * schedule.placement.num_virtual_stages
    limit = data.draw(st.integers(1, len(order)))
    choice = choose(order, counts, limit=limit, parts=parts)
    if choice is None:
        return
    starts, ends = {}, {}
    for place, action in enumerate(order):
        one = action.virtual_stage, action.microbatch
        if action.kind is Kind.F:
            starts[one] = place
        elif action.kind is not Kind.W:
            ends[one] = place
    carriers = [place for move in choice.moves.values() for place in (*move.out, *move.back)]
    assert len(set(carriers)) == len(carriers) == 2 * parts * len(choice.moves)
    for left, move in choice.moves.items():
        assert starts[left] < move.out[0] <= move.out[-1] <= move.back[0] <= move.back[-1]
        assert move.back[-1] < ends[left]
        for other in starts.keys() - choice.moves.keys():
            if starts[other] < move.out[0] and move.back[-1] < ends[other]:
                assert ends[left] - starts[left] >= ends[other] - starts[other]


def test_slower_buses_need_more_on_the_device_and_one_that_is_fast_enough_needs_a_constant():
    for name in ("1f1b-fused", "1f1b-v"):
        kept = {
            (p, parts): max(
                kept_on_devices(catalog.build(name, stages=p, microbatches=3 * p), parts)
            )
            for p in (4, 8)
            for parts in (1, 2)
        }
        assert kept[4, 1] == kept[8, 1]
        assert kept[4, 2] < kept[8, 2]


def test_auto_finds_orders_in_which_devices_keep_the_limit(capsys):
    costs, gains = Costs(1, 1.3, 0.7, 0.02), []
    for offload, limit in ((0.7, 1.5), (1.9, 3)):
        given = {"costs": costs, "memory_limit": limit, "seconds": 0.2}
        here, there = auto(6, 18, **given), auto(6, 18, **given, offload=offload)
        validate(there)
        counts = [1] * there.placement.num_virtual_stages
        table = lower(there, counts, residuals=limit)
        assert table.num_slots["until_w"] <= limit * there.num_chunks < max(there.peak_in_flight)
        assert table.residual_parts >= offload
        gains.append(1 - device_clock(there, costs).makespan / device_clock(here, costs).makespan)
    assert gains[0] > 0.3
    assert gains[1] > 0.03
    arguments = ["--stages", "6", "--microbatches", "12", "--memory-limit", "3", "--offload", "0.4"]
    assert main(["show", "1f1b-fused", *arguments]) == 0
    assert "moved beside one action: 3, 3, 3, 3, 2, 1\n" in capsys.readouterr().out
    assert main(["show", "1f1b-fused", *arguments[:-1], "1.5"]) == 2
    assert "--memory-limit 3.0 does not fit" in capsys.readouterr().err
    assert main(["compare", "1f1b-fused", "gpipe-fused", *arguments[:4], *arguments[6:]]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows if "1" in row] == [
        ["1f1b-fused", "1", "6", "2"],
        ["gpipe-fused", "1", "12", "2"],
    ]


def test_a_limit_that_cannot_hold_is_refused_with_the_least_that_can():
    schedule = catalog.build("1f1b", stages=6, microbatches=9)
    with pytest.raises(ValueError, match=r"residuals=1.5 .*must keep(.|\n)*Nearest valid: 3.0"):
        lower(schedule, [1] * 6, residuals=1.5)
    assert lower(schedule, [1] * 6, residuals=3.9).num_slots["until_w"] == 3
    assert lower(schedule, [1] * 6, residuals=6).residual_parts == 0
