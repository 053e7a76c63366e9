"""Text encoders in small memory cgroups, with their embedding tables on flash: MiniLM, BERT base and BERT large.

The file store maps embedding tables, and a request reads the pages of its own rows. These pages are charged to the
cgroup and can be reclaimed: they come out of what the limit leaves, and no budget counts them. What a cgroup counts,
and what the base is, says `benchmarks.edge.cgroup`. Needs root and cgroups of version 1.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.edge import cgroup
from benchmarks.edge.cgroup import EXIT_UNAVAILABLE, MIB, Outcome
from benchmarks.record import parser_of, publish, table_of
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

CASES: tuple[tuple[str, int, str], ...] = (
    # model, limit of the cgroup in MiB above the base, memory of the model in it
    ("minilm", 40, "12MiB"),
    ("bert_base", 64, "32MiB"),
    ("bert_large", 96, "60MiB"),
)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    if not cgroup.is_possible(console):
        return EXIT_UNAVAILABLE
    folder, held = options.folder / "edge", True
    base = cgroup.base(folder, options.requests, console)
    rows = []
    for model, extra, memory in CASES:
        repository = folder / model
        (prepared,) = prepare_visibly(repository, recipes(1, [model]), force=False, console=console)
        whole, small = (cgroup.bundle_of(repository, size, folder, console) for size in ("120%", memory))
        resident, served = list[Outcome](), list[Outcome]()
        for _ in range(options.rounds):
            resident.append(cgroup.served(whole, options.requests, None))
            served += cgroup.served_above(base, extra, small, options.requests, 1)
        equal = all(map(cgroup.equal, served, resident))
        held &= equal
        weights = f"{model}, {prepared.weight_bytes / MIB:.0f} MiB"
        rows.append(_row(f"{weights}, resident", "none", resident, "-"))
        limit = f"base + {extra} MiB"
        rows.append(_row(f"{weights}, in {memory}", limit, served, "equal" if equal else "no"))
        console.print(*rows[-2:], sep="\n")
    sections = [
        f"Base: {base.charged_bytes / MIB:.1f} MiB, an idle server with one small model. First answer: from"
        f" the command; median of {options.requests} requests that follow one another, batch 1, of"
        f" {options.rounds} runs, resident and limited in turn, over HTTP, with `--engine in-process`."
        " Embedding tables are mapped from the"
        " weights file: their pages are charged to the cgroup and can be reclaimed. Pages of torch's"
        " libraries are not: they are in the page cache before.\n",
        table_of(rows),
        "To hold: equal bits in every cgroup.\n",
    ]
    publish(options, "Text encoders in small memory cgroups", sections)
    return 0 if held else 1


def _row(model: str, limit: str, outcomes: Sequence[Outcome], bits: str) -> dict[str, str]:
    return {
        "model, weights, memory": model,
        "cgroup": limit,
        **cgroup.middle(outcomes).cells,
        "bits of resident": bits,
    }


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.edge.text", __doc__)
    parser.add_argument("--requests", type=int, default=20, help="requests of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each model (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
