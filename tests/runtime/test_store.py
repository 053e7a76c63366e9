"""Stores hand out the weights file's bytes, and a slow link really takes its time."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.build import build
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cpu.arena import CpuArena
from cohabit.runtime.cpu.executor import CpuExecutor
from cohabit.runtime.errors import DeviceError, StoreChanged
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.weights import description_path
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.stores.host import FileStore, LimitedStore, Links, StoreKind, open_store
from tests.support.runtime import models
from tests.support.runtime.plans import streaming_plan


def with_own_weights(lowered: Lowered, folder: Path) -> Lowered:
    """The model with a copy of its weights file, which a test may damage."""
    path = folder / "weights.bin"
    path.write_bytes(lowered.weights_path.read_bytes())
    description_path(path).write_bytes(description_path(lowered.weights_path).read_bytes())
    return replace(lowered, weights_path=path)


@pytest.fixture
def lowered(constructs: models.Constructs, tmp_path: Path) -> Lowered:
    return with_own_weights(constructs["tied"], tmp_path)


@pytest.mark.parametrize("kind", ["ram", "file"])
def test_a_copy_fills_its_destination_with_the_segment_s_bytes(lowered: Lowered, kind: StoreKind) -> None:
    raw = lowered.weights_path.read_bytes()
    store = open_store(kind, lowered.weights_path, lowered.manifest)
    with CpuArena(lowered.manifest.segment_bytes) as arena:
        for index, segment in enumerate(lowered.manifest.segments):
            destination = arena.bytes(0, segment.nbytes)
            store.copy(index, destination)()
            assert bytes(destination) == raw[segment.offset : segment.offset + segment.nbytes]
    store.close()


@pytest.mark.parametrize("kind", ["ram", "file"])
def test_a_table_is_the_model_s_own(lowered: Lowered, kind: StoreKind) -> None:
    store = open_store(kind, lowered.weights_path, lowered.manifest)
    name = lowered.manifest.tables[0].name
    assert torch.equal(store.table(name), models.made("tied").get_parameter("embed.weight"))


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")


def overwrite_and_hide(path: Path) -> None:
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch_the_times(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 0), overwrite, overwrite_and_hide])
def test_a_weights_file_that_was_changed_fails_the_copy(lowered: Lowered, change: Callable[[Path], None]) -> None:
    store = open_store("file", lowered.weights_path, lowered.manifest)
    store.close()
    os.utime(lowered.weights_path, ns=(0, 0))  # file systems count in milliseconds; as if it was loaded long ago
    store = open_store("file", lowered.weights_path, lowered.manifest)
    with CpuArena(lowered.manifest.segment_bytes) as arena:
        copy = store.copy(0, arena.bytes(0, lowered.manifest.segments[0].nbytes))
        copy()
        change(lowered.weights_path)
        with pytest.raises(StoreChanged, match=r"weights.bin of .*: segment .* was changed after it was loaded"):
            copy()
    store.close()


def test_a_weights_file_with_other_times_and_the_same_bytes_is_used_on(lowered: Lowered) -> None:
    store = open_store("file", lowered.weights_path, lowered.manifest)
    with CpuArena(lowered.manifest.segment_bytes) as arena:
        touch_the_times(lowered.weights_path)
        store.copy(0, arena.bytes(0, lowered.manifest.segments[0].nbytes))()
        assert store.check_tables is not None
        store.check_tables()
    store.close()


@pytest.mark.parametrize("verify_reads", [False, True])
def test_bytes_that_change_without_a_trace_are_found_where_reads_are_verified(
    lowered: Lowered, verify_reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk changes them, or a write through a mapping that the system has not noted yet."""
    monkeypatch.setattr(FileStore, "_current_state", lambda store, index: (0, 0, 0))
    store = open_store("file", lowered.weights_path, lowered.manifest, verify_reads=verify_reads)
    with CpuArena(lowered.manifest.segment_bytes) as arena:
        copy = store.copy(0, arena.bytes(0, lowered.manifest.segments[0].nbytes))
        copy()
        overwrite(lowered.weights_path)
        with pytest.raises(StoreChanged) if verify_reads else nullcontext():
            copy()
    store.close()


def test_a_ram_store_can_verify_what_it_reads(lowered: Lowered) -> None:
    open_store("ram", lowered.weights_path, lowered.manifest, verify_reads=True).close()
    overwrite(lowered.weights_path)
    with pytest.raises(StoreChanged):
        open_store("ram", lowered.weights_path, lowered.manifest, verify_reads=True)


def test_verified_tables_are_in_memory(lowered: Lowered) -> None:
    store = open_store("file", lowered.weights_path, lowered.manifest, verify_reads=True)
    table = store.table(lowered.manifest.tables[0].name)
    before = table.clone()
    os.truncate(lowered.weights_path, 0)
    assert torch.equal(table, before)
    assert store.check_tables is None
    store.close()


def mapped_bytes(path: Path) -> int:
    """Pages of a file in this process's memory, by the kernel's count."""
    files = (region for region in psutil.Process().memory_maps(grouped=True) if region.path == str(path))
    return sum(region.rss for region in files)


@pytest.mark.parametrize("unmap_tables", [True, False])
def test_a_gather_leaves_no_page_of_an_unmapped_table(lowered: Lowered, unmap_tables: bool) -> None:
    store = open_store("file", lowered.weights_path, lowered.manifest, unmap_tables=unmap_tables)
    table = store.table(lowered.manifest.tables[0].name)
    rows = torch.arange(0, len(table), max(1, len(table) // 8))
    first = torch.nn.functional.embedding(rows, table)
    assert mapped_bytes(lowered.weights_path) > 0
    assert store.check_tables is not None
    store.check_tables()
    assert (mapped_bytes(lowered.weights_path) == 0) is unmap_tables
    assert torch.equal(torch.nn.functional.embedding(rows, table), first)
    whole = open_store("ram", lowered.weights_path, lowered.manifest)
    assert torch.equal(table, whole.table(lowered.manifest.tables[0].name))
    whole.close()
    store.close()


def overwrite_the_table(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4096 * 2, os.SEEK_END)
        file.write(b"x" * 4096)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 4096), overwrite_the_table])
def test_a_gather_from_a_table_that_was_changed_fails_and_does_not_end_the_process(
    lowered: Lowered, change: Callable[[Path], None]
) -> None:
    store, plan = (
        open_store("file", lowered.weights_path, lowered.manifest),
        resident_plan(lowered.graphs[Bucket(2)]),
    )
    arena = CpuArena(4 * lowered.manifest.segment_bytes)
    bases = Bases(0, 2 * lowered.manifest.segment_bytes)
    program = build(lowered, plan, None, arena, bases, store)
    with arena, CpuExecutor() as executor:
        executor.load(program)
        executor.run(program, lowered.examples(Bucket(2)))
        change(lowered.weights_path)
        with pytest.raises(StoreChanged, match=r"table .* was changed after it was loaded"):
            executor.run(program, lowered.examples(Bucket(2)))
        assert executor.lost is not None
    store.close()


def test_a_changed_weights_file_is_the_loss_of_the_device(wide: Lowered, tmp_path: Path) -> None:
    """The engine ends then, and the next one rebuilds the damaged cache."""
    path = with_own_weights(wide, tmp_path).weights_path
    store, plan = open_store("file", path, wide.manifest), streaming_plan(wide.graphs[Bucket(2)])
    arena = CpuArena(4 * wide.manifest.segment_bytes)
    program = build(wide, plan, None, arena, Bases(0, 2 * wide.manifest.segment_bytes), store)
    with arena, CpuExecutor() as executor:
        executor.load(program)
        executor.run(program, wide.examples(Bucket(2)))
        assert executor.lost is None
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(DeviceError, match="was changed after it was loaded"):
            executor.run(program, wide.examples(Bucket(2)))
        assert executor.lost is not None


def test_what_a_sleep_takes_too_long_is_taken_off_the_next_copy(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def oversleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds + 0.125

    monkeypatch.setattr(
        "cohabit.runtime.stores.host.time", SimpleNamespace(perf_counter=lambda: now_s, sleep=oversleep)
    )
    destination = np.zeros(lowered.manifest.segments[0].nbytes, np.uint8)
    inner = open_store("ram", lowered.weights_path, lowered.manifest)
    copy = LimitedStore(inner, destination.nbytes, Links()).copy(0, destination)  # one copy per second
    for count in (1, 2, 3):
        copy()
        assert now_s == count + 0.125
