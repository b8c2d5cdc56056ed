"""Masked language modelling: shares, fixed counts, and what a row may depend on."""

import numpy as np
import pytest

from train.data import masked_lm, text
from train.prepare.text import PrepareOptions, prepare

LENGTH = 64
VOCAB_SIZE = 500
END = 7
CLS, SEP, MASK = masked_lm.special_tokens(VOCAB_SIZE)


def _tokens(num_tokens=40_000):
    tokens = np.random.default_rng(0).integers(8, VOCAB_SIZE, num_tokens)
    tokens[::50] = END
    return tokens.astype(np.uint16)


def _windows(tokens=None, **changes):
    options = {"sequence_length": LENGTH, "vocab_size": VOCAB_SIZE, "end_of_text": END} | changes
    return masked_lm.MaskedWindows(_tokens() if tokens is None else tokens, **options)


def _keys(count, *, seed=0, step=0):
    return np.array([[seed, step, row] for row in range(count)])


@pytest.fixture(scope="module")
def batch():
    windows = _windows()
    return windows.read(np.arange(len(windows)), _keys(len(windows)))


def test_a_row_is_a_window_with_some_tokens_hidden(batch):
    tokens, targets = batch["tokens"], batch["targets"]
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.shape == targets.shape == (40_000 // (LENGTH - 2), LENGTH)
    np.testing.assert_array_equal(tokens[:, 0], CLS)
    np.testing.assert_array_equal(tokens[:, -1], SEP)
    restored = np.where(targets >= 0, targets, tokens)[:, 1:-1]
    np.testing.assert_array_equal(restored.ravel(), _tokens()[: restored.size])


def test_masking_follows_the_paper(batch):
    counts = batch["targets"] >= 0
    # The same number in every row: the mean over microbatches is the mean over the batch.
    np.testing.assert_array_equal(counts.sum(axis=1), round(0.15 * (LENGTH - 2)))
    tokens, targets = batch["tokens"][counts], batch["targets"][counts]
    assert END not in targets
    num = len(tokens)
    assert num > 5000
    # Four standard deviations of a binomial are below .023 here.
    assert np.mean(tokens == MASK) == pytest.approx(0.8, abs=0.023)
    assert np.mean(tokens == targets) == pytest.approx(0.1, abs=0.023)
    replaced = tokens[(tokens != MASK) & (tokens != targets)]
    assert len(replaced) / num == pytest.approx(0.1, abs=0.023)
    assert replaced.min() >= 0
    assert replaced.max() < VOCAB_SIZE
    assert END not in replaced
    assert len(set(replaced.tolist())) > VOCAB_SIZE / 2
    # Every position is chosen about as often.
    share = counts.mean(axis=0)[1:-1]
    assert share.min() > 0.09
    assert share.max() < 0.21


def test_a_row_depends_on_its_key_and_number_only():
    windows = _windows()
    whole = windows.read(np.array([5, 9, 5]), np.array([[1, 2, 0], [1, 2, 1], [1, 2, 2]]))
    alone = windows.read(np.array([9]), np.array([[1, 2, 1]]))
    np.testing.assert_array_equal(alone["tokens"][0], whole["tokens"][1])
    np.testing.assert_array_equal(alone["targets"][0], whole["targets"][1])
    for key in ([1, 2, 2], [1, 3, 1], [2, 2, 1]):
        other = windows.read(np.array([9]), np.array([key]))
        assert not np.array_equal(other["targets"], alone["targets"])


def test_next_sentence_pairs():
    windows = _windows(next_sentence=True)
    batch = windows.read(np.arange(len(windows)), _keys(len(windows)))
    window, half = LENGTH - 3, (LENGTH - 3) // 2
    full = np.where(batch["targets"] >= 0, batch["targets"], batch["tokens"])
    assert (full[:, 0] == CLS).all()
    assert (full[:, [half + 1, -1]] == SEP).all()
    np.testing.assert_array_equal(
        batch["segments"], np.tile(np.arange(LENGTH) > half + 1, (len(windows), 1))
    )
    rows = _tokens()[: len(windows) * window].reshape(-1, window)
    np.testing.assert_array_equal(full[:, 1 : half + 1], rows[:, :half])
    follows = (full[:, half + 2 : -1] == rows[:, half:]).all(axis=1)
    np.testing.assert_array_equal(batch["next_sentence"], ~follows)
    assert 0.4 < follows.mean() < 0.6
    seconds = {row[half:].tobytes() for row in rows.astype(np.int32)}
    assert {row[half + 2 : -1].tobytes() for row in full} <= seconds
    for name in ("segments", "next_sentence"):
        assert batch[name].dtype == np.int32


def test_a_text_of_ends_leaves_nothing_to_predict():
    windows = _windows(np.full(200, END, np.uint16))
    assert (windows.read(np.array([0]), _keys(1))["targets"] == -1).all()


@pytest.mark.parametrize(
    ("num_tokens", "length", "next_sentence", "rule", "nearest"),
    [
        (40_000, 2, False, "sequence_length=2 leaves no room", 3),
        (40_000, 4, True, "sequence_length=4 leaves no room", 5),
        (10, 13, False, "at least 1 rows", 12),
        (10, 9, True, "at least 2 rows", 8),
    ],
)
def test_lengths_that_do_not_fit_name_the_nearest(num_tokens, length, next_sentence, rule, nearest):
    tokens = _tokens(num_tokens)
    with pytest.raises(ValueError, match=rf"{rule}.*Nearest valid: {nearest}\."):
        _windows(tokens, sequence_length=length, next_sentence=next_sentence)
    _windows(tokens, sequence_length=nearest, next_sentence=next_sentence)


def test_the_folder_of_a_language_model_serves(tmp_path):
    options = PrepareOptions(out=tmp_path, vocab_size=400, max_megabytes=0.1, heldout_fraction=0.3)
    prepare(options)
    sides = masked_lm.load(tmp_path, sequence_length=LENGTH)
    for side, name in zip(sides, (text.TRAIN_FILE, text.HELDOUT_FILE), strict=True):
        tokens = text.read_tokens(tmp_path / name)[:]
        assert len(side) == len(tokens) // (LENGTH - 2)
        batch = side.read(np.arange(3), _keys(3))
        full = np.where(batch["targets"] >= 0, batch["targets"], batch["tokens"])[:, 1:-1]
        np.testing.assert_array_equal(full.ravel(), tokens[: full.size])


def test_accuracy_counts_what_is_to_be_predicted_only(batch):
    """The unigram guess is the most frequent token."""
    targets = batch["targets"]
    assert masked_lm.masked_accuracy(targets, targets) == 1
    share = np.sum(targets == 9) / np.sum(targets >= 0)
    assert masked_lm.masked_accuracy(np.full_like(targets, 9), targets) == pytest.approx(share)
    train = np.array([3] * 5 + [4] * 4, np.uint16)
    batches = [{"targets": np.array([[3, -1], [4, 3]])}, {"targets": np.array([[-1, 3]])}]
    assert masked_lm.unigram_accuracy(train, iter(batches), vocab_size=5) == 0.75
