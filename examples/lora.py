"""Low-rank adapters on a decoder with int8 weights: only the adapters are trained.

`third_party/quantized.py` is the model; it knows nothing of pipelines. Run this file as it is: it
needs no accelerator.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from third_party.quantized import adapted_decoder

import jaxpipe
from jaxpipe import testing

testing.simulate_devices(4)
VOCAB, LENGTH = 32, 12
TRAINABLE = "layers/*lora_*"


def make_batch(rows, seed):
    """Sequences that count upwards."""
    first = np.random.default_rng(seed).integers(VOCAB, size=(rows, 1), dtype=np.int32)
    return {"tokens": (first + np.arange(LENGTH + 1, dtype=np.int32)) % VOCAB}


def inputs(batch):
    rows = len(batch["tokens"])
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (rows, LENGTH))
    return positions, jnp.tril(jnp.ones((rows, LENGTH, LENGTH), bool))


# The three parts of Decoder.__call__, which a pipeline runs one by one.


def embed(net, batch):
    return net.encode(batch["tokens"][:, :-1])


def run_layer(layer, x, batch):
    return layer(x, *inputs(batch))


def mean_loss(logits, batch):
    targets = batch["tokens"][:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return loss, {"accuracy": (logits.argmax(-1) == targets).mean()}


def loss(net, x, batch):
    return mean_loss(net.decode(x), batch)


net = adapted_decoder(
    4,
    vocab_size=VOCAB,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_layers=4,
    dropout=0.0,
    rngs=nnx.Rngs(0),
)
model, params, _ = jaxpipe.nnx.model(
    net, layers=net.layers, embed=embed, layer=run_layer, loss=loss
)


def reference(params, batch, rng, **_):
    """The model as it is, on the whole batch at once."""
    copy = nnx.clone(net)
    jaxpipe.nnx.update(copy, params, layers=copy.layers)
    return mean_loss(copy(batch["tokens"][:, :-1], *inputs(batch)), batch)


# Adapters begin at zero; others show more of what could be wrong.
drawn = np.random.default_rng(0)
params["layers"] = jax.tree.map_with_path(
    lambda path, w: np.float32(drawn.normal(size=w.shape) / 8) if "lora_b" in str(path) else w,
    params["layers"],
)
# Three schedules on two meshes: loss, accuracy and every gradient are those of the model.
testing.assert_matches_unpipelined(
    model, params, make_batch(16, 0), reference=reference, trainable=TRAINABLE
)
print("the pipeline gives what the model gives")

mesh = jaxpipe.make_mesh(stage=2, data=2)
pipe = jaxpipe.Pipeline(
    model, params, schedule="1f1b", mesh=mesh, zero=3, trainable=TRAINABLE, remat="full"
)
optimizer, placed = optax.adam(2e-2), pipe.place(params)
state, step = pipe.init(optimizer, placed), pipe.train_step(optimizer)
for number in range(40):
    (value, metrics), placed, state = step(placed, state, make_batch(32, number))
    if number % 13 == 0:
        print(f"step {number}: loss {value:.3f}, accuracy {metrics['accuracy']:.2f}")

sizes = {"parameters": params, "optimizer state": pipe.optimizer_placing(optimizer).canonical}
for name, tree in sizes.items():
    print(name, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)), "bytes")
# And back into the modules.
jaxpipe.nnx.update(net, pipe.unplace(placed), layers=net.layers)
tokens = jnp.arange(5, 5 + LENGTH)[None]
print("after 16 comes", net(tokens, *inputs({"tokens": tokens}))[0, -1].argmax())
