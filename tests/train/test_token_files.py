"""Token files that do not fit, or change during a run: one line each, and no signal."""

import numpy as np
import pytest

from train import checks
from train.data import stream, text
from train.errors import ConfigError


def _messages(config):
    return [failure.message for failure in checks.check(config, writes=False)]


@pytest.mark.parametrize("name", [text.TRAIN_FILE, text.HELDOUT_FILE])
def test_tokens_beyond_the_vocabulary_are_found_before_training(make, folder, name):
    config = make({"train.eval_batches": 1})
    assert _messages(config) == []
    tokens = text.read_tokens(folder / name)[:].copy()
    tokens[len(tokens) // 2] = 5000
    text.write_tokens(folder / name, tokens, vocab_size=1 << 16)
    (message,) = _messages(config)
    assert f"data.path={folder}: {name} holds token 5000" in message
    assert "its tokenizer knows 300 tokens, 0 to 299" in message


def test_a_file_is_read_once_unless_it_changes(folder, monkeypatch):
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


def test_a_file_cut_short_during_a_run_ends_in_one_line(folder):
    path = folder / text.TRAIN_FILE
    windows = text.Windows(text.read_tokens(path), 16)
    batches = stream.batches(windows, batch_size=8, seed=0)
    next(batches)
    with path.open("r+b") as file:
        file.truncate(30)
    with pytest.raises(ConfigError) as error:
        [next(batches) for _ in range(20)]
    (failure,) = error.value.failures
    assert f"data.path={folder}: train.tokens can no longer be read" in failure.message
    assert "continue with --resume" in failure.message


def test_a_file_deleted_during_a_run_is_read_to_the_end(folder):
    path = folder / text.TRAIN_FILE
    tokens = text.read_tokens(path)
    before = tokens[:]
    path.unlink()
    np.testing.assert_array_equal(tokens[:], before)
    np.testing.assert_array_equal(tokens[100:200], before[100:200])
