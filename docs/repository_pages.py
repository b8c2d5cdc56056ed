"""Pages of the site that lie elsewhere in the repository: the README, studies and examples.

mkdocs calls the functions named ``on_...``. The README is the front page, programs and notebooks
are shown in colours, and links between files become links between pages.
"""

import base64
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

TOP = Path(__file__).parents[1]
PUBLISHED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/studies/*.md",
    "benchmarks/studies/images/*.svg",
    "configs/**/*.sh",
    "configs/**/*.yaml",
    "examples/**/*.ipynb",
    "examples/**/*.md",
    "examples/**/*.py",
    "examples/images/*.svg",
)
"""Patterns of files beside ``docs``."""
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}
"""Endings of files that are shown as code."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files, *, config):
    """Adds the files that `PUBLISHED` names."""
    for path in sorted(path for pattern in PUBLISHED for path in TOP.glob(pattern)):
        source = path.relative_to(TOP).as_posix()
        if path.suffix == ".ipynb":
            file = File.generated(config, page_of(source), content=notebook(path))
        elif path.suffix in LANGUAGES:
            file = File.generated(config, page_of(source), content=program(path))
        else:
            file = File.generated(config, page_of(source), abs_src_path=str(path))
        file.repository_path = source
        files.append(file)
    return files


def on_page_markdown(markdown, *, page, config, files):
    """Turns links to files of the repository into links to their pages."""
    source = getattr(page.file, "repository_path", f"docs/{page.file.src_uri}")
    folder, start = posixpath.dirname(source), posixpath.dirname(page.file.src_uri) or "."

    def to_page(link):
        target = page_of(posixpath.normpath(posixpath.join(folder, link[2])))
        if files.get_file_from_path(target) is None:
            return link[0]
        return f"{link[1]}{posixpath.relpath(target, start)}{link[3] or ''})"

    return _LINK.sub(to_page, markdown)


def page_of(path):
    """Maps a path in the repository to the path of its page."""
    if path == "README.md":
        return "index.md"
    is_code = path.endswith((*LANGUAGES, ".ipynb"))
    return path.removeprefix("docs/") + ".md" * is_code


def program(path):
    """Shows a program in colours."""
    code = path.read_text(encoding="utf-8")
    return f"# `{path.name}`\n\n````{LANGUAGES[path.suffix]}\n{code}````\n"


def notebook(path):
    """Shows a notebook's cells, and what they printed and drew."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if picture := "".join(output.get("data", {}).get("image/svg+xml", "")):
                encoded = base64.b64encode(picture.encode()).decode()
                parts.append(f"![](data:image/svg+xml;base64,{encoded})")
            else:
                parts.append(f"```text\n{''.join(output['text'])}```")
    return "\n\n".join(parts)
