"""What every kind of data promises: whole files, all examples once an epoch, an exact resume."""

import doctest
import hashlib
import itertools
import json
import shutil
import struct
from pathlib import Path

import jax
import numpy as np
import pytest

from train import config as config_module
from train import tasks
from train.config_file import load_yaml, validate
from train.data import folder as folders_module
from train.data import images, masked_lm, stream, text, translation
from train.prepare import __main__
from train.prepare import translation as prepare_translation
from train.prepare.__main__ import main

BATCH_SIZE = 6
TOP = Path(__file__).resolve().parents[2]
COMMANDS = {
    # The text is a part of this Python's library.
    "text": "--vocab-size 400 --max-megabytes 0.2 --heldout-fraction 0.2",
    "images": "",
    "translation": "--locales de ja --vocab-size 600",
}
"""How a folder of each kind is prepared."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A prepared folder of each kind."""
    top = tmp_path_factory.mktemp("data")
    for kind, options in COMMANDS.items():
        assert main([kind, "--out", str(top / kind), *options.split()]) == 0
    return {kind: top / kind for kind in COMMANDS}


def _windows(folders):
    names = text.TRAIN_FILE, text.HELDOUT_FILE
    return [text.Windows(text.read_tokens(folders["text"] / name), 32) for name in names]


LOADERS = {
    "text": _windows,
    "masked_lm": lambda f: masked_lm.load(f["text"], sequence_length=32),
    "next_sentence": lambda f: masked_lm.load(f["text"], sequence_length=32, next_sentence=True),
    "images": lambda f: images.load(f["images"]),
    "translation": lambda f: translation.load(f["translation"]),
}


class _Numbers:
    """Examples that are their own numbers."""

    def __init__(self, count):
        self.count, self.reads = count, 0

    def __len__(self):
        return self.count

    def read(self, numbers, keys):
        self.reads += len(numbers)
        return {"number": numbers, "key": keys}


def _take(batches, count):
    return list(itertools.islice(batches, count))


def _rows(batches, rows):
    return [{name: leaf[rows] for name, leaf in batch.items()} for batch in batches]


def _assert_equal(first, second):
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], strict=True)


# Examples in batches.


def test_every_number_comes_once_an_epoch_in_another_order():
    taken = _take(stream.batches(_Numbers(30), batch_size=BATCH_SIZE, seed=3), 10)
    numbers = np.concatenate([batch["number"] for batch in taken]).reshape(2, 30)
    np.testing.assert_array_equal(np.sort(numbers, axis=1), [range(30)] * 2)
    assert numbers[0].tolist() != numbers[1].tolist()
    keys = np.concatenate([batch["key"] for batch in taken])
    np.testing.assert_array_equal(keys[:, 0], 3)
    expected = list(itertools.product(range(10), range(BATCH_SIZE)))
    assert [tuple(key) for key in keys[:, 1:]] == expected
    (many,) = _take(stream.batches(_Numbers(2), batch_size=BATCH_SIZE, seed=0), 1)
    assert sorted(many["number"]) == [0, 0, 0, 1, 1, 1]  # a batch may be larger than the text


@pytest.mark.parametrize("kind", LOADERS)
def test_a_resume_is_exact_also_on_other_processes(folders, kind):
    train, _ = LOADERS[kind](folders)
    options = {"batch_size": BATCH_SIZE, "seed": 5}
    unbroken = stream.batches(train, **options)
    _take(unbroken, len(train) // BATCH_SIZE - 2)
    state = json.loads(json.dumps(unbroken.get_state()))
    expected = _take(unbroken, 5)  # over the end of the epoch
    for rows in (range(BATCH_SIZE), [0, 1, 2], [5, 3], []):
        resumed = stream.batches(train, **options, rows=rows)
        resumed.set_state(state)
        _assert_equal(_take(resumed, 5), _rows(expected, list(rows)))
    other = stream.batches(train, batch_size=BATCH_SIZE, seed=6)
    other.set_state(state)
    with pytest.raises(AssertionError):
        _assert_equal(_take(other, 5), expected)


@pytest.mark.parametrize("kind", LOADERS)
def test_heldout_batches_are_fixed_distinct_and_spread(folders, kind):
    _, heldout = LOADERS[kind](folders)
    options = {"batch_size": BATCH_SIZE, "num_batches": len(heldout) // BATCH_SIZE}
    whole = list(stream.heldout_batches(heldout, **options))
    assert len(whole) == options["num_batches"]
    _assert_equal(stream.heldout_batches(heldout, **options), whole)
    _assert_equal(stream.heldout_batches(heldout, **options, rows=[4, 1]), _rows(whole, [4, 1]))
    taken = stream.heldout_batches(_Numbers(20), batch_size=3, num_batches=2)
    assert [batch["number"].tolist() for batch in taken] == [[0, 3, 6], [10, 13, 16]]
    (at_once,) = stream.heldout_batches(heldout, batch_size=2 * BATCH_SIZE, num_batches=1)
    two = stream.heldout_batches(heldout, batch_size=BATCH_SIZE, num_batches=2)
    _assert_equal([jax.tree.map(lambda *parts: np.concatenate(parts), *two)], [at_once])


def test_sizes_and_rows_out_of_range_are_refused():
    def heldout(**options):
        return stream.heldout_batches(_Numbers(20), **options)

    def train(count=20, batch_size=4, seed=0, **options):
        return stream.batches(_Numbers(count), batch_size=batch_size, seed=seed, **options)

    for call, message in (
        (lambda: train(0), "no examples to train on"),
        (lambda: train(batch_size=-1), "batch_size=-1: must be at least 1"),
        (lambda: train(seed=-1), r"train\.seed=-1: must be at least 0"),
        (lambda: train(rows=[0, 4, -1]), r"rows=\[4, -1\] .*Valid: 0 to 3"),
        (lambda: heldout(batch_size=6, num_batches=4), r"need 24, there are 20\. .*batches=3"),
        (lambda: heldout(batch_size=21, num_batches=1), "Nearest valid: batch_size=20"),
        (lambda: heldout(batch_size=3, num_batches=0), "num_batches=0"),
        (lambda: text.Windows(np.arange(9), 0), "sequence_length=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("number", [1.5, -1, "1", True, None, [1]])
def test_a_position_that_is_no_number_of_batches_is_refused(number):
    examples = _Numbers(20)
    batches = stream.batches(examples, batch_size=2, seed=0)
    (name,) = batches.get_state()
    for position in ({name: number}, {name: 1, "other": 2}, {}, [], None):
        with pytest.raises(ValueError, match=r"the position in the data is"):
            stream.continue_at(batches, position)
    stream.continue_at(batches, {name: 10**9})
    assert batches.get_state() == {name: 10**9}
    next(batches)
    assert examples.reads == 2  # nothing before the position


def test_several_texts_are_drawn_by_weight_each_in_epochs_of_its_own():
    """As often as their weights say, and resumed in the middle of an epoch."""
    parts = [text.Windows(np.arange(103), 5), text.Windows(np.arange(1000, 1053), 5)]
    mixture = stream.Mixture(parts, [1.0, 3.0])
    assert len(mixture) == 20 + 10
    batches = stream.batches(mixture, batch_size=4, seed=7)
    starts = np.concatenate([batch["tokens"][:, 0] for batch in _take(batches, 10)])
    state = json.loads(json.dumps(batches.get_state()))
    other = starts[starts >= 1000]
    assert len(other) == 30
    for epoch in other.reshape(3, 10):
        np.testing.assert_array_equal(np.sort(epoch), 1000 + 5 * np.arange(10))
    assert len({*starts[starts < 1000].tolist()}) == 10
    expected = _take(batches, 6)
    resumed = stream.batches(mixture, batch_size=4, seed=7, rows=[3, 1])
    resumed.set_state(state)
    _assert_equal(_take(resumed, 6), _rows(expected, [3, 1]))
    assert mixture.read(np.arange(0), np.zeros((0, 3)))["tokens"].shape == (0, 6)


# Token files.


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(300, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_tokens_come_back_as_written(tmp_path, vocab_size, dtype):
    path = tmp_path / text.TRAIN_FILE
    tokens = np.array([0, 5, vocab_size - 1], dtype)
    text.write_tokens(path, tokens, vocab_size=vocab_size)
    opened = text.read_tokens(path)
    np.testing.assert_array_equal(opened[:], tokens, strict=True)
    assert not opened[:].flags.writeable
    path.unlink()  # which a run does not notice
    np.testing.assert_array_equal(opened[1:], tokens[1:])


def _header(version, count):
    return struct.pack("<8sIIQ", b"JPTOKENS", version, 2, count)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_header(1, 10) + bytes(17), r"data\.path=.*truncated: expected 44 bytes .*found 41 byte"),
        (_header(1, 10) + bytes(21), "longer than it says: expected 44 bytes"),
        (_header(1, 10)[:9], "truncated: expected at least the 24 bytes"),
        (b"x" * 100, r"not a jaxpipe token file: .*JPTOKENS"),
        (_header(9, 0), "format version 9"),
        (_header(1, 0), "holds no tokens"),
        (None, "python -m train.prepare --out "),
    ],
)
def test_foreign_and_damaged_token_files_are_refused(tmp_path, content, message):
    path = tmp_path / text.TRAIN_FILE
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        text.read_tokens(path)
    with pytest.raises(ValueError, match="cannot read"):
        text.read_tokens(tmp_path)


def test_a_file_is_checked_once_unless_it_changes(folder, monkeypatch):
    path = folder / text.TRAIN_FILE
    tokens = text.read_tokens(path)
    text.check_tokens(path, tokens, vocab_size=300)

    def refuse(self, part):
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(text.TokenFile, "__getitem__", refuse)
        text.check_tokens(path, tokens, vocab_size=300)
        with pytest.raises(ValueError, match="holds token 299, but its tokenizer knows 200"):
            text.check_tokens(path, tokens, vocab_size=200)
    text.write_tokens(path, np.full(3000, 300), vocab_size=301)
    with pytest.raises(ValueError, match="holds token 300"):
        text.check_tokens(path, text.read_tokens(path), vocab_size=300)
    (folder / f".{text.TRAIN_FILE}.checked").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="holds token 300"):
        text.check_tokens(path, text.read_tokens(path), vocab_size=300)


def test_windows_number_the_documents_in_them():
    tokens = np.array([7, 7, 0, 7, 0, 0, 7, 7, 7])
    batch = text.Windows(tokens, 4, end_of_text=0).read(np.arange(2), np.zeros((2, 3)))
    assert batch["documents"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


def test_unigram_loss_is_the_smoothed_cross_entropy(monkeypatch):
    rng = np.random.default_rng(0)
    train, heldout = rng.integers(0, 6, 50).astype(np.uint16), rng.integers(0, 8, 30)
    probabilities = [(np.sum(train == token) + 1) / (50 + 8) for token in range(8)]
    expected = -np.mean([np.log(probabilities[token]) for token in heldout])
    assert text.unigram_loss(train, heldout, 8) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(text, "BLOCK", 7)
    assert text.unigram_loss(train, heldout, 8) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="train_tokens holds token 9, but vocab_size=9"):
        text.unigram_loss(np.arange(10), np.arange(3), 9)
    with pytest.raises(ValueError, match="heldout_tokens is empty"):
        text.unigram_loss(np.arange(3), np.arange(0), 9)


# Folders.


def _digests(out):
    """Of what was prepared; a run keeps hidden files beside it."""
    files = [path for path in out.iterdir() if not path.name.startswith(".")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("kind", folders_module.KINDS)
def test_preparing_again_leaves_whole_data_alone_and_repairs_damaged(folders, kind, tmp_path):
    """To the same content, which depends on the texts and the options only."""
    out = shutil.copytree(folders[kind], tmp_path / "out")
    command = [kind, "--out", str(out), *COMMANDS[kind].split()]
    digests, times = _digests(out), {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert main(command) == 0
    assert times == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    victim = max(out.iterdir(), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])
    assert main(command) == 0
    assert _digests(out) == digests


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("images --heldout-fraction 0.5", "heldout_fraction is 0.2 there and 0.5 here"),
        ("text", "holds other files (heldout.images.npy"),
        ("text --force", "holds other files (heldout.images.npy"),
        ("image", "(the default is text). Nearest valid: images."),
    ],
)
def test_other_settings_and_other_kinds_are_not_replaced(folders, capsys, command, message):
    before = _digests(folders["images"])
    assert main([*command.split(), "--out", str(folders["images"])]) == 2
    assert message in capsys.readouterr().err
    assert _digests(folders["images"]) == before


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


@pytest.mark.parametrize("config", sorted(TOP.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_the_data_of_every_shipped_configuration(capsys, monkeypatch, config):
    """What ``make train`` prepares is the kind of data that the task reads, in its own folder."""
    prepared = []
    for kind, (options_type, _) in __main__._COMMANDS.items():
        entry = options_type, lambda options, kind=kind: prepared.append((kind, options.out))
        monkeypatch.setitem(__main__._COMMANDS, kind, entry)
    assert main(["--config", str(config)]) == 0
    found, failures = validate(load_yaml(config), source=str(config))
    assert not failures
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


def test_a_missing_package_says_how_to_install_it():
    message = r"--source=none needs not_there, .*pip install -e '\.\[images\]'"
    with pytest.raises(ValueError, match=message):
        folders_module.require("not_there.datasets", extra="images", needed_by="--source=none")


def test_examples_in_docstrings_run():
    for module in (config_module, text, images, masked_lm, prepare_translation):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
