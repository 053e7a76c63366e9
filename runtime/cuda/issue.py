"""Issues commands to the three streams: by one thread in their order, or the swap-in stream's by another.

A wait issued before its record waits for nothing. Where two threads issue, `Marks` delays a thread until
the other one has issued the record.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.plan import Lane
from runtime.cuda.api import Driver, Event, Stream
from runtime.cuda.schedule import LANES, Commands, Record, Wait, Work

Perform = Callable[[Work], None]


@dataclass(frozen=True, slots=True)
class Streams:
    """The device's three streams."""

    driver: Driver
    compute: Stream
    swap_in: Stream
    swap_out: Stream

    @staticmethod
    def of(driver: Driver) -> "Streams":
        return Streams(driver, driver.stream(), driver.stream(), driver.stream())

    def stream(self, lane: Lane) -> Stream:
        return {"compute": self.compute, "swap_in": self.swap_in, "swap_out": self.swap_out}[lane]


class Marks:
    """Which events of one issue have been recorded."""

    def __init__(self) -> None:
        self._recorded: set[int] = set()
        self._changed = threading.Condition()
        self._abandoned = False

    def mark(self, event: int) -> None:
        with self._changed:
            self._recorded.add(event)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Release all waits, because the remaining records will not be made."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def until(self, event: int) -> None:
        """Return when the event has been recorded, or never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or event in self._recorded)


def issue(
    streams: Streams,
    commands: Commands,
    events: Sequence[Event],
    perform: Perform,
    lanes: Sequence[Lane] = LANES,
    marks: Marks | None = None,
) -> None:
    """Issue the commands of these lanes from this thread; with `marks`, while another thread issues the others."""
    driver = streams.driver
    for lane, part in groupby((i for i in commands.issues if i.lane in lanes), key=lambda i: i.lane):
        with driver.on(streams.stream(lane)):
            for item in part:
                match item.command:
                    case Record(event):
                        driver.record(events[event])
                        if marks is not None:
                            marks.mark(event)
                    case Wait(event):
                        if marks is not None:
                            marks.until(event)
                        driver.wait(events[event])
                    case command:
                        perform(command)
