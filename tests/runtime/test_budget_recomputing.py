"""`cohabit.budget` over a slow link: cheap results are dropped and computed again, with eager PyTorch's bits."""

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import StorageBase
from torch.nn import functional as F

import cohabit
from cohabit.runtime.training import recomputing
from cohabit.runtime.training.copies.copying import CopyThread
from cohabit.runtime.training.residency import Residency
from tests.runtime.test_budget import LOOPS, WIDTH, Loop, check, one_thread

__all__ = ["one_thread"]  # a fixture
ROWS = 128
WHOLE_BYTES = 2_752_512
"""Peak of a step of `Gated`, without a limit."""
KIB = 1 << 10


@pytest.fixture(autouse=True)
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come too late, and take longer than any op: results are dropped wherever that is possible."""
    monkeypatch.setattr(Residency, "write_ahead", lambda residency, needed_bytes, after_s: None)
    monkeypatch.setattr(CopyThread, "copy_s", lambda thread, nbytes: 1e-3)


@pytest.mark.parametrize("memory", ["60%", "40%"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_has_eager_s_bits(loop: Loop, memory: str) -> None:
    check(loop, memory)


class Gated(nn.Module):
    """A transformer's gated layers: their products, activations and norms can be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)])
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in self.layers:
            gate, value = up(norm(x)).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * value)
        return x


def trained(share: float | None) -> tuple[list[torch.Tensor], int, float]:
    """Return losses and weights, the bytes computed again, and the peak over the limit.

    Without the optimizer as an owner, all ops are seen to the end, and only then are results computed again.
    """
    torch.manual_seed(0)
    model = Gated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    def train() -> None:
        for step in range(4):
            loss = model(torch.full((ROWS, WIDTH), 0.1 * (step + 1))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

    if share is None:
        train()
        return [*losses, *model.state_dict().values()], 0, 0.0
    with cohabit.budget(int(share * WHOLE_BYTES), model) as limits:
        train()
        assert limits.limit_bytes is not None
        computed, over = limits.recomputed_bytes, limits.peak_bytes / limits.limit_bytes
    return [*losses, *model.state_dict().values()], computed, over


@pytest.mark.parametrize("share", [0.6, 0.4])
def test_activations_are_computed_again_within_the_limit(share: float) -> None:
    expected, *_ = trained(None)
    found, computed, over = trained(share)
    assert computed > 0
    assert over <= 1
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_fast_link_computes_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyThread, "copy_s", lambda thread, nbytes: 0.0)
    _, computed, _ = trained(0.4)
    assert computed == 0


# What may happen to an input between an op and the time at which its result is wanted again

SIZE = 64 * KIB  # of each tensor, in bytes


def tensor(value: float) -> torch.Tensor:
    return torch.full((SIZE // 4,), value)


def is_out(value: torch.Tensor) -> bool:
    return StorageBase.nbytes(value.untyped_storage()) == 0


def press() -> None:
    """Make everything else leave."""
    others = [tensor(0.0) for _ in range(9)]
    torch.stack(others[:4])


def written_by_an_op(x: torch.Tensor) -> None:
    x.add_(1)


def written_through_a_view(x: torch.Tensor) -> None:
    x.view(2, -1)[1].mul_(3)


def written_by_numpy(x: torch.Tensor) -> None:
    x.numpy()[:] = 7


def written_as_data(x: torch.Tensor) -> None:
    x.data.fill_(5)


def resized(x: torch.Tensor) -> None:
    x.resize_(2 * x.numel())


def left_alone(x: torch.Tensor) -> None: ...


@pytest.mark.parametrize(
    "change",
    [left_alone, written_by_an_op, written_through_a_view, written_by_numpy, written_as_data, resized],
)
def test_a_dropped_result_survives_what_happens_to_its_input(change: Callable[[torch.Tensor], None]) -> None:
    with cohabit.budget(9 * SIZE, torch.zeros(9)) as limits:
        press()  # something has been evicted: recomputations are noted from now on
        x = tensor(0.5)
        y = x.exp()
        press()
        assert is_out(y)
        change(x)
        press()
        assert torch.equal(y, tensor(0.5).exp())
        assert limits.recomputed_bytes == SIZE


def test_a_dropped_result_keeps_its_input_alive_and_lets_it_go() -> None:
    with cohabit.budget(9 * SIZE, torch.zeros(9)) as limits:
        press()
        x = tensor(0.5)
        of_x = weakref.ref(x.untyped_storage())
        y, z = x.exp(), x.sin()
        press()
        assert is_out(y)
        assert is_out(z)
        del x
        assert of_x() is not None
        assert torch.equal(y, tensor(0.5).exp())
        del z  # dies while it is dropped
        torch.zeros(1)
        assert of_x() is None
        del y
        torch.zeros(1)
        assert limits.used_bytes == 0


def negated(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x).conj().imag.contiguous()


def with_a_small_expanded_argument(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.pow(torch.rand(1024).add(0.5).expand(SIZE // 4096, 1024), x.view(-1, 1024))


def sparse(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(x)).unsqueeze(0)
    return torch.sparse_coo_tensor(places, x, (len(x),), check_invariants=True).coalesce().sqrt().values()


@pytest.mark.parametrize("op", [negated, with_a_small_expanded_argument, sparse])
def test_what_a_layout_does_not_tell_is_not_computed_again(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    expected = op(tensor(0.3))
    with cohabit.budget(12 * SIZE, torch.zeros(9)):
        press()
        x = tensor(0.3)
        y = op(x)
        press()
        assert torch.equal(y, expected)


def test_a_result_is_computed_again_below_a_transform() -> None:
    with cohabit.budget(9 * SIZE, torch.zeros(9)) as limits:
        press()
        x = tensor(0.5)
        y = x.exp()
        press()
        read: list[float] = []
        torch.func.functionalize(lambda w: read.append(float(y.numpy()[0])) or w)(torch.ones(2))
        assert limits.recomputed_bytes == SIZE
    assert read == [tensor(0.5).exp()[0].item()]


def test_a_result_is_computed_again_before_arithmetic_changes() -> None:
    with cohabit.budget(9 * SIZE, torch.zeros(9)):
        press()
        x = tensor(1e-39)
        y = x * 0.5
        press()
        assert is_out(y)
        assert torch.set_flush_denormal(True)
        try:
            halved = y.view(torch.int32)[0].item()
        finally:
            torch.set_flush_denormal(False)
    assert halved == torch.full((1,), 1e-39).mul(0.5).view(torch.int32).item() != 0


@pytest.mark.parametrize("count", [5, 6, 7])
def test_several_arguments_are_computed_again_within_the_limit(count: int) -> None:
    with cohabit.budget(count * SIZE, torch.zeros(9)) as limits:
        junk = [tensor(0.0) for _ in range(count + 2)]
        low, high, x = tensor(0.1), tensor(0.2), tensor(0.15)
        least, most = low.minimum(high), low.maximum(high)
        junk = [tensor(0.0) for _ in range(count)]
        limits.reset_peak()
        assert torch.equal(torch.clamp(x, least, most), tensor(0.15))
        assert limits.peak_bytes <= count * SIZE
        del junk


def test_a_chain_of_results_leaves_nothing_behind() -> None:
    with cohabit.budget(9 * SIZE, torch.zeros(9)):
        press()
        average = tensor(1.0)
        for _ in range(200):
            average = average * 0.99
        gc.collect()
        assert sum(type(found) is recomputing.Recomputation for found in gc.get_objects()) < 20


def test_an_input_is_written_after_the_death_of_what_depends_on_it() -> None:
    with cohabit.budget(9 * SIZE, torch.zeros(9)) as limits:
        press()
        x = tensor(0.5)
        y = x.exp()
        press()
        assert is_out(y)
        del y
        x.numpy()[:] = 7  # before any op has noticed
        assert torch.equal(x, tensor(7))
        assert limits.recomputed_bytes == 0


def test_what_is_computed_again_reads_nothing_that_is_itself_dropped() -> None:
    with cohabit.budget(9 * SIZE, torch.zeros(9)) as limits:
        press()
        x = tensor(0.5)
        y = x.exp()
        z = y.sin()
        press()
        assert torch.equal(z, tensor(0.5).exp().sin())
        assert limits.recomputed_bytes == 0, "it was copied, since its input was dropped first"
        assert torch.equal(y, tensor(0.5).exp())
        assert limits.recomputed_bytes == SIZE


def test_results_still_dropped_at_the_end_are_whole() -> None:
    with cohabit.budget(9 * SIZE, torch.zeros(9)):
        press()
        x = tensor(0.5)
        y = x.exp()
        press()
        assert is_out(y)
    assert torch.equal(y, tensor(0.5).exp())


def random_program(seed: int, limit_bytes: int | None) -> tuple[list[torch.Tensor], int]:
    """Run elementwise ops, ops by row, views, writes, deaths and reads past ops.

    Returns the tensors that live in the end, and the bytes computed again.
    """
    chance = random.Random(seed)
    torch.manual_seed(seed)
    live = [torch.randn(64, SIZE // 256) for _ in range(3)]

    def make() -> torch.Tensor:
        a, b = chance.choice(live), chance.choice(live)
        ops: list[Callable[[], torch.Tensor]] = [
            lambda: a.exp().clamp(max=9.0),
            lambda: torch.where(a > 0, a, b),
            lambda: F.gelu(a) * 0.5,
            lambda: a * b - 1,
            lambda: F.layer_norm(a, a.shape[-1:]),
            lambda: a.softmax(-1),
            lambda: F.dropout(a, 0.3),
            lambda: torch.cat([a[:32], b[:32]]),
            lambda: a.t().contiguous().view_as(b) + 0.25,
            lambda: (a.double() * 0.1).float(),
        ]
        return chance.choice(ops)()

    def change() -> None:
        a, b = chance.choice(live), chance.choice(live)
        writes: list[Callable[[], Any]] = [
            lambda: a.mul_(0.5),
            lambda: a[::2].fill_(0.1),
            lambda: a.data.add_(1),
            lambda: a.numpy().__imul__(0.5),
            lambda: F.relu_(a),
            lambda: a.copy_(b),
        ]
        chance.choice(writes)()

    def run() -> None:
        for _ in range(60):
            if chance.random() < 0.25:
                change()
            else:
                live.append(make())
            if len(live) > 14:
                live.pop(chance.randrange(len(live)))

    if limit_bytes is None:
        run()
        return live, 0
    with cohabit.budget(limit_bytes, torch.zeros(9)) as limits:
        run()
        return live, limits.recomputed_bytes


@pytest.mark.parametrize("limit_bytes", [6 * SIZE, 9 * SIZE])
def test_programs_at_random_have_eager_s_bits(limit_bytes: int) -> None:
    computed_bytes = 0
    for seed in range(40):
        expected, _ = random_program(seed, None)
        found, computed = random_program(seed, limit_bytes)
        computed_bytes += computed
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs), f"seed {seed}"
    assert computed_bytes > 40 * SIZE


def test_recomputations_are_noted_while_they_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputing, "_NOTED_OPS", 3)
    monkeypatch.setattr(recomputing, "_PAUSED_OPS", 2)
    noting = recomputing.Noting()
    assert not noting.includes_op(), "no op has waited"
    noting.op_waits()
    noting.dropped()
    assert [noting.includes_op() for _ in range(6)] == [True] * 6, "a result was dropped, so it goes on"
    noting.op_waits()
    assert [noting.includes_op() for _ in range(3)] == [False] * 3, "none was, so it pauses, and then ends"
    noting.op_waits()
    assert noting.includes_op()


@pytest.mark.parametrize(
    ("op", "qualifies"),
    [
        (torch.ops.aten.gelu.default, True),
        (torch.ops.aten.mul.Tensor, True),
        (torch.ops.aten.native_layer_norm.default, True),
        (torch.ops.aten.mm.default, False),  # its order depends on the number of threads
        (torch.ops.aten.sum.dim_IntList, False),
        (torch.ops.aten.native_dropout.default, False),
        (torch.ops.aten.bernoulli.default, False),
        (torch.ops.aten.mul_.Tensor, False),
        (torch.ops.aten.native_batch_norm.default, False),
    ],
)
def test_ops_that_may_be_repeated(op: Any, qualifies: bool) -> None:
    assert (recomputing._form_with_results(op) is not None) == qualifies
