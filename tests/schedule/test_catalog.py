"""The registry: what it refuses, and schedules of one's own."""

import dataclasses
import doctest
import importlib
import pkgutil
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

import jaxpipe.schedule
from jaxpipe.schedule import catalog
from jaxpipe.schedule.generators.breadth_first import breadth_first, gpipe
from jaxpipe.schedule.simulate import Costs


def test_unknown_names_get_the_nearest():
    for name, nearest in (
        *(("1f1d", "'1f1b'"), ("GPipe", "'gpipe'"), ("vmin-fused", "'v-min'")),
        *(("zero_bubble", "'zb-v'"), ("interleaved-published", "'interleaved'")),
        *(("pipedream2bw", "'pipedream', '2bw'"), ("interleave", "'interleaved'")),
    ):
        with pytest.raises(ValueError, match=rf"name='{name}'.*\nNearest valid: {nearest}\."):
            catalog.build(name, stages=2, microbatches=2)


def test_all_failures_of_build_come_together():
    with pytest.raises(ValueError, match=r"(?s)stages=0.*microbatches=-1.*chunks=2.*: 1\.$"):
        catalog.build("gpipe", stages=0, microbatches=-1, chunks=2)
    with pytest.raises(ValueError, match=r"(?s)stages=0.*chunks=0.*at least 1.*limit=-1.*above 0"):
        catalog.build("nope", stages=0, microbatches=1, chunks=0, memory_limit=-1)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("gpipe", {"chunks": 2}, r"each of its stages holds 1 chunk\.\nNearest valid: 1\."),
        ("dualpipe-v", {"chunks": 4}, r"each of its stages holds 2 chunks\.\nNearest valid: 2\."),
        ("gpipe", {"group": 4}, r"^group=4 .* has no such option\.\nLeave group out\."),
        ("zb-v", {"slices": 4}, r"^slices=4 .*\n.* Used by gpipe, .*, interleaved-zb, auto\.$"),
        ("hanayo", {"chunks": 3}, r"chunks=3 .* a multiple of 2\.\nNearest valid: 2, 4\."),
        ("hanayo", {"chunks": 1}, r"chunks=1 .* a multiple of 2\.\nNearest valid: 2\."),
        ("hanayo", {"memory_limit": 0.5}, r"memory_limit=0\.5 .*\nNearest valid: 1\."),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_the_nearest(name, options, expected):
    """The only number that a schedule lets one choose is accepted."""
    with pytest.raises(ValueError, match=expected):
        catalog.build(name, stages=4, microbatches=7, **options)
    assert catalog.build("dualpipe-v", stages=2, microbatches=2, chunks=2).num_chunks == 2


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(catalog, "_entries", dict(catalog._entries))


@pytest.mark.usefixtures("registry")
def test_a_schedule_of_ones_own_reads_what_its_parameters_say():
    @catalog.register("mine")
    def mine(num_stages, num_microbatches, *, num_chunks=3):
        """Like breadth-first."""
        return breadth_first(num_stages, num_microbatches, num_chunks=num_chunks)

    assert catalog.build("mine", stages=2, microbatches=4).num_chunks == 3
    assert catalog.build("mine", stages=2, microbatches=4, chunks=5).num_chunks == 5
    assert catalog.entries()[-1].summary == "Like breadth-first."
    with pytest.raises(ValueError, match="has no such option"):
        catalog.build("mine", stages=2, microbatches=4, group=2)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1f1b", "'1f1b' belongs to a built-in schedule.\nNearest valid: 'my-1f1b'"),
        ("2bw", "'2bw' belongs to an asynchronous method.\nNearest valid: 'my-2bw'"),
        ("mine.CSV", "'mine.CSV' looks like a file.\nNearest valid: 'mine'"),
        ("a.b:c", "'a.b:c' looks like a function.\nNearest valid: 'a.b-c'"),
        ("", "needs a name"),
    ],
)
def test_names_that_mean_something_else_are_refused(name, expected):
    with pytest.raises(ValueError, match=expected):
        catalog.register(name)


def changed(**fields):
    """A function whose schedule has other fields than GPipe."""
    return lambda p, m: dataclasses.replace(gpipe(p, m), **fields)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (lambda p, m: None, {}, " returned NoneType, and must return a Schedule"),
        (lambda p, m: 1 // 0, {}, r"raised ZeroDivisionError at .*test_catalog\.py:\d+: integer"),
        (lambda p, m: gpipe(3, 2), {}, "stages=3 and microbatches=2|stages=3, microbatches=2; it"),
        (lambda p, m, *, num_slices: gpipe(p, m), {"slices": 2}, "slices"),
        (changed(orders=(gpipe(1, 2).orders[0][::-1],)), {}, r"(?s)0W1 on .*stage 0 +>0W1<"),
        (changed(orders=(("0F0",),)), {}, "'0F0' on stage 0 is str, and must be an Action"),
        (changed(num_microbatches=3), {}, "0F2 is missing"),
    ],
    ids=["nothing", "raises", "other shape", "not sliced", "order", "no actions", "incomplete"],
)
def test_what_a_function_of_ones_own_does_wrong_is_said(function, options, expected, monkeypatch):
    """Whether it is registered or named by its module."""
    catalog.register("mine")(function)
    monkeypatch.setitem(sys.modules, "theirs", SimpleNamespace(function=function))
    for name in ("mine", "theirs:function"):
        with pytest.raises(ValueError, match=expected):
            catalog.build(name, stages=1, microbatches=2, **options)


def test_a_function_is_named_by_its_module_and_reads_what_its_parameters_say(monkeypatch):
    theirs = SimpleNamespace(
        priced=lambda p, m, *, costs: gpipe(p, m, fused=costs.f == 7),
        any_options=lambda p, m, **options: gpipe(p, m, fused=options == {"num_chunks": 1}),
    )
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    fused = gpipe(2, 4, fused=True).orders
    shape = {"stages": 2, "microbatches": 4}
    assert catalog.build("theirs:priced", **shape, costs=Costs(7, 1, 1)).orders == fused
    assert catalog.build("theirs:any_options", **shape, chunks=1).orders == fused


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("theirs:number", "not a function but int"),
        ("theirs:nothing", "has no attribute 'nothing'"),
        ("theirs:needy", "missing a required"),
        ("no_syntax:f", r"no_syntax\.py:2: invalid syntax"),
        ("no_import:f", r"no_import\.py:1: No module"),
        ("builtins:max", "does not say what parameters it has"),
        (":", "is not a function that Python can import"),
    ],
)
def test_what_is_no_function_that_gives_schedules_is_said(tmp_path, monkeypatch, name, expected):
    theirs = SimpleNamespace(number=3, needy=lambda p, m, *, memory_limit: gpipe(p, m))
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    (tmp_path / "no_syntax.py").write_text("\ndef f(:\n")
    (tmp_path / "no_import.py").write_text("import no_such_module_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=expected):
        catalog.build(name, stages=2, microbatches=2)


@pytest.mark.usefixtures("registry")
def test_installed_schedules_come_by_entry_point(monkeypatch):
    points = [
        EntryPoint(name, value, "jaxpipe.schedules")
        for name, value in (
            ("lost", "no_such_module:f"),
            ("1f1b", "jaxpipe.schedule.generators.breadth_first:gpipe"),
            ("installed", "jaxpipe.schedule.generators.breadth_first:gpipe"),
        )
    ]
    monkeypatch.setattr(catalog, "entry_points", lambda group: points)
    catalog._load_installed.cache_clear()
    with pytest.warns(UserWarning, match="is left out") as caught:
        built = catalog.build("installed", stages=2, microbatches=2)
    assert built == dataclasses.replace(gpipe(2, 2), name="installed")
    lost, taken = (str(warning.message) for warning in caught)
    assert "'lost' = 'no_such_module:f' of some package is left out: ModuleNotFoundError" in lost
    assert "'1f1b' = 'jaxpipe.schedule.generators.breadth_first:gpipe' of some package is" in taken
    assert "left out: ArgumentError" in taken


@pytest.mark.usefixtures("registry")  # an example registers a schedule
def test_examples_in_docstrings_run():
    found = pkgutil.walk_packages(jaxpipe.schedule.__path__, "jaxpipe.schedule.")
    results = [doctest.testmod(importlib.import_module(module.name)) for module in found]
    assert sum(result.attempted for result in results) > 60
    assert sum(result.failed for result in results) == 0
