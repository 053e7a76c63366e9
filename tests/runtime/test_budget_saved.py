"""`cohabit.budget` once its first two steps are over: only what autograd and the optimizers own leaves memory."""

import copy
import gc
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import cohabit
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.heap import release_free_memory, resident_bytes
from cohabit.runtime.training.budget import Budget
from cohabit.runtime.training.copies.copying import CopyThread
from cohabit.runtime.training.copies.spill import FileSpill, RamSpill, capacity_for
from cohabit.runtime.training.seen.residency import Residency
from cohabit.runtime.training.tracked import LEAST_BYTES, StorageCopy

WIDTH, ROWS, STEPS = 128, 256, 5
VARYING_STEPS = 30
Loop = Callable[[nn.Module, torch.optim.Optimizer], list[float]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()  # what one test compiled is not the next one's


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def made(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(4)])
    return net, kind(net.parameters(), lr=1e-3)  # type: ignore[call-arg]


def batches(count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def step(net: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def steps(net: Any, optimizer: torch.optim.Optimizer, count: int = STEPS) -> list[float]:
    return [step(net, optimizer, x) for x in batches(count)]


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    inner = [value for values in optimizer.state.values() for value in values.values()]
    return [*net.state_dict().values(), *(value.clone() for value in inner if isinstance(value, torch.Tensor))]


def trained(
    loop: Loop, memory: str | None, kind: type[torch.optim.Optimizer], store: Literal["ram", "file"] = "ram"
) -> tuple[list[float], list[torch.Tensor], Budget | None]:
    net, optimizer = made(kind)
    torch.manual_seed(2)
    if memory is None:
        return loop(net, optimizer), state_of(net, optimizer), None
    with cohabit.budget(memory, net, optimizer, store=store) as limits:
        losses = loop(net, optimizer)
        assert not limits.sees_ops or limits.exceeded_bytes, "ops are seen only to hold what the loop holds"
    return losses, state_of(net, optimizer), limits


# What loops do beside their steps


def plain(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return steps(net, optimizer)


def keeping_what_layers_return(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    kept: list[torch.Tensor] = []
    arrays: list[Any] = []

    def keep(module: nn.Module, inputs: Any, result: torch.Tensor) -> None:
        kept.append(result)
        arrays.append(result.detach().numpy())

    handles = [block.register_forward_hook(keep) for block in net.children()]
    losses = steps(net, optimizer)
    for handle in handles:
        handle.remove()
    return losses + [tensor.sum().item() for tensor in kept] + [float(array.sum()) for array in arrays]


def reading_arrays_and_views_made_before(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    arrays = [parameter.detach().numpy() for parameter in net.parameters()]
    views = [parameter.data.view(-1) for parameter in net.parameters()]
    losses = []
    for x in batches():
        losses += [step(net, optimizer, x), sum(float(a.sum()) for a in arrays), sum(v.sum().item() for v in views)]
    return losses


def reading_what_nodes_saved(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        losses += [loss.grad_fn.next_functions[0][0]._saved_self.sum().item(), loss.item()]  # type: ignore[union-attr]
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return losses


def going_backward_three_times(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def penalizing_gradients(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in batches():
        x = batch.clone().requires_grad_()
        optimizer.zero_grad()
        loss = net(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_hooks_of_its_own(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for number, x in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            hidden = net[:1](x)
        second = checkpoint(net[1], hidden, use_reentrant=False) if number % 2 else net[1](hidden)
        loss = net[2:](second).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def writing_past_autograd(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        hidden = net[0](x)
        square = hidden * hidden
        hidden.data.mul_(2.0)
        hidden.detach().numpy()[0] = 1.0
        first, second = net[1](square).unsafe_chunk(2, 1)
        loss = net[2](torch.cat([first.sin(), second.cos()], 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def writing_what_is_saved(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[float]:
    """Autograd refuses to go backward, as without a budget."""
    losses = steps(net, optimizer, 3)
    for _ in range(2):
        hidden = net[0](batches(1)[0]).exp()
        result = hidden.sin()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected"):
            result.sum().backward()
    optimizer.zero_grad()
    return losses + steps(net, optimizer, 2)


def with_functions_of_torch_func(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = steps(net, optimizer, 3)
    net.eval()
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, weights, (x,)).square().mean()

    for x in batches(2):
        losses += [value.sum().item() for value in torch.func.grad(loss)(weights, x).values()]
        losses.append(torch.func.vmap(lambda row: net(row[None]).sum())(x).sum().item())
    net.train()
    return losses + steps(net, optimizer, 2)


def validating_in_inference_mode(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x in batches():
        losses.append(step(net, optimizer, x))
        net.eval()
        with torch.inference_mode():
            losses.append(net(x.double().to(torch.float32).reshape(-1, WIDTH)).contiguous().flatten().sum().item())
        net.train()
    return losses


def raising_in_the_middle(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for number, x in enumerate(batches(8)):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        if number == 4:
            loss.register_hook(lambda gradient: 1 / 0)
        if number == 6:
            continue  # its graph dies
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except ZeroDivisionError:
            continue
        optimizer.step()
        losses.append(loss.item())
    return losses


def reading_the_optimizer_s_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x in batches():
        losses.append(step(net, optimizer, x))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        states = [torch.load(file)["state"], copy.deepcopy(optimizer.state_dict())["state"]]
        states += [dict(optimizer.state), {**optimizer.state}, copy.copy(optimizer.state), optimizer.state | {}]
        states += [pickle.loads(pickle.dumps(optimizer)).state]
        for state in states:
            values = [value for inner in state.values() for value in inner.values()]
            losses.append(sum(value.sum().item() for value in values if isinstance(value, torch.Tensor)))
        del states, state, values
        assert repr(optimizer.state).startswith("defaultdict(")
    return losses


def holding_and_writing_the_optimizer_s_state(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[float]:
    held = []
    losses = []
    for number, x in enumerate(batches(8)):
        losses.append(step(net, optimizer, x))
        inner = optimizer.state[net[1].up.weight]
        held.append(inner)
        if number == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if number == 5:
            del optimizer.state[net[0].up.weight]
            optimizer.state.pop(net[0].down.weight)
        for value in inner.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.5)
        losses += [v.sum().item() for values in held for v in values.values() if isinstance(v, torch.Tensor)]
    return losses


def with_rates_groups_and_hooks(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[float]:
    extra = nn.Linear(WIDTH, WIDTH)
    calls: list[int] = []

    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01
            calls.append(len(group["params"]))

    losses = []
    for number, x in enumerate(batches(7)):
        if number == 3:
            optimizer.add_param_group({"params": list(extra.parameters())})
            optimizer.register_step_pre_hook(halve)
            optimizer.register_step_post_hook(halve)
        if number >= 3:
            extra(x).square().mean().backward()
        losses.append(step(net, optimizer, x))
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return [*losses, *calls, *(group["lr"] for group in optimizer.param_groups)]


def with_a_closure(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x in batches():

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses.append(optimizer.step(closure).item())  # type: ignore[call-overload, union-attr]
    return losses


LOOPS: list[Loop] = [
    plain,
    keeping_what_layers_return,
    reading_arrays_and_views_made_before,
    reading_what_nodes_saved,
    going_backward_three_times,
    penalizing_gradients,
    with_hooks_of_its_own,  # type: ignore[list-item]
    writing_past_autograd,  # type: ignore[list-item]
    writing_what_is_saved,  # type: ignore[list-item]
    with_functions_of_torch_func,
    validating_in_inference_mode,
    raising_in_the_middle,
    reading_the_optimizer_s_state,
    holding_and_writing_the_optimizer_s_state,  # type: ignore[list-item]
    with_rates_groups_and_hooks,  # type: ignore[list-item]
    with_a_closure,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_has_eager_s_bits_without_a_mode(loop: Loop) -> None:
    losses, state, _ = trained(loop, None, torch.optim.AdamW)
    found, its_state, limits = trained(loop, "65%", torch.optim.AdamW)
    assert found == losses
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(its_state, state, strict=True))
    assert limits is not None
    assert limits.moved_bytes > 0
    assert limits.limit_bytes is not None, "also after the context"


@pytest.mark.parametrize("store", ["ram", "file"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam, torch.optim.Adafactor])
def test_optimizers_run_in_parts_with_eager_s_bits(
    kind: type[torch.optim.Optimizer], store: Literal["ram", "file"]
) -> None:
    losses, state, _ = trained(plain, None, kind)
    found, its_state, _ = trained(plain, "65%", kind, store)
    assert found == losses
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(its_state, state, strict=True))


class Counted(TorchDispatchMode):
    """Counts the bytes of all tensors that ops make, and of those given, independently of the budget."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self._refs = torch.multiprocessing.reductions.StorageWeakRef
        self._alive = {s._cdata: (self._refs(s), s.nbytes()) for s in (t.untyped_storage() for t in given)}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.nbytes >= LEAST_BYTES:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (self._refs(storage), storage.nbytes())
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._alive.values()))
        return result


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_bound_is_kept_as_counted_independently(kind: type[torch.optim.Optimizer]) -> None:
    """Of tensors that ops made: those that the budget loads are at most what its own count says beside them."""
    net, optimizer = made(kind)
    with Counted(list(net.parameters())) as eager_count:
        steps(net, optimizer, 4)
    net, optimizer = made(kind)
    with cohabit.budget("60%", net, optimizer) as limits:
        steps(net, optimizer, 3)
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        with Counted([*net.parameters(), *gradients, *tensors_in(optimizer.state)]) as count:
            del gradients
            step(net, optimizer, batches()[0])
            count.peak_bytes = 0  # reading the state has brought it in
            steps(net, optimizer, 2)
        assert limits.limit_bytes is not None
        assert count.peak_bytes <= limits.limit_bytes
        assert limits.exceeded_bytes == 0
        assert limits.peak_bytes <= limits.limit_bytes
    assert count.peak_bytes < 0.8 * eager_count.peak_bytes


def tensors_in(state: Any) -> list[torch.Tensor]:
    return [value for values in state.values() for value in values.values() if isinstance(value, torch.Tensor)]


@pytest.mark.long
@pytest.mark.parametrize("store", ["ram", "file"])
def test_after_a_step_that_exceeds_the_budget_ops_are_seen_and_hold_it(store: Literal["ram", "file"]) -> None:
    def growing(net: nn.Module, optimizer: torch.optim.Optimizer, limits: Budget | None) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        losses = []
        for number, rows in enumerate((ROWS, ROWS, ROWS, 4 * ROWS, 4 * ROWS, 4 * ROWS, ROWS)):
            if limits is not None and number == 4:
                assert limits.sees_ops, "the step before it was four times the recorded one"
                limits.reset_peak()
            losses.append(step(net, optimizer, torch.randn(rows, WIDTH, generator=generator)))
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
    assert all(map(torch.equal, state_of(net, optimizer), state))
    assert limits.limit_bytes is not None
    assert limits.exceeded_bytes > 0
    assert peak <= limits.limit_bytes


def trained_while_counted(
    monkeypatch: pytest.MonkeyPatch, memory: str, rows: list[int]
) -> tuple[list[int], int, list[torch.Tensor]]:
    """Return the most bytes that the mode had in memory in each step, and the limit."""
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
    assert all(map(torch.equal, state, state_of(net, optimizer)))


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
        assert all(map(torch.equal, before, state_of(net, optimizer)))
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

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, limits: Any) -> None:
        with limits:
            steps(net, optimizer, 3)
            event, count = limits._record.event, 0

            def interrupted(*args: Any) -> None:
                nonlocal count
                count += 1
                if count == 7 * moment + 1:
                    os.kill(os.getpid(), signal.SIGINT)
                event(*args)

            limits._record.event = interrupted
            steps(net, optimizer, 2)

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
    found = state_of(net, optimizer)
    steps(expected, its_optimizer, 3)
    if not all(torch.equal(a, b) for a, b in zip(found, state_of(expected, its_optimizer), strict=True)):
        step(expected, its_optimizer, batches()[0])  # it came in the fifth step
        assert all(torch.equal(a, b) for a, b in zip(found, state_of(expected, its_optimizer), strict=True))


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
        assert limits._saved.in_bytes + limits._saved.out_bytes < ROWS * WIDTH * 4 * 3
    assert np.isfinite(sum(p.sum().item() for p in net.parameters()))
