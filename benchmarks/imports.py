"""Imports folders of the architectures of `architectures.json` by name alone, and tells what became of each.

The folders are as `save_pretrained` writes them, with few, small layers of random weights and what matters of the
preprocessor's configuration.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.record import parser_of, publish, table_of
from cohabit.server.cli import main as cohabit

ARCHITECTURES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("architectures.json").read_text())
"""By folder: classes of transformers, arguments of the configuration, and the preprocessor's configuration."""

REASON = "largest difference and notes, or the reason"


def make(name: str, folder: Path) -> None:
    """Write one architecture's folder."""
    described = ARCHITECTURES[name]
    torch.manual_seed(0)
    configuration = getattr(transformers, described["config"])(**described["sizes"])
    getattr(transformers, described["model"])(configuration).save_pretrained(folder)
    if "preprocessor" in described:
        (folder / "preprocessor_config.json").write_text(json.dumps(described["preprocessor"]))


def imported(path: Path, root: Path, *more: str) -> tuple[bool, str]:
    """Import a path below a folder. Returns whether it was imported, and the largest difference or the reason."""
    out, errors = io.StringIO(), io.StringIO()
    flags = (
        "--repository",
        str(root / "models"),
        "--cache",
        str(root / "cache"),
        "--max-batch",
        "4",
        "--threads",
        "1",
        *more,
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = cohabit(["import", str(path), *flags])
    if status:
        return False, errors.getvalue().splitlines()[-1].removeprefix("cohabit: ").removeprefix(f"{path}: ")
    lines = [line for line in out.getvalue().splitlines() if line.startswith(("largest difference", "note: "))]
    difference = lines[0].removeprefix("largest difference from ").split(": ")[1].split(" of ")[0]
    return True, "; ".join([difference, *(line.removeprefix("note: ") for line in lines[1:])])


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.imports", __doc__, has_folder=False)
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES), help="(default: all)")
    options = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name in options.names:
            make(name, Path(root) / name)
            done, said = imported(Path(root) / name, Path(root))
            rows.append(
                {
                    "folder": name,
                    "architecture": ARCHITECTURES[name]["model"],
                    "imported": "yes" if done else "no",
                    REASON: said,
                }
            )
            print(rows[-1], flush=True)
    count = sum(row["imported"] == "yes" for row in rows)
    about = (
        f"{count} of {len(rows)} are imported by name alone. Each was loaded as `cohabit serve` loads it and compared"
        " with eager PyTorch at batch 1 to 4; the difference is the largest, over an output's largest value.\n"
    )
    noted = [row for row in rows if row["imported"] == "no" or ";" in row[REASON]]
    sections = [about, table_of(noted), table_of(rows, shown=False)]
    publish(options, "Hugging Face folders imported by name alone", sections)
    return 0


if __name__ == "__main__":
    sys.exit(main())
