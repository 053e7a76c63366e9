"""Stores hand out the weights file's bytes, and a slow link really takes its time."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.binding.cache import ProgramCache
from runtime.binding.program import Bases
from runtime.cpu.arena import CpuArena
from runtime.cpu.executor import CpuExecutor
from runtime.errors import DeviceError, StoreChanged
from runtime.host.store import LimitedStore, StoreKind, open_store
from runtime.lowering.lower import Lowered, lower
from tests.runtime import models
from tests.runtime.plans import streaming_plan


@pytest.fixture
def lowered(tmp_path: Path) -> Lowered:
    torch.manual_seed(0)
    models.export(models.Tied(), {"tokens": torch.zeros(3, 5, dtype=torch.int64)}, tmp_path / "model.pt2")
    return lower(tmp_path / "model.pt2", "tied", [1], tmp_path / "cache")


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
    torch.manual_seed(0)
    name = lowered.manifest.tables[0].name
    assert torch.equal(store.table(name), models.Tied().embed.weight)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 0), overwrite])
def test_a_weights_file_that_was_changed_fails_the_copy(lowered: Lowered, change: Callable[[Path], None]) -> None:
    store = open_store("file", lowered.weights_path, lowered.manifest)
    store.close()
    os.utime(lowered.weights_path, ns=(0, 0))  # file systems count in milliseconds; as if it was loaded long ago
    store = open_store("file", lowered.weights_path, lowered.manifest)
    with CpuArena(lowered.manifest.segment_bytes) as arena:
        copy = store.copy(0, arena.bytes(0, lowered.manifest.segments[0].nbytes))
        copy()
        change(lowered.weights_path)
        with pytest.raises(StoreChanged, match="was changed after it was loaded"):
            copy()
    store.close()


def test_a_changed_weights_file_is_the_loss_of_the_device(wide: Lowered, tmp_path: Path) -> None:
    """The engine ends then, and the next one makes the damaged cache anew."""
    path = tmp_path / "weights.bin"
    path.write_bytes(wide.weights_path.read_bytes())
    os.utime(path, ns=(0, 0))
    store, plan = open_store("file", path, wide.manifest), streaming_plan(wide.graphs[2])
    arena = CpuArena(4 * wide.manifest.segment_bytes)
    program = ProgramCache().build(wide, plan, None, arena, Bases(0, 2 * wide.manifest.segment_bytes), store)
    with arena, CpuExecutor() as executor:
        executor.load(program)
        executor.run(program, wide.examples(2))
        assert executor.lost is None
        overwrite(path)
        with pytest.raises(DeviceError, match="was changed after it was loaded"):
            executor.run(program, wide.examples(2))
        assert executor.lost is not None


def test_bytes_arrive_at_the_end_of_a_slow_link_s_wait(lowered: Lowered) -> None:
    store = LimitedStore(open_store("ram", lowered.weights_path, lowered.manifest), 1e12, latency_s=0.05)
    nbytes = lowered.manifest.segments[0].nbytes
    copy = store.copy(0, np.zeros(nbytes, np.uint8))
    start = time.perf_counter()
    copy()
    assert time.perf_counter() - start >= 0.05
