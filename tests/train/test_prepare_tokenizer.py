"""Text that is prepared with a tokenizer that exists already."""

import io
import json

import pytest
from byte_tokenizer import byte_tokenizer
from rich.console import Console

from train.data import text as texts
from train.data.text import load_tokenizer, read_meta, read_tokens
from train.prepare.__main__ import main
from train.prepare.text import PrepareOptions, prepare


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"abc </s> {number} " * 4)
    return folder


@pytest.fixture
def tokenizer(tmp_path):
    """As that of a Llama: every text begins with <s>, and </s> ends a text."""
    made = byte_tokenizer(begins=True)
    made.enable_truncation(5)
    made.enable_padding(length=200)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "model_max_length": 5}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def _prepare(**options):
    return prepare(PrepareOptions(**options), console=Console(file=io.StringIO()))


def test_documents_begin_and_end_as_the_tokenizer_says(tmp_path, text, tokenizer):
    """Nothing is cut at the length of the model, and an end written in a text is ordinary text."""
    out = tmp_path / "out"
    meta = _prepare(out=out, text=text, tokenizer=tokenizer)
    assert meta == read_meta(out)
    assert meta.end_of_text == "</s>"
    assert meta.token_ids == {"bos": 1, "eos": 2, "pad": None}
    assert meta.vocab_size == 259
    tokens = read_tokens(out / "train.tokens")[:].tolist()
    assert tokens.count(1) == tokens.count(2) == meta.train.documents
    ends = [n for n, token in enumerate(tokens) if token == 2]
    assert ends[-1] == len(tokens) - 1
    assert all(tokens[end + 1] == 1 for end in ends[:-1])
    assert len(tokens) == meta.train.bytes + 2 * meta.train.documents
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (tokenizer / name).read_bytes()


def test_the_tokenizer_of_prepared_text_is_used_again(tmp_path, text):
    first, second = tmp_path / "first", tmp_path / "second"
    one = _prepare(out=first, text=text, vocab_size=280)
    two = _prepare(out=second, text=text, tokenizer=first)
    assert two.tokenizer_sha256 == one.tokenizer_sha256
    assert (second / "train.tokens").read_bytes() == (first / "train.tokens").read_bytes()
    assert texts.token_ids(first) == texts.token_ids(second) == {"bos": 0, "eos": 0, "pad": None}
    assert load_tokenizer(second).get_vocab() == load_tokenizer(first).get_vocab()


def test_the_ids_of_the_model_beside_it_come_first(tmp_path, text, tokenizer):
    """As long as the model stops where its documents end."""
    config = tokenizer / "config.json"
    for ids, kept in (([2, 7], [2, 7]), (7, 2)):
        fields = {"bos_token_id": 3, "eos_token_id": ids, "pad_token_id": 0}
        config.write_text(json.dumps(fields))
        meta = _prepare(out=tmp_path / str(kept), text=text, tokenizer=tokenizer)
        assert meta.token_ids == {"bos": 3, "eos": kept, "pad": 0}
        assert meta.end_of_text == "</s>"


def test_another_tokenizer_in_its_place_is_noticed(tmp_path, text, tokenizer):
    options = {"out": tmp_path / "out", "text": text, "tokenizer": tokenizer}
    _prepare(**options)
    file = tokenizer / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": None}))
    with pytest.raises(ValueError, match="prepared with other settings"):
        _prepare(**options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "holds no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is no tokenizer that can be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "{}", "does not say which token ends a text"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "and has '<end>'"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    tmp_path, text, tokenizer, capsys, name, content, message
):
    (tokenizer / name).unlink()
    if content is not None:
        (tokenizer / name).write_text(content)
    out = tmp_path / "out"
    options = ["--out", str(out), "--text", str(text), "--tokenizer", str(tokenizer)]
    assert main(options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_size_without_effect_is_refused(tmp_path, text, tokenizer, capsys):
    options = ["--out", str(tmp_path / "out"), "--text", str(text), "--vocab-size", "300"]
    assert main([*options, "--tokenizer", str(tokenizer)]) == 2
    assert "--vocab-size=300 has no effect with --tokenizer=" in capsys.readouterr().err
