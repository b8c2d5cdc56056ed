"""A model family in one file that the trainer has never heard of.

It has residual layers and trains on random numbers. Nothing else names it; the option
``--task toy_family:Toy`` is all that it takes.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import Model
from jaxpipe.errors import below_one, refuse
from train.task import Task


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a toy.

    Args:
      num_layers: residual layers.
      width: size of the residual stream.
      activation: non-linearity of a layer.
      noise: standard deviation of what is added to the targets.
    """

    num_layers: int
    width: int
    activation: Literal["tanh", "sin"] = "tanh"
    noise: float = 0.0

    def __post_init__(self):
        refuse(below_one(width=self.width))


class Numbers:
    """Rows of random numbers; the target is the sine of their sum."""

    def __init__(self, count: int, seed: int, shape: Shape) -> None:
        rng = np.random.default_rng(seed)
        self._x = rng.normal(size=(count, shape.width)).astype(np.float32)
        noise = shape.noise * rng.normal(size=count).astype(np.float32)
        self._y = np.sin(self._x.sum(1)) + noise

    def __len__(self) -> int:
        return len(self._x)

    def spoil(self, number):
        self._x[number] = 60.0

    def read(self, numbers, keys):
        del keys
        return {"x": self._x[numbers], "y": self._y[numbers]}


class Toy(Task):
    default = Shape(num_layers=8, width=3)
    free = ("noise",)
    unit = "rows"
    units_per_row = 1
    report_file = "toy.txt"

    def model(self, *, train, axis="stage"):
        del train, axis
        function = {"tanh": jnp.tanh, "sin": jnp.sin}[self.shape.activation]

        def head_loss(outer, x, batch, rng):
            errors = x @ outer["head"] - batch["y"]
            return jnp.mean(errors**2), {"largest_error": jnp.abs(errors).max()}

        return Model(
            embed=lambda outer, batch, rng: batch["x"],
            layer=lambda w, x, batch, rng: x + function(x @ w),
            head_loss=head_loss,
        )

    def init(self, rng):
        width = self.shape.width
        layers = jax.random.normal(rng, (self.shape.num_layers, width, width))
        return {"embed": {}, "layers": layers, "head": jnp.ones(width)}

    def load(self):
        return Numbers(64, 0, self.shape), Numbers(128, 1, self.shape)

    def row_shapes(self):
        shape = self.shape.width
        return {
            "x": jax.ShapeDtypeStruct((shape,), jnp.float32),
            "y": jax.ShapeDtypeStruct((), jnp.float32),
        }

    def data_digest(self):
        return "toy"

    def baseline(self, train, heldout):
        del train, heldout
        return "zero everywhere has about 0.5"

    def report(self, params, states, heldout):
        del states
        path = self.config.folder / self.report_file
        path.write_text(str(params["head"]))
        return f"a toy of {len(heldout)} held-out rows", 1.0


class Running(Toy):
    """The toy with layers that keep a running mean, by which they centre rows in evaluation."""

    def model(self, *, train, axis="stage"):
        plain = super().model(train=train, axis=axis)

        def layer(w, x, batch, rng, state):
            mean = x.mean(0)
            if train:
                new = {"mean": 0.9 * state["mean"] + 0.1 * mean}
                return plain.layer(w, x - mean, batch, rng), new
            return plain.layer(w, x - state["mean"], batch, rng), state

        return dataclasses.replace(plain, layer=layer, stateful=True)

    def init_states(self):
        return ({"mean": jnp.zeros(self.shape.width)},) * self.shape.num_layers


class Uneven(Toy):
    """The toy with layers that differ: every second one takes twice as long."""

    def model(self, *, train, axis="stage"):
        plain = super().model(train=train, axis=axis)

        def twice(w, x, batch, rng):
            return plain.layer(w, plain.layer(w, x, batch, rng), batch, rng)

        pairs = [plain.layer, twice] * self.shape.num_layers
        return dataclasses.replace(plain, layer=tuple(pairs[: self.shape.num_layers]))

    def init(self, rng):
        params = super().init(rng)
        return params | {"layers": tuple(params["layers"])}


class Spoilt(Toy):
    """The toy with a row whose logarithm no layer can take."""

    def model(self, *, train, axis="stage"):
        plain = super().model(train=train, axis=axis)

        def layer(w, x, batch, rng):
            return plain.layer(w, x, batch, rng) + 0.0 * jnp.log(50.0 - x)

        return dataclasses.replace(plain, layer=layer)

    def load(self):
        train, heldout = super().load()
        train.spoil(21)
        return train, heldout
