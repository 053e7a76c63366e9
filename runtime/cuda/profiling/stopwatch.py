"""Times every command of one inference on the device, and makes a timeline of it."""

from cohabit.planner.timeline import Span, Timeline
from cohabit.runtime.cuda.api import Driver, Event
from cohabit.runtime.cuda.issue import Perform
from cohabit.runtime.cuda.joining import Copy
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.cuda.schedule import Empty, Kernels, Refill, Return, Save, Work


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

    def timeline(self) -> Timeline:
        """What was measured, when everything has ended."""
        spans: list[Span] = []
        for command, before, after in self._timed:
            start_s, end_s = (self._driver.seconds(self._origin, e) for e in (before, after))
            match command:
                case Kernels(index):
                    spans.append(Span(self._program.computes[index].step, "compute", start_s, end_s))
                case Save(index):
                    spans.append(Span(self._program.swap_outs[index].step, "swap_out", start_s, end_s))
                case Return(index):
                    spans.append(Span(self._program.swap_ins[index].step, "swap_in", start_s, end_s))
                case Copy():
                    spans += self._parts(command, start_s, end_s)
                case Empty() | Refill():
                    pass
        spans.sort(key=lambda s: s.step)
        latency_s = max((s.end_s for s in spans if s.lane == "compute"), default=0.0)
        return Timeline(tuple(spans), latency_s, None, self._program.link_bytes)

    def _parts(self, copy: Copy, start_s: float, end_s: float) -> list[Span]:
        spans = []
        for step in self._program.swap_ins[copy.first : copy.last]:
            share_s = (end_s - start_s) * step.nbytes / copy.nbytes if copy.nbytes else 0.0
            spans.append(Span(step.step, "swap_in", start_s, start_s + share_s))
            start_s += share_s
        return spans
