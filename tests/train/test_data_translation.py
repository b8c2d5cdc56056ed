"""Sentence pairs: cleaning, no leaks, padding, BLEU, and bad catalogues."""

import io
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import polib
import pytest
import sacrebleu
from rich.console import Console

from train.data import translation
from train.data.translation import Pair
from train.prepare import translation as prepare_translation
from train.prepare.translation import TranslationOptions, collect_pairs, prepare, split_pairs

HEADER = """
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=3; plural=(n==1 ? 0 : n<5 ? 1 : 2);\\n"

"""


@pytest.fixture
def catalogue(tmp_path):
    path = tmp_path / "app" / "locale" / "xx" / "LC_MESSAGES" / "app.po"
    path.parent.mkdir(parents=True)
    path.write_text(HEADER, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """JupyterLab's messages in three languages, and what was reported."""
    out = tmp_path_factory.mktemp("pairs") / "out"
    report = io.StringIO()
    options = TranslationOptions(out=out, locales=("de", "ja", "zh"), vocab_size=600)
    return prepare(options, console=Console(file=report)), out, report.getvalue()


@pytest.fixture(scope="module")
def sides(prepared):
    return translation.load(prepared[1])


def _read(path, body):
    path.write_text(HEADER + body, encoding="utf-8")
    skipped = Counter()
    pairs = list(prepare_translation.read_catalogue(path, "xx", skipped))
    return [(pair.source, pair.target) for pair in pairs], skipped


def test_messages_are_cleaned(catalogue):
    pairs, skipped = _read(
        catalogue,
        """
        # a comment
        #: file.py:3
        msgctxt "verb"
        msgid ""
        "Two\\n"
        "  lines"
        msgstr "Zwei \\n\\"Zeilen\\""

        #, fuzzy
        msgid "unsure"
        msgstr "unsicher"

        #~ msgid "old"
        #~ msgstr "alt"

        msgid "open"
        msgstr " "

        msgid "%(n)s: 50 %%"
        msgstr "50 %%, %(n)s"

        #, python-format
        msgid "Delete %(what)s of %(who)s?"
        msgstr "%(what)s von %(who)s löschen?"

        msgid "Lost %s"
        msgstr "Verloren"
        """,
    )
    assert pairs == [("Two lines", 'Zwei "Zeilen"'), ("Delete {0} of {1}?", "{0} von {1} löschen?")]
    reasons = "fuzzy", "obsolete", "not translated", "no letters"
    assert skipped == dict.fromkeys((*reasons, "other placeholders in the translation"), 1)


def test_singular_and_plural_are_two_pairs_with_the_forms_of_the_rule(catalogue):
    body = 'msgid "one file"\nmsgid_plural "%(n)d files"\n'
    forms = 'msgstr[0] "jeden"\nmsgstr[1] "%(n)d pliki"\nmsgstr[2] "%(n)d plików"\n'
    pairs, skipped = _read(catalogue, body + forms)
    assert pairs == [("one file", "jeden"), ("{0} files", "{0} plików")]
    assert not skipped
    with pytest.raises(ValueError, match=r"rule in its header asks for msgstr\[2\].*'one file'"):
        _read(catalogue, body + forms[: forms.index("msgstr[2]")])
    catalogue.write_text(HEADER.replace("(n==1", "(n=") + body + forms)
    with pytest.raises(ValueError, match=r"Plural-Forms=.* is malformed"):
        list(prepare_translation.read_catalogue(catalogue, "xx", Counter()))


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("%s of %s", "%s von %s", ("{0} of {1}", "{0} von {1}")),
        ("{name} and {other}", "{other} und {name}", ("{0} and {1}", "{1} und {0}")),
        ("%(a)s, %(a)s", "%(a)s", ("{0}, {0}", "{0}")),
        ("100%% of %d", "%d, 100%%", ("100% of {0}", "{0}, 100%")),
        ("%%s is %.2f", "%%s ist %.2f", ("%s is {0}", "%s ist {0}")),
        ("50% off", "50% weg", ("50% off", "50% weg")),
        ("%1 by %2", "%2: %1", ("{0} by {1}", "{1}: {0}")),
    ],
)
def test_placeholders_are_numbered_by_the_source(source, target, expected):
    assert prepare_translation.replace_placeholders(source, target) == expected


def test_a_source_keeps_its_most_frequent_translation():
    targets = [("May", "Mai"), ("May", "darf"), ("May", "darf"), ("Go", "Los"), ("Go", "Geh")]
    pairs = [Pair("de", *pair) for pair in targets] + [Pair("nl", "May", "mei")]
    skipped = Counter()
    kept = prepare_translation.most_frequent(pairs, skipped)
    assert kept == [Pair("de", "May", "darf"), Pair("de", "Go", "Los"), Pair("nl", "May", "mei")]
    assert skipped == {"the same pair again": 1, "another translation of the same source": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER + 'msgid "a"\nmsgstr "b\n', r'malformed at line 8: .*msgstr "b'),
        (HEADER + 'msgid "a"\n', "malformed at line 8: it ends after msgid"),
        (HEADER + 'msgid "a"\nmsgs', "malformed at line 8"),
        ("hello world\n", "malformed at line 1: expected msgid"),
        (HEADER + 'msgid "a"\nmsgstr "b"\nmsgstr "c"\n', r"cannot be read: .*line 9"),
        (HEADER + 'msgid "a"\nmsgstr "b" c"\n', "malformed at line 8"),
        (b"\x95\x04\x12\xde\x00\x00", "not a catalogue in UTF-8"),
    ],
)
def test_a_malformed_catalogue_names_the_file_and_the_line(catalogue, content, message, tmp_path):
    catalogue.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = TranslationOptions(out=tmp_path / "out", catalogues=tmp_path, locales=("xx",))
    with pytest.raises(ValueError, match=message) as error:
        prepare(options)
    assert str(catalogue) in str(error.value)
    assert not options.out.exists()


def test_a_compiled_catalogue_is_read_where_its_source_is_not_there(tmp_path):
    body = 'msgid "one file"\nmsgid_plural "%(n)d files"\nmsgstr[0] "eins"\nmsgstr[1] "%(n)d"\n'
    path = tmp_path / "xx_YY" / "LC_MESSAGES" / "app.po"
    path.parent.mkdir(parents=True)
    path.write_text(HEADER + body + 'msgstr[2] "%(n)d viele"\n', encoding="utf-8")
    compiled = path.with_suffix(".mo")
    polib.pofile(str(path)).save_as_mofile(str(compiled))
    options = TranslationOptions(out=tmp_path / "out", catalogues=tmp_path, locales=("xx",))
    pairs, _ = collect_pairs(options)
    assert [pair.target for pair in pairs] == ["eins", "{0} viele"]
    path.unlink()
    assert collect_pairs(options)[0] == pairs
    compiled.write_bytes(compiled.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"app\.mo cannot be read: .*corrupt"):
        collect_pairs(options)


def test_missing_locales_and_folders_name_the_nearest(catalogue, tmp_path):
    def refused(message, **options):
        options = {"out": tmp_path / "out", "catalogues": tmp_path, "locales": ("xx",)} | options
        with pytest.raises(ValueError, match=message) as error:
            prepare(TranslationOptions(**options))
        return str(error.value)

    nearest = r"--locales=ko_KO: .*Nearest valid: ko_KR\. Or install one: pip"
    refused(nearest, catalogues=None, locales=("ko_KO", "de"))
    refused(r"Nearest valid: xx\.", locales=("qq",))
    words = "".join(f'msgid "word {name}"\nmsgstr "Wort {name}"\n' for name in "abcdefghij")
    catalogue.write_text(HEADER + words)
    none_held_out = "10 pairs to train on and 0 held out are left"
    refused(none_held_out, heldout_fraction=1e-9)
    catalogue.unlink()
    refused(r"holds no LOCALE/LC_MESSAGES/\*\.po")
    wrong = {"catalogues": tmp_path / "none", "locales": ("de", "de"), "vocab_size": 260}
    error = refused("none is not a folder", **wrong, max_length=3, heldout_fraction=0)
    for part in ("none twice", "--vocab-size=260", "valid: 261", "--max-length=3", "fraction=0"):
        assert part in error


def test_every_pair_is_on_one_side_or_counted(prepared, sides):
    meta, out, report = prepared
    keys = [{prepare_translation.source_key(pair.source) for pair in side.pairs} for side in sides]
    assert not keys[0] & keys[1]
    train, heldout = (side.pairs for side in sides)
    assert [meta.train, meta.heldout] == [len(train), len(heldout)]
    assert {pair.locale for pair in heldout} == {"de", "ja", "zh"}
    assert len(heldout) / (len(train) + len(heldout)) == pytest.approx(0.1, abs=0.04)
    options = TranslationOptions(out=out, locales=("de", "ja", "zh"), vocab_size=600)
    pairs, skipped = collect_pairs(options)
    assert {*train, *heldout} <= {*pairs}
    too_long = len(pairs) - len(train) - len(heldout)
    assert f"(longer than --max-length): {too_long}" in report
    for reason, count in skipped.items():
        assert f"messages left out ({reason}): {count}" in report


def test_near_copies_of_a_source_share_a_side():
    sources = ["Delete?", "delete", "Delete {0}", "2 deletes"]
    assert len({prepare_translation.source_key(source) for source in sources}) == 1
    pairs = [Pair("de", f"{mark}{word}", "") for word in "abcdefghijkl" for mark in ("", "{0} ")]
    for side in split_pairs(pairs, heldout_fraction=0.5):
        assert len(side) % 2 == 0


def test_batches_are_padded_and_decode_to_the_pairs(prepared, sides):
    meta, out, _ = prepared
    tokenizer = translation.load_tokenizer(out)
    _, heldout = sides
    batch = heldout.read(np.arange(len(heldout)), np.zeros((len(heldout), 3)))
    assert batch["source"].shape == (len(heldout), meta.source_length)
    assert batch["target"].shape == (len(heldout), meta.target_length + 1)
    for name, leaf in batch.items():
        assert leaf.dtype == np.int32
        assert 0 <= leaf.min() <= leaf.max() < meta.vocab_size
        # Padding begins right after the end, and is nowhere else.
        ends = np.argmax(leaf == translation.END, axis=1)
        np.testing.assert_array_equal(leaf != 0, np.arange(leaf.shape[1]) <= ends[:, None], name)
    assert (batch["target"][:, 0] == translation.BEGIN).all()
    for row, pair in enumerate(heldout.pairs):
        assert translation.decode(tokenizer, batch["target"][row].tolist()) == pair.target
        language, *source = batch["source"][row].tolist()
        assert tokenizer.id_to_token(language) == f"<2{pair.locale}>"
        assert translation.decode(tokenizer, source) == pair.source


def test_lengths_can_be_longer_but_not_shorter(prepared, sides):
    meta, out, _ = prepared
    longer = meta.source_length + 9
    train, _ = translation.load(out, source_length=longer)
    assert train.read(np.array([0]), np.zeros((1, 3)))["source"].shape == (1, longer)
    batches = [side.read(np.arange(len(side)), np.zeros((len(side), 3))) for side in sides]
    needed = max(int((batch["target"] != 0).sum(axis=1).max()) for batch in batches) - 1
    assert needed == meta.target_length
    with pytest.raises(ValueError, match=r"target_length=5 is too short: the longest needs \d+"):
        translation.load(out, target_length=5)


def test_special_tokens_inside_a_text_are_text(prepared):
    tokenizer = translation.load_tokenizer(prepared[1])
    (source,) = translation.encode_sources(tokenizer, ["<pad></s><2de>"], locales=["ja"])
    assert translation.PAD not in source
    assert source.index(translation.END) == len(source) - 1
    assert tokenizer.token_to_id("<2de>") not in source
    assert translation.decode(tokenizer, source) == "<pad></s><2de>"


def test_tokenizer_learns_nothing_from_heldout_pairs(catalogue, tmp_path):
    words = [f"{first}{second}" for first in "abcdefgh" for second in "klmnopqr"]

    def write(heldout_target):
        pairs = [Pair("xx", word, word.upper()) for word in words]
        _, heldout = split_pairs(pairs, heldout_fraction=0.2)
        targets = {pair.source: heldout_target for pair in heldout}
        lines = (f'msgid "{w}"\nmsgstr "{targets.get(w, w.upper())}"\n' for w in words)
        catalogue.write_text(HEADER + "".join(lines))
        options = {"out": tmp_path / "out", "catalogues": tmp_path, "locales": ("xx",)}
        return prepare(TranslationOptions(**options, heldout_fraction=0.2, force=True))

    first, second = write("zzzz"), write("qqqq qqqq")
    assert first.tokenizer_sha256 == second.tokenizer_sha256
    assert first.pairs_sha256["train.jsonl"] == second.pairs_sha256["train.jsonl"]
    assert first.messages_sha256 != second.messages_sha256


def test_changed_pairs_are_noticed(prepared, tmp_path):
    out = shutil.copytree(prepared[1], tmp_path / "out")
    path = out / "heldout.jsonl"
    path.write_text(path.read_text("utf-8").partition("\n")[2], "utf-8")
    with pytest.raises(ValueError, match=r"heldout\.jsonl is not the file this data was made"):
        translation.load(out)


def test_bleu_is_sacrebleus_by_locale():
    pairs = [
        Pair("de", "The cat sat on the mat", "Die Katze saß auf der Matte"),
        Pair("zh_Hans", "page not found", "未找到所请求的页面"),
        Pair("de", "Go home now, please", "Geh jetzt bitte nach Hause"),
    ]
    perfect = translation.bleu([pair.target for pair in pairs], pairs)
    assert perfect == pytest.approx({"de": 100, "zh_Hans": 100})
    hypotheses = ["Die Katze saß auf dem Boden", "未找到页面", "Geh jetzt bitte heim"]
    german = sacrebleu.corpus_bleu(hypotheses[::2], [[pair.target for pair in pairs[::2]]])
    scores = translation.bleu(hypotheses, pairs)
    assert scores["de"] == pytest.approx(german.score)
    assert 0 < scores["zh_Hans"] < 100
    with pytest.raises(ValueError, match="2 hypotheses for 3 pairs"):
        translation.bleu(hypotheses[:2], pairs)


def test_copying_placeholders_is_no_phrase():
    pairs = [Pair("de", "{0} {1} of all of these", "{0} {1} von allen diesen")]
    # Two of six words agree, and one pair of words: no phrase of four.
    assert translation.copy_bleu(pairs)["de"] < 35
    braces = [Pair("de", "A { 0 } { 1 } of", "A { 0 } { 1 } von")]
    assert translation.copy_bleu(braces)["de"] > 70


def test_a_missing_package_is_named(monkeypatch):
    for module, call in (
        ("polib", lambda: collect_pairs(TranslationOptions(out=Path("unused")))),
        ("sacrebleu", lambda: translation.bleu(["a"], [Pair("de", "a", "b")])),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ValueError, match=rf"needs {module}, .*-e '\.\[translation\]'"):
            call()
