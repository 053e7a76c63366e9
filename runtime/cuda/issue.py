"""Issues an inference to the three streams, from one thread, or with the copies in a second thread.

A wait issued before its event's record waits for nothing. With two threads, each event has a mark: a thread blocks on
it until the other one has issued the record.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import torch

from cohabit.planner.plan import Lane
from cohabit.runtime.cuda.api import Driver, Event, Stream
from cohabit.runtime.cuda.commands import LANES, Command, Commands
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.slots import Frame

Perform = Callable[[Command], None]
"""Issues a command other than `record` and `wait` to the current stream."""


@dataclass(frozen=True, slots=True)
class Streams:
    """A compute lane's three streams; the fields have the names of the plan's lanes."""

    driver: Driver
    compute: Stream
    swap_in: Stream
    swap_out: Stream

    @staticmethod
    def of(driver: Driver) -> "Streams":
        return Streams(driver, driver.stream(), driver.stream(urgent=True), driver.stream())


class IssueThread(ThreadPoolExecutor):
    """Thread that issues copies which need host work, in order; calls must not raise. Started on first use."""

    def __init__(self) -> None:
        super().__init__(1, "swap-in")

    def drain(self) -> None:
        """Wait until every submitted call has returned."""
        self.submit(int).result()


def issue_inference(
    streams: Streams, program: CudaProgram, frame: Frame, perform: Perform, issuing: IssueThread | None = None
) -> None:
    """Issue inputs, commands and outputs. With a issuing, its thread issues the copies.

    Raises the error of a kernel or copy. With a issuing, waits for its thread first; its copies raise DeviceError.
    """
    driver, commands = streams.driver, program.schedule.inference
    events = [driver.event() for _ in range(program.schedule.events)]
    with driver.tf32(program.tf32), torch.inference_mode():
        with driver.on(streams.compute):
            driver.launch(lambda: program.begin(frame))
        if issuing is not None:
            _issue_by_two(streams, commands, events, perform, issuing)
        else:
            _issue(streams, commands, events, perform)
        with driver.on(streams.compute):
            driver.launch(lambda: program.finish(frame))


def _issue_by_two(
    streams: Streams, commands: Commands, events: Sequence[Event], perform: Perform, issuing: IssueThread
) -> None:
    marks = [threading.Event() for _ in events]
    errors: list[Exception] = []

    def attempt(command: Command) -> None:
        try:
            perform(command)
        except Exception as error:  # the lane goes on, because the other thread waits for its records
            errors.append(error)

    issuing.submit(lambda: _issue(streams, commands, events, attempt, ["swap_in"], marks))
    try:
        _issue(streams, commands, events, perform, ["compute", "swap_out"], marks)
    finally:
        for mark in marks:  # after an error, the remaining records are not issued
            mark.set()
        issuing.drain()
    if errors:
        raise DeviceError(f"a copy from the store failed: {errors[0]}") from errors[0]


def _issue(
    streams: Streams,
    commands: Commands,
    events: Sequence[Event],
    perform: Perform,
    lanes: Sequence[Lane] = LANES,
    marks: Sequence[threading.Event] | None = None,
) -> None:
    """Issue the commands of these lanes. With `marks`, another thread issues the other lanes meanwhile."""
    driver = streams.driver
    for lane, part in groupby((c for c in commands if c.lane in lanes), key=lambda c: c.lane):
        with driver.on(getattr(streams, lane)):
            for command in part:
                match command.verb:
                    case "record":
                        driver.record(events[command.index])
                        if marks is not None:
                            marks[command.index].set()
                    case "wait":
                        if marks is not None:
                            marks[command.index].wait()
                        driver.wait(events[command.index])
                    case _:
                        perform(command)
