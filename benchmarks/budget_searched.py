"""Training loops under `cohabit.budget` over a slow disk: searched plans against first saved, first out.

One loop per net, share and disk records its step. Searchers plan it, each in a process of its own, as `search=` has it.
Then the loop follows the plans in turns of two steps, whose second is measured, and an eager loop makes the same steps
after it. A checkpointed loop makes one step per round. The disk is a file whose copies take as long as one
of the given speed would need, in both directions together.
"""

import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cohabit
from benchmarks.budget_small import NETS as SMALL
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.unseen_training_nets import NETS as UNSEEN
from benchmarks.unseen_training_nets import Net, speech_batch
from cohabit.planner.errors import CohabitError
from cohabit.runtime.training.budget import Budget
from cohabit.runtime.training.copies.spill import SpillSlot, SpillStore
from cohabit.runtime.training.planning.background import BackgroundSearch, SearchRequest
from cohabit.runtime.training.planning.planned import StepPlanner
from cohabit.runtime.training.record import Advice
from cohabit.runtime.training.tracked import storage_nbytes


class Layers(nn.Module):
    """Layers one after the other, checkpointed one by one if asked."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.checkpointing = layers, False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.children():
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return x


def small(name: str) -> Net:
    """Return a net of small ops."""
    net = SMALL[name]
    return Net(
        build=lambda: Layers(net.model()),
        batch=lambda generator: (torch.randn(net.shape, generator=generator),),
        loss=lambda model, batch: model(*batch).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
    )


NETS = {
    "conformer_ctc": replace(UNSEEN["conformer_ctc"], batch=lambda generator: speech_batch(generator, 1)),
    "llama": small("llama"),
    "resnet": small("resnet"),
}
"""The first with a batch smaller than its own: steps of about a second."""
SEARCHERS = ("interval", "capuchin", "tflms", "vdnn", "dynprog", "best")
FIFO, CHECKPOINTED = "first saved", "checkpoint"
WARM_TURNS = 2
"""The first step is measured, the second recorded, the third observed."""
MIB = 1 << 20


class ThrottledStore:
    """A spill store as fast as a slow disk: a copy ends no earlier than it would there."""

    def __init__(self, store: SpillStore[Any], bytes_per_s: float) -> None:
        self._store, self._bytes_per_s = store, bytes_per_s
        self._free_s = 0.0

    def take(self, nbytes: int) -> SpillSlot:
        return _ThrottledSlot(self, self._store.take(nbytes))

    def give_back(self, slot: Any) -> None:
        self._store.give_back(slot.slot)

    def close(self) -> None:
        self._store.close()

    def pay(self, nbytes: int, began_s: float) -> None:
        """Wait until a copy that began then would have ended."""
        self._free_s = max(self._free_s, began_s) + nbytes / self._bytes_per_s
        if (left_s := self._free_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class _ThrottledSlot:
    def __init__(self, store: ThrottledStore, slot: SpillSlot) -> None:
        self._store, self.slot, self.capacity = store, slot, slot.capacity

    def save(self, storage: Any) -> None:
        began_s = time.perf_counter()
        self.slot.save(storage)
        self._store.pay(storage_nbytes(storage), began_s)

    def load(self, storage: Any) -> None:
        began_s = time.perf_counter()
        self.slot.load(storage)
        self._store.pay(storage_nbytes(storage), began_s)


class Loop:
    """A net in training. Loops of the same net make the same steps."""

    def __init__(self, name: str) -> None:
        self._net: Net = NETS[name]
        torch.manual_seed(0)
        self.model = self._net.build()
        self.optimizer = self._net.optimizer(self.model)
        self._batch = self._net.batch(torch.Generator().manual_seed(1))
        self._steps = 0
        self.loss = 0.0

    def step(self) -> tuple[float, float]:
        """Return the seconds that a step took: of the main thread's CPU, and of wall time."""
        torch.manual_seed(self._steps)
        self._steps += 1
        began, cpu = time.perf_counter(), time.thread_time()
        self.optimizer.zero_grad()
        loss = self._net.loss(self.model, self._batch)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.loss = loss.item()
        return time.thread_time() - cpu, time.perf_counter() - began


@dataclass
class Seconds:
    """A contestant's measured steps, and eager ones right after each."""

    cpu: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    eager_cpu: list[float] = field(default_factory=list)
    eager_wall: list[float] = field(default_factory=list)
    moved_mib: list[float] = field(default_factory=list)

    def cell(self) -> dict[str, float]:
        """Return the least of all rounds, over eager's where there is no unit."""
        return {
            "wall": min(self.wall) / min(self.eager_wall),
            "cpu": min(self.cpu) / min(self.eager_cpu),
            "waited_s": min(self.waited),
            "eager_wall_s": min(self.eager_wall),
            "moved_mib": statistics.median(self.moved_mib),
        }


def measured(name: str, share: str, mb_per_s: float, rounds: int) -> dict[str, Any]:
    """Return the contestants' cells by name; a string says why there is no plan."""
    others = ThreadPoolExecutor(1)  # of a thread that the budget does not see
    others.submit(torch.set_num_threads, 1).result()
    loop, eager, checkpointed = Loop(name), Loop(name), Loop(name)
    checkpointed.model.checkpointing = True  # type: ignore[assignment]
    limits = cohabit.budget(share, loop.model, loop.optimizer, store="file", search=SEARCHERS[0])
    throttled = ThrottledStore(limits._residency.spill, 1e6 * mb_per_s)
    limits._residency.spill = throttled  # type: ignore[assignment]
    is_same = True

    def turn() -> tuple[tuple[float, float], tuple[float, float], float, float]:
        """Make two steps of the loop, then two eager ones. Returns the seconds of the second ones, and the loop's
        waits and moved bytes there."""
        nonlocal is_same
        losses = [0.0, 0.0]
        for number in range(2):
            waited, moved = limits._residency.waits.seconds, limits.moved_bytes
            mine = loop.step()
            losses[number] = loop.loss
        for number in range(2):
            theirs = others.submit(eager.step).result()
            is_same &= eager.loss == losses[number]
        return mine, theirs, limits._residency.waits.seconds - waited, limits.moved_bytes - moved

    with limits:
        planner = limits._planner
        assert planner is not None
        for _ in range(WARM_TURNS):
            turn()
        if planner.problem is None:
            return {"none": "parameters would have to leave"}
        plans: dict[str, Advice | None] = {FIFO: None}
        failed: dict[str, str] = {}
        for searcher in SEARCHERS:
            try:
                plans[searcher] = planned(planner, searcher)
            except CohabitError as error:
                failed[searcher] = str(error)
        found = {searcher: Seconds() for searcher in (*plans, CHECKPOINTED)}
        for _ in range(rounds):
            for searcher, advice in plans.items():
                planner.follow(advice)
                mine, theirs, waited_s, moved_bytes = turn()
                add(found[searcher], mine, theirs, waited_s, moved_bytes)
            add(found[CHECKPOINTED], others.submit(checkpointed.step).result(), theirs, 0.0, 0.0)
        least_bytes = 2 * (height_of(limits) - (limits.limit_bytes or 0))
        peak = limits.peak_bytes / (limits.limit_bytes or 1)
    cells: dict[str, Any] = {searcher: seconds.cell() for searcher, seconds in found.items()}
    gc.collect()
    return {
        **cells,
        **failed,
        "least_s": least_bytes / 1e6 / mb_per_s,
        "least_mib": least_bytes / MIB,
        "peak": peak,
        "same": is_same,
    }


def add(
    seconds: Seconds, mine: tuple[float, float], theirs: tuple[float, float], waited_s: float, moved_bytes: float
) -> None:
    seconds.cpu.append(mine[0])
    seconds.wall.append(mine[1])
    seconds.eager_cpu.append(theirs[0])
    seconds.eager_wall.append(theirs[1])
    seconds.waited.append(waited_s)
    seconds.moved_mib.append(moved_bytes / MIB)


def height_of(limits: Budget) -> int:
    """Return the peak of the recorded step if all is in memory."""
    assert limits._record.step is not None
    return limits._record.step.height + limits._recorded_state_bytes


def planned(planner: StepPlanner, searcher: str) -> Advice:
    """Plan the recorded step. Raises CohabitError if there is no plan."""
    problem = planner.problem
    assert problem is not None
    search = BackgroundSearch(SearchRequest(searcher, problem.graph, problem.profile, problem.memory))
    try:
        while (plan := search.poll()) is None:
            time.sleep(0.1)
        return problem.advice(plan)
    finally:
        search.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if all losses are eager's."""
    parser = parser_of("benchmarks.budget_searched", __doc__, has_folder=False)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=list(NETS), help="(default: all)")
    parser.add_argument("--shares", nargs="+", default=["60%", "40%"], help="(default: %(default)s)")
    parser.add_argument(
        "--disks", nargs="+", type=float, default=[100.0, 400.0], help="MB/s (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    is_same = True
    sections = [ABOUT.format(rounds=options.rounds)]
    for disk in options.disks:
        cells = dict[tuple[str, str], Mapping[str, Any]]()
        for share, net in itertools.product(options.shares, options.nets):
            cell = measured(net, share, disk, options.rounds)
            print(f"{disk:g} MB/s, {net}, {share}: {cell}", flush=True)
            if "same" in cell:
                cells[net, share] = cell
                is_same &= cell["same"]
            else:
                sections.append(f"{net} in {share}: not planned, since {cell['none']}.\n")
        sections += sections_of(disk, cells)
    publish(options, "Searched plans of a training step over a slow disk", sections)
    return 0 if is_same else 1


def sections_of(disk: float, cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    names = (FIFO, *SEARCHERS, CHECKPOINTED)
    rows, waits, others, gains = [], [], [], dict[str, list[float]]()
    for (net, share), cell in cells.items():
        found = {name: cell[name] for name in names if isinstance(cell[name], dict)}
        eager_s = min(figures["eager_wall_s"] for figures in found.values())
        bound = max(1.0, cell["least_s"] / eager_s)
        shown = [f"{found[name]['wall']:.2f}" if name in found else "no plan" for name in names]
        rows.append([f"{net}, {share}", f"{eager_s:.2f}", f"{bound:.2f}", *shown])
        waits.append([f"{net}, {share}", *(f"{found[n]['waited_s']:.3f}" if n in found else "-" for n in names)])
        for name, figures in found.items():
            gains.setdefault(name, []).append(cell[FIFO]["wall"] / figures["wall"])
            columns = (
                figures["wall"],
                figures["cpu"],
                figures["waited_s"],
                figures["moved_mib"],
                cell["least_mib"],
            )
            tail = [f"{cell['peak']:.3f}", "yes" if cell["same"] else "no"]
            others.append([f"{net}, {share}, {name}", *(f"{column:.3f}" for column in columns), *tail])
    rows.append([f"{FIFO} over this, geometric mean", "", "", *(geometric(gains.get(n, [])) for n in names)])
    return [
        f"## A disk of {disk:g} MB/s\n",
        markdown_table(["net, memory", "eager s", "bound", *names], rows),
        "Seconds in which a step waits for copies:\n",
        markdown_table(["net, memory", *names], waits),
        "All figures:\n",
        markdown_table(
            ["net, memory, contestant", "step", "CPU", "waited s", "moved MiB", "least MiB", "peak", "same losses"],
            others,
            shown=False,
        ),
    ]


def geometric(gains: Sequence[float]) -> str:
    return f"{math.exp(statistics.fmean(map(math.log, gains))):.2f} of {len(gains)}" if gains else "-"


ABOUT = """A step's time over that of eager steps in between, each the least of {rounds} rounds: other load on the
machine lengthens steps. *Bound* is the longer of the ops alone and the copies of what has to leave at the step's peak,
out and in; copies that go on during the eager steps after a turn are not in a step's time, so that it may be shorter.
*{fifo}* is `cohabit.budget` without `search`, *{checkpoint}* is
`torch.utils.checkpoint` per block without a budget. A searcher has *no plan* where its rule does not fit, and first
saved, first out goes on.
""".replace("{fifo}", FIFO).replace("{checkpoint}", CHECKPOINTED)


if __name__ == "__main__":
    sys.exit(main())
