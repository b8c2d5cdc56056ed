"""Object stores: objects by name under ``s3://BUCKET/PREFIX`` or ``gs://BUCKET/PREFIX``.

Tensorstore, which orbax depends on, has the drivers. A write can be made to depend on the version
that it replaces: ``If-None-Match`` and ``If-Match`` in S3, ``ifGenerationMatch`` in Google's store.
A deletion in S3 cannot, so nothing here relies on one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_SCHEMES = ("s3://", "gs://")
_MOST_RETRIES = 6
"""Retries of a request, after 1 s, 2 s, 4 s and so on; tensorstore makes 32 by default."""


def is_url(path: str) -> bool:
    """Says whether a path names objects in a store."""
    return path.startswith(_SCHEMES)


def local_folder(path: str) -> Path:
    """Returns the folder of a run on this machine; for a URL, that of its copy in ``TMPDIR``.

    Example:
      >>> local_folder("runs/gpt")
      PosixPath('runs/gpt')
    """
    if not is_url(path):
        return Path(path)
    readable = re.sub(r"\W+", "-", path)[-100:]
    name = f"{readable}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    return Path(tempfile.gettempdir()) / f"jaxpipe-{os.getuid()}" / name


class StoreError(OSError):
    """A store cannot be reached, or refuses."""


class Stored(NamedTuple):
    """The content of an object at one moment.

    Args:
      content: None if there is no such object.
      version: what `ObjectStore.replace` expects; it differs for every content.
    """

    content: bytes | None
    version: bytes


class ObjectStore:
    """The objects whose names begin with a URL.

    The keys are found as AWS's and Google's own tools find them. ``AWS_ENDPOINT_URL`` names another
    store of the same interface.

    Args:
      url: ``s3://`` or ``gs://``, a bucket, and a prefix, to which a slash is added.

    Raises:
      StoreError: the URL names no bucket. All methods raise it if the store cannot be reached, or
        refuses.

    Example:
      >>> store = ObjectStore("s3://bucket/runs/gpt")  # doctest: +SKIP
      >>> store.write("config.yaml", b"task: gpt\\n")  # doctest: +SKIP
      >>> store.names()  # doctest: +SKIP
      ['config.yaml']
    """

    def __init__(self, url: str) -> None:
        import tensorstore  # orbax needs it later; the command line need not wait for it

        self.url = url
        with _as_os_error(url):
            self._objects = tensorstore.KvStore.open(_spec(url)).result()

    def names(self) -> list[str]:
        """Returns the names of all objects, in order."""
        with _as_os_error(self.url):
            return sorted(name.decode() for name in self._objects.list().result())

    def read(self, name: str) -> Stored:
        """Reads an object whole."""
        with _as_os_error(self.url):
            read = self._objects.read(name).result()
        return Stored(read.value if read.state == "value" else None, read.stamp.generation)

    def write(self, name: str, content: bytes) -> None:
        """Writes an object; readers find its old content or the new."""
        with _as_os_error(self.url):
            self._objects.write(name, content).result()

    def replace(self, name: str, content: bytes, *, version: bytes) -> bytes | None:
        """Writes an object unless another process has written it meanwhile.

        Args:
          content: its new content, which must differ from the old.
          version: the version that was read.

        Returns:
          The new version; None if the object had another one than that.
        """
        with _as_os_error(self.url):
            written = self._objects.write(name, content, if_equal=version).result()
        return written.generation or None

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects, one after the other."""
        with _as_os_error(self.url):
            for name in names:
                self._objects.write(name, None).result()


def _spec(url: str) -> dict[str, Any]:
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if not bucket:
        raise StoreError(f"{url} names no bucket")
    spec: dict[str, Any] = {"bucket": bucket, "path": f"{prefix}/" if prefix else ""}
    retries = {"max_retries": _MOST_RETRIES}
    if scheme == "gs":
        return spec | {"driver": "gcs", "gcs_request_retries": retries}
    region = os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION"))
    if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in os.environ:  # which come first anyway, and files are not missed
        spec["aws_credentials"] = {"type": "environment"}
    return spec | {"driver": "s3", "s3_request_retries": retries}


@contextlib.contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    """Turns the errors of tensorstore, which are all ValueError, into that of a store."""
    try:
        yield
    except ValueError as error:
        # The rest of the message repeats the answer of the server.
        reason = str(error).partition(" [")[0]
        raise StoreError(f"{url} cannot be reached or used ({reason})") from error
