"""What a schedule's times mean as a sequence: its actions in the order of their times.

A swap-in is issued behind the op before its start and a drop stands where the tensor's absence begins, so that
memory holds at every action what the schedule says for that time.
"""

from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum

from planner.graph import Graph
from planner.sequence import Action, Verb, compute, drop, held_bytes, swap_in, swap_out
from planner.tensile.job import Axis, Track


class _Rank(IntEnum):
    """The order of actions at one time."""

    SWAP_OUT = 0
    DROP = 1
    SWAP_IN = 2
    COMPUTE = 3


def actions_of(axis: Axis) -> tuple[list[Action], frozenset[int]]:
    """One iteration of a job in order, and the weights that it starts and ends with."""
    timed = [(run.start_ns, _Rank.COMPUTE, compute(run.op)) for run in axis.runs]
    for track in axis.tracks.values():
        timed += _actions(axis, track)
    timed.sort(key=lambda a: (a[0], a[1]))
    residents = (t for t, track in axis.tracks.items() if track.resident)
    return [action for _, _, action in timed], frozenset(residents)


def _actions(axis: Axis, track: Track) -> Iterator[tuple[int, _Rank, Action]]:
    leave, t = drop(track.tensor), track.tensor
    yield from ((run.end_ns, _Rank.DROP, leave) for run in track.extra)
    if not track.is_weight and not track.stays:
        yield axis.end_of(track.accesses[-1] if track.accesses else None), _Rank.DROP, leave
    for span in track.outs.values():
        yield span.start_ns, _Rank.SWAP_OUT, swap_out(t)
    for gap in track.gaps:
        if not gap.kept:
            yield axis.gone_ns(track, gap), _Rank.DROP, leave
        if gap.back is not None:
            yield gap.back.start_ns, _Rank.SWAP_IN, swap_in(t)


def hastened(
    graph: Graph, actions: Sequence[Action], residents: Collection[int], memory_bytes: int
) -> list[Action]:
    """The same actions with swap-ins, in the same order, as early as memory allows.

    For what the executor would wait for. TENSILE has every swap-in as late as possible, which is best where all of
    them are hidden.
    """
    held = held_bytes(graph, actions, residents)
    before: list[list[Action]] = [[] for _ in actions]
    left: dict[int, int] = {}
    earliest = 0
    for i, action in enumerate(actions):
        if action.verb is Verb.SWAP_IN:
            nbytes, low, at = graph.tensors[action.what].nbytes, max(earliest, left.get(action.what, 0)), i
            while at > low and held[at - 1] + nbytes <= memory_bytes:
                at -= 1
                held[at] += nbytes
            before[at].append(action)
            earliest = at
        else:
            if action.verb is Verb.DROP:
                left[action.what] = i + 1
            before[i].append(action)
    return [action for some in before for action in some]
