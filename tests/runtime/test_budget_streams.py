"""`cohabit.budget` on a GPU: copies are ordered with the ops of every stream, and no rule of that order is too many.

A checker of stream order stands for the device (`tests/support/runtime/stream_order.py`).
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cohabit
from cohabit.runtime.errors import MemoryExceeded, UnsupportedModel
from cohabit.runtime.stores.pages import Bytes
from cohabit.runtime.stores.pinned import PinnedMemory
from cohabit.runtime.training import budget, residency
from cohabit.runtime.training.copies import spill, streams
from cohabit.runtime.training.copies.copying import Copier
from cohabit.runtime.training.copies.spill import FileSpill, PinnedSpill
from cohabit.runtime.training.copies.streams import CopyStreams, DeviceCopyThread, OpStreams
from cohabit.runtime.training.residency import Residency
from tests.support.runtime.cuda_fake import FakeDriver
from tests.support.runtime.stream_order import (
    CheckedOps,
    FakeCuda,
    SharedBytes,
    checked_copy,
    checked_resize,
)

SEEDS = range(3)
CPU = torch.device("cpu")
Program = Callable[[FakeCuda], list[float]]


@contextmanager
def on_device(cuda: FakeCuda, store: str, folder: Path) -> Iterator[None]:
    """Inside the block, budgets take the CPU's tensors for those of a device whose streams are checked."""

    def made(device: torch.device, store: str, folder: Path) -> Residency:
        if store == "ram":
            pinned = PinnedSpill(PinnedMemory(FakeDriver(), 1 << 30), cuda.current_stream().synchronize)
            return Residency(CPU, pinned, CopyStreams(CPU, cuda))
        return Residency(CPU, FileSpill(folder), DeviceCopyThread(CPU, cuda))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "_residency", made)
        patch.setattr(streams, "bytes_of", lambda storage: SharedBytes(cuda, storage))
        patch.setattr(residency, "resize_storage", checked_resize(cuda, residency.resize_storage))
        for slot, blocks in ((spill._PinnedSlot, False), (spill._FileSlot, True)):
            patch.setattr(slot, "save", checked_copy(cuda, slot.save, is_load=False, blocks=blocks))
            patch.setattr(slot, "load", checked_copy(cuda, slot.load, is_load=True, blocks=blocks))
        with CheckedOps(cuda):
            yield


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96)) for _ in range(5)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(limits: str | None, store: Any = "ram", folder: Path | None = None) -> tuple[list[float], int]:
    """Return the losses of a training loop, and the bytes moved."""
    model, optimizer = net()
    losses, moved_bytes = [], 0

    def train() -> None:
        for step in range(4):
            batch = torch.full((64, 96), 0.1 * (step + 1))
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    if limits is None:
        train()
    else:
        with cohabit.budget(limits, model, optimizer, store=store, folder=folder) as limited:
            train()
            moved_bytes = limited.moved_bytes
    return losses, moved_bytes


QUICK = (("60%", 0.0, "ram"), ("40%", 0.5, "ram"), ("60%", 0.5, "file"), ("40%", 1.0, "file"))
SLOW = tuple(case for case in product(("60%", "40%"), (0.0, 0.5, 1.0), ("ram", "file")) if case not in QUICK)


@pytest.mark.parametrize(
    ("share", "speed", "store"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_loop_on_one_stream_races_with_no_copy(share: str, speed: float, store: str, tmp_path: Path) -> None:
    expected, _ = trained(None)
    for seed in SEEDS:
        cuda = FakeCuda(seed, speed)
        with on_device(cuda, store, tmp_path):
            losses, moved_bytes = trained(share, store, tmp_path if store == "file" else None)
        assert losses == expected
        assert cuda.copies > 10
        assert moved_bytes > 0
        assert not cuda.races, cuda.races[:3]


def across_streams(cuda: FakeCuda) -> list[float]:
    """A loop whose threads of work cross streams, each ordered by waits as CUDA's rules demand."""
    main, side = cuda.current_stream(), cuda.Stream()
    weights = [torch.full((96, 96), 0.01 * n, requires_grad=False) for n in range(1, 7)]
    sums = []
    with cohabit.budget("150KiB", weights):
        for _ in range(3):
            x = torch.ones(96, 96)
            side.wait_stream(main)
            with cuda.stream(side):
                first = x @ weights[0]
                for weight in weights[1:]:
                    first = first @ weight
            for weight in reversed(weights):
                x = x @ weight
            main.wait_stream(side)
            x += first
            del first
            side.wait_stream(main)
            with cuda.stream(side):
                last = x.exp()  # read on one stream, last used on the other
            main.wait_stream(side)
            y = x * 2
            del x
            sums.append((last + y).sum().item())
            weights[0].add_(0.001)
    return sums


def late_stream(cuda: FakeCuda) -> list[float]:
    """A stream's first op comes long after the stream was made to wait for others."""
    main, late = cuda.current_stream(), cuda.Stream()
    weights = [torch.full((96, 96), 0.01 * n) for n in range(1, 7)]
    late.wait_stream(main)
    with cohabit.budget("80KiB", weights):
        sums = [weights[n].sum().item() for n in (0, 1, 2, 3, 4, 5, 0)]
        with cuda.stream(late):
            sums.append(weights[0].sum().item())
        main.wait_stream(late)
    return sums


def past_ops(cuda: FakeCuda) -> list[float]:
    """Reads a tensor by its address, on a stream that no op has used."""
    weights = [torch.full((96, 96), 0.01 * n) for n in range(1, 7)]
    sums = []
    with cohabit.budget("80KiB", weights):
        sums += [weight.sum().item() for weight in weights]
        reader = cuda.Stream()
        reader.wait_stream(cuda.current_stream())
        weights[0].data_ptr()
        with cuda.stream(reader):
            cuda.access(weights[0].untyped_storage(), is_write=False, what="a kernel of somebody else's")
        cuda.current_stream().wait_stream(reader)
    return sums


PROGRAMS: dict[str, Program] = {
    "across streams": across_streams,
    "late stream": late_stream,
    "past ops": past_ops,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("speed", [0.0, 0.5])
def test_a_loop_on_several_streams_races_with_no_copy(name: str, speed: float, tmp_path: Path) -> None:
    sums = set()
    for seed in SEEDS:
        cuda = FakeCuda(seed, speed)
        with on_device(cuda, "ram", tmp_path):
            sums.add(tuple(PROGRAMS[name](cuda)))
        assert cuda.copies > 0
        assert not cuda.races, cuda.races[:3]
    assert len(sums) == 1


def without_preceding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpStreams, "precede", lambda ops, later: None)


def without_following(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpStreams, "follow", lambda ops, event: None)


def without_joining(patch: pytest.MonkeyPatch) -> None:
    """A new stream waits for nothing."""

    def current(ops: Any) -> int:
        stream = ops._cuda.current_stream(ops._device)
        ops._streams[stream.cuda_stream] = stream
        return int(stream.cuda_stream)

    patch.setattr(OpStreams, "current", current)


def without_sharing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpStreams, "share", lambda ops, storage: None)


def without_settling(patch: pytest.MonkeyPatch) -> None:
    def settle(copies: Copier) -> None: ...

    patch.setattr(CopyStreams, "settle", settle)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("across streams", without_preceding),
        ("across streams", without_following),
        ("late stream", without_joining),
        ("across streams", without_sharing),
        ("past ops", without_settling),
    ],
)
def test_without_any_one_rule_some_order_goes_wrong(
    name: str, without: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch)
    cuda = FakeCuda(0, speed=0.0)
    with on_device(cuda, "ram", tmp_path):
        PROGRAMS[name](cuda)
    assert cuda.races


def test_owners_on_two_devices_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="on meta; supported are 'cpu' and 'cuda'"):
        cohabit.budget("1MiB", torch.empty(9, device="meta"))


# Pinned memory.


class Untouched:
    """Pins nothing, so that gigabytes are quick."""

    def pin(self, host: Bytes) -> None: ...

    def unpin(self, host: Bytes) -> None: ...

    def near(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def spilled(monkeypatch: pytest.MonkeyPatch) -> tuple[PinnedSpill, PinnedMemory, list[str]]:
    monkeypatch.setattr(PinnedMemory, "_pinned", lambda pinned, nbytes: np.empty(nbytes, np.uint8))
    pinned, drains = PinnedMemory(Untouched(), 8 << 30), list[str]()
    return PinnedSpill(pinned, lambda: drains.append("drained")), pinned, drains


@pytest.mark.parametrize("seed", range(4))
def test_a_fiftieth_and_one_piece_more_is_pinned_than_tensors_have(
    seed: int, spilled: tuple[PinnedSpill, PinnedMemory, list[str]]
) -> None:
    spill, pinned, drains = spilled
    draws = random.Random(seed)
    largest = draws.choice([20, 22, 26])
    sizes = [int(2 ** draws.uniform(14, largest)) for _ in range(4096)]
    while sum(sizes) > 4 << 30:
        sizes.pop()
    most = sum(sizes) * 1.02 + (64 << 20)
    for _ in range(3):
        draws.shuffle(sizes)
        slots = [spill.take(size) for size in sizes]
        assert all(size <= slot.capacity <= 1.02 * size for size, slot in zip(sizes, slots, strict=True))
        assert pinned.used_bytes <= most
        for slot in slots:
            spill.give_back(slot)
    assert drains == []
    spill.close()
    assert pinned.used_bytes == 0


def test_pinned_slots_of_varying_lengths_are_unpinned_after_their_copies(
    spilled: tuple[PinnedSpill, PinnedMemory, list[str]],
) -> None:
    spill, pinned, drains = spilled
    draws, most = random.Random(0), 0
    for _ in range(200):
        size = draws.randrange(8 << 20, 16 << 20)
        slots = [spill.take(size) for _ in range(4)]
        most = max(most, 4 * size)
        assert pinned.used_bytes <= 2 * most
        for slot in slots:
            spill.give_back(slot)
    assert 0 < len(drains) < 30, "most steps use what is there"


def test_free_pinned_memory_is_unpinned_before_the_cap_refuses_any(
    spilled: tuple[PinnedSpill, PinnedMemory, list[str]],
) -> None:
    spill, pinned, drains = spilled
    held = [spill.take(7 << 30)]
    spill.give_back(spill.take(1 << 29))
    held.append(spill.take(1 << 30))
    assert drains == ["drained"]
    with pytest.raises(
        MemoryExceeded, match="COHABIT_PINNED_MEMORY to more, set store='file', or raise the budget"
    ):
        spill.take(1 << 20)
    assert pinned.used_bytes == 8 << 30
