"""Where cuDNN has no fused kernel, or a wrong one, plain kernels compute: known before requests come."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.profiling import link, measure
from cohabit.runtime.lowering import fused_ops as fused
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from tests.support.runtime import models
from tests.support.runtime.backends import ROOM_BYTES, has_gpu, real_cuda
from tests.support.runtime.cuda_fake import FakeDriver
from tests.support.runtime.plans import streaming_plan, with_room

MIB = 1 << 20
Kernel = Callable[..., torch.Tensor]


class Residual(nn.Module):
    """A convolution, a depthwise one, and one with a residual, each with its ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.last = nn.Conv2d(8, 8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return torch.relu(self.last(torch.relu(self.depthwise(x))) + x)


@pytest.fixture(scope="module")
def model() -> Residual:
    torch.manual_seed(0)
    return Residual().eval()


@pytest.fixture
def lowered(model: Residual, tmp_path: Path) -> Lowered:
    return models.lowered(
        model, {"x": torch.zeros(3, 4, 8, 8)}, tmp_path, "residual", [2], options=Options(fused=True)
    )


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_SCRATCH_BYTES", 16 * MIB)
    monkeypatch.setattr(link, "_COPY_BYTES", 64 << 10)
    monkeypatch.setattr(measure, "_ROUNDS", 1)


class FakeCudnn:
    """Counts its kernels' calls. `flaw` may refuse a call, or spoil its result."""

    def __init__(self, flaw: Callable[[torch.Tensor, int], torch.Tensor] = lambda result, groups: result) -> None:
        self.calls = 0
        self._flaw = flaw

    def relu(self, *args: Any) -> torch.Tensor:
        self.calls += 1
        return self._flaw(fused.plain_conv_relu(*args), args[-1])

    def add_relu(
        self, x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, alpha: float, *rest: Any
    ) -> torch.Tensor:
        assert alpha == 1.0
        self.calls += 1
        return self._flaw(fused.plain_conv_add_relu(x, weight, z, *rest), rest[-1])

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeCudnn":
        monkeypatch.setattr(fused, "on_cudnn", lambda x: True)
        monkeypatch.setattr(torch, "cudnn_convolution_relu", self.relu)
        monkeypatch.setattr(torch, "cudnn_convolution_add_relu", self.add_relu)
        return self


def no_kernel(result: torch.Tensor, groups: int) -> torch.Tensor:
    raise RuntimeError("unable to find an engine to execute this computation")


def no_depthwise_kernel(result: torch.Tensor, groups: int) -> torch.Tensor:
    return result if groups == 1 else no_kernel(result, groups)


def wrong_kernel(result: torch.Tensor, groups: int) -> torch.Tensor:
    return result + 0.1


def nan_kernel(result: torch.Tensor, groups: int) -> torch.Tensor:
    return result * torch.nan


def measured(backend: CudaBackend, lowered: Lowered, cache: Path | None = None) -> Lowered:
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    return backend.measure(lowered, store, cache, lambda text: None)[0]


def served(backend: CudaBackend, lowered: Lowered) -> list[torch.Tensor]:
    """Outputs of captured programs with every parameter resident, and with none."""
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    graph, outputs = lowered.graphs[Bucket(2)], []
    for plan in (resident_plan(graph), streaming_plan(graph)):
        roomy = with_room(plan, peak_activation_bytes(graph) + ROOM_BYTES)
        arena = backend.arena(roomy.memory.nbytes)
        program = backend.build(lowered, roomy, None, arena, Bases(0, roomy.memory.partition_bytes), store)
        backend.executor.load(program)
        assert program.admission.graph is not None
        outputs += backend.executor.run(program, lowered.examples(Bucket(2))).outputs
    return outputs


def kinds(lowered: Lowered) -> list[str]:
    return [i.target.__name__ for i in lowered.traces[Bucket(2)].instructions]


FLAWS = {
    "none": (lambda result, groups: result, ["conv_relu", "conv_relu", "conv_add_relu"]),
    "no depthwise kernel": (no_depthwise_kernel, ["conv_relu", "plain_conv_relu", "conv_add_relu"]),
    "a wrong kernel": (wrong_kernel, ["plain_conv_relu", "plain_conv_relu", "plain_conv_add_relu"]),
    "not a number": (nan_kernel, ["plain_conv_relu", "plain_conv_relu", "plain_conv_add_relu"]),
}


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("flaw", FLAWS)
def test_the_measurement_decides_and_is_kept(
    flaw: str, model: Residual, lowered: Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, expected = FLAWS[flaw]
    cudnn = FakeCudnn(spoil).install(monkeypatch)
    decided = measured(CudaBackend(FakeDriver()), lowered, tmp_path)
    assert kinds(decided) == expected
    assert [op.target for op in decided.graphs[Bucket(2)].ops] == [
        op.target for op in lowered.graphs[Bucket(2)].ops
    ]
    assert cudnn.calls
    cudnn.calls = 0
    backend = CudaBackend(FakeDriver())
    again = measured(backend, lowered, tmp_path)
    assert not cudnn.calls
    assert kinds(again) == expected
    assert again.graphs == decided.graphs
    outputs = served(backend, again)
    assert bool(cudnn.calls) == any(not kind.startswith("plain") for kind in expected)
    assert torch.equal(*outputs)
    with torch.no_grad():
        torch.testing.assert_close(outputs[0], model(*lowered.examples(Bucket(2))), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no CUDA device")
@pytest.mark.parametrize(
    "options",
    [
        Options(fused=True),
        Options(tf32="all", fused=True),
        Options("float16", channels_last=True, fused=True),
        Options("bfloat16", channels_last=True, fused=True),
    ],
    ids=str,
)
def test_the_device_s_fused_kernels_are_within_tolerance_and_equal_at_every_budget(
    options: Options, model: Residual, tmp_path: Path
) -> None:
    lowered = models.lowered(model, {"x": torch.zeros(3, 4, 32, 32)}, tmp_path, "residual", [2], options=options)
    backend = real_cuda()
    outputs = served(backend, measured(backend, lowered))
    with torch.no_grad():
        expected = model(*lowered.examples(Bucket(2)))
    torch.testing.assert_close(outputs[0], expected, atol=options.tolerance * float(expected.abs().max()), rtol=0)
    assert torch.equal(*outputs)
    backend.close()
