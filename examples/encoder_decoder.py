"""An encoder-decoder of flax nnx: what the encoder returns travels past every decoder layer.

`third_party/translation.py` is the model. Its layers are blocks of two kinds and the encoder's last
normalization, one after another; what travels between them is a tree of source and target.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from third_party.translation import (
    DecoderBlock,
    EncoderBlock,
    Translator,
    shifted,
    source_mask,
    target_mask,
)

import jaxpipe
from jaxpipe import testing

testing.simulate_devices(4)
VOCAB, LENGTH = 12, 6
shape = {"vocab_size": VOCAB, "max_length": LENGTH, "width": 16, "num_heads": 2}
net = Translator(**shape, num_layers=2, rngs=nnx.Rngs(0))


def layers_of(net):
    return [*net.encoder.blocks, net.encoder.norm, *net.decoder.blocks]


def embed(net, batch):
    return {"source": net.embed(batch["source"]), "target": net.embed(shifted(batch["target"]))}


def run_layer(layer, x, batch):
    source, target = x["source"], x["target"]
    if isinstance(layer, DecoderBlock):
        masks = target_mask(batch["target"]), source_mask(batch["source"])
        target = layer(target, source, *masks)
    elif isinstance(layer, EncoderBlock):
        source = layer(source, source_mask(batch["source"]))
    else:
        source = layer(source)
    return {"source": source, "target": target}


def token_losses(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
    right = jnp.argmax(logits, -1) == batch["target"]
    return losses, right, (batch["target"] > 0).astype(jnp.float32)


def loss(net, x, batch):
    logits = net.table.attend(net.decoder.norm(x["target"]))
    losses, right, weights = token_losses(logits, batch)
    mean = jaxpipe.Weighted((losses * weights).sum(), weights.sum())
    return mean, {
        "accuracy": jaxpipe.Weighted((right * weights).sum(), weights.sum()),
        "tokens": jaxpipe.Sum(weights.sum()),
    }


def reference(params, batch, rng, **_):
    """The model as it is, on the whole batch at once."""
    copy = nnx.clone(net)
    jaxpipe.nnx.update(copy, params, layers=layers_of(copy))
    losses, right, weights = token_losses(copy(batch["source"], batch["target"]), batch)
    total = weights.sum()
    metrics = {"accuracy": (right * weights).sum() / total, "tokens": total}
    return (losses * weights).sum() / total, metrics


def make_batch(rows, seed):
    """A target is its source, read backwards."""
    random = np.random.default_rng(seed)
    source, target = np.zeros((2, rows, LENGTH), np.int32)
    for row, count in enumerate(random.integers(2, LENGTH + 1, size=rows)):
        source[row, :count] = random.integers(1, VOCAB, size=count)
        target[row, :count] = source[row, :count][::-1]
    return {"source": source, "target": target}


model, params, _ = jaxpipe.nnx.model(
    net, layers=layers_of(net), embed=embed, layer=run_layer, loss=loss
)

# Three schedules on two meshes: loss, metrics and every gradient are those of the model.
schedules = "gpipe-fused", "1f1b-fused", "zb-h1"
batch = make_batch(16, 0)
testing.assert_matches_unpipelined(model, params, batch, schedules=schedules, reference=reference)
print("the pipeline gives what the model gives")

mesh = jaxpipe.make_mesh(stage=2, data=2)
pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh, zero=2)
optimizer, params = optax.adam(1e-2), pipe.place(params)
state, step = pipe.init(optimizer, params), pipe.train_step(optimizer)
for number in range(60):
    (value, metrics), params, state = step(params, state, make_batch(64, number))
    if number % 15 == 14:
        print(f"step {number + 1}: loss {value:.3f}, accuracy {metrics['accuracy']:.2f}")

jaxpipe.nnx.update(net, pipe.unplace(params), layers=layers_of(net))
batch = make_batch(64, 1000)
_, right, weights = token_losses(net(batch["source"], batch["target"]), batch)
print(f"the model itself is right on {(right * weights).sum() / weights.sum():.0%} of new tokens")
