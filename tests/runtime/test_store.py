"""Stores hand out the weights file's bytes, and a slow link really takes its time."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.cpu.arena import CpuArena
from runtime.host.store import LimitedStore, StoreKind, open_store
from runtime.lowering.lower import Lowered, lower
from tests.runtime import models


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


def test_a_weights_file_that_ends_too_early_is_an_error_of_the_copy(lowered: Lowered) -> None:
    store = open_store("file", lowered.weights_path, lowered.manifest)
    lowered.weights_path.write_bytes(b"")
    with pytest.raises(OSError, match="too early"):
        store.copy(0, np.zeros(4096, np.uint8))()


def test_bytes_arrive_at_the_end_of_a_slow_link_s_wait(lowered: Lowered) -> None:
    store = LimitedStore(open_store("ram", lowered.weights_path, lowered.manifest), 1e12, latency_s=0.05)
    nbytes = lowered.manifest.segments[0].nbytes
    copy = store.copy(0, np.zeros(nbytes, np.uint8))
    start = time.perf_counter()
    copy()
    assert time.perf_counter() - start >= 0.05
