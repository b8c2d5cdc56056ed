"""Simulated devices for every test and little time for LLVM, set before jax is imported."""

import ctypes
import dataclasses
import gc
import os
import resource
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import limits

os.environ["JAX_PLATFORMS"] = "cpu"
# readline, which pytest imports, sets it for the processes of pytest-xdist alone.
os.environ.pop("COLUMNS", None)
# Tests compile more than they compute. Lines of code in programs cost a tenth, and nothing reads
# them.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# The second flag turns a hang at a collective into a failure. The passes of the third one take a
# fifth of the time that a program with loops takes to compile. The fourth one more than halves that
# time; newer versions of XLA do not know it. Tests that look at compiled programs leave loops'
# passes in (`compilations.AS_USED`). XLA's verifier between its passes takes a tenth, and so does
# what the last flag leaves out: programs here are too small to be compiled in parts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + f" {limits.collectives()}"
    + " --xla_disable_hlo_passes=while-loop-invariant-code-motion,simplify-while-loops,hlo-verifier"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jax").startswith("0.10.") else "")
    + (" --xla_cpu_parallel_codegen_split_count=1" if version("jax").startswith("0.10.") else "")
)

import hypothesis
import pytest

# No test may depend on how fast the machine is.
hypothesis.settings.register_profile("jaxpipe", deadline=None)
hypothesis.settings.load_profile("jaxpipe")

# A trace makes many objects and few cycles.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish():
    """Leaves what imports and collection made out of the garbage collector's passes."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives each worker of pytest-xdist whole files: their tests share compiled programs."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # files with many tests are not those that take long
    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True, scope="module")
def little_memory(request):
    """Drops what a file has cached when it ends, and compiled programs once they take more than a
    gigabyte: a process would grow to 5 of them."""
    yield
    for made in vars(request.module).values():
        if hasattr(made, "cache_clear"):
            made.cache_clear()
    if "jax" in sys.modules and _resident_bytes() > 2**30:
        import jax

        jax.clear_caches()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)


def _resident_bytes():
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


@pytest.fixture(scope="session")
def trainer(tmp_path_factory):
    """Runs train.py on a tiny model and text; pytest-xdist's workers share the data."""
    import command

    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder
    return command.make_trainer(shared / "trainer")


@pytest.fixture(scope="session")
def toy_trainer(trainer):
    """Runs train.py on a toy, in half the time: for what is the same with any model."""
    return dataclasses.replace(trainer, name="toy.yaml")


@pytest.fixture(scope="session")
def unbroken(trainer, tmp_path_factory):
    """A whole run's folder and what it printed: what broken runs must equal."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    return run, trainer.run("--run-dir", run)


@pytest.fixture
def copy(unbroken_toy, tmp_path):
    """A whole run of the toy that a test may break."""
    return shutil.copytree(unbroken_toy, tmp_path / "copy")


@pytest.fixture
def small_disk(tmp_path):
    """Gives disks of some kilobytes, one after another."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def unmount():
        subprocess.run(["umount", str(folder)], check=False, capture_output=True)

    def mount(kilobytes):
        unmount()
        options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)]
        if shutil.which("mount") is None or subprocess.run(["mount", *options]).returncode:
            pytest.skip("a small disk needs the right to mount one")
        return folder

    yield mount
    unmount()


@pytest.fixture(scope="session")
def unbroken_toy(toy_trainer, tmp_path_factory):
    """A whole run of the toy."""
    run = tmp_path_factory.mktemp("unbroken_toy") / "run"
    finished = toy_trainer.run("--run-dir", run)
    assert "zero everywhere has about 0.5" in finished.out
    assert "a toy of 128 held-out rows" in finished.out
    return run
