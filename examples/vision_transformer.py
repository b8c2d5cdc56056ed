"""A vision transformer of flax linen, with dropout, in a pipeline.

`third_party/vision.py` is the model. A linen module is a pure function of its parameters already,
so its parts only have to be called one by one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from third_party.vision import EncoderBlock, Head, Patches, VisionTransformer

import jaxpipe
from jaxpipe import testing

testing.simulate_devices(4)
CLASSES, LAYERS = 4, 4
net = VisionTransformer(patch=4, width=16, num_layers=LAYERS, num_heads=2, num_classes=CLASSES)
patches, head = Patches(net.patch, net.width), Head(CLASSES)
block = EncoderBlock(net.num_heads, 2 * net.width, net.dropout_rate)


def embed(outer, batch, rng):
    return patches.apply({"params": outer["embed"]}, batch["images"])


def layer(params, x, batch, rng):
    rngs = {} if rng is None else {"dropout": rng}
    return block.apply({"params": params}, x, deterministic=rng is None, rngs=rngs)


def loss_of(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    right = jnp.argmax(logits, -1) == batch["labels"]
    return losses.mean(), {"accuracy": right.mean()}


def head_loss(outer, x, batch, rng):
    return loss_of(head.apply({"params": outer["head"]}, x), batch)


def split(params):
    """The model's own parameters as those of a pipeline: alike layers are stacked."""
    blocks = [params[f"encoderblock_{n}"] for n in range(LAYERS)]
    layers = jax.tree.map(lambda *w: jnp.stack(w), *blocks)
    return {"embed": params["patches"], "layers": layers, "head": params["head"]}


def join(params):
    """Undoes `split`."""
    blocks = {
        f"encoderblock_{n}": jax.tree.map(lambda w, n=n: w[n], params["layers"])
        for n in range(LAYERS)
    }
    return {"patches": params["embed"], "head": params["head"]} | blocks


def make_batch(rows, seed):
    """Stripes one way or the other, a checkerboard or nothing, in noise."""
    random = np.random.default_rng(seed)
    images, labels = random.normal(size=(rows, 16, 16, 1)), random.integers(CLASSES, size=rows)
    row, column = np.mgrid[:16, :16] % 2
    images += np.stack([row, column, row ^ column, 0 * row])[labels, ..., None]
    return {"images": np.float32(images), "labels": np.int32(labels)}


def reference(params, batch, rng, **_):
    """The model as it is, on the whole batch at once."""
    return loss_of(net.apply({"params": join(params)}, batch["images"], train=False), batch)


model = jaxpipe.Model(embed, layer, head_loss)
batch = make_batch(16, 0)
params = split(net.init(jax.random.key(0), batch["images"], train=False)["params"])

# Three schedules on two meshes: loss, accuracy and every gradient are those of the model. The bias
# of an attention's keys has no effect, so its gradient is rounding, and needs a floor.
testing.assert_matches_unpipelined(model, params, batch, reference=reference, floor=0.04)
print("the pipeline gives what the model gives")

mesh = jaxpipe.make_mesh(stage=2, data=2)
pipe = jaxpipe.Pipeline(model, params, schedule="1f1b", mesh=mesh, zero=3)
optimizer, params = optax.adam(3e-3), pipe.place(params)
state, step = pipe.init(optimizer, params), pipe.train_step(optimizer)
for number in range(40):
    batch, key = make_batch(32, number), jax.random.key(number)
    (value, metrics), params, state = step(params, state, batch, key)
    if number % 13 == 0:
        print(f"step {number}: loss {value:.3f}, accuracy {metrics['accuracy']:.2f}")

trained = join(pipe.unplace(params))
batch = make_batch(64, 100)
_, metrics = loss_of(net.apply({"params": trained}, batch["images"], train=False), batch)
print(f"the model itself is right on {metrics['accuracy']:.0%} of new images")
