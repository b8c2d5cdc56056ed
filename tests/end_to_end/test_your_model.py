"""The code of "Your own model" runs as it is pasted, section by section."""

import re
from functools import partial
from pathlib import Path

import pytest

from jaxpipe import make_mesh, testing

ROOT = Path(__file__).parents[2]
BEFORE, *SECTIONS = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8").split("\n## ")


def code(section: str) -> str:
    return "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "section", [s for s in SECTIONS if code(s)], ids=lambda section: section.partition("\n")[0]
)
def test_a_section_runs(section, monkeypatch):
    """Comparisons run on one of the two default meshes."""
    monkeypatch.setattr(testing, "simulate_devices", lambda *_: None)  # there are 8 already
    on_one = partial(testing.assert_matches_unpipelined, meshes=[make_mesh(stage=2, data=2)])
    monkeypatch.setattr(testing, "assert_matches_unpipelined", on_one)
    exec(code(BEFORE) + code(section), {"__name__": "__main__"})
