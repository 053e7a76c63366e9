"""The executor: issues programs to the lanes and keeps their order, without taking a decision.

The compute lane is the thread that calls `run` at the time; the swap-in lane is a thread of its own, and so is the
swap-out lane, once there are activations to swap out. All lanes are in order, so "after step k" is "k + 1 steps of that
lane have finished", and an event is a number on a counter.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch

from planner.timeline import Timeline
from runtime.backend import Result
from runtime.binding.program import ComputeStep, Program, SwapInStep, SwapStep
from runtime.binding.slots import Frame
from runtime.captures import Capture
from runtime.cpu.leading import Leading
from runtime.cpu.swap_lane import Counter, Other, Run, SwapLane
from runtime.errors import DeviceError
from runtime.recording import Follow, Recording

_SWITCH_INTERVAL_S = 2e-5
"""How long a thread that holds the interpreter, such as one that makes a model ready, may let the lanes wait."""


@dataclass(slots=True)
class _Restored:
    """A model's last run, and where on the swap-in lane's counter each resident that it brings back is there."""

    run: Run
    tickets: dict[int, int]


@dataclass(slots=True)
class _Ahead:
    """The prefix of a program that was submitted before the program's turn."""

    program: Program
    run: Run
    base: int
    count: int
    """How many copies."""
    recording: Recording | None = None
    """Of these copies, where they are not in that of the run that they are beside."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """What runs, with the compute lane's counter before it."""

    program: Program
    base: int


class Executor:
    """Runs programs one at a time. The compute lane is whoever calls, one thread at a time."""

    changes_threads = True

    def __init__(self) -> None:
        self._computes = Counter()
        self._lane = SwapLane("swap-in", self._computes)
        self._out = SwapLane("swap-out", self._computes)
        self._lane.other = Other(self._out.done, Run.swap_out_ticket)
        self._out.other = Other(self._lane.done, Run.ticket)
        self._restored: dict[str, _Restored] = {}
        self._stale: set[str] = set()
        """Models whose residents may be wrong, because a copy failed."""
        self._expected: Program | None = None
        self._expected_is_followed = False
        self._turn = threading.Lock()
        """Guards the two below, and what is submitted beside a run; another thread may say what comes next."""
        self._ahead: _Ahead | None = None
        self._under_way: _UnderWay | None = None
        self._leading = Leading()
        self._inference_mode = torch.inference_mode()
        """For one run after the other; it remembers what was before in C."""

    def __enter__(self) -> "Executor":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the swap-in lane. Lanes hand the interpreter over to each other often, so its patience is cut."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._lane.start()

    def close(self) -> None:
        """Let the lanes finish their queues and end."""
        self._out.close()
        self._lane.close()

    @property
    def lost(self) -> str | None:
        """A CPU is never lost."""
        return None

    @property
    def swap_busy_s(self) -> float:
        """Time that the swap-in lane has spent copying since the start."""
        return self._lane.busy_s

    def load(self, program: Program, *, follow: Follow | None = None) -> float:
        """Put a program's initial residents in place and wait for them. Returns the seconds it took.

        `follow` gets a recording of the copies. Raises DeviceError if the store cannot be read.
        """
        self._restored.pop(program.name, None)
        with self._turn:
            self._retract()
            self._expected = None
        recording = None if follow is None else Recording(program)
        seconds = self._copy(program.residents, recording)
        if follow is not None and recording is not None:
            follow(recording)
        self._stale.discard(program.name)
        return seconds

    def dismiss(self, program: Program) -> None:
        """Give back a program's places in the host, and hold it no longer."""
        with self._turn:
            self._leading.forget(program)
            if self._expected is program:
                self._expected = None
        for traveller in program.travellers:
            traveller.close()

    def capture(self, program: Program) -> Capture | None:
        """A CPU has no graphs."""
        return None

    def copy(self, steps: Sequence[SwapInStep]) -> float:
        """Do prepared copies on the swap-in lane alone and wait. Returns the seconds. Raises DeviceError."""
        return self._copy(steps, None)

    def _copy(self, steps: Sequence[SwapInStep], recording: Recording | None) -> float:
        run = self._begin(recording)
        self._lane.submit(run, steps)
        self.settle()
        if run.error is not None:
            raise DeviceError(f"a copy from the store failed: {run.error}") from run.error
        return time.perf_counter() - run.start_s

    def settle(self) -> None:
        """Wait until the swap-in lane has nothing left to do."""
        self._lane.done.wait(self._lane.submitted)

    def expect(self, program: Program | None, *, followed: bool = False) -> None:
        """Say what runs behind the next run: the swap-in lane starts on its prefix as soon as it has time.

        Each copy waits until the next run has done with the bytes that it goes to. What a wrong guess has not copied
        when another program's turn comes is left out.
        """
        self._expected, self._expected_is_followed = program, followed

    def expect_behind(self, program: Program, *, followed: bool = False) -> None:
        """Say what runs behind the run that is under way, which was not known when it began. Any thread.

        Nothing happens if none is; what of another program's prefix has not begun is left out. The caller makes sure
        that the program can be run, as it is, until the run under way has ended.
        """
        with self._turn:
            known = self._ahead is not None and self._ahead.program is program
            if self._under_way is not None and not known:
                self._retract()
                self._lead(self._under_way, program, None, Recording(program) if followed else None)

    def run(
        self,
        program: Program,
        inputs: Sequence[torch.Tensor],
        *,
        traced: bool = False,
        follow: Follow | None = None,
        observe: Callable[[int, Frame], None] | None = None,
        serial: bool = False,
    ) -> Result:
        """Run one inference. Inputs in the program's order, of its exact shapes; they may be changed.

        `traced` gives the times of each op, `follow` gets what is noted of a run as any other is; it is called in any
        case. `observe` is called before each op with its index in the plan and the frame. `serial` waits for every
        copy before the next step is issued: the same plan without overlap. Raises DeviceError if a kernel or a copy
        fails; the residents are restored all the same.
        """
        if program.name in self._stale:
            self.load(program, follow=follow)
        if serial:
            self._expected = None
        plain = not (traced or follow or observe or serial)
        if plain and program.only_computes and program.name not in self._restored and self._expected is None:
            return self._run_resident(program, inputs)
        recording = Recording(program) if traced or follow is not None else None
        run = self._begin(recording)
        frame: Frame = [None] * program.frame_slots
        for slot, tensor in zip(program.input_slots, inputs, strict=True):
            frame[slot] = tensor
        restored = self._restored.get(program.name)
        with self._turn:
            self._submit(program, run, recording)
            self._under_way = _UnderWay(program, run.compute_base)
        try:
            with torch.inference_mode():
                by_op = traced or observe is not None or not program.stretched
                steps = program.computes if by_op else program.stretched
                stall_s = self._compute(program, steps, run, frame, restored, observe, serial)
                if not program.computes:
                    self.settle()  # nothing waited for the parameters that are its outputs
                self._refuse_failed(program, run, restored)
                for call in program.final_calls:
                    call(frame)
                outputs = [self._output(program, frame, slot, inputs) for slot in program.output_slots]
        except DeviceError:
            raise
        except Exception as error:
            raise DeviceError(f"{program.name}: {error}") from error
        finally:
            # Whatever happened, the lane goes on to the end, so that the residents are back for the next run.
            self._computes.advance(run.compute_base + len(program.computes))
            with self._turn:
                self._under_way = None
            if program.travellers:
                self._end_journeys(program, run)
            if follow is not None and recording is not None:
                run.hand_over = partial(follow, recording)
                self._lane.finish(run)
        latency_s = time.perf_counter() - run.start_s
        timeline = self._timeline(program, run, recording) if traced and recording is not None else None
        return Result(outputs, latency_s, stall_s, program.link_bytes, timeline, run.ahead is not None)

    def _run_resident(self, program: Program, inputs: Sequence[torch.Tensor]) -> Result:
        """Run what waits for no copy, beside none, for nobody who wants to know its steps."""
        start_s = time.perf_counter()
        base = self._computes.value
        with self._turn:
            self._retract()
            self._under_way = _UnderWay(program, base)
        frame: Frame = [None] * program.frame_slots
        for slot, tensor in zip(program.input_slots, inputs, strict=True):
            frame[slot] = tensor
        try:
            with self._inference_mode:
                for step in program.stretched or program.computes:
                    for call in step.calls:
                        call(frame)
                for call in program.final_calls:
                    call(frame)
                outputs = [self._output(program, frame, slot, inputs) for slot in program.output_slots]
        except Exception as error:
            raise DeviceError(f"{program.name}: {error}") from error
        finally:
            self._computes.advance(base + len(program.computes))
            with self._turn:
                self._under_way = None
        return Result(outputs, time.perf_counter() - start_s, 0.0, 0)

    def _begin(self, recording: Recording | None, program: Program | None = None) -> Run:
        """Begin what is noted as steps of a program; of the recording's own if there is no other."""
        note = None if recording is None else recording.by(program or recording.program)
        return Run(time.perf_counter(), self._computes.value, note=note)

    def _submit(self, program: Program, run: Run, recording: Recording | None) -> None:
        """Queue a run's copies, but for a prefix that is under way; the next program's prefix; the epilogue."""
        first = 0
        run.swap_out_base = self._out.submitted
        ahead = self._ahead
        if ahead is not None and ahead.program is program:
            self._ahead = None
            first = ahead.count
            run.parts.append((0, ahead.base))
            run.ahead = ahead.run
            if recording is not None:
                recording.earlier = ahead.recording
        else:
            self._retract()
        if not (program.swap_ins or program.swap_outs):  # all is resident
            self._submit_ahead(program, recording)
            return
        run.parts.append((first, self._lane.submitted))
        self._lane.submit(run, program.swap_ins[first : program.epilogue])
        self._submit_ahead(program, recording)
        run.parts.append((program.epilogue, self._lane.submitted))
        self._lane.submit(run, program.swap_ins[program.epilogue :])
        if program.swap_outs:
            self._out.start()
            self._out.submit(run, program.swap_outs)
        tickets = {segment: run.ticket(index + 1) for segment, index in program.restored.items()}
        self._restored[program.name] = _Restored(run, tickets)

    def _end_journeys(self, program: Program, run: Run) -> None:
        """Wait until no lane has anything left to do with activations, and let go of them, also after a failure."""
        self._out.done.wait(run.swap_out_ticket(len(program.swap_outs)))
        self._lane.done.wait(run.ticket(program.returns))
        for traveller in program.travellers:
            traveller.forget()

    def _submit_ahead(self, current: Program, recording: Recording | None) -> None:
        expected, self._expected = self._expected, None
        if expected is not None:
            own = Recording(expected) if recording is None and self._expected_is_followed else None
            self._lead(_UnderWay(current, self._computes.value), expected, recording, own)

    def _lead(
        self, current: _UnderWay, expected: Program, recording: Recording | None, own: Recording | None
    ) -> None:
        """Submit the leading copies of what runs behind `current`, noted in its recording or in one of their own."""
        if not expected.prefix or expected.name in self._stale:
            return
        leading = self._leading.copies(current.program, expected)
        if not leading:
            return
        noted = recording or own
        run = Run(time.perf_counter(), current.base, note=None if noted is None else noted.by(expected))
        self._ahead = _Ahead(expected, run, self._lane.submitted, len(leading), own)
        self._lane.submit(run, leading)

    def _retract(self) -> None:
        """Leave out what has not begun of a prefix whose program is not the next after all."""
        if self._ahead is not None:
            self._ahead.run.retracted = True
            self._ahead = None

    def _compute(
        self,
        program: Program,
        steps: Sequence[ComputeStep],
        run: Run,
        frame: Frame,
        restored: _Restored | None,
        observe: Callable[[int, Frame], None] | None,
        serial: bool,
    ) -> float:
        done = self._lane.done
        clock = time.perf_counter
        stall_s = 0.0
        finished = run.compute_base
        for step in steps:
            ticket = run.ticket(step.swap_ins_before)
            if restored is not None and restored.tickets:
                ticket = max(ticket, *(restored.tickets.get(s, 0) for s in step.first_reads), 0)
            swap_outs = step.swap_outs_before
            if serial:
                swap_ins, swap_outs = _issuable(program, finished - run.compute_base)
                ticket = max(ticket, run.ticket(swap_ins))
            if done.value < ticket:
                start = clock()
                done.wait(ticket)
                end = clock()
                stall_s += end - start
                if run.note is not None:
                    run.note(step, start, end, stalled=True)
            if swap_outs:
                stall_s += self._wait_for_swap_outs(step, run, swap_outs)
            if run.error is not None:
                break
            if observe is not None:
                observe(step.step, frame)
            start = clock()
            for call in step.calls:
                call(frame)
            if run.note is not None:
                run.note(step, start, clock())
            finished += step.length
            if finished < run.compute_base + len(program.computes):
                # The last one is told by `run`: outputs that are parameters leave before the epilogue starts.
                self._computes.advance(finished)
        return stall_s

    def _wait_for_swap_outs(self, step: ComputeStep, run: Run, count: int) -> float:
        """Wait for the swap-outs whose bytes a step takes. Returns the seconds."""
        ticket = run.swap_out_ticket(count)
        if self._out.done.value >= ticket:
            return 0.0
        start = time.perf_counter()
        self._out.done.wait(ticket)
        end = time.perf_counter()
        if run.note is not None:
            run.note(step, start, end, stalled=True)
        return end - start

    def _refuse_failed(self, program: Program, run: Run, restored: _Restored | None) -> None:
        """Raise DeviceError if a copy of this run failed, or one by which the last run restored residents.

        The next run of the model loads its residents anew.
        """
        for earlier in (run, run.ahead, restored.run if restored is not None else None):
            if earlier is not None and earlier.error is not None:
                self._stale.add(program.name)
                raise DeviceError(f"{program.name}: a copy failed: {earlier.error}") from earlier.error

    def _output(self, program: Program, frame: Frame, slot: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if slot in program.constants:
            return program.constants[slot].clone()
        value = frame[slot]
        assert isinstance(value, torch.Tensor)
        own = value.untyped_storage().data_ptr()
        return value.clone() if any(own == t.untyped_storage().data_ptr() for t in inputs) else value

    def _timeline(self, program: Program, run: Run, recording: Recording) -> Timeline:
        self.settle()
        spans = recording.measured(run.start_s)
        latency_s = max((s.end_s for s in spans if s.lane == "compute"), default=0.0)
        return Timeline(spans, latency_s, None, program.link_bytes)


def _issuable(program: Program, computes: int) -> tuple[int, int]:
    """How many swap-ins and swap-outs may have ended once so many compute steps have."""
    ins = outs = 0
    while True:
        before = ins, outs
        while ins < len(program.swap_ins) and _may_start(program.swap_ins[ins], computes, outs):
            ins += 1
        while outs < len(program.swap_outs) and _may_start(program.swap_outs[outs], computes, ins):
            outs += 1
        if before == (ins, outs):
            return before


def _may_start(step: SwapStep, computes: int, others: int) -> bool:
    return step.computes_before <= computes and step.others_before <= others
