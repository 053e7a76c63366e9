"""A program as commands for three streams: kernels, copies, and the events that keep the plan's order.

    compute   K0      W0 K1          K2 R1 ...         K  kernels of one op        W  wait for an event
    swap_in   C(0,1)  R0       ...      W1 C(2)        C  one copy of neighbours   R  record an event
    swap_out     ... S(0) ...                          S  an activation's copy to the host

The plan's waits are issued as they stand: its writer has left out those that lane order or another wait implies. Steps
that are joined are one command, for which a stream waits once. Commands that are no steps of the plan add these waits:

- the first copy of a lane waits for the inference's begin (`FORK`), unless it waits for an op;
- `Empty` waits for the tensor's last copy out;
- `Return` waits for its `Refill`, which stands for all that the plan says of that swap-in;
- at the end, compute waits for the last copy of a lane whose end it does not know.

Residents and epilogues have none: they are issued between inferences, and the executor has a run wait for its model's
last. Staged copies are the same commands, issued by another thread.

Commands stand in an order in which they can be issued by one thread: no wait before its record. Activations allocate
and release their bytes in the compute stream's order (`Empty`, `Refill`), whose allocator may then reuse the bytes for
later work.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from cohabit.planner.plan import Compute, Drop, Lane, SwapIn, SwapOut
from cohabit.runtime.binding.draft import SwapStep
from cohabit.runtime.binding.program import Program
from cohabit.runtime.cuda.joining import Copy, Forecast, Joining, joined

FORK = 0
"""The event after which the copy lanes begin, unless their first copy waits for an op."""

LANES: tuple[Lane, ...] = ("compute", "swap_in", "swap_out")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of `program.computes[index]`."""

    index: int


@dataclass(frozen=True, slots=True)
class Save:
    """The copy of `program.swap_outs[index]`."""

    index: int


@dataclass(frozen=True, slots=True)
class Empty:
    """`program.offloaded[tensor]` releases its bytes: its copy out has ended."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Refill:
    """`program.offloaded[tensor]` allocates bytes again."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Return:
    """The copy of `program.swap_ins[index]`, an offloaded tensor's."""

    index: int


Work = Kernels | Copy | Save | Empty | Refill | Return
"""Commands other than `Record` and `Wait`."""


@dataclass(frozen=True, slots=True)
class Record:
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    event: int


@dataclass(frozen=True, slots=True)
class Issue:
    """One command for one lane."""

    lane: Lane
    command: Work | Record | Wait


@dataclass(frozen=True, slots=True)
class Commands:
    """What is issued together, with events numbered from 0."""

    issues: tuple[Issue, ...]
    events: int


@dataclass(frozen=True, slots=True)
class IssueSchedule:
    """One inference. The epilogue starts when everything else has ended."""

    commands: Commands
    epilogue: tuple[Copy, ...]
    residents: tuple[Copy, ...]


def schedule(program: Program, *, join: bool = True) -> IssueSchedule:
    """Lower a program. Copies that no op of this run waits for are left to the epilogue.

    `join`: whether the store can copy several segments at once.
    """
    joining = Joining.of(program.draft.profile) if join else None
    needed = max((c.swap_ins_before for c in program.computes), default=0)
    if program.constants:
        needed = max(needed, program.epilogue)
    needed = max(needed, program.last_return)
    return IssueSchedule(
        commands=_commands(program, needed, joining),
        epilogue=joined(program.swap_ins[needed:], needed, joining),
        residents=joined([step for step in program.residents if step.offloaded is None], 0, joining),
    )


_Ended = tuple[int, int]
"""Progress of a lane: (steps of its kind that have ended, allocations and releases of bytes since the last)."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A command at its place in the plan's order, with how far it needs the other streams to be."""

    step: int
    lane: Lane
    command: Work
    needs: dict[Lane, _Ended]
    ends: _Ended
    """How far its own lane is when it has ended."""


_NOTHING: _Ended = (0, 0)


def _commands(program: Program, end: int, joining: Joining | None) -> Commands:
    """Return kernels, swap-outs, and the first `end` swap-ins."""
    placed = sorted(_placed(program, end, joining), key=lambda p: p.step)
    waits = _waits(placed)
    waited = sorted({position for positions in waits.values() for position in positions})
    events = {position: n for n, position in enumerate(waited, FORK + 1)}
    count = FORK + 1 + len(events)
    first = {lane: next((n for n, p in enumerate(placed) if p.lane == lane), None) for lane in LANES[1:]}
    early = [lane for lane, position in first.items() if position is not None and position not in waits]
    issues = [Issue("compute", Record(FORK))] if early else []
    issues += [Issue(lane, Wait(FORK)) for lane in early]
    for position, item in enumerate(placed):
        issues += [Issue(item.lane, Wait(events[other])) for other in waits.get(position, ())]
        issues.append(Issue(item.lane, item.command))
        if position in events:
            issues.append(Issue(item.lane, Record(events[position])))
    for lane in LANES[1:]:  # a graph ends on one lane
        last = max((n for n, p in enumerate(placed) if p.lane == lane), default=None)
        by_compute = {other for n, others in waits.items() if placed[n].lane == "compute" for other in others}
        if last is not None and last not in by_compute:
            issues += [Issue(lane, Record(count)), Issue("compute", Wait(count))]
            count += 1
    return Commands(tuple(issues), count)


def _placed(program: Program, end: int, joining: Joining | None) -> Iterator[_Placed]:
    """Commands lane by lane; of one step, those of the compute lane come first."""
    for index, compute in enumerate(program.computes):
        needs: dict[Lane, _Ended] = {
            "swap_in": (min(compute.swap_ins_before, end), 0),
            "swap_out": (compute.swap_outs_before, 0),
        }
        yield _Placed(compute.step, "compute", Kernels(index), needs, (index + 1, 0))
    refilled: dict[int, _Ended] = {}
    for change in _changes(program):
        refilled[change.step] = change.ends
        yield change
    forecast = Forecast.of(program)
    for first, part in _parts(program.swap_ins[:end]):
        if part[0].offloaded is not None:
            at = part[0].step
            yield _Placed(at, "swap_in", Return(first), {"compute": refilled[at]}, (first + 1, 0))
            continue
        for copy in joined(part, first, joining, forecast):
            steps = program.swap_ins[copy.first : copy.last]
            computes, outs = max(s.computes_before for s in steps), max(s.others_before for s in steps)
            needs = {"compute": (computes, 0), "swap_out": (outs, 0)}
            # As early as what it waits for allows: ops that need its first part may come before its last one's step.
            place = max(
                steps[0].step,
                program.computes[computes - 1].step if computes else -1,
                program.swap_outs[outs - 1].step if outs else -1,
            )
            yield _Placed(place, "swap_in", copy, needs, (copy.last, 0))
    for index, step in enumerate(program.swap_outs):
        needs = {"compute": (step.computes_before, 0), "swap_in": (step.others_before, 0)}
        yield _Placed(step.step, "swap_out", Save(index), needs, (index + 1, 0))


def _parts(swap_ins: Sequence[SwapStep]) -> Iterator[tuple[int, Sequence[SwapStep]]]:
    """Runs of copies to the arena, and those of offloaded tensors one by one, each with the index of its first."""
    start = 0
    for comes_back, part in groupby(swap_ins, key=lambda s: s.offloaded is not None):
        steps = list(part)
        if comes_back:
            yield from ((start + n, [step]) for n, step in enumerate(steps))
        else:
            yield start, steps
        start += len(steps)


def _changes(program: Program) -> Iterator[_Placed]:
    """Yield what offloaded tensors release and allocate, at their drops and swap-ins in the plan.

    Bytes are released when the copy out has ended. The copy that fills allocated bytes waits for the compute stream to
    get there: everything that used them before was issued to it earlier.
    """
    number = {t.spill.tensor: n for n, t in enumerate(program.offloaded)}
    saved = dict.fromkeys(number, 0)
    frees = {t.spill.tensor: iter([i.frees_storage for i in t.spill.intervals]) for t in program.offloaded}
    outs = {s.step: n + 1 for n, s in enumerate(program.swap_outs)}
    ended: _Ended = _NOTHING
    for index, step in enumerate(program.plan.steps if number else ()):
        if isinstance(step, Compute):
            ended = (ended[0] + 1, 0)
        elif isinstance(step, SwapOut):
            saved[step.tensor] = outs[index]
        elif isinstance(step, SwapIn) and step.tensor in number:
            ended = (ended[0], ended[1] + 1)
            yield _Placed(index, "compute", Refill(number[step.tensor]), {}, ended)
        elif isinstance(step, Drop) and step.tensor in number and next(frees[step.tensor]):
            ended = (ended[0], ended[1] + 1)
            needs: dict[Lane, _Ended] = {"swap_out": (saved[step.tensor], 0)}
            yield _Placed(index, "compute", Empty(number[step.tensor]), needs, ended)


def _waits(placed: Sequence[_Placed]) -> dict[int, list[int]]:
    """Return the positions that each command waits for; a lane waits for each once."""
    ends = {lane: [(p.ends, n) for n, p in enumerate(placed) if p.lane == lane] for lane in LANES}
    waited: set[tuple[Lane, int]] = set()
    waits: dict[int, list[int]] = {}
    for position, item in enumerate(placed):
        for lane, needed in item.needs.items():
            if needed == _NOTHING:
                continue
            _, other = ends[lane][bisect_left(ends[lane], needed, key=itemgetter(0))]
            assert other < position, "a plan waits for what it issues later"
            if (item.lane, other) not in waited:
                waited.add((item.lane, other))
                waits.setdefault(position, []).append(other)
    return waits
