"""A U-Net that predicts the noise in images, in equinox: one image at a time, channels first."""

import equinox as eqx
import jax
import jax.numpy as jnp


def time_features(time, size):
    """Sines and cosines of a time from 0 to 1."""
    angles = time * 2.0 ** jnp.arange(size // 2)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])


class ResBlock(eqx.Module):
    norm: eqx.nn.GroupNorm
    time: eqx.nn.Linear
    conv: eqx.nn.Conv2d
    shortcut: eqx.nn.Conv2d

    def __init__(self, before, after, time_size, *, key):
        keys = jax.random.split(key, 3)
        self.norm = eqx.nn.GroupNorm(2, before)
        self.time = eqx.nn.Linear(time_size, before, key=keys[0])
        self.conv = eqx.nn.Conv2d(before, after, 3, padding=1, key=keys[1])
        self.shortcut = eqx.nn.Conv2d(before, after, 1, use_bias=False, key=keys[2])

    def __call__(self, x, time):
        y = jax.nn.silu(self.norm(x) + self.time(time)[:, None, None])
        return self.shortcut(x) + self.conv(y)


def halved(x):
    channels, height, width = x.shape
    return x.reshape(channels, height // 2, 2, width // 2, 2).mean((2, 4))


def doubled(x):
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


class Down(eqx.Module):
    """Returns what travels on, and what skips to the other side."""

    block: ResBlock

    def __call__(self, x, time):
        skipped = self.block(x, time)
        return halved(skipped), skipped


class Up(eqx.Module):
    block: ResBlock

    def __call__(self, x, skipped, time):
        return self.block(jnp.concatenate([doubled(x), skipped]), time)


class UNet(eqx.Module):
    first: eqx.nn.Conv2d
    down: list
    middle: ResBlock
    up: list
    last: eqx.nn.Conv2d
    time_size: int = eqx.field(static=True)

    def __init__(self, *, channels, widths, time_size, key):
        keys = iter(jax.random.split(key, 3 + 2 * len(widths)))
        self.first = eqx.nn.Conv2d(channels, widths[0], 3, padding=1, key=next(keys))
        befores = [widths[0], *widths[:-1]]
        pairs = list(zip(befores, widths, strict=True))
        self.down = [Down(ResBlock(a, b, time_size, key=next(keys))) for a, b in pairs]
        self.middle = ResBlock(widths[-1], widths[-1], time_size, key=next(keys))
        self.up = [Up(ResBlock(2 * b, a, time_size, key=next(keys))) for a, b in reversed(pairs)]
        self.last = eqx.nn.Conv2d(widths[0], channels, 3, padding=1, key=next(keys))
        self.time_size = time_size

    def __call__(self, image, time):
        time, x, skipped = time_features(time, self.time_size), self.first(image), []
        for down in self.down:
            x, kept = down(x, time)
            skipped.append(kept)
        x = self.middle(x, time)
        for up in self.up:
            x = up(x, skipped.pop(), time)
        return self.last(x)
