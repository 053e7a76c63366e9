"""First-fit allocator of an address range; merges adjacent free ranges on release."""

from bisect import bisect_left


class FreeList:
    """Allocates from the bytes [offset, offset + nbytes). Not thread-safe."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self._free = [(offset, offset + nbytes)] if nbytes else []  # (start, end), sorted, never adjacent

    @property
    def free_bytes(self) -> int:
        return sum(end - start for start, end in self._free)

    def take(self, nbytes: int, alignment: int = 1) -> int | None:
        """Take `nbytes` at the lowest aligned free offset, and return the offset; None if they do not fit."""
        for start, end in self._free:
            offset = -(-start // alignment) * alignment
            if offset + nbytes <= end:
                self.take_at(offset, nbytes)
                return offset
        return None if nbytes else 0

    def take_at(self, offset: int, nbytes: int) -> None:
        """Take bytes that the caller knows to be free."""
        if nbytes == 0:
            return
        position = bisect_left(self._free, (offset + 1,)) - 1
        start, end = self._free[position]
        assert start <= offset
        assert offset + nbytes <= end
        rest = ((start, offset), (offset + nbytes, end))
        self._free[position : position + 1] = [part for part in rest if part[1] > part[0]]

    def has(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes are free."""
        position = bisect_left(self._free, (offset + 1,)) - 1
        return position >= 0 and offset + nbytes <= self._free[position][1]

    def release(self, offset: int, nbytes: int) -> None:
        """Release taken bytes: all of an allocation or a part."""
        if nbytes == 0:
            return
        start, end = offset, offset + nbytes
        position = bisect_left(self._free, (start,))
        if position < len(self._free) and self._free[position][0] == end:
            end = self._free.pop(position)[1]
        if position and self._free[position - 1][1] == start:
            position -= 1
            start = self._free.pop(position)[0]
        self._free.insert(position, (start, end))

    def copy(self) -> "FreeList":
        """Return an independent copy."""
        other = FreeList(0, 0)
        other._free = self._free.copy()
        return other
