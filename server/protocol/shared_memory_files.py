"""System shared memory: files of /dev/shm, opened by key, read and written within their size."""

import os
import re
import stat
import weakref
from pathlib import Path

from server.errors import InvalidRequest
from server.protocol.shared_memory import SystemRequest

_FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?([^/\0]{1,250})")
_NOT_OURS = ("sem.", "triton_python_backend_shm_region_")
"""Semaphores, and regions that belong to other servers."""


class FileRegion:
    """A range of a file in /dev/shm that belongs to a client."""

    def __init__(self, request: SystemRequest, descriptor: int) -> None:
        self.name = request.name
        self.key = request.key
        self.offset = request.offset
        self.nbytes = request.nbytes
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def read(self, offset: int, nbytes: int) -> memoryview:
        data = memoryview(bytearray(nbytes))
        done = 0
        while done < nbytes:
            count = os.preadv(self._descriptor, [data[done:]], self.offset + offset + done)
            if count == 0:
                raise self._shrunk(offset + nbytes)
            done += count
        return data

    def write(self, offset: int, data: memoryview) -> None:
        if os.fstat(self._descriptor).st_size < self.offset + offset + len(data):
            raise self._shrunk(offset + len(data))
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], self.offset + offset + done)

    def _shrunk(self, wanted: int) -> InvalidRequest:
        actual = os.fstat(self._descriptor).st_size
        return InvalidRequest(
            f"shared memory region '{self.name}' has shrunk since it was registered: its file has {actual} bytes,"
            f" {self.offset + wanted} are needed"
        )


def open_region(request: SystemRequest) -> FileRegion:
    """Open a key as shm_open does. Raises InvalidRequest for a key or range that does not exist."""
    match = _KEY.fullmatch(request.key)
    if match is None or match[1] in (".", "..") or match[1].startswith(_NOT_OURS):
        raise InvalidRequest(
            f"shared memory key {request.key[:80]!r} of region '{request.name}' is not usable; take the name of a POSIX"
            " shared memory object, like '/input'"
        )
    descriptor = _open(match[1], request)
    region = FileRegion(request, descriptor)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(f"shared memory key '{request.key}' of region '{request.name}' is not shared memory")
    if request.offset + request.nbytes > status.st_size:
        raise InvalidRequest(
            f"Invalid shared memory region: '{request.name}': {request.offset} + {request.nbytes} bytes are beyond the"
            f" {status.st_size} bytes of '{request.key}'"
        )
    return region


def _open(file_name: str, request: SystemRequest) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(_FOLDER / file_name, flags)
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a file name"
        raise InvalidRequest(
            f"Unable to open shared memory region: '{request.name}', key '{request.key}': {reason}"
        ) from error
