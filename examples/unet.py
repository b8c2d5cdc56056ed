"""A diffusion U-Net of equinox: what skips to the other side travels inside the activation.

`third_party/unet.py` is the model. Of a module, `equinox.partition` takes the arrays, and
`equinox.combine` puts them back. Layers run on one image at a time, so they are mapped over rows.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from third_party.unet import Down, UNet, Up, time_features

import jaxpipe
from jaxpipe import testing

testing.simulate_devices(4)
SIZE, TIME = 8, 4
net = UNet(channels=1, widths=[4, 6], time_size=TIME, key=jax.random.key(0))


def in_turn(net):
    """The parts of a U-Net that run one after another."""
    return net.down, net.middle, net.up


def split(net):
    """These modules, and the rest."""
    rest = eqx.tree_at(in_turn, net, (None, None, None))
    return rest, [*net.down, net.middle, *net.up]


def join(outer, layers):
    """Undoes `split`."""
    count = len(layers) // 2
    parts = layers[:count], layers[count], layers[count + 1 :]
    return eqx.tree_at(in_turn, outer, parts, is_leaf=lambda x: x is None)


rest, modules = split(net)
outer_arrays, outer_static = eqx.partition(rest, eqx.is_inexact_array)
arrays, statics = zip(*(eqx.partition(m, eqx.is_inexact_array) for m in modules), strict=True)
params = {"embed": outer_arrays, "layers": arrays, "head": {}}


def noisy(batch):
    time = batch["time"][:, None, None, None]
    return jnp.cos(time) * batch["images"] + jnp.sin(time) * batch["noise"]


def embed(outer, batch, rng):
    first = eqx.combine(outer["embed"], outer_static).first
    return {"x": jax.vmap(first)(noisy(batch)), "skipped": []}


def layer_function(static):
    def layer(arrays, x, batch, rng):
        module, (x, skipped) = eqx.combine(arrays, static), (x["x"], x["skipped"])
        time = jax.vmap(lambda time: time_features(time, TIME))(batch["time"])
        if isinstance(module, Down):
            x, kept = jax.vmap(module)(x, time)
            skipped = [*skipped, kept]
        elif isinstance(module, Up):
            x, skipped = jax.vmap(module)(x, skipped[-1], time), skipped[:-1]
        else:
            x = jax.vmap(module)(x, time)
        return {"x": x, "skipped": skipped}

    return layer


def loss_of(guess, batch):
    error = (guess - batch["noise"]) ** 2
    return error.mean(), {"largest error": error.max((1, 2, 3)).mean()}


def head_loss(outer, x, batch, rng):
    return loss_of(jax.vmap(eqx.combine(outer["embed"], outer_static).last)(x["x"]), batch)


def joined(params):
    layers = [eqx.combine(*pair) for pair in zip(params["layers"], statics, strict=True)]
    return join(eqx.combine(params["embed"], outer_static), layers)


def reference(params, batch, rng, **_):
    """The model as it is, on the whole batch at once."""
    return loss_of(jax.vmap(joined(params))(noisy(batch), batch["time"]), batch)


def make_batch(rows, seed):
    """Images with one bright row each, noise, and how much of it: 0 to pi/2."""
    random = np.random.default_rng(seed)
    images = np.zeros((rows, 1, SIZE, SIZE), np.float32)
    images[np.arange(rows), :, random.integers(SIZE, size=rows)] = 2
    noise = np.float32(random.normal(size=images.shape))
    return {"images": images, "noise": noise, "time": np.float32(random.uniform(0, 1.57, rows))}


model = jaxpipe.Model(embed, [layer_function(static) for static in statics], head_loss)

# Three schedules on two meshes: loss, metrics and every gradient are those of the model.
schedules = "gpipe-fused", "1f1b-fused", "zb-h1"
batch = make_batch(16, 0)
testing.assert_matches_unpipelined(model, params, batch, schedules=schedules, reference=reference)
print("the pipeline gives what the model gives")

mesh = jaxpipe.make_mesh(stage=2, data=2)
pipe = jaxpipe.Pipeline(model, params, schedule="1f1b-fused", mesh=mesh)
optimizer, params = optax.adam(1e-2), pipe.place(params)
state, step = pipe.init(optimizer, params), pipe.train_step(optimizer)
for number in range(60):
    (value, metrics), params, state = step(params, state, make_batch(64, number))
    if number % 15 == 14:
        print(f"step {number + 1}: loss {value:.3f}, at worst {metrics['largest error']:.2f}")

value, _ = reference(pipe.unplace(params), make_batch(64, 1000), None)
print(f"the model itself has the loss {value:.3f}")
