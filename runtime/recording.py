"""Recordings of one inference: lanes add notes while it runs; names are resolved when they are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from cohabit.planner.plan import Lane, Span, Timeline
from cohabit.runtime.binding.draft import ComputeStep, SwapStep
from cohabit.runtime.binding.program import Program

Step = ComputeStep | SwapStep


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One step on its lane. Times are those of `time.perf_counter`."""

    model: str
    lane: Lane
    name: str
    """Name of the op, or of the copied tensor."""
    start_s: float
    end_s: float
    nbytes: int = 0
    """Bytes copied; 0 for ops."""
    stalled: bool = False
    """Whether this is the op's wait for copies, before it ran."""


class Note(msgspec.Struct, frozen=True):
    step: Step | None
    """None for a whole inference, on a device without times per step."""
    start_s: float
    end_s: float
    stalled: bool = False


class Recording:
    """Notes of one inference. Written by the lanes' threads; complete after its last copy."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.notes: list[Note] = []

    def note(self, step: Step | None, start_s: float, end_s: float, stalled: bool = False) -> None:
        """Record that a step, or its wait, has ended."""
        self.notes.append(Note(step, start_s, end_s, stalled))

    def timeline(self, start_s: float) -> Timeline:
        """Return the steps in the plan's order, with times counted from `start_s`."""
        spans = [
            Span(note.step.step, note.step.lane, note.start_s - start_s, note.end_s - start_s)
            for note in self.notes
            if note.step is not None and not note.stalled
        ]
        latency_s = max((span.end_s for span in spans if span.lane == "compute"), default=0.0)
        in_order = tuple(sorted(spans, key=lambda span: span.step))
        return Timeline(in_order, latency_s, None, self.program.link_bytes)

    def spans(self) -> Iterator[LaneSpan]:
        """Yield every step with its name."""
        graph = self.program.graph
        for note in self.notes:
            step, times = note.step, (note.start_s, note.end_s)
            match step:
                case SwapStep():
                    name = graph.tensors[step.tensor].name
                    yield LaneSpan(graph.name, step.lane, name, *times, nbytes=step.nbytes)
                case ComputeStep():
                    name = graph.ops[step.op].name
                    yield LaneSpan(graph.name, step.lane, name, *times, stalled=note.stalled)
                case None:
                    yield LaneSpan(graph.name, "compute", "inference", *times)


OnRecording = Callable[[Recording], None]
"""Called with a complete recording, in a thread of the executor. Must return soon, and must not raise."""
