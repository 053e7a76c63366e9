"""The arena's address map: workspaces at the bottom, partitions from the top down, gaps between them.

Models move one at a time, while others are served.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from cohabit.planner.memory import Memory


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A range of the arena, [offset, offset + nbytes)."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def overlaps(self, other: "Extent") -> bool:
        return self.nbytes > 0 and other.nbytes > 0 and self.offset < other.end and other.offset < self.end


class Partitions:
    """The arena's extents, by owner: a load id (`Model.load_id`) or the shared region. Not thread-safe."""

    def __init__(self, arena_bytes: int, workspace_bytes: int = 0, lanes: int = 1) -> None:
        self.arena_bytes = arena_bytes
        self.lanes = lanes
        self.workspace_bytes = workspace_bytes
        """Size of each lane's workspace."""
        self.held: dict[str, Extent] = {}

    @property
    def workspaces(self) -> Extent:
        """Extent of all lanes' workspaces, one after the other."""
        return Extent(0, self.lanes * self.workspace_bytes)

    @property
    def free_bytes(self) -> int:
        return sum(gap.nbytes for gap in self.gaps())

    def gaps(self, workspace_bytes: int | None = None) -> list[Extent]:
        """Return the free extents, lowest first, assuming workspaces of at least `workspace_bytes`."""
        low = self.lanes * max(self.workspace_bytes, workspace_bytes or 0)
        gaps = []
        for extent in (*sorted(e for e in self.held.values() if e.nbytes), Extent(self.arena_bytes, 0)):
            if extent.offset > low:
                gaps.append(Extent(low, extent.offset - low))
            low = max(low, extent.end)
        return gaps

    def copied(self) -> "Partitions":
        copied = Partitions(self.arena_bytes, self.workspace_bytes, self.lanes)
        copied.held = dict(self.held)
        return copied

    def memories(self, workspaces: Iterable[int]) -> list[Memory]:
        """Return each possible workspace size, from the current one up, with its largest free partition."""
        sizes = sorted({max(size, self.workspace_bytes) for size in (0, *workspaces)})
        return [
            Memory(size, max((gap.nbytes for gap in self.gaps(size)), default=0))
            for size in sizes
            if self._may_grow_to(size)
        ]

    def take(self, owner: str, nbytes: int) -> Extent | None:
        """Allocate at the top of the tightest gap that fits (best fit); None if no gap fits."""
        gaps = [gap for gap in self.gaps() if gap.nbytes >= nbytes]
        if nbytes == 0:
            extent = Extent(self.arena_bytes, 0)
        elif gaps:
            gap = min(gaps, key=lambda g: (g.nbytes, -g.offset))
            extent = Extent(gap.end - nbytes, nbytes)
        else:
            return None
        self.put(owner, extent)
        return extent

    def put(self, owner: str, extent: Extent) -> None:
        """Assign this extent, which must be free or the owner's."""
        others = [self.workspaces, *(e for name, e in self.held.items() if name != owner)]
        assert 0 <= extent.offset <= extent.end <= self.arena_bytes
        assert not any(extent.overlaps(other) for other in others)
        self.held[owner] = extent

    def release(self, owner: str) -> None:
        """Release an owner's extent; with the last one, the workspaces, too."""
        self.held.pop(owner, None)
        if not self.held:
            self.workspace_bytes = 0

    def grow_workspace(self, nbytes: int) -> bool:
        """Grow each workspace to at least `nbytes`; False if a partition is in the way.

        With several lanes, workspaces cannot grow while there are partitions: all but the first would move.
        """
        if not self._may_grow_to(nbytes):
            return False
        self.workspace_bytes = max(self.workspace_bytes, nbytes)
        return True

    def _may_grow_to(self, nbytes: int) -> bool:
        if self.lanes > 1 and self.held and nbytes > self.workspace_bytes:
            return False
        workspaces = Extent(0, self.lanes * nbytes)
        return workspaces.end <= self.arena_bytes and not any(workspaces.overlaps(e) for e in self.held.values())


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

    The first `workspace_bytes` of the arena are vacated first. Cycles are broken by vacating few models; a later step
    moves each vacated model.
    """
    at = dict(now)
    # Owners by address. Empty extents overlap nothing.
    order = sorted((name for name in at if at[name].nbytes), key=lambda name: at[name].offset)
    workspace = Extent(0, workspace_bytes)
    steps: list[ReleaseForMove | Move] = [
        ReleaseForMove(name) for name, extent in at.items() if extent.overlaps(workspace)
    ]
    for step in steps:
        order.remove(step.owner)
        del at[step.owner]

    def blockers(owner: str) -> list[str]:
        """Return the other owners whose extents overlap a model's wanted extent; they are neighbours by address."""
        end = bisect_left(order, wanted[owner].end, key=lambda name: at[name].offset)
        found = takewhile(lambda name: at[name].end > wanted[owner].offset, reversed(order[:end]))
        return [name for name in found if name != owner and at[name].overlaps(wanted[owner])]

    waiting = [name for name in wanted if at.get(name) != wanted[name]]
    while waiting:
        free = next((name for name in waiting if not blockers(name)), None)
        if free is None:
            away = min(waiting, key=lambda name: min(len(blockers(name)), len(at)))
            for name in blockers(away):
                steps.append(ReleaseForMove(name))
                order.remove(name)
                del at[name]
            free = away
        steps.append(Move(free, wanted[free]))
        if free in order:
            order.remove(free)
        at[free] = wanted[free]
        if at[free].nbytes:
            insort(order, free, key=lambda name: at[name].offset)
        waiting.remove(free)
    return steps


def vacate_all(wanted: Mapping[str, Extent]) -> list[ReleaseForMove | Move]:
    """Return steps that vacate every model before the first moves, for a change of all workspaces."""
    return [*(ReleaseForMove(name) for name in wanted), *(Move(name, extent) for name, extent in wanted.items())]


def packed(sizes: Mapping[str, int], now: Mapping[str, Extent], arena_bytes: int) -> dict[str, Extent]:
    """Return extents packed from the arena's top down, in the current order; new models are last."""
    order = sorted(sizes, key=lambda name: (name not in now, -now[name].offset if name in now else 0))
    places, top = {}, arena_bytes
    for name in order:
        top -= sizes[name]
        places[name] = Extent(top, sizes[name])
    return places
