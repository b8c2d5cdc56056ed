"""Image classification: a ResNet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import Model
from jaxpipe.errors import Problem
from models import resnet, validation
from models.types import PyTree
from train.data import images
from train.data.stream import Examples, Unnumbered
from train.task import Task

_ROWS = 256
"""Held-out images that are classified at once."""


@dataclasses.dataclass(frozen=True)
class Shape(resnet.ResNetConfig):
    """A ResNet for images of one size.

    Args:
      image_size: height and width of the images.
    """

    image_size: int = 8

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from validation.small_counts(self, "image_size")


class ResNet(Task):
    default = Shape(depth=20, num_classes=10, channels=1)
    depth = ("depth",)
    unit = "images"
    loss_unit = "nats"
    data_kind = "images"
    units_per_row = 1

    @property
    def image(self) -> tuple[int, int, int]:
        size = self.shape.image_size
        return size, size, self.shape.channels

    def model(self, *, train: bool, axis: str | None = "stage") -> Model:
        del axis
        return resnet.model(self.shape, train=train, metrics=True)

    def init(self, rng: jax.Array) -> PyTree:
        return resnet.init(self.shape, rng)

    def init_states(self) -> tuple[PyTree, ...] | None:
        return resnet.init_state(self.shape) if self.shape.norm == "batch" else None

    def row_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "images": jax.ShapeDtypeStruct(self.image, jnp.float32),
            "labels": jax.ShapeDtypeStruct((), jnp.int32),
        }

    def load(self) -> tuple[Examples | Unnumbered, Examples]:
        meta = images.read_meta(self.config.data.path)
        wanted = {"classes": self.shape.num_classes, "image": self.image}
        actual = {"classes": len(meta.classes), "image": tuple(meta.shape)}
        if wanted != actual:
            raise ValueError(
                f"data.path={self.config.data.path} holds images of {list(meta.shape)} in "
                f"{len(meta.classes)} classes, not {list(self.image)} in {self.shape.num_classes}. "
                f"Nearest valid: model.image_size={meta.shape[0]}, "
                f"model.channels={meta.shape[2]}, model.num_classes={len(meta.classes)}."
            )
        return images.load(self.config.data.path)

    def data_digest(self) -> str:
        return images.read_meta(self.config.data.path).images_sha256

    def baseline(self, train: Examples | Unnumbered, heldout: Examples) -> str:
        assert isinstance(train, images.Images)
        assert isinstance(heldout, images.Images)
        accuracy = images.majority_accuracy(train.labels, heldout.labels)
        return f"always the most frequent class is right in {accuracy:.1%}"

    def report(self, params: PyTree, states: PyTree, heldout: Examples) -> tuple[str, float | None]:
        assert isinstance(heldout, images.Images)
        logits = jax.jit(resnet.logits, static_argnums=0)
        guesses = []
        for start in range(0, len(heldout), _ROWS):
            numbers = np.arange(start, min(start + _ROWS, len(heldout)))
            batch = heldout.read(numbers, np.zeros((len(numbers), 3), np.int64))
            guesses.append(
                np.asarray(logits(self.shape, params, batch["images"], states)).argmax(-1)
            )
        accuracy = images.accuracy(np.concatenate(guesses), heldout.labels)
        return f"accuracy on {len(heldout)} held-out images: {accuracy:.1%}", float(accuracy)
