"""What a model option costs in accuracy is what `runtime.options` says, and its files are its own."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import CUDA_DEFAULTS, Dtype, Options, Tf32
from tests.support.runtime import models
from tests.support.runtime.backends import cpu, has_gpu, real_cuda
from tests.support.runtime.plans import with_room

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no CUDA device")]
OPTIONS = [
    Options(),
    Options(channels_last=True),
    Options("float16"),
    Options("bfloat16"),
    Options("float16", channels_last=True),
    CUDA_DEFAULTS,
]


@pytest.mark.parametrize("make", [cpu, pytest.param(real_cuda, marks=ON_GPU)])
@pytest.mark.parametrize("options", [*OPTIONS, pytest.param(Options(tf32="all"), marks=ON_GPU)], ids=str)
def test_outputs_are_within_the_option_s_tolerance(  # type: ignore[no-untyped-def]
    options: Options, make, constructs: models.Constructs, tmp_path: Path
) -> None:
    lowered, again = (constructs.lowered("conv_norm", tmp_path, options) for _ in range(2))
    assert again.graphs == lowered.graphs
    inputs = lowered.examples(Bucket(2))
    with torch.no_grad():
        expected = models.made("conv_norm")(*inputs)
    output = _run(make(), lowered, inputs)
    assert output.dtype is torch.float32
    torch.testing.assert_close(output, expected, atol=options.tolerance * float(expected.abs().max()), rtol=0)


def _run(backend: Backend, lowered: Lowered, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the output of a model with all parameters resident, for a batch of 2. Closes the backend."""
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    if isinstance(backend, CudaBackend):  # which finds out for which convolutions there are fused kernels
        lowered, _ = backend.measure(lowered, store, None, lambda text: None)
    plan = resident_plan(lowered.graphs[Bucket(2)])
    roomy = with_room(plan, 64 << 20)
    arena = backend.arena(roomy.memory.nbytes)
    program = backend.build(lowered, roomy, None, arena, Bases(0, plan.memory.partition_bytes), store)
    backend.executor.load(program)
    (output,) = backend.executor.run(program, inputs).outputs
    backend.close()
    return output


def test_half_precision_halves_the_weights(constructs: models.Constructs, tmp_path: Path) -> None:
    single, half = (constructs.lowered("wide", tmp_path, options) for options in (Options(), Options("float16")))
    assert half.manifest.segment_bytes < 0.52 * single.manifest.segment_bytes
    assert half.weights_path != single.weights_path


@pytest.mark.parametrize("fused", [False, True])
def test_channels_last_weights_are_stored_so(fused: bool, constructs: models.Constructs, tmp_path: Path) -> None:
    lowered = constructs.lowered("conv_norm", tmp_path, Options(channels_last=True, fused=fused))
    pieces = [p for s in lowered.manifest.segments for p in s.pieces if len(p.shape) == 4]
    assert pieces
    assert all(p.stride[1] == 1 for p in pieces)


class _Strided(nn.Module):
    """Views, among them of other types and by strides, of what convolutions compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.linear = nn.Linear(8 * 64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.second(torch.relu(self.first(x))))
        batch = y.size(0)
        turned = y.view(batch, 2, 4, 8, 8).transpose(1, 2).contiguous().view(batch, 8, 8, 8)
        pairs = torch.view_as_complex(y.unflatten(3, (4, 2))).abs().mean((1, 2, 3))
        positive = y.view(torch.int32).gt(0).float().mean((1, 2, 3))
        rows = y.as_strided((batch, 64), (512, 1)).mean(1)
        one = turned[:, 3, 1, 2]
        return self.linear(y.view(batch, -1)) + torch.stack([one, pairs, positive, rows, rows], 1)


@pytest.mark.parametrize("options", [Options(channels_last=True), CUDA_DEFAULTS, Options(packed=True)], ids=str)
def test_views_of_a_convolution_s_result_do_not_depend_on_its_layout(options: Options, tmp_path: Path) -> None:
    """`view` refuses strides that `reshape` takes, and `as_strided` reads other elements."""
    torch.manual_seed(0)
    model, inputs = _Strided().eval(), {"x": torch.rand(2, 3, 8, 8)}
    with torch.no_grad():
        expected = model(**inputs)
    lowered = models.lowered(model, inputs, tmp_path, "strided", [2], options=options)
    output = _run(cpu(), lowered, list(inputs.values()))
    torch.testing.assert_close(output, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_tolerances_are_those_of_the_kernels_that_may_be_used() -> None:
    assert Options().tolerance == 1e-4
    assert Options(tf32="cudnn").tolerance == Options(tf32="all").tolerance == Options("float16").tolerance == 1e-2
    assert Options("bfloat16", tf32="cudnn").tolerance == 5e-2


def test_what_changes_files_is_in_their_names() -> None:
    assert {Options(tf32=tf32).label for tf32 in get_args(Tf32)} == {""}
    labels = [replace(CUDA_DEFAULTS, **{name: False}).label for name in ("channels_last", "fused")]
    assert len({Options().label, CUDA_DEFAULTS.label, *labels}) == 4


class _ExplicitTypes(nn.Module):
    """Names float32 itself: an upcast norm, and a mask that is made for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        wide = x.to(torch.float32)
        x = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        mask = torch.zeros(kept.shape).masked_fill(kept == 0, -1.0)
        return nn.functional.scaled_dot_product_attention(x, x, x, mask.unsqueeze(1)) @ self.linear.weight


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_that_a_model_names_itself_are_reduced_with_the_others(dtype: Dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = _ExplicitTypes().eval(), {"x": torch.randn(2, 4, 16), "kept": torch.ones(2, 4).int()}
    inputs["kept"][:, 3] = 0
    options = Options(dtype)
    lowered = models.lowered(model, inputs, tmp_path, "typed", [2], options=options)
    with torch.no_grad():
        expected = model(**inputs)
    output = _run(cpu(), lowered, list(inputs.values()))
    assert output.dtype is torch.float32
    torch.testing.assert_close(output, expected, atol=options.tolerance * float(expected.abs().max()), rtol=0)
