"""What every kind of data promises: all examples once an epoch, exact resume, rows of a process."""

import doctest
import hashlib
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from train import config as config_module
from train import tasks
from train.command_line import load_yaml, validate
from train.data import folder, images, masked_lm, stream, text, translation
from train.prepare import __main__
from train.prepare import images as prepare_images
from train.prepare import text as prepare_text
from train.prepare import translation as prepare_translation
from train.prepare.__main__ import main

BATCH_SIZE = 6
TOP = Path(__file__).resolve().parents[2]


def _quiet(prepare, options):
    prepare(options, console=Console(file=io.StringIO()))
    return options.out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A prepared folder of each kind; the text is a part of this Python's library."""
    top = tmp_path_factory.mktemp("data")
    text_options = prepare_text.PrepareOptions(
        out=top / "text", vocab_size=400, max_megabytes=0.2, heldout_fraction=0.2
    )
    translation_options = prepare_translation.TranslationOptions(
        out=top / "translation", locales=("de", "ja"), vocab_size=600
    )
    return {
        "text": _quiet(prepare_text.prepare, text_options),
        "images": _quiet(prepare_images.prepare, prepare_images.ImageOptions(out=top / "images")),
        "translation": _quiet(prepare_translation.prepare, translation_options),
    }


def _text(folders):
    return (
        text.Windows(text.read_tokens(folders["text"] / name), 32)
        for name in (text.TRAIN_FILE, text.HELDOUT_FILE)
    )


LOADERS = {
    "text": _text,
    "masked_lm": lambda f: masked_lm.load(f["text"], sequence_length=32),
    "next_sentence": lambda f: masked_lm.load(f["text"], sequence_length=32, next_sentence=True),
    "images": lambda f: images.load(f["images"]),
    "translation": lambda f: translation.load(f["translation"]),
}


@pytest.fixture(params=LOADERS)
def sides(request, folders):
    return tuple(LOADERS[request.param](folders))


class _Numbers:
    """Examples that are their own numbers."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def read(self, numbers, keys):
        return {"number": numbers, "key": keys}


def _take(batches, count):
    return list(itertools.islice(batches, count))


def _assert_equal(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name])


def test_every_number_comes_once_an_epoch_in_another_order():
    taken = _take(stream.batches(_Numbers(30), batch_size=BATCH_SIZE, seed=3), 10)
    numbers = np.concatenate([batch["number"] for batch in taken]).reshape(2, 30)
    np.testing.assert_array_equal(np.sort(numbers, axis=1), [range(30)] * 2)
    assert numbers[0].tolist() != numbers[1].tolist()
    keys = np.concatenate([batch["key"] for batch in taken])
    np.testing.assert_array_equal(keys[:, 0], 3)
    assert [tuple(key) for key in keys[:, 1:]] == list(
        itertools.product(range(10), range(BATCH_SIZE))
    )


def test_batches_repeat_with_the_seed_and_differ_without(sides):
    def take(seed):
        return _take(stream.batches(sides[0], batch_size=BATCH_SIZE, seed=seed), 3)

    _assert_equal(take(1), take(1))
    with pytest.raises(AssertionError):
        _assert_equal(take(1), take(2))


def test_resume_is_exact_also_on_other_processes(sides):
    train, _ = sides
    unbroken = stream.batches(train, batch_size=BATCH_SIZE, seed=5)
    _take(unbroken, len(train) // BATCH_SIZE - 2)
    state = json.loads(json.dumps(unbroken.get_state()))
    expected = _take(unbroken, 5)  # over the end of the epoch
    resumed = stream.batches(train, batch_size=BATCH_SIZE, seed=5)
    resumed.set_state(state)
    _assert_equal(_take(resumed, 5), expected)
    for rows in ([0, 1, 2], [5, 3], []):
        part = stream.batches(train, batch_size=BATCH_SIZE, seed=5, rows=rows)
        part.set_state(state)
        chosen = [{name: leaf[rows] for name, leaf in batch.items()} for batch in expected]
        _assert_equal(_take(part, 5), chosen)


def test_heldout_batches_are_fixed_and_no_example_comes_twice(sides):
    _, heldout = sides
    options = {"batch_size": BATCH_SIZE, "num_batches": len(heldout) // BATCH_SIZE}
    whole = list(stream.heldout_batches(heldout, **options))
    assert len(whole) == options["num_batches"]
    _assert_equal(list(stream.heldout_batches(heldout, **options)), whole)
    part = list(stream.heldout_batches(heldout, **options, rows=[4, 1]))
    _assert_equal(part, [{k: leaf[[4, 1]] for k, leaf in batch.items()} for batch in whole])
    numbers = stream.heldout_batches(_Numbers(len(heldout)), **options)
    taken = np.concatenate([batch["number"] for batch in numbers])
    assert len(set(taken.tolist())) == options["num_batches"] * BATCH_SIZE


def test_too_few_examples_name_the_nearest_valid_values():
    with pytest.raises(ValueError, match=r"need 24, there are 20\. .*train\.eval_batches=3"):
        stream.heldout_batches(_Numbers(20), batch_size=6, num_batches=4)
    with pytest.raises(ValueError, match=r"Nearest valid: batch_size=20"):
        stream.heldout_batches(_Numbers(20), batch_size=21, num_batches=1)
    with pytest.raises(ValueError, match="no examples"):
        stream.batches(_Numbers(0), batch_size=1, seed=0)
    with pytest.raises(ValueError, match=r"train\.seed=-1"):
        stream.batches(_Numbers(3), batch_size=1, seed=-1)


@pytest.mark.parametrize("config", sorted(TOP.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_the_data_of_every_shipped_configuration(tmp_path, capsys, monkeypatch, config):
    """What ``make train`` prepares is the kind of data that the task reads, in its own folder."""
    prepared = []
    for kind, (options_type, _) in __main__._COMMANDS.items():
        entry = options_type, lambda options, kind=kind: prepared.append((kind, options.out))
        monkeypatch.setitem(__main__._COMMANDS, kind, entry)
    assert main(["--config", str(config)]) == 0
    found, _ = validate(load_yaml(config), source=str(config))
    if found.data.prepare is None:
        assert not prepared
        assert "names no data.prepare" in capsys.readouterr().out
    else:
        assert prepared == [(tasks.find(found.task).data_kind, Path(found.data.path))]


def test_a_configuration_whose_data_section_is_wrong(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("task: none\ndata: {prepared: text}\n")
    assert main(["--config", str(tmp_path / "run.yaml")]) == 2
    assert "data.prepared in" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "other.yaml")]) == 2
    assert "does not exist. Files there:" in capsys.readouterr().err


@pytest.mark.parametrize("kind", folder.KINDS)
def test_preparing_again_leaves_whole_data_alone_and_repairs_damaged(folders, kind, tmp_path):
    settings = json.loads((folders[kind] / "meta.json").read_text())["settings"]
    chosen = {
        "text": ["--vocab-size", "400", "--max-megabytes", "0.2", "--heldout-fraction", "0.2"],
        "images": [],
        "translation": ["--locales", "de", "ja", "--vocab-size", "600"],
    }[kind]
    out = tmp_path / "out"
    command = [kind, "--out", str(out), *chosen]
    assert main(command) == 0
    assert json.loads((out / "meta.json").read_text())["settings"] == settings
    digests = _digests(out)
    # The result depends on the content and the options only.
    assert digests == _digests(folders[kind])
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert main(command) == 0
    assert times == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    victim = max(out.iterdir(), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])
    assert main(command) == 0
    assert _digests(out) == digests


def _digests(out):
    """Of what was prepared; a run keeps hidden files beside it."""
    files = [path for path in out.iterdir() if not path.name.startswith(".")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_other_settings_and_other_kinds_are_not_replaced(folders, capsys):
    out = str(folders["images"])
    before = _digests(folders["images"])
    assert main(["images", "--out", out, "--heldout-fraction", "0.5"]) == 2
    assert "heldout_fraction is 0.2 there and 0.5 here" in capsys.readouterr().err
    assert main(["text", "--out", out, "--force"]) == 2
    assert "holds other files (heldout.images.npy" in capsys.readouterr().err
    assert _digests(folders["images"]) == before


def test_an_unknown_kind_names_the_nearest(capsys):
    assert main(["image", "--out", "nowhere"]) == 2
    assert "there are text, images, translation" in (error := capsys.readouterr().err)
    assert "Nearest valid: images." in error


@pytest.mark.parametrize("module", [text, images, translation])
def test_a_folder_of_another_kind_or_with_a_damaged_description_is_refused(
    folders, tmp_path, module
):
    for other, path in folders.items():
        if other != module.KIND:
            with pytest.raises(ValueError, match=f"holds {other}, not {module.KIND}.*train.prep"):
                module.read_meta(path)
    with pytest.raises(ValueError, match=f"there is no meta.json.*--out {tmp_path}"):
        module.read_meta(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    damaged = json.dumps({"kind": module.KIND, "train": 3})
    for content in ("", "[]", "{}", damaged, "[" * 10**5):
        (tmp_path / "meta.json").write_text(content)
        with pytest.raises(ValueError, match=r"damaged or foreign|holds text, not"):
            module.read_meta(tmp_path)


def test_a_missing_package_says_how_to_install_it():
    with pytest.raises(
        ValueError, match=r"--source=none needs not_there, .*pip install -e '\.\[images\]'"
    ):
        folder.require("not_there.datasets", extra="images", needed_by="--source=none")


def test_examples_in_docstrings_run():
    for module in (config_module, text, images, masked_lm, prepare_translation):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
