"""Values that are not finite are named by the layer, the pass and the microbatch that made them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe.testing import find_nan

LAYERS, WIDTH, MICROBATCHES, SHARDS = 6, 4, 4, 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def broken_backward(breaks, x, hit):
    return x


def _forward(breaks, x, hit):
    return x, hit


def _backward(breaks, hit, dx):
    return jnp.where(hit, breaks, dx), None


broken_backward.defvjp(_forward, _backward)


def layer(w, x, batch, rng):
    h = jnp.tanh(x @ w["kernel"])
    hits = {name: (batch[name] == w["number"] + 1).any() for name in ("forward", "backward")}
    h = jnp.where(hits["forward"], jnp.log(-1.0 - h**2), h)
    return x + broken_backward(jnp.inf, h, hits["backward"])


MODEL = jaxpipe.Model(
    embed=lambda outer, batch, rng: batch["x"],
    layer=layer,
    head_loss=lambda outer, x, batch, rng: jnp.mean(x**2 / batch["scale"][:, None]),
)
PARAMS = {
    "embed": {},
    "layers": {
        "kernel": 0.3 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)),
        "number": jnp.arange(LAYERS, dtype=jnp.float32),
    },
    "head": {},
}
ROWS = 2 * MICROBATCHES * SHARDS


def batch_with(**changes):
    """A batch in which some rows have other values: name=(row, value)."""
    batch = {
        "x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32),
        **{name: np.zeros(ROWS, np.float32) for name in ("forward", "backward")},
        "scale": np.ones(ROWS, np.float32),
    }
    for name, (row, value) in changes.items():
        batch[name][row] = value
    return batch


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("zb-v", {"zero": 3}),
        ("interleaved-fused", {"weights": "unrolled", "zero": 2, "remat": "full"}),
    ],
)
def test_the_layer_and_the_pass_that_make_it_are_named(schedule, options):
    mesh = jaxpipe.make_mesh(stage=2, data=SHARDS)
    pipe = jaxpipe.Pipeline(
        MODEL,
        PARAMS,
        schedule=schedule,
        microbatches=MICROBATCHES,
        mesh=mesh,
        trainable="layers/kernel",
        layer_counts=[1, 2, 2, 1],
        **options,
    )
    placed = pipe.place(PARAMS)
    rows_of_shard = ROWS // SHARDS
    for n, (name, kinds) in enumerate([("forward", "F"), ("backward", ("B", "BW"))]):
        number, microbatch, shard = 4 - 3 * n, 2 + n, n
        row = shard * rows_of_shard + MICROBATCHES + microbatch
        found = find_nan(pipe, placed, batch_with(**{name: (row, number + 1)}))
        assert (found.part, found.layer) == ("layer", number)
        assert (found.microbatch, found.shard) == (microbatch, shard)
        assert found.kind.name in kinds
        virtual_stage = [0, 1, 1, 2, 2, 3][number]
        assert found.stage == pipe.schedule.placement.stages[virtual_stage]
        assert f"layer {number}, {name}" in str(found)
        if name == "forward":
            assert "log" in found.detail
            assert "test_not_finite.py" in found.detail
    assert find_nan(pipe, placed, batch_with(x=(5, np.nan))).part == "embedding"


def test_parameters_and_the_head_are_named_and_finite_steps_are_not():
    mesh = jaxpipe.make_mesh(stage=2)
    pipe = jaxpipe.Pipeline(
        MODEL, PARAMS, schedule="1f1b", microbatches=MICROBATCHES, mesh=mesh,
        trainable="layers/kernel",
    )  # fmt: skip
    assert find_nan(pipe, pipe.place(PARAMS), batch_with()) is None
    found = find_nan(pipe, pipe.place(PARAMS), batch_with(scale=(6, 0.0)))
    assert (found.part, found.layer, found.microbatch) == ("head", None, 2)
    kernel = PARAMS["layers"]["kernel"].at[3, 1, 2].set(jnp.nan)
    broken = PARAMS | {"layers": PARAMS["layers"] | {"kernel": kernel}}
    found = find_nan(pipe, pipe.place(broken), batch_with())
    assert (found.layer, found.kind.name, found.microbatch) == (3, "F", 0)
    assert found.detail == "parameters that are not finite: kernel"


@pytest.mark.parametrize(("schedule", "remat"), [("zb-v", "none"), ("1f1b-fused", "full")])
def test_what_a_layer_prints_is_printed_once(schedule, remat, capfd):
    def printing(w, x, batch, rng):
        jax.debug.print(
            "stage {} layer {} rows {}", jax.lax.axis_index("stage"), w["number"], batch["row"]
        )
        return jnp.tanh(x @ w["kernel"])

    pipe = jaxpipe.Pipeline(
        jaxpipe.Model(embed=MODEL.embed, layer=printing, head_loss=MODEL.head_loss),
        PARAMS,
        schedule=schedule,
        microbatches=MICROBATCHES,
        mesh=jaxpipe.make_mesh(stage=2),
        trainable="layers/kernel",
        remat=remat,
    )
    batch = batch_with() | {"row": np.arange(ROWS)}
    jax.block_until_ready(pipe.value_and_grad(pipe.place(PARAMS), batch))
    jax.effects_barrier()
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("stage")]
    placement, counts = pipe.schedule.placement, pipe.table.layer_counts
    stages = np.repeat(placement.stages, counts)
    expected = [
        f"stage {stages[n]} layer {float(n)} rows {np.arange(ROWS)[m::MICROBATCHES]}"
        for n in range(LAYERS)
        for m in range(MICROBATCHES)
    ]
    assert sorted(printed) == sorted(expected)
