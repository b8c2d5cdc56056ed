"""Slices: every layer once, within the rules, never slower than whole actions, and replayable."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action, Kind, Schedule, Slice, dependencies, split_backwards
from jaxpipe.schedule.check.slice_rules import order_of
from jaxpipe.schedule.check.validate import ScheduleError, peak_in_flight, validate
from jaxpipe.schedule.generators.dualpipe import dualpipe_v
from jaxpipe.schedule.generators.one_f_one_b import one_f_one_b
from jaxpipe.schedule.generators.v_schedules import one_f_one_b_v, v_half, v_min, zb_v
from jaxpipe.schedule.lowering.lower import NONE, lower
from jaxpipe.schedule.placement import linear, looped, wave
from jaxpipe.schedule.search.slices import FIRST_TRIAL, OTHER_TRIALS, Uncut, slice_all, slice_ticks
from jaxpipe.schedule.simulate import Costs, lock_step, simulate, ticks

# No test may depend on how fast the machine is.
settings.register_profile("jaxpipe", deadline=None)
settings.load_profile("jaxpipe")

costs = st.builds(
    Costs, *(st.sampled_from([0.5, 0.8, 1, 1.2, 2, 3]) for _ in range(3)), st.sampled_from([0, 0.3])
)


@st.composite
def schedules(draw, *, mixed: bool = False) -> Schedule:
    """Any valid order on any placement: at every step, any action that is ready."""
    p = draw(st.integers(1, 3))
    placement = draw(st.sampled_from([linear(p), looped(p, num_chunks=3), wave(p)]))
    m, depth = draw(st.integers(1, 3)), placement.depth
    fused = draw(st.booleans())
    done: set[Action] = set()
    waiting = []
    for s, i in itertools.product(range(depth), range(m)):
        kinds = [Kind.BW] if (draw(st.booleans()) if mixed else fused) else [Kind.B, Kind.W]
        waiting += [Action(s, kind, i) for kind in (Kind.F, *kinds)]
    orders: list[list[Action]] = [[] for _ in range(p)]
    while waiting:
        ready = [
            action
            for action in waiting
            if done.issuperset(dependencies(action, num_virtual_stages=depth, split=True))
        ]
        action = draw(st.sampled_from(ready))
        waiting.remove(action)
        orders[placement.stages[action.virtual_stage]].append(action)
        kind = Kind.B if action.kind is Kind.BW else action.kind
        done.add(Action(action.virtual_stage, kind, action.microbatch))
    return Schedule("random", placement, m, tuple(map(tuple, orders)))


@st.composite
def sliced(draw, **options) -> tuple[Schedule, Schedule, tuple[int, ...], Costs]:
    """A schedule, its slices, its layers and its costs."""
    schedule = draw(schedules(**options))
    virtual_stages = schedule.placement.num_virtual_stages
    counts = st.tuples(*[st.integers(1, 4)] * virtual_stages)
    layers, priced = draw(counts), draw(costs)
    return schedule, slice_ticks(schedule, priced, layers), layers, priced


def by_kind(order, kinds):
    return [action for action in order if action.kind in kinds]


@settings(max_examples=40)
@given(sliced(mixed=True))
def test_slices_keep_the_rules_the_order_of_each_kind_and_the_peak(case):
    schedule, cut, layers, priced = case
    validate(cut)
    plain = lock_step(schedule, priced).makespan
    if cut.slices is not None and schedule.mixes_backwards:
        schedule = split_backwards(schedule)
    for before, after in zip(schedule.orders, cut.orders, strict=True):
        for kinds in ({Kind.F}, {Kind.B, Kind.BW}, {Kind.W}):
            assert by_kind(after, kinds) == by_kind(before, kinds)
    peaks = zip(peak_in_flight(cut), peak_in_flight(schedule), strict=True)
    assert all(new <= old for new, old in peaks)
    time = lock_step(cut, priced).makespan
    assert time <= plain + 1e-9
    busiest = max(sum(priced.of(action.kind) for action in order) for order in cut.orders)
    assert time >= busiest - 1e-9
    if cut.slices is not None:
        ran: collections.Counter[tuple[Action, int]] = collections.Counter()
        for part in itertools.chain(*cut.slices):
            ran.update((part.action, layer) for layer in range(part.lo, part.hi))
        assert ran == {
            (action, layer): 1
            for action in itertools.chain(*schedule.orders)
            for layer in range(layers[action.virtual_stage])
        }


class Replay:
    """Runs a tick table as the executor does, on names in place of numbers."""

    def __init__(self, table) -> None:
        self.table, self.schedule = table, table.schedule
        self.stages = self.schedule.placement.stages
        self.buffers = [collections.defaultdict(dict) for _ in range(self.schedule.num_stages)]
        self.chunks: list[dict[int, int]] = [{} for _ in range(self.schedule.num_stages)]
        self.sums: list[dict[int, tuple]] = [{} for _ in self.buffers]
        self.ran: list[list[tuple[int, Kind, int, int, int, int]]] = [[] for _ in self.buffers]
        self.reduced: list[list[int]] = [[] for _ in self.buffers]
        self.moving: list[dict[tuple, int]] = [{} for _ in self.buffers]
        self.leaving: list[set[int]] = [set() for _ in self.buffers]
        self.arriving: list[tuple[int, int, int]] = []
        self.sent: dict = {}
        self.embedded: list[int] = []

    def run(self) -> None:
        table = self.table
        for chunks, slots in zip(table.gathers.edge.chunk, table.gathers.edge.slot, strict=True):
            for d in np.flatnonzero(chunks != NONE):
                self.chunks[d][slots[d]] = chunks[d]
        for t in range(table.num_ticks):
            self.tick(t)
        for chunks, slots in zip(table.reduces.edge.chunk, table.reduces.edge.slot, strict=True):
            for d in np.flatnonzero(chunks != NONE):
                assert self.sums[d].pop(slots[d])[0] == chunks[d]
                self.reduced[d].append(chunks[d])
        assert not any(self.moving)

    def tick(self, t) -> None:
        table = self.table
        for d in range(self.schedule.num_stages):
            if table.gathers.chunk[t, d] != NONE:
                self.gather(t, d)
            if table.reduces.group and table.reduces.chunk[t, d] != NONE:
                self.reduce_pieces(t, d)
        if table.embed[t] != NONE:
            entrance = self.buffers[self.stages[0]]["x"]
            entrance[table.embed_slot[t]] = ("x", 0, table.embed[t], 0)
        sent = {}
        for d in range(self.schedule.num_stages):
            for kind, columns in table.passes.items():
                if columns.lo[t, d] < columns.hi[t, d]:
                    cell = {f.name: getattr(columns, f.name)[t, d] for f in fields(columns)}
                    sent[d, kind] = self.cell(t, d, kind, cell)
            if table.reduces.whole and table.reduces.chunk[t, d] != NONE:
                chunk = table.reduces.chunk[t, d]
                assert self.sums[d].pop(table.reduces.slot[t, d])[0] == chunk
                self.reduced[d].append(chunk)
        for d, slot, chunk in self.arriving:
            self.chunks[d][slot] = chunk
        self.arriving.clear()
        self.exchange(t, sent)

    def gather(self, t, d) -> None:
        """A whole chunk is there at once, one in pieces when it has them all; meanwhile no layer
        can read what was in its slot."""
        moved, chunks = self.table.gathers, self.chunks[d]
        chunk, slot = moved.chunk[t, d], moved.slot[t, d]
        if moved.whole:
            chunks[slot] = chunk
            return
        chunks.pop(slot, None)
        if self.has_moved(moved, t, d):
            self.arriving.append((d, slot, chunk))

    def reduce_pieces(self, t, d) -> None:
        """Nothing is added to the sums any more, and their slot stays as it is."""
        moved = self.table.reduces
        chunk, slot = moved.chunk[t, d], moved.slot[t, d]
        if moved.piece[t, d] == 0:
            assert self.sums[d].pop(slot)[0] == chunk
            self.leaving[d].add(slot)
        if self.has_moved(moved, t, d):
            self.leaving[d].remove(slot)
            self.reduced[d].append(chunk)

    def has_moved(self, moved, t, d) -> bool:
        """Whether a chunk has moved with these pieces, the last of them."""
        key = moved is self.table.gathers, moved.chunk[t, d], moved.slot[t, d]
        first = self.moving[d].pop(key, 0)
        assert moved.piece[t, d] == first
        if first + moved.group == moved.parts * moved.group:
            return True
        self.moving[d][key] = first + moved.group
        return False

    def cell(self, t, d, kind, cell):
        buffers, i = self.buffers[d], cell["microbatch"]
        s = self.schedule.placement.virtual_stages[d][cell["chunk"]]
        assert self.chunks[d][cell["weights"]] == cell["chunk"]
        self.ran[d].append((t, kind, s, i, cell["lo"], cell["hi"]))
        layers = range(cell["lo"], cell["hi"])
        if kind in (Kind.W, Kind.BW):
            assert cell["gradient"] not in self.leaving[d]
            chunk, first = self.sums[d].setdefault(cell["gradient"], (cell["chunk"], (s, i)))
            assert chunk == cell["chunk"]
            assert cell["fresh"] == (first == (s, i))
        if kind is Kind.F:
            assert buffers["x"][cell["inbox"]] == ("x", s, i, cell["lo"])
            for name in ("until_b", "until_w"):
                buffers[name] |= {(cell[name], layer): (s, i) for layer in layers}
            value = ("x", s, i, cell["hi"])
            if cell["pauses"]:
                buffers["x"][cell["inbox"]] = value
            return value
        for layer in layers:
            assert buffers["until_w"][cell["until_w"], layer] == (s, i)
            if kind is Kind.W:
                assert buffers["crossing"].pop((cell["crossing"], layer)) == (s, i)
                continue
            assert buffers["until_b"][cell["until_b"], layer] == (s, i)
            if kind is Kind.B:
                buffers["crossing"][cell["crossing"], layer] = (s, i)
        if kind is Kind.W:
            return None
        assert buffers["dy"][cell["inbox"]] == ("dy", s, i, cell["hi"])
        value = ("dy", s, i, cell["lo"])
        if cell["pauses"]:
            buffers["dy"][cell["inbox"]] = value
        return value

    def exchange(self, t, sent) -> None:
        table, counts = self.table, self.table.layer_counts
        last = self.schedule.placement.num_virtual_stages - 1
        backward = Kind.BW if Kind.BW in table.passes else Kind.B
        for channel in table.channels:
            kind = Kind.F if channel.kind is Kind.F else backward
            for sender, receiver in channel.edges:
                for slots, by in ((channel.slot, sent), (channel.late_slot, self.sent)):
                    slot = slots[t, receiver]
                    if slot == NONE:
                        continue
                    assert table.meets[t] or by is self.sent or channel.local
                    name, s, i, layer = by[sender, kind]
                    assert layer == (counts[s] if name == "x" else 0)
                    reader = s + 1 if name == "x" else s - 1
                    start = 0 if name == "x" or reader < 0 else counts[reader]
                    self.buffers[receiver][name][slot] = (name, reader, i, start)
        self.sent = sent
        if table.embed_gradient[t] != NONE:
            slot, first = table.embed_gradient_slot[t], self.stages[0]
            waits = slot != NONE
            back = self.buffers[first]["dy"][slot] if waits else sent[first, backward]
            assert back == ("dy", -1 if waits else 0, table.embed_gradient[t], 0)
            self.embedded.append(table.embed_gradient[t])
        if table.head[t] != NONE:
            exit_stage = self.stages[last]
            assert sent[exit_stage, Kind.F] == ("x", last, table.head[t], counts[last])
            self.buffers[exit_stage]["dy"][table.head_slot[t]] = (
                "dy", last, table.head[t], counts[last],
            )  # fmt: skip


fields = dataclasses.fields


def replay(schedule: Schedule, layers, **options):
    """Runs the lowered schedule and returns what every stage ran, as slices."""
    return replay_table(lower(schedule, layers, **options))


def replay_table(table):
    runner = Replay(table)
    schedule = table.schedule
    runner.run()
    assert not any(runner.sums)
    chunks = range(schedule.num_chunks)
    assert all(sorted(set(row)) == list(chunks) for row in runner.reduced)
    heads = [i for i in runner.table.head if i != NONE]
    assert sorted(heads) == sorted(runner.embedded) == list(range(schedule.num_microbatches))
    rows = []
    for row in runner.ran:
        phases = {Kind.F: 0, Kind.B: 1, Kind.BW: 1, Kind.W: 2}
        row.sort(key=lambda run: (run[0], phases[run[1]]))
        rows.append(tuple(Slice(t, Action(s, k, i), lo, hi) for t, k, s, i, lo, hi in row))
    return tuple(rows)


@settings(max_examples=40)
@given(sliced(), st.integers(1, 2), st.sampled_from([0, 1, 6]), st.sampled_from([1, 4]))
def test_lowered_slices_replay(case, weight_slots, pieces, shares):
    schedule, cut, layers, _ = case
    rows = replay(cut, layers, weight_slots=weight_slots, pieces=pieces, shares=shares)
    assert cut.slices is None or rows == cut.slices
    assert tuple(map(order_of, rows)) == cut.orders
    assert tuple(map(order_of, replay(schedule, layers))) == schedule.orders


EXECUTABLE = {entry.name: entry for entry in catalog.executable()}


@functools.cache
def in_slices(name: str) -> tuple[Schedule, list[int]]:
    """With four chunks a stage where it can have them: more than there are slots."""
    options = inspect.signature(EXECUTABLE[name].generate).parameters
    chunks = {"chunks": 4} if "num_chunks" in options else {}
    schedule = catalog.build(name, stages=4, microbatches=8, **chunks)
    layers = [4] * schedule.placement.num_virtual_stages
    if schedule.slices is None:
        schedule = slice_ticks(schedule, Costs(1, 1.2, 0.8), layers)
    return schedule, layers


@pytest.mark.parametrize("own_slots", [False, True])
@pytest.mark.parametrize(
    ("weight_slots", "pieces", "shares"), [(1, 0, 1), (2, 0, 1), (2, 4, 8), (3, 1, 1)]
)
@pytest.mark.parametrize("name", EXECUTABLE)
def test_slices_of_every_schedule_replay(name, weight_slots, pieces, shares, own_slots):
    schedule, layers = in_slices(name)
    moving = {"own_slots": own_slots, "pieces": pieces, "shares": shares}
    table = lower(schedule, layers, weight_slots=weight_slots, **moving)
    replay_table(table)
    for moved in (table.gathers, table.reduces) if own_slots else ():
        busy = moved.chunk != NONE
        assert (moved.slot[busy] == moved.chunk[busy] % moved.num_slots).all()


@pytest.mark.parametrize(
    ("name", "cut", "meets", "ticks"),
    [
        ("zb-v", False, 31, 99), ("zb-v", True, 54, 111), ("hanayo", False, 62, 99),
        ("1f1b", False, 54, 54), ("1f1b", True, 36, 59),
    ],
)  # fmt: skip
def test_stages_meet_only_for_messages_that_cannot_wait(name, cut, meets, ticks):
    schedule = catalog.build(name, stages=4, microbatches=16)
    layers = [4] * schedule.placement.num_virtual_stages
    schedule = slice_ticks(schedule, Costs(1, 1.2, 0.8), layers) if cut else schedule
    replay(schedule, layers)
    table = lower(schedule, layers)
    assert (table.meets.sum(), table.num_ticks) == (meets, ticks)
    assert any(channel.late for channel in table.channels) == (meets < ticks)


def bubble(schedule, priced, layers) -> tuple[float, float]:
    cut = slice_ticks(schedule, priced, [layers] * schedule.placement.num_virtual_stages)
    validate(cut)
    return lock_step(cut, priced).bubble_ratio, simulate(schedule, priced).bubble_ratio


@pytest.mark.parametrize(
    ("generate", "p", "bar"),
    [
        (zb_v, 4, 0.040), (zb_v, 8, 0.052),
        (one_f_one_b, 4, 0.130), (one_f_one_b, 8, 0.150),
        (v_half, 4, 0.092), (v_half, 8, 0.135),
    ],
)  # fmt: skip
def test_sliced_bubbles(generate, p, bar):
    assert bubble(generate(p, 4 * p), Costs(1, 1.2, 0.8), 8)[0] <= bar


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("generate", [zb_v, one_f_one_b, v_half])
def test_slices_reach_the_free_running_clock_where_layers_divide_evenly(generate, p):
    locked, free = bubble(generate(p, 4 * p), Costs(1, 2, 1), 4)
    assert locked <= free + 1e-9


def test_slicing_is_deterministic_and_starts_over():
    schedule, priced = v_half(3, 4), Costs(1, 1.2, 0.8)
    once = slice_ticks(schedule, priced, [2] * 6)
    assert once == slice_ticks(schedule, priced, [2] * 6)
    validate(slice_ticks(once, priced, [1] * 6))


def test_schedules_cut_together_or_stopped_early_are_those_cut_alone():
    counts, trials = (3, 2, 3, 2, 3, 2), FIRST_TRIAL + OTHER_TRIALS
    costs = (Costs(1, 1.2, 0.8, 0.1),) * 6
    uncut = [Uncut(make(3, 5), costs, counts) for make in (zb_v, v_half, v_min, one_f_one_b_v)]
    uncut.append(Uncut(one_f_one_b(3, 4), costs[:3], (5, 4, 6)))
    alone = [slice_ticks(*each) for each in uncut]
    together = slice_all(uncut, trials)
    assert [timeline.schedule for timeline in together] == alone
    latest = sorted(timeline.makespan for timeline in together)[2]
    for stopped, whole in zip(slice_all(uncut, trials, makespan=latest), together, strict=True):
        assert stopped == whole if whole.makespan < latest else stopped.makespan >= latest - 1e-9


one_f_one_b_fused = functools.partial(one_f_one_b, fused=True)


@settings(max_examples=25)
@given(
    make=st.sampled_from([zb_v, v_half, one_f_one_b, one_f_one_b_fused, dualpipe_v]),
    p=st.integers(1, 3),
    m=st.integers(1, 4),
    layers=st.integers(1, 3),
    costs=st.builds(Costs, *[st.sampled_from([0.5, 1, 1.75])] * 3, st.sampled_from([0, 0.1, 1])),
    uneven=st.booleans(),
)
def test_no_search_stops_that_can_still_end_before(make, p, m, layers, costs, uneven):
    schedule = make(p, m)
    number = schedule.placement.num_virtual_stages
    last = dataclasses.replace(costs, f=3, w=0.25) if uneven else costs
    counts = (*(layers,) * (number - 1), layers + uneven)
    uncut = Uncut(schedule, (*(costs,) * (number - 1), last), counts)
    [whole] = slice_all([uncut], FIRST_TRIAL + OTHER_TRIALS)
    latest = whole.makespan * (1 + 1e-6)
    [stopped] = slice_all([uncut], FIRST_TRIAL + OTHER_TRIALS, makespan=latest)
    assert stopped == whole


def test_long_messages_leave_actions_whole():
    schedule = one_f_one_b(2, 2)
    assert slice_ticks(schedule, Costs(1, 1, 1, 50), [4, 4]).slices is None


@pytest.mark.parametrize("counts", [[1], [1, 0], [1, 1, 1]])
def test_layers_must_fit_the_schedule(counts):
    with pytest.raises(ValueError, match="does not fit 2 virtual stages"):
        slice_ticks(one_f_one_b(2, 2), Costs(1, 1, 1), counts)


def test_lower_refuses_slices_of_other_layers():
    cut = slice_ticks(one_f_one_b(2, 4), Costs(1, 1.2, 0.8), [4, 4])
    assert cut.slices is not None
    with pytest.raises(ValueError, match=r"\(4, 4\) layers .* has \(2, 2\): cut it again"):
        lower(cut, [2, 2])


def slices(text: str) -> tuple[Slice, ...]:
    """``"0:0F0[0,2)"``: tick, action, layers."""
    rows = []
    for word in text.split():
        tick, rest = word.split(":")
        name, span = rest.rstrip(")").split("[")
        lo, hi = span.split(",")
        rows.append(Slice(int(tick), Action.parse(name), int(lo), int(hi)))
    return tuple(rows)


GOOD = (
    "0:0F0[0,2) 1:0F1[0,1) 1:0B0[1,2) 1:0W0[1,2) 2:0F1[1,2) 2:0B0[0,1) 2:0W0[0,1) "
    "3:0B1[0,2) 3:0W1[0,2)"
)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0:0F0[0,2)", "0:0F0[0,1)", "0F1 starts in tick 1 before 0F0 has finished"),
        ("1:0B0[1,2)", "1:0B0[0,1)", "0B0 runs layers 0 to 1 in tick 1"),
        ("1:0F1[0,1)", "0:0F1[0,1)", "0F1 in tick 0 comes after its turn"),
        ("2:0F1[1,2) ", "", "0F1 never runs its other 1 layers"),
        ("3:0B1[0,2) 3:0W1[0,2)", "2:0W1[0,2) 3:0B1[0,2)", "The order has 0B1"),
        ("1:0B0[1,2) 1:0W0[1,2)", "1:0W0[1,2)", "0W0"),
        (
            "1:0B0[1,2) 1:0W0[1,2) 2:0F1[1,2) 2:0B0[0,1)",
            "1:0W0[1,2) 2:0F1[1,2) 2:0B0[0,2)",
            "0W0 in tick 1 runs layer 1 before its B",
        ),
        ("2:0F1[1,2) 2:0B0[0,1) 2:0W0[0,1) 3", "2:0B0[0,1) 2:0W0[0,1) 3:0F1[1,2) 3", "0B1 in"),
    ],
)
def test_broken_slices_are_refused(old, new, expected):
    row = slices(GOOD)
    schedule = Schedule("cut", linear(1), 2, (order_of(row),), slices=(row,))
    validate(schedule)
    assert old in GOOD
    broken = dataclasses.replace(schedule, slices=(slices(GOOD.replace(old, new)),))
    with pytest.raises(ScheduleError) as caught:
        validate(broken)
    assert expected in str(caught.value)


def whole_actions(schedule: Schedule, layers: tuple[int, ...]) -> list[list[Slice]]:
    """Slices of a schedule that nothing is gained by cutting: an action each, in its tick."""
    return [
        [Slice(tick, a, 0, layers[a.virtual_stage]) for tick, a in zip(row, order, strict=True)]
        for row, order in zip(ticks(schedule), schedule.orders, strict=True)
    ]


@settings(max_examples=30)
@given(sliced(), st.data())
def test_mutated_slices_are_refused_or_still_run(case, data):
    _, cut, layers, _ = case
    rows = [list(row) for row in cut.slices or whole_actions(cut, layers)]
    d = data.draw(st.integers(0, len(rows) - 1))
    k = data.draw(st.integers(0, len(rows[d]) - 1))
    shift = data.draw(st.sampled_from([-1, 1]))
    rows[d][k] = dataclasses.replace(rows[d][k], tick=max(0, rows[d][k].tick + shift))
    moved = dataclasses.replace(cut, slices=tuple(map(tuple, rows)))
    try:
        validate(moved)
    except ScheduleError:
        return
    assert replay(moved, layers) == moved.slices


def test_the_wrong_number_of_stages_is_refused():
    schedule = dataclasses.replace(one_f_one_b(2, 2), slices=((),))
    with pytest.raises(ScheduleError, match="slices of 1 stages for 2"):
        validate(schedule)


def test_slices_gather_no_chunk_twice_at_once_and_keep_what_a_tick_uses():
    cut = slice_ticks(zb_v(2, 6), Costs(1, 1.2, 0.8), [4] * 4)
    table = lower(cut, [4] * 4, weight_slots=1)
    assert table.gathers.num_slots == 2
    assert table.gathers.counts == (2, 2)
    assert np.all(table.reduces.chunk < 2)


@pytest.mark.parametrize("name", [entry.name for entry in catalog.entries()])
def test_every_registered_schedule_can_be_sliced(name):
    schedule = catalog.build(name, stages=2, microbatches=4)
    priced = Costs(1, 1.2, 0.8)
    cut = slice_ticks(schedule, priced, [3] * schedule.placement.num_virtual_stages)
    validate(cut)
    assert lock_step(cut, priced).makespan <= lock_step(schedule, priced).makespan
