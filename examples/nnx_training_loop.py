"""A training loop of flax nnx, in which a pipeline takes the place of `nnx.value_and_grad`.

The module, its `nnx.Optimizer` and the loop stay what they are. For this, every step moves
parameters to their stages and gradients back; `jaxpipe.Pipeline.train_step`, as in the other
examples, leaves them on their stages. Run this file as it is: it needs no accelerator.
"""

import jax.numpy as jnp
import optax
from flax import nnx
from third_party.decoder import Decoder, packed_mask

import jaxpipe
from jaxpipe import testing

testing.simulate_devices(4)
VOCAB, LENGTH, ROWS = 32, 12, 16


def make_batch(number):
    """Sequences that count upwards."""
    first = 7 * number + jnp.arange(ROWS)[:, None]
    tokens = (first + jnp.arange(LENGTH + 1)) % VOCAB
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def make_decoder():
    shape = {"vocab_size": VOCAB, "width": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    return Decoder(**shape, num_layers=4, dropout=0.0, rngs=nnx.Rngs(0))


def places(batch):
    """Positions and the causal mask."""
    tokens = batch["tokens"]
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    return positions, packed_mask(jnp.ones_like(tokens))


def cross_entropy(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses.mean()


# The loop as it was.


def loss_fn(net, batch):
    return cross_entropy(net(batch["tokens"], *places(batch)), batch)


def train(net, value_and_grad):
    """Trains a module, and yields the loss of every step."""
    optimizer = nnx.Optimizer(net, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(net, optimizer, batch):
        loss, gradients = value_and_grad(net, batch)
        optimizer.update(net, gradients)
        return loss

    for number in range(20):
        yield train_step(net, optimizer, make_batch(number))


# What a pipeline needs: the parts of `loss_fn`, and a function like `nnx.value_and_grad(loss_fn)`.


def converted(net):
    return jaxpipe.nnx.model(
        net,
        layers=net.layers,
        embed=lambda net, batch: net.encode(batch["tokens"]),
        layer=lambda layer, x, batch: layer(x, *places(batch)),
        loss=lambda net, x, batch: cross_entropy(net.decode(x), batch),
    )


def pipelined(net, schedule, mesh):
    """Makes what takes the place of `nnx.value_and_grad(loss_fn)` for modules like this one."""
    model, params, _ = converted(net)
    pipe = jaxpipe.Pipeline(model, params, schedule=schedule, mesh=mesh, zero=2)

    def value_and_grad(net, batch):
        placed = pipe.place(converted(net).params)
        loss, gradients = pipe.value_and_grad(placed, batch)
        like_net = nnx.clone(net)
        jaxpipe.nnx.update(like_net, pipe.unplace(gradients), layers=like_net.layers)
        return loss, nnx.state(like_net, nnx.Param)

    return value_and_grad


net = make_decoder()
mesh = jaxpipe.make_mesh(stage=2, data=2)
as_it_was = train(make_decoder(), nnx.value_and_grad(loss_fn))
with_a_pipeline = train(net, pipelined(net, "zb-v", mesh))
for number, losses in enumerate(zip(as_it_was, with_a_pipeline, strict=True)):
    print("step {}: loss {:.6f}, with a pipeline {:.6f}".format(number, *losses))

tokens = jnp.arange(5, 11)[None]
logits = net(tokens, jnp.arange(6)[None], packed_mask(jnp.ones_like(tokens)))
print("after 10 comes", logits[0, -1].argmax())
