"""A decoder of flax nnx on packed sequences, with the exact mean over all tokens of a batch.

`third_party/decoder.py` is the model; it knows nothing of pipelines. Run this file as it is: it
needs no accelerator.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from third_party.decoder import Decoder, packed_mask

import jaxpipe
from jaxpipe import testing

testing.simulate_devices(4)
VOCAB, LENGTH = 32, 12


def make_batch(rows, seed):
    """Sequences that count upwards, several in a row; what is left of a row is segment 0."""
    random = np.random.default_rng(seed)
    tokens = np.zeros((rows, LENGTH + 1), np.int32)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row in range(rows):
        start = 0
        for segment in range(1, 1 + random.integers(1, 4)):
            end = min(start + random.integers(2, 6), LENGTH + 1)
            count = np.arange(end - start)
            tokens[row, start:end] = (random.integers(VOCAB) + count) % VOCAB
            segments[row, start:end], positions[row, start:end] = segment, count
            start = end
    return {
        "tokens": tokens[:, :-1],
        "positions": positions[:, :-1],
        "segments": segments[:, :-1],
        "targets": tokens[:, 1:],
        # A sequence's last token predicts nothing.
        "weights": np.float32((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)),
    }


# The three parts of Decoder.__call__, which a pipeline runs one by one.


def embed(net, batch):
    return net.encode(batch["tokens"])


def run_layer(layer, x, batch):
    return layer(x, batch["positions"], packed_mask(batch["segments"]))


def token_losses(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses, batch["weights"]


def loss(net, x, batch):
    logits = net.decode(x)
    losses, weights = token_losses(logits, batch)
    right = jnp.argmax(logits, -1) == batch["targets"]
    mean = jaxpipe.Weighted((losses * weights).sum(), weights.sum())
    return mean, {"accuracy": jaxpipe.Weighted((right * weights).sum(), weights.sum())}


shape = {"vocab_size": VOCAB, "width": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
net = Decoder(**shape, num_layers=4, dropout=0.1, rngs=nnx.Rngs(0))
model, params, _ = jaxpipe.nnx.model(
    net, layers=net.layers, embed=embed, layer=run_layer, loss=loss
)


def reference(params, batch, rng, **_):
    """The model as it is, on the whole batch at once."""
    copy = nnx.clone(net)
    jaxpipe.nnx.update(copy, params, layers=copy.layers)
    copy.eval()
    logits = copy(batch["tokens"], batch["positions"], packed_mask(batch["segments"]))
    losses, weights = token_losses(logits, batch)
    right = jnp.argmax(logits, -1) == batch["targets"]
    total = weights.sum()
    return (losses * weights).sum() / total, {"accuracy": (right * weights).sum() / total}


# Three schedules on two meshes: loss, accuracy and every gradient are those of the model.
testing.assert_matches_unpipelined(model, params, make_batch(16, 0), reference=reference)
print("the pipeline gives what the model gives")

mesh = jaxpipe.make_mesh(stage=2, data=2)
pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh, zero=2)
optimizer, params = optax.adam(1e-2), pipe.place(params)
state, step = pipe.init(optimizer, params), pipe.train_step(optimizer)
for number in range(40):
    batch, key = make_batch(32, number), jax.random.key(number)
    (value, metrics), params, state = step(params, state, batch, key)
    if number % 13 == 0:
        print(f"step {number}: loss {value:.3f}, accuracy {metrics['accuracy']:.2f}")

# And back into the modules.
jaxpipe.nnx.update(net, pipe.unplace(params), layers=net.layers)
net.eval()
tokens, positions = jnp.arange(5, 11)[None], jnp.arange(6)[None]
print("after 10 comes", net(tokens, positions, packed_mask(jnp.ones((1, 6))))[0, -1].argmax())
