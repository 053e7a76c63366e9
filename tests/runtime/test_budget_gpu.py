"""`cohabit.budget` on a GPU: eager PyTorch's bits at every budget, from streams and reads of all kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cohabit
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.stores.pinned import PinnedMemory
from tests.support.runtime.backends import has_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no CUDA device")]
WIDTH, STEPS = 512, 5


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(8)]
    model = nn.Sequential(*blocks).to("cuda")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(memory: str | None, store: Any = "ram", folder: Path | None = None) -> list[torch.Tensor]:
    """Return the losses, then all weights and optimizer state."""
    model, optimizer = made()
    losses = []

    def step(n: int) -> None:
        batch = torch.full((256, WIDTH), 0.1 * n, device="cuda")
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())

    if memory is None:
        for n in range(STEPS):
            step(n)
    else:
        with cohabit.budget(memory, model, optimizer, store=store, folder=folder) as limits:
            for n in range(STEPS):
                step(n)
            assert limits.moved_bytes > 0
            assert limits.limit_bytes is not None
            assert limits.peak_bytes <= limits.limit_bytes
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [*losses, *model.state_dict().values(), *state]


@pytest.mark.parametrize("store", ["ram", "file"])
@pytest.mark.parametrize("share", ["60%", "40%"])
def test_a_loop_has_eager_s_bits(share: str, store: str, tmp_path: Path) -> None:
    ours = trained(share, store, tmp_path if store == "file" else None)
    for mine, theirs in zip(ours, trained(None), strict=True):
        assert torch.equal(mine, theirs)


def test_streams_of_the_loop_s_own_read_what_is_swapped_in() -> None:
    def sums(memory: str | None) -> list[torch.Tensor]:
        weights = [torch.full((WIDTH, WIDTH), 1e-3 * n, device="cuda") for n in range(1, 9)]
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        found = []

        def run() -> None:
            for _ in range(20):
                x = y = torch.ones(WIDTH, WIDTH, device="cuda")
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    for weight in weights:
                        y = y @ weight
                for weight in reversed(weights):
                    x = x @ weight
                main.wait_stream(side)
                found.append((x - y).sum().cpu())

        if memory is None:
            run()
        else:
            with cohabit.budget(memory, weights):
                run()
        return found

    for mine, theirs in zip(sums("6MiB"), sums(None), strict=True):
        assert torch.equal(mine, theirs)


def test_pointers_copies_and_files_have_whole_tensors(tmp_path: Path) -> None:
    weights = [torch.full((WIDTH, WIDTH), float(n), device="cuda") for n in range(9)]
    with cohabit.budget("4MiB", weights):
        sums = [weight.sum() for weight in weights]  # all have been out
        torch.save(weights, tmp_path / "weights.pt")
        assert weights[0].data_ptr() != 0
        assert torch.equal(weights[3].cpu(), torch.full((WIDTH, WIDTH), 3.0))
    loaded = torch.load(tmp_path / "weights.pt")
    for n, (weight, saved, total) in enumerate(zip(weights, loaded, sums, strict=True)):
        assert torch.equal(weight, torch.full_like(weight, n))
        assert torch.equal(saved, weight)
        assert torch.equal(total >= 0, torch.full_like(total, True, dtype=torch.bool))


def test_graphs_are_refused_by_name() -> None:
    weight = torch.ones(WIDTH, WIDTH, device="cuda")
    with cohabit.budget("8MiB", weight), pytest.raises(UnsupportedModel, match="fixed addresses"):
        torch.cuda.CUDAGraph().capture_begin()


def test_a_total_is_refused() -> None:
    with pytest.raises(ValueError, match="resident memory, and the owners are on cuda:0"):
        cohabit.budget("3GiB total", torch.ones(9, device="cuda"), store="file")


def test_pinned_memory_is_as_large_as_what_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fiftieth, and a piece for small tensors, come on top; it is unpinned at the end."""
    pinned: list[PinnedMemory] = []
    made_by = PinnedMemory.__init__

    def noted(self: PinnedMemory, *arguments: Any) -> None:
        pinned.append(self)
        made_by(self, *arguments)

    monkeypatch.setattr(PinnedMemory, "__init__", noted)
    tensors = [torch.zeros(2000, 2000 + 77 * n, device="cuda") for n in range(12)]
    total = sum(tensor.nbytes for tensor in tensors)
    with cohabit.budget("64MiB", tensors) as limits:
        for _ in range(2):
            for tensor in tensors:
                tensor.sum()
        (memory,) = pinned
        assert 0 < memory.used_bytes <= 1.02 * total + (64 << 20)
        assert limits.moved_bytes > 0
    assert memory.used_bytes == 0
