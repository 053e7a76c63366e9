"""`cohabit.budget` against eager PyTorch: the user's own loop, bit for bit, at every budget and after every mishap."""

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
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch._C import StorageBase
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cohabit
from cohabit.planner.memory import parse_size
from cohabit.runtime.errors import MemoryExceeded, UnsupportedModel
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.training.copies.copying import CopyThread
from cohabit.runtime.training.copies.spill import RamSpill
from cohabit.runtime.training.seen.residency import Residency
from cohabit.runtime.training.tracked import LEAST_BYTES

WIDTH, ROWS, STEPS = 96, 64, 4
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
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Has residuals, dropout, a batch norm, tied weights and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 300, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.table(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if getattr(self, "recomputes", False) else block(x)
        return self.head(self.norm(x))


def made(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, kind(net.parameters(), lr=1e-2, **options)  # type: ignore[call-arg]


def batches(rows: int = ROWS, count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 300, (rows,), generator=generator) for _ in range(count)]


def labels(ids: torch.Tensor) -> torch.Tensor:
    return (7 * ids + 3) % 300


def step(net: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(ids), labels(ids))
    loss.backward()
    optimizer.step()
    return loss.item()


def plain(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return [step(net, optimizer, ids) for ids in batches()]


def with_other_batches_and_evaluation(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for ids in (*batches(), *batches(40, 1), *batches(count=2)):
        losses.append(step(net, optimizer, ids))
        net.eval()
        with torch.no_grad():
            losses.append(net(ids).sum().item())
        net.train()
    return losses


def with_python_s_randomness(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Mixup by numpy, layers dropped by Python, and a weight that changes from step to step."""
    random.seed(2)
    np.random.seed(2)
    losses = []
    for number, ids in enumerate(batches()):
        net.blocks[1].drop.p = 0.1 * number
        share, net.recomputes = float(np.random.beta(1, 1)), random.random() < 0.5
        optimizer.zero_grad()
        logits = net(ids)
        loss = share * F.cross_entropy(logits, labels(ids)) + (1 - share) * F.cross_entropy(logits, ids.flip(0))
        (loss * min(1.0, 0.3 * number + 0.1)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_hooks(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    def halved(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    handles = [
        net.blocks[0].up.weight.register_hook(lambda gradient: 2 * gradient),
        net.blocks[2].register_forward_hook(lambda module, inputs, result: result * 0.9),
        optimizer.register_step_pre_hook(lambda o, args, kwargs: halved(net.blocks[1].down.weight)),
    ]
    handles.append(optimizer.register_step_post_hook(lambda o, args, kwargs: None))
    handles.append(net.blocks[0].down.weight.register_post_accumulate_grad_hook(halved))
    losses = plain(net, optimizer)
    for handle in handles:
        handle.remove()
    return losses


def with_accumulation_and_autocast(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for ids in batches():
        optimizer.zero_grad()
        for part in ids.chunk(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(net(part), labels(part)) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def with_a_scaler(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2), []
    for ids in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(ids), labels(ids))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item() + scaler.get_scale())
    return losses


def with_state_read_between(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Reads everything in all ways while the loop runs, and goes on with what was loaded."""
    losses = plain(net, optimizer)
    average = copy.deepcopy(net)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file)
    for name, value in net.state_dict().items():
        assert torch.equal(loaded["net"][name], value)
        assert torch.equal(pickle.loads(pickle.dumps(value)), value)
        assert value.tolist() == loaded["net"][name].tolist()
        assert np.array_equal(value.detach().numpy(), loaded["net"][name].numpy())
        assert value.untyped_storage().nbytes() == loaded["net"][name].untyped_storage().nbytes()
    for mean, parameter in zip(average.parameters(), net.parameters(), strict=True):
        mean.data.lerp_(parameter.data, 0.1)
    net.load_state_dict(loaded["net"])
    optimizer.load_state_dict(loaded["optimizer"])
    losses += plain(net, optimizer)
    return [*losses, sum(parameter.sum().item() for parameter in average.parameters())]


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"net.{name}": value.clone() for name, value in net.state_dict().items()}
    found |= {f"gradient.{name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    for number, values in enumerate(optimizer.state.values()):
        found |= {f"{number}.{k}": v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different


def eager(loop: Loop, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    net, optimizer = made(**options)
    torch.manual_seed(3)
    return loop(net, optimizer), state_of(net, optimizer)


@dataclass(frozen=True)
class Seen:
    """What a loop took."""

    limit_bytes: int
    peak_bytes: int
    moved_bytes: int


def check(loop: Loop, memory: int | str, store: Literal["ram", "file"] = "ram", **options: Any) -> Seen:
    losses, state = eager(loop, **options)
    net, optimizer = made(**options)
    torch.manual_seed(3)
    with cohabit.budget(memory, net, optimizer, store=store) as limits:
        assert loop(net, optimizer) == losses
        assert limits.limit_bytes is not None
        seen = Seen(limits.limit_bytes, limits.peak_bytes, limits.moved_bytes)
    assert_same(state_of(net, optimizer), state)
    return seen


def with_a_compiled_module(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Compiled code calls ops, and the compiler must not trace the budget's own Python."""
    return plain(torch.compile(net, backend="aot_eager"), optimizer)


LOOPS: list[Loop] = [
    plain,
    with_other_batches_and_evaluation,
    with_python_s_randomness,
    with_hooks,
    with_accumulation_and_autocast,
    with_a_scaler,
    with_state_read_between,
]


@pytest.mark.parametrize(
    ("loop", "memory"),
    [
        *((loop, memory) for loop in LOOPS for memory in ("60%", "40%")),
        (plain, "100%"),
        (with_a_compiled_module, "60%"),
    ],
)
def test_a_loop_has_eager_s_bits(loop: Loop, memory: str) -> None:
    seen = check(loop, memory)
    assert seen.moved_bytes > 0 or memory == "100%"


@pytest.mark.parametrize(
    "optimizer",
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Rprop, {}),
    ],
)
@pytest.mark.parametrize("store", ["ram", "file"])
def test_optimizers_have_eager_s_bits(optimizer: Any, store: Literal["ram", "file"]) -> None:
    kind, options = optimizer
    check(plain, "50%", store, kind=kind, **options)


def test_a_size_is_kept_from_the_first_step_on() -> None:
    with_share = check(plain, "60%")
    seen = check(plain, with_share.limit_bytes)
    assert 0 < seen.peak_bytes <= seen.limit_bytes
    assert seen.moved_bytes > 0


def test_a_closure_evaluates_as_often_as_it_likes() -> None:
    def loop(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses: list[float] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(batches()[0]), labels(batches()[0]))
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return losses

    check(loop, "3MiB", kind=torch.optim.LBFGS, max_iter=3)


def test_two_optimizers_and_a_sparse_gradient() -> None:
    def run(context: Callable[..., Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        table, net = nn.Embedding(2000, 32, sparse=True), nn.Linear(32, 2000)
        first, second = torch.optim.SparseAdam(list(table.parameters())), torch.optim.Adam(net.parameters())
        with context(table, net, [first, second]):
            for ids in batches():
                loss = F.cross_entropy(net(table(ids)), ids)
                for optimizer in (first, second):
                    optimizer.zero_grad()
                loss.backward()
                first.step()
                second.step()
        return {**state_of(table, first), **state_of(net, second)}

    expected = run(lambda *owners: nullcontext())
    assert_same(run(lambda *owners: cohabit.budget("2MiB", *owners)), expected)


def test_tensors_from_files_are_moved_to_storages_of_their_own(tmp_path: Path) -> None:
    net, optimizer = made()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    expected = eager(plain)
    net.load_state_dict(torch.load(tmp_path / "net.pt", mmap=True), assign=True)
    net.head.weight = net.table.weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    assert not any(p.untyped_storage().resizable() for p in net.parameters())
    torch.manual_seed(3)
    with cohabit.budget("60%", net, optimizer) as limits:
        assert plain(net, optimizer) == expected[0]
        assert limits.moved_bytes > 0
    assert net.head.weight.data_ptr() == net.table.weight.data_ptr()
    assert_same(state_of(net, optimizer), expected[1])


def test_arrays_and_pointers_stay_where_they_are_read() -> None:
    expected = eager(lambda n, o: plain(n, o) + plain(n, o))[1]["net.blocks.0.up.weight"]
    net, optimizer = made()
    torch.manual_seed(3)
    with cohabit.budget("40%", net, optimizer):
        plain(net, optimizer)
        weight = net.blocks[0].up.weight
        view = weight.detach().numpy()[1:]
        address = weight.data_ptr()
        plain(net, optimizer)
        assert weight.data_ptr() == address
        assert np.array_equal(view, expected.numpy()[1:])


def test_an_evicted_tensor_is_printed() -> None:
    model = nn.Linear(300, 300)
    expected = repr(model.weight), f"{model.weight}"
    with cohabit.budget("800KB", model):
        others = [torch.ones(50_000) for _ in range(6)]
        assert StorageBase.nbytes(model.weight.untyped_storage()) == 0
        assert (repr(model.weight), f"{model.weight}") == expected
        del others


def test_reads_within_torch_s_own_functions_see_whole_tensors() -> None:
    places, shared = torch.arange(1, 4097), torch.arange(4096.0)
    expected = torch.tensor_split(torch.arange(4098.0), places)[7]
    with cohabit.budget("800KB", places, shared):
        others = [torch.ones(50_000) for _ in range(6)]
        assert StorageBase.nbytes(places.untyped_storage()) == StorageBase.nbytes(shared.untyped_storage()) == 0
        assert torch.equal(torch.tensor_split(torch.arange(4098.0), places)[7], expected)
        taken = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(shared))
        assert torch.equal(taken, torch.arange(4096.0))
        del others


def test_a_handler_that_raises_is_called_between_two_ops() -> None:
    """An exception between two lines of the budget's would leave an op half begun, and others waiting for its end."""

    class Late(Exception):
        pass

    def raises(number: int, frame: Any) -> None:
        raise Late

    def until_late() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while True:
            for tensor in tensors:
                tensor.add_(0)

    tensors = [torch.ones(50_000) for _ in range(6)]
    before = signal.signal(signal.SIGALRM, raises)
    try:
        with cohabit.budget("800KB", tensors):
            for _ in range(60):
                with pytest.raises(Late):
                    until_late()
            assert signal.signal(signal.SIGALRM, raises) is raises
        assert signal.getsignal(signal.SIGALRM) is raises
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(torch.equal(tensor, torch.ones(50_000)) for tensor in tensors)


def test_lists_with_a_tensor_of_scalars_are_split() -> None:
    p, a, b = ([torch.ones(60_000) for _ in range(8)] for _ in range(3))
    with cohabit.budget("3MiB", p, a, b):
        torch._foreach_addcdiv_(p, a, b, torch.arange(8.0))
    assert [each[0].item() for each in p] == [1.0 + n for n in range(8)]


def test_the_same_op_on_another_dtype_makes_other_bytes() -> None:
    halves = [torch.ones(500_000, dtype=torch.bfloat16) for _ in range(3)]
    with cohabit.budget("8MB", halves) as limits:
        for half in halves:
            half.mul(2)
        for _ in range(2):
            wholes = [half.to(torch.float32) for half in halves]
            wholes = [whole.mul(2) for whole in wholes]
        assert limits.peak_bytes <= 8_000_000
        del wholes


def test_an_lstm_s_first_call_has_room_for_its_workspace() -> None:
    net = nn.LSTM(128, 128)
    x = torch.randn(50, 8, 128)
    with cohabit.budget("8MB", net) as limits:
        others = [torch.ones(250_000) for _ in range(7)]
        net(x)[0].sum().backward()
        assert limits.peak_bytes <= 8_000_000
        del others


def test_what_an_op_makes_grow_is_counted() -> None:
    a = torch.ones(100_000)
    with cohabit.budget("1MB", a) as limits:
        made = [torch.mul(a, 2, out=torch.empty(0)) for _ in range(4)]
        halves = [torch.empty(0), torch.empty(0)]
        torch.split_with_sizes_copy(a, [50_000, 50_000], out=halves)
        assert torch.equal(torch.cat(halves), a)
        assert sum(StorageBase.nbytes(x.untyped_storage()) for x in (a, *made)) <= 1_000_000
        assert limits.used_bytes <= 1_000_000
    assert all(torch.equal(x, torch.full((100_000,), 2.0)) for x in made)


def test_a_tensor_that_dies_between_two_entries_is_not_subtracted_again() -> None:
    a = torch.ones(100_000)
    limits = cohabit.budget("1MB", a)
    with limits:
        b = a + 1
    with limits:
        del b
        torch.zeros(1)
        assert limits.used_bytes == a.nbytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensors_without_bytes() -> None:
    model = nn.Linear(200, 200)
    x = torch.randn(64, 200)
    expected = torch.func.jvp(model, (x,), (x,))
    with cohabit.budget("1MB", model):
        for _ in range(3):
            found = torch.func.jvp(model, (x,), (x,))
            _ = [torch.ones(50_000) for _ in range(6)]
    assert all(map(torch.equal, found, expected))


def press(tensors: list[torch.Tensor]) -> None:
    """Make the tensors that were used before leave."""
    for tensor in tensors:
        tensor.add_(0)


def is_out(tensor: torch.Tensor) -> bool:
    return StorageBase.nbytes(tensor.untyped_storage()) == 0


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.to(torch.bfloat16),
        lambda x: x.reshape(-1),
        lambda x: x.t().contiguous(),
        lambda x: x.t().reshape(-1),
        lambda x: x.flatten(),
    ],
)
def test_ops_that_arrive_whole_in_inference_mode_read_whole_tensors(
    op: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x, others = torch.arange(50_000.0).view(50, 1000).clone(), [torch.ones(50_000) for _ in range(6)]
    expected = op(x.clone())
    with cohabit.budget("800KB", x, others):
        press(others)
        assert is_out(x)
        with torch.inference_mode():
            assert torch.equal(op(x), expected)


def test_views_arrays_and_shared_memory_from_before_see_every_write() -> None:
    tensors = [torch.ones(50_000) for _ in range(6)]
    array, view = tensors[0].numpy(), tensors[1].view(-1)
    tensors[2].share_memory_()
    with cohabit.budget("1000KB", tensors):
        press(tensors)
        assert [is_out(tensor) for tensor in tensors[:3]] == [False] * 3
        for tensor in tensors:
            tensor.add_(1)
        assert array.sum() == view.sum().item() == 2 * len(view)
    assert array[0] == view[0] == tensors[2][0] == 2


def test_a_storage_that_is_out_is_set_and_resized() -> None:
    tensors = [torch.full((50_000,), float(number)) for number in range(6)]
    with cohabit.budget("800KB", tensors):
        press(tensors)
        assert is_out(tensors[0])
        assert torch.empty(0).set_(tensors[0].untyped_storage()).shape == (50_000,)
        assert tensors[0].sum().item() == 0
        press(tensors[2:])
        assert is_out(tensors[1])
        storage = tensors[1].untyped_storage()
        storage.resize_(400_000)
        assert storage.nbytes() == 400_000
        assert tensors[1].sum().item() == 50_000


def test_a_library_s_op_reads_a_tensor_of_its_closure() -> None:
    weight, others = torch.full((50_000,), 2.0), [torch.ones(50_000) for _ in range(6)]
    with torch.library._scoped_library("budget_closure", "DEF") as library:
        library.define("scale(Tensor x) -> Tensor")
        library.impl("scale", lambda x: x * weight, "CPU")
        with cohabit.budget("800KB", weight, others):
            press(others)
            assert is_out(weight)
            assert torch.ops.budget_closure.scale(others[0]).sum().item() == 100_000


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_with_a_padding_mask_makes_nested_tensors() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 256, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 2).eval(), torch.rand(8, 32, 64)
    mask = torch.zeros(8, 32, dtype=torch.bool)
    mask[:, 20:] = True
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            expected = net(x, src_key_padding_mask=mask)
            with cohabit.budget("500KB", net) as limits:
                assert all(torch.equal(net(x, src_key_padding_mask=mask), expected) for _ in range(3))
                assert limits.moved_bytes > 0


def test_a_context_moves_what_an_earlier_one_moved() -> None:
    net, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.ones(8, 256)
    kept = []  # what the earlier ones came to
    for _ in range(3):
        with torch.no_grad(), cohabit.budget("700KB", net) as limits:
            net(x)
        kept.append(limits)
    assert len({limits.moved_bytes for limits in kept}) == 1
    assert kept[0].moved_bytes > 0


def test_functions_that_save_and_were_imported_before_pin_nothing_afterwards(tmp_path: Path) -> None:
    save, save_file = torch.save, safetensors.torch.save_file
    tensors = {str(number): torch.full((50_000,), float(number)) for number in range(6)}
    with cohabit.budget("800KB", tensors) as limits:
        press(list(tensors.values()))
        save(tensors, tmp_path / "saved.pt")
        save_file(tensors, tmp_path / "saved.safetensors")
        press(list(tensors.values()))
        assert limits.used_bytes <= 800_000
    for loaded in (torch.load(tmp_path / "saved.pt"), safetensors.torch.load_file(tmp_path / "saved.safetensors")):
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_share_begins_although_an_optimizer_waits(caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = made()
    waiting = torch.optim.SGD(nn.Linear(4, 4).parameters())
    with cohabit.budget("60%", net, optimizer, waiting) as limits:
        for ids in batches(count=20):
            step(net, optimizer, ids)
        assert limits.limit_bytes is not None
        assert limits.moved_bytes > 0
    assert "without a step of SGD" in caplog.text


def test_a_total_refuses_an_op_whose_scratch_might_not_fit() -> None:
    gc.collect()  # entering would free what other tests left
    release_free_memory()
    x = torch.ones(16 << 20)
    process_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    with (
        pytest.raises(MemoryExceeded, match=r"aten::sort: the op needs up to .* at once"),
        cohabit.budget(f"{process_bytes + (256 << 20)}B total", x, store="file"),
    ):
        x.sort()


def test_a_forked_process_is_refused_what_its_parent_overwrites() -> None:
    tensors = [torch.ones(50_000) for _ in range(6)]
    with cohabit.budget("800KB", tensors, store="file"):
        for tensor in tensors:
            tensor.add_(1)
        (out,) = [x for x in tensors if StorageBase.nbytes(x.untyped_storage()) == 0][:1]
        child = os.fork()
        if not child:
            try:
                out.sum()
            except UnsupportedModel:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_a_collective_reads_after_its_call_stays(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        sent, others = torch.ones(100_000), [torch.ones(100_000) for _ in range(4)]
        with cohabit.budget("800KB", sent, others):
            work = torch.distributed.all_reduce(sent, async_op=True)
            for other in others:
                other.mul_(2)
            assert StorageBase.nbytes(sent.untyped_storage()) == sent.nbytes
            assert StorageBase.nbytes(others[0].untyped_storage()) == 0
            work.wait()
            assert sent.sum().item() == len(sent)
    finally:
        torch.distributed.destroy_process_group()


def test_an_op_that_needs_more_is_refused_by_name_and_nothing_is_lost() -> None:
    net, optimizer = made()
    before = state_of(net, optimizer)
    with (
        pytest.raises(
            MemoryExceeded, match=r"aten::\w+: the op needs .* at once, the budget is 64.0 KiB; raise it"
        ),
        cohabit.budget("64KiB", net, optimizer),
    ):
        plain(net, optimizer)
    assert_same(state_of(net, optimizer) | {"net.seen": before["net.seen"]}, before)
    net, optimizer = made()
    torch.manual_seed(3)
    assert plain(net, optimizer) == eager(plain)[0]


def test_a_share_that_one_op_exceeds_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check(plain, "5%")
    assert "at once, the budget is" in caplog.text
    assert "5 % of the first step's peak" in caplog.text


OF_HOOKS = frozenset({"aten::detach", "aten::empty", "aten::set_"})
"""Ops that the budget's hooks on saved tensors call, too, so that they are not counted."""


class InterruptedAfter(TorchDispatchMode):
    """Interrupts eager PyTorch after an op."""

    def __init__(self, op: int) -> None:
        super().__init__()
        self._left = op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._left -= func._schema.name not in OF_HOOKS
        if not self._left:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("moment", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 60))])
def test_an_interrupt_at_any_op_leaves_what_one_of_eager_pytorch_leaves(moment: int) -> None:
    """It comes in the middle of an op and is delivered after it. Eager steps that follow have the right bits."""
    at = random.Random(moment).randrange(20, 200)  # of the first steps, whose ops are seen

    def train(context: Any, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(3)
        with context:
            for _ in range(3):
                plain(net, optimizer)

    net, optimizer = made()
    limits = cohabit.budget("50%", net, optimizer)
    run, count = limits._seen.run, 0

    def interrupted(*args: Any) -> Any:
        nonlocal count
        count += args[1]._schema.name not in OF_HOOKS
        if count == at and args[1]._schema.name not in OF_HOOKS:
            os.kill(os.getpid(), signal.SIGINT)
        return run(*args)

    limits._seen.run = interrupted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            train(limits, net, optimizer)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    expected, its_optimizer = made()
    with pytest.raises(KeyboardInterrupt):
        train(InterruptedAfter(at), expected, its_optimizer)
    assert_same(state_of(net, optimizer), state_of(expected, its_optimizer))
    later: list[Any] = []
    for pair in ((net, optimizer), (expected, its_optimizer)):
        torch.manual_seed(4)
        try:
            later.append(plain(*pair))
        except KeyError as error:  # the optimizer was making its state
            later.append(str(error))
    assert later[0] == later[1]
    assert_same(state_of(net, optimizer), state_of(expected, its_optimizer))


def test_an_error_of_the_loop_s_own_brings_everything_back() -> None:
    net, optimizer = made()
    torch.manual_seed(3)

    def train() -> None:
        with cohabit.budget("50%", net, optimizer, store="file"):
            plain(net, optimizer)
            net(torch.tensor([300]))

    with pytest.raises(IndexError):
        train()
    expected = eager(plain)[1]
    expected["net.seen"] += 1
    assert_same(state_of(net, optimizer), expected)


def test_threads_that_start_in_the_context_see_whole_tensors() -> None:
    net, optimizer = made()
    sums: list[float] = []
    with cohabit.budget("40%", net, optimizer):
        plain(net, optimizer)
        thread = threading.Thread(target=lambda: sums.extend(p.sum().item() for p in net.parameters()))
        thread.start()
        thread.join()
    assert sums == [p.sum().item() for p in net.parameters()]


def test_two_loops_share_one_budget() -> None:
    expected = eager(plain)
    pairs = [made(), made()]
    results: dict[int, list[float]] = {}

    def train(number: int) -> None:
        results[number] = [step(*pairs[number], ids) for ids in batches()]

    for net, _ in pairs:
        for block in net.blocks:
            block.drop.p = 0.0
    net, optimizer = made()
    for block in net.blocks:
        block.drop.p = 0.0
    expected_losses = plain(net, optimizer)
    with cohabit.budget("1500KiB", *(owner for pair in pairs for owner in pair)) as limits:
        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert limits.peak_bytes <= parse_size("1500KiB")
    assert results == {0: expected_losses, 1: expected_losses}
    assert expected[0] != expected_losses, "dropout is off here"


@pytest.mark.long
def test_a_thread_that_outlives_the_context_runs_on_with_whole_tensors() -> None:
    """Its ops come while everything is brought back, and after that, under a total that is no longer measured."""
    errors = list[BaseException]()

    def work(tensors: list[torch.Tensor], done: threading.Event) -> None:
        try:
            while not done.is_set():
                for tensor in tensors:
                    tensor.sum()
        except BaseException as error:
            errors.append(error)

    for _ in range(3):
        net, optimizer = made()
        done = threading.Event()
        with cohabit.budget("16GiB total", net, optimizer, store="file"):
            thread = threading.Thread(target=work, args=([net.table.weight, net.head.weight], done))
            thread.start()
            plain(net, optimizer)
        done.set()
        thread.join()
    assert errors == []


def test_workers_of_a_loader_are_forked_in_the_middle() -> None:
    net, optimizer = made()
    data = torch.utils.data.TensorDataset(torch.cat(batches()))
    with cohabit.budget("50%", net, optimizer):
        plain(net, optimizer)
        loader = torch.utils.data.DataLoader(data, ROWS, num_workers=1, multiprocessing_context="fork")
        losses = [step(net, optimizer, ids) for (ids,) in loader]
    assert all(np.isfinite(losses))


def test_a_forked_process_has_no_limit_of_its_own_which_would_evict_into_the_parent_s_file() -> None:
    net, optimizer = made()
    with cohabit.budget("16GiB total", net, optimizer, store="file") as limits:
        plain(net, optimizer)
        assert limits.limit_bytes is not None
        child = os.fork()
        if not child:
            plain(net, optimizer)
            os._exit(0 if limits.limit_bytes is None else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_total_is_measured_in_a_loop_whose_every_32nd_op_is_a_view() -> None:
    """Every 1024th op is one, too."""
    x = torch.zeros(LEAST_BYTES)
    held = []
    with cohabit.budget("16GiB total", x, store="file") as limits:
        for step in range(128):
            if step == 64:
                before = limits.limit_bytes
                held.append(np.ones(64 << 20, np.uint8))  # not a tensor
            x.view(-1)
            for _ in range(31):
                x.add_(1)
        assert before is not None
        assert limits.limit_bytes is not None
        assert before - limits.limit_bytes > 32 << 20


def test_a_total_leaves_tensors_what_the_process_does_not_take() -> None:
    """The owners' own bytes, which are in the process when the context is entered, count once."""
    gc.collect()  # entering would free what other tests left
    release_free_memory()
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    process_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    total_bytes = 2 * process_bytes
    with cohabit.budget(f"{total_bytes}B total", tensor, store="file") as limits:
        others_bytes = process_bytes - tensor.nbytes
        assert limits.limit_bytes is not None
        assert abs(total_bytes * 15 // 16 - others_bytes - limits.limit_bytes) < 16 << 20


@pytest.mark.long
def test_a_context_that_is_collected_or_entered_again() -> None:
    net, optimizer = made()
    torch.manual_seed(3)
    limits = cohabit.budget("50%", net, optimizer)
    with limits:
        first = plain(net, optimizer)
        with pytest.raises(RuntimeError, match="entered already"), limits:
            pass
    with limits:
        second = plain(net, optimizer)
    del limits
    gc.collect()
    assert [*first, *second] == eager(lambda n, o: plain(n, o) + plain(n, o))[0]


@pytest.mark.parametrize(
    ("memory", "options", "reason"),
    [
        ("150%", {}, "a share lies above 0% and up to 100%"),
        ("much", {}, "is not a size"),
        (0, {}, "is not a number of bytes above 0"),
        ("1MiB", {"store": "tape"}, "store 'tape' is unknown"),
        ("1MiB", {"folder": "."}, "folder is where store='file' keeps its file"),
    ],
)
def test_wrong_arguments_are_named(memory: Any, options: dict[str, Any], reason: str) -> None:
    net, optimizer = made()
    with pytest.raises(ValueError, match=reason):
        cohabit.budget(memory, net, optimizer, **options)


def test_a_total_needs_a_file_and_a_size() -> None:
    net, optimizer = made()
    with pytest.raises(ValueError, match="set store='file'"):
        cohabit.budget("2GiB total", net, optimizer)
    with pytest.raises(ValueError, match="give a size"):
        cohabit.budget("60% total", net, optimizer, store="file")


def test_owners_are_needed_and_a_share_needs_an_optimizer() -> None:
    with pytest.raises(ValueError, match="name the model and the optimizer"):
        cohabit.budget("1MiB")
    with pytest.raises(ValueError, match="name the optimizer"):
        cohabit.budget("60%", made()[0])
    with pytest.raises(ValueError, match="int is not a module"):
        cohabit.budget("1MiB", 7)  # type: ignore[arg-type]


def test_tensors_that_are_not_named_are_not_counted_either_after_an_op_has_changed_them() -> None:
    data = torch.zeros(LEAST_BYTES)
    with cohabit.budget("1MiB", torch.zeros(1)) as limits:
        data.add_(1)
        torch.add(data, 1, out=data)
        assert limits.used_bytes == 0


def test_small_storages_stay() -> None:
    tensor = torch.zeros(LEAST_BYTES // 4 - 1)
    with cohabit.budget("1MiB", tensor) as limits:
        assert limits.used_bytes == 0
        larger = tensor.new_zeros(LEAST_BYTES // 4)
        assert limits.used_bytes == larger.nbytes
        del larger
        torch.zeros(1)
        assert limits.used_bytes == 0


WIDE_LOOP = """
import gc
import sys
from contextlib import nullcontext
from pathlib import Path
import torch, cohabit
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.training.seen.process_limit import ProcessLimit

peaks = []
start_peak = ProcessLimit.start_peak

def noted(limit):  # a new peak clears the kernel's
    if hasattr(limit, "_clear_refs"):
        peaks.append(peak())
    return start_peak(limit)

def peak():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

ProcessLimit.start_peak = noted
width, layers, room_mib = map(int, sys.argv[1:])
torch.set_num_threads(1)

def train(context, net, optimizer, x):
    losses = []
    with context:
        for _ in range(3):
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        peaks.append(peak())
    return losses

def run(is_limited):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        *(layer for _ in range(layers) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU()))
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.randn(64, width)
    before_kib = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    total_kib = before_kib + (room_mib << 10)  # of what parameters, gradients and state take together
    limits = cohabit.budget(f"{total_kib << 10}B total", net, optimizer, store="file") if is_limited else nullcontext()
    Path("/proc/self/clear_refs").write_text("5")
    peaks.clear()
    return train(limits, net, optimizer, x), max(peaks) - total_kib

limited_losses, over_kib = run(True)
gc.collect()
release_free_memory()
losses, eager_over_kib = run(False)
print(limited_losses == losses, over_kib, eager_over_kib)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "layers", "room_mib"),
    [
        (256, 128, 66),
        *(pytest.param(*case, 200, marks=pytest.mark.slow) for case in ((2048, 6), (1024, 24), (512, 96))),
    ],
)
def test_a_total_is_kept_by_the_whole_process(width: int, layers: int, room_mib: int) -> None:
    """Eager, the same loop exceeds it. Small tensors lie in the C library's heap, large ones do not."""
    program = [sys.executable, "-c", WIDE_LOOP, str(width), str(layers), str(room_mib)]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    is_same, over_kib, eager_over_kib = printed.split()
    assert is_same == "True"
    assert int(over_kib) <= 0 < int(eager_over_kib)


def test_whatever_brings_a_tensor_in_measures_the_process_before() -> None:
    """Under a total: also what is computed again, or read without an op."""
    residency = Residency(torch.device("cpu"), RamSpill(), CopyThread())
    residency.start()
    try:
        first, second = torch.ones(50_000), torch.ones(50_000)
        for tensor in (first, second):
            residency.track(tensor.untyped_storage())
        residency.limit_bytes = first.nbytes
        assert residency.make_room(0)
        residency.limit_bytes = 2 * first.nbytes
        measured: list[int] = []
        residency.measure, residency.headroom_bytes = measured.append, first.nbytes - 1
        residency.bring_all_in()
        assert measured == [], "the end of a context has no limit"
        residency.track(first.untyped_storage())
        residency.limit_bytes, residency.headroom_bytes = 1, first.nbytes - 1
        assert residency.make_room(0)
        residency.limit_bytes = 2 * first.nbytes
        tracked = residency.find(first.untyped_storage())
        assert tracked is not None
        residency.pin(tracked)
        assert measured == [first.nbytes]
    finally:
        residency.stop()


def test_a_total_below_what_the_process_takes_is_refused() -> None:
    net, optimizer = made()
    with (
        pytest.raises(MemoryExceeded, match="raise the total"),
        cohabit.budget("64MiB total", net, optimizer, store="file"),
    ):
        raise AssertionError("it was entered")
    assert step(net, optimizer, batches()[0]) > 0


@pytest.mark.long
def test_the_package_imports_no_torch_without_a_budget() -> None:
    program = "import sys, cohabit; assert 'torch' not in sys.modules; print(cohabit.budget.__module__)"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "cohabit.runtime.training.budget"
    with pytest.raises(ImportError, match="Tutor"):
        from cohabit import Tutor  # noqa: F401


def test_an_optimizer_may_have_hooks_after_those_of_the_budget() -> None:
    net, optimizer = made()
    calls: list[int] = []
    torch.manual_seed(3)
    with cohabit.budget("60%", net, optimizer):
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(1))
        plain(net, optimizer)
    assert len(calls) == STEPS
