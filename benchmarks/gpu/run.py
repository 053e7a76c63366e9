"""`make gpu-check`: the tests marked `gpu`, then every GPU benchmark, or those steps that are named.

Each step takes less than nine minutes, so that a machine that is lent for ten minutes at a time gets through one per
call. Results are written as they come, one file per step. Exit status: 0 when everything ran and held, 1 when something
did not, 77 where torch sees no CUDA device.

Beside torch, the steps need numpy, scipy, numba and msgspec; the tests also pytest, hypothesis, psutil and rich, and
`texts` all that a server needs, and transformers.
Packages that are missing can lie in `.wheels`, which `make gpu-check` adds to the path. Where numba refuses its
numpy, `COHABIT_INTERPRET=1` plans without it, slowly.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.steps import STEP_S, with_log
from benchmarks.record import RESULTS, record

NO_GPU = 77
TESTS = "tests"
GPU_TESTS = tuple(
    f"tests/runtime/test_{name}.py"
    for name in (
        *(
            "budget_gpu",
            "compute_lanes",
            "cuda_constructs",
            "cuda_gpu",
            "dynamic_shapes",
            "encoding",
            "executor",
            "fusion_probe",
            "options",
        ),
        "sharing",
    )
)
"""The files with tests marked `gpu`. Others import the server, whose packages the machine may lack."""
STEPS = (TESTS, "table2", "copies", "figure8", "texts")
"""In the order of what is most wanted."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)} (default: all)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=STEP_S, help="time for each step (default: %(default)s)")
    options = parser.parse_args(argv)
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no steps: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    if not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} sees no CUDA device; nothing was tested or measured",
            file=sys.stderr,
        )
        return NO_GPU
    failed = [step for step in options.steps or STEPS if _run(step, options.output, options.seconds) != 0]
    print(f"did not hold: {', '.join(failed)}" if failed else "everything held", file=sys.stderr)
    return 1 if failed else 0


def _run(step: str, output: Path, seconds: float) -> int:
    """Run a step in a process of its own, and return its exit status. Whatever happens to it, the next ones run."""
    print(f"== {step}", flush=True)
    if step != TESTS:
        command = ["-m", f"benchmarks.gpu.{step}", "--output", str(output), "--seconds", str(seconds)]
        return subprocess.run([sys.executable, *command], check=False).returncode
    command = ["-X", "faulthandler", "-m", "pytest", "-m", "gpu", *GPU_TESTS, "-q", "--durations=10"]
    # A machine that was lent may lack plugins that the project's settings name, and its libraries may warn.
    command += ["-o", "addopts=-ra", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    output.mkdir(parents=True, exist_ok=True)
    log = output / "gpu-tests.log"
    try:
        with log.open("wb") as file:
            status = subprocess.run(
                [sys.executable, *command], timeout=seconds, check=False, stdout=file, stderr=file
            ).returncode
        ended = f"Ended with status {status}.\n"
    except subprocess.TimeoutExpired:
        status, ended = 1, f"The tests took longer than {seconds:.0f} s.\n"
    print(f"{log.read_text(errors='replace')[-4000:]}\n{ended}")
    record("gpu-tests", "Tests on a GPU", "benchmarks.gpu.run", [ended, with_log(log)], output)
    log.unlink()
    return status


if __name__ == "__main__":
    sys.exit(main())
