"""A program as commands for three streams: kernels, copies, and the events that keep the plan's order.

    compute   K0      W0 K1          K2 R1 ...         K  kernels of one op        W  wait for an event
    swap_in   C(0,1)  R0       ...      W1 C(2)        C  one copy of neighbours   R  record an event
    swap_out     ... S(0) ...                          S  an activation's copy to the host

Swap-ins that are neighbours in host and device memory are joined into one copy, as large as the link wants it, since
every copy costs the link its latency. An op waits for all of a copy, so one that an op may have to wait for is smaller,
and no op begins later than it would without joining.

The plan's waits are issued as they stand: its writer has left out those that lane order or another wait implies. Steps
that are joined are one command, for which a stream waits once. Commands that are no steps of the plan add these waits:

- the first copy of a lane waits for the inference's begin (`FORK`), unless it waits for an op;
- `empty` waits for the tensor's last copy out;
- `return` waits for its `refill`, which stands for all that the plan says of that swap-in;
- at the end, compute waits for the last copy of a lane whose end it does not know.

Residents and epilogues have none: they are issued between inferences, and the executor has a run wait for its model's
last. Staged copies are the same commands, issued by another thread.

Commands stand in an order in which they can be issued by one thread: no wait before its record. Activations allocate
and release their bytes in the compute stream's order (`empty`, `refill`), whose allocator may then reuse the bytes for
later work.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import Literal

from cohabit.planner.plan import Compute, Drop, Lane, SwapIn, SwapOut
from cohabit.planner.profile import Link, Profile
from cohabit.runtime.binding.calls import Call
from cohabit.runtime.binding.draft import ComputeStep, SwapStep
from cohabit.runtime.binding.program import Program

FORK = 0
"""The event after which the copy lanes begin, unless their first copy waits for an op."""

_COST_SHARE = 0.02
"""Neighbours join a copy until what every copy costs, the link's latency, is no more than this share of its time."""
_LATE_PART = 4
"""A copy for which an op may have to wait is large enough at such a part of that size: the op waits for all of it."""
_LEAST_ENOUGH_BYTES, _MOST_ENOUGH_BYTES = 2 << 20, 8 << 20
"""Limits of the size that is enough, however the link was measured."""
_USUAL_LINK = Link(3.2e-6, 52.5e9)
"""A GPU's, for programs without a profile."""

LANES: tuple[Lane, ...] = ("compute", "swap_in", "swap_out")


Verb = Literal["compute", "copy", "save", "return", "empty", "refill", "record", "wait"]
"""What a command does, and what its index counts:

| verb | does | index into |
| --- | --- | --- |
| compute | runs the kernels of an op | `program.computes` |
| copy | copies neighbours to the arena | `IssueSchedule.copies` |
| save | copies an offloaded tensor to the host | `program.swap_outs` |
| return | copies it back | `program.swap_ins` |
| empty | releases its bytes | `program.offloaded` |
| refill | allocates them again | `program.offloaded` |
| record, wait | order the streams | the inference's events |
"""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of one lane."""

    lane: Lane
    verb: Verb
    index: int


Commands = tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Swap-ins [first, last), which are neighbours in host and in device memory."""

    first: int
    last: int
    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class IssueSchedule:
    """One inference, and the copies between inferences. The epilogue starts when everything else has ended."""

    inference: Commands
    epilogue: Commands
    residents: Commands
    copies: tuple[Copy, ...]
    events: int
    """Number of the inference's events."""


@dataclass(frozen=True, slots=True)
class Joining:
    """How large joined copies get on a device. None of several is larger than twice the size that is enough."""

    link: Link
    enough_bytes: int

    @staticmethod
    def of(profile: Profile | None) -> "Joining":
        """Derive the size from what a copy costs on the measured link."""
        link = _USUAL_LINK if profile is None else profile.swap_in
        nbytes = int(link.latency_s * link.bandwidth_bytes_per_s / _COST_SHARE)
        return Joining(link, min(max(nbytes, _LEAST_ENOUGH_BYTES), _MOST_ENOUGH_BYTES))

    @property
    def reserve_s(self) -> float:
        """How much earlier than an op needs it a joined copy ends: the copies before it may be late by one of them."""
        return self.link.seconds(self.enough_bytes)


@dataclass(frozen=True, slots=True)
class Forecast:
    """An inference whose copies are each by themselves, in the profile's times. Without a profile all is too late."""

    ends_s: list[float]
    """When the first k compute steps have ended, by k."""
    arrivals_s: list[float]
    """The end of each swap-in."""
    latest_s: list[float]
    """When each swap-in must have ended so that no op begins later than here, even if all later copies are in a row."""

    @staticmethod
    def of(program: Program) -> "Forecast":
        profile, swap_ins = program.draft.profile, len(program.swap_ins)
        if profile is None:
            return Forecast([0.0] * (len(program.computes) + 1), [0.0] * swap_ins, [-inf] * swap_ins)
        ops = iter([profile.op_seconds[s.op] for s in program.plan.steps if isinstance(s, Compute)])
        tensors, slowdown = program.graph.tensors, profile.swap_slowdown
        copy_s = [profile.link_of(tensors[s.tensor]).seconds(s.nbytes) * slowdown for s in program.swap_ins]
        ends_s, arrivals_s, needed_s = [0.0], list[float](), [inf] * swap_ins
        awaited = 0
        steps: list[ComputeStep[Call] | SwapStep] = [*program.computes, *program.swap_ins]
        for step in sorted(steps, key=lambda s: s.step):
            if isinstance(step, SwapStep):
                begin_s = max(arrivals_s[-1] if arrivals_s else 0.0, ends_s[step.computes_before])
                arrivals_s.append(begin_s + copy_s[len(arrivals_s)])
                continue
            begin_s = max(ends_s[-1], arrivals_s[step.swap_ins_before - 1] if step.swap_ins_before else 0.0)
            for swap_in in range(awaited, step.swap_ins_before):
                needed_s[swap_in] = begin_s
            awaited = max(awaited, step.swap_ins_before)
            ends_s.append(begin_s + next(ops))
        latest_s = needed_s
        for n in reversed(range(swap_ins - 1)):
            latest_s[n] = min(latest_s[n], latest_s[n + 1] - copy_s[n + 1])
        return Forecast(ends_s, arrivals_s, latest_s)


def schedule(program: Program, *, join: bool = True) -> IssueSchedule:
    """Lower a program. Copies that no op of this run waits for are left to the epilogue.

    `join`: whether the store can copy several segments at once.
    """
    joining = Joining.of(program.draft.profile) if join else None
    needed = max((c.swap_ins_before for c in program.computes), default=0)
    if program.constants:
        needed = max(needed, program.epilogue)
    needed = max(needed, program.last_return)
    copies: list[Copy] = []
    inference, events = _commands(program, needed, joining, copies)
    epilogue = joined(program.swap_ins[needed:], needed, joining)
    residents = joined([step for step in program.residents if step.offloaded is None], 0, joining)
    return IssueSchedule(
        inference, _noted(copies, epilogue), _noted(copies, residents), copies=tuple(copies), events=events
    )


def _noted(copies: list[Copy], more: Iterable[Copy]) -> Commands:
    """Append copies to the table; return the commands that issue them."""
    start = len(copies)
    copies.extend(more)
    return tuple(Command("swap_in", "copy", n) for n in range(start, len(copies)))


_Ended = tuple[int, int]
"""Progress of a lane: (steps of its kind that have ended, allocations and releases of bytes since the last)."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A command at its place in the plan's order, with how far it needs the other streams to be."""

    step: int
    command: Command
    needs: dict[Lane, _Ended]
    ends: _Ended
    """How far its own lane is when it has ended."""


_NOTHING: _Ended = (0, 0)


def _commands(program: Program, end: int, joining: Joining | None, copies: list[Copy]) -> tuple[Commands, int]:
    """Return kernels, swap-outs, and the first `end` swap-ins, and the number of events. Appends to `copies`."""
    placed = sorted(_placed(program, end, joining, copies), key=lambda p: p.step)
    waits = _waits(placed)
    waited = sorted({position for positions in waits.values() for position in positions})
    events = {position: n for n, position in enumerate(waited, FORK + 1)}
    count = FORK + 1 + len(events)
    first = {lane: next((n for n, p in enumerate(placed) if p.command.lane == lane), None) for lane in LANES[1:]}
    early = [lane for lane, position in first.items() if position is not None and position not in waits]
    issued = [Command("compute", "record", FORK)] if early else []
    issued += [Command(lane, "wait", FORK) for lane in early]
    for position, item in enumerate(placed):
        lane = item.command.lane
        issued += [Command(lane, "wait", events[other]) for other in waits.get(position, ())]
        issued.append(item.command)
        if position in events:
            issued.append(Command(lane, "record", events[position]))
    for lane in LANES[1:]:  # a graph ends on one lane
        last = max((n for n, p in enumerate(placed) if p.command.lane == lane), default=None)
        by_compute = {
            other for n, others in waits.items() if placed[n].command.lane == "compute" for other in others
        }
        if last is not None and last not in by_compute:
            issued += [Command(lane, "record", count), Command("compute", "wait", count)]
            count += 1
    return tuple(issued), count


def _placed(program: Program, end: int, joining: Joining | None, copies: list[Copy]) -> Iterator[_Placed]:
    """Commands lane by lane; of one step, those of the compute lane come first."""
    for index, compute in enumerate(program.computes):
        needs: dict[Lane, _Ended] = {
            "swap_in": (min(compute.swap_ins_before, end), 0),
            "swap_out": (compute.swap_outs_before, 0),
        }
        yield _Placed(compute.step, Command("compute", "compute", index), needs, (index + 1, 0))
    refilled: dict[int, _Ended] = {}
    for change in _changes(program):
        refilled[change.step] = change.ends
        yield change
    forecast = Forecast.of(program)
    for first, part in _parts(program.swap_ins[:end]):
        if part[0].offloaded is not None:
            at = part[0].step
            command = Command("swap_in", "return", first)
            yield _Placed(at, command, {"compute": refilled[at]}, (first + 1, 0))
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
            (command,) = _noted(copies, [copy])
            yield _Placed(place, command, needs, (copy.last, 0))
    for index, step in enumerate(program.swap_outs):
        needs = {"compute": (step.computes_before, 0), "swap_in": (step.others_before, 0)}
        yield _Placed(step.step, Command("swap_out", "save", index), needs, (index + 1, 0))


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
            yield _Placed(index, Command("compute", "refill", number[step.tensor]), {}, ended)
        elif isinstance(step, Drop) and step.tensor in number and next(frees[step.tensor]):
            ended = (ended[0], ended[1] + 1)
            needs: dict[Lane, _Ended] = {"swap_out": (saved[step.tensor], 0)}
            yield _Placed(index, Command("compute", "empty", number[step.tensor]), needs, ended)


def _waits(placed: Sequence[_Placed]) -> dict[int, list[int]]:
    """Return the positions that each command waits for; a lane waits for each once."""
    ends = {lane: [(p.ends, n) for n, p in enumerate(placed) if p.command.lane == lane] for lane in LANES}
    waited: set[tuple[Lane, int]] = set()
    waits: dict[int, list[int]] = {}
    for position, item in enumerate(placed):
        for lane, needed in item.needs.items():
            if needed == _NOTHING:
                continue
            _, other = ends[lane][bisect_left(ends[lane], needed, key=itemgetter(0))]
            assert other < position, "a plan waits for what it issues later"
            if (item.command.lane, other) not in waited:
                waited.add((item.command.lane, other))
                waits.setdefault(position, []).append(other)
    return waits


def joined(
    swap_ins: Sequence[SwapStep], start: int, joining: Joining | None, forecast: Forecast | None = None
) -> tuple[Copy, ...]:
    """Join small neighbours into one copy, which waits for what any of them waits for, and is awaited as a whole.

    `start` is the index of the first among the program's swap-ins. With a forecast, a copy is as large as the link
    wants it where all of it arrives in time for the first op that needs it; elsewhere it is smaller, and waits for
    nothing on behalf of its neighbours. Without, no op waits for these copies. Without `joining`, every copy is by
    itself.
    """
    copies: list[Copy] = []
    latest = 0  # how many compute steps the lane has waited for
    free_s = begin_s = 0.0  # when the link is free for the last copy, and when that begins
    if forecast is not None and start:
        free_s = forecast.arrivals_s[start - 1]
    for index, step in enumerate(swap_ins, start):
        later = step.computes_before > latest or step.others_before > 0
        latest = max(latest, step.computes_before)
        ready_s = 0.0 if forecast is None else forecast.ends_s[latest]
        last = copies[-1] if copies else None
        if last is not None and joining is not None and _continues(last, step):
            nbytes, enough = last.nbytes + step.nbytes, joining.enough_bytes
            if forecast is not None:
                end_s = max(free_s, ready_s) + joining.link.seconds(nbytes)
                if step.others_before or end_s + joining.reserve_s > forecast.latest_s[last.first]:
                    enough = 0 if later else enough // _LATE_PART
            if last.nbytes < enough and nbytes <= 2 * enough:
                copies[-1] = Copy(last.first, index + 1, last.segment, last.offset, nbytes)
                begin_s = max(free_s, ready_s)
                continue
        if last is not None and joining is not None:
            free_s = begin_s + joining.link.seconds(last.nbytes)
        begin_s = max(free_s, ready_s)
        copies.append(Copy(index, index + 1, step.tensor, step.offset, step.nbytes))
    return tuple(copies)


def _continues(copy: Copy, step: SwapStep) -> bool:
    """Whether a swap-in's bytes directly follow those of a copy, in host and device memory."""
    return step.tensor == copy.segment + copy.last - copy.first and step.offset == copy.offset + copy.nbytes
