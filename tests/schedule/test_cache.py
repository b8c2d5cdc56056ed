"""The disk cache of searches: its place, its switch, and that it never changes a schedule."""

from __future__ import annotations

import inspect
import json

import pytest

from jaxpipe.schedule import catalog
from jaxpipe.schedule.actions import Schedule
from jaxpipe.schedule.formats.files import to_json
from jaxpipe.schedule.generators.breadth_first import gpipe
from jaxpipe.schedule.search.auto import auto
from jaxpipe.schedule.search.cache import cache_folder, cached
from jaxpipe.schedule.search.controllable_memory import controllable_memory
from jaxpipe.schedule.simulate import UNIT, Costs


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The folder of this test's own cache."""
    monkeypatch.delenv("JAXPIPE_NO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxpipe"


def search(p: int, m: int, k: int, costs: Costs = UNIT) -> Schedule:
    return cached(controllable_memory)(p, m, memory_limit=k / 2, costs=costs)


def counting(calls: list):
    def search(p: int, m: int, *, fused: bool = False) -> Schedule:
        calls.append((p, m))
        return gpipe(p, m, fused=fused)

    return cached(search)


def test_the_place_follows_the_xdg_specification(files, monkeypatch, tmp_path):
    assert cache_folder() == files
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "jaxpipe"


@pytest.mark.parametrize("generate", [controllable_memory, auto])
def test_searches_of_the_registry_are_kept_and_are_the_same_without_the_cache(files, generate):
    name = generate.__name__.replace("_", "-")
    pure = generate(2, 4, memory_limit=2)
    assert not files.exists()
    for _ in ("searched", "read"):
        assert catalog.build(name, stages=2, microbatches=4, memory_limit=2) == pure
        assert len(list(files.iterdir())) == 1


def test_closed_forms_write_nothing(files):
    for entry in catalog.entries():
        if entry.name not in ("controllable-memory", "auto"):
            catalog.build(entry.name, stages=2, microbatches=4)
    assert not files.exists()


def test_a_second_call_reads_the_cache():
    calls: list = []
    find = counting(calls)
    assert find(2, 3) == find(2, 3) == gpipe(2, 3)
    assert len(calls) == 1
    assert find(2, 3, fused=True) == gpipe(2, 3, fused=True)
    assert len(calls) == 2


def test_the_switch_switches_off_reading_and_writing(files, monkeypatch):
    calls: list = []
    find = counting(calls)
    monkeypatch.setenv("JAXPIPE_NO_CACHE", "1")
    find(2, 3)
    assert not files.exists()
    monkeypatch.setenv("JAXPIPE_NO_CACHE", "")
    find(2, 3)
    assert len(list(files.iterdir())) == 1
    monkeypatch.setenv("JAXPIPE_NO_CACHE", "1")
    find(2, 3)
    assert len(calls) == 3


def test_the_signature_stays():
    assert inspect.signature(cached(auto)) == inspect.signature(auto)


def without_first_action(text: str) -> str:
    assert "0F0 " in text
    return text.replace("0F0 ", "", 1)


DAMAGES = {
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "deep": lambda text: "[" * 100_000,
    "no schedule": lambda text: '{"orders": 1}',
    "no text": lambda text: "\udcff",
    "no JSON": lambda text: "0F0",
    "cannot run": without_first_action,
    "another shape": lambda text: json.dumps(json.loads(text) | to_json(gpipe(2, 3))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_files_are_replaced(damage, files):
    first = search(2, 4, 4)
    (file,) = files.iterdir()
    written = file.read_text()
    file.write_text(DAMAGES[damage](written), errors="surrogateescape")
    assert search(2, 4, 4) == first
    assert file.read_text() == written


def test_links_are_replaced(files):
    """To a schedule under another limit, and to a device without end."""
    search(2, 4, 5)
    (other,) = files.iterdir()
    first = search(2, 4, 4)
    (file,) = set(files.iterdir()) - {other}
    for target in (other, "/dev/zero"):
        file.unlink()
        file.symlink_to(target)
        assert search(2, 4, 4) == first
        assert file.is_file()


def test_cache_keys_hold_every_input(files):
    for p, m, k in [(2, 4, 4), (3, 4, 4), (2, 5, 4), (2, 4, 5)]:
        search(p, m, k)
    for costs in (Costs(1, 2, 1), Costs(1, 1, 1, 1)):
        search(2, 4, 4, costs)
    assert len(list(files.iterdir())) == 6


def test_unwritable_cache_costs_time_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert search(2, 4, 4) == search(2, 4, 4)
