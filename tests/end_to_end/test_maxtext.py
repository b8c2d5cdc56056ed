"""The patch for MaxText, on a decoder with the interface of MaxText's.

`examples/maxtext/compare.py` runs MaxText itself, which is no requirement of the tests.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

PATCH = Path(__file__).parents[2] / "examples" / "maxtext" / "pipeline_schedule.patch"
LAYERS, WIDTH, VOCAB = 4, 8, 16
SUMS = "xent_sum", "total_weights", "z_loss"


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, segments, positions, deterministic, model_mode):
        x = linen.with_logical_constraint(x, ("rows", None, None))
        seen = (segments != 0) & (positions > 0)
        return x + jnp.tanh(self.linear(x)) * seen[..., None], None


class Decoder(nnx.Module):
    """Layers whose parameters are stacked on dimension 1."""

    def __init__(self, *, rngs):
        graph, *states = zip(*[nnx.split(Layer(rngs=rngs)) for _ in range(LAYERS)], strict=True)
        stacked = jax.tree.map(lambda *w: jnp.stack(w, axis=1), *states[0])
        self.layers = nnx.merge(graph[0], stacked)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.rngs = rngs

    def _apply_embedding(self, table, tokens, positions, deterministic, model_mode):
        return table(tokens)

    def run(self, x, segments, positions):
        graph, state = nnx.split(self.layers)
        for n in range(LAYERS):
            layer = nnx.merge(graph, jax.tree.map(lambda w, n=n: w[:, n], state))
            x, _ = layer(x, segments, positions, True, "train")
        return x


class Transformer(nnx.Module):
    def __init__(self, mesh, *, rngs):
        self.mesh = mesh
        self.token_embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.decoder = Decoder(rngs=rngs)

    def __call__(self, decoder_input_tokens, decoder_positions, decoder_segment_ids):
        x = self.token_embedder(decoder_input_tokens)
        x = self.decoder.run(x, decoder_segment_ids, decoder_positions)
        return self.logits_from_hidden_states_for_vocab_tiling(x, True, "train")

    def logits_from_hidden_states_for_vocab_tiling(self, x, deterministic, model_mode):
        return self.token_embedder.attend(self.decoder.norm(x))


def loss_fn(model, config, data, dropout_rng, params):
    """The sums that MaxText's function of this name returns."""
    logits = model(
        decoder_input_tokens=data["inputs"],
        decoder_positions=data["inputs_position"],
        decoder_segment_ids=data["inputs_segmentation"],
    )
    weights = data["targets_segmentation"] != 0
    log_z = jax.nn.logsumexp(logits, -1)
    losses = log_z - jnp.take_along_axis(logits, data["targets"][..., None], -1)[..., 0]
    total, z_loss = jnp.sum(weights), jnp.sum(1e-2 * log_z**2 * weights)
    xent_sum = jnp.sum(losses * weights) + z_loss
    aux = {"xent_sum": xent_sum, "total_weights": total, "z_loss": z_loss / (total + 1e-8)}
    return xent_sum / (total + 1e-8), aux


@pytest.fixture
def patched(monkeypatch):
    """The module that the patch, which is short, adds to MaxText."""
    types = ModuleType("common_types")
    types.MODEL_MODE_TRAIN = "train"
    for name in ("maxtext", "maxtext.common", "maxtext.common.common_types"):
        monkeypatch.setitem(sys.modules, name, types)
    patch = PATCH.read_text(encoding="utf-8")
    assert len(patch.splitlines()) <= 150
    _, text = patch.split("+++ b/src/maxtext/layers/jaxpipe_schedules.py")
    lines = text.split("\n--- ")[0].splitlines()
    module = ModuleType("jaxpipe_schedules")
    exec("\n".join(line[1:] for line in lines if line.startswith("+")), vars(module))
    return module


def test_a_schedule_gives_the_loss_the_sums_and_the_gradients_of_the_loop(patched):
    names = ("data", "stage", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2, 1), names, (jax.sharding.AxisType.Auto,) * 4)
    model = Transformer(mesh, rngs=nnx.Rngs(params=0, dropout=1))
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = jax.random.randint(keys[0], (16, 7), 0, VOCAB)
    data = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "inputs_position": jnp.tile(jnp.arange(6), (16, 1)),
        "inputs_segmentation": jax.random.randint(keys[1], (16, 6), 0, 3),
        "targets_segmentation": jax.random.randint(keys[2], (16, 6), 0, 3),
    }
    config = SimpleNamespace(
        pipeline_schedule="zb-v", num_pipeline_microbatches=-1, num_decoder_layers=LAYERS,
        inhomogeneous_layer_cycle_interval=1, param_scan_axis=1, enable_dropout=True,
        dropout_rate=0.0, remat_policy="full",
    )  # fmt: skip

    def loss(model):
        return loss_fn(model, config, data, None, None)

    @nnx.jit
    def pipelined(model):
        loss, aux, gradients = patched.value_and_grad(loss_fn, model, config, data)
        return (loss, {name: aux[name] for name in SUMS}), gradients

    with jax.set_mesh(mesh), linen.logical_axis_rules([("rows", ("data", "fsdp"))]):
        want = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(model)
        got = pipelined(model)
    chex.assert_trees_all_close(nnx.as_pure(got), nnx.as_pure(want), rtol=1e-4, atol=1e-6)
