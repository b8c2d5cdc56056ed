"""Batches of every model family."""

import jax
import jax.numpy as jnp

from models.gpt import GPTConfig
from models.resnet import ResNetConfig
from models.transformer import TransformerConfig
from models.vision_language import VisionLanguageConfig


def batch_of(config, rows):
    """Rows with padding, masks and as many tokens to predict as chance gives."""
    keys = iter(jax.random.split(jax.random.key(1), 4))

    def ids(*shape, least=0):
        return jax.random.randint(next(keys), shape, least, 19)

    if isinstance(config, ResNetConfig):
        images = jax.random.normal(next(keys), (rows, 8, 8, 1))
        return {"images": images, "labels": ids(rows) % config.num_classes}
    length = config.sequence_length
    if isinstance(config, VisionLanguageConfig):  # 0, 1, ... images per row
        pixels = config.max_images, config.image_size, config.image_size, config.channels
        return {
            "images": jax.random.normal(next(keys), (rows, *pixels)),
            "num_images": jnp.arange(rows) % (config.max_images + 1),
            "tokens": ids(rows, length),
            "targets": ids(rows, length, least=-3),
        }
    if isinstance(config, GPTConfig):  # three documents per row
        documents = jnp.tile(3 * jnp.arange(length) // length, (rows, 1))
        return {"tokens": ids(rows, length + 1), "documents": documents}
    ends = jnp.arange(length) < 3 + jnp.arange(rows)[:, None] % 4
    if isinstance(config, TransformerConfig):
        source, target = (jnp.where(ends, ids(rows, length, least=3), 0) for _ in range(2))
        # One more than the inputs, as many as devices divide.
        target = jnp.pad(target.at[:, 0].set(config.begin_id), ((0, 0), (0, 1)))
        return {"source": source, "target": target}
    tokens = ids(rows, length)
    return {
        "tokens": tokens,
        "targets": jnp.where(ids(rows, length) % 3 == 0, tokens, -1),
        "mask": ends.astype(int),
        "segments": (jnp.arange(length) > ids(rows, 1) % length).astype(int),
        # Unbalanced: a gradient that cancels to nothing has no relative accuracy.
        "next_sentence": (jnp.arange(rows) % 4 == 0).astype(int),
    }
