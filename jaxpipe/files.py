"""Files that others may have damaged or replaced: no device, and nothing without end."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 26
"""Far more than any description of a model or a run has."""


def num_bytes(path: Path) -> int:
    """The size of a file, or of that which a link leads to.

    Raises:
      OSError: it cannot be read, or is a folder, a device or a pipe.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status.st_size


def read_bytes(path: Path) -> bytes:
    """Reads a small file.

    Raises:
      OSError: as `num_bytes`; or it is too large.
    """
    if num_bytes(path) > _MOST_BYTES:
        raise OSError(errno.EINVAL, f"it has more than {_MOST_BYTES >> 20} MiB", str(path))
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Reads a small file of JSON.

    Raises:
      OSError: as `read_bytes`.
      ValueError: it is not JSON, or nests too deeply.
    """
    try:
        return json.loads(read_bytes(path))
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that nobody finds half-written: it has its old content or the new."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
