"""The real driver's bookkeeping, with stubs for CUDA: what it asks for, and what it leaves behind after a failure."""

import ctypes
import gc
import itertools
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cohabit.runtime.cuda import driver as driver_module
from cohabit.runtime.cuda import pools
from cohabit.runtime.cuda.driver import CudaDriver, DeviceMemory
from cohabit.runtime.cuda.staging import SLOT_BYTES, STAGING_SLOTS, Staging
from cohabit.runtime.errors import CaptureFailed, DeviceError, MemoryExceeded
from cohabit.runtime.options import Tf32
from cohabit.runtime.stores import pinned as pinned_module
from cohabit.runtime.stores.libcuda import LibCuda


class Library:
    """The driver API's functions, which take and give out host memory."""

    def __init__(self) -> None:
        self.status = 0
        self.held: dict[int, Any] = {}
        self.pinned: dict[int, int] = {}

    def cuMemAlloc_v2(self, address: Any, nbytes: Any) -> int:  # noqa: N802
        if not self.status:
            memory = (ctypes.c_uint8 * nbytes.value)()
            address._obj.value = ctypes.addressof(memory)
            self.held[address._obj.value] = memory
        return self.status

    def cuMemFree_v2(self, address: Any) -> int:  # noqa: N802
        del self.held[address.value]
        return self.status

    def cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: Any) -> int:  # noqa: N802
        if not self.status:
            self.pinned[address.value] = flags.value
        return self.status

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        del self.pinned[address.value]
        return self.status

    def cuGetErrorName(self, status: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_OF_THE_TEST"
        return 0


class Graph:
    """A `torch.cuda.CUDAGraph` that fails where it is told to."""

    fails_at: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.calls: list[str] = []
        graphs.append(self)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails_at:
            raise RuntimeError(f"{name} failed")

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._call("begin")

    def capture_end(self) -> None:
        self._call("end")

    def reset(self) -> None:
        self._call("reset")


graphs: list[Graph] = []


class Stream:
    """A `torch.cuda.Stream`."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, library: Library) -> CudaDriver:
    graphs.clear()
    left: list[tuple[object, ...]] = []

    @contextmanager
    def use_mem_pool(pool: object, device: object) -> Iterator[None]:
        left.append(("pool", pool))
        yield

    cuda = {
        "get_device_name": lambda index: "a stub",
        "MemPool": lambda *allocator: SimpleNamespace(id=(0, 1)),
        "use_mem_pool": use_mem_pool,
        "Stream": lambda device, priority=0: Stream(7),
        "CUDAGraph": Graph,
        "current_stream": lambda index: left.append(("current_stream",)) or Stream(7),
        "set_stream": lambda stream: left.append(("set_stream", stream.cuda_stream)),
        "stream": lambda stream: nullcontext(),
        "set_device": lambda index: None,
        "device": lambda index: nullcontext(),
        "mem_get_info": lambda index: (0, 0),
        "empty_cache": lambda: left.append(("empty_cache",)),
        "synchronize": lambda index: left.append(("synchronize",)),
    }
    for name, stub in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *a, name=name: left.append((name, *a)), raising=False)
    monkeypatch.setattr(pinned_module, "LibCuda", lambda: LibCuda(library))  # type: ignore[arg-type]
    made = CudaDriver(0)
    made.device = torch.device("cpu")  # where its tensors then lie
    made.left = left  # type: ignore[attr-defined]
    return made


def at_address(interface: Any, device: torch.device) -> torch.Tensor:
    address, _ = interface.__cuda_array_interface__["data"]
    (nbytes,) = interface.__cuda_array_interface__["shape"]
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))


def test_an_arena_is_the_driver_s_and_never_torch_s(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has one map for its blocks and for those of pools: an arena of torch's would be erased from it."""
    monkeypatch.setattr(torch, "as_tensor", at_address)
    memory = driver.allocate(4096)
    assert list(library.held) == [memory.data_ptr()]
    assert memory.nbytes == 4096
    assert ("empty_cache",) in driver.left  # type: ignore[attr-defined]
    driver.free(memory)
    assert not library.held
    driver.free(driver.allocate(0))


def test_too_large_an_arena_is_refused_with_the_numbers(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "memory", lambda: DeviceMemory(8 << 30, 1 << 30, None))
    library.status = 2
    with pytest.raises(MemoryExceeded, match=r"has 1\.00 GiB of 8\.00 GiB free, less than the 2\.00 GiB"):
        driver.allocate(2 << 30)


def test_host_memory_that_cannot_be_pinned_is_refused_by_name(driver: CudaDriver, library: Library) -> None:
    host = np.zeros(4096, np.uint8)
    library.status = 1
    with pytest.raises(MemoryExceeded, match=r"pinning 4\.0 KiB .*CUDA_ERROR_OF_THE_TEST \(1\)"):
        driver.pin(host)
    library.status = 0
    driver.pin(host)
    assert library.pinned == {host.ctypes.data: 3}
    driver.unpin(host)
    assert not library.pinned


class Pool:
    """A pool of torch's: what it counts as users, and what the driver has it release."""

    id = (0, 1)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends_itself: bool, reset_releases: bool):
        """`ends_itself`: a failed `capture_end` has ended the allocation; `reset_releases`: `reset` then its use."""
        self.use_count = 1
        self.ended = 0

        def end(device: int, pool: object) -> None:
            if ends_itself:
                raise RuntimeError("not currently recording to mempool_id")
            self.ended += 1

        def release(device: int, pool: object) -> None:
            self.use_count -= 1

        def begin(graph: Graph, pool: object, capture_error_mode: str) -> None:
            self.use_count += 1
            graph._call("begin")

        def reset(graph: Graph) -> None:
            self.use_count -= reset_releases
            graph._call("reset")

        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", release)
        monkeypatch.setattr(Graph, "capture_begin", begin)
        monkeypatch.setattr(Graph, "reset", reset)


@pytest.mark.parametrize(
    ("fails_at", "ends_itself", "reset_releases"),
    [
        (("begin", "end"), False, False),
        (("issue", "end"), False, False),
        (("issue",), False, True),
        (("end",), False, False),
        # From 2.12 on, torch has left the pool before it makes the graph; `reset` may or may not release that use.
        (("end",), True, False),
        (("end",), True, True),
    ],
)
def test_a_failed_capture_leaves_nothing_behind(
    driver: CudaDriver,
    monkeypatch: pytest.MonkeyPatch,
    fails_at: tuple[str, ...],
    ends_itself: bool,
    reset_releases: bool,
) -> None:
    monkeypatch.setattr(Graph, "fails_at", fails_at)
    pool: Any = Pool(monkeypatch, ends_itself=ends_itself, reset_releases=reset_releases)
    collects: list[bool] = []

    def issue() -> None:
        collects.append(gc.isenabled())
        if "issue" in fails_at:
            raise ValueError("issue failed")

    with pytest.raises(CaptureFailed, match=f"could not be captured: {fails_at[0]} failed"):
        driver.capture(pool, issue)
    assert collects == ([] if "begin" in fails_at else [False]), "no garbage is collected in a capture"
    assert gc.isenabled()
    assert pool.ended == ("end" in fails_at and not ends_itself)
    assert pool.use_count == 1
    assert graphs[0].calls[-1] == "reset"


def test_what_a_failed_capture_made_is_gone_without_a_garbage_collection(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is used again at once, and it was planned without leftovers."""
    frame = torch.zeros(1)
    dead = weakref.ref(frame)

    def issue(frame: torch.Tensor = frame) -> None:
        raise ValueError("issue failed")

    pool: Any = SimpleNamespace(id=(0, 1), use_count=1)
    gc.disable()
    try:
        with suppress(CaptureFailed):
            driver.capture(pool, issue)
        del issue, frame
        assert dead() is None
    finally:
        gc.enable()


def test_pinned_memory_stays_while_it_is_registered(driver: CudaDriver) -> None:
    """The system gives its addresses out again, and CUDA refuses to register them a second time."""
    host = np.zeros(4096, np.uint8)
    address, alive = host.ctypes.data, weakref.ref(host)
    driver.pin(host)
    del host
    gc.collect()
    kept = alive()
    assert kept is not None
    driver.unpin(kept)
    assert address not in pinned_module._registered


def test_what_may_be_in_flight_at_once_has_staging_memory_of_its_own(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one stream decodes directly, in graphs replayed on it, and in graphs replayed on the compute stream."""
    monkeypatch.setattr(torch, "as_tensor", at_address)
    swap_in, other, compute = Stream(1), Stream(2), Stream(3)
    pool: Any = SimpleNamespace(id=(0, 1), use_count=1)
    found: dict[str, Staging] = {}

    def stage(name: str, on: Stream = swap_in) -> None:
        with driver.on(on):  # type: ignore[arg-type]
            found[name] = driver.staging()
            assert driver.staging() is found[name]

    stage("directly")
    stage("by another lane", other)
    for name, origin in (("residents", swap_in), ("an inference", compute), ("the next inference", compute)):
        with driver.on(origin):  # type: ignore[arg-type]
            driver.capture(pool, lambda name=name: stage(name))
    begins = {name: staging.slots[0].memory.data_ptr() for name, staging in found.items()}
    assert begins.pop("the next inference") == begins["an inference"], "the compute stream replays one at a time"
    assert found["the next inference"] is not found["an inference"], "each waits for events of its own capture"
    nbytes = sum(slot.memory.nbytes for slot in found["directly"].slots)
    assert nbytes == STAGING_SLOTS * SLOT_BYTES
    ordered = sorted(begins.values())
    assert all(later - earlier >= nbytes for earlier, later in itertools.pairwise(ordered))
    assert len(library.held) == 2, "of each lane that decodes"
    assert driver.allocated_bytes == 0, "arenas are counted"
    library.status = 2
    with pytest.raises(MemoryExceeded, match="encoded weights arrive; lower --memory"):
        stage("no memory", Stream(9))


def test_streams_are_refused_before_torch_gives_the_first_one_out_again(driver: CudaDriver) -> None:
    for _ in range(32):
        driver.stream()
    with pytest.raises(DeviceError, match="32 streams per device"):
        driver.stream()


def test_what_is_open_at_exit_is_closed_graphs_first(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would call back when it releases a pool's segments, and then the interpreter is gone."""
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda take, release: object(), raising=False)
    pool = driver.pool(torch.zeros(64 << 20, dtype=torch.uint8), 0)
    monkeypatch.setattr(type(pool), "use_count", 1)
    graph = driver.capture(pool, lambda: None)
    reset, was_open = Graph.reset, []
    monkeypatch.setattr(Graph, "reset", lambda own: (was_open.append(pool in pools._open), reset(own)))
    driver_module._close_at_exit()
    assert was_open == [True]
    assert graphs[0].calls[-1] == "reset"
    assert pool not in pools._open
    assert graph not in driver_module._graphs


@pytest.mark.parametrize("known", [b"GPU-1-2", b"MIG-1-2", None])
def test_nvml_is_opened_once_for_the_gpu_or_the_part_of_one(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, known: bytes | None
) -> None:
    opened: list[str] = []
    own = SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 << 20)

    def handle(uuid: bytes) -> bytes:
        if uuid != known:
            raise RuntimeError("not found")
        return uuid

    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: opened.append("init"),
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [own] if handle == known else [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1-2"))
    found = [driver.memory().process_bytes for _ in range(3)]
    assert found == [None if known is None else 5 << 20] * 3
    assert opened == ["init"]


def test_a_thread_runs_near_the_device_of_that_pci_address(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(pinned_module, "local_cpus", lambda *address: asked.append(address) or frozenset())
    its = SimpleNamespace(pci_domain_id=0, pci_bus_id=23, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: its)
    for _ in range(2):
        with driver.near():
            pass
    assert asked == [(0, 23, 1)]


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync"),
        ("pinned_num_register_threads:8, expandable_segments : True", "expandable_segments:True"),
        ("max_split_size_mb:128", "max_split_size_mb:128"),
        ("large_segment_size_mb:64", "large_segment_size_mb:64"),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", r"roundup_power2_divisions:\[256:1,512:2,>:4\]"),
    ],
)
def test_settings_of_torch_s_allocator_that_exclude_pools_of_our_own_are_refused_at_open(
    variable: str, given: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(variable, given)
    with pytest.raises(DeviceError, match=f"{variable} has {named}, with which .*; unset {variable}, or leave"):
        CudaDriver.open()


class Switch:
    """A module of torch's with a switch."""

    def __init__(self, allow_tf32: bool) -> None:
        self.allow_tf32 = allow_tf32


@pytest.mark.parametrize(
    ("given", "allowed"), [("none", (False, False)), ("cudnn", (False, True)), ("all", (True, True))]
)
def test_tf32_is_allowed_inside_of_the_block_and_then_as_before(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, given: Tf32, allowed: tuple[bool, bool]
) -> None:
    matmul, cudnn = Switch(allow_tf32=True), Switch(allow_tf32=False)
    monkeypatch.setattr(
        driver_module, "_backends", SimpleNamespace(cuda=SimpleNamespace(matmul=matmul), cudnn=cudnn)
    )
    with driver.tf32(given):
        assert (matmul.allow_tf32, cudnn.allow_tf32) == allowed
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (True, False)


def test_a_pool_that_was_closed_dies_without_a_garbage_collection(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda take, release: object(), raising=False)
    memory = torch.zeros(64 << 20, dtype=torch.uint8)
    gc.disable()
    try:
        pool = pools.CarvedPool(memory, 32 << 20)
        dead, bytes_gone = weakref.ref(pool), weakref.ref(memory)
        pool.close()
        del pool, memory
        assert dead() is None
        assert bytes_gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("closed", [True, False])
def test_torch_may_return_segments_after_their_pool_is_gone(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """It does so when it empties its cache, if a tensor outlived the pool; or when an unclosed pool dies."""
    given: list[int] = []
    monkeypatch.setattr(
        torch._C, "_cuda_customAllocator", lambda *addresses: given.extend(addresses), raising=False
    )
    memory = torch.zeros(64 << 20, dtype=torch.uint8)
    pool = pools.CarvedPool(memory, 32 << 20)
    (carver,) = [c for c in pools._callbacks if c._memory.data_ptr() == memory.data_ptr()]
    take, release = pools._Allocate(given[0]), pools._Free(given[1])
    segment = take(2 << 20, 0, None)
    assert segment == memory.data_ptr()
    if closed:
        pool.close()
    del pool
    gc.collect()
    assert carver in pools._callbacks, "what torch calls is there"
    release(segment, 2 << 20, 0, None)
    assert take(64 << 20, 0, None) == memory.data_ptr()
    del pools._callbacks[carver]


def test_a_pool_holds_its_live_tensors_and_not_those_of_others(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other lanes allocate at the same time. A snapshot of one pool alone crashes torch from the 257th pool on."""
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *addresses: None, raising=False)
    memory = torch.zeros(64 << 20, dtype=torch.uint8)
    pool = pools.CarvedPool(memory, 0)
    start = memory.data_ptr()

    def block(address: int, nbytes: int, state: str = "active_allocated") -> dict[str, Any]:
        return {"address": address, "size": nbytes, "state": state}

    own = [block(start, 512), block(start + 512, 1024, "inactive"), block(start + (62 << 20), 512)]
    segments = [
        {"address": own[2]["address"], "blocks": own[2:]},
        {"address": start - 1, "blocks": [block(start - 1, 512)]},
        {"address": start, "blocks": own[:2]},
        {"address": start + (64 << 20), "blocks": [block(start + (64 << 20), 512)]},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert pool.held_bytes == 1024
    assert pool.layout == tuple(tuple(b.values()) for b in own), "by address"
    pool.close()


@pytest.mark.parametrize(
    ("count", "refusing", "said", "message"),
    [
        (
            0,
            "init",
            "The NVIDIA driver is too old (11040).\nPlease update it.",
            r"sees 0 \(The NVIDIA driver is too old",
        ),
        (1, "set_device", "CUDA error: device(s) busy\nKernel errors ...", "0 cannot be used: .* busy; if another"),
    ],
)
def test_a_device_that_cannot_be_opened_is_an_error_of_one_line(
    count: int, refusing: str, said: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(count))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, refusing, refuse)
    with pytest.raises(DeviceError, match=message) as caught:
        CudaDriver.open()
    assert "\n" not in str(caught.value)


def test_a_stream_that_was_given_back_is_used_again_and_its_staging_memory_is_free(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "as_tensor", at_address)
    numbers = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: Stream(next(numbers)))
    stream = driver.stream(urgent=True)
    with driver.on(stream):
        link = driver.staging().link
    assert len(library.held) == 1
    driver.give_back(stream, urgent=True)
    assert not library.held
    assert {driver.stream(urgent=True), driver.stream(urgent=True)} == {stream, link}
    assert driver.stream(urgent=True).cuda_stream == 3
