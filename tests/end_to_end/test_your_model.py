"""The code of "Your own model" runs as it is pasted, section by section."""

import os
import re
import subprocess
import sys
from pathlib import Path

import limits
import pytest
from command import QUICK_COMPILE

ROOT = Path(__file__).parents[2]
BEFORE, *SECTIONS = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8").split("\n## ")


def code(section: str) -> str:
    return "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "section", [s for s in SECTIONS if code(s)], ids=lambda section: section.partition("\n")[0]
)
def test_a_section_runs(section):
    variables = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_COMPILE}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code(BEFORE) + code(section)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=limits.hang(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
