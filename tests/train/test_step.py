"""Parts of a step: costs of layers, memory, metrics; its results are in `test_tasks`."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from tiny_tasks import rows

from jaxpipe import unpipelined
from jaxpipe.measure import layer_bytes
from models import gpt
from train.config import Config
from train.errors import ConfigError
from train.step import Setup

CONFIG = {
    "model": {"vocab_size": 50, "sequence_length": 8, "num_layers": 3, "width": 8, "num_heads": 2},
    "mesh": {"stage": 2, "data": 2},
    "pipeline": {"schedule": "1f1b", "microbatches": 3},
    "train": {"batch_size": 6, "steps": 20},
}


def test_embedding_and_head_are_computed_where_that_takes_less_time():
    """A large vocabulary would make the last of few layers late; beside many layers, every sum over
    the stages does."""
    for vocab_size, num_layers, is_split in ((5000, 4, True), (50, 16, False)):
        config = Config(
            model=CONFIG["model"] | {"vocab_size": vocab_size, "num_layers": num_layers},
            mesh={"stage": 4},
            pipeline={"schedule": "1f1b", "microbatches": 8, "vocabulary": "auto"},
            train={"batch_size": 16},
        )
        assert Setup(config).pipe.table.together == is_split


def test_too_little_memory_is_refused_in_gigabytes():
    sections = CONFIG | {"pipeline": CONFIG["pipeline"] | {"stage_memory": 1e-6}}
    with pytest.raises(ConfigError, match=r"^pipeline.stage_memory=1e-06 holds no partition of 3 "):
        Setup(Config(**sections))
    with pytest.raises(ConfigError, match=r"Nearest valid: 0\.\d+\.$"):
        Setup(Config(**sections))


@pytest.mark.parametrize("expert_every", [1, 2])
def test_layers_take_what_a_device_holds_of_them_of_split_experts_too(expert_every):
    """Experts that are split over all data shards are not split over these again."""
    shape = CONFIG["model"] | {"num_layers": 4, "num_experts": 4, "expert_every": expert_every}
    mesh = {"stage": 2, "data": 4, "expert": 4}
    pipeline = {"schedule": "1f1b", "microbatches": 2, "zero": 3}
    train = CONFIG["train"] | {"batch_size": 8}
    setup = Setup(Config(model=shape, mesh=mesh, pipeline=pipeline, train=train))
    kept = layer_bytes(setup.pipe, setup.batch_shapes).sharded
    held = setup.pipe.placed_params["layers"]
    sizes = [math.prod(w.sharding.shard_shape(w.shape)) for w in jax.tree.leaves(held)]
    assert sum(kept) == 2 * 4 * sum(sizes)  # stages, bytes of a number


@pytest.mark.slow
def test_a_step_moves_biases_of_experts_towards_equal_use():
    """By the counts of all microbatches and data shards; layers without experts have no bias."""
    experts = {"num_experts": 4, "dense_layers": 1, "router": "sigmoid", "bias_speed": 0.25}
    setup = Setup(
        Config(
            model=CONFIG["model"] | {"num_layers": 2} | experts,
            mesh={"stage": 1, "data": 2},
            pipeline={"schedule": "1f1b-fused", "microbatches": 2},
            train=CONFIG["train"] | {"batch_size": 4},
        )
    )
    state, config = setup.init(), setup.task.shape
    batch = {"tokens": jax.random.randint(jax.random.key(0), (4, 9), 0, 50)}
    _, (_, last) = unpipelined.loss(
        *(gpt.model(config), setup.pipe.unplace(state.params), batch),
        states=gpt.init_state(config),
    )
    counts = last["mlp"]["router"]["selection"]["counts"]
    assert counts.sum() == 4 * 8 * 2
    state, _ = setup.train_step(state, batch, None)
    none, last = setup.to_canonical(state).layers
    assert none == {}
    selection = last["mlp"]["router"]["selection"]
    assert selection["bias"].tolist() == (0.25 * np.sign(16 - counts)).tolist()
    assert selection["counts"].tolist() == [0] * 4


@pytest.mark.parametrize("documents", ["apart", "packed"])
def test_slices_of_sequences_give_the_loss_of_whole_ones(documents):
    pipeline = CONFIG["pipeline"] | {"sequence_slices": 4, "vocabulary": "split"}
    setup = Setup(Config(**CONFIG | {"pipeline": pipeline}, data={"documents": documents}))
    state, batch = setup.init(), rows(setup)
    batch["targets"][:, -3:] = -1
    batch["documents"] = np.sort(batch["documents"])
    params = setup.pipe.unplace(state.params)
    expected = unpipelined.loss(gpt.model(setup.task.shape), params, batch)
    _, values = setup.train_step(state, batch, None)
    assert np.isclose(values["loss"], expected, rtol=1e-6)


def test_a_step_reports_what_experts_with_a_capacity_drop():
    experts = {"num_experts": 4, "expert_every": 2, "capacity_factor": 1.0}
    shape = CONFIG["model"] | {"num_layers": 2} | experts
    pipeline = {"schedule": "1f1b", "microbatches": 2}
    train = CONFIG["train"] | {"batch_size": 4}
    setup = Setup(Config(model=shape, mesh={"stage": 2}, pipeline=pipeline, train=train))
    shapes = setup.state_shapes, setup.batch_shapes, None
    assert jax.eval_shape(setup.train_step, *shapes)[1]["metrics"].keys() == {"dropped"}


def test_a_schedule_that_comes_back_to_a_chunk_is_refused_in_the_names_of_the_fields():
    sections = {name: dict(section) for name, section in CONFIG.items()}
    by_chunk = {"schedule": "interleaved", "chunks": 2, "microbatches": 4, "update": "chunk"}
    sections |= {"pipeline": by_chunk, "model": CONFIG["model"] | {"num_layers": 4}}
    sections |= {"optimizer": {"clip_norm": 0.0}, "train": {"batch_size": 8}}
    with pytest.raises(ConfigError) as caught:
        Setup(Config(**sections))
    (failure,) = caught.value.failures
    assert "pipeline.schedule='interleaved' comes back to a chunk" in failure.message
    assert "pipeline.update='chunk' needs each complete" in failure.message
    assert "Nearest valid: pipeline.weight_slots=2." in failure.message
    assert Setup(Config(**sections | {"pipeline": by_chunk | {"weight_slots": 2}}))
