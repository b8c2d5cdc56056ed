"""Conversations: what the template writes, what is predicted, and its loss in packed rows."""

import json
import re

import jax
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer

from jaxpipe import unpipelined
from models import gpt
from train.config import Config
from train.data import folder, text, tokenizer_files
from train.data.packing import Packed
from train.prepare.__main__ import main
from train.prepare.conversations import ChatTemplate
from train.prepare.text import PrepareOptions, prepare
from train.tasks.gpt import GPT

CHATML = """\
{% for message in messages %}
    {%- if message.role == 'critic' %}{{ raise_exception('a critic speaks') }}{% endif %}
    {{- '<s>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}{{ message.content + eos_token }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}
"""
FORGETS = """\
{%- for message in messages %}
    {{- '<s>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and not loop.last %}
        {{- message.content.split('!')[-1] }}
    {%- else %}{{ message.content }}{% endif %}
    {{- '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}
"""
CONVERSATIONS = [
    [("system", "be brief"), ("user", "how are you?"), ("assistant", "fine")],
    [
        *(("user", "</s> ends"), ("assistant", "hm!it does")),
        *(("user", "ö\u2028?"), ("assistant", "so!yes")),
    ],
    [("user", "two"), ("assistant", "2"), ("user", "and?")],
]


def _folder(tmp_path, template=CHATML):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    byte_tokenizer(begins=True).save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def _file(tmp_path, conversations=CONVERSATIONS):
    path = tmp_path / "chat.jsonl"
    with path.open("w") as file:
        for messages in conversations:
            said = [{"role": role, "content": content} for role, content in messages]
            file.write(json.dumps({"messages": said}) + "\n")
    return path


def _prepare(tmp_path, template=CHATML):
    out = tmp_path / "out"
    options = {"tokenizer": _folder(tmp_path, template), "conversations": _file(tmp_path)}
    prepare(PrepareOptions(out=out, heldout_fraction=0.1, **options))
    return out


def _documents(out):
    """The documents of both sides: text, and what of it is predicted."""
    tokenizer, found = byte_tokenizer(begins=True), []
    for name in text.ROLE_FILES:
        tokens, roles = text.read_tokens(out / name)[:], text.read_roles(out, name)[:]
        starts = np.flatnonzero(roles == folder.BEGIN)
        for part in np.split(np.arange(len(tokens)), starts[1:]):
            whole = tokenizer.decode(tokens[part].tolist(), skip_special_tokens=False)
            answers = tokens[part][roles[part] == folder.ANSWER].tolist()
            found.append((whole, tokenizer.decode(answers, skip_special_tokens=False)))
    return sorted(found)


def test_only_the_answers_are_predicted(tmp_path):
    out = _prepare(tmp_path)
    expected = [
        (
            "".join(f"<s>{role}\n{content}</s>\n" for role, content in messages),
            "".join(f"{content}</s>\n" for role, content in messages if role == "assistant"),
        )
        for messages in CONVERSATIONS
    ]
    assert _documents(out) == sorted(expected)
    meta = text.read_meta(out)
    assert (meta.train.documents, meta.heldout.documents) == (2, 1)
    # What the template writes as a special token is one.
    assert sum((text.read_tokens(out / name)[:] == 1).sum() for name in text.ROLE_FILES) == 10


def test_an_answer_that_is_written_otherwise_later_is_a_document_of_its_own(tmp_path):
    first = "<s>user\n</s> ends</s><s>assistant\n"
    second = f"{first}it does</s><s>user\nö\u2028?</s><s>assistant\n"
    found = _documents(_prepare(tmp_path, FORGETS))
    assert len(found) == 4
    assert (f"{first}hm!it does</s>", "hm!it does</s>") in found
    assert (f"{second}so!yes</s>", "so!yes</s>") in found


def test_packed_rows_give_the_loss_of_the_answers(tmp_path):
    out = _prepare(tmp_path)
    config = gpt.GPTConfig(
        vocab_size=259, sequence_length=160, num_layers=2, width=16, num_heads=2,
        positions="learned",
    )  # fmt: skip
    settings = {
        "data": {"path": str(out), "documents": "packed"},
        "model": {"vocab_size": 259, "sequence_length": 160},
    }
    examples, _ = GPT(Config.model_validate(settings)).load()
    assert isinstance(examples, Packed)
    rows = examples.read(np.arange(len(examples)), np.zeros((len(examples), 3)))
    params = jax.jit(gpt.init, static_argnums=0)(config, jax.random.key(0))
    found = jax.jit(unpipelined.loss, static_argnums=0)(gpt.model(config), params, rows)

    tokens = text.read_tokens(out / "train.tokens")[:]
    roles = text.read_roles(out, "train.tokens")[:]
    scores_of = jax.jit(lambda tokens: jax.nn.log_softmax(gpt.logits(config, params, tokens)[0]))
    losses = []
    for part in np.split(np.arange(len(tokens)), np.flatnonzero(roles == folder.BEGIN)[1:]):
        padded = np.pad(tokens[part], (0, config.sequence_length - len(part)))
        scores = np.asarray(scores_of(np.int32(padded)[None]))
        answers = np.flatnonzero(roles[part] == folder.ANSWER)
        losses += [-float(scores[n - 1, tokens[part][n]]) for n in answers]
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize(
    ("conversations", "template", "message"),
    [
        ([[("user", "a")]] * 2, CHATML, 'line [12]: no message has the role "assistant"'),
        ([[("critic", "a"), ("assistant", "b")]] * 2, CHATML, "refuses it: a critic speaks"),
        ([[("user", None), ("assistant", "b")]] * 2, CHATML, "refuses it: unsupported operand"),
        (CONVERSATIONS[:1], CHATML, "holds 1 conversations. At least 2 are needed"),
        ("{", CHATML, 'line 4: every line must be {"messages": .{"role": "us'),
        (CONVERSATIONS, "{% if %}", "cannot be read"),
        (
            CONVERSATIONS,
            None,
            "no chat template: neither chat_template.jinja, nor a chat_template in",
        ),
        (CONVERSATIONS, "{{ messages|length }}", "does not continue with message"),
    ],
)
def test_conversations_that_give_nothing_to_learn_are_named(
    tmp_path, capsys, conversations, template, message
):
    path = _file(tmp_path, CONVERSATIONS if isinstance(conversations, str) else conversations)
    if isinstance(conversations, str):
        path.write_text(path.read_text() + conversations)
    options = "--tokenizer", _folder(tmp_path, template), "--conversations", path
    assert main([*map(str, options), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


@pytest.mark.parametrize("line", ["[]", '{"messages": 3}', '{"messages": [{"content": "a"}]}'])
def test_a_line_is_a_conversation(line):
    with pytest.raises(ValueError, match="every line must be"):
        ChatTemplate(CHATML, {"eos": "</s>"})(line)


def test_a_template_has_a_file_or_a_name(tmp_path):
    folder = _folder(
        tmp_path, [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    )
    assert tokenizer_files.template(folder) == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert tokenizer_files.template(folder) == "file"


def test_rows_that_predict_everything_are_refused(tmp_path):
    out = _prepare(tmp_path)
    fields = {"data": {"path": str(out)}, "model": {"vocab_size": 259, "sequence_length": 16}}
    fields["train"] = {"batch_size": 1, "eval_batches": 1}
    messages = [failure.message for failure in GPT(Config.model_validate(fields)).data_failures()]
    assert len(messages) == 2
    assert all("Nearest valid: data.documents=packed." in message for message in messages)
    fields["data"] |= {"documents": "packed"}
    assert not list(GPT(Config.model_validate(fields)).data_failures())
    # A copy that lost some of its roles must not train on prompts.
    (out / "train.roles").write_bytes((out / "heldout.roles").read_bytes())
    (failure,) = GPT(Config.model_validate(fields)).data_failures()
    assert "they are not from one preparation" in failure.message
