"""Texts, templates, tokenizers and files with which strangers would stop a preparation or a run.

Each ends in one line that names its place, within limits of time and memory, or is gone through.
"""

import functools
import itertools
import json
import os
import re
import time

import numpy as np
import pyarrow
import pytest
from byte_tokenizer import byte_tokenizer
from pyarrow import parquet as pyarrow_parquet
from rich.progress import Progress
from tokenizers import Regex, pre_tokenizers

from train.data import rows, stream, text, tokenizer, tokenizer_files
from train.data.guarded import Guarded
from train.data.streamed import Streamed
from train.data.tokenizer import encoding_groups, pieces, train_tokenizer
from train.errors import ConfigError
from train.prepare import conversations
from train.prepare.__main__ import main
from train.prepare.conversations import ChatTemplate, open_template

PLAIN = "{% for message in messages %}{{ '<s>' + message.role + ' ' }}{{ BODY }}{{ eos_token }}"
PLAIN += "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
SAYS = PLAIN.replace("BODY", "message.content")


def write_tokenizer(folder, template=SAYS, pattern=None):
    """A tokenizer of bytes, which may first cut a text at what a pattern finds."""
    folder.mkdir(exist_ok=True)
    made = byte_tokenizer(begins=True)
    if pattern:
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([cut, made.pre_tokenizer])
    made.save(str(folder / "tokenizer.json"))
    fields = {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def said(content, *, role="user"):
    messages = [{"role": role, "content": content}, {"role": "assistant", "content": "yes"}]
    return json.dumps({"messages": messages})


@pytest.fixture
def prepare(tmp_path, capfd):
    """Prepares what a file holds, and returns the only line of an error, or "" without one."""

    def run(option, *lines, **options):
        path = tmp_path / "lines.jsonl"
        path.write_text("\n".join(lines))
        command = [f"--{option}", str(path), "--out", str(tmp_path / "out")]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        status = main(command)
        error = capfd.readouterr().err
        assert (status, error.count("\n")) in ((0, 0), (2, 1)), error
        assert (tmp_path / "out").exists() == (status == 0)
        return error

    return run


# Chat templates.


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 7 // 0 }}", "the chat template refuses it: integer division"),
        ("{{ messages[0].content[0] % 0 }}", "the chat template refuses it: not all arguments"),
        ("{% for n in range(2 * 10**8) %}.{% endfor %}", "refuses it: Range too big"),
        ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "refuses it: maximum recursion"),
        ("{% for a in [1] %}" * 2500 + "{% endfor %}" * 2500, "maximum recursion"),
        ("{{ 'a' * 5000000 }}", "the chat template makes 5000000 characters of it"),
        ("{{ '\ud83d' }}", "it holds half of a character"),
    ],
    ids=lambda value: value[:30],
)
def test_a_template_that_fails_is_an_error(template, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(template, {})(said("a"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'ab' | center(30000000000) }}",
        "{{ '%2000000000s' | format('a') }}",
        "{{ messages | tojson(indent=2 * 10**9) }}",
    ],
)
def test_a_template_that_needs_all_memory_is_an_error(template):
    with pytest.raises(ValueError, match="it needs more than 1024 MiB of memory"):
        open_template(template, {})(said("a"))


def test_a_template_without_end_is_an_error(monkeypatch):
    """Both where Jinja computes what is constant, and later."""
    monkeypatch.setattr(conversations, "SECONDS", 2.0)
    with pytest.raises(ValueError, match="it takes more than 2 s"):
        open_template("{{ [] | slice(100000000000) | sum(start=[]) }}", {})
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = open_template(loops, {})
    with pytest.raises(ValueError, match="it takes more than 2 s"):
        template(said("a"))


def test_a_template_that_fails_is_named_in_one_short_line(tmp_path, prepare):
    folder = write_tokenizer(tmp_path / "model", "{{ raise_exception('no\n' * 10**6) }}")
    error = prepare("conversations", said("a"), said("b"), tokenizer=folder)
    assert re.search(r"lines\.jsonl: line .: the chat template refuses it: no no no", error)
    assert len(error) < 1000
    write_tokenizer(folder, "{% for a in [1] %}" * 2500)
    error = prepare("conversations", said("a"), said("b"), tokenizer=folder)
    assert f"The chat template of {folder} cannot be read: maximum recursion" in error


@pytest.mark.parametrize(
    "template", [7, {"default": "a"}, [None, "x"], [{"name": "default", "template": 3}], [[]]]
)
def test_a_template_that_is_no_text_is_none(tmp_path, prepare, template):
    folder = write_tokenizer(tmp_path / "model", template)
    error = prepare("conversations", said("a"), said("b"), tokenizer=folder)
    assert "holds no chat template" in error
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja cannot be read: 'utf-8' codec"):
        tokenizer_files.template(folder)


# What a template writes for what is no text.

CALLS = PLAIN.replace(
    "BODY",
    "message.content if message.content is not none and message.content is string else "
    "message.tool_calls | tojson if message.tool_calls else message.content[0].text",
)
CALL = {"name": "clock", "arguments": {"zone": None}}


@pytest.mark.parametrize(
    ("body", "content", "what"),
    [
        ("message.content", None, "null"),
        ("message.content | trim", None, "null"),
        ("'' ~ message.content", None, "null"),
        ("'%s' | format(message.content)", None, "null"),
        ("message.thoughts", "yes", "null"),
        ("message.content", [{"type": "text", "text": "yes"}], "a list"),
        ("[message.content] | join", {"text": "yes"}, "an object"),
    ],
)
def test_what_is_no_text_is_not_written_as_python_writes_it(body, content, what):
    template = ChatTemplate(PLAIN.replace("BODY", body), {"eos": "</s>"})
    messages = [{"role": "user", "content": "a", "thoughts": ""}]
    messages += [{"role": "assistant", "content": content, "thoughts": None}]
    message = f"the chat template refuses it: it writes {what}, as Python"
    with pytest.raises(ValueError, match=message):
        template(json.dumps({"messages": messages}))


def test_a_template_that_knows_calls_and_parts_is_followed(tmp_path, prepare):
    folder = write_tokenizer(tmp_path / "model", CALLS)
    user = {"role": "user", "content": [{"type": "text", "text": "when?"}], "tool_calls": None}
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    lines = [json.dumps({"messages": [user, answer]})] * 2
    assert not prepare("conversations", *lines, tokenizer=folder)
    tokens = text.read_tokens(tmp_path / "out" / "train.tokens")[:].tolist()
    written = byte_tokenizer(begins=True).decode(tokens)
    assert written == f"user when?assistant {json.dumps([CALL])}"


# Texts.


@pytest.mark.parametrize("option", ["rows", "conversations"])
def test_half_of_a_character_is_named(tmp_path, prepare, option):
    half = "a\udfffb"
    if option == "rows":
        lines, given = [json.dumps({"text": part}) for part in ("a", half, "c")], {}
        message = "lines.jsonl cannot be read: row 2 holds half of a character"
    else:
        given = {"tokenizer": write_tokenizer(tmp_path / "model")}
        lines, message = [said("a"), said(half), said("c")], "line 2: it holds half of a character"
    assert message in prepare(option, *lines, **given)


def test_long_rows_and_lines_are_named(tmp_path, prepare, monkeypatch):
    folder = write_tokenizer(tmp_path / "model")
    monkeypatch.setattr(rows, "MOST_CHARACTERS", 200)
    lines = [json.dumps({"text": "a" * count}) for count in (150, 300, 20)]
    error = prepare("rows", *lines)
    assert "lines.jsonl cannot be read: a line has more than 200 characters, at row 2." in error
    error = prepare("conversations", *map(said, ("a", "b" * 300)), tokenizer=folder)
    assert "lines.jsonl cannot be read: a line has more than 200 characters" in error
    table = pyarrow.table({"text": ["a", "b" * 201]})
    pyarrow_parquet.write_table(table, tmp_path / "two.parquet")
    (shard,) = rows.find_shards(str(tmp_path / "two.parquet"), "text", option="--rows")
    with pytest.raises(ValueError, match=r"two\.parquet cannot be read: row 2 has 201 characters"):
        list(shard.texts())


def test_long_texts_are_cut_at_line_ends_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "MOST_CHARACTERS", 100)
    some = "ab\n" * 70 + "c" * 250 + "\n\n" + "d" * 99
    cut = list(pieces(some))
    assert "".join(cut) == some
    assert [len(piece) for piece in cut] == [99, 99, 12, 100, 100, 52, 99]
    for group in encoding_groups(["a" * 60, *cut, *"b" * 200], str):
        assert len(group) == 1 or sum(map(len, group)) <= 100
        assert len(group) <= 32


def test_words_without_end_are_learned_from(tmp_path):
    """In time that grows with their number: a word of so many letters would take minutes."""
    letters = np.random.default_rng(0).choice(list("abcdefgh"), 400_000)
    texts = ["".join(letters), " " * 5000 + "end", "of words " * 300]
    with Progress(disable=True) as progress:
        learned = train_tokenizer(texts, vocab_size=280, progress=progress)
    assert learned.get_vocab_size() == 280
    parts = [tokenizer._short_runs(part) for part in texts]
    assert ["".join(part) for part in parts] == texts
    assert list(map(len, parts)) == [400, 5, 1]


# Tokenizers.

BACKTRACKS = "(?:x+x+)+y"


@pytest.mark.parametrize("option", ["rows", "conversations"])
def test_a_tokenizer_that_panics_is_named(tmp_path, prepare, option):
    folder = write_tokenizer(tmp_path / "model", pattern=BACKTRACKS)
    contents = "so", "x" * 50, "it goes"
    to_line = said if option == "conversations" else lambda part: json.dumps({"text": part})
    error = prepare(option, *map(to_line, contents), tokenizer=folder)
    assert "lines.jsonl" in error
    assert "2" in error
    assert "PanicException: Onig: Regex search error: retry-limit-in-match over" in error


def test_a_tokenizer_that_panics_as_a_run_reads_is_named(tmp_path, prepare):
    folder = write_tokenizer(tmp_path / "model", pattern=BACKTRACKS)
    good = [json.dumps({"text": f"text {n}"}) for n in range(40)]
    assert not prepare("rows", *good, tokenizer=folder)
    file = tmp_path / "more.jsonl"
    file.write_text("\n".join([*good, json.dumps({"text": "x" * 60})]))
    shards = rows.find_shards(str(file), "text", option="data.rows")
    data = Streamed(
        shards, tmp_path / "out", sequence_length=8, rows=lambda tokens: text.Windows(tokens, 8)
    )
    message = "more.jsonl row 33 to more.jsonl row 41 cannot be tokenized: PanicException"
    batches = stream.batches(data, batch_size=1, seed=0)
    with pytest.raises(ConfigError, match=message):
        list(itertools.islice(batches, 100))


def test_long_texts_are_streamed_in_pieces_but_for_those_held_out(tmp_path, prepare, monkeypatch):
    monkeypatch.setattr(tokenizer, "MOST_CHARACTERS", 40)
    folder = write_tokenizer(tmp_path / "model")
    texts = [f"{n} {'word ' * 9}\nand {n}\n" for n in range(30)]
    lines = [json.dumps({"text": part}) for part in texts]
    assert not prepare("rows", *lines, tokenizer=folder, **{"heldout-fraction": 0.2})
    windows = []

    def windows_of(tokens):
        windows.append(tokens)
        return text.Windows(tokens, 8)

    shards = rows.find_shards(str(tmp_path / "lines.jsonl"), "text", option="data.rows")
    data = Streamed(shards, tmp_path / "out", sequence_length=8, rows=windows_of)
    batches = stream.batches(data, batch_size=1, seed=0)
    while sum(map(len, windows)) < 2000:
        next(batches)
    batches.close()
    tokens = np.concatenate([windows[0], *(window[1:] for window in windows[1:])])

    def documents(tokens):
        return [part.tobytes() for part in np.split(tokens, np.flatnonzero(tokens == 2) + 1)[:-1]]

    train, heldout = (
        documents(text.read_tokens(tmp_path / "out" / name)[:].astype(np.uint32))
        for name in text.ROLE_FILES
    )
    assert set(documents(tokens.astype(np.uint32))) == set(train)
    assert heldout
    assert not set(heldout) & set(train)


# Parquet.


def test_rows_of_a_damaged_file_are_named(tmp_path):
    file = tmp_path / "two.parquet"
    pyarrow_parquet.write_table(pyarrow.table({"text": ["a" * 50_000, "b"]}), file)
    content = bytearray(file.read_bytes())
    content[4:40] = b"\xff" * 36
    file.write_bytes(content)
    (shard,) = rows.find_shards(str(file), "text", option="--rows")
    with pytest.raises(ValueError, match=r"two\.parquet cannot be read: .* at row 1") as error:
        list(shard.texts())
    assert "\n" not in str(error.value)


# Processes with limits.


def test_what_ends_its_process_is_an_error():
    ends = Guarded(functools.partial, os._exit, num_bytes=1 << 20)
    with pytest.raises(ValueError, match="it ended its process with status 3, as more than 1 MiB"):
        ends(3)
    with pytest.raises(ValueError, match="it ended its process with status 3"):
        ends(0)
    with pytest.raises(ValueError, match=r"it takes more than 0\.1 s"):
        Guarded(functools.partial, time.sleep, seconds=0.1)(100)
