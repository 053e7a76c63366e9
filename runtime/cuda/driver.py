"""CUDA through torch: streams, events, copies, pinned memory, pools, graphs, and NVML for memory in use.

Work is issued to the calling thread's current stream. Each stream runs its work in order; only events order work of
different streams. An event stands for the work issued to its stream before the event's last record. A wait issued
before that record waits for nothing.
"""

import atexit
import gc
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from cohabit.planner.errors import format_bytes
from cohabit.runtime.cuda.pools import CarvedPool, close_open_pools
from cohabit.runtime.cuda.staging import LANE_BYTES, CaptureStaging, LaneStaging, Staging
from cohabit.runtime.errors import CaptureFailed, DeviceError, MemoryExceeded
from cohabit.runtime.options import Tf32
from cohabit.runtime.stores.libcuda import OutOfDeviceMemory
from cohabit.runtime.stores.pinned import HostPinning

_cuda: Any = torch.cuda  # largely untyped
_backends: Any = torch.backends
_STREAMS = 32
"""Streams per device and priority in torch's pools, which assign them round-robin."""
_CYCLES_PER_S = 2e9
_NOT_CAPTURED = "kernels could not be captured"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ALLOCATOR_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^]]*\]|[^,\s]+)")
_USABLE_SETTINGS = {"backend": "native", "expandable_segments": "False"}
"""Allocator settings that pools need: other backends have no pools, and expandable segments cannot use given memory."""
_UNUSABLE_SETTINGS = ("max_split_size_mb", "roundup_power2_divisions", "large_segment_size_mb")
"""Allocator settings with which planned tensors do not fit: the pool's large segment would not be split, or tensors
would take more than their size."""
_graphs: "WeakSet[CudaGraph]" = WeakSet()
"""Open graphs. They keep their pools."""
_drivers: dict[int, "CudaDriver"] = {}
_opening = threading.Lock()
Kernels = Callable[[], None]


@atexit.register
def _close_at_exit() -> None:
    """Release graphs, then pools, while Python callbacks still work."""
    for graph in list(_graphs):
        graph.reset()
    close_open_pools()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of device memory: total, free, and held by this process (None if unknown)."""

    total_bytes: int
    free_bytes: int
    process_bytes: int | None


class CudaDriver(HostPinning):
    """One device, by torch's index. A process has one driver for each. Tests have an adversarial fake.

    Errors of the device raise RuntimeError, perhaps from a later call than the failing one.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.device = torch.device("cuda", index)
        libraries = f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {_backends.cudnn.version()}"
        self.name = f"{torch.cuda.get_device_name(index)}, {libraries}"
        self._streams = Counter[bool]()
        self._idle: dict[bool, list[torch.cuda.Stream]] = {False: [], True: []}
        """Streams that were given back, by whether they are urgent. Libraries keep workspaces for them."""
        self._allocated: dict[int, int] = {}
        self._thread = threading.local()
        self._adopted: WeakKeyDictionary[threading.Thread, set[int]] = WeakKeyDictionary()
        """Adopted compute streams by thread object: Linux reuses thread ids."""
        self._staging: dict[int, LaneStaging] = {}
        """By decoding stream."""
        self._libraries: Any = _cuda.MemPool()
        """Handles and workspaces of libraries. Torch 2.12 releases a stream's cuBLAS workspaces with any graph of that
        stream, although other graphs use them. In a separate pool, only the next workspaces can get their bytes, at the
        same addresses."""

    @staticmethod
    def open(index: int = 0) -> "CudaDriver":
        """Return the driver of a device. Raises DeviceError for an unknown index or unusable allocator settings."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            reason = f" ({_obstacle()})" if not count else ""
            raise DeviceError(
                f"there is no CUDA device {index}: torch {torch.__version__} sees {count}{reason}; use --device cpu"
            )
        _refuse_allocator_settings(os.environ)
        with _opening:
            try:
                torch.cuda.set_device(index)
                if index not in _drivers:
                    _drivers[index] = CudaDriver(index)
            except RuntimeError as error:
                raise DeviceError(
                    f"CUDA device {index} cannot be used: {str(error).splitlines()[0]}; if another process has it for"
                    " itself, nvidia-smi -q -d COMPUTE says so"
                ) from error
            return _drivers[index]

    # Streams and events

    def adopt_thread(self, compute: torch.cuda.Stream) -> None:
        """Prepare the calling thread to issue kernels to a stream: allocate libraries' memory per thread and stream.

        Later calls for the same thread and stream do nothing.
        """
        adopted = self._adopted.setdefault(threading.current_thread(), set())
        if compute.cuda_stream not in adopted:
            self._make_workspaces(compute)
            adopted.add(compute.cuda_stream)

    def _make_workspaces(self, compute: torch.cuda.Stream) -> None:
        """Make the libraries allocate their memory per thread and stream, in a pool that no program uses."""
        torch.cuda.set_device(self._index)
        pool = _cuda.use_mem_pool(self._libraries, self.device)
        with torch.cuda.stream(compute), pool, torch.inference_mode():
            for dtype in (torch.float32, torch.float16):
                square = torch.ones(64, 64, dtype=dtype, device=self.device)
                torch.nn.functional.linear(square, square, square[0])
                torch.bmm(square[None], square[None])
                torch.nn.functional.conv2d(square[None, None], square[None, None, :3, :3])
        compute.synchronize()

    def stream(self, *, urgent: bool = False) -> torch.cuda.Stream:
        """Return an unused stream. Pending kernels of an urgent stream run before those of others."""
        if self._idle[urgent]:
            return self._idle[urgent].pop()
        if self._streams[urgent] == _STREAMS:
            raise DeviceError(f"torch has {_STREAMS} streams per device, and all are in use; lower --compute-lanes")
        self._streams[urgent] += 1
        stream: torch.cuda.Stream = _cuda.Stream(self.device, priority=-1 if urgent else 0)
        return stream

    def give_back(self, stream: torch.cuda.Stream, *, urgent: bool = False) -> None:
        """Take a stream back, for later calls of `stream`, and free its staging memory.

        Its work must have ended, and graphs that used its staging memory must be released.
        """
        lane = self._staging.pop(stream.cuda_stream, None)
        if lane is not None:
            with self._entered():
                self._libcuda.free(lane.address)
            self.give_back(lane.link, urgent=True)
        self._idle[urgent].append(stream)

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        """Return a new event. `seconds` needs timed ones."""
        event: torch.cuda.Event = _cuda.Event(enable_timing=timed)
        return event

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Make this the calling thread's current stream inside the block."""
        given, before = getattr(self._thread, "current", None), self._current
        torch.cuda.set_stream(stream)
        self._thread.current = stream
        try:
            yield
        finally:
            torch.cuda.set_stream(before)
            self._thread.current = given

    @property
    def _current(self) -> torch.cuda.Stream:
        """The calling thread's stream. Asking torch creates a new object, which costs as much as a launch."""
        stream: torch.cuda.Stream | None = getattr(self._thread, "current", None)
        return torch.cuda.current_stream(self._index) if stream is None else stream

    def launch(self, kernels: Kernels) -> None:
        """Issue kernels: `kernels` calls torch operators, which run on the current stream."""
        kernels()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy. A pinned buffer must stay unchanged until an event recorded after the copy has been reached."""
        destination.copy_(source, non_blocking=True)

    def staging(self) -> Staging:
        """Return the buffer of the bytes that the current stream decodes next.

        Work that may overlap never shares a buffer: direct issues, graphs replayed on this stream, and graphs replayed
        on another stream have one each. A capture cannot allocate: the decoding stream must have called this before.
        """
        stream, capture = self._current, getattr(self._thread, "capture", None)
        lane = self._staging.get(stream.cuda_stream)
        if lane is None:
            lane = self._staging[stream.cuda_stream] = LaneStaging(self._staging_memory(), self.stream(urgent=True))
        return lane.direct if capture is None else capture.of(stream, lane)

    def _staging_memory(self) -> torch.Tensor:
        try:
            with self._entered():
                address = self._libcuda.allocate(LANE_BYTES)
        except OutOfDeviceMemory as error:
            free_bytes = self.memory().free_bytes
            raise MemoryExceeded(
                f"the device has {format_bytes(free_bytes)} free, less than the {format_bytes(LANE_BYTES)} in which"
                " encoded weights arrive; lower --memory"
            ) from error
        return torch.as_tensor(_AtAddress(address, LANE_BYTES), device=self.device)

    def decode(self, kernels: Kernels) -> None:
        """Issue torch kernels that do not allocate; any thread."""
        with torch.inference_mode():
            kernels()

    def copy_deferred(self, ends: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Issue a copy to `ends()[0]` from `ends()[1]`. Work launched before allocates both; one of them is pinned."""
        self.copy(*ends())

    def record(self, event: torch.cuda.Event) -> None:
        event.record(self._current)

    def wait(self, event: torch.cuda.Event) -> None:
        """Make later work of the current stream wait for the event's last record."""
        event.wait(self._current)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Block the calling thread until the event's last record has been reached."""
        event.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the device time between two timed events. Both must have been reached."""
        return float(start.elapsed_time(end)) / 1e3

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy, so that work issued meanwhile runs without gaps."""
        _cuda._sleep(int(seconds * _CYCLES_PER_S))

    def drain(self) -> None:
        """Block until all issued work has ended."""
        torch.cuda.synchronize(self._index)

    def is_working(self) -> bool:
        """Whether the device still responds."""
        try:
            torch.cuda.synchronize(self._index)
        except RuntimeError:
            return False
        return True

    # Memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory outside torch's allocator, until `free`. Raises MemoryExceeded.

        Torch maps the addresses of its own blocks and of all pools in one table, so a pool's bytes must not be torch's.
        """
        torch.cuda.empty_cache()
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        try:
            with self._entered():
                address = self._libcuda.allocate(nbytes)
        except OutOfDeviceMemory as error:
            memory = self.memory()
            raise MemoryExceeded(
                f"the device has {format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} free, less"
                f" than the {format_bytes(nbytes)} of the arena; lower --memory"
            ) from error
        self._allocated[address] = nbytes
        return torch.as_tensor(_AtAddress(address, nbytes), device=self.device)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of `allocate` not freed yet, without staging memory."""
        return sum(self._allocated.values())

    def free(self, memory: torch.Tensor) -> None:
        """Release memory of `allocate`. It must not be in use, nor belong to a pool.

        A lost device releases memory only when the process ends.
        """
        if memory.nbytes and self.is_working():
            with self._entered():
                self._libcuda.free(memory.data_ptr())
            del self._allocated[memory.data_ptr()]

    def mapped(self, host: torch.Tensor) -> torch.Tensor:
        """Return pinned host memory as a device tensor: kernels read it through the link."""
        raw = host.reshape(-1).view(torch.uint8)
        tensor = torch.as_tensor(_AtAddress(raw.data_ptr(), raw.numel(), raw), device=self.device)
        assert tensor.data_ptr() == raw.data_ptr(), "pinned memory has another address on the device"
        return tensor.view(host.dtype).reshape(host.shape)

    def pool(self, memory: torch.Tensor, large_bytes: int) -> CarvedPool:
        """Return a pool of these device bytes: one segment of `large_bytes`, the rest segments for small tensors.

        For tensors of the current stream. Pools may overlap, but using two overlapping pools at a time corrupts data.
        """
        return CarvedPool(memory, large_bytes)

    def allocating(self, pool: CarvedPool) -> AbstractContextManager[None]:
        """Allocate the calling thread's tensors from the pool inside the block."""
        return pool.allocating()

    def peak_bytes(self, kernels: Kernels) -> int:
        """Run kernels and wait for them. Returns the peak bytes that torch's allocator gave them."""
        torch.cuda.reset_peak_memory_stats(self._index)
        before = torch.cuda.memory_allocated(self._index)
        kernels()
        torch.cuda.synchronize(self._index)
        return torch.cuda.max_memory_allocated(self._index) - before

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self._index)
        return DeviceMemory(total, free, self._nvml.process_bytes())

    @cached_property
    def _nvml(self) -> "_Nvml":
        return _Nvml(self._index)

    # Graphs

    def capture(self, pool: CarvedPool, issue: Callable[[], None]) -> "CudaGraph":
        """Capture the work that `issue` issues to the current stream, and to streams that join it by events.

        Nothing runs. Tensors are allocated from the pool. Raises CaptureFailed, or MemoryExceeded if the graph gets no
        memory; then nothing more can be captured in this pool, because torch's host allocator still has its number.
        """
        graph: Any = torch.cuda.CUDAGraph()
        users = pool.use_count
        torch.cuda.synchronize(self._index)
        error: Exception | None = None
        with _without_garbage_collection():
            self._thread.capture = CaptureStaging(self._current)
            try:
                graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
                issue()
            except Exception as raised:
                error = raised
            finally:
                self._thread.capture = None
            try:
                graph.capture_end()
            except RuntimeError as raised:
                with suppress(RuntimeError):  # torch before 2.12 may still send allocations to the pool
                    torch._C._cuda_endAllocateToPool(self._index, pool.id)
                error = error or raised
        if error is not None:
            with suppress(RuntimeError):
                graph.reset()
            for _ in range(pool.use_count - users):  # references that neither call has released
                torch._C._cuda_releasePool(self._index, pool.id)
            lacks_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
            try:
                if lacks_memory:
                    free_bytes = self.memory().free_bytes
                    raise MemoryExceeded(
                        f"a graph got no memory: {format_bytes(free_bytes)} of the device are free, and"
                        f" {format_bytes(pool.refused_bytes or 0)} were refused in its pool; lower --memory by more"
                        " than graphs take, which `cohabit models` says"
                    ) from error
                raise CaptureFailed(f"{_NOT_CAPTURED}: {str(error).splitlines()[0]}") from error
            finally:
                del error  # a cycle of error and frame would keep the pool's tensors alive
        return CudaGraph(graph, pool, self._current)

    def release(self, graphs: Sequence["CudaGraph"]) -> None:
        """Release graphs and their references to pools. None of them may be running."""
        for graph in graphs:
            graph.reset()
        with_kernels = set[int]().union(*self._adopted.values())
        for number, stream in {graph.stream.cuda_stream: graph.stream for graph in graphs}.items():
            if number in with_kernels:
                self._make_workspaces(stream)

    @contextmanager
    def tf32(self, allowed: Tf32) -> Iterator[None]:
        """Inside the block, use TF32 in these float32 kernels only; for the whole process."""
        # These switches also set the newer per-op ones. Setting only the newer ones would make the two contradict.
        wanted = {_backends.cuda.matmul: allowed == "all", _backends.cudnn: allowed != "none"}
        before = {module: module.allow_tf32 for module in wanted}
        _set_tf32(wanted)
        try:
            yield
        finally:
            _set_tf32(before)


def _obstacle() -> str:
    """Return why torch sees no device, such as a driver that is too old: counting them hides that."""
    try:
        _cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return "and gives no reason"


def _refuse_allocator_settings(environment: Mapping[str, str]) -> None:
    """Raise DeviceError for settings of torch's allocator that break pools of given memory."""
    for variable in _ALLOCATOR_VARIABLES:
        for key, value in _ALLOCATOR_SETTING.findall(environment.get(variable, "")):
            if value != _USABLE_SETTINGS.get(key, value) or key in _UNUSABLE_SETTINGS:
                raise DeviceError(
                    f"the environment variable {variable} has {key}:{value}, with which torch's allocator does not"
                    f" serve memory of the plan's; unset {variable}, or leave {key} out"
                )


def _set_tf32(allowed: Mapping[Any, bool]) -> None:
    for module, is_allowed in allowed.items():
        module.allow_tf32 = is_allowed


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: finalising a CUDA object during a capture ends the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaGraph:
    """A captured graph. It keeps a reference to its pool, whose bytes its kernels use."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: CarvedPool, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        """The stream it was captured on."""
        self._graph = graph
        self._pool = pool
        _graphs.add(self)

    def replay(self) -> None:
        """Issue the captured work to the current stream: after the stream's earlier work, before its later work."""
        self._graph.replay()

    def reset(self) -> None:
        """Release the graph and its reference to the pool only."""
        _graphs.discard(self)
        with suppress(RuntimeError):  # a lost device
            self._graph.reset()


class _AtAddress:
    """Device-addressable bytes with the interface through which torch imports foreign memory."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


class _Nvml:
    """NVML for one device, opened once: opening takes longer than a query."""

    def __init__(self, index: int) -> None:
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            return
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(index).uuid
            self._handle = _nvml_handle(pynvml, str(uuid))

    def process_bytes(self) -> int | None:
        """Return this process's device memory; None without NVML, or if NVML does not know the process."""
        if self._handle is None:
            return None
        import pynvml

        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except pynvml.NVMLError:
            return None
        own = [p.usedGpuMemory for p in processes if p.pid == os.getpid()]
        return int(own[0]) if own and own[0] is not None else None


def _nvml_handle(pynvml: Any, uuid: str) -> Any:
    """Return NVML's handle of a GPU or a MIG part: torch's UUID lacks the prefix that tells them apart."""
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode())
