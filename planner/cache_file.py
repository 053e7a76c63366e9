"""Files of the cache: each has a checksum of all that it says, and is written as a whole or not at all."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cohabit.planner.errors import FormatError

_HEAD, _MIDDLE, _TAIL = b'{"sha256":"', b'","content":', b"}"
_DIGEST_CHARACTERS = 64


def write(path: Path, content: bytes) -> None:
    """Write a JSON document with its checksum around it. Raises OSError."""
    digest = hashlib.sha256(content).hexdigest().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fd, os.fdopen(os.dup(fd), "wb") as file:
        file.write(b"".join((_HEAD, digest, _MIDDLE, content, _TAIL)))


def read(path: Path) -> bytes:
    """Return the document. Raises FileNotFoundError, or FormatError for a file that is not as it was written."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FormatError(f"{path.name} cannot be read: {error.strerror}") from error
    start = len(_HEAD) + _DIGEST_CHARACTERS + len(_MIDDLE)
    content = raw[start : -len(_TAIL)]
    digest = hashlib.sha256(content).hexdigest().encode()
    if raw != b"".join((_HEAD, digest, _MIDDLE, content, _TAIL)):
        raise FormatError(f"{path.name} is truncated or damaged: its checksum does not fit")
    return content


@contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Open a new file that replaces the path if the block succeeds. Raises OSError.

    The file has no name before that where the file system can do so, so that a killed process leaves nothing behind.
    """
    folder = path.parent
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        temporary = None
    except OSError:
        fd, temporary = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")
    try:
        yield fd
        os.fsync(fd)
        if temporary is None:
            name = str(folder / f".{path.name}.{os.getpid()}")
            os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=fd, follow_symlinks=True)
            temporary = name
        os.replace(temporary, path)
    except BaseException:
        if temporary is not None:
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
