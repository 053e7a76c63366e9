"""The device's lanes of the last seconds, from traced executions."""

from collections import deque
from collections.abc import Iterator, Sequence

from cohabit.page.document import Box, LaneChart, LaneRow, Mark, Phrase, Words, seconds, size
from cohabit.server.ipc.model import lane_name
from cohabit.server.ipc.spans import DeviceSpan

LANES_S = 4.0
"""Seconds drawn."""
_ONE_COPY_S = 0.5e-3
"""Copies with a shorter pause between them are drawn as one."""
_MOST_BOXES = 2000
_MARKS = [
    Mark("compute", "execution of a model"),
    Mark("stall", "it waits for parameters"),
    Mark("swap_in", "copies into device memory"),
    Mark("swap_out", "copies out of it"),
]
_NAMES = {"compute": "compute", "swap_in": "swap in", "swap_out": "swap out"}

_Told = tuple[str | Phrase, ...]
_Part = tuple[float, float, str, int, str, _Told]
"""Start, end, kind of the box, compute lane, kind of the lane, and text."""


class LiveLanes:
    """Any thread may add; all else belongs to the event loop's thread."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._parts: deque[_Part] = deque(maxlen=_MOST_BOXES)

    def add(self, spans: Sequence[DeviceSpan]) -> None:
        """Record the spans of an execution."""
        self._parts.extend(list(_parts(spans)))

    def clear(self) -> None:
        self._parts.clear()

    def chart(self, now_s: float) -> LaneChart:
        """Draw the last seconds. An execution's ops are one box, and so are consecutive copies."""
        start_s = now_s - LANES_S
        while self._parts and self._parts[0][1] < start_s:
            self._parts.popleft()
        parts = list(self._parts)  # other threads may still add
        words = Words()
        rows: dict[tuple[int, str], list[Box]] = {(n, lane): [] for n in range(self._lanes) for lane in _NAMES}
        for from_s, to_s, kind, number, lane, told in parts:
            if to_s >= start_s:
                times = round(max(from_s, start_s) - now_s, 6), round(min(to_s, now_s) - now_s, 6)
                rows[number, lane].append(Box(*times, kind, words(*told)))
        drawn = [
            LaneRow(lane_name(_NAMES[lane], number, self._lanes).replace("_", " "), None, boxes)
            for (number, lane), boxes in rows.items()
            if boxes or lane == "compute"
        ]
        kinds = {part[2] for part in parts}
        return LaneChart(-LANES_S, 0.0, None, [mark for mark in _MARKS if mark.kind in kinds], drawn, words.all)


def _parts(spans: Sequence[DeviceSpan]) -> Iterator[_Part]:
    """Yield an execution from its first op to its last, its stalls, which are drawn on top, and its copies."""
    computed = [span for span in spans if span.lane == "compute"]
    if computed:
        stalls = [span for span in computed if span.stalled]
        stall_s = sum(stall.end_s - stall.start_s for stall in stalls)
        from_s, to_s = min(span.start_s for span in computed), max(span.end_s for span in computed)
        told: Phrase = (f"{len(computed) - len(stalls)} ops, stalled for ", seconds(stall_s))
        number = computed[0].compute_lane
        yield from_s, to_s, "compute", number, "compute", (computed[0].model, told)
        for stall in stalls:
            yield stall.start_s, stall.end_s, "stall", number, "compute", (stall.model, f"op {stall.name} waits")
    for lane in ("swap_in", "swap_out"):
        run: list[DeviceSpan] = []
        for span in sorted((span for span in spans if span.lane == lane), key=lambda span: span.start_s):
            if run and span.start_s - run[-1].end_s > _ONE_COPY_S:
                yield _copies(run)
                run = []
            run.append(span)
        if run:
            yield _copies(run)


def _copies(run: Sequence[DeviceSpan]) -> _Part:
    """Return consecutive copies as one part."""
    first = run[0]
    told: Phrase = (size(sum(span.nbytes for span in run)), f" in {len(run)} copies")
    return first.start_s, run[-1].end_s, first.lane, first.compute_lane, first.lane, (first.model, told)
