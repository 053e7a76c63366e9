"""Cache files: each has a checksum over its content and is written atomically. The user's cache folder."""

import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cohabit.planner.errors import FormatError

_HEAD, _MIDDLE, _TAIL = b'{"sha256":"', b'","content":', b"}"
_DIGEST_CHARACTERS = 64
_STALE_S = 3600.0
"""Age after the last write at which a temporary file counts as abandoned."""


def write(path: Path, content: bytes) -> None:
    """Write a JSON document, wrapped with its checksum. Raises OSError."""
    digest = hashlib.sha256(content).hexdigest().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fd, os.fdopen(os.dup(fd), "wb") as file:
        file.write(b"".join((_HEAD, digest, _MIDDLE, content, _TAIL)))


def read(path: Path) -> bytes:
    """Return the document. Raises FileNotFoundError, or FormatError for an unreadable or damaged file."""
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


def write_first(path: Path, content: bytes) -> bytes:
    """Write a JSON document unless there is one; a damaged one is replaced. Returns the document that is there then.

    Raises OSError, and FormatError if another process has just written a damaged one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    own = unfinished(path)
    write(own, content)
    try:
        os.link(own, path)
    except FileExistsError:
        with suppress(FormatError):
            return read(path)
        os.replace(own, path)
    finally:
        own.unlink(missing_ok=True)
    return read(path)


def user_folder() -> Path:
    """Return the folder for what all of this user's processes share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cohabit"


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[int]:
    """Open a new file that replaces the path if the block succeeds. Raises OSError.

    Until then the file has no name, if the file system supports that, so that a killed process leaves nothing behind.
    """
    folder, temporary = path.parent, None
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, mode)
    except OSError:
        temporary = unfinished(path)
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
    try:
        yield fd
        os.fsync(fd)
        if temporary is None:
            name = unfinished(path)
            os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=fd, follow_symlinks=True)
            temporary = name
        os.replace(temporary, path)
    except BaseException:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def unfinished(path: Path) -> Path:
    """Return a unique temporary name beside a path, after removing files left by killed writers."""
    prefix, stale_s = f".{path.name}.", time.time() - _STALE_S
    for other in os.scandir(path.parent):
        with suppress(FileNotFoundError):  # another writer has removed it
            if other.name.startswith(prefix) and other.is_file() and other.stat().st_mtime < stale_s:
                os.unlink(other)
    return path.with_name(f"{prefix}{secrets.token_hex(8)}")
