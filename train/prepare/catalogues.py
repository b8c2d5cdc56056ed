"""Sentence pairs from gettext catalogues (``.po`` files, or ``.mo`` without them), cleaned.

A catalogue is a list of English messages with their translations, some of them in singular and
plural, with placeholders for values. polib reads it; this module refuses errors that polib would
ignore silently, and skips pairs that teach nothing, counting them by reason.
"""

from __future__ import annotations

import gettext
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from train.data.folder import require
from train.data.translation import Pair

# A number for which every language of the catalogues uses the plural.
_MANY = 5
_STATEMENT = re.compile(r'(msgctxt|msgid|msgid_plural|msgstr(?:\[\d+\])?)?\s*"(?:[^"\\]|\\.)*"\s*')
# %% is no placeholder, and is matched so that its second sign does not begin one.
_PLACEHOLDER = re.compile(
    r"%%|%\(\w+\)[#0 +-]*[\d.]*[a-zA-Z]|%[#0+-]*[\d.]*[srdiuxXfFgGeEc]|%\d+|\{\w*\}"
)
_NAMED = re.compile(r"%\(|%\d+$|\{\w")
_PLURAL_RULE = re.compile(r"plural\s*=\s*([^;]+)")


def by_locale(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """Finds the catalogues ``LOCALE/LC_MESSAGES/*`` at any depth of some folders."""
    catalogues: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.glob("**/LC_MESSAGES/*.[mp]o")):
            if path.suffix == ".po" or not path.with_suffix(".po").exists():
                catalogues.setdefault(path.parent.parent.name, []).append(path)
    return catalogues


def read(path: Path, locale: str, skipped: Counter[str]) -> Iterator[Pair]:
    """Reads the usable pairs of a catalogue, placeholders replaced.

    Args:
      path: a ``.po`` or ``.mo`` file.
      locale: language of its translations.
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
        raise ValueError(f"{path} is no catalogue in UTF-8: {error}.") from error
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
