"""Who has which bytes of the arena: workspaces at the bottom, partitions from the top down, the rest free."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.sizing.fitting import Room


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Bytes of the arena."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def overlaps(self, other: "Extent") -> bool:
        return self.nbytes > 0 and other.nbytes > 0 and self.offset < other.end and other.offset < self.end


class Partitions:
    """The arena's bytes, by owner. Not thread-safe."""

    def __init__(self, arena_bytes: int, workspace_bytes: int = 0, lanes: int = 1) -> None:
        self.arena_bytes = arena_bytes
        self.lanes = lanes
        self._workspace_bytes = workspace_bytes
        self._held: dict[str, Extent] = {}

    @property
    def workspace_bytes(self) -> int:
        """Of each lane."""
        return self._workspace_bytes

    @property
    def workspaces(self) -> Extent:
        """Those of all lanes, one behind the other."""
        return Extent(0, self.lanes * self._workspace_bytes)

    @property
    def held(self) -> Mapping[str, Extent]:
        return self._held

    @property
    def free_bytes(self) -> int:
        return sum(gap.nbytes for gap in self.gaps())

    def gaps(self, workspace_bytes: int | None = None) -> list[Extent]:
        """The free stretches, lowest first, if each workspace had so many bytes."""
        low = self.lanes * max(self._workspace_bytes, workspace_bytes or 0)
        gaps = []
        for extent in (*sorted(e for e in self._held.values() if e.nbytes), Extent(self.arena_bytes, 0)):
            if extent.offset > low:
                gaps.append(Extent(low, extent.offset - low))
            low = max(low, extent.end)
        return gaps

    def rooms(self, workspaces: Iterable[int]) -> list[Room]:
        """The workspaces that could be had, not smaller than now, with the largest partition beside each."""
        sizes = sorted({max(size, self._workspace_bytes) for size in (0, *workspaces)})
        return [
            Room(size, max((gap.nbytes for gap in self.gaps(size)), default=0))
            for size in sizes
            if self._may_grow_to(size)
        ]

    def take(self, owner: str, nbytes: int) -> Extent | None:
        """Give bytes out of the tightest gap that has them, at its top; None if none has."""
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
        """Give exactly these bytes, which must be free."""
        others = [self.workspaces, *(e for name, e in self._held.items() if name != owner)]
        assert 0 <= extent.offset <= extent.end <= self.arena_bytes
        assert not any(extent.overlaps(other) for other in others)
        self._held[owner] = extent

    def release(self, owner: str) -> None:
        """Free a owner's bytes; when nobody is left, the workspace is free too."""
        self._held.pop(owner, None)
        if not self._held:
            self._workspace_bytes = 0

    def grow_workspace(self, nbytes: int) -> bool:
        """Make each workspace at least so large; False if a partition is in the way.

        Several cannot grow while somebody is there: all but the first would begin elsewhere.
        """
        if not self._may_grow_to(nbytes):
            return False
        self._workspace_bytes = max(self._workspace_bytes, nbytes)
        return True

    def _may_grow_to(self, nbytes: int) -> bool:
        if self.lanes > 1 and self._held and nbytes > self._workspace_bytes:
            return False
        workspaces = Extent(0, self.lanes * nbytes)
        return workspaces.end <= self.arena_bytes and not any(workspaces.overlaps(e) for e in self._held.values())
