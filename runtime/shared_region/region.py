"""Bookkeeping of a region that models share: the parameters in it, and the copies of each run.

Parameters are fetched when needed, and the least recently used ones are evicted. Nothing is copied here: a `FetchPlan`
has the copies, and the steps that each waits for.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from cohabit.planner.errors import format_bytes
from cohabit.planner.free_list import FreeList
from cohabit.runtime.errors import MemoryExceeded

PLACEMENTS_KEPT = 8
"""Placements remembered per model: a program prepared for one is reused if the model returns to it."""

Keeps = Literal["one", "models", "tensors"]
"""What stays between runs: the model that ran last; the whole models that fit; or the parameters that fit."""


@dataclass(frozen=True, slots=True)
class ParameterUses:
    """A model's parameters in the order in which its compute steps read them."""

    model: str
    nbytes: Mapping[int, int]
    by_step: tuple[tuple[int, ...], ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())

    @property
    def most_bytes(self) -> int:
        """Largest number of bytes that one step needs."""
        return max((sum(self.nbytes[s] for s in step) for step in self.by_step), default=0)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A copy of a parameter for compute step `needed_by`, after `computes_before` compute steps of the run."""

    segment: int
    offset: int
    needed_by: int
    computes_before: int


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """One run of a model: parameters in the region at its start, and parameters fetched during it."""

    present: tuple[tuple[int, int], ...]
    """(parameter, offset) pairs."""
    fetches: tuple[Fetch, ...]


Key = tuple[str, int]
"""Model and parameter."""


@dataclass(slots=True)
class _RunState:
    """State of a run during planning."""

    uses: ParameterUses
    last_reads: dict[int, int] = field(default_factory=dict)
    """Last compute step so far that reads each parameter."""
    evicted: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, compute steps) of bytes evicted from this run's own parameters; these steps must finish first."""

    def free_after(self, offset: int, nbytes: int) -> int:
        """Return the number of compute steps that must finish before the bytes may be overwritten."""
        return max(
            (steps for start, end, steps in self.evicted if start < offset + nbytes and offset < end), default=0
        )


class ParameterRegion:
    """A range of the arena that starts at `offset`. Not thread-safe."""

    def __init__(self, offset: int, nbytes: int, keeps: Keeps, *, whole: bool) -> None:
        """With `whole`, a model must fit as a whole; otherwise the parameters of each step must."""
        self.offset = offset
        self.nbytes = nbytes
        self._keeps = keeps
        self._whole = whole
        self._free = FreeList(offset, nbytes)
        self._earlier: dict[str, deque[dict[int, int]]] = {}
        """Offsets of the parameters of whole models, newest first."""
        self.held: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        """(offset, size) of the parameters in the region, least recently used first."""

    def require(self, uses: ParameterUses) -> None:
        """Raise MemoryExceeded for a model that can never run here."""
        needed = uses.total_bytes if self._whole else uses.most_bytes
        if needed > self.nbytes:
            what = "its parameters" if self._whole else "the parameters of one of its ops"
            raise MemoryExceeded(
                f"{uses.model}: {what} take {format_bytes(needed)}, the region that models share has"
                f" {format_bytes(self.nbytes)}; raise the memory"
            )

    def plan_run(self, uses: ParameterUses, *, prefetch: bool = True) -> FetchPlan:
        """Plan the copies of a run. Without `prefetch`, each copy waits until its step is next.

        Afterwards the region's state is that of the end of the run. Raises MemoryExceeded.
        """
        self.require(uses)
        offsets: Mapping[int, int] = {}
        if self._keeps == "one":
            self._evict_others(uses)
        elif self._keeps == "models" and any((uses.model, s) not in self.held for s in uses.nbytes):
            self.forget(uses.model)
            offsets = self._place_model(uses)
        return self._walk(uses, offsets, prefetch)

    def plan_ahead(self, uses: ParameterUses, running: str) -> FetchPlan | None:
        """Plan the copies of a whole model while another one runs.

        None if nothing is missing, or if the copies would need the running model's bytes.
        """
        if all((uses.model, segment) in self.held for segment in uses.nbytes):
            return None
        free = self._free.copy()
        for (model, _), (offset, nbytes) in self.held.items():
            if model != running:
                free.release(offset, nbytes)
        if self._free_placement(free, uses) is None:
            return None
        return self.plan_run(uses)  # the running model is the most recently used one, so it is not evicted

    def holds(self, model: str) -> bool:
        """Whether any of a model's parameters are in the region."""
        return any(name == model for name, _ in self.held)

    def forget(self, model: str) -> None:
        """Evict a model's parameters, such as after a failed copy."""
        for key in [key for key in self.held if key[0] == model]:
            self._evict(key)

    def _evict_others(self, uses: ParameterUses) -> None:
        """Empty the region, except for this model if all of it fits."""
        stays = uses.total_bytes <= self.nbytes
        for key in [key for key in self.held if not stays or key[0] != uses.model]:
            self._evict(key)

    def _place_model(self, uses: ParameterUses) -> Mapping[int, int]:
        """Evict least recently used models until this one fits: at an earlier placement, in one piece, or in pieces."""
        earlier = self._earlier.setdefault(uses.model, deque(maxlen=PLACEMENTS_KEPT))
        while (offsets := self._free_placement(self._free, uses)) is None:
            self.forget(next(iter(self.held))[0])
        if offsets in earlier:
            earlier.remove(offsets)
        earlier.appendleft(offsets)
        return offsets

    def _free_placement(self, free: FreeList, uses: ParameterUses) -> dict[int, int] | None:
        for offsets in self._earlier.get(uses.model, ()):
            if all(free.has(offsets[s], nbytes) for s, nbytes in uses.nbytes.items() if nbytes):
                return offsets
        return _in_one_piece(free.copy(), uses) or _in_pieces(free.copy(), uses)

    def _walk(self, uses: ParameterUses, offsets: Mapping[int, int], prefetch: bool) -> FetchPlan:
        run = _RunState(uses)
        present: dict[int, int] = {}
        fetches: list[Fetch] = []
        fetched: set[int] = set()
        for step, segments in enumerate(uses.by_step):
            missing = []
            for segment in segments:
                key = (uses.model, segment)
                if key in self.held:
                    self.held.move_to_end(key)
                    if segment not in fetched:
                        present.setdefault(segment, self.held[key][0])
                else:
                    missing.append(segment)
            for segment, offset in self._place_missing(run, segments, missing, offsets):
                free_after = run.free_after(offset, uses.nbytes[segment])
                fetches.append(Fetch(segment, offset, step, max(free_after, 0 if prefetch else step)))
                fetched.add(segment)
            run.last_reads |= dict.fromkeys(segments, step)
        return FetchPlan(tuple(sorted(present.items())), tuple(fetches))

    def _place_missing(
        self, run: _RunState, needed: Sequence[int], missing: Sequence[int], offsets: Mapping[int, int]
    ) -> list[tuple[int, int]]:
        """Return (parameter, offset) for a step's missing parameters, at `offsets` or at the lowest free offset."""
        placed: list[tuple[int, int]] = []
        for segment in missing:
            offset = self._place(run, segment, needed, offsets.get(segment))
            if offset is None:  # its own parameters fragment the region: fetch all of them again
                for own in needed:
                    self._evict((run.uses.model, own), run)
                return [(s, self._certain(run, s, needed)) for s in needed]
            placed.append((segment, offset))
        return placed

    def _certain(self, run: _RunState, segment: int, needed: Sequence[int]) -> int:
        offset = self._place(run, segment, needed, None)
        assert offset is not None, "a step that needs more than the region has was refused"
        return offset

    def _place(self, run: _RunState, segment: int, needed: Sequence[int], offset: int | None) -> int | None:
        """Allocate bytes for a parameter, evicting others if necessary; None if only the step's own are left."""
        nbytes = run.uses.nbytes[segment]
        if offset is not None:
            self._free.take_at(offset, nbytes)
        else:
            own = {(run.uses.model, s) for s in needed}
            while (offset := self._free.take(nbytes)) is None:
                victim = next((key for key in self.held if key not in own), None)
                if victim is None:
                    return None
                self._evict(victim, run)
        self.held[run.uses.model, segment] = (offset, nbytes)
        return offset

    def _evict(self, key: Key, run: _RunState | None = None) -> None:
        if key not in self.held:
            return
        offset, nbytes = self.held.pop(key)
        self._free.release(offset, nbytes)
        if run is not None and key[0] == run.uses.model and key[1] in run.last_reads:
            run.evicted.append((offset, offset + nbytes, run.last_reads[key[1]] + 1))


def _in_one_piece(free: FreeList, uses: ParameterUses) -> dict[int, int] | None:
    offset = free.take(uses.total_bytes)
    if offset is None:
        return None
    return dict(zip(uses.nbytes, accumulate(uses.nbytes.values(), initial=offset), strict=False))


def _in_pieces(free: FreeList, uses: ParameterUses) -> dict[int, int] | None:
    offsets: dict[int, int] = {}
    for segment, nbytes in uses.nbytes.items():
        offset = free.take(nbytes)
        if offset is None:
            return None
        offsets[segment] = offset
    return offsets
