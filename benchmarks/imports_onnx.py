"""Imports ONNX files of the structures of `onnx_structures`, compared with ONNX Runtime, and tells what became of each.

Each file is written by an exporter here. ONNX Runtime runs without its graph optimizations.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.imports import REASON, imported
from benchmarks.onnx_structures import STRUCTURES
from benchmarks.record import parser_of, publish, table_of


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.imports_onnx", __doc__, has_folder=False)
    parser.add_argument("names", nargs="*", default=list(STRUCTURES), help="(default: all)")
    options = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for number, name in enumerate(options.names):
            structure = STRUCTURES[name]
            path = Path(root) / f"model_{number}.onnx"
            structure.write(path)
            done, said = imported(path, Path(root), *structure.flags)
            rows.append(
                {
                    "structure": name,
                    "exporter": "torch.export" if structure.dynamo else "tracing",
                    "opset": str(structure.opset),
                    "imported": "yes" if done else "no",
                    REASON: said.removeprefix(f"{path.name}: "),
                }
            )
            print(rows[-1], flush=True)
    count = sum(row["imported"] == "yes" for row in rows)
    about = (
        f"{count} of {len(rows)} are imported. Each was loaded as `cohabit serve` loads it and compared with ONNX"
        " Runtime at batch 1 to 4; the difference is the largest, over an output's largest value.\n"
    )
    publish(options, "ONNX files imported", [about, table_of(rows)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
