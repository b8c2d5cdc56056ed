# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A first pipeline
#
# This notebook draws a schedule tick by tick, and then trains a toy with it on 4 simulated CPU
# devices, in well under a minute. It is a plain Python script:
#
#     make setup
#     .venv/bin/python examples/first_pipeline.py
#
# Jupyter opens it as a notebook with the jupytext extension.

# %%
import jax
import jax.numpy as jnp
import optax

import jaxpipe
from jaxpipe import testing
from jaxpipe.schedule import Costs, device_clock, draw, simulate
from jaxpipe.schedule.simulate import ticks

testing.simulate_devices(4)  # leave it out on a cluster
STAGES, MICROBATCHES = 4, 6

# %% [markdown]
# ## A schedule is data
#
# For every stage a schedule lists its actions in order: F (forward), B (backward for the input) and
# W (backward for the weights) of one microbatch. It says nothing about time. ZB-H1 is 1F1B with
# each W deferred for as long as the memory of 1F1B allows, so that it can fill a bubble.

# %%
schedule = jaxpipe.schedules.build("zb-h1", stages=STAGES, microbatches=MICROBATCHES)
for stage, order in enumerate(schedule.orders):
    print(f"stage {stage}:", *(f"{action.kind}{action.microbatch}" for action in order))

# %% [markdown]
# ## Tick by tick
#
# One program runs on all stages. In a tick every stage runs at most one action, whose inputs must
# have been computed in an earlier tick. Read downwards: microbatch 0 enters at stage 0, its loss is
# known at stage 3, and its gradient travels back. A dot is a bubble.

# %%
grid = [["."] * STAGES for _ in range(1 + max(max(row) for row in ticks(schedule)))]
for stage, (order, row) in enumerate(zip(schedule.orders, ticks(schedule), strict=True)):
    for action, tick in zip(order, row, strict=True):
        grid[tick][stage] = f"{action.kind}{action.microbatch}"
print("tick  " + "".join(f"{f'stage {stage}':9}" for stage in range(STAGES)))
for tick, cells in enumerate(grid):
    print(f"{tick:4}  " + "".join(f"{cell:9}" for cell in cells))

# %% [markdown]
# ## Two clocks
#
# Papers draw the free-running clock, on which a stage waits only for its inputs. The device clock
# tells how long the program takes on GPUs, with the waits that its messages cause. Simulated
# devices all wait for each other in every tick, and take longer.

# %%
costs = Costs(f=1, b=1.2, w=0.8)
for timeline in (simulate(schedule, costs), device_clock(schedule, costs)):
    print(draw.caption(timeline))
    print(draw.text(timeline))

# %% [markdown]
# ## Training with it
#
# A model is three pure functions. The layers' parameters are stacked: 8 layers, 2 per stage. F, B
# and W are derived from `layer`.

# %%
model = jaxpipe.Model(
    embed=lambda outer, batch, rng: batch["x"] @ outer["embed"],
    layer=lambda w, x, batch, rng: x + jnp.tanh(x @ w),
    head_loss=lambda outer, x, batch, rng: jnp.mean((x @ outer["head"] - batch["y"]) ** 2),
)
keys = jax.random.split(jax.random.key(0), 4)
params = {
    "embed": 0.1 * jax.random.normal(keys[0], (16, 32)),
    "layers": 0.1 * jax.random.normal(keys[1], (8, 32, 32)),
    "head": 0.1 * jax.random.normal(keys[2], (32, 1)),
}
x = jax.random.normal(keys[3], (8 * MICROBATCHES, 16))
batch = {"x": x, "y": jnp.sin(x.sum(1, keepdims=True))}

pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=jaxpipe.make_mesh(stage=STAGES))
placed = pipe.place(params)

# %% [markdown]
# The pipeline computes the same loss as the model without a pipeline.

# %%
alone = jaxpipe.unpipelined.loss(model, params, batch, num_microbatches=MICROBATCHES)
print(f"without a pipeline {alone:.6f}, with it {pipe.loss(placed, batch):.6f}")

# %%
optimizer = optax.adam(3e-3)
state, step = pipe.init(optimizer, placed), pipe.train_step(optimizer)

for number in range(1, 61):
    loss, placed, state = step(placed, state, batch)
    if number % 15 == 0:
        print(f"step {number:3}: loss {loss:.4f}")
