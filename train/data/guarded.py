"""Functions of what others wrote, such as chat templates, run within limits of time and memory.

Each runs in a process of its own, so that one that never ends, needs all memory or crashes leads to
an error, and to nothing else. The process imports only the function's module.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxpipe.errors import shortened

SECONDS = 300.0
"""Time for a call, unless another is given: far more than any call on ordinary data takes."""
NUM_BYTES = 8 << 30
"""Memory for calls, unless another is given."""
_PROGRAM = "import sys; from train.data.guarded import serve; serve(int(sys.argv[1]))"


class Guarded:
    """A function in a process of its own, which ends with this object.

    Args:
      make: makes the function there; of a module, by whose name it is found.
      arguments: its arguments.
      seconds: time for making the function, and for each call.
      num_bytes: memory, beyond what the process has before (on Linux).

    Raises:
      ValueError: the function cannot be made, as for a call.

    Example:
      >>> import functools
      >>> squared = Guarded(functools.partial, pow, 3)
      >>> squared(4)
      81
    """

    def __init__(
        self,
        make: Callable[..., Callable[..., Any]],
        *arguments: Any,
        seconds: float = SECONDS,
        num_bytes: int = NUM_BYTES,
    ) -> None:
        self._seconds, self._num_bytes = seconds, num_bytes
        self._lock = threading.Lock()
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a library's own words about a panic
            )
        self._end = weakref.finalize(self, _end, self._process, self._connection)
        self._answer((num_bytes, make), SECONDS)  # it is imported
        self._answer(arguments, seconds)

    def __call__(self, *arguments: Any) -> Any:
        """Returns what the function returns.

        Raises:
          ValueError: the function raises something or reaches a limit.
        """
        with self._lock:
            return self._answer(arguments, self._seconds)

    def _answer(self, question: tuple[Any, ...], seconds: float) -> Any:
        try:
            self._connection.send(question)
            if not self._connection.poll(seconds):
                self._end()
                raise ValueError(f"it takes more than {seconds:g} s")
            returned, value = self._connection.recv()
        except (EOFError, OSError):
            self._end()
            memory = f"as more than {self._num_bytes >> 20} MiB of memory does"
            status = self._process.returncode
            raise ValueError(f"it ended its process with status {status}, {memory}") from None
        if not returned:
            raise ValueError(_in_a_line(value))
        return value


def _in_a_line(text: str) -> str:
    return shortened(" ".join(text.split()))


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def serve(descriptor: int) -> None:
    """Answers calls of a `Guarded` in another process until that is gone."""
    connection = Connection(descriptor)
    for number in (signal.SIGINT, signal.SIGTERM):  # the other process decides what they mean
        signal.signal(number, signal.SIG_IGN)
    num_bytes, make = connection.recv()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))
    function: Callable[..., Any] | None = None
    answer: tuple[bool, Any] = True, None
    while True:
        connection.send(answer)
        try:
            arguments = connection.recv()
        except EOFError:
            return
        try:
            if function is None:
                function, answer = make(*arguments), (True, None)
            else:
                answer = True, function(*arguments)
        except MemoryError:
            answer = False, f"it needs more than {num_bytes >> 20} MiB of memory"
        except ValueError as error:
            answer = False, str(error)
        except BaseException as error:  # tokenizers panics with one of its own
            answer = False, f"{type(error).__name__}: {error}"
