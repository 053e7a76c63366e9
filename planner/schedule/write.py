"""Writes every searcher's schedule as a plan. Waits that lane order or another wait implies are left out."""

from collections.abc import Iterator
from typing import Final

from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn, SwapOut
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.table import COMPUTE, NOTHING, SWAP_IN, SWAP_OUT, WORKSPACE, Schedule

_Clock = tuple[int, int, int]
"""Steps of each lane that have ended."""
_NEVER: Final[_Clock] = (0, 0, 0)


def write(problem: Problem, schedule: Schedule, pool_bytes: int) -> Plan:
    """Return the plan of a schedule whose counted bytes lie in a pool of this size at the workspace's start.

    The caller answers for the rows and offsets; the checker finds mistakes.
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
    """Where a schedule's offset lies; None where the tensor is counted."""
    if offset == NOTHING:
        return None
    return Address("partition", offset) if offset < WORKSPACE else Address("workspace", offset - WORKSPACE)


def offset_of(address: Address | None) -> int:
    """The inverse of `address_of`."""
    if address is None:
        return NOTHING
    return address.offset + (WORKSPACE if address.region == "workspace" else 0)


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
    """For each row, the rows that it must name so that everything it waits for has ended."""
    issued: tuple[list[int], list[int], list[int]] = ([], [], [])  # per lane, its rows
    latest: list[_Clock] = [_NEVER, _NEVER, _NEVER]  # per lane, what its next step knows to have ended
    ended: dict[int, _Clock] = {}  # per row, what has ended once it has
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
