"""Follows a page of the documentation: its files are written, its commands run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import limits
from command import QUICK_COMPILE, TOP


def blocks(name: str, language: str) -> list[str]:
    """Returns the code blocks of a language in a page of docs."""
    text = (TOP / "docs" / name).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def write_files(name: str, folder: Path) -> None:
    """Writes the blocks whose first line is the name of a file."""
    for language in ("python", "yaml"):
        for block in blocks(name, language):
            if named := re.match(r"# ([\w.-]+\.(?:py|yaml))\n", block):
                (folder / named[1]).write_text(block, encoding="utf-8")


def run(folder: Path, commands: str, *, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the lines of a block in a folder that has the trainer, as a clone has.

    Args:
      folder: where to.
      commands: lines for bash.
      status: that of the first command that fails, or of the last.
    """
    if not (folder / "train").exists():
        (folder / "train").symlink_to(TOP / "train")
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("JAX_", "XLA_"))}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_COMPILE,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(TOP),
        "PYTHONWARNINGS": "error",
    }
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limits.hang(),
        check=False,
    )
    assert done.returncode == status, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done
