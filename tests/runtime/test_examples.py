"""Every example in a docstring of the library runs."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import jaxpipe.runtime

MODULES = [
    "benchmarks.hlo",
    "jaxpipe.errors",
    "jaxpipe.gpu_flags",
    "jaxpipe.nnx",
    "jaxpipe.testing",
    *(info.name for info in pkgutil.walk_packages(jaxpipe.runtime.__path__, "jaxpipe.runtime.")),
]
EXAMPLES = [name for name in MODULES if ">>>" in inspect.getsource(importlib.import_module(name))]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
