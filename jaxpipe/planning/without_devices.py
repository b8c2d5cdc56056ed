"""Traces and compiles for GPUs that are not there: what a program takes, without running it.

XLA compiles for GPUs that files describe (``h100.txtpb``), as far as it can without measuring:
kernels are not tuned, and nothing here says how fast they are. It needs jax's plugin and compiler
for CUDA, and cuDNN where a model uses its attention, but no GPU: `make gpu-environment` installs
them beside a clone.
"""

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.extend.mlir import ir

from jaxpipe import gpu_flags
from jaxpipe.runtime.memory import bytes_beside_arguments
from jaxpipe.schedule.problems import Problem, refuse

_PROCESSORS = 132
"""Streaming multiprocessors of an H100 SXM (data sheet); jax's Pallas kernels ask for them."""
_CUDNN = 91100
"""The version that traces are made for; what is compiled comes from the installed one."""
GPUS_PER_HOST = 8


def use_gpu_flags() -> None:
    """Sets ``XLA_FLAGS`` as for a run on GPUs, though jax itself has only CPU devices here.

    Raises:
      RuntimeError: jax has been used before, and XLA reads its flags once.
    """
    if xla_bridge.backends_are_initialized():
        raise RuntimeError("XLA has read its flags: call use_gpu_flags before jax is first used.")
    variables = os.environ | {"JAX_PLATFORMS": "cuda"}
    gpu_flags.apply(variables)
    os.environ["XLA_FLAGS"] = variables.get("XLA_FLAGS", "")


def gpus(kind: str, count: int) -> Sequence[jax.Device]:
    """GPUs in hosts of 8, for `jaxpipe.make_mesh` and for compiling; they run nothing.

    Args:
      kind: "h100" or "b200".
      count: how many, fewer than 8 or whole hosts.

    Raises:
      ArgumentError: the packages that compile for them are not installed.
    """
    per_host = min(count, GPUS_PER_HOST)
    if count % per_host:
        rule = f"is not a number of whole hosts of {GPUS_PER_HOST}"
        refuse([Problem("count", count, rule, (count - count % per_host,))])
    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x{count // per_host}x{per_host}",
            target_config=(Path(__file__).parent / f"{kind}.txtpb").read_text("utf-8"),
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        rule = f"cannot be compiled for here ({error})"
        note = (
            "It needs jax-cuda12-plugin of jax's version, nvidia-cuda-nvcc-cu12 and "
            "nvidia-cudnn-cu12, and no GPU; in a clone, `make gpu-environment` installs them."
        )
        refuse([Problem("device", kind, rule, note=note)])
    return found.devices


@contextlib.contextmanager
def attention_of_gpus(*, compute_capability: str = "9.0") -> Iterator[None]:
    """Models that ask jax whether they run on GPUs are told so, and have cuDNN's attention and
    kernels for GPUs of a compute capability: "9.0" is Hopper, "10.0" Blackwell.

    Kernels for Hopper take jax seconds to trace. What only counts needs none of them: they are
    operations of their own, which state their FLOPs whatever computes them.

    Both jax and the models choose them when a program is traced, by the devices of this process;
    jax has no way to say that a program is traced for others. So its answers are replaced while it
    traces, which nothing but counting and compiling without devices may do.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    device = type(jax.devices()[0])
    with (
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.object(device, "core_count", _PROCESSORS, create=True),
        mock.patch.object(device, "compute_capability", compute_capability, create=True),
        mock.patch.object(cudnn, "check_cudnn_version", return_value=_CUDNN),
        mock.patch.object(cudnn, "check_compute_capability", return_value=True),
    ):
        yield


def put_on_host(lowered: jax.stages.Lowered, arguments: Collection[int]) -> None:
    """Says of some arguments of a program, by their numbers, that they lie on the host.

    jax lets no sharding of devices that are not there name a memory, so that what
    `jaxpipe.on_host` asks for is lost on the way here.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    (main,) = (op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    with module.context:
        attributes = []
        for number, given in enumerate(main.arg_attrs):
            named = {one.name: one.attr for one in given}
            if number in arguments:
                named["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            attributes.append(ir.DictAttr.get(named))
        main.arg_attrs = ir.ArrayAttr.get(attributes)


def device_bytes(program: jax.stages.Compiled) -> int:
    """Counts a compiled program's bytes on each device while it runs, its arguments included."""
    memory = program.memory_analysis()
    assert memory is not None  # every backend of jax has one
    return memory.argument_size_in_bytes + bytes_beside_arguments(program)
