"""What a loop will do next: what it did when it last was at this place.

A loop repeats itself from step to step, and within a step from layer to layer. So a pointer follows the recorded ops at
the place where this sequence of ops was seen before. A storage's next use is as far away as its counterpart's was
there. Nothing of it has to be right: a wrong guess costs a copy.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cohabit.runtime.training.residency import NEVER, Tracked

Signature = tuple[Hashable, ...]
"""An op, and the sizes and integers among its arguments."""

_MATCHED: Final = 6
"""Ops that must agree for a place to be found again."""
_MOST_RECORDS: Final = 1 << 15


@dataclass(slots=True)
class _Record:
    """An op that ran. `next_uses` and `last_uses` are distances in ops, 0 and None where there is none."""

    signature: Signature
    storages: Sequence[Tracked]
    """Those that it read or wrote, then those that it made."""
    made_bytes: int
    freed_bytes: int = 0
    """Of storages that died before the next op."""
    next_uses: list[int] = field(default_factory=list)
    last_uses: list[tuple[int, int] | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the next ops need."""

    wanted: Sequence[Tracked]
    """Storages that are out, in the order of need."""
    needed_bytes: int
    """The most that these and the ops' results take at a time, beyond what is there now."""
    position: int
    """How far this looks."""


class History:
    """Records ops, and predicts from them. The caller holds a lock around every call."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._first = 0
        """The position of the first record that is kept."""
        self._place: int | None = None
        """Where this sequence was seen before: the record that is like the op that runs."""
        self._recent: Signature = ()
        self._places: dict[int, int] = {}
        """The last position after each sequence of signatures, by its hash."""
        self._made_bytes: dict[Signature, int] = {}

    @property
    def position(self) -> int:
        """Number of ops so far."""
        return self._first + len(self._records)

    def made_bytes(self, signature: Signature) -> int | None:
        """Return the bytes that such an op has made before."""
        return self._made_bytes.get(signature)

    def begin(self, signature: Signature) -> None:
        """Find the place of an op that is about to run."""
        self._recent = (*self._recent, signature)[-_MATCHED:]
        key = hash(self._recent)
        place = None if self._place is None else self._place + 1
        if place is None or not self._first <= place < self.position or self._at(place).signature != signature:
            place = self._places.get(key)
        self._place = place if place is not None and place >= self._first else None
        self._places[key] = self.position

    def record(self, signature: Signature, used: Sequence[Tracked], made: Sequence[Tracked]) -> None:
        """Record the op that has run, and predict the next use of each of its storages."""
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
        """Note bytes that were freed since the last op."""
        if self._records:
            self._records[-1].freed_bytes += nbytes

    def ahead(self, window: int, most_bytes: int) -> Ahead | None:
        """Look ahead for as many ops, or until they need `most_bytes`. None where nothing is known."""
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
        """Yield what an op like this one will use, of the storages that exist already."""
        assert self._place is not None
        for last in record.last_uses:
            if last is None:
                continue
            distance, which = last
            earlier = place - distance
            if earlier > self._place:
                continue  # used first, or made, by an op that is still to come
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
