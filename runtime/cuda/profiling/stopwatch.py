"""Times every command of one inference on the device."""

import torch

from cohabit.runtime.cuda.commands import Command, Copy
from cohabit.runtime.cuda.driver import CudaDriver
from cohabit.runtime.cuda.issue import Perform
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.recording import Recording


class CudaStopwatch:
    """Two timed events around each command. A joined copy's time is divided among its parts by bytes."""

    def __init__(self, driver: CudaDriver, program: CudaProgram) -> None:
        self._driver = driver
        self._program = program
        self._origin = driver.event(timed=True)
        self._timed: list[tuple[Command, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Record the origin of all times on the current stream."""
        self._driver.record(self._origin)

    def timing(self, perform: Perform) -> Perform:
        """Return `perform` with timing. Any thread may call the result."""

        def timed(command: Command) -> None:
            before, after = self._driver.event(timed=True), self._driver.event(timed=True)
            self._driver.record(before)
            perform(command)
            self._driver.record(after)
            self._timed.append((command, before, after))

        return timed

    def recording(self, start_s: float) -> Recording:
        """Return the times of an inference that began at `start_s`. All of its work must have ended."""
        program = self._program
        recording = Recording(program)
        for command, before, after in self._timed:
            begin_s, end_s = (start_s + self._driver.seconds(self._origin, event) for event in (before, after))
            match command.verb:
                case "compute":
                    recording.note(program.computes[command.index], begin_s, end_s)
                case "copy_out":
                    recording.note(program.swap_outs[command.index], begin_s, end_s)
                case "copy_back":
                    recording.note(program.swap_ins[command.index], begin_s, end_s)
                case "copy":
                    self._note_parts(recording, program.schedule.copies[command.index], begin_s, end_s)
        return recording

    def _note_parts(self, recording: Recording, copy: Copy, start_s: float, end_s: float) -> None:
        for step in self._program.swap_ins[copy.first : copy.last]:
            share_s = (end_s - start_s) * step.nbytes / copy.nbytes if copy.nbytes else 0.0
            recording.note(step, start_s, start_s + share_s)
            start_s += share_s
