"""Rows of several images, whose text reads out the names of their classes.

The images are those of a folder from ``python -m train.prepare images``. Tokens are bytes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from train.data import images
from train.data.images import Images
from train.data.stream import Batch

END = 256
"""The token that begins a text and ends it, after the 256 bytes."""


@dataclasses.dataclass(frozen=True)
class Captions:
    """Rows of one side; `stream.batches` and `stream.heldout_batches` read them.

    Row n has image n and, before it, up to ``max_images`` - 1 others, which are drawn.

    Args:
      images: the images of the side.
      names: name of each label.
      max_images: most images of a row.
      length: tokens to fill texts up to.

    Example:
      >>> pixels, one = np.full((1, 2, 2, 1), 255, np.uint8), np.ones(1)
      >>> rows = Captions(Images(pixels, np.zeros(1, int), one, one), ("cat",), 2, 9)
      >>> batch = rows.read(np.array([0]), np.array([[0, 0, 1]]))
      >>> batch["num_images"], bytes(batch["targets"][0, :7].tolist())
      (array([2], dtype=int32), b'cat cat')
    """

    images: Images
    names: tuple[str, ...]
    max_images: int
    length: int

    def __len__(self) -> int:
        return len(self.images)

    def text(self, labels: np.ndarray) -> bytes:
        """Reads out the labels of a row."""
        return " ".join(self.names[label] for label in labels).encode()

    def read(self, numbers: np.ndarray, keys: np.ndarray) -> Batch:
        """Reads rows.

        Returns:
          ``images`` float32 ``[rows, max_images, height, width, channels]``, after zeros in place
          of those that a row lacks; ``num_images`` int32 ``[rows]``; ``tokens`` and ``targets``
          int32 ``[rows, length]``, the latter -1 behind the text's end.
        """
        rows, shape = len(numbers), self.images.pixels.shape[1:]
        counts = np.empty(rows, np.int32)
        pixels = np.zeros((rows, self.max_images, *shape), np.float32)
        tokens, targets = np.zeros((rows, self.length), np.int32), np.full((rows, self.length), -1)
        for row, (number, key) in enumerate(zip(numbers, keys, strict=True)):
            rng = np.random.default_rng(key)
            counts[row] = count = rng.integers(1, self.max_images, endpoint=True)
            chosen = np.append(rng.integers(len(self), size=count - 1), number)
            batch = self.images.read(chosen, key)
            text = list(self.text(batch["labels"]))
            pixels[row, self.max_images - count :] = batch["images"]
            tokens[row, : len(text) + 1] = [END, *text]
            targets[row, : len(text) + 1] = [*text, END]
        texts = {"tokens": tokens, "targets": targets.astype(np.int32)}
        return {"images": pixels, "num_images": counts, **texts}


def most_tokens(names: list[str], max_images: int) -> int:
    """Tokens of the longest text, with its end."""
    return max_images * (1 + max(len(name.encode()) for name in names))


def load(folder: str | Path, *, max_images: int, length: int) -> tuple[Captions, Captions]:
    """Opens both sides of a folder of images, as `train.data.images.load`.

    Args:
      length: tokens to fill texts up to, at least `most_tokens`.

    Raises:
      ValueError: a file is missing or damaged.
    """
    names = tuple(images.read_meta(folder).classes)
    train, heldout = (Captions(side, names, max_images, length) for side in images.load(folder))
    return train, heldout
