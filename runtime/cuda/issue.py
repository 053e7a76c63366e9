"""Issues an inference to the three streams: by one thread in the order of its commands, or copies by another thread.

A wait issued before its record waits for nothing. Where two threads issue, each event has a mark, which delays a thread
until the other one has issued the record.
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
    """A lane's three streams, each under its name."""

    driver: Driver
    compute: Stream
    swap_in: Stream
    swap_out: Stream

    @staticmethod
    def of(driver: Driver) -> "Streams":
        return Streams(driver, driver.stream(), driver.stream(urgent=True), driver.stream())


class Feeder(ThreadPoolExecutor):
    """A thread that makes calls which need host work and do not raise, in order. It starts when it is first needed."""

    def __init__(self) -> None:
        super().__init__(1, "swap-in")

    def drain(self) -> None:
        """Return when every call has been made."""
        self.submit(int).result()


def issue_inference(
    streams: Streams, program: CudaProgram, frame: Frame, perform: Perform, feeder: Feeder | None = None
) -> None:
    """Issue inputs, commands and outputs. With a feeder, its thread issues the copies, in step with this one.

    Raises what a kernel or a copy raises, when everything that could be issued has been.
    """
    driver, commands = streams.driver, program.schedule.inference
    events = [driver.event() for _ in range(program.schedule.events)]
    with driver.tf32(program.tf32), torch.inference_mode():
        with driver.on(streams.compute):
            driver.launch(lambda: program.begin(frame))
        if feeder is not None:
            _issue_by_two(streams, commands, events, perform, feeder)
        else:
            _issue(streams, commands, events, perform)
        with driver.on(streams.compute):
            driver.launch(lambda: program.finish(frame))


def _issue_by_two(
    streams: Streams, commands: Commands, events: Sequence[Event], perform: Perform, feeder: Feeder
) -> None:
    marks = [threading.Event() for _ in events]
    errors: list[Exception] = []

    def attempt(command: Command) -> None:
        try:
            perform(command)
        except Exception as error:  # the lane goes on, because the other one waits for its records
            errors.append(error)

    feeder.submit(lambda: _issue(streams, commands, events, attempt, ["swap_in"], marks))
    try:
        _issue(streams, commands, events, perform, ["compute", "swap_out"], marks)
    finally:
        for mark in marks:  # after an error, the remaining records will not be made
            mark.set()
        feeder.drain()
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
    """Issue the commands of these lanes from this thread; with `marks`, while another thread issues the others."""
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
