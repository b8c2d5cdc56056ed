"""A mixture of experts of flax nnx, whose layers have a balance loss of their own.

`third_party/mixture.py` is the model. Experts are balanced within a group of tokens, and in a
pipeline a group is a microbatch of one data shard.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from third_party.mixture import MixtureDecoder

import jaxpipe
from jaxpipe import testing

testing.simulate_devices(4)
VOCAB, LENGTH, BALANCE = 16, 8, 0.01
shape = {"vocab_size": VOCAB, "length": LENGTH, "width": 16, "num_heads": 2, "num_experts": 4}
net = MixtureDecoder(**shape, num_layers=4, rngs=nnx.Rngs(0))


def make_batch(rows, seed):
    """Each token is the sum of the two before it."""
    tokens = np.random.default_rng(seed).integers(VOCAB, size=(rows, 2), dtype=np.int32)
    for _ in range(LENGTH - 1):
        tokens = np.append(tokens, tokens[:, -2:].sum(1, keepdims=True) % VOCAB, axis=1)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def run_block(block, x, batch):
    x, balance = block(x)
    return jaxpipe.WithLoss(x, BALANCE * balance)


def loss_of(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def loss(net, x, batch):
    logits = net.logits(x)
    # The first token follows from nothing.
    right = (jnp.argmax(logits, -1) == batch["targets"])[:, 1:]
    return loss_of(logits, batch["targets"]), {"accuracy": right.mean()}


def reference(params, batch, rng, *, num_microbatches, data_shards, states):
    """The model as it is, on groups of rows: row r of a shard is of microbatch r % m."""
    copy = nnx.clone(net)
    jaxpipe.nnx.update(copy, params, layers=copy.blocks)

    def groups(rows):
        rows = rows.reshape(data_shards, -1, num_microbatches, *rows.shape[1:])
        return jnp.moveaxis(rows, 2, 1).reshape(-1, rows.shape[1], *rows.shape[3:])

    def of_group(rows):
        logits, balance = copy(rows["tokens"])
        right = (jnp.argmax(logits, -1) == rows["targets"])[:, 1:]
        return loss_of(logits, rows["targets"]) + BALANCE * balance, right.mean()

    losses, right = jax.vmap(of_group)(jax.tree.map(groups, batch))
    return losses.mean(), {"accuracy": right.mean()}


model, params, _ = jaxpipe.nnx.model(
    net,
    layers=net.blocks,
    embed=lambda net, batch: net.embed(batch["tokens"]),
    layer=run_block,
    loss=loss,
)

# Three schedules on two meshes: loss, accuracy and every gradient are those of the model.
testing.assert_matches_unpipelined(model, params, make_batch(16, 0), reference=reference)
print("the pipeline gives what the model gives")

schedule = jaxpipe.schedules.build("zb-v", stages=2, microbatches=4)
mesh = jaxpipe.make_mesh(stage=2, data=2)
pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=mesh, zero=1)
optimizer, params = optax.adam(1e-2), pipe.place(params)
state, step = pipe.init(optimizer, params), pipe.train_step(optimizer)
for number in range(60):
    (value, metrics), params, state = step(params, state, make_batch(64, number))
    if number % 15 == 14:
        print(f"step {number + 1}: loss {value:.3f}, accuracy {metrics['accuracy']:.2f}")

jaxpipe.nnx.update(net, pipe.unplace(params), layers=net.blocks)
batch = make_batch(64, 1000)
logits, balance = net(batch["tokens"])
print(f"the model itself: loss {loss_of(logits, batch['targets']):.3f}, balance {balance / 4:.2f}")
