"""The documentation points at what exists."""

import pkgutil
import re
import statistics
from pathlib import Path

import pytest

import jaxpipe

TOP = Path(__file__).parents[1]


def test_the_map_of_the_code_names_files_that_exist():
    """A name without a folder lies beside the path before it."""
    answers = _answers("| question | file |")
    assert len(answers) > 20
    for answer in answers:
        _check_paths(answer)


def test_a_newcomer_finds_twelve_places():
    answers = _answers("| where is ... | answer |")
    assert len(answers) == 12
    for answer in answers:
        assert _check_paths(answer)


def test_every_path_and_dotted_name_in_the_documentation_exists():
    pages = [TOP / "README.md", TOP / "CONTRIBUTING.md", *_pages()]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:jaxpipe|models|train|tests)/[\w/]*(?:\.py|/))`", text):
            assert (TOP / path).exists(), f"{path} in {page}"
        for name, path in re.findall(r"`(\w+)` in\s`(jaxpipe/[\w/]+\.py)`", text):
            defined = rf"^(def|class) {name}\b"
            code = (TOP / path).read_text(encoding="utf-8")
            assert re.search(defined, code, re.MULTILINE), f"{name} of {path} in {page}"
        for name in re.findall(r"`(jaxpipe(?:\.\w+)+)`", text):
            assert pkgutil.resolve_name(name) is not None, f"{name} in {page}"


def test_users_are_sent_to_no_name_that_needs_a_further_import():
    for page in (TOP / "README.md", *(TOP / "docs").glob("*.md")):
        names = set(re.findall(r"\bjaxpipe\.([a-z_]\w*)", page.read_text(encoding="utf-8")))
        names -= {"configurations", "schedule"}  # entry points, and what is always imported
        assert names <= set(jaxpipe.__all__), page


def test_every_link_leads_to_a_file_and_a_section():
    pages = [*TOP.glob("*.md"), *_pages()]
    links = {
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)\s]+)\)", _code_left_out(page))
    }
    assert len(links) > 100
    for page, link in links:
        path, _, anchor = link.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{link} in {page}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", _code_left_out(target), re.MULTILINE)
            assert anchor in map(_anchor, titles), f"{link} in {page}"


def test_every_page_is_in_the_navigation():
    pages = {path.relative_to(TOP).as_posix().removeprefix("docs/") for path in _pages()}
    pages |= {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/first_pipeline.ipynb.md"}
    navigation = (TOP / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert pages == set(re.findall(r"[\w/.-]+\.md", navigation))


def test_every_design_note_is_linked_from_the_first_page():
    notes = {path.name for path in (TOP / "docs" / "design").glob("*.md")}
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    assert notes == set(re.findall(r"\(docs/design/([\w-]+\.md)\)", readme))


def test_the_ratios_among_alternatives_are_those_of_published_runs():
    """Rows such as "| A, ... | ... | 1.30 to 1.78 | 1.43 |"."""
    rows = re.findall(
        r"^\|([A-Z])-[^|]*\|(?:[^|]*\|){4}([\d.]+)\|", _text("published.md"), re.MULTILINE
    )
    stated = re.findall(
        r"^\| ([A-Z]),.* \| ([\d.]+) to ([\d.]+) \| ([\d.]+) \|$",
        _text("alternatives.md"),
        re.MULTILINE,
    )
    assert {letter for letter, *_ in stated} == {letter for letter, _ in rows}
    for letter, *figures in stated:
        ratios = [float(ratio) for run, ratio in rows if run == letter]
        least, most, median = map(float, figures)
        assert (least, most) == (min(ratios), max(ratios))
        assert median == pytest.approx(statistics.median(ratios), abs=0.006)


def test_the_reference_names_all_that_is_public_and_only_what_exists():
    pages = (TOP / "docs" / "reference").glob("*.md")
    text = "".join(map(Path.read_text, pages))
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert {f"jaxpipe.{name}" for name in jaxpipe.__all__} <= set(names)
    shown = set(re.findall(r"^from (jaxpipe[\w.]*) import", _text("schedules.md"), re.MULTILINE))
    for name in names:
        assert pkgutil.resolve_name(name) is not None
        module, _, last = name.rpartition(".")
        public = module.count(".") <= 1 or module.endswith(f".{last}")  # the rest is internal
        assert public or module in shown, name
    members = re.findall(r"^::: (\S+)\n +options:\n +members: \[(.+)\]$", text, re.MULTILINE)
    assert members
    for name, chosen in members:
        for member in chosen.split(", "):
            assert hasattr(pkgutil.resolve_name(name), member), f"{name}.{member}"


def _pages() -> list[Path]:
    studies = (TOP / "benchmarks" / "studies").glob("*.md")
    return [*(TOP / "docs").rglob("*.md"), *studies, TOP / "examples" / "README.md"]


def _code_left_out(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _anchor(title: str) -> str:
    """The anchor of a section, as mkdocs makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _answers(header: str) -> list[str]:
    """The last column of the table of the concepts that begins with this header."""
    table = _text("concepts.md").partition(header)[2].strip().partition("\n\n")[0]
    return re.findall(r"^\|.*\| (.*) \|$", table, re.MULTILINE)


def _check_paths(answer: str) -> int:
    """Checks that all paths of an answer exist, and counts them."""
    folder = TOP
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", answer)
    for name in paths:
        path = TOP / name if "/" in name else folder / name
        assert path.exists(), f"{path} in {answer}"
        folder = path.parent
    return len(paths)


def _text(page: str) -> str:
    return (TOP / "docs" / page).read_text(encoding="utf-8")
