"""Calls between the processes of a run: connections that show a token before anything is read.

Anyone on the network can connect. Until a connection has shown the token it has a few seconds for
as many bytes as a token has, and only some connections may be at this point at once. Nothing is
encrypted, so the network must be trusted.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

Address = tuple[str, int]

_TOKEN_SECONDS = 5.0
"""Time for a connection to show the token."""
_MOST_STRANGERS = 64
"""Number of connections that may be about to show the token; further ones wait in the kernel."""
_PAUSE_SECONDS = 0.2
"""Longest time between two looks at whether to go on serving."""


def parsed(text: str) -> Address:
    """Reads HOST:PORT, where an IPv6 address is in brackets.

    Example:
      >>> parsed("[::1]:8476")
      ('::1', 8476)
    """
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def written(address: Address) -> str:
    """Undoes `parsed`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str = "", port: int = 0) -> socket.socket:
    """Listens at an address of this machine, or at all of them, IPv4 and IPv6.

    Raises:
      OSError: it cannot.
    """
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    server = socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=dual)
    server.settimeout(_PAUSE_SECONDS)
    return server


def call(address: Address, token: bytes, message: bytes, *, seconds: float) -> Connection:
    """Calls a process of the run; the caller closes the connection.

    Raises:
      OSError: nobody is there.
    """
    with socket.create_connection(address, seconds) as connected:
        connected.sendall(token)
        connected.settimeout(None)
        connection = Connection(connected.detach())
    connection.send_bytes(message)
    return connection


def serve(
    server: socket.socket,
    token: bytes,
    answer: Callable[[Connection], None],
    *,
    is_over: Callable[[], bool],
) -> None:
    """Answers calls, each in a thread of its own, until it is over.

    Args:
      server: from `listen`.
      token: what a caller must show; all others are cut off.
      answer: reads and answers the message of a call, and closes it or keeps it. Errors of the
        connection and of what it sends end this call alone.
      is_over: asked several times a second; a closed server ends it, too.
    """
    strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
    while not is_over() and server.fileno() >= 0:
        if not strangers.acquire(timeout=_PAUSE_SECONDS):
            continue
        try:
            given = server.accept()[0], token, answer, strangers
            threading.Thread(target=_admit, args=given, daemon=True).start()
        except TimeoutError:
            strangers.release()
        except (OSError, RuntimeError):  # no file or thread is left, or the caller has gone
            strangers.release()
            time.sleep(_PAUSE_SECONDS)


def _admit(
    connected: socket.socket,
    token: bytes,
    answer: Callable[[Connection], None],
    strangers: threading.Semaphore,
) -> None:
    with connected, contextlib.suppress(OSError, EOFError, ValueError):
        try:
            shown = _received(connected, len(token))
        finally:
            strangers.release()
        if secrets.compare_digest(shown, token):
            connected.settimeout(None)
            answer(Connection(connected.detach()))


def _received(connected: socket.socket, size: int) -> bytes:
    """Receives as many bytes, or fewer if the connection ends."""
    until, received = time.monotonic() + _TOKEN_SECONDS, b""
    while len(received) < size:
        connected.settimeout(max(until - time.monotonic(), 0.001))
        more = connected.recv(size - len(received))
        if not more:
            break
        received += more
    return received
