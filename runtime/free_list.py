"""Free bytes of a range that are taken and given back."""

from bisect import bisect_left


class Gaps:
    """Free bytes: first fit, merged where they touch."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self._free = [(offset, offset + nbytes)]

    def take(self, nbytes: int) -> int | None:
        """The offset of the lowest gap that is large enough; None if none is."""
        if nbytes == 0:
            return self._free[0][0] if self._free else 0
        for position, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._free[position]
                else:
                    self._free[position] = (start + nbytes, end)
                return start
        return None

    def take_at(self, offset: int, nbytes: int) -> None:
        """Take bytes that are free."""
        if nbytes == 0:
            return
        position = bisect_left(self._free, (offset + 1,)) - 1
        start, end = self._free[position]
        assert start <= offset
        assert offset + nbytes <= end
        self._free[position : position + 1] = [
            gap for gap in ((start, offset), (offset + nbytes, end)) if gap[1] > gap[0]
        ]

    def has(self, offset: int, nbytes: int) -> bool:
        """Whether bytes are free."""
        position = bisect_left(self._free, (offset + 1,)) - 1
        return position >= 0 and offset + nbytes <= self._free[position][1]

    def give(self, offset: int, nbytes: int) -> None:
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

    def copy(self) -> "Gaps":
        other = Gaps(0, 0)
        other._free = self._free.copy()
        return other
