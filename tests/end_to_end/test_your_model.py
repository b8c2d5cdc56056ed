"""The code of "Your own model" runs as it is pasted, section by section."""

import re
from pathlib import Path

import pytest

from jaxpipe import testing

ROOT = Path(__file__).parents[2]
BEFORE, *SECTIONS = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8").split("\n## ")


def code(section: str) -> str:
    return "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "section", [s for s in SECTIONS if code(s)], ids=lambda section: section.partition("\n")[0]
)
def test_a_section_runs(section, monkeypatch):
    monkeypatch.setattr(testing, "simulate_devices", lambda *_: None)  # there are 8 already
    exec(code(BEFORE) + code(section), {"__name__": "__main__"})
