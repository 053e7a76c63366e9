"""Orders the moves of models to other bytes of the arena; they move one at a time while the others are served."""

from collections.abc import Mapping
from dataclasses import dataclass

from cohabit.server.deploy.partitions import Extent


@dataclass(frozen=True, slots=True)
class ReleaseForMove:
    """Release a model's bytes; its requests wait until it has moved."""

    owner: str


@dataclass(frozen=True, slots=True)
class Move:
    """Move a model to bytes that are free or its own."""

    owner: str
    extent: Extent


def moves(
    now: Mapping[str, Extent], wanted: Mapping[str, Extent], workspace_bytes: int
) -> list[ReleaseForMove | Move]:
    """Return the steps that move every model to its wanted extent.

    The first `workspace_bytes` of the arena are vacated first. Cycles are broken by vacating few models; every
    vacated model is moved by a later step.
    """
    at = dict(now)
    workspace = Extent(0, workspace_bytes)
    steps: list[ReleaseForMove | Move] = [
        ReleaseForMove(name) for name, extent in at.items() if extent.overlaps(workspace)
    ]
    for step in steps:
        del at[step.owner]
    waiting = [name for name in wanted if at.get(name) != wanted[name]]
    while waiting:
        free = next((name for name in waiting if not _blockers(name, at, wanted)), None)
        if free is None:
            away = min(waiting, key=lambda name: min(len(_blockers(name, at, wanted)), len(at)))
            for name in _blockers(away, at, wanted):
                steps.append(ReleaseForMove(name))
                del at[name]
            free = away
        steps.append(Move(free, wanted[free]))
        at[free] = wanted[free]
        waiting.remove(free)
    return steps


def vacate_all(wanted: Mapping[str, Extent]) -> list[ReleaseForMove | Move]:
    """Return the steps that vacate every model before the first one moves, for a change of all workspaces."""
    return [*(ReleaseForMove(name) for name in wanted), *(Move(name, extent) for name, extent in wanted.items())]


def _blockers(owner: str, at: Mapping[str, Extent], wanted: Mapping[str, Extent]) -> list[str]:
    """Return the other owners whose extents overlap a model's wanted extent."""
    return [name for name, extent in at.items() if name != owner and extent.overlaps(wanted[owner])]


def packed(sizes: Mapping[str, int], now: Mapping[str, Extent], arena_bytes: int) -> dict[str, Extent]:
    """Return extents packed from the arena's top down, in the present order; new models are last."""
    order = sorted(sizes, key=lambda name: (name not in now, -now[name].offset if name in now else 0))
    places, top = {}, arena_bytes
    for name in order:
        top -= sizes[name]
        places[name] = Extent(top, sizes[name])
    return places
