"""A persistent compilation cache: programs for several CPU devices must not come from it.

What XLA loads from the cache runs its collectives in no certain order, and deadlocks.
"""

import pytest
from command import finish, start

pytestmark = pytest.mark.end_to_end

# How many entries the cache gains by one more compilation, after there is a mesh.
ENTRIES = """
import os, jax, jax.numpy as jnp, numpy as np, jaxpipe

jax.jit(lambda x: x + 1)(jnp.ones(3))  # jax looks at its settings when it first compiles
folder = jax.config.jax_compilation_cache_dir
assert os.listdir(folder)
{mesh}
before = len(os.listdir(folder))
jax.jit(lambda x: x * 2 + 3)(jnp.ones(3))
print(len(os.listdir(folder)) - before)
"""
MADE = "jaxpipe.make_mesh(stage=len(jax.devices()))"
OWN = """
devices = np.array(jax.devices()).reshape(1, -1)
params = {"embed": {}, "layers": jnp.ones((4, 2, 2)), "head": {}}
jaxpipe.Pipeline(
    jaxpipe.Model(
        embed=lambda outer, batch, rng: batch,
        layer=lambda w, x, batch, rng: x @ w,
        head_loss=lambda outer, x, batch, rng: x.mean(),
    ),
    params,
    schedule=jaxpipe.schedules.build("1f1b", stages=devices.size, microbatches=4),
    mesh=jax.sharding.Mesh(devices, ("data", "stage")),
)
"""


@pytest.mark.parametrize(
    ("mesh", "variables", "gained"),
    [
        (MADE, {}, 1),
        (OWN, {"JAX_NUM_CPU_DEVICES": "2"}, 0),
    ],
    ids=["one_device", "two_devices"],
)
def test_the_cache_is_used_for_one_device_only(mesh, variables, gained, tmp_path):
    variables |= {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = finish(start("python", "-c", ENTRIES.format(mesh=mesh), **variables))
    assert int(done.out) == gained
    assert ("is not used" in done.err) == (gained == 0)
