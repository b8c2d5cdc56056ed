"""Several residual streams: layers are the paper's, and pipelines change nothing."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from benchmarks.hlo import HloProgram
from jaxpipe.planning import counting
from jaxpipe.runtime import memory
from jaxpipe.testing import assert_matches_unpipelined
from models import gpt
from models.attention import Attention
from models.blocks import function_of
from models.sharing import WHOLE

STREAMS, WIDTH, LENGTH = 3, 16, 8
CONFIG = gpt.GPTConfig(
    vocab_size=24, sequence_length=LENGTH, num_layers=4, width=WIDTH, num_heads=2, mlp_width=20,
    norm_epsilon=1e-3, residual_streams=STREAMS,
)  # fmt: skip
ONE = dataclasses.replace(CONFIG, residual_streams=1)


@jax.jit
def drawn_params():
    """Parameters with which every map depends on its token, and changes what follows; no map
    saturates, or gradients of its scale would be little more than rounding."""

    def changed(path, leaf):
        kernel = 0.1 if "streams" in path[0].key else 0.3
        size = {"kernel": kernel, "scale": 0.3, "bias": 1.0}[path[-1].key]
        return leaf + size * jax.random.normal(jax.random.key(leaf.size), leaf.shape)

    params = gpt.init(CONFIG, jax.random.key(0))
    return params | {"layers": jax.tree_util.tree_map_with_path(changed, params["layers"])}


def connected(params, x, branch):
    """A branch and its connection, as in section 4.2 of arXiv 2512.24880, token by token."""
    rows, tokens, n, width = x.shape
    vector = x.reshape(rows, tokens, n * width)
    vector = vector / jnp.sqrt((vector**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon)
    pre, post, res = (
        alpha * (vector @ phi) + bias
        for alpha, phi, bias in zip(
            params["scale"],
            jnp.split(params["kernel"], (n, 2 * n), axis=1),
            jnp.split(params["bias"], (n, 2 * n)),
            strict=True,
        )
    )
    pre, post = 1 / (1 + jnp.exp(-pre)), 2 / (1 + jnp.exp(-post))

    def normalized(_, res):
        res = res / res.sum(-2, keepdims=True)
        return res / res.sum(-1, keepdims=True)

    res = jax.lax.fori_loop(0, 20, normalized, jnp.exp(res.reshape(rows, tokens, n, n)))
    y = branch(jnp.einsum("btn,btne->bte", pre, x))
    return jnp.einsum("btmn,btne->btme", res, x) + post[..., None] * y[:, :, None]


@functools.cache
def reference():
    """The loss of layers that are the paper's, around this model's attention and an MLP."""
    one, kind = gpt.model(ONE), CONFIG.layer_kinds[0]
    attention = function_of(
        lambda config, rngs: Attention(config, kind, sharing=WHOLE, rngs=rngs), ONE
    )

    def layer(params, x, microbatch, rng):
        def normed(name, x):
            x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon)
            return x * params[name]["scale"]

        def attend(x):
            x, documents = normed("attention_norm", x), microbatch["documents"]
            return attention(params["attention"], x, documents)[0]

        def mlp(x):
            x, linear = normed("mlp_norm", x), {k: w["kernel"] for k, w in params["mlp"].items()}
            return (jax.nn.silu(x @ linear["gate"]) * (x @ linear["up"])) @ linear["down"]

        x = connected(params["attention_streams"], x, attend)
        return connected(params["mlp_streams"], x, mlp)

    def embed(*args):
        x = one.embed(*args)
        return jnp.stack([x] * STREAMS, axis=2)

    def head_loss(outer, x, *args):
        return one.head_loss(outer, sum(x[:, :, n] for n in range(STREAMS)) / STREAMS, *args)

    return functools.partial(jaxpipe.unpipelined.loss, jaxpipe.Model(embed, layer, head_loss))


def batch(rows):
    tokens = jax.random.randint(jax.random.key(1), (rows, LENGTH + 1), 0, CONFIG.vocab_size)
    documents = jnp.broadcast_to(jnp.arange(LENGTH) // 5, (rows, LENGTH))
    return {"tokens": tokens, "documents": documents}


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("schedule", "vocabulary", "remat"), [("zb-v", "stage", "dots"), ("1f1b", None, "none")]
)
def test_pipelines_compute_the_layers_of_the_paper(schedule, vocabulary, remat):
    assert_matches_unpipelined(
        gpt.model(CONFIG, vocabulary_axis=vocabulary, tensor_axis="tensor"),
        drawn_params(),
        batch(8),
        schedules=[schedule],
        meshes=[jaxpipe.make_mesh(stage=2, data=2, tensor=2)],
        microbatches=4,
        reference=reference(),
        zero=3,
        remat=remat,
    )


@pytest.mark.pipeline
def test_streams_travel_between_stages_and_the_ends_exchange_one():
    """Bytes of messages, and of sums over stages, are those that the planner counts."""

    def pipeline(stages):
        return jaxpipe.Pipeline(
            gpt.model(CONFIG, vocabulary_axis="stage"),
            jax.eval_shape(functools.partial(gpt.init, CONFIG), jax.random.key(0)),
            schedule=jaxpipe.schedules.build("1f1b", stages=stages, microbatches=2),
            mesh=jaxpipe.make_mesh(stage=stages),
        )

    def shapes(rows):
        return jax.eval_shape(functools.partial(batch, rows))

    counted = counting.sizes(pipeline(1), shapes, compute_bytes=4, remats=["none"])["none"]
    one_stream = 2 * LENGTH * WIDTH * 4
    assert (counted.message.at(2), counted.merged.at(2)) == (STREAMS * one_stream, one_stream)
    program = HloProgram(memory.compiled(pipeline(2), shapes(4)).as_text())
    rows = list(itertools.chain.from_iterable(program.computations.values()))
    messages = {row.bytes for row in rows if row.opcode.startswith("collective-permute")}
    assert messages == {(STREAMS * one_stream,)}
    assert max(max(row.bytes) for row in rows if row.opcode == "all-reduce") == one_stream


def test_a_model_begins_as_one_with_a_single_stream():
    params = jax.jit(functools.partial(gpt.init, CONFIG))(jax.random.key(0))
    layers = {k: w for k, w in params["layers"].items() if "streams" not in k}
    for name in ("attention_streams", "mlp_streams"):
        kernel = params["layers"][name]["kernel"]
        params["layers"][name]["kernel"] = jnp.zeros_like(kernel)
    tokens = batch(2)["tokens"][:, :-1]
    logits = jax.jit(gpt.logits, static_argnums=0)
    np.testing.assert_allclose(
        logits(CONFIG, params, tokens),
        logits(ONE, {**params, "layers": layers}, tokens),
        rtol=0,
        atol=1e-6,
    )
