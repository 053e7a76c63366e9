"""Memory that clients share with the server: regions registered by name, windows of them as tensors' places.

A region is never mapped. Reading and writing go through the file, so that a client that shrinks its region meanwhile
gets an error: touching a mapping there would kill the server.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from server.errors import AlreadyRegistered, InvalidRequest, RegionNotFound, Unsupported

_T = TypeVar("_T")
Kind = Literal["system", "cuda"]

MOST_REGIONS = 1024
_QUICK_BYTES = 4 << 20


class Region(Protocol):
    """A registered region. Whoever holds one may use it, even after it has been unregistered."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Copy bytes out, into memory that the caller owns. Raises InvalidRequest if they are not there any more."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes in. Raises InvalidRequest if there is no room for them any more."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes of a region that hold, or are to hold, a tensor; they lie within the region as it was registered."""

    region: Region
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


@dataclass(frozen=True, slots=True)
class CudaRequest:
    name: str
    handle: bytes
    """A cudaIpcMemHandle_t."""
    device: int
    nbytes: int


class SystemRegion(Region, Protocol):
    @property
    def key(self) -> str: ...

    @property
    def offset(self) -> int: ...


class CudaRegion(Region, Protocol):
    @property
    def device(self) -> int: ...


OpenSystem = Callable[[SystemRequest], SystemRegion]
OpenCuda = Callable[[CudaRequest], CudaRegion]
"""Opens a client's device memory. Raises InvalidRequest for a handle that is none."""


def no_system(request: SystemRequest) -> SystemRegion:
    """Refuse: the operator does not let clients name memory of this machine."""
    raise Unsupported(
        f"failed to register shared memory region '{request.name}': client shared memory is off; it is on where the"
        " server listens on a loopback address only, or with --client-shm on"
    )


def no_cuda(request: CudaRequest) -> CudaRegion:
    """Refuse: models run on the CPU here, so there is no device memory to share."""
    raise InvalidRequest(
        f"failed to register CUDA shared memory region: '{request.name}', GPUs not supported: this server runs its"
        " models on the CPU; use system shared memory"
    )


class Regions:
    """The regions of one server, both kinds under one set of names. Belongs to the event loop's thread."""

    def __init__(self, open_system: OpenSystem = no_system, open_cuda: OpenCuda = no_cuda) -> None:
        self._open_system = open_system
        self._open_cuda = open_cuda
        self._system: dict[str, SystemRegion] = {}
        self._cuda: dict[str, CudaRegion] = {}
        self._largest = 0

    @property
    def refused(self) -> frozenset[str]:
        """The extensions, by Triton's names, that this server does without."""
        system = ("system_shared_memory",) if self._open_system is no_system else ()
        return frozenset((*system, *(("cuda_shared_memory",) if self._open_cuda is no_cuda else ())))

    @property
    def slow(self) -> bool:
        """Whether reading a tensor may take over a millisecond, and had better not be done on the event loop."""
        return self._largest > _QUICK_BYTES

    def register_system(self, request: SystemRequest) -> None:
        """Raises AlreadyRegistered, or InvalidRequest for a key or range that is not there."""
        self._admit(request.name, request.nbytes)
        self._system[request.name] = self._open_system(request)
        self._measure()

    def register_cuda(self, request: CudaRequest) -> None:
        """Raises AlreadyRegistered, or InvalidRequest for a handle or device that is not there."""
        self._admit(request.name, request.nbytes)
        self._cuda[request.name] = self._open_cuda(request)
        self._measure()

    def unregister(self, kind: Kind, name: str | None = None) -> None:
        """Forget a region, or all of a kind. One that is not there is fine, as in Triton."""
        regions: dict[str, SystemRegion] | dict[str, CudaRegion] = self._system if kind == "system" else self._cuda
        if name is None:
            regions.clear()
        else:
            regions.pop(name, None)
        self._measure()

    def system(self, name: str | None = None) -> Iterable[SystemRegion]:
        """All system regions, or one. Raises RegionNotFound."""
        return _listed(self._system, "system", name)

    def cuda(self, name: str | None = None) -> Iterable[CudaRegion]:
        """All CUDA regions, or one. Raises RegionNotFound."""
        return _listed(self._cuda, "CUDA", name)

    def window(self, name: str, offset: int, nbytes: int) -> Window:
        """Find bytes of a region. Raises RegionNotFound, or InvalidRequest for a range beyond the region."""
        region: Region | None = self._system.get(name) or self._cuda.get(name)
        if region is None:
            raise RegionNotFound(f"Unable to find shared memory region: '{name}'")
        if offset + nbytes > region.nbytes:
            raise InvalidRequest(
                f"Invalid offset + byte size for shared memory region: '{name}': {offset} + {nbytes} bytes are"
                f" beyond its {region.nbytes} bytes"
            )
        return Window(region, offset, nbytes)

    def _measure(self) -> None:
        self._largest = max((r.nbytes for r in (*self._system.values(), *self._cuda.values())), default=0)

    def _admit(self, name: str, nbytes: int) -> None:
        if not name:
            raise InvalidRequest("a shared memory region needs a name")
        if name in self._system or name in self._cuda:
            raise AlreadyRegistered(f"shared memory region '{name}' already in manager")
        if len(self._system) + len(self._cuda) >= MOST_REGIONS:
            raise InvalidRequest(f"{MOST_REGIONS} shared memory regions are registered already; unregister one")
        if nbytes == 0:
            raise InvalidRequest(f"shared memory region '{name}' must have at least 1 byte, got byte_size 0")


def _listed(regions: dict[str, _T], kind: str, name: str | None) -> Iterable[_T]:
    if name is None:
        return list(regions.values())
    if name not in regions:
        raise RegionNotFound(f"Unable to find {kind} shared memory region: '{name}'")
    return [regions[name]]
