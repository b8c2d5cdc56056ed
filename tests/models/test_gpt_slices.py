"""A GPT that a pipeline runs slice by slice is the GPT."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from covering import covering

import jaxpipe
from jaxpipe import testing
from jaxpipe.runtime import memory
from models import gpt
from models.gpt_config import GPTConfig

ROWS, LENGTH = 4, 32

GROUPED = GPTConfig(
    vocab_size=48, sequence_length=LENGTH, num_layers=4, width=16, num_heads=4, num_kv_heads=2
)
CONFIGS = {
    "grouped": dataclasses.replace(
        GROUPED, qk_norm=True, rope_factor=2.0, attention_soft_cap=1.5
    ),
    "learned": dataclasses.replace(GROUPED, positions="learned", bias=True),
    "windows": dataclasses.replace(
        GROUPED, window=5, global_every=2, attention_sinks=True
    ),
    "latent": dataclasses.replace(
        GROUPED, num_kv_heads=None, kv_rank=6, rotary_size=4, value_size=5, head_size=4,
        num_experts=4, experts_per_token=2,
    ),
    "linear": dataclasses.replace(
        GROUPED, linear_heads=2, linear_value_heads=4, linear_key_size=6, linear_value_size=5,
        global_every=2, attention_gate=True, qk_norm=True, rope_factor=2.0, attention_soft_cap=1.5,
    ),
}  # fmt: skip
CASES = [
    pytest.param(*("grouped", "1f1b", 4, True, {"tensor": 2, "zero": 3}), marks=pytest.mark.slow),
    pytest.param(
        *("learned", "1f1b-fused", 2, False, {"context": 2, "remat": "dots"}),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        *("windows", "interleaved", 8, True, {"data": 2, "zero": 2, "remat": "full"}),
        marks=pytest.mark.slow,
    ),
    ("latent", "1f1b-fused", 2, False, {}),
    # Parts of a slice have fewer tokens than the convolution.
    ("linear", "zb-h1", 4, True, {"context": 2, "tensor": 2, "remat": "dots"}),
]


def _batch(config: GPTConfig, documents: bool) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(2), 2)
    tokens = jax.random.randint(keys[0], (ROWS, LENGTH + 1), 0, config.vocab_size)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if documents:
        batch["documents"] = jnp.sort(jax.random.randint(keys[1], (ROWS, LENGTH), 0, 3))
        filled = jnp.arange(LENGTH) < jnp.array([32, 9, 25, 5])[:, None]
        batch["targets"] = jnp.where(filled, batch["targets"], -1)
    if config.positions == "learned":
        batch["positions"] = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    return batch


@pytest.mark.pipeline
@pytest.mark.parametrize(("name", "schedule", "slices", "documents", "options"), CASES)
def test_slices_of_a_gpt_match_whole_sequences(name, schedule, slices, documents, options):
    built = jaxpipe.schedules.build(schedule, stages=2, microbatches=2, slices=slices)
    layers = built.placement.num_virtual_stages
    config, options = dataclasses.replace(CONFIGS[name], num_layers=layers), dict(options)
    sizes = {axis: options.pop(axis, 1) for axis in ("data", "tensor", "context")}
    axes = {f"{axis}_axis": axis for axis in ("tensor", "context") if sizes[axis] > 1}
    vocabulary = {"vocabulary_axis": "stage"} if "tensor" in options else {}
    mesh = jaxpipe.make_mesh(stage=2, **{axis: n for axis, n in sizes.items() if n > 1})
    testing.assert_matches_unpipelined(
        gpt.model(config, **axes, **vocabulary),
        jax.jit(gpt.init, static_argnums=0)(config, jax.random.key(0)),
        _batch(config, documents),
        schedules=[built],
        meshes=[mesh],
        reference=functools.partial(jaxpipe.unpipelined.loss, gpt.model(config)),
        floor=1e-3,
        **options,
    )


VALUES = (
    tuple(CONFIGS),
    ("1f1b", "1f1b-fused", "interleaved", "zb-h1", "zb-h2", "interleaved-zb"),
    (2, 4, 8),
    (False, True),
    ("none", "dots", "full"),
    (0, 1, 2, 3),
    ("data", "tensor", "context"),
)
"""Names in `CONFIGS`, schedules, slices, documents, policies, ZeRO levels, axes of two devices."""
SAMPLE = list(itertools.product(*VALUES))[::37]


@pytest.mark.slow
@pytest.mark.pipeline
@pytest.mark.parametrize("case", covering(SAMPLE), ids=str)
def test_every_pair_of_options_with_slices(case):
    *given, remat, zero, axis = case
    options = {"remat": remat, "zero": zero, axis: 2}
    test_slices_of_a_gpt_match_whole_sequences(*given, options)


@pytest.mark.slow
@pytest.mark.pipeline
def test_memory_is_predicted_where_all_forwards_come_first():
    """The working set is that of slices, not of whole sequences."""
    config = dataclasses.replace(GROUPED, sequence_length=256, num_layers=2)
    schedule = jaxpipe.schedules.build("gpipe", stages=2, microbatches=3, slices=4)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    mesh = jaxpipe.make_mesh(stage=2)
    pipe = jaxpipe.Pipeline(gpt.model(config), params, schedule=schedule, mesh=mesh)
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((3, 256), jnp.int32))
    predicted = sum(memory.predicted_bytes(pipe, batch).values())
    assert memory.compiled_bytes(pipe, batch) == pytest.approx(predicted, rel=0.02)


def test_a_slice_needs_targets_and_positions_that_the_model_has():
    config = CONFIGS["learned"]
    schedule = jaxpipe.schedules.build("1f1b", stages=2, microbatches=2, slices=2)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    mesh = jaxpipe.make_mesh(stage=2)
    pipe = jaxpipe.Pipeline(gpt.model(config), params, schedule=schedule, mesh=mesh)
    tokens = {"tokens": _batch(config, documents=False)["tokens"]}
    with pytest.raises(ValueError, match=r"need \['targets', 'positions'\] in the batch"):
        jax.eval_shape(pipe.loss, pipe.placed_params, tokens)
    batch = jax.tree.map(lambda w: jnp.tile(w, 2), _batch(config, documents=False))
    with pytest.raises(ValueError, match=f"tokens hold {2 * LENGTH} inputs per row"):
        jax.eval_shape(pipe.loss, pipe.placed_params, batch)
