"""Served answers against eager PyTorch: every zoo model, three budgets, batches 1 and 4, through HTTP.

Runs the end-to-end parity tests, slow ones too, and records the largest error of each model.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.record import markdown_table, record

TESTS = "tests/e2e/test_parity.py"
_LINE = re.compile(r"(\w+): largest error (\S+) in (.+)")


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__).parse_args(argv)
    command = [sys.executable, "-m", "pytest", TESTS, "-s", "-q", "-p", "no:cacheprovider"]
    rows = []
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            if match := _LINE.search(line):
                rows.append([match[1], match[2], match[3].replace(",", " /")])
                print(line.strip().lstrip("."), flush=True)
            last = line.strip() or last
    about = (
        "The largest difference between a served output and eager PyTorch's in float32, relative to the largest value"
        " of that output, over all budgets and batches 1 and 4. The tests also hold that the bits are equal between"
        " budgets. *least* is the smallest memory that the server accepts, where 25 % is refused because activations"
        " and kernel scratch of batch 4 need more.\n"
    )
    table = markdown_table(["model", "largest error", "memory, as a share of the weights"], rows)
    record(
        "parity", "Served answers against eager PyTorch", "benchmarks.parity", [about, table, f"pytest: {last}\n"]
    )
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
