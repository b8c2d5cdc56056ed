"""The package as it is imported and installed: light to import, every public name in reach."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata, packages_distributions
from pathlib import Path
from typing import get_type_hints

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jaxpipe
from jaxpipe.cli import main
from jaxpipe.runtime.options import Arguments, Options
from jaxpipe.runtime.zero import Zero

TOP = Path(__file__).parents[1]
SHOW = "show zb-v --stages 2 --microbatches 4"
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "chex")


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import jaxpipe; jaxpipe.schedules.build('1f1b', stages=2, microbatches=4)", HEAVY),
        (f"from jaxpipe.cli import main; main({SHOW.split()})", HEAVY),
        ("import jaxpipe; jaxpipe.Pipeline", ("jaxpipe.testing",)),
        ("import jaxpipe.testing", ("orbax", "chex", "flax")),
    ],
)
def test_what_is_heavy_is_loaded_only_where_it_is_needed(code, heavy):
    check = f"{code}; import sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_public_name_is_there():
    for name in jaxpipe.__all__:
        assert getattr(jaxpipe, name) is not None
        assert name in dir(jaxpipe)
    with pytest.raises(AttributeError, match="no attribute 'Pipelines'"):
        jaxpipe.Pipelines  # noqa: B018  (the access is what is tested)


def test_type_checkers_know_the_options_of_a_pipeline():
    given = get_type_hints(Arguments)
    declared = get_type_hints(Options)
    assert list(given) == list(declared)
    assert given | {"zero": Zero} == declared
    with pytest.raises(TypeError, match=r"^Pipeline\(\) got an .* argument 'rematt'"):
        jaxpipe.Pipeline(
            None, None, schedule="1f1b", mesh=jaxpipe.make_mesh(stage=2), rematt="full"
        )


def test_a_type_checker_knows_the_public_names_and_no_others(tmp_path):
    probe = tmp_path / "probe.py"
    lines = ["import jaxpipe", *(f"jaxpipe.{name}" for name in [*jaxpipe.__all__, "Pipelin"])]
    probe.write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", "--follow-imports=skip", f"--cache-dir={os.devnull}"]
    command += [str(TOP / "jaxpipe/__init__.py"), str(probe)]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    assert f'probe.py:{len(lines)}: error: Module has no attribute "Pipelin"' in found
    assert "Found 1 error" in found


def test_the_wheel_ships_the_library_alone_and_requires_what_it_imports():
    settings = tomllib.loads((TOP / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["jaxpipe"]}
    nodes = [
        node
        for path in (TOP / "jaxpipe").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    modules = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {module.partition(".")[0] for module in modules} - {"jaxpipe"}
    required = {re.match(r"[\w-]+", text)[0] for text in settings["project"]["dependencies"]}
    providers = packages_distributions()
    used = {name for module in imported for name in providers.get(module, [])}
    assert imported - sys.stdlib_module_names <= providers.keys()
    assert used & required == required
    assert all(required & set(providers[name]) for name in imported & providers.keys())


def test_the_extras_for_gpus_are_extras_of_jax():
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {re.match(r"jax\[(\w+)\]", *extras[name])[1] for name in ("gpu", "gpu-cuda13")}
    assert named == {"cuda12", "cuda13"} <= {*metadata("jax").get_all("Provides-Extra")}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_the_lock_has_a_version_of_every_requirement_that_fits(python):
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    resolved = extras.keys() - {"parity", "browser"}
    texts = [*project["dependencies"], *(text for name in resolved for text in extras[name])]
    versions = locked(python)
    for requirement in map(Requirement, texts):
        if requirement.name != "jaxpipe":
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_page_on_installation_has_the_versions_of_the_lock():
    page = (TOP / "docs" / "installation.md").read_text()
    rows = re.findall(r"^\| (3[\d., ]+) \|" + r" ([\d.]+)[^|]*\|" * 4 + "$", page, re.MULTILINE)
    assert [pythons for pythons, *_ in rows] == ["3.11", "3.12, 3.13, 3.14"]
    for pythons, *stated in rows:
        for python in pythons.split(", "):
            versions = locked(python)
            names = "jax", "flax", "numpy", "jax-cuda12-plugin"
            assert stated == [versions[name] for name in names]
            assert versions["jax-cuda12-plugin"] == versions["jax-cuda13-plugin"]


def locked(python: str) -> dict[str, str]:
    """Reads the versions that the lock has for a Python on this platform."""
    lines = (TOP / "requirements.lock").read_text().splitlines()
    here = {"python_full_version": f"{python}.0", "python_version": python}
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(here)
    }


def test_the_command_prints_its_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxpipe {jaxpipe.__version__}\n"


def test_no_test_has_a_time_limit_of_its_own():
    """Those of `limits` grow with the load of the machine."""
    number = re.compile(r"timeout(_seconds)?=\d|\bSECONDS = \d{2,}|monotonic\(\) \+ \d")
    tests = [path for path in (TOP / "tests").rglob("*.py") if path != Path(__file__)]
    assert [path for path in tests if number.search(path.read_text(encoding="utf-8"))] == []
