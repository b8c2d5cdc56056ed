"""Time limits of tests: they end what hangs, and grow with what else the machine has to do."""

import os


def scaled(seconds: float) -> int:
    """Returns a time of an idle machine, by the load of this one and JAXPIPE_TEST_PATIENCE."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return round(seconds * max(load, 1) * float(os.environ.get("JAXPIPE_TEST_PATIENCE", 1)))


def hang() -> int:
    """Returns the seconds after which a process hangs; one takes 5 on an idle machine."""
    return scaled(600)


def collectives() -> str:
    """Returns the flag of XLA that turns a hang at a collective into a failure."""
    return f"--xla_cpu_collective_call_terminate_timeout_seconds={scaled(120)}"
