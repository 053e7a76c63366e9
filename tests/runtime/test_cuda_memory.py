"""Memory on a CUDA device: the workspace is carved to the byte, host memory is pinned up to a cap."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.arena import CudaArena
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.profiling.dry_run import large_bytes
from cohabit.runtime.errors import DeviceError, MemoryExceeded
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.stores import pinned as pinned_module
from cohabit.runtime.stores.pages import Bytes
from cohabit.runtime.stores.pinned import LIMIT_VARIABLE, PinnedMemory, default_limit_bytes
from tests.support.runtime import models
from tests.support.runtime.cuda_fake import FakeDriver
from tests.support.runtime.plans import with_room

MIB = 1 << 20


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("tied")
    return models.lowered(models.Tied(), {"tokens": torch.zeros(3, 5, dtype=torch.int64)}, folder, "tied", [1])


def test_a_zone_is_one_large_piece_and_segments_for_small_tensors() -> None:
    assert large_bytes(64 * MIB, 1) == 62 * MIB
    assert large_bytes(64 * MIB, 3) == 58 * MIB
    assert large_bytes(13 * MIB + 5, 1) == 10 * MIB
    assert large_bytes(11 * MIB, 1) == 0, "less than what the allocator takes whole"


def test_pinned_memory_has_a_cap() -> None:
    driver = FakeDriver()
    pinned = PinnedMemory(driver, limit_bytes=10_000)
    first = pinned.take(6000, "first")
    with pytest.raises(
        MemoryExceeded,
        match=r"5\.9 KiB on top of 5\.9 KiB exceeds the cap of 9\.8 KiB; set .* COHABIT_PINNED",
    ):
        pinned.take(6000, "second")
    pinned.release(first)
    assert pinned.used_bytes == driver.pinned_bytes == 0


def test_the_cap_is_what_the_environment_says_or_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_limit_bytes(8 << 30) == 4 << 30
    monkeypatch.setenv(LIMIT_VARIABLE, "3GiB")
    assert default_limit_bytes(8 << 30) == 3 << 30
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    with pytest.raises(DeviceError, match="the environment variable COHABIT_PINNED_MEMORY: 'much' is not a size"):
        default_limit_bytes()


def test_threads_that_pin_at_once_stay_under_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning takes long: memory counts from the moment that it is asked for."""
    driver = FakeDriver()
    pinned = PinnedMemory(driver, limit_bytes=10_000)
    pin, second = driver.pin, list[MemoryExceeded]()

    def slow(host: Bytes) -> None:
        with pytest.raises(MemoryExceeded) as caught:
            pinned.take(6000, "meanwhile")
        second.append(caught.value)
        pin(host)

    monkeypatch.setattr(driver, "pin", slow)
    pinned.take(6000, "first")
    assert len(second) == 1
    assert pinned.used_bytes == driver.pinned_bytes == 6000


def test_what_cannot_be_pinned_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    pinned = PinnedMemory(driver, limit_bytes=10_000)
    taken = pinned.take(3000, "one")
    with pytest.raises(MemoryExceeded):
        pinned.take_several([3000, 3000, 3000], "several")
    assert pinned.used_bytes == driver.pinned_bytes == 3000, "several or none"

    def fail(host: Bytes) -> None:
        raise MemoryExceeded("locked memory is limited")

    monkeypatch.setattr(driver, "pin", fail)
    with pytest.raises(MemoryExceeded, match="locked memory"):
        pinned.take(3000, "another")
    assert pinned.used_bytes == 3000
    pinned.release(taken)
    pinned.release(taken)
    assert pinned.used_bytes == driver.pinned_bytes == 0


def test_a_load_that_fails_leaves_nothing_pinned_and_the_ring_of_others(tied: Lowered) -> None:
    """A ring that cannot grow stays: staged models go on."""
    manifest, driver = tied.manifest, FakeDriver()
    largest = max(s.nbytes for s in manifest.segments)
    backend = CudaBackend(driver, pinned_limit_bytes=3 * largest + MIB)
    store = backend.open_store("file", tied.weights_path, manifest)
    before = driver.pinned_bytes
    with pytest.raises(MemoryExceeded, match="the staging ring: pinning"):
        backend._ring.fit(2 * largest)
    assert driver.pinned_bytes == before
    arena = CudaArena(driver, largest)
    store.copy(0, arena.bytes(0, manifest.segments[0].nbytes))()
    driver.drain()
    raw = tied.weights_path.read_bytes()
    assert bytes(arena.bytes(0, manifest.segments[0].nbytes).numpy()) == raw[: manifest.segments[0].nbytes]


def test_weights_that_cannot_be_read_are_not_pinned(tied: Lowered, tmp_path: Path) -> None:
    driver = FakeDriver()
    backend = CudaBackend(driver)
    with pytest.raises(FileNotFoundError):
        backend.open_store("ram", tmp_path / "missing", tied.manifest)
    assert driver.pinned_bytes == backend.pinned_memory.used_bytes == 0


@pytest.mark.parametrize("kind", ["ram", "file"])
@pytest.mark.parametrize("limit_bytes", [None, 12 * MIB])
def test_copies_bring_the_file_s_bytes_whatever_the_store(
    tied: Lowered, kind: str, limit_bytes: int | None
) -> None:
    driver = FakeDriver()
    backend = CudaBackend(driver, limit_bytes)
    raw = tied.weights_path.read_bytes()
    store = backend.open_store(kind, tied.weights_path, tied.manifest)
    arena = CudaArena(driver, tied.manifest.segment_bytes)
    for index, segment in enumerate(tied.manifest.segments):
        store.copy(index, arena.bytes(segment.offset, segment.nbytes))()
    driver.drain()
    assert bytes(arena.bytes(0, arena.nbytes).numpy()) == raw[: tied.manifest.segment_bytes]
    table = store.table(tied.manifest.tables[0].name)
    assert bytes(table.numpy()) == raw[tied.manifest.tables[0].offset :][: table.nbytes]
    backend.close()
    store.close()
    assert backend.pinned_memory.used_bytes == driver.pinned_bytes == 0


def test_pinned_memory_lies_enterthe_device_and_in_huge_pages_before_it_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages that are pinned cannot be moved. Small memory has no page of 2 MiB for itself, and pinning touches it."""
    driver, events = FakeDriver(), list[tuple[str, int]]()

    @contextmanager
    def near() -> Iterator[None]:
        events.append(("near", 0))
        yield
        events.append(("anywhere", 0))

    monkeypatch.setattr(driver, "near", near)
    monkeypatch.setattr(pinned_module, "use_huge_pages", lambda host: events.append(("huge", host.nbytes)))
    pin = driver.pin
    monkeypatch.setattr(driver, "pin", lambda host: (events.append(("pin", host.nbytes)), pin(host)))
    pinned = PinnedMemory(driver, 64 * MIB)
    pinned.take(4 * MIB, "a store")
    pinned.take(MIB, "a buffer")
    enter, leave = ("near", 0), ("anywhere", 0)
    assert events == [enter, ("huge", 4 * MIB), ("pin", 4 * MIB), leave, enter, ("pin", MIB), leave]
    pinned.close()


def test_a_plan_whose_zone_is_too_small_is_refused_with_the_numbers(tied: Lowered) -> None:
    driver = FakeDriver()
    backend = CudaBackend(driver)
    store = backend.open_store("ram", tied.weights_path, tied.manifest)
    plan = resident_plan(tied.graphs[Bucket(1)])
    arena = backend.arena(plan.memory.nbytes)
    program = backend.build(tied, plan, None, arena, Bases(0, plan.memory.partition_bytes), store)
    driver.least_pool_bytes = 64 * MIB
    with pytest.raises(MemoryExceeded, match="cannot place its activations and scratch in the"):
        backend.executor.load(program)
    driver.least_pool_bytes, driver.kernel_bytes = 0, 64 * MIB
    with pytest.raises(MemoryExceeded, match=r"wanted 64\.0 MiB more than the"):
        backend.executor.load(program)
    backend.executor.release(program)
    driver.kernel_bytes = 0
    backend.executor.load(backend.build(tied, plan, None, arena, Bases(0, plan.memory.partition_bytes), store))
    backend.close()
    store.close()
    assert driver.pinned_bytes == 0, "also what refused programs had pinned"


def test_a_pool_with_too_few_segments_for_small_tensors_is_followed_by_the_next(tied: Lowered) -> None:
    """An op's scratch counts as one tensor in the dry run; several small ones need more segments."""
    driver = FakeDriver()
    backend = CudaBackend(driver)
    store = backend.open_store("ram", tied.weights_path, tied.manifest)
    plan = resident_plan(tied.graphs[Bucket(1)])
    roomy = with_room(plan, 32 * MIB)
    arena = backend.arena(roomy.memory.nbytes)
    program = backend.build(tied, roomy, None, arena, Bases(0, roomy.memory.partition_bytes), store)
    driver.small_tensors_bytes = 7 * MIB
    backend.executor.load(program)
    assert driver.open_pools == 1
    backend.executor.release(program)
    program = backend.build(tied, roomy, None, arena, Bases(0, roomy.memory.partition_bytes), store)
    driver.small_tensors_bytes = 64 * MIB
    with pytest.raises(MemoryExceeded, match=r"wanted 64\.0 MiB more than the"):
        backend.executor.load(program)
    assert driver.open_pools == 0
    backend.close()
    store.close()
    arena.close()
    assert driver.allocated_bytes == 0
