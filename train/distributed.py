"""Several processes: how they meet, and the rows of a batch that each of them feeds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxpipe import cpu_threads
from jaxpipe.errors import in_python, shown
from train.config import Config
from train.errors import ConfigError, Failure, MissingProcessError, refused

_HEARTBEAT_SECONDS = 24 * 3600
"""Time after which jax itself ends a run: `train.watchdog` is faster, and names who is missing."""

MAX_DEVICES = 512
"""Most devices of a process; more are taken for a mistake: no host has so many accelerators, and
each simulated one needs threads and memory."""

# Slurm and Open MPI set these for every process they start. Slurm's are those of a job step, since
# the batch script itself runs as one process of a larger job.
_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)
_RETRY_SECONDS = 0.2
_REPLY_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Args:
      count: number of processes.
      number: number of this process.
      coordinator: HOST:PORT of process 0; None lets jax find it in the launcher's environment.
    """

    count: int = 1
    number: int = 0
    coordinator: str | None = None


def find_processes(config: Config, environment: Mapping[str, str] | None = None) -> Processes:
    """Reads ``distributed.*`` and the environment that Slurm or Open MPI set.

    Args:
      config: explicit fields win over the environment.
      environment: variables; the process's own by default.

    Returns:
      The processes; a single one if neither names any.

    Raises:
      ConfigError: there is a coordinator but no number of processes, or the devices cannot be
        shared evenly between them, or are more than they may have.

    Example:
      >>> find_processes(Config(), {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}).number
      1
    """
    environment = os.environ if environment is None else environment
    settings = config.distributed
    count, number = settings.num_processes, settings.process_id
    for count_name, number_name in _LAUNCHERS:
        if count_name in environment and number_name in environment:
            count = _number(environment, count_name) if count is None else count
            number = _number(environment, number_name) if number is None else number
    if settings.coordinator is not None and (count is None or number is None):
        given = in_python("distributed.coordinator", settings.coordinator)
        raise refused(
            f"{given} needs distributed.num_processes (now {count}) and distributed.process_id "
            f"(now {number}), or a launcher that sets them (srun, mpirun).",
            *("distributed.num_processes", "distributed.process_id"),
        )
    processes = Processes(count or 1, number or 0, settings.coordinator)
    num_devices, sizes = config.mesh.num_devices, config.mesh.sizes()
    product = " x ".join(f"{path}={size}" for path, size in sizes.items())
    devices = f"{product} = {num_devices} devices"
    if num_devices % processes.count:
        below, above = (num_devices // processes.count + n for n in (0, 1))
        near = " or ".join(str(n * processes.count) for n in (below, above) if n)
        raise refused(
            f"{devices} cannot be shared evenly by {processes.count} processes "
            f"(distributed.num_processes). Nearest valid: {near} devices.",
            *(*sizes, "distributed.num_processes"),
        )
    most = MAX_DEVICES * processes.count
    if num_devices > most and cpu_threads.COUNT_FLAG not in environment.get("XLA_FLAGS", ""):
        raise refused(
            f"{devices} are more than {MAX_DEVICES} for each of distributed.num_processes="
            f"{processes.count}. Nearest valid: {nearest_meshes(config, most)}.",
            *(*sizes, "distributed.num_processes"),
        )
    return processes


def nearest_meshes(config: Config, num_devices: int) -> str:
    """Returns the meshes that differ in one size and need no more than some devices, in words."""
    sizes, needed = config.mesh.sizes(), config.mesh.num_devices
    fitting = {path: num_devices * size // needed for path, size in sizes.items()}
    valid = [f"{path}={size}" for path, size in fitting.items() if size]
    return " or ".join(valid or [" with ".join(f"{path}=1" for path in sizes)])


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal():
        rule = "must be a number, as a launcher sets it; unset it to start a process by itself"
        raise refused(f"The variable {name}={shown(value)} {rule}.")
    return int(value)


def simulate_devices(config: Config, processes: Processes) -> None:
    """Asks XLA for as many CPU devices as the mesh needs, unless the user has set their number.

    This has no effect on accelerators. Call it before jax is first used.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if cpu_threads.COUNT_FLAG in flags:
        return
    count = config.mesh.num_devices // processes.count
    os.environ["XLA_FLAGS"] = f"{flags} {cpu_threads.COUNT_FLAG}={count}".strip()
    cpu_threads.suffice()


def start(processes: Processes, *, patience_seconds: float) -> None:
    """Connects the processes, if there are several. Call it before jax is first used.

    Args:
      processes: from `find_processes`.
      patience_seconds: time to wait for all to come.

    Raises:
      MissingProcessError: some have not come.
      ConfigError: jax finds no coordinator in the launcher's environment.
    """
    if processes.count == 1:
        return
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    connect = functools.partial(
        jax.distributed.initialize, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
    )
    if processes.coordinator is None:
        try:
            connect()
        except ValueError as error:
            # Open MPI 5, for example, gives no address.
            raise refused(
                f"distributed.coordinator=None, and the launcher of {processes.count} processes "
                "does not say where process 0 is. Pass --distributed.coordinator HOST:PORT.",
                "distributed.coordinator",
            ) from error
    else:
        count, number = processes.count, processes.number
        meet(processes.coordinator, count=count, number=number, seconds=patience_seconds)
        connect(processes.coordinator, num_processes=count, process_id=number)


def from_first(make: Callable[[], Any]) -> Any:
    """Lets process 0 decide for all processes; every process must call it.

    Args:
      make: called by process 0 alone; returns a value that JSON can hold.

    Returns:
      That value on every process, after a round trip through JSON.

    Raises:
      ConfigError: process 0 raised it. Every process raises it, so that none is left waiting.
      RuntimeError: process 0 raised something else.
    """
    from jaxpipe.checkpoint import from_first

    def answer() -> dict[str, Any]:
        try:
            return {"value": make()}
        except ConfigError as error:
            return {"failures": [dataclasses.astuple(failure) for failure in error.failures]}

    answered = from_first(answer)
    if "failures" in answered:
        raise ConfigError(
            [Failure(message, tuple(fields)) for message, fields in answered["failures"]]
        )
    return answered["value"]


def local_rows(sharding, num_rows: int) -> np.ndarray:
    """Finds the rows of a batch that this process's devices hold.

    Args:
      sharding: `jaxpipe.Pipeline.batch_sharding`.
      num_rows: rows of the whole batch.

    Returns:
      Their numbers in ascending order, int64.
    """
    is_local = np.zeros(num_rows, bool)
    for (rows,) in sharding.addressable_devices_indices_map((num_rows,)).values():
        is_local[rows] = True
    return np.flatnonzero(is_local)


def furthest(position: Any) -> Any:
    """Joins the positions in the data of all processes; every process must call it.

    Args:
      position: a tree of numbers; -1 where another process knows it.

    Returns:
      The largest number of any process at each place.
    """
    import jax
    from jax.experimental import multihost_utils

    numbers, tree = jax.tree.flatten(position)
    gathered = multihost_utils.process_allgather(np.array(numbers, np.int32))
    return jax.tree.unflatten(tree, gathered.reshape(-1, len(numbers)).max(axis=0).tolist())


def global_batch(batch: dict[str, np.ndarray], sharding, num_rows: int):
    """Joins every process's rows into one batch of global arrays.

    Args:
      batch: leaves ``[rows, ...]``, this process's rows, in the order of `local_rows`.
      sharding: sharding of the leaves ``[num_rows, ...]``.
      num_rows: rows of the whole batch.
    """
    import jax

    shapes = {name: (num_rows, *leaf.shape[1:]) for name, leaf in batch.items()}
    return jax.make_array_from_process_local_data(sharding, batch, shapes)


def meet(coordinator: str, *, count: int, number: int, seconds: float) -> None:
    """Waits until all processes have come; jax, which does not say who is missing, starts next.

    Process 0 listens at the coordinator's address until all others have given their numbers.

    Args:
      coordinator: HOST:PORT of process 0.
      count: number of processes.
      number: number of this process.
      seconds: time to wait.

    Raises:
      MissingProcessError: some have not come.
      OSError: process 0 cannot listen there.
    """
    host, _, port = coordinator.rpartition(":")
    address, until = (host.strip("[]"), int(port)), time.monotonic() + seconds
    if number == 0:
        _gather(address[1], count, until, seconds)
    else:
        _report(address, number, until, seconds)


def _gather(port: int, count: int, until: float, seconds: float) -> None:
    waiting: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", port)))
        while len(waiting) < count - 1:
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(_REPLY_SECONDS)
                waiting[int(connection.recv(16))] = connection
            except TimeoutError:
                if time.monotonic() < until:
                    continue
                missing = sorted({*range(1, count)} - waiting.keys())
                for other in waiting.values():
                    _answer(other, missing)
                raise MissingProcessError(missing, seconds) from None
            except (OSError, ValueError):
                continue  # it ended, or is none of ours
        for other in waiting.values():
            _answer(other, [])


def _answer(connection: socket.socket, missing: list[int]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(missing).encode())


def _report(address: tuple[str, int], number: int, until: float, seconds: float) -> None:
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(str(number).encode())
                connection.settimeout(until - time.monotonic() + _REPLY_SECONDS)
                if missing := json.loads(connection.recv(1 << 16)):
                    raise MissingProcessError(missing, seconds)
                return
        except (OSError, ValueError):
            time.sleep(_RETRY_SECONDS)  # process 0 is not there yet
    raise MissingProcessError([0], seconds)
