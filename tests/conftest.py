"""Simulated devices for every test and little time for LLVM, set before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile more than they compute. XLA's own passes, which some tests look at, all run.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# The last flag turns a hang at a collective into a failure.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=60"
)

import pytest


@pytest.fixture(scope="session")
def trainer(tmp_path_factory):
    """Runs train.py on a tiny model and text; pytest-xdist's workers share the data."""
    import command

    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder
    return command.make_trainer(shared / "trainer")


@pytest.fixture(scope="session")
def unbroken(trainer, tmp_path_factory):
    """A whole run, what it printed, and its folder: what broken runs must equal."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    return run, trainer.run("--run-dir", run)
