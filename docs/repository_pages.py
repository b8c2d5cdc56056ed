"""Pages of the site that lie elsewhere in the repository: the README, studies and examples.

mkdocs calls the functions named `on_...`. The README is the front page, programs and notebooks are
shown in colours, and links between files become links between pages.
"""

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
    "benchmarks/studies/images/*",
    "configs/**/*",
    "examples/**/*",
)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}


def on_files(files, *, config):
    """Adds what `PUBLISHED` names to the site."""
    for pattern in PUBLISHED:
        for path in sorted(TOP.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                files.append(_file(path, config))
    return files


def on_page_markdown(markdown, *, page, config, files):
    """Turns links to files of the repository into links to their pages."""
    uris = {file.src_uri for file in files}
    here = _folder(page.file.src_uri)
    start = posixpath.dirname(page.file.src_uri)

    def link(match):
        path, anchor = match[2], match[3]
        target = _uri(posixpath.normpath(posixpath.join(here, path)))
        if target not in uris:
            return match[0]
        return f"{match[1]}{posixpath.relpath(target, start or '.')}{anchor})"

    return re.sub(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?)\)", link, markdown)


def _file(path, config):
    uri = _uri(path.relative_to(TOP).as_posix())
    if path.suffix == ".ipynb":
        return File.generated(config, uri, content=_notebook(path))
    if path.suffix in LANGUAGES:
        code = path.read_text(encoding="utf-8")
        text = f"# `{path.name}`\n\n````{LANGUAGES[path.suffix]}\n{code}````\n"
        return File.generated(config, uri, content=text)
    return File.generated(config, uri, abs_src_path=str(path))


def _uri(path):
    """Where on the site a file of the repository is; paths are relative to the top of both."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{path}.md" if path.endswith((*LANGUAGES, ".ipynb")) else path


def _folder(uri):
    """The folder of the repository that holds a page's source: its links start there."""
    if uri == "index.md":
        return ""
    folder = posixpath.dirname(uri)
    return folder if uri != "CHANGELOG.md" and (TOP / uri).exists() else f"docs/{folder}"


def _notebook(path):
    """Markdown of a notebook's cells and of what it printed and drew."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            picture = "".join(data.get("image/svg+xml", ""))
            parts.append(picture or "```text\n" + "".join(data["text/plain"]) + "```")
    return "\n\n".join(parts)
