"""Predicts a loop's next ops from the last time it ran the same sequence of ops.

A loop repeats itself from step to step, and within a step from layer to layer. A pointer follows the earlier
occurrence of the current sequence in the record. A storage's counterpart is the storage that the matching recorded
op used in the same place. The storage's next use is predicted as many ops away as its counterpart's was. A wrong
prediction costs only a copy.
"""

import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cohabit.runtime.training.tracked import NEVER, Pace, Tracked, used_by

Signature = tuple[Hashable, ...]
"""An op, and the sizes and integers among its arguments."""

_MATCHED: Final = 6
"""Number of last ops that must match a recorded sequence."""
_MOST_RECORDS: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Ahead:
    """Predicted needs of the next ops."""

    wanted: Sequence[Tracked]
    """Evicted storages, in order of first use."""
    needed_bytes: int
    """Peak bytes of these and of the ops' results, on top of current memory use."""
    position: int
    """End of the lookahead window."""


class History:
    """Records the ops of one thread's loop, and predicts from them. The caller holds a lock around every call.

    A use is an op's use of one storage. Ops have positions, and uses have ids, both counted from the start. The records
    are columns of integers: objects per op would be traversed by Python's garbage collector again and again.
    """

    def __init__(self) -> None:
        self.pace = Pace()

        # Per op, from position `_first` on.
        self._first = 0
        self._numbers: list[int] = []
        """Number of its signature."""
        self._before_bytes: list[int] = []
        """Bytes made minus bytes freed by all earlier ops."""
        self._made_bytes: list[int] = []
        self._first_uses: list[int] = []
        """Id of its first use. An op's uses are those of existing storages, then those of its new results."""

        # Per use, from id `_first_use` on.
        self._first_use = 0
        self._storages: list[Tracked] = []
        self._next_uses: list[int] = []
        """Distance in ops to the storage's next use; 0 if there is none."""
        self._last_uses: list[int] = []
        """Id of the storage's previous use; -1 if there is none."""
        self._positions: list[int] = []

        self._total_bytes = 0
        """Bytes made minus bytes freed so far."""
        self._place: int | None = None
        """Position of the recorded op that matches the current one; None if the sequence is new."""
        self._numbers_of: dict[Signature, int] = {}
        """One number per signature, so that a signature is hashed once per op."""
        self._next_number = itertools.count()
        self._recent: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        """By hash of a sequence of `_MATCHED` ops: position of the last op of its latest occurrence."""
        self._made_by: dict[int, int] = {}
        """Bytes of the results, by number."""
        self._scratch_by: dict[int, int] = {}
        """Bytes that an op's kernel takes while it runs, by number."""
        self._seen_place = -1
        """Position of the last recorded op that `ahead` has examined."""
        self._wanted: dict[Tracked, int] = {}
        """Evicted storages with the positions of the recorded ops whose counterparts will read them."""

    @property
    def position(self) -> int:
        """Number of ops so far."""
        return self._first + len(self._numbers)

    def made_bytes(self, number: int) -> int | None:
        """Return the bytes of an earlier such op's results; None if there was none."""
        return self._made_by.get(number)

    def scratch_bytes(self, number: int) -> int | None:
        """Return the scratch of an earlier such op; None if it was not measured."""
        return self._scratch_by.get(number)

    def set_scratch(self, number: int, nbytes: int) -> None:
        self._scratch_by[number] = nbytes

    def begin(self, signature: Signature) -> int:
        """Find the recorded op that matches one about to run. Returns the number of its signature."""
        number = self._numbers_of.get(signature)
        if number is None:
            number = self._numbers_of[signature] = next(self._next_number)
        self._recent = (*self._recent[1 - _MATCHED :], number)
        key = hash(self._recent)
        first, now = self._first, self.position
        place = None if self._place is None else self._place + 1
        if place is None or not first <= place < now or self._numbers[place - first] != number:
            place = self._places.get(key)
        self._place = place if place is not None and place >= first else None
        self._places[key] = now
        self.pace.advance(now)
        return number

    def record(self, number: int, used: Sequence[Tracked], made: Sequence[Tracked]) -> None:
        """Record an op that has run, and predict the next use of each of its storages."""
        pace, first_use, next_uses = self.pace, self._first_use, self._next_uses
        now, use = self.position, first_use + len(next_uses)
        matched = () if self._place is None else self._uses_at(self._place)
        storages = [*used, *made] if made else used
        for index, tracked in enumerate(storages):
            last = tracked.last_use if tracked.pace is pace else -1
            if last >= first_use:
                next_uses[last - first_use] = now - self._positions[last - first_use]
            distance = next_uses[matched[index] - first_use] if index < len(matched) else 0
            tracked.next_use = now + distance if distance else NEVER
            tracked.pace, tracked.last_use = pace, use + index
            self._last_uses.append(last)
        self._storages += storages
        next_uses += [0] * len(storages)
        self._positions += [now] * len(storages)

        made_bytes = self._made_by[number] = used_by(made) if made else 0
        self._numbers.append(number)
        self._before_bytes.append(self._total_bytes)
        self._made_bytes.append(made_bytes)
        self._first_uses.append(use)
        self._total_bytes += made_bytes
        if len(self._numbers) > _MOST_RECORDS:
            self._forget(_MOST_RECORDS // 2)

    def died(self, nbytes: int) -> None:
        """Record bytes freed since the last op."""
        self._total_bytes -= nbytes

    def ahead(self, window: int, most_bytes: int) -> Ahead | None:
        """Look ahead `window` ops, or until they need `most_bytes`. Returns None if the sequence is new.

        Each recorded op is examined once, by the first call whose window reaches it.
        """
        here, first, now = self._place, self._first, self.position - 1
        if here is None or not first <= here < now:
            return None
        if not first <= self._seen_place or self._seen_place - here not in range(window + 1):
            self._seen_place = here  # the loop has departed from the predicted sequence
            self._wanted.clear()
        self._wanted = {
            tracked: place for tracked, place in self._wanted.items() if place > here and _is_needed(tracked)
        }
        waiting = deque(self._wanted.items())  # in the order of their places
        wanted_bytes = 0
        base = self._before_bytes[here + 1 - first]
        needed = 0
        for place in range(here + 1, min(here + window, now) + 1):
            if place > self._seen_place:
                self._seen_place = place
                for tracked in self._counterparts(place, here):
                    if _is_needed(tracked) and tracked not in self._wanted:
                        self._wanted[tracked] = place
                        if tracked.pace is self.pace:
                            tracked.next_use = place + now - here
                        wanted_bytes += tracked.nbytes
            while waiting and waiting[0][1] <= place:
                wanted_bytes += waiting.popleft()[0].nbytes
            made = self._before_bytes[place - first] - base + self._made_bytes[place - first]
            needed = max(needed, made + wanted_bytes)
            if needed > most_bytes:
                break
        return Ahead(list(self._wanted), needed, now + window)

    def _uses_at(self, position: int) -> range:
        """Return the ids of an op's uses."""
        index = position - self._first
        is_last = index + 1 == len(self._first_uses)
        end = self._first_use + len(self._storages) if is_last else self._first_uses[index + 1]
        return range(self._first_uses[index], end)

    def _counterparts(self, place: int, here: int) -> Iterator[Tracked]:
        """Yield the existing storages that the counterpart of the recorded op at `place` will use."""
        shift = self.position - 1 - here
        for use in self._uses_at(place):
            last = self._last_uses[use - self._first_use]
            # Skip new results, and storages that an earlier op of the window already uses.
            if last < self._first_use or (earlier := self._positions[last - self._first_use]) > here:
                continue
            uses = self._uses_at(earlier + shift)
            index = last - self._first_uses[earlier - self._first]
            if index < len(uses):
                yield self._storages[uses[index] - self._first_use]

    def _forget(self, count: int) -> None:
        """Forget the oldest `count` ops."""
        uses = self._first_uses[count] - self._first_use
        for per_op in (self._numbers, self._before_bytes, self._made_bytes, self._first_uses):
            del per_op[:count]
        for per_use in (self._next_uses, self._last_uses, self._positions):
            del per_use[:uses]
        del self._storages[:uses]
        self._first += count
        self._first_use += uses
        self._places = {key: place for key, place in self._places.items() if place >= self._first}
        if len(self._numbers_of) > _MOST_RECORDS:
            kept = set(self._numbers)
            self._numbers_of = {sign: number for sign, number in self._numbers_of.items() if number in kept}
            self._made_by = {number: nbytes for number, nbytes in self._made_by.items() if number in kept}
            self._scratch_by = {number: nbytes for number, nbytes in self._scratch_by.items() if number in kept}


def _is_needed(tracked: Tracked) -> bool:
    """Whether a storage has to be copied in before it is used."""
    return tracked.is_out and not tracked.is_forgotten and tracked.copy is None
