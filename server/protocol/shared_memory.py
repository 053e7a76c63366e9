"""Client shared memory: regions registered by name, and windows of them that hold tensors.

Regions are read and written through their file, never mapped. If a client shrinks its region, it gets an error, where
touching a mapping would kill the server.
"""

import os
import re
import resource
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cohabit.server.errors import InvalidRequest, Refused

MOST_REGIONS = 1024
_QUICK_BYTES = 4 << 20
_FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?([^/\0]{1,250})")
_NOT_OURS = ("sem.", "triton_python_backend_shm_region_")
"""Name prefixes of semaphores, and of other servers' regions."""


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes of a region for a tensor, within the registered region."""

    region: "FileRegion"
    offset: int
    nbytes: int

    def read(self) -> memoryview:
        return self.region.read(self.offset, self.nbytes)

    def write(self, data: memoryview) -> None:
        """Write a tensor to the window's beginning. Raises InvalidRequest if it is larger than the window."""
        if len(data) > self.nbytes:
            raise InvalidRequest(
                f"shared memory size specified with the request for output is {self.nbytes} bytes in region"
                f" '{self.region.name}', should be at least {len(data)} bytes to hold the results"
            )
        self.region.write(self.offset, data)


@dataclass(frozen=True, slots=True)
class SystemRequest:
    name: str
    key: str
    offset: int
    nbytes: int


def no_system(request: SystemRequest) -> NoReturn:
    """Refuse: the configuration does not allow client shared memory."""
    raise Refused(
        "Unsupported",
        f"failed to register shared memory region '{request.name}': client shared memory is off; it is on where the"
        " server listens on a loopback address only, or with --client-shm on",
    )


def refuse_cuda(name: str) -> NoReturn:
    """Raise InvalidRequest for every region of device memory."""
    if not name:
        raise InvalidRequest("'region name' is necessary to register cuda shared memory region")
    raise InvalidRequest(
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported: this server takes no device"
        " memory of clients; use system shared memory"
    )


def require_no_cuda(name: str | None) -> None:
    """Raise Refused for a named region of device memory: there are none."""
    if name is not None:
        raise Refused("RegionNotFound", f"Unable to find CUDA shared memory region: '{name}'")


class Regions:
    """The registered regions of one server. Belongs to the event loop's thread."""

    def __init__(self, open_system: "Callable[[SystemRequest], FileRegion]" = no_system) -> None:
        self._open_system = open_system
        self._regions: dict[str, FileRegion] = {}
        self._uses: set[RegionUse] = set()
        self._leaving: set[str] = set()
        """Regions unregistered while a request used them."""

    @property
    def refused(self) -> frozenset[str]:
        """Unavailable extensions, by Triton's names."""
        system = ("system_shared_memory",) if self._open_system is no_system else ()
        return frozenset((*system, "cuda_shared_memory"))

    @property
    def slow(self) -> bool:
        """Whether reading or writing a tensor may take over a millisecond and needs a thread."""
        return any(region.nbytes > _QUICK_BYTES for region in self._regions.values())

    def register(self, request: SystemRequest) -> None:
        """Raises Refused for a name in use, and InvalidRequest for a key or range that does not exist."""
        if not request.name:
            raise InvalidRequest("'region name' is necessary to register system shared memory region")
        if request.name in self._regions:
            raise Refused("AlreadyRegistered", f"shared memory region '{request.name}' already in manager")
        if len(self._regions) >= MOST_REGIONS:
            raise InvalidRequest(f"{MOST_REGIONS} shared memory regions are registered already; unregister one")
        if request.nbytes == 0:
            raise InvalidRequest(
                f"shared memory region '{request.name}' must have at least 1 byte, got byte_size 0"
            )
        self._regions[request.name] = self._open_system(request)

    def unregister(self, name: str | None = None) -> None:
        """Unregister one region, or all. Ignores unknown names, as Triton does.

        A region in use stays registered until its last request has ended, as in Triton from 24.12 on.
        """
        for known in list(self._regions) if name is None else [name] if name in self._regions else []:
            if any(known in use.names for use in self._uses):
                self._leaving.add(known)
            else:
                del self._regions[known]
                self._leaving.discard(known)

    @contextmanager
    def use(self) -> Iterator["RegionUse"]:
        """Find regions for one request, which ends with this block."""
        use = RegionUse(self)
        self._uses.add(use)
        try:
            yield use
        finally:
            self._uses.discard(use)
            for name in use.names & self._leaving:
                self.unregister(name)

    def listed(self, name: str | None = None) -> "list[FileRegion]":
        """Return one region, or all. Raises Refused for an unknown one."""
        if name is None:
            return list(self._regions.values())
        if name not in self._regions:
            raise Refused("RegionNotFound", f"Unable to find system shared memory region: '{name}'")
        return [self._regions[name]]

    def window(self, name: str, offset: int, nbytes: int) -> Window:
        """Find bytes of a region. Raises Refused for an unknown region, and InvalidRequest beyond its end."""
        region = self._regions.get(name)
        if region is None:
            raise Refused("RegionNotFound", f"Unable to find shared memory region: '{name}'")
        if offset + nbytes > region.nbytes:
            raise InvalidRequest(
                f"Invalid offset + byte size for shared memory region: '{name}': {offset} + {nbytes} bytes are"
                f" beyond its {region.nbytes} bytes"
            )
        return Window(region, offset, nbytes)


class RegionUse:
    """The regions used by one request."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self.names: set[str] = set()

    def window(self, name: str, offset: int, nbytes: int) -> Window:
        """See `Regions.window`. Any thread may call this."""
        self.names.add(name)
        return self._regions.window(name, offset, nbytes)


class FileRegion:
    """A range of a client's file in /dev/shm."""

    def __init__(self, request: SystemRequest, descriptor: int) -> None:
        self.name = request.name
        self.key = request.key
        self.offset = request.offset
        self.nbytes = request.nbytes
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Copy bytes out, into memory that the caller owns. Raises InvalidRequest if the file has shrunk."""
        data = memoryview(bytearray(nbytes))
        done = 0
        while done < nbytes:
            count = os.preadv(self._descriptor, [data[done:]], self.offset + offset + done)
            if count == 0:
                raise self._shrunk(offset + nbytes)
            done += count
        return data

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes in. Raises InvalidRequest if the file has shrunk, or the system has no memory for it."""
        if os.fstat(self._descriptor).st_size < self.offset + offset + len(data):
            raise self._shrunk(offset + len(data))
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self.offset + offset + done)
        except OSError as error:  # the file has holes, and the system no memory to fill them
            raise InvalidRequest(
                f"shared memory region '{self.name}' cannot be written: {error.strerror}"
            ) from error

    def _shrunk(self, wanted: int) -> InvalidRequest:
        actual = os.fstat(self._descriptor).st_size
        return InvalidRequest(
            f"shared memory region '{self.name}' has shrunk since it was registered: its file has {actual} bytes,"
            f" {self.offset + wanted} are needed"
        )


def open_region(request: SystemRequest, any_user: bool = False) -> FileRegion:
    """Open a key as shm_open does. Raises InvalidRequest for a key or range that does not exist.

    Refuses other users' objects, unless `any_user`: otherwise a client could make the server read memory forbidden to
    the client.
    """
    match = _KEY.fullmatch(request.key)
    if match is None or match[1] in (".", "..") or match[1].startswith(_NOT_OURS):
        raise InvalidRequest(
            f"shared memory key {request.key[:80]!r} of region '{request.name}' is not usable; take the name of a POSIX"
            " shared memory object, like '/input'"
        )
    descriptor = _open(match[1], request)
    region = FileRegion(request, descriptor)
    status = os.fstat(descriptor)
    if descriptor >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        raise InvalidRequest(
            f"shared memory region '{request.name}' is refused: half of the files that the server may open are open;"
            " unregister regions, or raise the limit of open files"
        )
    if status.st_uid != os.geteuid() and not any_user:
        raise InvalidRequest(
            f"shared memory key '{request.key}' of region '{request.name}' belongs to another user; run the client as"
            " the server's user, or start the server with --client-shm any-user"
        )
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
