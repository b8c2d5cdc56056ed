"""Pipeline-parallel training for JAX: every schedule as plain data, one SPMD program to run it.

Importing this package does not import jax, which takes a second: schedules and the command line do
not need it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxpipe.schedule import catalog as schedules

if TYPE_CHECKING:
    from jaxpipe import errors as errors
    from jaxpipe import gpu_flags as gpu_flags
    from jaxpipe import measure as measure
    from jaxpipe import nnx as nnx
    from jaxpipe import testing as testing
    from jaxpipe.api import (
        Appended,
        AsyncPipeline,
        Joined,
        Model,
        Options,
        Pipeline,
        Sum,
        Weighted,
        WithLoss,
        axes_across_hosts,
        init_params,
        load_params,
        make_mesh,
        on_host,
        unpipelined,
        vocabulary,
    )
    from jaxpipe.checkpoint import Checkpoints

__version__ = "0.1.0"

__all__ = [
    "Appended",
    "AsyncPipeline",
    "Checkpoints",
    "Joined",
    "Model",
    "Options",
    "Pipeline",
    "Sum",
    "Weighted",
    "WithLoss",
    "axes_across_hosts",
    "errors",
    "gpu_flags",
    "init_params",
    "load_params",
    "make_mesh",
    "measure",
    "nnx",
    "on_host",
    "schedules",
    "testing",
    "unpipelined",
    "vocabulary",
]

_MODULES = ("errors", "gpu_flags", "measure", "nnx", "testing")


if not TYPE_CHECKING:  # to a type checker such a function has every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'jaxpipe' has no attribute {name!r}")
        if name in _MODULES:
            return importlib.import_module(f"jaxpipe.{name}")
        # Only checkpoints need orbax, which takes a while to import.
        home = "jaxpipe.checkpoint" if name == "Checkpoints" else "jaxpipe.api"
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
