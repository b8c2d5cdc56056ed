"""Several processes: how they meet, and the rows of a batch that each of them feeds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pydantic

from jaxpipe import cpu_threads
from jaxpipe.errors import in_python, shown
from train.config import Config
from train.errors import ConfigError, Failure, MissingProcessError, refused
from train.processes import calls
from train.processes.calls import Address

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

_HEARTBEAT_SECONDS = 24 * 3600
"""Time after which jax itself ends a run: the watchdog is faster, and names who is missing."""

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
_TAKEN: Literal["taken"] = "taken"
_ANSWER: pydantic.TypeAdapter[list[int] | Literal["taken"]] = pydantic.TypeAdapter(
    list[int] | Literal["taken"]
)
"""The answer of process 0: the numbers that have not come, or that a number is taken."""
_LONGEST_NUMBER, _LONGEST_ANSWER = 1 << 4, 1 << 20
_TEXT_BYTES = 64


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


def start(processes: Processes, *, run: str, patience_seconds: float) -> None:
    """Connects the processes, if there are several. Call it before jax is first used.

    Ends this process for a restart if another one is lost while jax connects them.

    Args:
      patience_seconds: time to wait for all to come.

    Raises:
      MissingProcessError: some have not come.
      ConfigError: jax finds no coordinator in the launcher's environment, process 0 cannot listen
        there, or another process has the same number.
    """
    if processes.count == 1:
        return
    import jax

    from train.processes import watchdog

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    connect = functools.partial(
        jax.distributed.initialize, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
    )
    if processes.coordinator is None:
        try:
            with watchdog.connecting():
                connect()
        except ValueError as error:
            # Open MPI 5, for example, gives no address.
            raise refused(
                f"distributed.coordinator=null, and the launcher of {processes.count} processes "
                "does not say where process 0 is. Pass --distributed.coordinator HOST:PORT.",
                "distributed.coordinator",
            ) from error
    else:
        count, number = processes.count, processes.number
        meet(processes.coordinator, run=run, count=count, number=number, seconds=patience_seconds)
        with watchdog.connecting():
            connect(
                processes.coordinator,
                num_processes=count,
                process_id=number,
                initialization_timeout=math.ceil(patience_seconds),
            )


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


def local_rows(sharding: Sharding, num_rows: int) -> np.ndarray:
    """Finds the rows of a batch that this process's devices hold.

    Args:
      sharding: `jaxpipe.Pipeline.batch_sharding`.

    Returns:
      Their numbers in ascending order, int64.
    """
    is_local = np.zeros(num_rows, bool)
    for index in filter(None, sharding.addressable_devices_indices_map((num_rows,)).values()):
        is_local[index] = True
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


def gathered(text: str) -> list[str]:
    """Returns the texts of all processes, by number; every process must call it.

    Args:
      text: of at most 64 bytes.
    """
    from jax.experimental import multihost_utils

    row = np.frombuffer(text.encode().ljust(_TEXT_BYTES), np.uint8)
    rows = multihost_utils.process_allgather(row).reshape(-1, _TEXT_BYTES)
    return [bytes(row).decode().rstrip() for row in rows]


def global_batch(
    batch: dict[str, np.ndarray], sharding: Sharding, num_rows: int
) -> dict[str, jax.Array]:
    """Joins every process's rows into one batch of global arrays.

    Args:
      batch: leaves ``[rows, ...]``, this process's rows, in the order of `local_rows`.
      sharding: sharding of the leaves ``[num_rows, ...]``.
    """
    import jax

    shapes = {name: (num_rows, *leaf.shape[1:]) for name, leaf in batch.items()}
    return jax.make_array_from_process_local_data(sharding, batch, shapes)


def meet(coordinator: str, *, run: str, count: int, number: int, seconds: float) -> None:
    """Waits until all processes have come; jax, which does not say who is missing, starts next.

    Process 0 listens at the coordinator's port until all others have given their numbers.

    Args:
      coordinator: HOST:PORT of process 0.
      run: identifies the run; processes of others are not counted.

    Raises:
      MissingProcessError: some have not come.
      ConfigError: process 0 cannot listen there, or another process has this number.
    """
    address, until = calls.parsed(coordinator), time.monotonic() + seconds
    token = hashlib.sha256(json.dumps([run, count]).encode()).digest()
    if number != 0:
        return _report(address, token, number, until, seconds)
    try:
        server = calls.listen(port=address[1])
    except OSError as error:
        raise refused(
            f"distributed.coordinator={coordinator}: process 0 cannot listen at this port "
            f"({error.strerror}). Name another port, for all processes.",
            "distributed.coordinator",
        ) from error
    with server:
        _gather(server, token, count, until, seconds)


def _gather(server: socket, token: bytes, count: int, until: float, seconds: float) -> None:
    others = pydantic.TypeAdapter(Annotated[int, pydantic.Field(gt=0, lt=count)])
    come: dict[int, Connection] = {}
    twice: set[int] = set()
    changing = threading.Lock()

    def hear(call: Connection) -> None:
        number = others.validate_json(call.recv_bytes(_LONGEST_NUMBER), strict=True)
        with changing:
            if number not in come or come[number].poll():  # it has ended, and started again
                come[number] = call
                return
            twice.add(number)
        with call:
            call.send_bytes(_ANSWER.dump_json(_TAKEN))

    def missing() -> list[int]:
        return [n for n in range(1, count) if n not in come or come[n].poll()]

    def is_over() -> bool:
        with changing:
            return time.monotonic() > until or (len(come) == count - 1 and not missing())

    calls.serve(server, token, hear, is_over=is_over)
    with changing:
        absent = missing()
        for call in come.values():
            with contextlib.suppress(OSError), call:
                call.send_bytes(_ANSWER.dump_json(absent))
    if absent:
        raise MissingProcessError(absent, seconds, twice=sorted(twice))


def _report(address: Address, token: bytes, number: int, until: float, seconds: float) -> None:
    stranger = None
    while (left := until - time.monotonic()) > 0:
        try:
            with calls.call(address, token, b"%d" % number, seconds=left) as call:
                if not call.poll(left + _REPLY_SECONDS):
                    break
                stranger = calls.written(address)  # unless it has answered
                answer = _ANSWER.validate_json(call.recv_bytes(_LONGEST_ANSWER))
        except (OSError, EOFError, ValueError):
            time.sleep(_RETRY_SECONDS)  # process 0 is not there yet
            continue
        if answer == _TAKEN:
            raise refused(
                f"distributed.process_id={number}: another process of this run has this number "
                "already. Give each process its own.",
                "distributed.process_id",
            )
        if answer:
            raise MissingProcessError(answer, seconds)
        return
    raise MissingProcessError([0], seconds, stranger=stranger)
