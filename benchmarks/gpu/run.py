"""`make gpu-check`: the tests marked `gpu`, then every GPU benchmark, in one go of at most ten minutes.

Exit status: 0 when everything ran and held, 1 when something did not, 77 (as build tools say "skipped") where torch
sees no CUDA device.
"""

import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import torch

NO_GPU = 77
WHOLE_S = 570.0
TESTS_S = 150.0


def main(argv: Sequence[str] | None = None) -> int:
    end_s = time.monotonic() + WHOLE_S
    if not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} sees no CUDA device; nothing was tested or measured",
            file=sys.stderr,
        )
        return NO_GPU
    failed = [] if _tests() else ["tests"]
    for name, share in (("table2", 0.45), ("memory", 0.1), ("cold", 0.15), ("figure8", 1.0)):
        left_s = end_s - time.monotonic()
        print(f"== {name}: {share * left_s:.0f} of {left_s:.0f} s", flush=True)
        if not _benchmark(name, share * left_s):
            failed.append(name)
        torch.cuda.empty_cache()
    print(f"did not hold: {', '.join(failed)}" if failed else "everything held", file=sys.stderr)
    return 1 if failed else 0


def _tests() -> bool:
    """Run the marked tests in a process of their own: some lose the device."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/runtime", "-q", "--durations=10"]
    # A machine that was lent may lack plugins that the project's settings name, and its libraries may warn.
    command += ["-o", "addopts=-ra", "-W", "default", "-p", "no:cacheprovider"]
    try:
        return subprocess.run(command, timeout=TESTS_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"the tests took longer than {TESTS_S:.0f} s", file=sys.stderr)
        return False


def _benchmark(name: str, seconds: float) -> bool:
    """Run one benchmark; whatever happens to it, the next ones run."""
    from importlib import import_module

    run: Callable[..., int] = import_module(f"benchmarks.gpu.{name}").main
    sys.argv[1:] = []
    try:
        return run([], seconds=seconds) == 0
    except Exception:
        traceback.print_exc()
        return False


if __name__ == "__main__":
    sys.exit(main())
