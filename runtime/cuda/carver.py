"""Carves a fixed range of device memory into segments: first fit, never beyond its end."""

from bisect import insort


class Carver:
    """Addresses of free ranges, merged where they touch. Called back from torch's allocator, so it allocates little."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.refused_bytes: int | None = None
        """The size of the last request that did not fit."""
        self._free = [(address, address + nbytes)] if nbytes else []
        self._held: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The address of a segment, or None if no free range is as large."""
        for position, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._free[position]
                else:
                    self._free[position] = (start + nbytes, end)
                self._held[start] = nbytes
                return start
        self.refused_bytes = nbytes
        return None

    def give(self, address: int) -> None:
        """Take a segment back."""
        start, end = address, address + self._held.pop(address)
        for low, high in [r for r in self._free if r[1] == start or r[0] == end]:
            self._free.remove((low, high))
            start, end = min(start, low), max(end, high)
        insort(self._free, (start, end))
