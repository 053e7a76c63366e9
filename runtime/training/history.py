"""Predicts a loop's next ops from the last time it ran the same sequence of ops.

A loop repeats itself from step to step, and within a step from layer to layer. A pointer follows the recorded ops where
the current sequence occurred before. A storage's next use is predicted as far away as its counterpart's was there.
Predictions may be wrong: that costs only a copy.
"""

import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cohabit.runtime.training.residency import NEVER, Tracked, used_by

Signature = tuple[Hashable, ...]
"""An op, and the sizes and integers among its arguments."""

_MATCHED: Final = 6
"""Number of last ops that must match a recorded sequence."""
_MOST_RECORDS: Final = 1 << 15


@dataclass(slots=True)
class _Record:
    """An op that ran. `next_uses` and `last_uses` are distances in ops per storage; 0 and None if there is none."""

    number: int
    """Of its signature."""
    storages: Sequence[Tracked]
    """Storages read or written, then new ones."""
    before_bytes: int
    """Bytes made minus bytes freed by all earlier ops."""
    made_bytes: int
    next_uses: list[int]
    last_uses: list[tuple[int, int] | None]
    freed_bytes: int = 0
    """Bytes of storages that died before the next op."""


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
    """Records ops, and predicts from them. The caller holds a lock around every call."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._first = 0
        """Position of the oldest record kept."""
        self._place: int | None = None
        """Position of the record that matches the current op; None if the sequence is new."""
        self._numbers: dict[Signature, int] = {}
        """One number per signature, so that a signature is hashed once per op."""
        self._next_number = itertools.count()
        self._recent: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        """Last position of each sequence of `_MATCHED` ops, by hash: that of its last op."""
        self._made_bytes: dict[int, int] = {}
        self._seen_place = -1
        """Position of the last record that `ahead` has examined."""
        self._wanted: dict[Tracked, int] = {}
        """Evicted storages with the positions of the records whose counterparts will read them."""

    @property
    def position(self) -> int:
        """Number of ops so far."""
        return self._first + len(self._records)

    def made_bytes(self, number: int) -> int | None:
        """Return the bytes of an earlier such op's results; None if there was none."""
        return self._made_bytes.get(number)

    def begin(self, signature: Signature) -> int:
        """Find the record that matches an op about to run. Returns the number of its signature."""
        number = self._numbers.get(signature)
        if number is None:
            number = self._numbers[signature] = next(self._next_number)
        self._recent = (*self._recent[1 - _MATCHED :], number)
        key = hash(self._recent)
        first, now = self._first, self.position
        place = None if self._place is None else self._place + 1
        if place is None or not first <= place < now or self._records[place - first].number != number:
            place = self._places.get(key)
        self._place = place if place is not None and place >= first else None
        self._places[key] = now
        return number

    def record(self, number: int, used: Sequence[Tracked], made: Sequence[Tracked]) -> None:
        """Record an op that has run, and predict the next use of each of its storages."""
        records, first = self._records, self._first
        now = first + len(records)
        distances = [] if self._place is None else records[self._place - first].next_uses
        storages = [*used, *made]
        last_uses: list[tuple[int, int] | None] = []
        for index, tracked in enumerate(storages):
            if tracked.last_use is None:
                last_uses.append(None)
            else:
                position, which = tracked.last_use
                last_uses.append((now - position, which))
                if position >= first:
                    records[position - first].next_uses[which] = now - position
            tracked.last_use = (now, index)
            distance = distances[index] if index < len(distances) else 0
            tracked.next_use = now + distance if distance else NEVER
        made_bytes = self._made_bytes[number] = used_by(made)
        last = records[-1] if records else None
        before_bytes = 0 if last is None else last.before_bytes + last.made_bytes - last.freed_bytes
        records.append(_Record(number, storages, before_bytes, made_bytes, [0] * len(storages), last_uses))
        if len(records) > _MOST_RECORDS:
            self._forget(_MOST_RECORDS // 2)

    def died(self, nbytes: int) -> None:
        """Record bytes freed since the last op."""
        if self._records:
            self._records[-1].freed_bytes += nbytes

    def ahead(self, window: int, most_bytes: int) -> Ahead | None:
        """Look ahead `window` ops, or until they need `most_bytes`. Returns None if the sequence is new.

        Each record is examined once, by the first call whose window reaches it.
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
        records = self._records
        base = records[here + 1 - first].before_bytes
        needed = 0
        for place in range(here + 1, min(here + window, now) + 1):
            if place > self._seen_place:
                self._seen_place = place
                for tracked in self._counterparts(records[place - first], place, here):
                    if _is_needed(tracked) and tracked not in self._wanted:
                        self._wanted[tracked] = place
                        tracked.next_use = place + now - here
                        wanted_bytes += tracked.nbytes
            while waiting and waiting[0][1] <= place:
                wanted_bytes += waiting.popleft()[0].nbytes
            record = records[place - first]
            needed = max(needed, record.before_bytes - base + record.made_bytes + wanted_bytes)
            if needed > most_bytes:
                break
        return Ahead(list(self._wanted), needed, now + window)

    def _counterparts(self, record: _Record, place: int, here: int) -> Iterator[Tracked]:
        """Yield the existing storages that the op predicted by `record` will use."""
        records, first = self._records, self._first
        shift = self.position - 1 - here
        for last in record.last_uses:
            # The op makes it, or an op before it that is still to come uses it first.
            if last is None or (earlier := place - last[0]) > here:
                continue
            storages = records[earlier + shift - first].storages if earlier + shift >= first else ()
            if last[1] < len(storages):
                yield storages[last[1]]

    def _forget(self, count: int) -> None:
        del self._records[:count]
        self._first += count
        self._places = {key: place for key, place in self._places.items() if place >= self._first}
        if len(self._numbers) > _MOST_RECORDS:
            kept = {record.number for record in self._records}
            self._numbers = {signature: number for signature, number in self._numbers.items() if number in kept}
            self._made_bytes = {number: nbytes for number, nbytes in self._made_bytes.items() if number in kept}


def _is_needed(tracked: Tracked) -> bool:
    """Whether a storage has to be copied in before it is used."""
    return tracked.is_out and not tracked.is_dead and tracked.copy is None
