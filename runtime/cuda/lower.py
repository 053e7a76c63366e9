"""A program as commands for two streams: kernels, copies, and the fewest events that keep the plan's order.

    compute   K0      W0 K1          K2 R1 ...         K  kernels of one op        W  wait for an event
    swap_in   C(0,1)  R0       ...      W1 C(2)        C  one copy of neighbours   R  record an event

Streams are in order, so a wait for something earlier than what a stream has waited for already is left out. Commands
stand in an order in which they can be issued by one thread: no wait before its record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.program import Program, SwapInStep

ENOUGH_BYTES = 2 << 20
"""Neighbours join a copy until it has this size: smaller ones cost latency."""
MOST_BYTES = 8 << 20
"""A copy that joins several is no larger than this, so that the first of them need not wait for long."""

FORK = 0
"""The event behind which the swap-in lane begins, unless its first copy waits for an op."""
LINK_FREE = 1
"""The event behind the last copy."""

Lane = Literal["compute", "swap_in"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of `program.computes[index]`."""

    index: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Swap-ins `first` up to `last`, without it, which are neighbours in host and in device memory."""

    first: int
    last: int
    segment: int
    offset: int
    nbytes: int


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
    command: Kernels | Copy | Record | Wait


@dataclass(frozen=True, slots=True)
class Commands:
    """What is issued together, with events numbered from 0. `LINK_FREE` is for others to wait for."""

    issues: tuple[Issue, ...]
    events: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One inference. `whole` has the prefix, `rest` counts on it to be there; otherwise they are the same.

    The epilogue starts when everything else has ended.
    """

    whole: Commands
    rest: Commands
    prefix: tuple[Copy, ...]
    epilogue: tuple[Copy, ...]
    residents: tuple[Copy, ...]


def schedule(program: Program, *, join: bool = True) -> Schedule:
    """Lower a program. Copies that no op of this run waits for are left to the epilogue.

    `join` says whether the store can copy several segments at once.
    """
    most_bytes = MOST_BYTES if join else 0
    swap_ins = program.swap_ins
    needed = max((c.swap_ins_before for c in program.computes), default=0)
    if program.constants:
        needed = max(needed, program.epilogue)
    prefix = min(program.prefix, needed)
    whole = _commands(program, 0, needed, most_bytes)
    return Schedule(
        whole=whole,
        rest=_commands(program, prefix, needed, most_bytes) if prefix else whole,
        prefix=joined(swap_ins[:prefix], 0, most_bytes),
        epilogue=joined(swap_ins[needed:], needed, most_bytes),
        residents=joined(program.residents, 0, most_bytes),
    )


def joined(swap_ins: Sequence[SwapInStep], start: int, most_bytes: int = MOST_BYTES) -> tuple[Copy, ...]:
    """Put small neighbours into one copy, unless that makes the first wait for what the second waits for.

    `start` is the index of the first among the program's swap-ins; no copy of several exceeds `most_bytes`.
    """
    copies: list[Copy] = []
    behind = 0
    for index, step in enumerate(swap_ins, start):
        later = step.computes_before > behind
        behind = max(behind, step.computes_before)
        last = copies[-1] if copies else None
        if last is not None and not later and _continues(last, step) and last.nbytes + step.nbytes <= most_bytes:
            copies[-1] = Copy(last.first, index + 1, last.segment, last.offset, last.nbytes + step.nbytes)
        else:
            copies.append(Copy(index, index + 1, step.tensor, step.offset, step.nbytes))
    return tuple(copies)


def _continues(copy: Copy, step: SwapInStep) -> bool:
    """Whether a swap-in's bytes lie right behind those of a copy that could be larger, here and there."""
    return (
        step.tensor == copy.segment + copy.last - copy.first
        and step.offset == copy.offset + copy.nbytes
        and copy.nbytes < ENOUGH_BYTES
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """A command that takes time, at its place in the plan's order, with how far it needs the other lane to be."""

    step: int
    lane: Lane
    command: Kernels | Copy
    needs: int
    """Kernels: swap-ins that must have ended; a copy: compute steps."""
    ends: int
    """How far its own lane is when it has ended, in the same unit."""


def _commands(program: Program, start: int, end: int, most_bytes: int) -> Commands:
    """Kernels, and swap-ins from `start` up to `end`; those before are there."""
    placed = sorted(_placed(program, start, end, most_bytes), key=lambda p: p.step)
    waits = _waits(placed, start)
    copies = [n for n, p in enumerate(placed) if p.lane == "swap_in"]
    events = {position: n for n, position in enumerate(sorted(set(waits.values())), LINK_FREE + 1)}
    count = LINK_FREE + 1 + len(events)
    issues: list[Issue] = []
    if copies and copies[0] not in waits:
        issues = [Issue("compute", Record(FORK)), Issue("swap_in", Wait(FORK))]
    for position, item in enumerate(placed):
        if position in waits:
            issues.append(Issue(item.lane, Wait(events[waits[position]])))
        issues.append(Issue(item.lane, item.command))
        if copies and position == copies[-1]:
            issues.append(Issue(item.lane, Record(LINK_FREE)))
        if position in events:
            issues.append(Issue(item.lane, Record(events[position])))
    if copies and copies[-1] not in events:  # a graph ends on one lane
        issues += [Issue("swap_in", Record(count)), Issue("compute", Wait(count))]
        count += 1
    return Commands(tuple(issues), count)


def _placed(program: Program, start: int, end: int, most_bytes: int) -> Iterator[_Placed]:
    for index, compute in enumerate(program.computes):
        yield _Placed(compute.step, "compute", Kernels(index), min(compute.swap_ins_before, end), index + 1)
    behind = 0
    for copy in joined(program.swap_ins[start:end], start, most_bytes):
        behind = max(behind, *(s.computes_before for s in program.swap_ins[copy.first : copy.last]))
        yield _Placed(program.swap_ins[copy.first].step, "swap_in", copy, behind, copy.last)


def _waits(placed: Sequence[_Placed], start: int) -> dict[int, int]:
    """For each command that must wait, the position of the one that it waits for; none that lane order gives."""
    known = {"compute": start, "swap_in": 0}
    waits: dict[int, int] = {}
    for position, item in enumerate(placed):
        if item.needs <= known[item.lane]:
            continue
        other = next(n for n, p in enumerate(placed) if p.lane != item.lane and p.ends >= item.needs)
        assert other < position, "a plan waits for what it issues later"
        waits[position] = other
        known[item.lane] = placed[other].ends
    return waits
