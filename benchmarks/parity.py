"""Served answers against eager PyTorch: every zoo model, three budgets, batches 1 and 4, through HTTP.

Runs the end-to-end parity tests, slow ones too, and records the largest error of each model.
"""

import re
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.record import parser_of, publish, table_of

TESTS = "tests/e2e/test_parity.py"
_LINE = re.compile(r"(\w+): largest error (\S+) in (.+)")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser_of("benchmarks.parity", __doc__, has_folder=False).parse_args(argv)
    command = [sys.executable, "-m", "pytest", TESTS, "-s", "-q", "-p", "no:cacheprovider"]
    rows = []
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            if match := _LINE.search(line):
                model, error, memories = match.groups()
                share = memories.replace(",", " /")
                rows.append({"model": model, "largest error": error, "memory, as a share of the weights": share})
                print(line.strip().lstrip("."), flush=True)
            last = line.strip() or last
    about = (
        "The largest difference between a served output and eager PyTorch's in float32, relative to the largest value"
        " of that output, over all budgets and batches 1 and 4. The tests also hold that the bits are equal between"
        " budgets. *least* is the smallest memory that the server accepts, where 25 % is refused because activations"
        " and kernel scratch of batch 4 need more.\n"
    )
    publish(options, "Served answers against eager PyTorch", [about, table_of(rows), f"pytest: {last}\n"])
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
