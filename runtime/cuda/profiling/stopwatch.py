"""Times every command of one inference on the device."""

from cohabit.runtime.cuda.api import Driver, Event
from cohabit.runtime.cuda.issue import Perform
from cohabit.runtime.cuda.joining import Copy
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.cuda.schedule import Empty, Kernels, Refill, Return, Save, Work
from cohabit.runtime.recording import Recording


class CudaStopwatch:
    """Two timed events around each command. Copies that were joined share their time by their bytes."""

    def __init__(self, driver: Driver, program: CudaProgram) -> None:
        self._driver = driver
        self._program = program
        self._origin = driver.event(timed=True)
        self._timed: list[tuple[Work, Event, Event]] = []

    def start(self) -> None:
        """Begin, on the current stream."""
        self._driver.record(self._origin)

    def timing(self, perform: Perform) -> Perform:
        """The same commands, timed. May be called by several threads."""

        def timed(command: Work) -> None:
            before, after = self._driver.event(timed=True), self._driver.event(timed=True)
            self._driver.record(before)
            perform(command)
            self._driver.record(after)
            self._timed.append((command, before, after))

        return timed

    def recording(self, start_s: float) -> Recording:
        """Return what was measured, when everything has ended, of an inference that began at `start_s`."""
        program = self._program
        recording = Recording(program)
        for command, before, after in self._timed:
            begin_s, end_s = (start_s + self._driver.seconds(self._origin, event) for event in (before, after))
            match command:
                case Kernels(index):
                    recording.note(program.computes[index], begin_s, end_s)
                case Save(index):
                    recording.note(program.swap_outs[index], begin_s, end_s)
                case Return(index):
                    recording.note(program.swap_ins[index], begin_s, end_s)
                case Copy():
                    self._note_parts(recording, command, begin_s, end_s)
                case Empty() | Refill():
                    pass
        return recording

    def _note_parts(self, recording: Recording, copy: Copy, start_s: float, end_s: float) -> None:
        for step in self._program.swap_ins[copy.first : copy.last]:
            share_s = (end_s - start_s) * step.nbytes / copy.nbytes if copy.nbytes else 0.0
            recording.note(step, start_s, start_s + share_s)
            start_s += share_s
