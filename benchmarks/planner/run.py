"""Runs every benchmark of the planner and writes their result files: the better part of an hour."""

import sys

from benchmarks.planner import ablation, minimalloc, searchers, speed, table2, throughput


def main() -> int:
    """Exit status 0 if what has a target reached it."""
    failed = []
    for module in (speed, table2, searchers, throughput, ablation, minimalloc):
        name = module.__name__.rpartition(".")[2]
        sys.argv[1:] = [] if module is speed else ["--record"]
        print(f"== {name}", flush=True)
        if module.main(sys.argv[1:]):
            failed.append(name)
    if failed:
        print(f"did not hold: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
