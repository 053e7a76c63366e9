"""Training loops under `cohabit.budget` over slow disks: with recomputation, and with copies alone.

The disk of the spill file is throttled by the kernel (the blkio controller of cgroups, version 1), as slow as a small
device's flash memory. Every contestant trains a net of its own from the same weights, and its losses must be eager's.
Needs root.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

import cohabit
from benchmarks.budget import WARM_STEPS, WAYS, Trained, Way, trained
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.training_nets import NETS
from cohabit.runtime.training.budget import Budget
from cohabit.runtime.training.residency import Residency

SHARE = "60%"
RATES_MB_S = (100, 400)
_CGROUPS = Path("/sys/fs/cgroup/blkio")
_GROUP = _CGROUPS / "cohabit-budget-disk"


@contextmanager
def throttled(mb_per_s: int) -> Iterator[None]:
    """Limit this process's reads and writes of the temporary folder's disk, each to a rate."""
    status = os.stat(tempfile.gettempdir())
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    _GROUP.mkdir(exist_ok=True)
    for direction in ("read", "write"):
        (_GROUP / f"blkio.throttle.{direction}_bps_device").write_text(f"{device} {mb_per_s * 10**6}")
    (_GROUP / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (_CGROUPS / "cgroup.procs").write_text(str(os.getpid()))
        _GROUP.rmdir()


def way_of(mb_per_s: int, *, recomputes: bool) -> Way:
    @contextmanager
    def around(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Budget]:
        with ExitStack() as stack:
            stack.enter_context(throttled(mb_per_s))
            if not recomputes:
                stack.enter_context(mock.patch.object(Residency, "pays_to_recompute", return_value=False))
            yield stack.enter_context(cohabit.budget(SHARE, model, optimizer, store="file"))

    return Way(f"{mb_per_s} MB/s, {'with recomputation' if recomputes else 'copies alone'}", around)


CONTESTANTS = (
    *(way_of(mb_per_s, recomputes=recomputes) for mb_per_s in RATES_MB_S for recomputes in (False, True)),
    next(way for way in WAYS if way.is_checkpointed),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if all losses of the budgets are eager's."""
    parser = parser_of("benchmarks.budget_disk", __doc__, has_folder=False)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=list(NETS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="steps that are measured (default: %(default)s)")
    options = parser.parse_args(argv)
    if not os.access(_CGROUPS / "cgroup.procs", os.W_OK):
        parser.error(f"{_CGROUPS} cannot be written: this needs root, and cgroups of version 1")
    torch.set_num_threads(1)
    rows, equal = [], True
    for name in options.nets:
        eager = trained(name, WAYS[0], options.rounds)
        row = [name, f"{eager.step_s:.2f}"]
        for way in CONTESTANTS:
            contestant = trained(name, way, options.rounds)
            after = trained(name, WAYS[0], options.rounds)
            row.append(cell(contestant, eager, (eager.step_s + after.step_s) / 2))
            equal &= way.is_checkpointed or contestant.losses == eager.losses
        rows.append(row)
        print("  ".join(row), flush=True)
    table = markdown_table(["net", "eager s", *(way.name for way in CONTESTANTS)], rows)
    about = (
        f"Seconds of a step over those of eager PyTorch: medians of {options.rounds} steps, one thread;"
        f" {WARM_STEPS} steps come before. Budgets are {SHARE} of the first step's peak, and evicted bytes go to a"
        " file on a disk that reads and writes as many bytes a second as the column says. Copies alone:"
        " recomputation is switched off. Checkpoints need no disk, but more memory than the budget. *=*: all"
        " losses are eager's, bit for bit; *other*: they are not.\n"
    )
    publish(options, "Training loops over slow disks", [about, table])
    return 0 if equal else 1


def cell(contestant: Trained, eager: Trained, eager_s: float) -> str:
    same = "=" if contestant.losses == eager.losses else "other"
    return f"{contestant.step_s / eager_s:.2f} {same}{contestant.peak}"


if __name__ == "__main__":
    sys.exit(main())
