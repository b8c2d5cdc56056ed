"""The mixture of experts: routing, losses, and the sum that every token gets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpipe
from models import experts, gpt, gpt_block
from models.blocks import function_of
from models.gpt import GPTConfig
from models.sharing import WHOLE

CONFIG = GPTConfig(
    vocab_size=19, sequence_length=6, num_layers=2, width=8, num_heads=2, num_experts=4,
    experts_per_token=2, expert_width=6, shared_width=5,
)  # fmt: skip


def mixture_of(config, seed=0):
    """The layer's function, with parameters that are not too small to matter, and tokens."""
    key = jax.random.key(seed)
    layer = jax.eval_shape(lambda key: gpt.init(config, key), key)["layers"]["mlp"]
    leaves, tree = jax.tree.flatten(layer)
    keys = jax.random.split(key, len(leaves) + 1)
    drawn = [jax.random.normal(k, x.shape[1:]) for k, x in zip(keys[1:], leaves, strict=True)]
    x = jax.random.normal(keys[0], (2, config.sequence_length, config.width))
    return function_of(gpt_block.make_mixture, config), jax.tree.unflatten(tree, drawn), x


def expected(config, params, x):
    """One token after another, and only the experts it is sent to."""
    params, y = jax.tree.map(np.asarray, params), []
    gated = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}.get(config.activation)

    def mlp(p, token, *expert):
        kernels = [p[name]["kernel"][expert] for name in ("gate", "up", "down")]
        biases = (p[name].get("bias", np.zeros(()))[expert] for name in ("gate", "up", "down"))
        if gated is not None:
            return (np.asarray(gated(token @ kernels[0])) * (token @ kernels[1])) @ kernels[2]
        gate, up, out = biases
        gate, up = np.minimum(token @ kernels[0] + gate, 7), token @ kernels[1] + up
        hidden = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)
        return hidden @ kernels[2] + out

    for token in np.asarray(x).reshape(-1, config.width):
        logits = token @ params["router"]["kernel"] + params["router"].get("bias", 0)
        sigmoid = config.router == "sigmoid"
        scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits) / np.exp(logits).sum()
        likely = scores.reshape(config.expert_groups, -1)
        best = np.argsort(np.sort(likely)[:, -2:].sum(axis=1))[-config.groups_per_token :]
        allowed = np.isin(np.arange(len(scores)) // likely.shape[1], best)
        chosen = np.argsort(np.where(allowed, -scores, np.inf))[: config.experts_per_token]
        weights = scores / scores[chosen].sum() if config.normalized_scores else scores
        shared = mlp(params["shared"], token)
        if config.shared_gate:
            shared = shared / (1 + np.exp(-token @ params["shared_gate"]["kernel"]))
        weights = config.score_factor * weights
        y.append(shared + sum(weights[n] * mlp(params["experts"], token, n) for n in chosen))
    return np.stack(y).reshape(x.shape)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"router": "sigmoid", "activation": "geglu"},
        {"normalized_scores": False, "shared_gate": True, "experts_per_token": 3},
        {"activation": "clamped_swiglu", "expert_bias": True, "capacity_factor": 4.0},
        {"num_experts": 6, "expert_groups": 3, "groups_per_token": 2, "score_factor": 2.5},
    ],
    ids=["softmax", "sigmoid", "shared-gate", "bias-capacity", "groups"],
)
def test_every_token_gets_the_weighted_sum_of_its_experts(options):
    config = dataclasses.replace(CONFIG, **options)
    apply, params, x = mixture_of(config)
    y, loss = jax.jit(apply)(params, x)
    assert loss is None or float(loss[1]["dropped"]) == 0
    np.testing.assert_allclose(y, expected(config, params, x), rtol=1e-4, atol=1e-5)


def test_losses_follow_their_formulas():
    """Balance as Fedus et al. 2022, equation 4, over all chosen experts; Zoph et al. 2022 for z."""
    apply, params, x = mixture_of(dataclasses.replace(CONFIG, balance_loss=0.5, z_loss=0.25))
    _, loss = jax.jit(apply)(params, x)
    logits = x.reshape(-1, CONFIG.width) @ params["router"]["kernel"]
    shares = jax.nn.softmax(logits)
    counts = np.bincount(np.argsort(-shares)[:, :2].ravel(), minlength=4) / len(shares)
    balance = 4 * (counts * shares.mean(axis=0)).sum()
    z_loss = np.mean(np.log(np.exp(logits).sum(axis=-1)) ** 2)
    np.testing.assert_allclose(loss, 0.5 * balance + 0.25 * z_loss, rtol=1e-5)


def test_a_bias_decides_who_is_chosen_and_not_how_much():
    """Also that counts are added up, and that the trainer's step ends with a move to equal use."""
    config = dataclasses.replace(CONFIG, router="sigmoid", bias_speed=0.125)
    params = jax.jit(gpt.init, static_argnums=0)(config, jax.random.key(0))
    layers = jax.device_get(params["layers"])
    router = jax.tree.map(lambda w: w[0], layers)["mlp"]["router"]
    state = jax.tree.map(jnp.copy, gpt.init_state(config)[0])
    selection = state["mlp"]["router"]["selection"]
    apply, _, _ = jaxpipe.nnx.stateful(experts.Router(config, WHOLE, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (16, config.width))
    given = {"selection": selection | {"bias": jnp.array([0.0, 0.0, 9.0, 5.0])}}
    for _ in range(2):
        routing, given = jax.jit(apply)(router, given, x)
    assert given["selection"]["counts"].tolist() == [0, 0, 32, 32]
    assert given["selection"]["bias"].tolist() == [0, 0, 9, 5]
    assert np.all(routing.chosen == np.array([2, 3]))
    scores = jax.nn.sigmoid(x @ router["kernel"])[:, 2:]
    scores /= scores.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(routing.scores, scores, rtol=1e-5)
    before = ({"mlp": {"router": given}}, state)
    after = [layer["mlp"]["router"]["selection"] for layer in gpt.end_step(config, before)]
    assert [layer["counts"].tolist() for layer in after] == [[0] * 4] * 2
    assert [layer["bias"].tolist() for layer in after] == [[0.125, 0.125, 8.875, 4.875], [0] * 4]


def test_idle_experts_get_no_gradient():
    config = dataclasses.replace(CONFIG, experts_per_token=1)
    apply, params, x = mixture_of(config)
    grads = jax.jit(jax.grad(lambda params: apply(params, x[:1, :1])[0].sum()))(params)
    used = np.abs(grads["experts"]["up"]["kernel"]).sum(axis=(1, 2)) > 0
    assert used.sum() == 1


@pytest.mark.parametrize(
    ("bound", "dropped"), [("capacity_factor", 0.75), ("device_capacity_factor", 0.5)]
)
def test_what_is_dropped_is_counted_and_not_missed_in_logits(bound, dropped):
    """All tokens are alike, so that every one chooses the same two of 4 experts."""
    config = dataclasses.replace(CONFIG, expert_every=2, sequence_length=16, **{bound: 0.5})
    params = jax.jit(gpt.init, static_argnums=0)(config, jax.random.key(0))
    tokens = jnp.zeros((4, 17), int)
    for shape in (config, config.without_layer_losses()):
        loss = functools.partial(jaxpipe.unpipelined.loss, gpt.model(shape), num_microbatches=2)
        _, metrics = jax.jit(loss)(params, {"tokens": tokens})
        assert metrics == {"dropped": dropped}
    whole = dataclasses.replace(config, **{bound: None})
    logits = jax.jit(gpt.logits, static_argnums=0)
    found, expected = (logits(shape, params, tokens[:2, :16]) for shape in (config, whole))
    np.testing.assert_array_equal(found, expected)


def test_flops_count_the_experts_of_a_token():
    """As many as those of a model whose MLPs are as large as what a token is sent to."""
    config = dataclasses.replace(CONFIG, shared_width=None)
    dense = GPTConfig(
        vocab_size=19, sequence_length=6, num_layers=2, width=8, num_heads=2, mlp_width=12
    )
    routers = 6 * config.num_layers * config.width * config.num_experts
    assert gpt.flops_per_token(config) == gpt.flops_per_token(dense) + routers
