"""Reading: a GPT behind an image encoder writes the names of the classes of a row's images."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import Model
from models import vision_language
from models.types import PyTree
from models.vision_language import WITHOUT, VisionLanguageConfig
from train.config import Config
from train.data import captions, images
from train.data.captions import Captions
from train.data.stream import Examples, Unnumbered
from train.task import Task

_ROWS = 256
"""Held-out rows that are read at once."""


class VisionLanguage(Task):
    default = VisionLanguageConfig(
        vocab_size=captions.END + 1, sequence_length=8, num_layers=4, width=64, num_heads=4
    )
    fixed = WITHOUT
    free = ("dropout", "balance_loss", "z_loss", "hide_images")
    depth = ("num_encoder_layers", "num_layers")
    unit = "tokens"
    loss_unit = "nats"
    data_kind = "images"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        shape = self.shape
        self.num_layers = shape.num_encoder_layers + 1 + shape.num_layers
        self.units_per_row = shape.max_images * shape.image_tokens + shape.sequence_length

    def model(self, *, train: bool, axis: str | None = "stage") -> Model:
        shape = self.shape if train else self.shape.without_layer_losses()
        return vision_language.model(shape, **self.named_axes(axis))

    def init(self, rng: jax.Array) -> PyTree:
        return vision_language.init(self.shape, rng)

    def row_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = self.shape
        size = shape.image_size
        text = jax.ShapeDtypeStruct((shape.sequence_length,), jnp.int32)
        pixels = shape.max_images, size, size, shape.channels
        return {
            "images": jax.ShapeDtypeStruct(pixels, jnp.float32),
            "num_images": jax.ShapeDtypeStruct((), jnp.int32),
            "tokens": text,
            "targets": text,
        }

    def load(self) -> tuple[Examples | Unnumbered, Examples]:
        shape, folder = self.shape, self.config.data.path
        meta = images.read_meta(folder)
        image = shape.image_size, shape.image_size, shape.channels
        needed = captions.most_tokens(meta.classes, shape.max_images)
        fits = needed <= shape.sequence_length and shape.vocab_size > captions.END
        if not fits or image != tuple(meta.shape):
            raise ValueError(
                f"data.path={folder} holds images of {meta.shape} and texts of up to {needed} of "
                f"{captions.END + 1} tokens, not {list(image)} and model.sequence_length="
                f"{shape.sequence_length} of model.vocab_size={shape.vocab_size}. Nearest valid: "
                f"model.image_size={meta.shape[0]}, model.channels={meta.shape[2]}, "
                f"model.sequence_length={max(needed, shape.sequence_length)}, "
                f"model.vocab_size={max(captions.END + 1, shape.vocab_size)}."
            )
        return captions.load(folder, max_images=shape.max_images, length=shape.sequence_length)

    def data_digest(self) -> str:
        return images.read_meta(self.config.data.path).images_sha256

    def baseline(self, train: Examples | Unnumbered, heldout: Examples) -> str:
        del train
        assert isinstance(heldout, Captions)
        texts = map(bytes, self.rows(heldout, len(heldout))["targets"])
        ((_, count),) = collections.Counter(texts).most_common(1)
        return f"always the most frequent text is right in {count / len(heldout):.1%} of the rows"

    def report(self, params: PyTree, states: PyTree, heldout: Examples) -> tuple[str, float | None]:
        del states
        batch = self.rows(heldout, len(heldout))
        logits, right = jax.jit(vision_language.logits, static_argnums=0), []
        for start in range(0, len(heldout), _ROWS):
            part = {name: leaf[start : start + _ROWS] for name, leaf in batch.items()}
            guesses = np.asarray(logits(self.shape, params, part)).argmax(-1)
            # If every token is right after those before, greedy generation writes this text.
            right.append(((guesses == part["targets"]) | (part["targets"] < 0)).all(1))
        accuracy = float(np.concatenate(right).mean())
        return f"texts without a mistake in {len(heldout)} held-out rows: {accuracy:.1%}", accuracy
