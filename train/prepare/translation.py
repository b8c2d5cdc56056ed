"""Sentence pairs to translate: ``python -m train.prepare translation --out data/jupyterlab-de``.

The pairs are the messages of JupyterLab's user interface, whose language packs hold catalogues and
nothing else, or those of any folder of catalogues. The result depends only on the catalogues and
the options.
"""

from __future__ import annotations

import dataclasses
import difflib
import gettext
import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from train.data.folder import META_FILE, TOKENIZER_FILE, require
from train.data.tokenizer import train_tokenizer
from train.data.translation import (
    HELDOUT_FILE,
    KIND,
    SPECIAL_TOKENS,
    TRAIN_FILE,
    Pair,
    TranslationMeta,
    encode_sources,
    encode_targets,
    language_token,
    read_meta,
)
from train.prepare import folders

_FILES = frozenset({TRAIN_FILE, HELDOUT_FILE, TOKENIZER_FILE, META_FILE})
_NUM_BYTES = 256
_PACKS = "jupyterlab.languagepack"
"""The entry points of the language packs of JupyterLab."""
# A number for which every language of the catalogues uses the plural.
_MANY = 5
_STATEMENT = re.compile(r'(msgctxt|msgid|msgid_plural|msgstr(?:\[\d+\])?)?\s*"(?:[^"\\]|\\.)*"\s*')
# %% is no placeholder, and is matched so that its second sign does not begin one.
_PLACEHOLDER = re.compile(
    r"%%|%\(\w+\)[#0 +-]*[\d.]*[a-zA-Z]|%[#0+-]*[\d.]*[srdiuxXfFgGeEc]|%\d+|\{\w*\}"
)
_NAMED = re.compile(r"%\(|%\d+$|\{\w")
_PLURAL_RULE = re.compile(r"plural\s*=\s*([^;]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationOptions(folders.DataOptions):
    """Turns message catalogues into sentence pairs and a tokenizer that both languages share."""

    locales: tuple[str, ...] = ("de",)
    """Languages to translate to, as the catalogues' folders are named; de also finds de_DE."""
    catalogues: Path | None = None
    """Folder with LOCALE/LC_MESSAGES/*.po (or *.mo) somewhere below it; by default those of the
    installed language packs of JupyterLab."""
    vocab_size: int = 2048
    """Tokens the tokenizer may learn, at least 259 plus one per locale."""
    max_length: int = 64
    """Most tokens of a source and of a target, special ones included; longer ones are left out."""
    heldout_fraction: float = 0.1
    """Share of the sources that is held out for evaluation, between 0 and 1."""

    def problems(self) -> list[str]:
        problems = super().problems()
        smallest = _NUM_BYTES + len(SPECIAL_TOKENS) + len(self.locales)
        if self.vocab_size < smallest:
            problems.append(
                f"--vocab-size={self.vocab_size} is too small: {_NUM_BYTES} bytes, "
                f"{', '.join(SPECIAL_TOKENS)} and every locale need one token each. "
                f"Nearest valid: {smallest}."
            )
        if self.max_length < 4:
            problems.append(
                f"--max-length={self.max_length} leaves no room for text beside two special "
                "tokens. Nearest valid: 4."
            )
        if not self.locales or len(set(self.locales)) < len(self.locales):
            problems.append(
                f"--locales={' '.join(self.locales)} must name at least one language, none twice."
            )
        if self.catalogues is not None and not self.catalogues.is_dir():
            problems.append(f"--catalogues={self.catalogues} is not a folder.")
        return problems

    def settings(self) -> dict[str, Any]:
        """Returns the options that decide the content, as ``meta.json`` stores them."""
        folder = self.catalogues
        return {
            "catalogues": "jupyterlab" if folder is None else str(folder.resolve()),
            "locales": list(self.locales),
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "heldout_fraction": self.heldout_fraction,
        }


def prepare(options: TranslationOptions, *, console: Console | None = None) -> TranslationMeta:
    """Writes the data folder, unless it is there and whole: see `folders.prepare`."""
    # Reading the meta compares every digest.
    return folders.prepare(options, _write, files=_FILES, read_meta=read_meta, console=console)


def _write(options: TranslationOptions, console: Console) -> TranslationMeta:
    pairs, skipped = collect_pairs(options)
    digest = folders.digest(map(str, map(dataclasses.astuple, pairs)))
    train, heldout = split_pairs(pairs, heldout_fraction=options.heldout_fraction)
    with folders.progress_bar(console) as progress:
        tokenizer = train_tokenizer(
            # The tokenizer learns from a source once, however many languages it is translated to.
            [*dict.fromkeys(pair.source for pair in train), *(pair.target for pair in train)],
            vocab_size=options.vocab_size,
            progress=progress,
            special_tokens=[*SPECIAL_TOKENS, *map(language_token, options.locales)],
            add_prefix_space=True,
        )
    train, heldout = (
        _short_pairs(tokenizer, side, options.max_length, skipped) for side in (train, heldout)
    )
    if not (train and heldout):
        raise ValueError(
            f"{len(train)} pairs to train on and {len(heldout)} held out are left: both need one. "
            f"Raise --max-length={options.max_length}, change --heldout-fraction="
            f"{options.heldout_fraction:g}, or add --locales."
        )
    for reason, count in sorted((+skipped).items()):
        folders.say(console, f"messages left out ({reason}): {count}")
    meta = _write_pairs(options, tokenizer, train, heldout, messages_sha256=digest)
    folders.say(
        console,
        f"{options.out}: {meta.train} train and {meta.heldout} held-out pairs from English to "
        f"{', '.join(options.locales)}, vocabulary {meta.vocab_size}, up to {meta.source_length} "
        f"source and {meta.target_length} target tokens",
    )
    return meta


def collect_pairs(options: TranslationOptions) -> tuple[list[Pair], Counter[str]]:
    """Reads the pairs of all locales, cleaned, one translation of each source per locale.

    Returns:
      The pairs in the order of the locales and catalogues, and how many messages were left out for
      which reason.

    Raises:
      ValueError: a locale has no catalogue, a catalogue is malformed, or a package is missing.
    """
    if options.catalogues is None:
        roots = [Path(pack.load().__file__).parent for pack in entry_points(group=_PACKS)]
    else:
        roots = [options.catalogues]
    known = by_locale(roots)
    names = {locale: _folder_name(locale, known) for locale in options.locales}
    if missing := [locale for locale, name in names.items() if name not in known]:
        raise ValueError(_no_catalogue(options, missing, known))
    skipped: Counter[str] = Counter()
    pairs = [
        pair
        for locale, name in names.items()
        for path in known[name]
        for pair in read_catalogue(path, locale, skipped)
    ]
    return most_frequent(pairs, skipped), skipped


def split_pairs(pairs: Sequence[Pair], *, heldout_fraction: float) -> tuple[list[Pair], list[Pair]]:
    """Splits pairs by a hash of their source, so that no source is on both sides.

    Sources that differ only in case, punctuation, placeholders or a plural's ending count as one,
    in all languages; a source keeps its side when others are added.

    Returns:
      The pairs to train on and the held-out ones.
    """
    train: list[Pair] = []
    heldout: list[Pair] = []
    for pair in pairs:
        is_heldout = folders.is_heldout(source_key(pair.source), heldout_fraction)
        (heldout if is_heldout else train).append(pair)
    return train, heldout


def source_key(source: str) -> str:
    """Reduces a source to the words that distinguish it from others, without endings in -s.

    Example:
      >>> source_key("{0} selected errors:") == source_key("Selected error")
      True
    """
    words = re.findall(r"[^\W\d_]+", source.casefold())
    return " ".join(word.removesuffix("s") for word in words)


def _short_pairs(
    tokenizer: Tokenizer, pairs: Sequence[Pair], max_length: int, skipped: Counter[str]
) -> list[Pair]:
    sources, targets = _encode(tokenizer, pairs)
    short = [
        pair
        for pair, source, target in zip(pairs, sources, targets, strict=True)
        if max(len(source), len(target)) <= max_length
    ]
    skipped["longer than --max-length"] += len(pairs) - len(short)
    return short


def _encode(tokenizer: Tokenizer, pairs: Sequence[Pair]) -> tuple[list[list[int]], list[list[int]]]:
    locales = [pair.locale for pair in pairs]
    sources = encode_sources(tokenizer, [pair.source for pair in pairs], locales=locales)
    return sources, encode_targets(tokenizer, [pair.target for pair in pairs])


def _write_pairs(
    options: TranslationOptions,
    tokenizer: Tokenizer,
    train: Sequence[Pair],
    heldout: Sequence[Pair],
    *,
    messages_sha256: str,
) -> TranslationMeta:
    sources, targets = _encode(tokenizer, [*train, *heldout])
    texts = {
        TOKENIZER_FILE: tokenizer.to_str(),
        TRAIN_FILE: _lines(train),
        HELDOUT_FILE: _lines(heldout),
    }
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    meta = TranslationMeta(
        vocab_size=tokenizer.get_vocab_size(),
        source_length=max(map(len, sources)),
        target_length=max(map(len, targets)) - 1,  # <s> is not predicted
        train=len(train),
        heldout=len(heldout),
        tokenizer_sha256=digests.pop(TOKENIZER_FILE),
        pairs_sha256=digests,
        messages_sha256=messages_sha256,
        settings=options.settings(),
    )
    with folders.appearing(options.out) as folder:
        for name, text in texts.items():
            folders.write_text(folder / name, text)
        folders.write_meta(folder, KIND, meta)
    return meta


def _lines(pairs: Sequence[Pair]) -> str:
    fields = map(dataclasses.asdict, pairs)
    return "".join(json.dumps(field, ensure_ascii=False) + "\n" for field in fields)


def _folder_name(locale: str, known: Collection[str]) -> str:
    """Names the folder of a locale: its own, or that of its only territory, as de_DE of de."""
    territories = [name for name in known if name.startswith(f"{locale}_")]
    return territories[0] if locale not in known and len(territories) == 1 else locale


def _no_catalogue(
    options: TranslationOptions, missing: Sequence[str], known: Mapping[str, Sequence[Path]]
) -> str:
    where, remedy = f"below {options.catalogues}", ""
    if options.catalogues is None:
        where = "in JupyterLab's installed language packs"
        remedy = " Or install one: pip install jupyterlab-language-pack-LANGUAGE-TERRITORY."
    elif not known:
        return f"--catalogues={options.catalogues} holds no LOCALE/LC_MESSAGES/*.po at any depth."
    near = [name for lacking in missing for name in difflib.get_close_matches(lacking, known, n=2)]
    nearest = near or sorted(known, key=lambda name: -len(known[name]))[:8]
    return (
        f"--locales={' '.join(missing)}: there is no catalogue of it {where}. "
        f"Nearest valid: {', '.join(dict.fromkeys(nearest)) or 'none'}.{remedy}"
    )


def by_locale(roots: Iterable[Path]) -> dict[str, list[Path]]:
    """Finds the catalogues ``LOCALE/LC_MESSAGES/*`` at any depth of some folders."""
    catalogues: dict[str, list[Path]] = {}
    for root in roots:
        for path in sorted(root.glob("**/LC_MESSAGES/*.[mp]o")):
            if path.suffix == ".po" or not path.with_suffix(".po").exists():
                catalogues.setdefault(path.parent.parent.name, []).append(path)
    return catalogues


def read_catalogue(path: Path, locale: str, skipped: Counter[str]) -> Iterator[Pair]:
    """Reads the usable pairs of a catalogue, placeholders replaced.

    Args:
      skipped: counts the messages left out, by reason.

    Returns:
      Pairs in the order of the file. Singular and plural of a message are two pairs.

    Raises:
      ValueError: the file cannot be read or is malformed, or polib is not installed.
    """
    polib = require("polib", extra="translation", needed_by="Reading message catalogues")
    try:
        if path.suffix == ".po":
            _check_statements(path, path.read_text("utf-8"))
            catalogue = polib.pofile(str(path), encoding="utf-8")
        else:
            with path.open("rb") as file:
                gettext.GNUTranslations(file)  # polib does not notice that a file was cut short
            catalogue = polib.mofile(str(path), encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a catalogue in UTF-8: {error}.") from error
    except (OSError, struct.error) as error:  # includes polib's own errors, with the line
        raise ValueError(f"{path} cannot be read: {error}.") from error
    for entry in catalogue:
        if entry.obsolete or "fuzzy" in entry.flags:
            skipped["obsolete" if entry.obsolete else "fuzzy"] += 1
            continue
        for source, target in _forms(path, catalogue, entry):
            if reason := _problem(source, target):
                skipped[reason] += 1
                continue
            yield Pair(locale, *replace_placeholders(source, target))


def replace_placeholders(source: str, target: str) -> tuple[str, str]:
    """Replaces placeholders by ``{0}``, ``{1}``, ... in the order of the source.

    Example:
      >>> replace_placeholders("%(n)d of %(all)s", "von %(all)s\\n%(n)d, 100 %%")
      ('{0} of {1}', 'von {1} {0}, 100 %')
    """
    order = list(dict.fromkeys(_named(source)))

    def replace(text: str) -> str:
        names = iter(_named(text))
        numbered = _PLACEHOLDER.sub(
            lambda match: "%" if match[0] == "%%" else f"{{{order.index(next(names))}}}", text
        )
        return " ".join(numbered.split())

    return replace(source), replace(target)


def most_frequent(pairs: Iterable[Pair], skipped: Counter[str]) -> list[Pair]:
    """Keeps one translation of a source per locale: the most frequent, among equals the first."""
    translations: dict[tuple[str, str], Counter[str]] = {}
    for pair in pairs:
        translations.setdefault((pair.locale, pair.source), Counter())[pair.target] += 1
    kept = []
    for (locale, source), targets in translations.items():
        kept.append(Pair(locale, source, targets.most_common(1)[0][0]))
        skipped["the same pair again"] += targets.total() - len(targets)
        skipped["another translation of the same source"] += len(targets) - 1
    return kept


def _check_statements(path: Path, text: str) -> None:
    """Refuses lines that are not a statement, and a file that ends inside a message."""
    keyword = "msgstr"
    number = 0
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip().removeprefix("\ufeff")
        if not line or line.startswith("#"):
            continue
        statement = _STATEMENT.fullmatch(line)
        if statement is None:
            raise ValueError(
                f"{path} is malformed at line {number}: expected msgid, msgstr or a text in "
                f"quotes, found {line[:60]!r}."
            )
        keyword = statement[1] or keyword
    if not keyword.startswith("msgstr"):
        raise ValueError(f"{path} is malformed at line {number}: it ends after {keyword}.")


def _forms(path: Path, catalogue: Any, entry: Any) -> Iterator[tuple[str, str]]:
    """Yields an entry's texts for one thing and for many."""
    if not entry.msgid_plural:
        yield entry.msgid, entry.msgstr
        return
    header = catalogue.metadata.get("Plural-Forms", "")
    rule = _PLURAL_RULE.search(header)
    try:
        if rule is None:
            raise ValueError("expected plural=EXPRESSION")
        form = gettext.c2py(rule[1])
    except ValueError as error:
        raise ValueError(
            f"{path} has plurals, but Plural-Forms={header!r} in its header is malformed: {error}."
        ) from error
    singular, plural = form(1), form(_MANY)
    lacking = sorted({singular, plural} - set(entry.msgstr_plural))
    if lacking:
        raise ValueError(
            f"{path} is malformed at line {entry.linenum}: the rule in its header asks for "
            f"msgstr[{lacking[0]}], which {entry.msgid[:40]!r} does not have."
        )
    if singular != plural:  # else the language has no singular
        yield entry.msgid, entry.msgstr_plural[singular]
    yield entry.msgid_plural, entry.msgstr_plural[plural]


def _problem(source: str, target: str) -> str | None:
    """Finds the reason why a pair teaches nothing, if there is one."""
    if not target.strip():
        return "not translated"
    if not any(character.isalpha() for character in _PLACEHOLDER.sub("", source)):
        return "no letters"
    if sorted(_named(source)) != sorted(_named(target)):
        return "other placeholders in the translation"
    return None


def _named(text: str) -> list[str]:
    """Lists the placeholders of a text; position distinguishes those without a name."""
    names: list[str] = []
    unnamed: Counter[str] = Counter()
    for placeholder in _PLACEHOLDER.findall(text):
        if placeholder == "%%":
            continue
        if not _NAMED.match(placeholder):
            unnamed[placeholder] += 1
            placeholder += f" number {unnamed[placeholder]}"
        names.append(placeholder)
    return names
