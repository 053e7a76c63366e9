"""What the page draws, as one JSON document: a plan, or a server at one moment. `view.js` reads nothing else.

Numbers stand with their unit, and the script writes them; all other text is written here.
"""

from typing import Literal

import msgspec

Unit = Literal["s", "bytes", "bytes/s", "1/s", "share", "count", "times"]


class Quantity(msgspec.Struct, frozen=True, array_like=True):
    """A number to be written in its unit; None is one that is not known."""

    value: float | None
    unit: Unit


Phrase = tuple[str | Quantity, ...]
"""Text with numbers in it."""
Cell = str | Quantity | Phrase


class Figure(msgspec.Struct, frozen=True):
    """One of the numbers at the top."""

    name: str
    value: Quantity
    note: Phrase
    help: str
    """What the number means, in a sentence."""
    is_followed: bool = False
    """Whether the page draws its course over the last minutes."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A step on its lane, or bytes in use; `group` is common to boxes that are highlighted together."""

    start_s: float
    end_s: float
    kind: str
    words: tuple[int, ...]
    """Lines of the text for it, as indices into the document's words."""
    group: int | None = None
    low: int = 0
    """In a memory map, its first byte, and the first one after it."""
    high: int = 0


class LaneRow(msgspec.Struct, frozen=True):
    """A lane and its steps. Stalls are boxes of the lane that waits."""

    name: str
    busy: float | None
    """Share of the time that is drawn; None for a lane that is not used."""
    boxes: list[Box]


class Mark(msgspec.Struct, frozen=True):
    """A kind of box, in the legend."""

    kind: str
    name: str


class MemoryRegion(msgspec.Struct, frozen=True):
    name: str
    offset: int
    nbytes: int


class MemoryOverTime(msgspec.Struct, frozen=True):
    nbytes: int
    regions: list[MemoryRegion]
    marks: list[Mark]
    use: list[tuple[float, list[int]]]
    """From each time on, the bytes in use of each of the marks."""
    boxes: list[Box]
    summary: Phrase


class LaneChart(msgspec.Struct, frozen=True):
    """Lanes over one time axis, from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    answer_s: float | None
    """When the outputs are complete, if steps end after that."""
    marks: list[Mark]
    lanes: list[LaneRow]
    words: list[str | Phrase]
    memory: MemoryOverTime | None = None


class FactTable(msgspec.Struct, frozen=True):
    title: str
    about: str
    columns: list[str]
    rows: list[list[Cell]]
    empty: str = ""
    """What is said instead of a table without rows."""
    more: int = 0
    """Rows that were left out."""


class PlanDocument(msgspec.Struct, frozen=True, tag_field="kind", tag="plan"):
    """A plan: what it comes to, its lanes and its memory over time."""

    title: str
    subtitle: Phrase
    figures: list[Figure]
    chart: LaneChart
    tables: list[FactTable]


class ArenaPart(msgspec.Struct, frozen=True):
    """A range of the device's memory."""

    use: Literal["workspace", "partition", "shared", "free"]
    name: str
    """The model, for a partition; else what the range is."""
    offset: int
    nbytes: int
    resident_bytes: int = 0
    words: Phrase = ()


State = Literal["ready", "loading", "unloading", "unavailable", "not loaded"]


class ModelRow(msgspec.Struct, frozen=True):
    """A version of a model, with what it did in the last seconds. None is what is not known, or did not happen."""

    name: str
    version: int | None
    state: State
    reason: str
    answered: Quantity
    waiting: Quantity
    refused: Quantity
    failed: Quantity
    p50: Quantity
    p99: Quantity
    predicted: Quantity
    """Of the smallest bucket."""
    measured: Quantity
    """Over predicted."""
    resident: Quantity
    parameters: Quantity
    copied: Quantity
    copied_each: Quantity
    """Bytes copied per execution."""


class LiveDocument(msgspec.Struct, frozen=True, tag_field="kind", tag="live"):
    """A server at one moment."""

    version: str
    trouble: str | None
    """Why requests are not executed at present, or not all models are served."""
    down: bool
    """Whether no request is executed at present."""
    restarts: int
    layout: str
    uptime: Quantity
    window_s: float
    """How far back rates and latencies reach."""
    figures: list[Figure]
    arena: list[ArenaPart]
    models: list[ModelRow]
    control: bool
    """Whether models can be loaded and unloaded."""
    tracing: str
    """What of the lanes is drawn, or what to do to see them."""
    chart: LaneChart | None


class NoDocument(msgspec.Struct, frozen=True, tag_field="kind", tag="live"):
    """A live page before its first document."""


def quantity(value: float | None, unit: Unit) -> Quantity:
    """Return a number with nine digits, which is all that the page can show."""
    return Quantity(None if value is None else float(f"{value:.9g}"), unit)


def seconds(value: float | None) -> Quantity:
    return quantity(value, "s")


def size(value: float | None) -> Quantity:
    return quantity(value, "bytes")


class Words:
    """The texts of boxes, each of which is sent once."""

    def __init__(self) -> None:
        self.all: list[str | Phrase] = []
        self._index: dict[str | Phrase, int] = {}

    def __call__(self, *lines: str | Phrase) -> tuple[int, ...]:
        """Return the indices of some lines."""
        return tuple(self._at(line) for line in lines)

    def _at(self, line: str | Phrase) -> int:
        if (at := self._index.get(line)) is None:
            at = self._index[line] = len(self.all)
            self.all.append(line)
        return at
