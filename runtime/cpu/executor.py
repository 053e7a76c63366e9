"""CPU executor: runs programs on the lanes in the plan's order, without making decisions.

The compute lane is the thread that calls `run`. The swap-in lane has its own thread, and so has the swap-out lane once
there are activations to swap out. Lanes run in order, so "after step k" means that k + 1 steps of that lane have
finished, and an event is a value of a counter.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch

from cohabit.runtime.backend import Executor, Result
from cohabit.runtime.binding.draft import ComputeStep, SwapStep
from cohabit.runtime.binding.program import CallGroup, Contents, Program, Residence
from cohabit.runtime.cpu.swap_lane import Counter, LaneRun, SwapLane
from cohabit.runtime.errors import DeviceError, StoreChanged
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.recording import OnRecording, Recording

PIECE_BYTES = 4 << 20
"""Size of a piece: it saturates a link, and at 5 GB/s delays other programs by less than a millisecond."""


class CpuExecutor(Executor):
    """Runs programs one at a time, for one calling thread at a time.

    With `lost_on_change`, a changed weights file counts as a lost device; otherwise runs that read it fail.
    """

    def __init__(self, *, lost_on_change: bool = True) -> None:
        self._lost_on_change = lost_on_change
        self._computes = Counter()
        self._swap_in = SwapLane(
            "swap-in", self._computes, lambda run, count: self._swap_out.done.wait(run.swap_out_ticket(count))
        )
        self._swap_out = SwapLane(
            "swap-out", self._computes, lambda run, count: self._swap_in.done.wait(run.swap_in_ticket(count))
        )
        self._restored: dict[Residence, LaneRun] = {}
        """Last run of each residence that has copies."""
        self._lost: str | None = None
        self._contents: WeakKeyDictionary[Residence, Contents] = WeakKeyDictionary()
        """What is in place. A residence without contents may be wrong: a copy failed, or its memory was used."""

    def __enter__(self) -> "CpuExecutor":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the swap-in lane."""
        self._swap_in.start()

    def close(self) -> None:
        """Finish the lanes' queues and stop their threads."""
        self._swap_out.close()
        self._swap_in.close()

    @property
    def lost(self) -> str | None:
        """Why models must be loaded again: a weights file changed. A CPU itself is never lost."""
        return self._lost

    @property
    def swap_busy_s(self) -> float:
        """Seconds that the swap-in lane has spent copying since the start."""
        return self._swap_in.busy_s

    def load(self, program: Program, *, on_recording: OnRecording | None = None) -> float:
        """Copy a program's initial residents in and wait for them. Returns the seconds it took.

        `on_recording` gets a recording of the copies. Raises DeviceError if the store cannot be read.
        """
        recording = None if on_recording is None else Recording(program)
        seconds = self.begin_load(program, recording)()
        if on_recording is not None and recording is not None:
            on_recording(recording)
        return seconds

    def begin_load(self, program: Program, recording: Recording | None = None) -> Callable[[], float]:
        """Queue the copies of a program's residents. See `runtime.backend.Executor`."""
        self._restored.pop(program.residence, None)
        self.invalidate(program)
        copied = self._begin_copies(program.residents, recording)

        def wait() -> float:
            seconds = copied()
            self._contents[program.residence] = program.contents
            return seconds

        return wait

    def _begin_copies(self, steps: Sequence[SwapStep], recording: Recording | None = None) -> Callable[[], float]:
        """Queue copies. The returned function waits for them, and returns the seconds. It raises DeviceError."""
        run = self._new_run(recording)
        self._swap_in.submit(run, steps)
        ticket = self._swap_in.submitted

        def wait() -> float:
            start_s = time.perf_counter()
            self._swap_in.done.wait(ticket)
            if run.error is not None:
                self._note_loss(run.error)
                raise DeviceError(f"a copy from the store failed: {run.error}") from run.error
            return time.perf_counter() - start_s

        return wait

    def load_in_pieces(self, programs: Sequence[Program], *, in_place: bool = False) -> Iterator[None]:
        """Load the residents that one model's programs share, about `PIECE_BYTES` per step of the iterator."""
        if in_place:
            return
        self.invalidate(programs[0])
        piece: list[SwapStep] = []
        nbytes = 0
        for step in programs[0].residents:
            if piece and nbytes + step.nbytes > PIECE_BYTES:
                self._begin_copies(piece)()
                yield
                piece, nbytes = [], 0
            piece.append(step)
            nbytes += step.nbytes
        self._begin_copies(piece)()
        self._contents[programs[0].residence] = programs[0].contents

    def invalidate(self, program: Program) -> None:
        """Mark a program's residents as invalid: its next run loads them first."""
        self._contents.pop(program.residence, None)

    def release(self, program: Program) -> None:
        """Release a program that will not run again: its spill buffers, after its copies."""
        self.settle()
        restored = self._restored.pop(program.residence, None)
        if restored is not None and restored.unrestored is not None:
            self.invalidate(program)  # another program may have the same residents
        for tensor in program.offloaded:
            tensor.close()

    def settle(self) -> None:
        """Wait until the swap-in lane is idle."""
        self._swap_in.done.wait(self._swap_in.submitted)

    def run(
        self,
        program: Program,
        inputs: Sequence[torch.Tensor],
        *,
        traced: bool = False,
        on_recording: OnRecording | None = None,
    ) -> Result:
        """Run one inference. See `runtime.backend.Runner`; `traced` runs op by op and times each.

        Residents are restored even if a copy or a kernel fails. A resident that the last run could not restore is
        copied again before it is read; this run fails only if that copy fails, too. `on_recording` is always called.
        Residents that another model of the family has left are replaced first; ops wait only for those they read.
        """
        torch.get_num_threads()  # OpenMP's setting is per thread; this call makes torch apply its own
        if program.residents and program.residence not in self._contents:
            self.load(program, on_recording=on_recording)
        recording = Recording(program) if traced or on_recording is not None else None
        start_s = time.perf_counter()
        # The last run's restores, which this run still waits for, with what it exchanges.
        restored, exchanged_bytes = self._exchange(program)
        run = self._new_run(recording)
        frame = program.new_frame()
        for slot, tensor in zip(program.input_slots, inputs, strict=True):
            frame[slot] = tensor
        self._submit(program, run)
        try:
            with torch.inference_mode():
                stall_s = self._compute(program, run, frame, restored)
                if not program.computes:
                    self.settle()  # without ops, nothing has waited for parameters that are outputs
                elif restored is not None and restored.restores and (exchanged_bytes or program.constants):
                    self._swap_in.done.wait(max(restored.restores.values()))  # nor for those that no op reads
                self._raise_if_failed(program, run, restored)
                for call in program.final_calls:
                    call(frame)
                outputs = [_output(program, frame, slot, inputs) for slot in program.output_slots]
            self._contents[program.residence] = program.contents
        except DeviceError as error:
            self._note_loss(error)
            raise
        except Exception as error:
            raise DeviceError(f"{program.graph.name}: {error}") from error
        finally:
            # Also after an error, the swap-in lane makes all copies, so that residents are back for the next run.
            self._swap_in.submit(run, program.swap_ins[self._swap_in.submitted - run.swap_in_base :])
            self._computes.advance(run.compute_base + len(program.computes))
            if program.offloaded:
                self._settle_offloaded(program, run)
            if on_recording is not None and recording is not None:
                run.hand_over = partial(on_recording, recording)
                self._swap_in.finish(run)
        latency_s = time.perf_counter() - start_s
        timeline = None
        if traced and recording is not None:
            self.settle()
            timeline = recording.timeline(run.start_s)
        return Result(outputs, latency_s, stall_s, program.link_bytes + exchanged_bytes, timeline)

    def _exchange(self, program: Program) -> tuple[LaneRun | None, int]:
        """Begin to copy the residents in whose place another model of the family has left its own.

        Returns the run whose restores an inference waits for, with these copies among them, and their bytes. Until that
        inference has ended well, the residence has no contents.
        """
        before = self._restored.get(program.residence)
        steps = program.exchanges(self._contents[program.residence]) if program.residents else ()
        if not steps:
            return before, 0
        self.invalidate(program)
        run = self._new_run(None)
        if before is not None:
            run.failed = before.failed  # a restore that is still to come may fail
        if program.copies_inline:
            self.settle()
            self._swap_in.copy_here(run, steps)
        else:
            self._swap_in.submit(run, steps)
        copied = {step.tensor: run.swap_in_ticket(n) for n, step in enumerate(steps, 1)}
        run.restores = copied if before is None else {**before.restores, **copied}
        self._restored[program.residence] = run
        return run, sum(step.nbytes for step in steps)

    def _new_run(self, recording: Recording | None) -> LaneRun:
        bases = (self._computes.value, self._swap_in.submitted, self._swap_out.submitted)
        return LaneRun(time.perf_counter(), *bases, recording=recording)

    def _submit(self, program: Program, run: LaneRun) -> None:
        """Queue a run's copies. If the compute lane makes them itself, wait until the swap-in lane is idle instead."""
        if program.copies_inline:
            self.settle()
        else:
            self._swap_in.submit(run, program.swap_ins)
        if program.swap_outs:
            self._swap_out.start()
            self._swap_out.submit(run, program.swap_outs)
        if program.swap_ins or program.swap_outs:
            run.restores = {t: run.swap_in_ticket(index + 1) for t, index in program.draft.restored.items()}
            self._restored[program.residence] = run

    def _settle_offloaded(self, program: Program, run: LaneRun) -> None:
        """Wait until no lane uses offloaded activations, and drop them, also after a failure.

        Restores of residents may go on: the next run waits for them op by op.
        """
        self._swap_out.done.wait(run.swap_out_ticket(len(program.swap_outs)))
        self._swap_in.done.wait(run.swap_in_ticket(program.last_copy_back))
        for tensor in program.offloaded:
            tensor.forget()

    def _compute(
        self,
        program: Program,
        run: LaneRun,
        frame: Frame,
        restored: LaneRun | None,
    ) -> float:
        """Run the compute steps, one by one if recorded, else in groups. Returns the seconds spent waiting."""
        stall_s = 0.0
        finished = run.compute_base
        each = (
            program.call_groups if run.recording is None else (CallGroup(c, c.calls, 1) for c in program.computes)
        )
        for group in each:
            step = group.first
            ticket = run.swap_in_ticket(step.swap_ins_before)
            if program.copies_inline and self._swap_in.submitted < ticket:
                copied = self._swap_in.submitted - run.swap_in_base
                stall_s += self._swap_in.copy_here(run, program.swap_ins[copied : step.swap_ins_before])
            if restored is not None and restored.restores:
                ticket = max(ticket, *(restored.restores.get(t, 0) for t in step.first_reads), 0)
            if self._swap_in.done.value < ticket:
                stall_s += _wait(self._swap_in, ticket, step, run)
            if step.swap_outs_before and self._swap_out.done.value < run.swap_out_ticket(step.swap_outs_before):
                stall_s += _wait(self._swap_out, run.swap_out_ticket(step.swap_outs_before), step, run)
            if restored is not None and restored.failed:
                _restore_again(program, step, restored, run)
            if run.error is not None:
                break
            start = time.perf_counter()
            for call in group.calls:
                call(frame)
            if run.recording is not None:
                run.recording.note(step, start, time.perf_counter())
            finished += group.steps
            if finished < run.compute_base + len(program.computes):
                # `run` counts the last step after cloning outputs that are parameters: the epilogue waits for that.
                self._computes.advance(finished)
        return stall_s

    def _raise_if_failed(self, program: Program, run: LaneRun, restored: LaneRun | None) -> None:
        """Raise DeviceError if a copy of this run failed, or a restore by the last run that was not repeated.

        The model's next run reloads its residents.
        """
        error = run.error or (None if restored is None else restored.unrestored)
        if error is not None:
            self.invalidate(program)
            self._note_loss(error)
            raise DeviceError(f"{program.graph.name}: a copy failed: {error}") from error

    def _note_loss(self, error: BaseException) -> None:
        if isinstance(error, StoreChanged) and self._lost_on_change:
            self._lost = self._lost or str(error)


def _restore_again(program: Program, step: ComputeStep, last: LaneRun, run: LaneRun) -> None:
    """Repeat failed copies of the last run, for residents that a step is about to read for the first time.

    Until then, nothing else uses their addresses.
    """
    for resident in program.residents:
        if resident.tensor in last.failed and resident.tensor in step.first_reads:
            try:
                resident.copy()
            except Exception as error:
                run.fail(resident.tensor, error)
            else:
                last.failed.pop(resident.tensor, None)


def _wait(lane: SwapLane, ticket: int, step: ComputeStep, run: LaneRun) -> float:
    """Wait for a swap lane before a step. Returns the seconds."""
    start = time.perf_counter()
    lane.done.wait(ticket)
    end = time.perf_counter()
    if run.recording is not None:
        run.recording.note(step, start, end, stalled=True)
    return end - start


def _output(program: Program, frame: Frame, slot: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an output that shares no memory with parameters or inputs."""
    if slot in program.constants:
        return program.constants[slot].clone()
    value = frame[slot]
    assert isinstance(value, torch.Tensor)
    own = value.untyped_storage().data_ptr()
    return value.clone() if any(own == t.untyped_storage().data_ptr() for t in inputs) else value
