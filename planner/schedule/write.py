"""Converts schedules to plans. Waits implied by lane order or by another wait are left out."""

from collections.abc import Iterator
from typing import Final

from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn, SwapOut
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.table import COMPUTE, NOTHING, SWAP_IN, SWAP_OUT, WORKSPACE, Schedule

_Clock = tuple[int, int, int]
"""Number of ended steps per lane."""
_NEVER: Final[_Clock] = (0, 0, 0)


def write(problem: Problem, schedule: Schedule, pool_bytes: int) -> Plan:
    """Return a schedule's plan, with counted bytes in a pool of this size at the workspace's start.

    Rows and offsets are not validated here; the checker does that.
    """
    residents = zip(schedule.residents.tolist(), schedule.resident_at.tolist(), strict=True)
    return Plan(
        graph=problem.graph.fingerprint,
        profile=problem.profile.fingerprint,
        memory=problem.memory,
        pool_bytes=pool_bytes,
        residents=tuple(Placement(t, address_of(offset)) for t, offset in residents),
        steps=tuple(_steps(schedule)),
    )


def address_of(offset: int) -> Address | None:
    """Convert an offset of a schedule to an address; None if the tensor is counted."""
    if offset == NOTHING:
        return None
    return Address("partition", offset) if offset < WORKSPACE else Address("workspace", offset - WORKSPACE)


def _steps(schedule: Schedule) -> Iterator[Step]:
    rows = zip(schedule.verb.tolist(), schedule.what.tolist(), schedule.offset.tolist(), strict=True)
    for (verb, what, offset), after in zip(rows, _reduced(schedule), strict=True):
        if verb == COMPUTE:
            yield Compute(what, after)
        elif verb == SWAP_IN:
            yield SwapIn(what, address_of(offset), after)
        elif verb == SWAP_OUT:
            yield SwapOut(what, after)
        else:
            yield Drop(what)


def _reduced(schedule: Schedule) -> Iterator[tuple[int, ...]]:
    """Yield, for each row, the rows that it must name; their ends imply all its waits."""
    issued: tuple[list[int], list[int], list[int]] = ([], [], [])  # per lane, its rows
    latest: list[_Clock] = [_NEVER, _NEVER, _NEVER]  # per lane, the steps that its next step knows to have ended
    ended: dict[int, _Clock] = {}  # per row, the steps that have ended once it has
    for index, (lane, waits) in enumerate(zip(schedule.verb.tolist(), schedule.wait.tolist(), strict=True)):
        if lane > SWAP_OUT:
            yield ()
            continue
        known = latest[lane]
        missing = {issued[other][waits[other]]: other for other in range(3) if waits[other] >= known[other]}
        after: list[int] = []
        for row in sorted(missing, reverse=True):  # the latest first: it may imply the others
            if ended[row][missing[row]] > known[missing[row]]:
                after.append(row)
                known = _latest(known, ended[row])
        issued[lane].append(index)
        count = len(issued[lane])
        latest[lane] = ended[index] = (
            count if lane == COMPUTE else known[0],
            count if lane == SWAP_IN else known[1],
            count if lane == SWAP_OUT else known[2],
        )
        yield tuple(sorted(after))


def _latest(a: _Clock, b: _Clock) -> _Clock:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])
