"""Predicts a loop's next ops from the last time it ran the same sequence of ops.

A loop repeats itself from step to step, and within a step from layer to layer. A pointer follows the recorded ops where
the current sequence occurred before. A storage's next use is predicted as far away as its counterpart's was there.
Predictions may be wrong: that costs only a copy.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cohabit.runtime.training.residency import NEVER, Tracked

Signature = tuple[Hashable, ...]
"""An op, and the sizes and integers among its arguments."""

_MATCHED: Final = 6
"""Number of last ops that must match a recorded sequence."""
_MOST_RECORDS: Final = 1 << 15


@dataclass(slots=True)
class _Record:
    """An op that ran. `next_uses` and `last_uses` are distances in ops per storage; 0 and None if there is none."""

    signature: Signature
    storages: Sequence[Tracked]
    """Storages read or written, then new ones."""
    made_bytes: int
    freed_bytes: int = 0
    """Bytes of storages that died before the next op."""
    next_uses: list[int] = field(default_factory=list)
    last_uses: list[tuple[int, int] | None] = field(default_factory=list)


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
        self._recent: Signature = ()
        self._places: dict[int, int] = {}
        """Last position of each sequence of `_MATCHED` signatures, by hash: that of its last op."""
        self._made_bytes: dict[Signature, int] = {}

    @property
    def position(self) -> int:
        """Number of ops so far."""
        return self._first + len(self._records)

    def made_bytes(self, signature: Signature) -> int | None:
        """Return the bytes of an earlier such op's results; None if there was none."""
        return self._made_bytes.get(signature)

    def begin(self, signature: Signature) -> None:
        """Find the record that matches an op about to run."""
        self._recent = (*self._recent, signature)[-_MATCHED:]
        key = hash(self._recent)
        place = None if self._place is None else self._place + 1
        if place is None or not self._first <= place < self.position or self._at(place).signature != signature:
            place = self._places.get(key)
        self._place = place if place is not None and place >= self._first else None
        self._places[key] = self.position

    def record(self, signature: Signature, used: Sequence[Tracked], made: Sequence[Tracked]) -> None:
        """Record an op that has run, and predict the next use of each of its storages."""
        now = self.position
        record = _Record(signature, [*used, *made], sum(tracked.nbytes for tracked in made))
        self._made_bytes[signature] = record.made_bytes
        like = None if self._place is None else self._at(self._place)
        for index, tracked in enumerate(record.storages):
            if tracked.last_use is None:
                record.last_uses.append(None)
            else:
                position, which = tracked.last_use
                record.last_uses.append((now - position, which))
                if position >= self._first:
                    self._at(position).next_uses[which] = now - position
            record.next_uses.append(0)
            tracked.last_use = (now, index)
            distance = like.next_uses[index] if like is not None and index < len(like.next_uses) else 0
            tracked.next_use = now + distance if distance else NEVER
        self._records.append(record)
        if len(self._records) > _MOST_RECORDS:
            self._forget(_MOST_RECORDS // 2)

    def died(self, nbytes: int) -> None:
        """Record bytes freed since the last op."""
        if self._records:
            self._records[-1].freed_bytes += nbytes

    def ahead(self, window: int, most_bytes: int) -> Ahead | None:
        """Look ahead `window` ops, or until they need `most_bytes`. Returns None if the sequence is new."""
        now = self.position - 1
        if self._place is None or not self._first <= self._place < now:
            return None
        shift = now - self._place
        wanted: dict[Tracked, None] = {}
        balance = needed = 0
        end = min(self._place + 1 + window, now + 1)
        for place in range(self._place + 1, end):
            record = self._at(place)
            for tracked in self._counterparts(record, place, shift):
                if tracked.is_out and not tracked.is_dead and tracked.copy is None and tracked not in wanted:
                    wanted[tracked] = None
                    tracked.next_use = place + shift
                    balance += tracked.nbytes
            balance += record.made_bytes
            needed = max(needed, balance)
            balance -= record.freed_bytes
            if needed > most_bytes:
                break
        return Ahead(list(wanted), needed, now + window)

    def _counterparts(self, record: _Record, place: int, shift: int) -> Iterator[Tracked]:
        """Yield the existing storages that the op predicted by `record` will use."""
        assert self._place is not None
        for last in record.last_uses:
            if last is None:
                continue
            distance, which = last
            earlier = place - distance
            if earlier > self._place:
                continue  # made, or used last, by an op that is still to come
            position = earlier + shift
            if self._first <= position < self.position:
                storages = self._at(position).storages
                if which < len(storages):
                    yield storages[which]

    def _at(self, position: int) -> _Record:
        return self._records[position - self._first]

    def _forget(self, count: int) -> None:
        del self._records[:count]
        self._first += count
        self._places = {key: place for key, place in self._places.items() if place >= self._first}
        if len(self._made_bytes) > _MOST_RECORDS:
            self._made_bytes.clear()
