"""Token files and batches: whole files only, every window once an epoch, exact resume."""

import itertools
import json
import struct

import numpy as np
import pytest

from train.data import stream, text

SEQUENCE_LENGTH = 5
NUM_TOKENS = 103  # 20 whole windows and two tokens that do not fill another


def _tokens(num_tokens=NUM_TOKENS):
    return np.arange(num_tokens, dtype=np.uint16)


def _stream(**changes):
    options = {"sequence_length": SEQUENCE_LENGTH, "batch_size": 4, "seed": 7} | changes
    return _batches(_tokens(), **options)


def _batches(tokens, *, sequence_length, **options):
    return stream.batches(text.Windows(tokens, sequence_length), **options)


def _heldout(tokens, **options):
    windows = text.Windows(tokens, SEQUENCE_LENGTH)
    return stream.heldout_batches(windows, **options)


def _take(stream, count):
    return [batch["tokens"] for batch in itertools.islice(stream, count)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(300, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_tokens_come_back_as_written(tmp_path, vocab_size, dtype):
    path = tmp_path / "train.tokens"
    tokens = np.array([0, 5, vocab_size - 1])
    text.write_tokens(path, tokens, vocab_size=vocab_size)
    read = text.read_tokens(path)[:]
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, tokens)
    assert not read.flags.writeable


def test_truncated_token_file_names_both_sizes(tmp_path):
    path = tmp_path / "train.tokens"
    text.write_tokens(path, _tokens(10), vocab_size=300)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(
        ValueError, match=r"data\.path=.*truncated: expected 44 bytes .*found 41 bytes"
    ):
        text.read_tokens(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="longer than it says: expected 44 bytes"):
        text.read_tokens(path)
    path.write_bytes(whole[:9])
    with pytest.raises(ValueError, match="truncated: expected at least the 24 bytes"):
        text.read_tokens(path)


def test_missing_token_file_names_the_command(tmp_path):
    with pytest.raises(ValueError, match=f"python -m train.prepare --out {tmp_path}"):
        text.read_tokens(tmp_path / "train.tokens")


def test_foreign_token_files_are_refused(tmp_path):
    path = tmp_path / "train.tokens"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"not a jaxpipe token file: .*JPTOKENS"):
        text.read_tokens(path)
    path.write_bytes(struct.pack("<8sIIQ", b"JPTOKENS", 9, 2, 0))
    with pytest.raises(ValueError, match="format version 9"):
        text.read_tokens(path)
    text.write_tokens(path, np.array([], np.int64), vocab_size=300)
    with pytest.raises(ValueError, match="holds no tokens"):
        text.read_tokens(path)
    with pytest.raises(ValueError, match="cannot read"):
        text.read_tokens(tmp_path)


def test_a_batch_may_be_larger_than_the_text():
    stream = _batches(_tokens(), sequence_length=50, batch_size=6, seed=0)
    starts = np.sort(next(stream)["tokens"][:, 0])
    np.testing.assert_array_equal(starts, [0, 0, 0, 50, 50, 50])


@pytest.mark.parametrize("number", [1.5, -1, "1", True, None, [1]])
def test_a_position_that_is_no_number_of_batches_is_refused(number):
    batches = stream.batches(text.Windows(np.arange(100), 4), batch_size=2, seed=0)
    (name,) = batches.get_state()
    for position in ({name: number}, {name: 1, "other": 2}, {}, [], None):
        with pytest.raises(ValueError, match=r"the position in the data is"):
            stream.continue_at(batches, position)
    stream.continue_at(batches, {name: 3})
    assert batches.get_state() == {name: 3}


def test_resume_reads_nothing_before_its_position():
    class Counting(np.ndarray):
        reads = 0

        def __getitem__(self, key):
            Counting.reads += 1
            return super().__getitem__(key)

    stream = _batches(
        _tokens().view(Counting), sequence_length=SEQUENCE_LENGTH, batch_size=4, seed=7
    )
    state = stream.get_state()
    (name,) = state
    stream.set_state({name: 10**9})
    next(stream)
    assert Counting.reads == 4


def test_several_texts_are_drawn_by_weight_each_in_epochs_of_its_own():
    """As often as their weights say, and resumed in the middle of an epoch."""
    parts = [text.Windows(_tokens(), 5), text.Windows(1000 + _tokens(53), 5)]
    mixture = stream.Mixture(parts, [1.0, 3.0])
    assert len(mixture) == 20 + 10
    batches = stream.batches(mixture, batch_size=4, seed=7)
    first = _take(batches, 10)
    state = json.loads(json.dumps(batches.get_state()))
    starts = np.concatenate(first)[:, 0]
    other = starts[starts >= 1000]
    assert len(other) == 30
    for epoch in other.reshape(3, 10):
        np.testing.assert_array_equal(np.sort(epoch), 1000 + 5 * np.arange(10))
    assert len({*starts[starts < 1000].tolist()}) == 10
    expected = _take(batches, 6)
    resumed = stream.batches(mixture, batch_size=4, seed=7, rows=[3, 1])
    resumed.set_state(state)
    np.testing.assert_array_equal(_take(resumed, 6), [batch[[3, 1]] for batch in expected])
    assert mixture.read(np.arange(0), np.zeros((0, 3)))["tokens"].shape == (0, 6)


def test_windows_number_the_documents_in_them():
    tokens = np.array([7, 7, 0, 7, 0, 0, 7, 7, 7])
    batch = text.Windows(tokens, 4, end_of_text=0).read(np.arange(2), np.zeros((2, 3)))
    assert batch["documents"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


def test_heldout_windows_are_fixed_distinct_and_spread():
    options = {"batch_size": 3, "num_batches": 2}
    first = _take(_heldout(_tokens(), **options), 99)
    np.testing.assert_array_equal(first, _take(_heldout(_tokens(), **options), 99))
    starts = np.concatenate(first)[:, 0]
    assert starts.tolist() == [0, 15, 30, 50, 65, 80]
    part = _take(_heldout(_tokens(), **options, rows=[2, 0]), 99)
    np.testing.assert_array_equal(part, [batch[[2, 0]] for batch in first])
    assert first[0].dtype == np.int32


def test_a_text_without_enough_rows_is_refused():
    with pytest.raises(ValueError, match="no examples to train on"):
        _stream(sequence_length=103)
    with pytest.raises(ValueError, match=r"need 24, there are 20\. Nearest .*eval_batches=6\."):
        _heldout(_tokens(), batch_size=3, num_batches=8)


def test_sizes_and_rows_out_of_range_are_refused():
    with pytest.raises(ValueError, match="sequence_length=0: must be at least 1"):
        _stream(sequence_length=0)
    with pytest.raises(ValueError, match="batch_size=-1: must be at least 1"):
        _stream(batch_size=-1)
    with pytest.raises(ValueError, match=r"train\.seed=-1: must be at least 0"):
        _stream(seed=-1)
    with pytest.raises(ValueError, match="num_batches=0"):
        _heldout(_tokens(), batch_size=3, num_batches=0)
    with pytest.raises(ValueError, match=r"rows=\[4, -1\] .*Valid: 0 to 3"):
        _stream(rows=[0, 4, -1])


def test_unigram_loss_is_the_smoothed_cross_entropy(monkeypatch):
    rng = np.random.default_rng(0)
    train, heldout = rng.integers(0, 6, 50).astype(np.uint16), rng.integers(0, 8, 30)
    probabilities = [(np.sum(train == token) + 1) / (50 + 8) for token in range(8)]
    expected = -np.mean([np.log(probabilities[token]) for token in heldout])
    assert text.unigram_loss(train, heldout, 8) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(text, "BLOCK", 7)
    assert text.unigram_loss(train, heldout, 8) == pytest.approx(expected, rel=1e-12)


def test_unigram_loss_refuses_foreign_tokens():
    with pytest.raises(ValueError, match="train_tokens holds token 9, but vocab_size=9"):
        text.unigram_loss(np.arange(10), np.arange(3), 9)
    with pytest.raises(ValueError, match="heldout_tokens is empty"):
        text.unigram_loss(np.arange(3), np.arange(0), 9)
