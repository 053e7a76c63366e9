"""Who has which bytes of a region that models share: parameters come when needed, the least recently used leave.

Nothing is copied here: a visit says what has to be, and what each copy must wait for.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planner.errors import format_bytes
from planner.free_list import FreeList
from runtime.errors import MemoryExceeded

PLACES_REMEMBERED = 8
"""Of each model: what was prepared for a place is used again if the model comes back there."""

Keeps = Literal["one", "models", "tensors"]
"""What stays for later: the model that ran last; whole models, as many as fit; parameters, whosever they are."""


@dataclass(frozen=True, slots=True)
class Uses:
    """A model's parameters in the order in which its compute steps read them."""

    model: str
    nbytes: Mapping[int, int]
    by_step: tuple[tuple[int, ...], ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())

    @property
    def most_bytes(self) -> int:
        """What a step needs at once."""
        return max((sum(self.nbytes[s] for s in step) for step in self.by_step), default=0)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A parameter to be copied in for compute step `needed_by`, once `behind` of the run's compute steps have ended."""

    segment: int
    offset: int
    needed_by: int
    behind: int


@dataclass(frozen=True, slots=True)
class Visit:
    """One run of a model: where parameters are that are there when it begins, and what comes while it runs."""

    places: tuple[tuple[int, int], ...]
    """Pairs of parameter and offset."""
    fetches: tuple[Fetch, ...]


Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a whole model was."""

    offsets: Mapping[int, int]
    runs: tuple[tuple[int, int], ...]
    """The same bytes in as few pieces as possible: offset and size."""


@dataclass(slots=True)
class _Run:
    """What a visit knows so far."""

    uses: Uses
    read: dict[int, int] = field(default_factory=dict)
    """The last compute step so far that has read a parameter."""
    left: list[tuple[int, int, int]] = field(default_factory=list)
    """Bytes that parameters of this run have left: start, end, compute steps that have read them."""

    def behind(self, offset: int, nbytes: int) -> int:
        """Compute steps that must have ended before the bytes may be overwritten."""
        return max(
            (steps for start, end, steps in self.left if start < offset + nbytes and offset < end), default=0
        )


class Region:
    """Bytes from `offset` on. Not thread-safe."""

    def __init__(self, offset: int, nbytes: int, keeps: Keeps, *, whole: bool) -> None:
        """With `whole`, models must fit as they are; otherwise what a step needs must."""
        self.offset = offset
        self.nbytes = nbytes
        self._keeps = keeps
        self._whole = whole
        self._free = FreeList(offset, nbytes)
        self._earlier: dict[str, deque[_Place]] = {}
        """Where whole models were last."""
        self._held: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        """Offset and bytes of what is there, least recently used first."""

    @property
    def held(self) -> Mapping[Key, tuple[int, int]]:
        return self._held

    def require(self, uses: Uses) -> None:
        """Raise MemoryExceeded for a model that can never run here."""
        needed = uses.total_bytes if self._whole else uses.most_bytes
        if needed > self.nbytes:
            what = "its parameters" if self._whole else "the parameters of one of its ops"
            raise MemoryExceeded(
                f"{uses.model}: {what} take {format_bytes(needed)}, the region that models share has"
                f" {format_bytes(self.nbytes)}; raise the memory"
            )

    def visit(self, uses: Uses, *, prefetch: bool = True) -> Visit:
        """Decide what a run copies. Without `prefetch` each parameter comes when its step is next.

        From then on the region holds what it does when the run has ended. Raises MemoryExceeded.
        """
        self.require(uses)
        offsets: Mapping[int, int] = {}
        if self._keeps == "one":
            self._leave_to(uses)
        elif self._keeps == "models" and any((uses.model, s) not in self._held for s in uses.nbytes):
            self.forget(uses.model)
            offsets = self._room_for(uses)
        return self._walk(uses, offsets, prefetch)

    def forget(self, model: str) -> None:
        """Hear that a model's parameters are not there: a copy has failed."""
        for key in [key for key in self._held if key[0] == model]:
            self._drop(key)

    def _leave_to(self, uses: Uses) -> None:
        """Empty the region, unless the whole of this model may be there."""
        stays = uses.total_bytes <= self.nbytes
        for key in [key for key in self._held if not stays or key[0] != uses.model]:
            self._drop(key)

    def _room_for(self, uses: Uses) -> Mapping[int, int]:
        """Let the least recently used models leave until this one fits: where it was, in one piece, or in several."""
        earlier = self._earlier.setdefault(uses.model, deque(maxlen=PLACES_REMEMBERED))
        while (place := self._place_among(earlier) or self._new_place(uses)) is None:
            self.forget(next(iter(self._held))[0])
        if place in earlier:
            earlier.remove(place)
        earlier.appendleft(place)
        return place.offsets

    def _place_among(self, places: Iterable[_Place]) -> _Place | None:
        return next((p for p in places if all(self._free.has(*run) for run in p.runs)), None)

    def _new_place(self, uses: Uses) -> _Place | None:
        offsets = _in_one_piece(self._free.copy(), uses)
        if offsets is None:
            offsets = _in_pieces(self._free.copy(), uses)
        return None if offsets is None else _Place(offsets, _runs(offsets, uses.nbytes))

    def _walk(self, uses: Uses, offsets: Mapping[int, int], prefetch: bool) -> Visit:
        run = _Run(uses)
        places: dict[int, int] = {}
        fetches: list[Fetch] = []
        come: set[int] = set()
        for step, segments in enumerate(uses.by_step):
            missing = []
            for segment in segments:
                key = (uses.model, segment)
                if key in self._held:
                    self._held.move_to_end(key)
                    if segment not in come:
                        places.setdefault(segment, self._held[key][0])
                else:
                    missing.append(segment)
            for segment, offset in self._bring(run, segments, missing, offsets):
                behind = max(run.behind(offset, uses.nbytes[segment]), 0 if prefetch else step)
                fetches.append(Fetch(segment, offset, step, behind))
                come.add(segment)
            run.read |= dict.fromkeys(segments, step)
        return Visit(tuple(sorted(places.items())), tuple(fetches))

    def _bring(
        self, run: _Run, needed: Sequence[int], missing: Sequence[int], offsets: Mapping[int, int]
    ) -> list[tuple[int, int]]:
        """Find places for what a step lacks, where `offsets` has none."""
        brought: list[tuple[int, int]] = []
        for segment in missing:
            offset = self._place(run, segment, needed, offsets.get(segment))
            if offset is None:  # what the step has already is in the way: everything of it comes anew, in one piece
                for own in needed:
                    self._drop((run.uses.model, own), run)
                return [(s, self._certain(run, s, needed)) for s in needed]
            brought.append((segment, offset))
        return brought

    def _certain(self, run: _Run, segment: int, needed: Sequence[int]) -> int:
        offset = self._place(run, segment, needed, None)
        assert offset is not None, "a step that needs more than the region has was refused"
        return offset

    def _place(self, run: _Run, segment: int, needed: Sequence[int], offset: int | None) -> int | None:
        """Take bytes for a parameter, of others if need be; None if only what the step itself needs is left."""
        nbytes = run.uses.nbytes[segment]
        if offset is not None:
            self._free.take_at(offset, nbytes)
        else:
            own = {(run.uses.model, s) for s in needed}
            while (offset := self._free.take(nbytes)) is None:
                victim = next((key for key in self._held if key not in own), None)
                if victim is None:
                    return None
                self._drop(victim, run)
        self._held[run.uses.model, segment] = (offset, nbytes)
        return offset

    def _drop(self, key: Key, run: _Run | None = None) -> None:
        if key not in self._held:
            return
        offset, nbytes = self._held.pop(key)
        self._free.release(offset, nbytes)
        if run is not None and key[0] == run.uses.model and key[1] in run.read:
            run.left.append((offset, offset + nbytes, run.read[key[1]] + 1))


def _runs(offsets: Mapping[int, int], nbytes: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for segment, offset in sorted(offsets.items(), key=lambda item: item[1]):
        if runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + nbytes[segment])
        elif nbytes[segment]:
            runs.append((offset, nbytes[segment]))
    return tuple(runs)


def _in_one_piece(free: FreeList, uses: Uses) -> dict[int, int] | None:
    offset = free.take(uses.total_bytes)
    if offset is None:
        return None
    offsets = {}
    for segment, nbytes in uses.nbytes.items():
        offsets[segment] = offset
        offset += nbytes
    return offsets


def _in_pieces(free: FreeList, uses: Uses) -> dict[int, int] | None:
    offsets: dict[int, int] = {}
    for segment, nbytes in uses.nbytes.items():
        offset = free.take(nbytes)
        if offset is None:
            return None
        offsets[segment] = offset
    return offsets
