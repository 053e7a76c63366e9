"""Content of the page as one JSON document: a report, or a server at one moment. `page.js` reads nothing else.

Numbers have units, and the script formats them; all other text is written here.
"""

from typing import Literal

import msgspec

Unit = Literal["s", "+s", "bytes", "bytes/s", "1/s", "share", "count", "times"]
"""`+s` is a difference in seconds, and has a sign."""


class Quantity(msgspec.Struct, frozen=True, array_like=True):
    """A number with its unit; None is unknown."""

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
    """Meaning of the number, in a sentence."""
    is_followed: bool = False
    """Whether the page draws its history over the last minutes."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A step on its lane, or bytes in use; boxes with the same `group` are highlighted together."""

    start_s: float
    end_s: float
    kind: str
    words: tuple[int, ...]
    """Lines of its text, as indices into the document's words."""
    group: int | None = None
    low: int = 0
    """In a memory map: its first byte, and the first byte after it."""
    high: int = 0


class LaneRow(msgspec.Struct, frozen=True):
    """A lane and its steps. Stalls are boxes of the waiting lane."""

    name: str
    busy: float | None
    """Busy fraction of the drawn time; None for an unused lane."""
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
    """Pairs of a time and the bytes in use from then on, one number per entry of `marks`."""
    boxes: list[Box]
    summary: Phrase


class LaneChart(msgspec.Struct, frozen=True):
    """Lanes over one time axis, from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    answer_s: float | None
    """Time at which the outputs are complete, if steps end after that."""
    marks: list[Mark]
    lanes: list[LaneRow]
    words: list[str | Phrase]
    memory: MemoryOverTime | None = None


class Lanes(msgspec.Struct, frozen=True, tag_field="kind", tag="lanes"):
    title: str
    about: str
    chart: LaneChart


class ChartAxis(msgspec.Struct, frozen=True):
    """Values beyond an axis are drawn at its end."""

    name: str
    """With the unit of its numbers."""
    scale: Literal["linear", "log", "nines"]
    """On `nines`, a share of 0.9, 0.99 and 0.999 have equal distances."""
    low: float
    high: float


class Line(msgspec.Struct, frozen=True):
    series: int
    """Index into the chart's `series`, which determines the line's colour."""
    points: list[tuple[float, float | None]]
    """None interrupts the line."""
    style: Literal["solid", "dashed", "steps"] = "solid"
    dots: bool = False


class Level(msgspec.Struct, frozen=True):
    """A value of the vertical axis to compare with."""

    value: float
    name: str


class LineChart(msgspec.Struct, frozen=True, tag_field="kind", tag="line_chart"):
    title: str
    about: str
    x: ChartAxis
    y: ChartAxis
    series: list[str]
    """Names in the legend, which a single series does not need."""
    lines: list[Line]
    level: Level | None = None


class FactTable(msgspec.Struct, frozen=True, tag_field="kind", tag="table"):
    title: str
    about: str
    columns: list[str]
    rows: list[list[Cell]]
    empty: str = ""
    """Text shown instead of a table without rows."""
    more: int = 0
    """Number of omitted rows."""


class Columns(msgspec.Struct, frozen=True, tag_field="kind", tag="columns"):
    """Sections side by side on a wide screen."""

    columns: "list[list[Section]]"


class Alternatives(msgspec.Struct, frozen=True, tag_field="kind", tag="alternatives"):
    """Sets of sections; the page shows the one that the reader chooses."""

    label: str
    names: list[str]
    sections: "list[list[Section]]"
    """A set for each name."""
    chosen: int


Section = Lanes | LineChart | FactTable | Columns | Alternatives


class ReportDocument(msgspec.Struct, frozen=True, tag_field="kind", tag="report"):
    """A finished result: a plan, a fit, or load tests."""

    title: str
    subtitle: Phrase
    sections: list[Section]
    figures: list[Figure] = []
    notices: list[Phrase] = []
    """What the reader must know before the numbers."""


class ArenaPart(msgspec.Struct, frozen=True):
    """A range of the device's memory."""

    use: Literal["workspace", "partition", "shared", "free"]
    name: str
    """The model for a partition; otherwise the use of the range."""
    offset: int
    nbytes: int
    resident_bytes: int = 0
    words: Phrase = ()


State = Literal["ready", "loading", "unloading", "unavailable", "not loaded"]


class StepPart(msgspec.Struct, frozen=True):
    """A step of an ensemble now, and in the last seconds."""

    model: str
    running: int
    """Requests of this ensemble that the step's model executes."""
    queued: int
    """Those that wait in its queue."""
    took: Quantity
    """Average of the latest requests, from the step's begin to its end."""


class ModelRow(msgspec.Struct, frozen=True):
    """A version of a model, with its activity in the last seconds. None is unknown, or did not happen."""

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
    """Relative to predicted."""
    resident: Quantity
    parameters: Quantity
    copied: Quantity
    copied_each: Quantity
    """Bytes copied per execution."""
    stages: list[list[StepPart]] = []
    """Steps of an ensemble, by the number of steps that they wait for."""


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
    """Seconds that rates and latencies cover."""
    figures: list[Figure]
    arena: list[ArenaPart]
    models: list[ModelRow]
    control: bool
    """Whether models can be loaded and unloaded."""
    tracing: str
    """Which requests the lanes show, or how to show them."""
    chart: LaneChart | None


class NoDocument(msgspec.Struct, frozen=True, tag_field="kind", tag="live"):
    """A live page before its first document."""


def quantity(value: float | None, unit: Unit) -> Quantity:
    """Return a number with nine digits; the page cannot show more."""
    return Quantity(None if value is None else float(f"{value:.9g}"), unit)


def seconds(value: float | None) -> Quantity:
    return quantity(value, "s")


def size(value: float | None) -> Quantity:
    return quantity(value, "bytes")


class Words:
    """The texts of boxes; each is sent once."""

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
