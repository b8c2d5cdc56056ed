"""Experts over data shards; `test_parallel` compares them with all of them on every device."""

import dataclasses
import itertools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.runtime import tracing
from models import experts, gpt, grouped_matmul
from models.blocks import function_of

CONFIG = gpt.GPTConfig(
    vocab_size=13, sequence_length=8, num_layers=2, width=8, num_heads=2, num_experts=4,
    expert_width=8, mlp_width=12, balance_loss=0.1, z_loss=0.1, capacity_factor=1.0,
)  # fmt: skip


def model_of(config):
    return gpt.model(config, vocabulary_axis="stage", expert_axis="expert")


def pipeline(config, expert, **options):
    params = jax.jit(gpt.init, static_argnums=0)(config, jax.random.key(0))
    mesh = jaxpipe.make_mesh(stage=2, data=4, expert=expert)
    given = {"schedule": "1f1b", "microbatches": 2, "mesh": mesh, "zero": 3}
    return jaxpipe.Pipeline(model_of(config), params, **given | options), params


def test_optimizers_see_whole_experts_and_states_move_to_another_split():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    pipes = [pipeline(CONFIG, expert) for expert in (1, 4)]
    params = pipes[0][1]
    gradients = jax.tree.map(lambda w: w**2 - 0.1, params)
    there = params, optimizer.init(params)
    for pipe, _ in pipes:
        placed, placing = pipe.place(there[0]), pipe.optimizer_placing(optimizer)
        state = placing.place(there[1])
        placed, state = pipe.update(optimizer, pipe.place(gradients), state, placed)
        there = pipe.unplace(placed), placing.unplace(state)
    expected = toys.expected_update(optimizer, params, gradients)
    chex.assert_trees_all_close(there[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.pipeline
def test_experts_are_neither_gathered_nor_reduced_over_the_axis_that_splits_them():
    """With all data shards along it, nothing but the other parameters moves."""
    config = dataclasses.replace(CONFIG, width=16, expert_width=64)
    pipe, params = pipeline(config, 4)
    placed = pipe.place(params)

    chex.assert_trees_all_equal(jaxpipe.load_params(pipe, toys.reader(params)), placed)
    up = placed["layers"]["mlp"]["experts"]["up"]["kernel"]
    assert up.addressable_shards[0].data.size == up.size // 8
    batch = {"tokens": jax.ShapeDtypeStruct((8, 9), "int32")}
    text = jax.jit(pipe.value_and_grad).lower(pipe.placed_params, batch).compile().as_text()
    moved = [line for line in text.splitlines() if "all-gather(" in line or "all-reduce(" in line]
    assert moved
    assert not [line for line in moved if "16,64]" in line or "64,16]" in line]


def test_a_device_has_room_for_the_choices_it_is_sent_or_says_how_many_it_drops():
    config = dataclasses.replace(CONFIG, capacity_factor=None)
    batch = {"tokens": jax.random.randint(jax.random.key(1), (8, 9), 0, 13)}
    losses, dropped = [], []
    for factor in (None, 1.9, 0.5):
        pipe, params = pipeline(dataclasses.replace(config, device_capacity_factor=factor), 2)
        loss = jax.jit(pipe.loss)(pipe.place(params), batch)
        loss, metrics = (loss, {}) if factor is None else loss
        losses.append(float(loss))
        dropped.append(float(metrics.get("dropped", 0.0)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] != pytest.approx(losses[0], rel=1e-6)
    assert dropped[:2] == [0, 0]
    assert 0.5 <= dropped[2] < 0.75


def test_weight_gradients_exchange_nothing():
    pipe, _ = pipeline(CONFIG, 4)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 9), "int32")}
    split = tracing.traced_layers(pipe, batch, None)[0].kinds[0].split
    assert not any("all_to_all" in str(eqn) for eqn in [*split.again, *split.w])
    assert any("all_to_all" in str(eqn) for eqn in split.b)


def test_places_go_to_first_choices_first():
    """Beside a plain loop over choices and tokens."""
    chosen = np.asarray(jax.random.randint(jax.random.key(0), (20, 3), 0, 5), np.int32)
    used, places = np.zeros(5, int), np.full(chosen.shape, 5 * 6)
    for choice, token in itertools.product(range(3), range(20)):
        expert = chosen[token, choice]
        if used[expert] < 6:
            places[token, choice] = 6 * expert + used[expert]
        used[expert] += 1
    found = experts.room(jnp.asarray(chosen), 5, 6)
    np.testing.assert_array_equal(found.places, places)
    pairs = np.full(5 * 6, chosen.size)
    kept = places.ravel() < 5 * 6
    pairs[places.ravel()[kept]] = np.flatnonzero(kept)
    np.testing.assert_array_equal(found.pairs.ravel(), pairs)


def test_what_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"expert=3 does not divide data / replica=4.\nNearest"):
        jaxpipe.make_mesh(stage=1, data=8, replica=2, expert=3)
    with pytest.raises(ValueError, match="has 6 elements in dimension 0, which the 4 devices"):
        pipeline(dataclasses.replace(CONFIG, num_experts=6), 4)
    with pytest.raises(ValueError, match="split over 'expert', which is none of"):
        pipeline(CONFIG, 4, mesh=jaxpipe.make_mesh(stage=2, data=2))
    with pytest.raises(ValueError, match="expert_axis='expert': there are no experts"):
        model_of(
            gpt.GPTConfig(vocab_size=13, sequence_length=6, num_layers=2, width=8, num_heads=2)
        )


def of_devices(config, count):
    """The experts' outputs, dropped choices and gradients of inputs, with shards for ``count``
    devices; 1 for all on one."""
    axis = "expert" if count > 1 else None

    def layer(config, rngs):
        return experts.Experts(config, axis, rngs=rngs)

    def run(params, x, chosen, scores):
        def loss(params, x, scores):
            routing = experts.Routing(chosen, scores, None)
            y, dropped = function_of(layer, config)(params, x, routing)
            return (y**2).sum(), (y, dropped)

        _, vjp, (y, dropped) = jax.vjp(loss, params, x, scores, has_aux=True)
        return y, dropped[None], vjp(jnp.ones(()))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("expert",))
    specs = {"in_specs": P("expert"), "out_specs": P("expert"), "check_vma": False}
    return jax.shard_map(run, mesh=mesh, **specs)


def kept_choices(config, chosen, devices):
    """Choices that find room, one after another: first a token at its devices, then there."""
    own, tokens = config.num_experts // devices, len(chosen) // devices
    room = [[config.device_tokens(tokens, devices)] * devices for _ in range(devices)]
    sent = np.zeros((len(chosen), devices), bool)
    for shard in range(devices):
        for choice, token in itertools.product(range(chosen.shape[1]), range(tokens)):
            token += shard * tokens
            device = chosen[token, choice] // own
            if not sent[token, device] and room[shard][device]:
                sent[token, device], room[shard][device] = True, room[shard][device] - 1
    kept = np.take_along_axis(sent, chosen // own, axis=1)
    for device in range(devices):
        # Tokens come in the order of their places: by shard, first choice there, and number.
        first = np.argmax(chosen // own == device, axis=1)
        came = sorted(
            (chosen[token, choice], token // tokens, first[token], token, choice)
            for token, choice in np.argwhere(kept & (chosen // own == device))
        )
        for *_, token, choice in came[config.device_capacity(tokens) :]:
            kept[token, choice] = False
    return kept


@pytest.mark.parametrize(("devices", "factor"), [(2, 0.75), (4, 0.75), (4, 2.0)])
def test_tokens_are_sent_to_devices_of_their_experts_as_far_as_there_is_room(devices, factor):
    """Outputs and gradients are those of all experts without the choices that a loop drops."""
    config = dataclasses.replace(
        CONFIG, num_experts=16, experts_per_token=5, expert_groups=4, groups_per_token=3,
        capacity_factor=None, expert_bias=True, device_capacity_factor=factor,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(3), 9)
    params = {
        name: {"kernel": jax.random.normal(k, (16, 8, 8)), "bias": jax.random.normal(k, (16, 8))}
        for name, k in zip(("up", "gate", "down"), keys[:3], strict=True)
    }
    x, scores = jax.random.normal(keys[3], (48, 8)), jax.random.uniform(keys[4], (48, 5))
    likely = jax.random.uniform(keys[5], (48, 16)) - 0.03 * jnp.arange(16)
    chosen = jax.lax.top_k(likely, 5)[1].astype(jnp.int32)
    kept = kept_choices(config, np.asarray(chosen), devices)
    assert kept.all() == (factor == 2)

    y, dropped, gradients = jax.jit(of_devices(config, devices))(params, x, chosen, scores)
    assert float(dropped.mean()) == pytest.approx(1 - kept.mean(), abs=1e-6)
    whole = dataclasses.replace(config, device_capacity_factor=2.0)
    expected, _, expected_gradients = jax.jit(of_devices(whole, 1))(
        params, x, chosen, scores * kept
    )
    found = y, *gradients[:2], gradients[2] * kept
    wanted = expected, *expected_gradients[:2], expected_gradients[2] * kept
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_device_has_room_for_the_tokens_of_an_even_use(devices):
    """Beside all choices that a token has: 3 of the experts of 2 groups of 4."""
    config = dataclasses.replace(
        CONFIG, num_experts=16, experts_per_token=3, expert_groups=4, groups_per_token=2,
        capacity_factor=None, device_capacity_factor=1.0,
    )  # fmt: skip
    groups = itertools.combinations(range(0, 16, 4), 2)
    choices = [
        choice
        for first, second in groups
        for choice in itertools.combinations(
            [*range(first, first + 4), *range(second, second + 4)], 3
        )
    ]
    used = sum(min(choice) < 16 // devices for choice in choices)
    assert config.device_tokens(len(choices), devices) == used
    twice = dataclasses.replace(config, device_capacity_factor=2.0)
    assert twice.device_tokens(len(choices), devices) == min(2 * used, len(choices))


def test_gradients_read_no_rows_that_no_group_has():
    """Kernels for GPUs leave them undefined, also where a device has as many places as choices."""
    config = dataclasses.replace(CONFIG, capacity_factor=None, device_capacity_factor=1.0)

    def undefined_behind(x, kernels, sizes, /, **static):
        y = product(x, kernels, sizes, **static)
        return jnp.where(jnp.arange(len(y))[:, None] < sizes.sum(), y, jnp.nan)

    product = grouped_matmul._product
    params = {name: {"kernel": jnp.ones((4, 8, 8))} for name in ("up", "gate", "down")}
    x, chosen = jnp.ones((6, 8)), jnp.tile(jnp.array([0, 2]), (6, 1)).at[0, 1].set(1)
    with mock.patch.object(grouped_matmul, "_product", undefined_behind):
        found = jax.jit(of_devices(config, 2))(params, x, chosen, jnp.ones((6, 2)))
        chex.assert_tree_all_finite(found)
