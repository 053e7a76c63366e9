"""Turns a timed iteration into rows, or into fates.

A swap-in is issued after the op before its start, and a drop stands where the tensor's absence begins, so that
memory holds at every action what the schedule says for that time.
"""

from collections.abc import Iterator
from typing import Final

from cohabit.planner.papers.tensile.axis import Axis, TensorAccesses
from cohabit.planner.schedule.gaps import START, Fate, Gaps
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action

_ORDER: Final = (SWAP_OUT, DROP, SWAP_IN, COMPUTE)
"""Of actions at one time."""


def actions_of(axis: Axis) -> tuple[list[Action], frozenset[int]]:
    """Return one iteration's actions in order of time, and the weights resident before and after it."""
    timed = [(run.start_ns, (COMPUTE, run.op)) for run in axis.runs]
    for track in axis.tracks.values():
        timed += _actions(axis, track)
    timed.sort(key=lambda a: (a[0], _ORDER.index(a[1][0])))
    residents = (t for t, track in axis.tracks.items() if track.resident)
    return [action for _, action in timed], frozenset(residents)


def _actions(axis: Axis, track: TensorAccesses) -> Iterator[tuple[int, Action]]:
    t = track.tensor
    leave = DROP, t
    yield from ((run.end_ns, leave) for run in track.extra)
    if not track.is_weight and not track.stays:
        yield axis.end_of(track.accesses[-1] if track.accesses else None), leave
    for span in track.outs.values():
        yield span.start_ns, (SWAP_OUT, t)
    for gap in track.gaps:
        if not gap.kept:
            yield axis.gone_ns(track, gap), leave
        if gap.back is not None:
            yield gap.back.start_ns, (SWAP_IN, t)


def fates_of(axis: Axis, gaps: Gaps) -> list[Fate]:
    """Return the fate of each gap, without times."""
    found: dict[tuple[int, int, bool], Fate] = {}
    for track in axis.tracks.values():
        last_use = START
        for gap in track.gaps:
            if gap.before is not None and not gap.before.again:
                last_use = gap.before.op
            if not gap.kept:
                fate = Fate.RESTORE if gap.early else Fate.SWAP if gap.rerun is None else Fate.RECOMPUTE
                found[track.tensor, last_use, gap.across] = fate
    fates = (found.get((g.tensor, g.last_use, g.wraps), Fate.KEEP) for g in gaps.all)
    return [fate if fate in g.fates else Fate.SWAP for fate, g in zip(fates, gaps.all, strict=True)]
