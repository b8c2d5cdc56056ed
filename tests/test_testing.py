"""Helpers for people's own tests: what is wrong is found, and named."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import limits
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import testing

WIDTH = 3


def linear(w, x, batch, rng):
    del batch, rng
    return x + jnp.tanh(x @ w["kernel"]) + w["bias"]


def make_model(layer=linear, **functions) -> jaxpipe.Model:
    return jaxpipe.Model(
        embed=lambda outer, batch, rng: batch["x"] @ outer["embed"],
        layer=layer,
        head_loss=functions.pop("head_loss", lambda outer, x, batch, rng: jnp.mean(x**2)),
        **functions,
    )


def make_params() -> dict:
    keys = jax.random.split(jax.random.key(0), 2)
    layers = {"kernel": 0.3 * jax.random.normal(keys[0], (4, WIDTH, WIDTH))}
    embed = 0.3 * jax.random.normal(keys[1], (WIDTH, WIDTH))
    return {"embed": embed, "layers": layers | {"bias": jnp.ones((4, WIDTH))}, "head": {}}


def make_batch() -> dict:
    return {"x": jax.random.normal(jax.random.key(1), (16, WIDTH))}


MODEL, PARAMS, BATCH = make_model(), make_params(), make_batch()
BOTH = [jaxpipe.make_mesh(stage=2), jaxpipe.make_mesh(stage=2, data=2)]
ONE = {"schedules": ["1f1b"], "meshes": BOTH[1:]}


def found(model, **options) -> str:
    """The report of an assertion that must fail."""
    with pytest.raises(AssertionError) as error:
        testing.assert_matches_unpipelined(model, PARAMS, BATCH, **ONE | options)
    return str(error.value)


# What is found.


@pytest.mark.pipeline
def test_a_model_that_is_right_passes_on_every_mesh_with_every_schedule():
    names = ["gpipe", "zb-h1"]
    pipes = testing.assert_matches_unpipelined(MODEL, PARAMS, BATCH, schedules=names, zero=3)
    assert [(pipe.schedule.name, pipe.mesh.size, pipe.options.zero) for pipe in pipes] == [
        *((name, 2, 0) for name in names),
        *((name, 4, 3) for name in names),
    ]


def test_a_layer_that_reads_its_stage_is_found():
    def layer(w, x, batch, rng):
        try:
            scale = 1 + 1e-3 * jax.lax.axis_index("stage")
        except NameError:  # without a pipeline
            scale = 1
        return linear(w | {"bias": scale * w["bias"]}, x, batch, rng)

    first, worst, *rest = found(make_model(layer), meshes=BOTH[:1]).split("\n")
    assert first.startswith("1 of 1 configurations differ from the reference by more than 1e-05 of")
    assert re.match(r"Worst: gradients\['layers'\]\['(kernel|bias)'\] is .*, expected .*", worst)
    assert "with schedule '1f1b' on {'data': " in worst
    assert any(line.startswith("  schedule '1f1b' on {'data': ") for line in rest)
    assert {"  loss", "  evaluated loss", "  gradients['embed']"} <= {
        line.partition(":")[0] for line in rest
    }


def test_a_wrong_derivative_is_found_by_a_reference_that_does_not_share_it():
    @jax.custom_vjp
    def tanh(x):
        return jnp.tanh(x)

    tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x)),))

    def layer(w, x, batch, rng):
        return x + tanh(x @ w["kernel"]) + w["bias"]

    def reference(params, batch, rng, **_):
        x = batch["x"] @ params["embed"]
        for n in range(4):
            x = linear(jax.tree.map(lambda w, n=n: w[n], params["layers"]), x, batch, rng)
        return jnp.mean(x**2)

    text = found(make_model(layer), reference=reference)
    assert "Worst: gradients['layers']['kernel'] is" in text
    assert "\n  loss:" not in text
    testing.assert_matches_unpipelined(MODEL, PARAMS, BATCH, reference=reference, **ONE)


def wrong_on_the_second_shard(value):
    """The value, of which a pipeline's second data shard makes another."""
    try:
        return jnp.where(jax.lax.axis_index("data") == 1, 2 * value, value)
    except NameError:  # without a pipeline
        return value


def test_a_metric_that_is_wrong_is_found_where_it_is_wrong():
    def head_loss(outer, x, batch, rng):
        largest = wrong_on_the_second_shard(jax.lax.stop_gradient(jnp.abs(x).max()))
        return jnp.mean(x**2), {"largest": largest, "rows": jaxpipe.Sum(len(x))}

    text = found(make_model(head_loss=head_loss), meshes=BOTH)
    assert text.startswith("1 of 2 configurations differ")
    assert "metrics['largest']" in text.split("\n")[1]
    assert "{'data': 2, 'stage': 2}" in text.split("\n")[1]
    assert "gradients" not in text.partition("All that differ")[2]


def test_a_loss_that_is_a_sum_is_told_from_a_mean():
    """By itself, and beside a reference that knows of no microbatches."""
    model = make_model(head_loss=lambda outer, x, batch, rng: jnp.sum(x**2))

    def whole(params, batch, rng, **_):
        return jaxpipe.unpipelined.loss(model, params, batch, rng)

    for report in (found(model), found(model, reference=whole)):
        assert report.startswith("The loss of the batch is ")
        assert "in 8 with schedule '1f1b' on {'data': 2, 'stage': 2}: it is a sum." in report
        assert "Return the mean over a microbatch, or jaxpipe.Weighted" in report


@pytest.mark.pipeline
def test_a_state_that_is_wrong_is_found():
    def layer(w, x, batch, rng, state):
        mean = wrong_on_the_second_shard(jax.lax.stop_gradient(x.mean()))
        return linear(w, x, batch, rng), {"mean": 0.9 * state["mean"] + 0.1 * mean}

    states = tuple({"mean": jnp.zeros(())} for _ in range(4))
    text = found(make_model(layer, stateful=True), states=states)
    assert text.startswith("1 of 1 configurations differ")
    assert re.search(r"Worst: states\[\d\]\['mean'\] is", text)


def test_not_a_number_is_a_difference():
    def head_loss(outer, x, batch, rng):
        return jnp.mean(x**2) * jnp.where(wrong_on_the_second_shard(1) == 2, jnp.nan, 1)

    text = found(make_model(head_loss=head_loss))
    assert "is nan" in text.split("\n")[1]
    assert "inf of the largest value" in text.split("\n")[1]


def test_counts_are_compared_exactly():
    def head_loss(outer, x, batch, rng):
        return jnp.mean(x**2), {"count": jaxpipe.Sum(jnp.int32(10**8))}

    def reference(params, batch, rng, *, num_microbatches, data_shards, states):
        loss = jaxpipe.unpipelined.loss(make_model(), params, batch)
        return loss, {"count": jnp.int32(10**8 * num_microbatches * data_shards + 1)}

    text = found(make_model(head_loss=head_loss), reference=reference)
    assert "Worst: metrics['count'] is 8e+08, expected 8e+08: off by 1.0e+00" in text


def test_infinities_are_equal():
    (one,) = testing._compared("here", "loss", jnp.array([jnp.inf]), jnp.array([jnp.inf]), floor=0)
    assert one.relative == 0


def test_a_gradient_of_which_only_rounding_is_left_has_a_floor():
    def layer(w, x, batch, rng):
        rounding = 1e-9 * wrong_on_the_second_shard(1.0)
        return linear(w | {"bias": rounding * w["bias"]}, x, batch, rng)

    model = make_model(layer)
    text = found(model)
    assert "Worst: gradients['layers']['bias']" in text
    floor = float(re.search(r"give floor=(\S+)\.$", text).group(1))
    testing.assert_matches_unpipelined(model, PARAMS, BATCH, floor=floor, **ONE)


def test_what_cannot_be_compared_is_refused():
    for options, message in (
        ({"reference": lambda *_, **__: (1.0, {})}, "one a loss, the other a loss and metrics"),
        ({"schedules": "1f1b"}, "give at least one, in a list"),
        ({"meshes": []}, "give at least one, in a list"),
    ):
        with pytest.raises(ValueError, match=message):
            testing.assert_matches_unpipelined(MODEL, PARAMS, BATCH, **ONE | options)
    split = make_model(stage_split={"embed": 0, "head": {}})
    with pytest.raises(ValueError, match=r"Model.stage_split.*reference=functools.partial"):
        testing.assert_matches_unpipelined(split, PARAMS, BATCH)
    text = found(MODEL, reference=lambda *_, **__: jnp.zeros(2).sum().astype("bfloat16"))
    assert "loss': types: float32 != bfloat16" in text


# Counts.


def test_compilations_are_counted():
    step = jax.jit(lambda x: x * 7 + 1)
    x = jnp.ones(5)
    with testing.compilations() as names:
        step(step(x))
    assert names == ["jit(<lambda>)"]


def test_collectives_of_a_compiled_step_are_counted():
    mesh = jaxpipe.make_mesh(stage=2)

    def body(x):
        y = jax.lax.psum(x, "stage")
        z = jax.lax.ppermute(y, "stage", [(0, 1)])
        return jax.lax.ppermute(2 * z, "stage", [(1, 0)])

    run = jax.shard_map(body, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"))
    assert testing.collectives(run, jnp.ones(2)) == {"all-reduce": 1, "collective-permute": 2}


# Simulated devices, each in a process of its own.


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    code = f"import jax, jax.numpy as jnp\nfrom jaxpipe.testing import simulate_devices\n{code}"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=limits.hang(),
        check=False,
    )


def test_more_devices_than_cores_with_a_compilation_cache(tmp_path):
    code = """
import os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
simulate_devices(8)
mesh = jax.make_mesh((8,), ("x",))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
x = jax.device_put(jnp.arange(16.0), everywhere)
print(len(jax.devices()), jax.devices()[0].platform, jax.jit(jnp.sum)(x))
simulate_devices(4)
"""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for _ in range(2):
        done = run(code, **cache)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "8 cpu 120.0\n"
    assert not list(tmp_path.iterdir())


def test_programs_may_wait_in_line_for_one_that_takes_long():
    code = """
simulate_devices(4)
import jaxpipe
mesh = jaxpipe.make_mesh(stage=4)
spec = jax.sharding.PartitionSpec("stage")
specs = {"in_specs": spec, "out_specs": spec}
step = jax.jit(jax.shard_map(lambda x: x + jax.lax.psum(x, "stage"), mesh=mesh, **specs))
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda i, x: jnp.cos(x @ x), x))
x = jax.device_put(slow(jnp.zeros((300, 300)))[:4, :1], jax.sharding.NamedSharding(mesh, spec))
for _ in range(40):
    x = step(x)
print(x.shape)
"""
    done = run(code, XLA_FLAGS=limits.collectives())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(4, 1)\n"


def test_devices_that_come_too_late_are_refused_with_the_remedy():
    done = run("x = jnp.ones(3)\nsimulate_devices(4)")
    assert done.returncode == 1
    assert "RuntimeError: simulate_devices(4) comes too late: jax has begun to use 1 devi" in (
        done.stderr
    )
    assert "right after `import jax`, or at the top of conftest.py" in done.stderr


def test_no_device_is_refused():
    with pytest.raises(ValueError, match="num_devices=0 must be at least 1"):
        testing.simulate_devices(0)
