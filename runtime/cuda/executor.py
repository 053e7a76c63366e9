"""CUDA executor: one graph launch per captured inference; other programs use streams and events.

    compute   | inputs, kernels, outputs of A          | ... of B                    one graph each, copies inside
    swap_in   |    (A's copies)                        |    (B's copies)   epilogue of A, piece by piece

The graph of the next inference may be launched while one runs; the stream then begins it without a gap. On the device
it waits for the previous one, and for the epilogue of its model's last run. Everything but such a launch (loads,
programs without a graph, releases, errors) first waits for what was launched.
"""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import torch

from cohabit.planner.errors import CohabitError, format_bytes
from cohabit.runtime.backend import Capture, Executor, Result
from cohabit.runtime.binding.program import Contents, Residence
from cohabit.runtime.cuda.capture import capture, capture_sized, is_wanted
from cohabit.runtime.cuda.commands import Command
from cohabit.runtime.cuda.driver import CudaDriver, CudaGraph
from cohabit.runtime.cuda.issue import IssueThread, Streams, issue_inference
from cohabit.runtime.cuda.profiling.dry_run import fitting_pools
from cohabit.runtime.cuda.profiling.stopwatch import CudaStopwatch
from cohabit.runtime.cuda.program import MOST_SCRATCH_BYTES, CudaProgram
from cohabit.runtime.cuda.transfers import Transfer, Transfers, pieces_of
from cohabit.runtime.errors import DeviceError, DeviceLost, MemoryExceeded, StoreChanged
from cohabit.runtime.recording import OnRecording, Recording

_log = logging.getLogger("cohabit.cuda")


@dataclass(slots=True)
class SharedDevice:
    """State that the executors of one device share."""

    exclusive: threading.RLock = field(default_factory=threading.RLock)
    """Held to allocate, to capture, and to synchronise the whole device. Replays do not need it."""
    lost: str | None = None
    outside_bytes: int = 0
    """Device memory of this process outside the arena: the context, libraries' memory per lane, constants, and graphs.
    Includes other processes if the driver does not report memory per process."""

    def note_memory(self, driver: CudaDriver) -> None:
        """Update `outside_bytes` from the driver."""
        memory = driver.memory()
        used_bytes = memory.process_bytes
        if used_bytes is None:
            used_bytes = memory.total_bytes - memory.free_bytes
        self.outside_bytes = max(0, used_bytes - driver.allocated_bytes)


@dataclass(slots=True, eq=False)
class _Flight:
    """An inference that has been issued."""

    program: CudaProgram
    start_s: float
    events: tuple[torch.cuda.Event, torch.cuda.Event]
    watch: CudaStopwatch | None
    on_recording: OnRecording | None
    is_replayed: bool = False
    result: Result | None = None
    error: Exception | None = None


class CudaExecutor(Executor):
    """Runs programs one at a time, in one thread. A device has one executor per compute lane."""

    swap_busy_s = None

    def __init__(self, streams: Streams, shared: SharedDevice) -> None:
        self.streams = streams
        self._shared = shared
        self._thread: threading.Thread | None = None
        """The thread that called this executor last."""
        self._driver = streams.driver
        self._issue_thread = IssueThread()
        self._transfers = Transfers(streams)
        self._flights: deque[_Flight] = deque()
        """Inferences that have been issued, and whose outputs nobody has waited for: two at most."""
        self._events = [(self._driver.event(timed=True), self._driver.event(timed=True)) for _ in range(2)]
        """Of each further inference: its begin and its outputs on the device."""
        self._ended_s = 0.0
        """When the outputs of the last inference were there."""
        self._contents: WeakKeyDictionary[Residence, Contents] = WeakKeyDictionary()
        """What is in place. A residence without contents may be invalid: a copy or kernel failed, or its memory was
        used."""
        self._admitted: list[CudaProgram] = []

    def start(self) -> None:
        self._adopt_thread()

    def _adopt_thread(self) -> None:
        if self._thread is not threading.current_thread():
            with self._shared.exclusive:
                self._driver.adopt_thread(self.streams.compute)
                self._shared.note_memory(self._driver)
            self._thread = threading.current_thread()

    def close(self) -> None:
        """Release the admitted programs, wait for the streams, stop the threads, and give the streams back."""
        for program in self._admitted:
            self.release(program)
        if self._shared.lost is None:
            self.settle()
        self._transfers.close()
        self._issue_thread.shutdown()
        if self._shared.lost is None:
            with self._shared.exclusive:
                self._driver.drain()
                self.streams.close()
                self._shared.note_memory(self._driver)

    @property
    def lost(self) -> str | None:
        return self._shared.lost

    def load(self, program: CudaProgram, *, on_recording: OnRecording | None = None) -> float:
        """Copy a program's initial residents in and wait for them. Returns the seconds.

        Admits a program that is new to the device. Raises DeviceError, and MemoryExceeded if its kernels have too
        little memory.
        """
        start = time.perf_counter()
        self._load_residents(program)
        if program.admission.pool is None:
            with self._shared.exclusive:
                self._admit(program)
        return time.perf_counter() - start

    def load_in_pieces(self, programs: Sequence[CudaProgram], *, in_place: bool = False) -> Iterator[None]:
        """Load and admit one program per step of the iterator; to be admitted, it runs, `in_place` or not."""
        for n, program in enumerate(programs):
            if n:
                yield
            self.load(program)

    def _load_residents(self, program: CudaProgram) -> None:
        self._land()
        with self._faults(program):
            self._adopt_thread()
            graph = program.admission.residents
            pieces = pieces_of(program, program.schedule.residents) if graph is None else [graph.replay]
            transfer = self._transfers.issue(program.residence, pieces)
            self._transfers.take(program.residence)
            self._driver.synchronize(transfer.event)
            if transfer.error is not None:
                raise DeviceError(f"{program.graph.name}: a copy failed: {transfer.error}") from transfer.error
            self._contents[program.residence] = program.contents

    def settle(self) -> None:
        """Wait until every inference has ended, and the swap-in lane is idle."""
        self._land()
        self._settle()

    def _settle(self) -> None:
        self._issue_thread.drain()
        self._transfers.flush()
        end = self._driver.event()
        with self._driver.on(self.streams.swap_in):
            self._driver.record(end)
        self._driver.synchronize(end)

    def run(
        self,
        program: CudaProgram,
        inputs: Sequence[torch.Tensor],
        *,
        traced: bool = False,
        on_recording: OnRecording | None = None,
    ) -> Result:
        """Run one inference. See `runtime.backend.Runner`.

        `on_recording` gets every step of a traced run, otherwise only the start and end of the inference.

        Residents that the last run failed to restore are loaded again; if that fails, too, this run fails.
        """
        return self._finish(self._launch(program, inputs, on_recording, traced=traced))

    def launches_ahead(self, program: CudaProgram) -> bool:
        """Whether a program is one graph with sizes of its own, and has nothing in common with a launched one."""
        is_replayed = program.admission.graph is not None and not program.bucket.sizes
        return is_replayed and program.residence in self._contents and self._is_apart(program)

    def _is_apart(self, program: CudaProgram) -> bool:
        """Whether no launched inference uses the program's buffers, or is yet to restore its residents."""
        others = [flight.program for flight in self._flights]
        return all(o.buffers is not program.buffers and o.name != program.name for o in others)

    def begin(
        self, program: CudaProgram, inputs: Sequence[torch.Tensor], *, on_recording: OnRecording | None = None
    ) -> Result | Callable[[], Result]:
        """Launch a graph, and return the function that waits for it; run any other program."""
        flight = self._launch(program, inputs, on_recording)
        return partial(self._finish, flight) if flight.is_replayed else self._finish(flight)

    def _launch(
        self,
        program: CudaProgram,
        inputs: Sequence[torch.Tensor],
        on_recording: OnRecording | None,
        *,
        traced: bool = False,
    ) -> _Flight:
        """Issue an inference. Unless it may be launched ahead, those before it have ended."""
        program.buffers.check(inputs)
        if traced or not self.launches_ahead(program):
            self._land()
        elif len(self._flights) > 1:
            self._end_first()
        with self._faults(program):
            self._adopt_thread()
        start_s = time.perf_counter()
        # Residents first: a failed epilogue leaves wrong bytes.
        epilogue = self._transfers.take(program.residence)
        is_restored = epilogue is None or epilogue.error is None
        if program.admission.pool is None or program.residence not in self._contents or not is_restored:
            self.load(program)
            epilogue = None
        elif exchanges := program.exchanges(self._contents[program.residence]):
            with self._faults(program):  # on the swap-in stream, behind the epilogue
                epilogue = self._transfers.issue(program.residence, [step.copy for step in exchanges])
                self._transfers.take(program.residence)
                if epilogue.error is not None:
                    raise DeviceError(f"{program.graph.name}: a copy failed: {epilogue.error}") from epilogue.error
            self._contents[program.residence] = program.contents
        with self._faults(program):
            watch = CudaStopwatch(self._driver, program) if traced else None
            if not self._flights:
                self._transfers.pause(program.copying_s)
            flight = _Flight(program, start_s, self._events.pop(), watch, on_recording)
            try:
                self._issue(flight, inputs, epilogue)
            except BaseException:
                self._events.append(flight.events)
                self._transfers.pause(0.0)
                raise
        self._flights.append(flight)
        return flight

    def _finish(self, flight: _Flight) -> Result:
        """Wait for a launched inference, and for those before it. Returns its result, or raises its error."""
        while flight.result is None and flight.error is None:
            self._end_first()
        if flight.error is not None:
            raise flight.error
        assert flight.result is not None
        return flight.result

    def _land(self) -> None:
        """Wait for every launched inference. Their results and errors are kept until they are asked for."""
        while self._flights:
            self._end_first()

    def _end_first(self) -> None:
        flight = self._flights.popleft()
        try:
            with self._faults(flight.program):
                flight.result = self._ended(flight)
        except Exception as error:
            flight.error = error
        finally:
            self._events.append(flight.events)

    def _ended(self, flight: _Flight) -> Result:
        """Wait for an inference's outputs, copy them, and start its epilogue."""
        program, watch, (began, answered) = flight.program, flight.watch, flight.events
        try:
            self._driver.synchronize(answered)
        finally:
            self._transfers.pause(self._flights[0].program.copying_s if self._flights else 0.0)
        # The outputs are ready; the epilogue runs after the answer.
        device_s = self._driver.seconds(began, answered)
        outputs = program.buffers.taken()
        end_s = time.perf_counter()
        start_s, self._ended_s = max(flight.start_s, self._ended_s), end_s
        self._submit_epilogue(program, watch)
        if watch is not None:
            self._settle()  # timed events are read after the epilogue's copies
            recording = watch.recording(start_s)
        else:
            recording = Recording(program)
            recording.note(None, start_s, end_s)
        if flight.on_recording is not None:
            flight.on_recording(recording)
        stall_s = 0.0 if program.compute_s is None else max(0.0, device_s - program.compute_s)
        timeline = None if watch is None else recording.timeline(start_s)
        return Result(outputs, end_s - start_s, stall_s, program.link_bytes, timeline, device_s)

    def capture(self, program: CudaProgram) -> Capture | None:
        """Return how a program is issued; None before it is loaded. Any thread."""
        ready = program.admission
        if ready.pool is None:
            return None
        graph_bytes = ready.graph_bytes + sum(sized.nbytes for sized in ready.sized.values())
        return Capture(int(ready.graph is not None), graph_bytes, ready.refused)

    def _issue(self, flight: _Flight, inputs: Sequence[torch.Tensor], epilogue: Transfer | None) -> None:
        """Issue everything up to the outputs, after the epilogue of the model's last run."""
        program, (began, answered) = flight.program, flight.events
        assert self._is_apart(program), "a launched inference still reads these inputs, or writes these outputs"
        program.buffers.fill(inputs)
        graph = self._graph(program) if flight.watch is None else None
        flight.is_replayed = graph is not None
        with self._driver.on(self.streams.compute):
            if epilogue is not None:
                self._driver.wait(epilogue.event)
            self._driver.record(began)
            if graph is not None:
                graph.replay()
        if graph is None:
            with self._shared.exclusive:  # held until the activations are freed
                self._issue_commands(program, flight.watch)
        with self._driver.on(self.streams.compute):
            self._driver.record(answered)

    def _graph(self, program: CudaProgram) -> CudaGraph | None:
        """Return the graph of the current inputs' shapes. Smaller shapes are captured at their second request."""
        shapes, sized = program.buffers.smaller, program.admission.sized
        if shapes is None:
            return program.admission.graph
        if shapes not in sized and is_wanted(program, shapes):
            self.settle()  # copies issued to a captured stream would become part of the graph
            with self._shared.exclusive:
                capture_sized(self.streams, program, shapes)
                self._shared.note_memory(self._driver)
        if shapes not in sized:
            return None
        known = sized[shapes] = sized.pop(shapes)  # now the most recently used
        program.buffers.outputs = known.outputs
        return known.graph

    def _issue_commands(self, program: CudaProgram, watch: CudaStopwatch | None) -> None:
        """Issue command by command, without a graph. Copies issued later come after these on the swap-in stream."""
        frame = program.new_frame()
        perform = program.performing(self._driver, frame)
        if watch is not None:
            perform = watch.timing(perform)
            with self._driver.on(self.streams.compute):
                watch.start()
        issue_thread = self._issue_thread if program.staged else None
        try:
            with self._driver.allocating(program.pool):
                issue_inference(self.streams, program, frame, perform, issue_thread)
        except BaseException:
            frame.clear()  # tracebacks keep the frame, and its tensors must not outlive the pool
            raise

    def _submit_epilogue(self, program: CudaProgram, watch: CudaStopwatch | None) -> None:
        copies = program.schedule.epilogue
        if watch is not None:
            perform = watch.timing(program.performing(self._driver, []))
            commands = [Command("swap_in", "copy", copy) for copy in copies]
            self._transfers.issue(program.residence, [partial(perform, command) for command in commands])
        elif copies:
            self._transfers.submit(program.residence, pieces_of(program, copies))

    def _admit(self, program: CudaProgram) -> None:
        """Run a new program once and capture it, so that requests allocate and compile nothing.

        An op with several small scratch tensors may need more segments than the dry run shows. The run then fails, and
        the next pool that the dry run accepts is tried.
        """
        refused: MemoryExceeded | None = None
        # Profiling adds the allocator's overhead to every op.
        overhead_bytes = min((op.scratch_bytes for op in program.graph.ops), default=0)
        plan = program.plan
        pools = fitting_pools(self.streams, program.graph, plan.steps, program.pool_memory, overhead_bytes)
        while program.admission.pool is None:
            try:
                pool = next(pools)
            except MemoryExceeded as error:
                raise refused or error from None
            program.admission.pool = pool
            try:
                self._first_run(program)
            except CohabitError as error:  # release the pool first: the next one has the same bytes
                program.admission.pool = None
                pool.close()
                if not isinstance(error, MemoryExceeded):
                    raise
                refused = refused or error
        self._admitted.append(program)
        try:
            capture(self.streams, program)
        except MemoryExceeded:
            self.release(program)
            raise
        if program.admission.graph is not None:
            self.run(program, program.examples())
            self.settle()
        else:
            fields = {
                "model": program.graph.name,
                "batch": str(program.bucket),
                "reason": program.admission.refused,
            }
            _log.warning("program is issued op by op, not as one graph", extra={"fields": fields})
        self._shared.note_memory(self._driver)

    def _first_run(self, program: CudaProgram) -> None:
        """Run a program for the first time, to initialise libraries."""
        program.admission.choosing = True
        try:
            self.run(program, program.examples())
        except CohabitError:
            _check_refusal(program, failed=True)
            raise
        finally:
            program.admission.choosing = False
        _check_refusal(program, failed=False)
        self.settle()
        if program.pool.held_bytes:
            raise DeviceError(
                f"{program.graph.name}: a library keeps {format_bytes(program.pool.held_bytes)} of its workspace after"
                " an inference; memory that a library keeps must not be in the workspace"
            )

    def invalidate(self, program: CudaProgram) -> None:
        """Note that a program's residents are not in place: its next run loads them first."""
        self._land()
        self._contents.pop(program.residence, None)

    def release(self, program: CudaProgram) -> None:
        """Release the graphs, the pool and the buffers of a program that will not run again, after its transfers."""
        if self._shared.lost is not None:
            return  # a lost device releases memory only when the process ends
        self.settle()
        self._admitted = [p for p in self._admitted if p is not program]
        if all(p.residence != program.residence for p in self._admitted):
            self._transfers.take(program.residence)
            self._contents.pop(program.residence, None)
        with self._shared.exclusive:
            program.close(self._driver)
            self._shared.note_memory(self._driver)

    @contextmanager
    def _faults(self, program: CudaProgram) -> Iterator[None]:
        """Turn any exception into DeviceError, or into DeviceLost if the device no longer works."""
        if self._shared.lost is not None:
            raise DeviceLost(f"{program.graph.name}: the device is lost ({self._shared.lost}); restart the server")
        try:
            yield
        except Exception as error:
            self._land()  # what follows waits for the device, and takes its errors
            self._contents.pop(program.residence, None)
            with self._shared.exclusive:
                traceback.clear_frames(error.__traceback__)  # frees activations of the failed run
                is_working = self._driver.is_working()
            if not is_working:
                self._shared.lost = str(error)
                raise DeviceLost(f"{program.graph.name}: the device is lost: {error}") from error
            program.forget()
            if isinstance(error.__cause__, StoreChanged):
                self._shared.lost = str(error)
            if isinstance(error, DeviceError):
                raise
            raise DeviceError(f"{program.graph.name}: {error}") from error


def _check_refusal(program: CudaProgram, *, failed: bool) -> None:
    """Raise MemoryExceeded if the pool refused planned memory, even if the run succeeded.

    A kernel that falls back to less scratch may compute other bits. After a successful run, refused allocations above
    `MOST_SCRATCH_BYTES` are ignored: profiling refused them, too.
    """
    wanted = program.pool.refused_bytes
    if wanted is not None and (failed or wanted <= MOST_SCRATCH_BYTES):
        raise MemoryExceeded(
            f"{program.graph.name}, batch {program.bucket}: torch's allocator wanted {format_bytes(wanted)} more than"
            f" the {format_bytes(program.pool_memory.nbytes)} that the plan has for activations and scratch; measure"
            " the model again on this device, or give it a larger workspace"
        )
