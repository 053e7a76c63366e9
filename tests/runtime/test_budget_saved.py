"""`cohabit.budget` once its first two steps are over: only what autograd and the optimizers own leaves memory."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cohabit
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.heap import release_free_memory, resident_bytes
from cohabit.runtime.training.budget import Budget
from cohabit.runtime.training.copies.copying import CopyThread
from cohabit.runtime.training.copies.spill import FileSpill, RamSpill, capacity_for
from cohabit.runtime.training.residency import Residency
from cohabit.runtime.training.tracked import LEAST_BYTES, StorageCopy
from tests.support.runtime.loops import (
    ROWS,
    WIDTH,
    assert_same,
    batches,
    made,
    one_torch_thread,
    state_of,
    step,
    steps,
)

VARYING_STEPS = 30


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Counted(TorchDispatchMode):
    """Counts the bytes of all tensors that ops make, and of those given, independently of the budget."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self._refs = torch.multiprocessing.reductions.StorageWeakRef
        self._alive = {s._cdata: self._refs(s) for s in (t.untyped_storage() for t in given)}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.nbytes >= LEAST_BYTES:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = self._refs(storage)
        self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._alive.values()]
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in storages))
        return result


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_bound_is_kept_as_counted_independently(kind: type[torch.optim.Optimizer]) -> None:
    """What has left has a size of 0."""
    net, optimizer = made(kind)
    with Counted(list(net.parameters())) as eager_count:
        steps(net, optimizer, 4)
    net, optimizer = made(kind)
    with cohabit.budget("60%", net, optimizer) as limits:
        steps(net, optimizer, 3)
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        with Counted([*net.parameters(), *gradients, *state]) as count:
            del gradients, state
            step(net, optimizer, batches()[0])
            count.peak_bytes = 0  # reading the state has brought it in
            steps(net, optimizer, 2)
        assert limits.limit_bytes is not None
        assert count.peak_bytes <= limits.limit_bytes
        assert limits.exceeded_bytes == 0
        assert limits.peak_bytes <= limits.limit_bytes
    assert count.peak_bytes < 0.8 * eager_count.peak_bytes


@pytest.mark.long
@pytest.mark.parametrize("store", ["ram", "file"])
def test_after_a_step_that_exceeds_the_budget_ops_are_seen_and_hold_it(store: Literal["ram", "file"]) -> None:
    def growing(net: nn.Module, optimizer: torch.optim.Optimizer, limits: Budget | None) -> list[float]:
        losses = []
        for number, rows in enumerate((ROWS, ROWS, ROWS, 4 * ROWS, 4 * ROWS, 4 * ROWS, ROWS)):
            if limits is not None and number == 4:
                assert limits.sees_ops, "the step before it was four times the recorded one"
                limits.reset_peak()
            losses.append(step(net, optimizer, *batches(1, rows)))
        return losses

    net, optimizer = made()
    torch.manual_seed(2)
    expected, state = growing(net, optimizer, None), state_of(net, optimizer)
    net, optimizer = made()
    torch.manual_seed(2)
    with cohabit.budget("60%", net, optimizer, store=store) as limits:
        losses = growing(net, optimizer, limits)
        peak = limits.peak_bytes
    assert losses == expected
    assert_same(state_of(net, optimizer), state)
    assert limits.limit_bytes is not None
    assert limits.exceeded_bytes > 0
    assert peak <= limits.limit_bytes


def trained_while_counted(
    monkeypatch: pytest.MonkeyPatch, memory: str, rows: list[int]
) -> tuple[list[int], int, dict[str, torch.Tensor]]:
    """Return the most bytes that the residency had in memory in each step, the limit, and the state."""
    allocated, peaks = Residency._allocated, list[int]()

    def noted(residency: Residency, nbytes: int) -> None:
        allocated(residency, nbytes)
        peaks[-1] = max(peaks[-1], residency.used_bytes)

    monkeypatch.setattr(Residency, "_allocated", noted)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(12)])
    optimizer = torch.optim.AdamW(net.parameters())
    peaks.append(0)
    with cohabit.budget(memory, net, optimizer) as limits:
        for number in rows:
            peaks.append(0)
            step(net, optimizer, torch.ones(number, WIDTH))
        assert limits.limit_bytes is not None
        return peaks[2:], limits.limit_bytes, state_of(net, optimizer)


@pytest.mark.parametrize("memory", ["90%", "80%", "70%"])
def test_memory_is_kept_also_where_seeing_ops_ends(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has left under the mode, and leaves without it, is never all in memory."""
    peaks, limit_bytes, _ = trained_while_counted(monkeypatch, memory, [64] * 4)
    assert 0 < max(peaks) <= limit_bytes


def test_memory_is_kept_also_where_seeing_ops_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks, limit_bytes, state = trained_while_counted(monkeypatch, "75%", [64, 64, 64, 640, 64, 64])
    assert peaks[-1] > 0, "ops are seen"
    assert max(peaks[-2:]) <= limit_bytes
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(12)])
    optimizer = torch.optim.AdamW(net.parameters())
    for number in (64, 64, 64, 640, 64, 64):
        step(net, optimizer, torch.ones(number, WIDTH))
    assert_same(state, state_of(net, optimizer))


class LateCopies:
    """Makes copies, in their order, only when one of them is waited for."""

    def __init__(self) -> None:
        self.begun: list[StorageCopy] = []

    def begin(self, copy: StorageCopy) -> None:
        copy.end = LateEnd(self)
        self.begun.append(copy)


class LateEnd(threading.Event):
    def __init__(self, copies: LateCopies) -> None:
        super().__init__()
        self.copies = copies

    def wait(self, timeout: float | None = None) -> bool:
        while not self.is_set():
            copy = self.copies.begun.pop(0)
            copy.make()
            cast(LateEnd, copy.end).set()
        return True


@pytest.mark.parametrize("are_late", [False, True])
def test_a_step_as_long_as_the_one_that_exceeded_the_budget_is_recorded_and_the_mode_ends(
    are_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if are_late:
        late = LateCopies()
        monkeypatch.setattr(CopyThread, "begin", lambda thread, copy: late.begin(copy))
    net, optimizer = made(torch.optim.SGD)
    modes = []
    with cohabit.budget("5MiB", net, optimizer) as limits:
        for rows in (ROWS, ROWS, ROWS, 3 * ROWS, ROWS, 3 * ROWS, ROWS, 3 * ROWS, ROWS, 3 * ROWS):
            if len(modes) == 6:
                limits.reset_peak()
            step(net, optimizer, torch.ones(rows, WIDTH))
            modes.append(limits.sees_ops)
        assert limits.exceeded_bytes > 0
        assert limits.peak_bytes <= 5 << 20
    assert modes == [True, False, False, True, True, False, False, False, False, False]


@pytest.mark.long
def test_steps_of_varying_lengths_leave_the_process_and_its_file_flat(tmp_path: Path) -> None:
    generator = random.Random(0)
    net, optimizer = made(torch.optim.SGD)

    def run(limits: Budget, count: int) -> tuple[int, int]:
        """Return the process's bytes, and the file's."""
        for _ in range(count):
            step(net, optimizer, torch.ones(generator.randrange(8, ROWS), WIDTH))
        gc.collect()
        release_free_memory()
        return resident_bytes(), os.fstat(limits._residency.spill.descriptor).st_blocks * 512  # type: ignore[attr-defined]

    with cohabit.budget("60%", net, optimizer, store="file", folder=tmp_path) as limits:
        step(net, optimizer, torch.ones(ROWS, WIDTH))
        process_bytes, _ = run(limits, 15)
        later_process_bytes, later_file_bytes = run(limits, VARYING_STEPS)
        assert limits.limit_bytes is not None
        most_bytes = limits.limit_bytes  # of tensors in memory: fewer are out
    assert later_process_bytes - process_bytes < 4 << 20
    assert later_file_bytes <= most_bytes


SHRINKS = """
import gc, sys
import torch
from torch import nn
import cohabit
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.training.seen.process_limit import ProcessLimit

net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
optimizer, batch = torch.optim.SGD(net.parameters()), torch.ones(2048, 512)
measured = ProcessLimit(1 << 40)

def step():
    optimizer.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()

def peak():
    gc.collect()
    release_free_memory()
    before = measured.start_peak()
    step()
    return measured.peak_bytes() - before

step()
whole = peak()
with cohabit.budget("50%", net, optimizer, store="file", folder=sys.argv[1]):
    for _ in range(3):
        step()
    print(peak() / whole)
"""


@pytest.mark.long
def test_the_process_shrinks_by_what_leaves_if_the_c_library_maps_tensors(tmp_path: Path) -> None:
    """Measured by the system, not by the budget's count."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    program = [sys.executable, "-c", SHRINKS, str(tmp_path)]
    printed = subprocess.run(program, check=True, capture_output=True, text=True, env=environment).stdout
    assert float(printed) < 0.7


def test_a_compiled_module_stays_compiled() -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    counts = []
    results = []
    for memory in (None, "65%"):
        net, optimizer = made()
        compiled = torch.compile(net, backend=backend)
        calls.clear()
        torch.manual_seed(2)
        if memory is None:
            results.append(steps(compiled, optimizer))
        else:
            with cohabit.budget(memory, compiled, optimizer) as limits:
                results.append(steps(compiled, optimizer))
                assert limits.moved_bytes > 0
        counts.append(len(calls))
    assert results[0] == results[1]
    assert counts[0] == counts[1] > 0


def test_a_compiled_module_whose_parameters_would_have_to_leave_is_refused_by_name() -> None:
    net, optimizer = made()
    compiled = torch.compile(net, backend="eager")
    with (
        pytest.raises(UnsupportedModel, match=r"parameters cannot leave .* a compiled module"),
        cohabit.budget("300KiB", compiled, optimizer),
    ):
        raise AssertionError("it was entered")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_an_fsdp_module_whose_parameters_would_have_to_leave_is_refused_by_name(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        net = FullyShardedDataParallel(made()[0], device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(net.parameters())
        before = state_of(net, optimizer)
        with (
            pytest.raises(UnsupportedModel, match=r"parameters cannot leave .* an FSDP module"),
            cohabit.budget("300KiB", net, optimizer),
        ):
            raise AssertionError("it was entered")
        assert_same(state_of(net, optimizer), before)
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_leaves_while_a_budget_pauses() -> None:
    net, optimizer = made()
    with cohabit.budget("60%", net, optimizer) as limits:
        steps(net, optimizer, 3)
        with limits.pause():
            moved_bytes = limits.moved_bytes
            steps(net, optimizer, 2)
            assert limits.moved_bytes == moved_bytes
        steps(net, optimizer, 2)
        assert limits.moved_bytes > moved_bytes


@pytest.mark.parametrize(
    "moment", [0, 3, 6, 9, *(pytest.param(n, marks=pytest.mark.slow) for n in range(12) if n not in (0, 3, 6, 9))]
)
def test_an_interrupt_while_autograd_saves_leaves_everything_in_memory(moment: int) -> None:
    """It is delivered at the end of the hook, and eager steps that follow have the right bits."""

    def train(net: nn.Sequential, optimizer: torch.optim.Optimizer, limits: Any) -> None:
        with limits:
            steps(net[:4], optimizer, 3)
            event, count = limits._record.event, 0

            def interrupted(*args: Any) -> None:
                nonlocal count
                count += 1
                if count == 7 * moment + 1:
                    os.kill(os.getpid(), signal.SIGINT)
                event(*args)

            limits._record.event = interrupted
            steps(net[:4], optimizer, 2)

    net, optimizer = made()
    torch.manual_seed(2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(net, optimizer, cohabit.budget("60%", net, optimizer))
    finally:
        signal.signal(signal.SIGINT, before)
    expected, its_optimizer = made()
    torch.manual_seed(2)
    steps(expected[:4], its_optimizer, 3)
    found, third = lasting(net, optimizer), lasting(expected, its_optimizer)
    step(expected[:4], its_optimizer, batches()[0])
    assert found in (third, lasting(expected, its_optimizer)), "it came in the fourth step, or in the fifth"


def lasting(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Return the state without gradients, which a step that was interrupted has replaced."""
    state = state_of(net, optimizer).items()
    return {name: value.flatten().tolist() for name, value in state if not name.startswith("gradient")}


def test_varying_lengths_keep_slots_and_their_memory_bounded(tmp_path: Path) -> None:
    """A slot serves storages of several sizes, and free slots are given back."""
    for spill in (RamSpill(), FileSpill(tmp_path)):
        sizes = [20_000 + 997 * number for number in range(400)]
        for size in sizes:
            slots = [spill.take(size), spill.take(size // 2)]
            for slot in slots:
                spill.give_back(slot)
        assert spill.used_bytes == 0
        assert spill.free_bytes <= 2 * capacity_for(sizes[-1])
    assert os.fstat(spill.descriptor).st_blocks * 512 <= 3 * capacity_for(sizes[-1])


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 16384, 50_000, 1 << 20, (1 << 20) + 1, 12_345_678])
def test_a_slot_is_at_most_an_eighth_larger_than_what_it_holds(nbytes: int) -> None:
    assert nbytes <= capacity_for(nbytes) <= max(nbytes * 9 // 8 + 4096, 4096)
    assert capacity_for(nbytes) % 4096 == 0


def test_graphs_in_cycles_are_freed_with_their_slots() -> None:
    net, optimizer = made()
    with cohabit.budget("60%", net, optimizer) as limits:
        for x in batches(6):
            optimizer.zero_grad()
            result: Any = net(x)
            result.own = result
            result.square().mean().backward()
            optimizer.step()
        del result
        gc.collect()
        steps(net, optimizer, 1)
        assert limits._saved.alive_bytes() < ROWS * WIDTH * 4 * 3
    assert np.isfinite(sum(p.sum().item() for p in net.parameters()))
