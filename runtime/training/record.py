"""What a step does, event by event: autograd packs or unpacks a storage; bytes of the other tensors are noted.

Steps repeat, so a recorded step tells at each event what memory the next ops need beside saved tensors, how high memory
will rise, and what is unpacked next. A step that departs from the record goes on with estimates.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

_WINDOW: Final = 8
"""Events whose needs are considered before something is loaded ahead."""
_UPCOMING: Final = 32
"""Events to look ahead for what is unpacked next."""


@dataclass(frozen=True, slots=True)
class Event:
    nbytes: int
    """Of the storage; negative when it is unpacked."""
    number: int
    """The storage's first pack, counted from the step's beginning."""
    saved_bytes: int
    """Of all saved storages, whether in memory or not."""


@dataclass(slots=True)
class RecordedStep:
    """A recorded step."""

    events: list[Event] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    """After each event, until the next: most bytes of tensors that neither autograd nor the optimizers hold."""
    ran: list[list[str]] = field(default_factory=list)
    """After each event, until the next: names of the ops; empty where ops are not seen."""

    @property
    def height(self) -> int:
        """Most bytes of saved and other tensors together, if all are in memory."""
        heights = (event.saved_bytes + beside for event, beside in zip(self.events, self.beside, strict=True))
        return max(heights, default=0)

    @property
    def floor(self) -> int:
        """Most bytes of what an event needs and of other tensors: all other saved tensors may be out."""
        needs = (abs(event.nbytes) + beside for event, beside in zip(self.events, self.beside, strict=True))
        return max(needs, default=0)

    @property
    def most_saved(self) -> int:
        return max((event.saved_bytes for event in self.events), default=0)

    @property
    def most_beside(self) -> int:
        return max(self.beside, default=0)


@dataclass(slots=True)
class ObservedStep:
    """What a step that follows the record shows once ops are no longer seen. Events are positions in the record."""

    starts_s: list[float] = field(default_factory=list)
    """When each event came, by a clock that stands still while the loop waits for copies; last, the step's end."""
    uses: dict[int, list[int]] = field(default_factory=dict)
    """Per storage: the events after which others than autograd hold it."""
    last: dict[int, int] = field(default_factory=dict)
    """Per storage that has died: the last event after which it was alive."""
    update_s: float = 0.0
    """Of the optimizers' steps, by the same clock."""

    @property
    def seconds(self) -> list[float]:
        """Duration of what runs between each event and the next."""
        return [max(end - start, 0.0) for start, end in pairwise(self.starts_s)]


@dataclass(frozen=True, slots=True)
class Advice:
    """When storages of a step leave and return, by a searcher's plan. It is about time only: no bound depends on it.

    Events are positions in the record. Storages have the number of their first pack.
    """

    searcher: str
    leaving: Mapping[int, Sequence[int]]
    """Storages that begin to leave at an event."""
    returning: Mapping[int, Sequence[int]]
    """Storages that begin to return at an event, in the order of the plan."""
    moved: frozenset[int]
    """All of them."""
    state_out_bytes: Mapping[int, int]
    """Bytes of each optimizer's state that are out between steps, by its position."""


class Record:
    """Follows a thread's steps along a recorded one. The caller holds a lock."""

    def __init__(self) -> None:
        self.step: RecordedStep | None = None
        """The recorded step; None until there is one."""
        self.sampled: Callable[[], int] | None = None
        """Returns the bytes of tensors in memory that are not autograd's, where no ops are seen."""
        self._new: RecordedStep | None = None
        """The step that is being recorded."""
        self.at = -1
        """The last event's position in the step."""
        self._looked = -1
        """The last event that was looked at ahead."""
        self._first_pack = 0
        """Number of the step's first pack."""
        self.has_departed = False
        self.departed_bytes = 0
        """Most bytes saved at a time by a step since it departed."""
        self._is_alike = True
        """Only sizes differ from the recorded ones so far."""
        self._ratio = 1.0
        """Bytes saved by this step over those of the recorded one, while it is alike."""
        self._is_updating = False
        self._least = 0
        self._expected: list[tuple[int, int]] = []
        """Bytes and number of each event."""
        self._peaks: list[int] = []
        self._soon: list[int] = []
        self.observed: ObservedStep | None = None
        """The step that is being observed."""

    # Recording

    def begin_recording(self) -> None:
        self._new = RecordedStep()

    @property
    def is_recording(self) -> bool:
        return self._new is not None

    def note(self, beside_bytes: int) -> None:
        """Note what tensors take beside saved ones and the optimizers' state."""
        if self._new is not None and self._new.events and not self._is_updating:
            self._new.beside[-1] = max(self._new.beside[-1], beside_bytes)

    def note_op(self, name: str) -> None:
        """Note that an op has run."""
        if self._new is not None and self._new.events and not self._is_updating:
            self._new.ran[-1].append(name)

    def updating(self, is_updating: bool) -> None:
        """An optimizer's step begins or ends: it allocates by parts, not as recorded."""
        self._is_updating = is_updating

    def finish_recording(self) -> RecordedStep:
        """End the recording: from now on, steps follow it."""
        assert self._new is not None
        step, self._new = self._new, None
        self.step = step
        heights = [event.saved_bytes + beside for event, beside in zip(step.events, step.beside, strict=True)]
        self._least = min(step.beside, default=0)
        self._expected = [(event.nbytes, event.number) for event in step.events]
        self._peaks = [0] * len(heights)
        self._soon = [0] * len(heights)
        highest = 0
        for index in reversed(range(len(heights))):
            highest = self._peaks[index] = max(highest, heights[index])
            self._soon[index] = max(step.beside[index : index + _WINDOW])
        return step

    # Following

    def event(self, nbytes: int, first_pack: int, saved_bytes: int) -> None:
        """Autograd packs a storage, or unpacks one (negative `nbytes`)."""
        at = self.at = self.at + 1
        number = first_pack - self._first_pack
        if self._new is not None:
            self._record_event(Event(nbytes, number, saved_bytes))
        if self.step is None:
            return
        if self.has_departed:
            self.departed_bytes = max(self.departed_bytes, saved_bytes)
        if at >= len(self._expected):
            self.has_departed, self._is_alike = True, False
        elif self._expected[at] != (nbytes, number):
            self.has_departed = True
            expected_bytes, expected_number = self._expected[at]
            if expected_bytes * nbytes > 0 and expected_number == number:
                # One storage may be of another kind than the recorded one; all together say how much larger this step is.
                self._ratio = max(self._ratio, saved_bytes / self.step.events[at].saved_bytes)
            else:
                self._is_alike = False

    def _record_event(self, event: Event) -> None:
        assert self._new is not None
        self._new.events.append(event)
        self._new.beside.append(0)
        self._new.ran.append([])
        if self.sampled is not None:
            beside = self._new.beside[-1] = self.sampled()
            if len(self._new.beside) > 1:  # what was allocated since
                self._new.beside[-2] = max(self._new.beside[-2], beside)

    @property
    def is_followed(self) -> bool:
        """Whether the step follows the recorded one so far."""
        return self.step is not None and not self.has_departed

    def number_of(self, first_pack: int) -> int:
        """Return a storage's number in the step; negative for one of an earlier step."""
        return first_pack - self._first_pack

    def first_pack_of(self, number: int) -> int:
        return self._first_pack + number

    def finish_observing(self) -> ObservedStep | None:
        """Return the step that was observed; None if it was not, or has departed: the next one is observed then."""
        observed, self.observed = self.observed, None
        if observed is None:
            return None
        if self.step is not None and self.is_followed and len(observed.starts_s) == len(self.step.events) + 1:
            return observed
        self.observed = ObservedStep()
        return None

    def end_step(self, packs: int) -> None:
        """The step ends; `packs` is the number of the next one's first pack."""
        self.at, self._looked, self._first_pack = -1, -1, packs
        self.has_departed, self.departed_bytes, self._is_alike, self._ratio = False, 0, True, 1.0

    def beside(self) -> tuple[int, int]:
        """Return the bytes beside saved tensors until the next event, and the highest point of memory ahead."""
        step, at = self.step, self.at
        if step is not None and at >= 0 and not self.has_departed:
            return step.beside[at], self._peaks[at]
        if step is None or not step.events:
            now = 0 if self.sampled is None else self.sampled()
            return now, now
        index = min(max(self.at, 0), len(step.events) - 1)
        if not self.has_departed:
            return step.beside[index], self._peaks[index]
        if self._is_alike:
            return self._scaled(step.beside[index]), self._scaled(self._peaks[index])
        return self._scaled(step.most_beside), self._scaled(self._peaks[index])

    def soon_beside(self) -> int:
        """Return the most bytes beside saved tensors within the next events."""
        step = self.step
        if step is None or not step.events:
            return self.beside()[0]
        if not self._is_alike:
            return self._scaled(step.most_beside)
        return self._scaled(self._soon[min(max(self.at, 0), len(step.events) - 1)])

    def _scaled(self, nbytes: int) -> int:
        """Scale what grows with the batch: all but the least that there was at any time."""
        return self._least + int((nbytes - self._least) * self._ratio)

    def upcoming(self, first_pack: int) -> Iterator[int]:
        """Yield storages in the order in which they are unpacked after this one, by their first pack.

        An event is looked at once: the next call begins with the storage at which this one ends.
        """
        step = self.step
        if step is not None and self._is_alike:
            index = max(self.at, self._looked) + 1
            for event in step.events[index : self.at + 1 + _UPCOMING]:
                if event.nbytes < 0:
                    yield self._first_pack + event.number
                self._looked = index
                index += 1
        else:
            yield from range(first_pack - 1, first_pack - 1 - _UPCOMING, -1)
