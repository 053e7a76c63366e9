"""`make gpu-dry-run`: what `make gpu-check` begins with, and all GPU tests, on a stub of CUDA (`cuda_stub.cpp`).

What torch's real CUDA build does with memory, streams and captures is real. Kernels do nothing, so no values are
compared. Without arguments every piece runs in a process of its own; exit status 0 if all of them end with that. A
piece in which the stub has refused a call, as CUDA would, does not. Loads and texts compare values, and are left out.
"""

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from benchmarks.gpu import common, figure8, resnet, run, steps, table2, tests

NEED_A_DEVICE = (
    "test_a_copy_from_registered_memory_does_not_block",
    "test_a_fault_of_the_device_is_an_error_and_a_state_and_never_a_hang",
    "test_kernels_read_mapped_memory_in_place",
)


class WithoutValues:
    """A pytest plugin: values are equal, and tests that ask more of a device than bookkeeping are left out."""

    def pytest_configure(self) -> None:
        torch.equal = lambda a, b: True  # type: ignore[assignment]
        torch.testing.assert_close = lambda *_, **__: None  # type: ignore[assignment]

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.originalname in NEED_A_DEVICE]  # type: ignore[attr-defined]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def main(arguments: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no stub of CUDA: it has to be preloaded, and torch built with CUDA 13"
        )
        return 1
    if not arguments:
        parts = [p for p in run.pieces(list(run.STEPS)) if p in run.FIRST or p[0] == tests.STEP.name]
        parts = [part for part in parts if part[0] not in ("loads", "texts")]
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.support.runtime.gpu_dry_run"]
        failed = [": ".join(p) for p in parts if subprocess.run([*command, *p], check=False).returncode != 0]
        print(f"did not hold: {'; '.join(failed)}" if failed else "everything held", file=sys.stderr)
        return 1 if failed else 0
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    name, cell = arguments
    tests.PLUGINS.append(WithoutValues())
    status = _one_cell(run.STEPS[name], cell)
    refusals = ctypes.CDLL("libcuda.so.1").cudaStubRefusals()
    print(f"{name}, {cell}: the stub refused {refusals} calls", file=sys.stderr)
    return status or int(refusals > 0)


def _one_cell(step: steps.Step, cell: str) -> int:  # type: ignore[type-arg]
    """Measure a cell of a step, of a small network."""
    resnet.BLOCKS, resnet.WIDTH, resnet.INPUT = (1, 1, 1, 1), 32, (3, 32, 32)
    table2.BUDGETS_MB = {1: (8,)}
    figure8.MODELS, figure8.LOADS, figure8.POINT_S = 4, (0.2,), 0.2
    common.PLAN_S = 0.2
    if cell.startswith("partitioned"):
        cell = f"{cell.partition(',')[0]}, memory 90%"  # the small network's activations need that
    with TemporaryDirectory() as folder:
        common.FOLDER = Path(folder) / "gpu"
        output = Path(folder) / "results"
        status = steps.main(step, ["--here", "--output", str(output), "--cells", cell])
        print(steps.new_path(step, output).read_text())
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
