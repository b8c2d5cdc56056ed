"""Labelled images of one size, as ``python -m train.prepare images`` writes them.

A folder holds ``{train,heldout}.{images,labels}.npy`` and ``meta.json``. Images are stored as bytes
and returned as floats with mean 0 and deviation 1 per channel over the training images.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from train.data import folder as prepared
from train.data.folder import META_FILE, prepare_hint
from train.data.stream import Batch

KIND = "images"
SIDES = ("train", "heldout")


@dataclasses.dataclass(frozen=True)
class ImageMeta:
    """The content of ``meta.json`` in a folder of images.

    Args:
      classes: name of each label.
      shape: height, width and channels of every image.
      mean: mean of the training images, per channel, with 0 and 255 as 0 and 1.
      deviation: their deviation, likewise.
      train: number of images to train on.
      heldout: number of images held out for evaluation.
      images_sha256: hex digest of all images and labels.
      settings: the options of ``train.prepare images`` that determine the content.
    """

    classes: list[str]
    shape: list[int]
    mean: list[float]
    deviation: list[float]
    train: int
    heldout: int
    images_sha256: str
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Images:
    """The images of one side; `stream.batches` and `stream.heldout_batches` read them.

    Args:
      pixels: uint8 ``[num_images, height, width, channels]``.
      labels: int32 ``[num_images]``.
      mean: number to subtract, ``[channels]``, where 0 and 255 are 0 and 1.
      deviation: number to divide by afterwards, ``[channels]``.

    Example:
      >>> pixels = np.full((2, 4, 4, 1), 255, np.uint8)
      >>> images = Images(pixels, np.array([3, 5], np.int32), np.array([0.5]), np.array([0.25]))
      >>> batch = images.read(np.array([1]), np.zeros((1, 3)))
      >>> batch["images"][0, 0, 0], batch["labels"]
      (array([2.], dtype=float32), array([5], dtype=int32))
    """

    pixels: np.ndarray
    labels: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, numbers: np.ndarray, keys: np.ndarray) -> Batch:
        """Reads images; nothing is random.

        Returns:
          ``{"images": float32 [rows, height, width, channels], "labels": int32 [rows]}``.
        """
        del keys
        scaled = self.pixels[numbers].astype(np.float32) / np.float32(255)
        image = (scaled - self.mean.astype(np.float32)) / self.deviation.astype(np.float32)
        return {"images": image, "labels": self.labels[numbers].astype(np.int32)}


def file_names(side: str) -> tuple[str, str]:
    """Names of the pixels' and the labels' file of a side."""
    return f"{side}.images.npy", f"{side}.labels.npy"


def read_meta(folder: str | Path) -> ImageMeta:
    """Reads ``meta.json``; raises ValueError if it is missing, damaged or of another kind."""
    folder = Path(folder)
    try:
        return ImageMeta(**prepared.read_fields(folder, KIND))
    except TypeError as error:
        raise prepared.damaged(folder, KIND, error) from error


def load(folder: str | Path) -> tuple[Images, Images]:
    """Opens both sides of a folder and checks that they are whole.

    Returns:
      The images to train on and the held-out ones.

    Raises:
      ValueError: a file is missing or damaged.

    Example:
      >>> train, heldout = load("data/digits")  # doctest: +SKIP
    """
    folder = Path(folder)
    meta = read_meta(folder)
    mean, deviation = np.array(meta.mean), np.array(meta.deviation)
    sides = []
    for side, count in zip(SIDES, (meta.train, meta.heldout), strict=True):
        pixels_name, labels_name = file_names(side)
        pixels = _read(folder, pixels_name, (count, *meta.shape), np.uint8)
        labels = _read(folder, labels_name, (count,), np.int32)
        if labels.size and not 0 <= labels.min() <= labels.max() < len(meta.classes):
            raise ValueError(
                f"data.path={folder}: {labels_name} holds labels outside the "
                f"{len(meta.classes)} classes of {META_FILE}. {prepare_hint(folder, KIND)}"
            )
        sides.append(Images(pixels, labels, mean, deviation))
    return sides[0], sides[1]


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of the predicted labels that are right; both integers ``[num_images]``."""
    return float(np.mean(np.asarray(predictions) == np.asarray(labels)))


def majority_accuracy(train_labels: np.ndarray, heldout_labels: np.ndarray) -> float:
    """Accuracy of always guessing the most frequent training label: what a model must beat.

    Example:
      >>> majority_accuracy(np.array([1, 1, 0]), np.array([0, 1, 1, 2]))
      0.5
    """
    return accuracy(np.array(np.bincount(train_labels).argmax()), heldout_labels)


def _read(folder: Path, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    hint = prepare_hint(folder, KIND)
    try:
        array = np.load(folder / name, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"data.path={folder}: there is no {name}. {hint}") from None
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"data.path={folder}: {name} is truncated or not an array file ({error}). {hint}"
        ) from error
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"data.path={folder}: {name} is not the one that {META_FILE} describes: expected "
            f"{np.dtype(dtype)} {list(shape)}, found {array.dtype} {list(array.shape)}. {hint}"
        )
    return array
