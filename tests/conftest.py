"""Simulated devices for every test, set before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# The last flag turns a hang at a collective into a failure.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=60"
)
