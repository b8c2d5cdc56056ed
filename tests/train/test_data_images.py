"""Images: those inside packages, folders of files, and what bad ones get."""

import dataclasses
import os

import jax
import numpy as np
import pytest
import tiny_tasks
from PIL import Image
from sklearn.datasets import load_digits

from train import checks, tasks
from train.data import captions, images, stream
from train.prepare.images import (
    ImageOptions,
    LabelledImages,
    collect_images,
    prepare,
    split_images,
)


@pytest.fixture
def folder(tmp_path):
    """Twelve grey images of two classes; a pixel's value tells the image."""
    root = tmp_path / "pictures"
    for number in range(12):
        path = root / ("cat" if number % 2 else "dog") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((5, 7), 20 * number, np.uint8)).save(path)
    return root


@pytest.fixture
def options(folder, tmp_path):
    return ImageOptions(out=tmp_path / "out", source=str(folder), heldout_fraction=0.3)


@pytest.mark.parametrize(
    ("source", "count", "shape"), [("digits", 1797, (8, 8, 1)), ("mnist", 5000, (28, 28, 1))]
)
def test_images_inside_packages(tmp_path, source, count, shape):
    meta = prepare(ImageOptions(out=tmp_path, source=source))
    train, heldout = images.load(tmp_path)
    assert [len(train), len(heldout)] == [meta.train, meta.heldout]
    assert meta.train + meta.heldout == count
    # A hash decides, so the share is near what was asked for.
    assert meta.heldout / count == pytest.approx(0.2, abs=0.03)
    batch = train.read(np.arange(meta.train), np.zeros((meta.train, 3)))
    assert (batch["images"].dtype, batch["labels"].dtype) == (np.float32, np.int32)
    assert batch["images"].shape == (meta.train, *shape)
    assert batch["images"].mean() == pytest.approx(0, abs=1e-4)
    assert batch["images"].std() == pytest.approx(1, abs=1e-4)
    assert {*train.labels.tolist()} == {*heldout.labels.tolist()} == {*range(10)}
    seen = {image.tobytes() for image in train.pixels}
    assert not seen & {image.tobytes() for image in heldout.pixels}
    if source == "digits":
        digits, collected = load_digits(), collect_images(ImageOptions(out=tmp_path))
        np.testing.assert_array_equal(collected.labels, digits.target)
        np.testing.assert_array_equal(np.round(collected.pixels[..., 0] / 255 * 16), digits.images)


def test_a_folder_of_images_comes_back_as_written(options):
    meta = prepare(options)
    assert meta.classes == ["cat", "dog"]
    assert meta.shape == [5, 7, 1]
    found = {}
    for side in images.load(options.out):
        batch = side.read(np.arange(len(side)), np.zeros((len(side), 3)))
        pixels = batch["images"] * np.float32(meta.deviation) + np.float32(meta.mean)
        for image, label in zip(pixels * 255, batch["labels"], strict=True):
            np.testing.assert_allclose(image, image[0, 0, 0], atol=1e-3)
            found[round(float(image[0, 0, 0]))] = meta.classes[label]
    assert found == {20 * n: "cat" if n % 2 else "dog" for n in range(12)}


def test_equal_images_are_on_one_side():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (200, 3, 3, 1), np.uint8).repeat(2, axis=0)
    labels = np.zeros(400, np.int32)
    heldout = split_images(LabelledImages(pixels, labels, ["a"]), heldout_fraction=0.3)
    np.testing.assert_array_equal(heldout[::2], heldout[1::2])
    assert 60 < heldout.sum() < 180
    # An image keeps its side when others go.
    half = split_images(LabelledImages(pixels[:99], labels[:99], ["a"]), heldout_fraction=0.3)
    np.testing.assert_array_equal(half, heldout[:99])


def test_images_of_different_sizes_need_a_size(folder, options):
    """And one colour image makes all of them colour images."""
    Image.new("RGB", (9, 9), (10, 20, 30)).save(folder / "cat" / "99.png")
    message = r"cat/01.png has 7 x 5 pixels, cat/99.png has 9 x 9\. .*--image-size 5"
    with pytest.raises(ValueError, match=message):
        prepare(options)
    collected = collect_images(dataclasses.replace(options, image_size=6))
    assert collected.pixels.shape == (13, 6, 6, 3)
    assert [10, 20, 30] in collected.pixels[:, 0, 0].tolist()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: os.truncate(f / "cat" / "01.png", 50), "cannot read cat/01.png as an image"),
        (lambda f: (f / "dog" / "a.txt").write_text("woof"), "cannot read dog/a.txt as an image"),
        (lambda f: (f / "bird").mkdir(), "found bird without images"),
        (lambda f: (f / "dog").rename(f / ".dog"), "at least two subfolders.*found 1 subfolders"),
        (
            lambda f: Image.fromarray(np.full((5, 7), 40_000, np.uint16)).save(f / "dog" / "a.png"),
            "dog/a.png has more than 8 bits per channel",
        ),
    ],
)
def test_a_malformed_folder_is_refused(folder, options, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        prepare(options)
    assert not options.out.exists()


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"source": "digit", "image_size": 0, "heldout_fraction": 2},
            (
                "--source=digit is neither digits nor mnist",
                "Nearest valid: digits",
                "size=0",
                "=2 must",
            ),
        ),
        ({"source": "digits", "image_size": 9}, ("--image-size=9 is for a folder of images",)),
        ({"source": "nowhere"}, ("nowhere is neither",)),
        ({"heldout_fraction": 1 - 1e-9}, ("no image of cat, dog to train on",)),
        ({"heldout_fraction": 1e-9}, ("held-out",)),
    ],
)
def test_wrong_options_are_named_at_once(options, changes, messages):
    with pytest.raises(ValueError, match=messages[0]) as error:
        prepare(dataclasses.replace(options, **changes))
    assert all(message in str(error.value) for message in messages)


def test_damaged_arrays_are_noticed(options):
    prepare(options)
    path = options.out / "train.images.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match=r"train.images.npy is truncated.*train.prepare images"):
        images.load(options.out)
    np.save(path, np.zeros((2, 5, 7, 1), np.uint8))
    with pytest.raises(ValueError, match=r"expected uint8 \[\d+, 5, 7, 1\], found uint8 \[2, 5"):
        images.load(options.out)
    path.unlink()
    with pytest.raises(ValueError, match=r"there is no train\.images\.npy"):
        images.load(options.out)
    path.write_bytes(whole)
    labels = options.out / "heldout.labels.npy"
    np.save(labels, np.load(labels) + 2)
    with pytest.raises(ValueError, match="labels outside the 2 classes"):
        images.load(options.out)


def test_accuracy_and_the_majority_guess():
    assert images.accuracy(np.array([1, 2, 3, 3]), np.array([1, 2, 3, 4])) == 0.75
    train, heldout = np.array([2, 2, 2, 0, 1]), np.array([2, 1, 0, 2])
    assert images.majority_accuracy(train, heldout) == 0.5


def test_images_become_the_batches_the_step_wants(tmp_path):
    prepare(ImageOptions(out=tmp_path / "digits"))
    settings = tiny_tasks.config("resnet", data={"path": str(tmp_path / "digits")})
    assert checks.check(settings, writes=False) == []
    task = tasks.make(settings)
    train, heldout = task.load()
    batch = next(stream.batches(train, batch_size=8, seed=0))
    shapes = jax.tree.map(lambda leaf: ((8, *leaf.shape), leaf.dtype), task.row_shapes())
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == shapes
    assert "most frequent class is right in 9" in task.baseline(train, heldout)
    larger = settings.model.model_copy(update={"image_size": 16})
    settings = settings.model_copy(update={"model": larger})
    (failure,) = checks.check(settings, writes=False)
    assert "holds images of [8, 8, 1] in 10 classes, not [16, 16, 1] in 10" in failure.message
    assert "model.image_size=8" in failure.message


def test_rows_of_images_read_out_their_classes(options):
    """Images end their part of a row, the row's own one last, and their text is filled up."""
    meta = prepare(options)
    train, _ = captions.load(options.out, max_images=3, length=13)
    keys, numbers = np.stack([np.arange(40)] * 3, axis=1), np.arange(40) % meta.train
    batch = train.read(numbers, keys)
    jax.tree.map(np.testing.assert_array_equal, batch, train.read(numbers, keys))
    assert {*batch["num_images"].tolist()} == {1, 2, 3}
    values = batch["images"][:, :, 0, 0, 0] * np.float32(meta.deviation) + np.float32(meta.mean)
    names = np.where(np.rint(values * 255 / 20) % 2, "cat", "dog")
    for row, count in enumerate(batch["num_images"]):
        assert not batch["images"][row, : 3 - count].any()
        own = train.images.read(numbers[row : row + 1], keys)["images"][0]
        np.testing.assert_array_equal(batch["images"][row, -1], own)
        text = [*" ".join(names[row, 3 - count :]).encode()]
        assert batch["tokens"][row].tolist() == [captions.END, *text] + [0] * (12 - len(text))
        assert batch["targets"][row].tolist() == [*text, captions.END] + [-1] * (12 - len(text))


def test_a_model_that_does_not_fit_rows_of_images_is_told_what_does(options):
    prepare(options)
    model = {"sequence_length": 11, "image_size": 5, "num_layers": 1}
    settings = tiny_tasks.config("vision_language", data={"path": str(options.out)}, model=model)
    (failure,) = checks.check(settings, writes=False)
    assert "[5, 7, 1] and texts of up to 16 of 257 tokens, not [5, 5, 1]" in failure.message
    assert "model.sequence_length=16" in failure.message
