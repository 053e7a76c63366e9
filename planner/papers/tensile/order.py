"""Converts a timed iteration to actions, or to choices.

A swap-in is issued after the op before its start, and a drop at the start of the tensor's absence, so that at every
action the contents of memory match the schedule at that time.
"""

from collections.abc import Iterator
from typing import Final

from cohabit.planner.papers.tensile.axis import Axis, TensorAccesses
from cohabit.planner.schedule.gaps import START, Choice, Gaps
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action

_ORDER: Final = (SWAP_OUT, DROP, SWAP_IN, COMPUTE)
"""Order of actions at the same time."""


def actions_of(axis: Axis) -> tuple[list[Action], frozenset[int]]:
    """Return one iteration's actions in time order, and the weights resident before and after it."""
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


def choices_of(axis: Axis, gaps: Gaps) -> list[Choice]:
    """Return the choice of each gap, without times."""
    found: dict[tuple[int, int, bool], Choice] = {}
    for track in axis.tracks.values():
        last_use = START
        for gap in track.gaps:
            if gap.before is not None and not gap.before.again:
                last_use = gap.before.op
            if not gap.kept:
                choice = Choice.RESTORE if gap.early else Choice.SWAP if gap.rerun is None else Choice.RECOMPUTE
                found[track.tensor, last_use, gap.across] = choice
    choices = (found.get((g.tensor, g.last_use, g.wraps), Choice.KEEP) for g in gaps.all)
    return [choice if choice in g.choices else Choice.SWAP for choice, g in zip(choices, gaps.all, strict=True)]
