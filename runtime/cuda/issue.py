"""Issues commands to the three streams: by one thread in their order, or the swap-in stream's by another.

A wait issued before its record waits for nothing. Where two threads issue, each event has a mark, which delays a thread
until the other one has issued the record.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from cohabit.planner.plan import Lane
from cohabit.runtime.cuda.api import Driver, Event, Stream
from cohabit.runtime.cuda.schedule import LANES, Commands, Record, Wait, Work

Perform = Callable[[Work], None]


@dataclass(frozen=True, slots=True)
class Streams:
    """The device's three streams, each under its lane's name."""

    driver: Driver
    compute: Stream
    swap_in: Stream
    swap_out: Stream

    @staticmethod
    def of(driver: Driver) -> "Streams":
        return Streams(driver, driver.stream(), driver.stream(), driver.stream())


def issue(
    streams: Streams,
    commands: Commands,
    events: Sequence[Event],
    perform: Perform,
    lanes: Sequence[Lane] = LANES,
    marks: Sequence[threading.Event] | None = None,
) -> None:
    """Issue the commands of these lanes from this thread; with `marks`, while another thread issues the others."""
    driver = streams.driver
    for lane, part in groupby((i for i in commands.issues if i.lane in lanes), key=lambda i: i.lane):
        with driver.on(getattr(streams, lane)):
            for item in part:
                match item.command:
                    case Record(event):
                        driver.record(events[event])
                        if marks is not None:
                            marks[event].set()
                    case Wait(event):
                        if marks is not None:
                            marks[event].wait()
                        driver.wait(events[event])
                    case command:
                        perform(command)
