"""Text for language models, masked or not: ``python -m train.prepare --out data/stdlib``.

Without ``--text`` it uses the Python sources that ship with CPython's standard library, so it needs
no download. The result depends only on the text and the options.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from train.data import rows, tokenizer_files
from train.data.folder import BEGIN, END_OF_TEXT, META_FILE, TOKENIZER_FILE
from train.data.guarded import Guarded
from train.data.text import (
    HELDOUT_FILE,
    KIND,
    ROLE_FILES,
    TRAIN_FILE,
    DataMeta,
    SplitMeta,
    read_meta,
    read_roles,
    read_tokens,
    record_of,
    write_tokens,
)
from train.data.tokenizer import MIN_VOCAB_SIZE, Encoder, encoding_groups, pieces, train_tokenizer
from train.data.tokenizer_files import Known
from train.prepare import conversations, folders

_VOCAB_SIZE = 2048
_MOST_BYTES = 12e6
_FILES = frozenset({TRAIN_FILE, HELDOUT_FILE, TOKENIZER_FILE, META_FILE})
_BESIDE = frozenset([*map(record_of, ROLE_FILES), *ROLE_FILES.values(), *tokenizer_files.FILES])
"""Files that a run, conversations, or an existing tokenizer keep beside them."""
# Installed packages, tests, and programs that some distributions leave out.
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions(folders.DataOptions):
    """Turns a folder of text into a tokenizer and token files."""

    text: Path | None = None
    """Folder of UTF-8 text files; by default the sources of Python's standard library."""
    conversations: Path | None = None
    """In place of text: a file with a line of JSON for each conversation, {"messages": [{"role":
    "user", "content": "..."}, ...]}, for the chat template of --tokenizer. Only the assistant's
    messages are predicted."""
    preferences: Path | None = None
    """In place of text: a file with a line of JSON for each pair of answers, {"chosen": [messages],
    "rejected": [messages]}, with the messages before them in both or as "prompt"."""
    rows: Path | None = None
    """In place of text: a Parquet or JSON Lines file with a text in every row, a folder of such
    files, or module:function that returns a Hugging Face IterableDataset, of any size. A tokenizer
    that is learned reads the first 64 MB."""
    column: str = "text"
    """The column of --rows that holds the texts."""
    vocab_size: int | None = None
    """Tokens the tokenizer may learn, at least 257; by default 2048."""
    tokenizer: Path | None = None
    """Folder whose tokenizer to use as it is: a Hugging Face folder or other prepared text; by
    default one is learned from the text."""
    max_megabytes: float | None = None
    """Most text to use, in 10^6 bytes; what is left out is reported. By default 12, and all rows of
    --rows."""

    @property
    def source(self) -> Path | None:
        """The text, rows or conversations; None for the standard library."""
        return self.conversations or self.preferences or self.rows or self.text

    @property
    def has_messages(self) -> bool:
        """Whether the source holds messages, for a chat template."""
        return self.conversations is not None or self.preferences is not None

    @property
    def most_bytes(self) -> float:
        """Most bytes of text to use."""
        if self.max_megabytes is None:
            return math.inf if self.rows is not None else _MOST_BYTES
        return self.max_megabytes * 1e6

    @property
    def learned_size(self) -> int:
        """Most tokens of a tokenizer that is learned."""
        return _VOCAB_SIZE if self.vocab_size is None else self.vocab_size

    def problems(self) -> list[str]:
        problems = super().problems()
        names = ("conversations", "preferences", "rows", "text")
        sources = {name: getattr(self, name) for name in names}
        given = [f"--{name}={path}" for name, path in sources.items() if path is not None]
        if len(given) > 1:
            problems.append(
                f"{' and '.join(given)} are {len(given)} sources. Leave all but one of them out, "
                "and train on several folders with data.mix."
            )
        if self.has_messages and self.tokenizer is None:
            problems.append(
                f"{given[0]} needs the chat template of a tokenizer. Name its folder with "
                "--tokenizer."
            )
        if self.tokenizer is not None and self.vocab_size is not None:
            problems.append(
                f"--vocab-size={self.vocab_size} has no effect with --tokenizer="
                f"{self.tokenizer}, which is used as it is. Leave one of them out."
            )
        elif self.learned_size < MIN_VOCAB_SIZE:
            problems.append(
                f"--vocab-size={self.vocab_size} is too small: 256 bytes and {END_OF_TEXT} need "
                f"one token each. Nearest valid: {MIN_VOCAB_SIZE}."
            )
        if self.tokenizer is not None:
            try:
                tokenizer_files.read(self.tokenizer)
                if self.conversations is not None:
                    tokenizer_files.template(self.tokenizer)
            except ValueError as error:
                problems.append(str(error))
        if not self.most_bytes > 0:
            problems.append(
                f"--max-megabytes={self.max_megabytes:g} must be positive, for example 12."
            )
        if self.text is not None and not self.text.is_dir():
            state = "is a file: name its folder" if self.text.is_file() else "does not exist"
            problems.append(f"--text={self.text} {state}.")
        return problems

    def settings(self) -> dict[str, Any]:
        """Returns the options that decide the content, as ``meta.json`` stores them."""
        own = None
        if self.tokenizer is not None:
            content = (self.tokenizer / TOKENIZER_FILE).read_bytes()
            own = f"{self.tokenizer.resolve()}, sha256 {hashlib.sha256(content).hexdigest()}"
        return {
            "text": "stdlib" if self.source is None else str(self.source.resolve()),
            "vocab_size": self.learned_size if own is None else None,
            "tokenizer": own,
            "heldout_fraction": self.heldout_fraction,
            "max_megabytes": None if math.isinf(self.most_bytes) else self.most_bytes / 1e6,
            "column": None if self.rows is None else self.column,
            "preferences": None if self.preferences is None else True,
        }


@dataclasses.dataclass(frozen=True)
class Document:
    """One text; ``name`` is its path below the text folder, with forward slashes."""

    name: str
    text: str


def prepare(options: PrepareOptions, *, console: Console | None = None) -> DataMeta:
    """Writes the data folder, unless it is there and whole: see `folders.prepare`.

    Example:
      >>> prepare(PrepareOptions(out=Path("data/stdlib"))).vocab_size  # doctest: +SKIP
      2048
    """
    return folders.prepare(
        options,
        _write,
        files=_FILES | _BESIDE,
        read_meta=read_meta,
        check_whole=_check_whole,
        console=console,
    )


def _write(options: PrepareOptions, console: Console) -> DataMeta:
    skipped: Counter[str] = Counter()
    groups: Iterator[list[Document]]
    if options.rows is not None:
        sizes = ((file.name, str(file.stat().st_size)) for file in rows.find_files(options.rows))
        digest = folders.digest(itertools.chain.from_iterable(sizes))
        shards = rows.find_shards(str(options.rows), options.column, option="--rows")
        read = rows.groups(shards, options.most_bytes, skipped)
        groups = ([Document(*row) for row in group] for group in read)
    else:
        documents, skipped = collect_documents(options)
        digest = folders.digest(part for d in documents for part in (d.name, d.text))
        groups = iter([documents])
    meta = _write_groups(options, groups, digest, console)
    for reason, count in sorted(skipped.items()):
        what = "files" if options.rows is None else "rows"
        folders.say(console, f"{what} left out ({reason}): {count}")
    is_full = options.tokenizer is not None or meta.vocab_size == options.learned_size
    fewer = "" if is_full else " (too little text for more)"
    count = meta.train.documents + meta.heldout.documents
    megabytes = (meta.train.bytes + meta.heldout.bytes) / 1e6
    folders.say(
        console,
        f"{options.out}: {count} documents, {megabytes:.2f} MB of text, {meta.train.tokens} train "
        f"and {meta.heldout.tokens} held-out tokens, vocabulary {meta.vocab_size}{fewer}",
    )
    return meta


def _write_groups(
    options: PrepareOptions, groups: Iterator[list[Document]], digest: str, console: Console
) -> DataMeta:
    """Writes the folder group by group; a tokenizer is learned from the first."""
    sizes = {name: SplitMeta(0, 0, 0) for name in ROLE_FILES}
    with folders.appearing(options.out) as folder, folders.progress_bar(console) as progress:
        bar = progress.add_task("encode", total=0)
        known = None
        for group in groups:
            if not options.has_messages:
                group = [part for document in group for part in _parts(document)]
            sides = split_documents(group, heldout_fraction=options.heldout_fraction)
            if known is None:
                files, known = _tokenizer(options, [d.text for d in sides[0]], progress)
                vocab_size = max(known.tokenizer.get_vocab().values()) + 1
                encode = _Encoding(options, known)
            progress.update(bar, total=sum(size.documents for size in sizes.values()) + len(group))
            for name, documents in zip(sizes, sides, strict=True):
                append = sizes[name].documents > 0
                tokens, roles = encode(documents, partial(progress.advance, bar))
                write_tokens(folder / name, tokens, vocab_size=vocab_size, append=append)
                if roles is not None:
                    file = folder / ROLE_FILES[name]
                    write_tokens(file, roles, vocab_size=BEGIN + 1, append=append)
                sizes[name] = _size(sizes[name], documents, tokens, roles)
        if known is None:
            raise ValueError(f"--rows={options.rows} holds no text.")
        for name, content in files.items():
            folders.write_bytes(folder / name, content)
        meta = DataMeta(
            vocab_size=vocab_size,
            tokenizer_sha256=hashlib.sha256(files[TOKENIZER_FILE]).hexdigest(),
            documents_sha256=digest,
            train=sizes[TRAIN_FILE],
            heldout=sizes[HELDOUT_FILE],
            settings=options.settings(),
            end_of_text=known.end_of_text,
            token_ids=known.token_ids,
            conversations=options.has_messages,
        )
        folders.write_meta(folder, KIND, meta)
    return meta


def _tokenizer(
    options: PrepareOptions, texts: Sequence[str], progress: Progress
) -> tuple[dict[str, bytes], Known]:
    """Makes the tokenizer's files by name, and the tokenizer: learned from texts, or existing."""
    folder = options.tokenizer
    if folder is not None:
        paths = (folder / name for name in tokenizer_files.FILES)
        return {p.name: p.read_bytes() for p in paths if p.is_file()}, tokenizer_files.read(folder)
    learned = train_tokenizer(texts, vocab_size=options.learned_size, progress=progress)
    end = learned.token_to_id(END_OF_TEXT)
    known = Known(learned, END_OF_TEXT, {"bos": end, "eos": end, "pad": None})
    return {TOKENIZER_FILE: learned.to_str().encode()}, known


class _Encoding:
    """Encodes documents in processes with limits, and names those that cannot be encoded."""

    def __init__(self, options: PrepareOptions, known: Known) -> None:
        self._source, tokenizer = options.source, known.tokenizer.to_str()
        self._template: Guarded | None = None
        self._has_pairs = options.preferences is not None
        if not options.has_messages:
            self._encoder = Guarded(Encoder, tokenizer, known.end_of_text)
        else:
            assert options.tokenizer is not None
            self._template = _open_template(options.tokenizer)
            self._encoder = Guarded(conversations.Encoder, tokenizer)

    def __call__(
        self, documents: Sequence[Document], advance: Callable[[int], object]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the tokens of documents and, of conversations, their roles.

        Raises:
          ValueError: some cannot be laid out or encoded.
        """
        encoded = []
        for group in encoding_groups(self._laid_out(documents), _text):
            names = [name for name, _ in group]
            encoded += self._named(names, self._encoder, [content for _, content in group])
            advance(len(group))
        if self._template is None:
            return np.concatenate(encoded), None
        tokens, roles = map(np.concatenate, zip(*encoded, strict=True))
        return tokens, roles

    def _laid_out(self, documents: Sequence[Document]) -> Iterator[_Named]:
        for document in documents:
            if self._template is None:
                yield document.name, document.text
            else:
                contents = self._named([document.name], self._template, document.text)
                contents = contents[-1:] if self._has_pairs else contents
                yield from ((document.name, content) for content in contents)

    def _named(self, names: Sequence[str], function: Guarded, argument: Any) -> Any:
        try:
            return function(argument)
        except ValueError as error:
            where = names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"
            source = f"{self._source}: " if self._source else ""
            raise ValueError(f"{source}{where}: {error}.") from error


_Named = tuple[str, str | conversations.Document]


def _text(named: _Named) -> str:
    content = named[1]
    return content if isinstance(content, str) else content.text


def _open_template(folder: Path) -> Guarded:
    source, tokens = tokenizer_files.template(folder), tokenizer_files.special_tokens(folder)
    try:
        return conversations.open_template(source, tokens)
    except ValueError as error:
        raise ValueError(f"The chat template of {folder} cannot be read: {error}.") from error


def _parts(document: Document) -> list[Document]:
    """Cuts a text that is too long to be encoded at a time into several."""
    texts = list(pieces(document.text))
    if len(texts) == 1:
        return [document]
    return [Document(f"{document.name} part {n}", text) for n, text in enumerate(texts, 1)]


def collect_documents(options: PrepareOptions) -> tuple[list[Document], Counter[str]]:
    """Reads the text, in an order that depends only on the names.

    If there is more than ``max_megabytes``, an even sample by hash of the name is used, not the
    first names.

    Returns:
      The documents sorted by name, and how many files were left out for which reason.

    Raises:
      ValueError: the folder cannot be read or holds no text.
    """
    if options.conversations is not None:
        lines = conversations.read(options.conversations)
        return [Document(f"line {number}", line) for number, line in lines], Counter()
    if options.preferences is not None:
        pairs = conversations.read_pairs(options.preferences)
        return [Document(f"line {number}", line) for number, line in pairs], Counter()
    root = Path(sysconfig.get_path("stdlib")) if options.text is None else options.text
    limit = options.most_bytes
    skipped: Counter[str] = Counter()
    documents: list[Document] = []
    used = 0
    for name in sorted(
        _file_names(root, options), key=lambda name: folders.name_hash("order", name)
    ):
        try:
            size = (root / name).stat().st_size
            if used + size > limit:
                skipped["over --max-megabytes"] += 1
                continue
            text = (root / name).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped["not UTF-8 text"] += 1
            continue
        except OSError as error:
            raise ValueError(f"--text={root}: cannot read {name}: {error.strerror}.") from error
        if not text or "\0" in text:
            skipped["empty" if not text else "not UTF-8 text"] += 1
            continue
        used += size
        documents.append(Document(name, text))
    if not documents:
        reasons = "; ".join(
            f"{count} left out: {reason}" for reason, count in sorted(skipped.items())
        )
        raise ValueError(
            f"--text={root}: no text files found ({reasons or 'the folder holds no files'}). Name "
            f"a folder with UTF-8 text files, or raise --max-megabytes={limit / 1e6:g}."
        )
    return sorted(documents, key=lambda document: document.name), skipped


def split_documents(
    documents: Sequence[Document], *, heldout_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Splits documents by a hash of their name, whatever the other documents are.

    Both sides get at least one document; a single document is cut in two at a line.

    Returns:
      The documents to train on and the held-out ones.

    Raises:
      ValueError: there is a single document of fewer than two characters.
    """
    if len(documents) == 1:
        return _cut(documents[0], heldout_fraction)
    ranked = sorted(documents, key=lambda document: folders.name_hash("split", document.name))
    num_heldout = sum(folders.is_heldout(d.name, heldout_fraction) for d in ranked)
    num_heldout = min(max(num_heldout, 1), len(ranked) - 1)
    heldout_names = {document.name for document in ranked[:num_heldout]}
    return (
        [document for document in documents if document.name not in heldout_names],
        [document for document in documents if document.name in heldout_names],
    )


def _check_whole(options: PrepareOptions, meta: DataMeta) -> None:
    sizes = [len(read_tokens(options.out / name)) for name in ROLE_FILES]
    for name in ROLE_FILES:
        read_roles(options.out, name)
    if sizes != [meta.train.tokens, meta.heldout.tokens]:
        raise ValueError(f"its token files are not those of {META_FILE}")


def _file_names(root: Path, options: PrepareOptions) -> Iterator[str]:
    """Yields the path of every file below ``root`` except hidden ones and prepared data."""
    only_stdlib = options.text is None

    def fail(error: OSError) -> None:
        raise ValueError(
            f"--text={root}: cannot read {error.filename}: {error.strerror}."
        ) from error

    def is_wanted(folder: Path) -> bool:
        hidden = folder.name.startswith(".") or folder.name == "__pycache__"
        foreign = only_stdlib and folder.name in _STDLIB_SKIPPED
        return not hidden and not foreign and folder.resolve() != options.out.resolve()

    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if is_wanted(Path(folder, name))]
        for name in files:
            path = Path(folder, name)
            wanted = name.endswith(".py") if only_stdlib else not name.startswith(".")
            if wanted and path.is_file():  # no sockets, pipes, dangling links
                yield path.relative_to(root).as_posix()


def _cut(document: Document, heldout_fraction: float) -> tuple[list[Document], list[Document]]:
    text = document.text
    if len(text) < 2:
        raise ValueError(
            f"The only text, {document.name}, is too short to split into train and held-out parts."
        )
    middle = min(max(round(len(text) * (1 - heldout_fraction)), 1), len(text) - 1)
    line_end = text.rfind("\n", 0, middle) + 1
    cut = line_end or middle
    return [Document(document.name, text[:cut])], [Document(document.name, text[cut:])]


def _size(
    before: SplitMeta, documents: Sequence[Document], tokens: np.ndarray, roles: np.ndarray | None
) -> SplitMeta:
    """Adds a group's documents to the size of a side."""
    # A conversation may be several documents.
    count = len(documents) if roles is None else int((roles == BEGIN).sum())
    size = sum(len(document.text.encode()) for document in documents)
    return SplitMeta(before.documents + count, before.bytes + size, before.tokens + len(tokens))
