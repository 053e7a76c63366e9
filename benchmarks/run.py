"""Runs every benchmark of this machine, one after the other, and says which result files were written."""

import sys
from collections.abc import Sequence

from benchmarks import (
    demo,
    figure8,
    first_start,
    memory,
    overload,
    parity,
    peers,
    precision,
    small_models,
    streaming,
)
from benchmarks.edge import __main__ as edge
from benchmarks.edge import fleet, links, lost_weights, text
from benchmarks.edge.cgroup import EXIT_UNAVAILABLE
from benchmarks.frontend import __main__ as frontend
from benchmarks.planner import speed


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if every benchmark that checks something found it to hold."""
    failed = []
    for name, run in (
        ("planner-speed", speed),
        ("streaming", streaming),
        ("peers", peers),
        ("small-models", small_models),
        ("memory", memory),
        ("edge", edge),
        ("edge-links", links),
        ("edge-text", text),
        ("edge-fleet", fleet),
        ("edge-lost-weights", lost_weights),
        ("parity", parity),
        ("precision", precision),
        ("frontend", frontend),
        ("overload", overload),
        ("first-start", first_start),
        ("demo", demo),
        ("figure8", figure8),
    ):
        sys.argv[1:] = []
        arguments = [] if run in (speed, streaming, parity) else ["--record"]
        if run.main(arguments) not in (0, EXIT_UNAVAILABLE):
            failed.append(name)
    if failed:
        print(f"did not hold: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
