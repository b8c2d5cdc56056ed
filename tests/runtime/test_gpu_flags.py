"""XLA's flags for GPUs reach jax on GPUs only, and none of them can stop a run."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import pytest

from jaxpipe import gpu_flags
from jaxpipe.planning.without_devices import use_gpu_flags

CUDA = importlib.metadata.EntryPoint("xla_cuda12", "jax_plugins.xla_cuda12", "jax_plugins")


@pytest.fixture
def gpu(monkeypatch):
    """jax's CUDA plugin is installed."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [CUDA])


@pytest.mark.parametrize("platforms", [None, "", "cuda", "gpu,cpu"])
def test_flags_are_set_where_jax_may_use_a_gpu(gpu, platforms):
    variables = {} if platforms is None else {"JAX_PLATFORMS": platforms}
    assert gpu_flags.apply(variables) == ()  # the installed XLA knows every one
    flags = [f"{name}={value}" for name, value in gpu_flags.FLAGS.items()]
    assert variables["XLA_FLAGS"].split() == flags


def test_nothing_is_set_for_other_devices_a_file_of_flags_or_without_a_plugin(gpu, monkeypatch):
    def unchanged(variables: dict[str, str]) -> bool:
        found = dict(variables)
        return gpu_flags.apply(found) == () and found == variables

    assert unchanged({"JAX_PLATFORMS": "cpu"})
    assert unchanged({"JAX_PLATFORMS": "cpu,tpu"})
    assert unchanged({"XLA_FLAGS": "/etc/xla.flags"})
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    gpu_flags.apply(variables := {})
    assert variables == {}


def test_the_users_flags_win_and_ours_can_be_left_out(gpu):
    name, *others = gpu_flags.FLAGS
    given = f"{name}= --xla_dump_to=/tmp/x"
    gpu_flags.apply(variables := {"XLA_FLAGS": given})
    ours = " ".join(f"{other}={gpu_flags.FLAGS[other]}" for other in others)
    assert variables["XLA_FLAGS"] == f"{given} {ours}"
    gpu_flags.apply(variables := {"XLA_FLAGS": given}, without=gpu_flags.FLAGS)
    assert variables == {"XLA_FLAGS": given}
    gpu_flags.apply(variables := {}, without=[gpu_flags.COMMAND_BUFFERS])
    assert gpu_flags.COMMAND_BUFFERS not in variables["XLA_FLAGS"]
    assert len(variables["XLA_FLAGS"].split()) == len(gpu_flags.FLAGS) - 1


def test_flags_that_would_end_the_process_are_left_out(gpu, monkeypatch):
    unknown = {"--xla_gpu_of_another_version": "1", "--xla_gpu_enable_command_buffer": "+OTHER"}
    known = {"--xla_gpu_experimental_parallel_collective_overlap_limit": "4"}
    monkeypatch.setattr(gpu_flags, "FLAGS", unknown | known)
    variables: dict[str, str] = {}
    wrong, right = ([f"{name}={value}" for name, value in f.items()] for f in (unknown, known))
    assert gpu_flags.apply(variables) == tuple(wrong)
    assert variables == {"XLA_FLAGS": right[0]}
    # Either flag does end a process; what was set instead does not.
    assert [start(flag) != 0 for flag in (*wrong, *right)] == [True, True, False]


def start(flags: str) -> int:
    """The exit status of a program that uses jax with these flags."""
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-c", "import jax; jax.devices(); jax.jit(lambda: 1)()"]
    return subprocess.run(program, env=environment, capture_output=True, check=False).returncode


def test_flags_that_come_too_late_are_an_error():
    """XLA has read its flags with the first backend, and would ignore these."""
    assert jax.devices()
    with pytest.raises(RuntimeError, match="before jax is first used"):
        use_gpu_flags()
