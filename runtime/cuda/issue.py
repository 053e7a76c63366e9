"""Issues an inference to the three streams, from one thread, or from two: a second one for the swap-ins.

In CUDA, a wait issued before its event's record waits for nothing. With two threads, each CUDA event therefore has a
`threading.Event`, which is set once the record is issued. A thread blocks on it before it issues the wait.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import torch

from cohabit.planner.plan import Lane
from cohabit.runtime.cuda.commands import LANES, Command, Commands
from cohabit.runtime.cuda.driver import CudaDriver
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.slots import Frame

Perform = Callable[[Command], None]
"""Issues a command other than `record` and `wait` to the current stream."""


@dataclass(frozen=True, slots=True)
class Streams:
    """A compute lane's three streams; the fields have the names of the plan's lanes."""

    driver: CudaDriver
    compute: torch.cuda.Stream
    swap_in: torch.cuda.Stream
    swap_out: torch.cuda.Stream

    @staticmethod
    def of(driver: CudaDriver) -> "Streams":
        return Streams(driver, driver.stream(), driver.stream(urgent=True), driver.stream())

    def close(self) -> None:
        """Give the streams back. Their work must have ended."""
        self.driver.give_back(self.compute)
        self.driver.give_back(self.swap_in, urgent=True)
        self.driver.give_back(self.swap_out)


class IssueThread(ThreadPoolExecutor):
    """Thread that issues copies that need work on the host, in order. Calls must not raise. Started on first use."""

    def __init__(self) -> None:
        super().__init__(1, "swap-in")

    def drain(self) -> None:
        """Wait until every submitted call has returned."""
        self.submit(int).result()


def issue_inference(
    streams: Streams, program: CudaProgram, frame: Frame, perform: Perform, issue_thread: IssueThread | None = None
) -> None:
    """Issue the inputs' copies, the commands, and the outputs' copies. `issue_thread`, if given, issues the swap-ins.

    Raises the error of a kernel or copy, after `issue_thread` is idle; DeviceError for a copy that it issued.
    """
    driver, commands = streams.driver, program.schedule.inference
    events = [driver.event() for _ in range(program.schedule.events)]
    with driver.tf32(program.tf32), torch.inference_mode():
        with driver.on(streams.compute):
            driver.launch(lambda: program.begin(frame))
        if issue_thread is not None:
            _issue_from_two_threads(streams, commands, events, perform, issue_thread)
        else:
            _issue(streams, commands, events, perform)
        with driver.on(streams.compute):
            driver.launch(lambda: program.finish(frame))


def _issue_from_two_threads(
    streams: Streams,
    commands: Commands,
    events: Sequence[torch.cuda.Event],
    perform: Perform,
    issue_thread: IssueThread,
) -> None:
    issued = [threading.Event() for _ in events]
    errors: list[Exception] = []

    def attempt(command: Command) -> None:
        try:
            perform(command)
        except Exception as error:  # go on issue_thread: the other thread waits for the records of this lane
            errors.append(error)

    issue_thread.submit(lambda: _issue(streams, commands, events, attempt, ["swap_in"], issued))
    try:
        _issue(streams, commands, events, perform, ["compute", "swap_out"], issued)
    finally:
        for event_issued in issued:  # after an error, the remaining records are not issued: do not wait for them
            event_issued.set()
        issue_thread.drain()
    if errors:
        raise DeviceError(f"a copy from the store failed: {errors[0]}") from errors[0]


def _issue(
    streams: Streams,
    commands: Commands,
    events: Sequence[torch.cuda.Event],
    perform: Perform,
    lanes: Sequence[Lane] = LANES,
    issued: Sequence[threading.Event] | None = None,
) -> None:
    """Issue the commands of these lanes. With `issued`, another thread issues the other lanes at the same time.

    `issued[n]` is set once the record of event n is issued.
    """
    driver = streams.driver
    for lane, part in groupby((c for c in commands if c.lane in lanes), key=lambda c: c.lane):
        with driver.on(getattr(streams, lane)):
            for command in part:
                match command.verb:
                    case "record":
                        driver.record(events[command.index])
                        if issued is not None:
                            issued[command.index].set()
                    case "wait":
                        if issued is not None:
                            issued[command.index].wait()
                        driver.wait(events[command.index])
                    case _:
                        perform(command)
