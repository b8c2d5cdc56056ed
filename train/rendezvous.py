"""The meeting of several processes at the start, which names those that have not come."""

from __future__ import annotations

import contextlib
import json
import socket
import time

from train.errors import MissingProcessError

_RETRY_SECONDS = 0.2
_REPLY_SECONDS = 5.0


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
