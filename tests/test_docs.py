"""The documentation points at what exists."""

import pkgutil
import re
from pathlib import Path

import jaxpipe

TOP = Path(__file__).parents[1]


def test_the_map_of_the_code_names_files_that_exist():
    """A name without a folder lies beside the path before it."""
    table = _text("concepts.md").partition("| question | file |")[2]
    answers = re.findall(r"^\|.*\| (.*) \|$", table, re.MULTILINE)
    assert len(answers) > 20
    for answer in answers:
        folder = TOP
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", answer):
            path = TOP / name if "/" in name else folder / name
            assert path.exists(), f"{path} in {answer}"
            folder = path.parent


def test_every_page_is_in_the_navigation():
    pages = {path.relative_to(TOP / "docs").as_posix() for path in (TOP / "docs").rglob("*.md")}
    navigation = (TOP / "mkdocs.yml").read_text(encoding="utf-8")
    assert pages == set(re.findall(r"[\w/-]+\.md", navigation))


def test_every_design_note_is_linked_from_the_first_page():
    notes = {path.name for path in (TOP / "docs" / "design").glob("*.md")}
    assert notes == set(re.findall(r"\(design/([\w-]+\.md)\)", _text("index.md")))


def test_the_reference_names_all_that_is_public_and_only_what_exists():
    pages = (TOP / "docs" / "reference").glob("*.md")
    names = re.findall(r"^::: (\S+)$", "".join(map(Path.read_text, pages)), re.MULTILINE)
    assert {f"jaxpipe.{name}" for name in jaxpipe.__all__} <= set(names)
    for name in names:
        assert pkgutil.resolve_name(name) is not None


def _text(page: str) -> str:
    return (TOP / "docs" / page).read_text(encoding="utf-8")
