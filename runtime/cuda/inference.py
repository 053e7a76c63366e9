"""Issues one inference of a program to the streams: inputs, commands, outputs."""

import threading
from collections.abc import Sequence

import torch

from cohabit.runtime.cuda.api import Event
from cohabit.runtime.cuda.issue import Perform, Streams, issue
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.cuda.schedule import Commands, Work
from cohabit.runtime.cuda.transfers import Feeder
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.slots import Frame


def issue_inference(
    streams: Streams, program: CudaProgram, frame: Frame, perform: Perform, feeder: Feeder | None = None
) -> None:
    """Issue an inference. With a feeder, its thread issues the copies, in step with this one.

    Raises what a kernel or a copy raises, when everything that could be issued has been.
    """
    driver, commands = streams.driver, program.schedule.commands
    events = [driver.event() for _ in range(commands.events)]
    with driver.tf32(program.tf32), torch.inference_mode():
        with driver.on(streams.compute):
            driver.launch(lambda: program.begin(frame))
        if feeder is not None:
            _issue_by_two(streams, commands, events, perform, feeder)
        else:
            issue(streams, commands, events, perform)
        with driver.on(streams.compute):
            driver.launch(lambda: program.finish(frame))


def _issue_by_two(
    streams: Streams, commands: Commands, events: Sequence[Event], perform: Perform, feeder: Feeder
) -> None:
    marks = [threading.Event() for _ in events]
    errors: list[Exception] = []

    def attempt(command: Work) -> None:
        try:
            perform(command)
        except Exception as error:  # the lane goes on, because the other one waits for its records
            errors.append(error)

    feeder.submit(lambda: issue(streams, commands, events, attempt, ["swap_in"], marks))
    try:
        issue(streams, commands, events, perform, ["compute", "swap_out"], marks)
    finally:
        for mark in marks:  # after an error, the remaining records will not be made
            mark.set()
        feeder.drain()
    if errors:
        raise DeviceError(f"a copy from the store failed: {errors[0]}") from errors[0]
