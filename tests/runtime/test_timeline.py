"""A measured timeline has what the schedule says, in its order, and never breaks a dependency."""

import itertools
import json

import chex
import jax
import jax.numpy as jnp
import pytest
import toys
from compilations import refusal
from covering import some

import jaxpipe
from benchmarks.bubble import WIDTH, sleeping_model
from jaxpipe import measure
from jaxpipe.runtime.tick.stamps import Stamps
from jaxpipe.schedule import Costs, build, device_clock, page, simulate, timelines
from jaxpipe.schedule.show.draw import exchanges

SECONDS = Costs(0.004, 0.006, 0.003)
"""Of a layer, that it sleeps: no measurement can be shorter, on however busy a machine."""


def sleeping(name: str, *, p: int, m: int, layers: int, data: int = 1):
    """A pipeline of sleeping layers, and its timeline."""
    schedule = build(name, stages=p, microbatches=m)
    counts = [layers] * schedule.placement.num_virtual_stages
    model, params = sleeping_model([SECONDS] * sum(counts))
    mesh = jaxpipe.make_mesh(stage=p, data=data)
    pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=mesh, zero=3)
    batch = {"x": jnp.ones((m * data, WIDTH))}
    return pipe, measure.timeline(pipe, pipe.place(params), batch)


@pytest.mark.parametrize(
    ("name", "p", "m", "layers", "data"),
    some(
        [("1f1b-fused", 3, 4, 1, 1), ("zb-v", 2, 3, 3, 2), ("dualpipe-v-published", 2, 5, 1, 1)],
        ("zb-v", 2, 3, 3, 2),
    ),
)
def test_every_cell_is_there_in_order_and_no_sooner_than_it_can_be(name, p, m, layers, data):
    pipe, measured = sleeping(name, p=p, m=m, layers=layers, data=data)
    schedule, placement = measured.schedule, measured.schedule.placement
    chunk = Costs(*(layers * getattr(SECONDS, kind) for kind in "fbw"))
    expected = device_clock(schedule, chunk)
    for row, planned in zip(measured.rows, expected.rows, strict=True):
        assert [timed.action for timed in row] == [timed.action for timed in planned]
        for part, like in zip(row, planned, strict=True):
            assert part.end - part.start >= like.end - like.start - 1e-6
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))
    found = exchanges(measured)
    assert len(found) == len(exchanges(expected))
    assert all(message.sent <= message.read for message in found)
    assert measured.makespan >= simulate(schedule, chunk).makespan - 1e-6
    # Idle time and work make up the whole.
    busy = [sum(part.end - part.start for part in row) for row in measured.rows]
    for ratio, time in zip(measured.stage_bubble_ratios, busy, strict=True):
        assert ratio == pytest.approx(1 - time / measured.makespan)
    assert len(measured.costs) == placement.num_virtual_stages
    assert pipe.table.schedule.num_microbatches == m


def test_a_measured_step_gives_the_loss_and_gradients_of_any_other():
    toy, stamps = toys.named("untied"), Stamps()
    pipe = toys.pipeline("untied", "zb-v", toys.ON_DATA, microbatches=4, zero=2)
    placed, batch = pipe.place(toy.params), toy.batch(8)
    step = pipe.make_program("train", stamps=stamps)(placed, batch, None, None)
    loss, grads = pipe.value_and_grad(placed, batch)
    jax.effects_barrier()
    chex.assert_trees_all_close((step.value, step.gradients), (loss, grads), rtol=1e-5, atol=1e-7)
    # A stamp at both ends of F, B and W of every chunk, of one device of every stage.
    assert len(stamps.taken) == 2 * 3 * 4 * 4
    assert "callback" not in str(jax.make_jaxpr(pipe.value_and_grad)(placed, batch))


def test_a_stage_without_layers_has_its_actions_on_the_timeline():
    toy = toys.named("ends")
    pipe = toys.pipeline("ends", "1f1b", layer_counts=(9, 0), microbatches=2)
    measured = measure.timeline(pipe, pipe.place(toy.params), toy.batch(4))
    actions = [[timed.action for timed in row] for row in measured.rows]
    assert actions == [list(order) for order in measured.schedule.orders]


def test_predicted_and_measured_are_drawn_beside_each_other():
    _, measured = sleeping("1f1b", p=2, m=2, layers=1)
    free, device = timelines(measured.schedule, measured.costs)
    (shown,) = json.loads(
        page([[free, device, measured]]).split('id="data">')[1].split("</script>")[0]
    )["schedules"]
    drawn = [timeline["clock"] for timeline in shown["timelines"]]
    assert drawn == ["free-running", "device", "measured"]
    _, predicted, ran = (
        [[name for name, *_ in row] for row in t["parts"]] for t in shown["timelines"]
    )
    assert predicted == ran


def test_devices_of_other_processes_are_refused(monkeypatch):
    pipe, batch = toys.pipeline("ends"), toys.named("ends").batch(4)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    found = refusal(measure.timeline, pipe, pipe.placed_params, batch)
    assert "mesh has devices of other processes" in found
