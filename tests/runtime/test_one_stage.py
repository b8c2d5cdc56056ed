"""A stage of a pipeline that runs alone: `benchmarks/one_stage.py`."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from benchmarks.one_stage import column, stage_of_pipeline
from jaxpipe.runtime.tick.stamps import Stamps
from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Action
from jaxpipe.schedule.lowering.lower import lower
from models import gpt

STAGES, MICROBATCHES, ROWS = 2, 4, 2
CONFIG = gpt.GPTConfig(
    vocab_size=32, sequence_length=8, num_layers=4, width=16, num_heads=2, dtype="float32"
)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        pytest.param("v-half", "unrolled", marks=pytest.mark.slow),
        ("interleaved-fused", "stacked"),
    ],
)
def test_stages_that_run_alone_run_the_schedule_together(name, weights):
    """Every action runs once, on its own stage."""
    schedule = catalog.build(name, stages=STAGES, microbatches=MICROBATCHES)
    shape = MICROBATCHES * ROWS, CONFIG.sequence_length + 1
    batch = {"tokens": jax.random.randint(jax.random.key(0), shape, 0, CONFIG.vocab_size)}
    ran: Counter[Action] = Counter()
    for stage in range(STAGES):
        pipe = stage_of_pipeline(
            CONFIG, schedule, stage, device=jax.devices()[0], remat="none", weights=weights
        )
        stamps = Stamps()
        params = jax.tree.map(lambda w: jnp.ones(w.shape, w.dtype), pipe.placed_params)
        step = pipe.make_program("train", stamps=stamps)(params, batch, None, None)
        jax.block_until_ready(step)
        jax.effects_barrier()
        held = schedule.placement.virtual_stages[stage]
        ran.update(Action(held[s.chunk], s.kind, s.microbatch) for s in stamps.taken[::2])
    assert ran == Counter(action for order in schedule.orders for action in order)


@pytest.mark.parametrize("name", ["zb-v", "hanayo", "breadth-first"])
def test_a_stage_alone_has_the_ticks_the_slots_and_the_messages_of_the_pipeline(name):
    schedule = catalog.build(name, stages=4, microbatches=8)
    table = lower(schedule, [2] * schedule.placement.num_virtual_stages, own_slots=True)
    for stage in range(4):
        alone = column(table, stage)
        assert alone.num_slots == table.num_slots
        kinds = {"gathers": False, "reduces": False}
        assert alone.parts(**kinds) == table.parts(**kinds)
        for own, channel in zip(alone.channels, table.channels, strict=True):
            assert own.local == channel.local
            sends_late = any(stage in edge for edge in channel.late_edges)
            assert bool(own.late_edges) == sends_late
            assert own.slot.tolist() == channel.slot[:, [stage]].tolist()
