"""CUDA executor: one graph launch per captured inference; other programs use streams and events.

    compute   | inputs, kernels, outputs of A          | ... of B                    one graph each, copies inside
    swap_in   |    (A's copies)                        |    (B's copies)   epilogue of A, piece by piece

The thread that calls `run` waits for the outputs, so an inference begins after the kernels of the previous one have
ended. On the device it waits only for the epilogue of its model's last run.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from cohabit.planner.errors import CohabitError, format_bytes
from cohabit.planner.plan import Span, Timeline
from cohabit.runtime.backend import Capture, Result
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.program import Residence
from cohabit.runtime.cuda.api import CapturedGraph, Driver
from cohabit.runtime.cuda.capture import capture, capture_sized, is_wanted
from cohabit.runtime.cuda.issue import IssueThread, Streams, issue_inference
from cohabit.runtime.cuda.profiling.dry_run import SMALL_SEGMENT_BYTES, fitting_pools
from cohabit.runtime.cuda.profiling.stopwatch import CudaStopwatch
from cohabit.runtime.cuda.program import MOST_SCRATCH_BYTES, CudaProgram
from cohabit.runtime.cuda.transfers import Transfer, Transfers, pieces_of
from cohabit.runtime.errors import DeviceError, DeviceLost, MemoryExceeded, StoreChanged
from cohabit.runtime.recording import OnRecording, Recording

_log = logging.getLogger("cohabit.cuda")
_MOST_TRIALS = 16
"""Maximum number of runs until a pool's layout equals that of an earlier run; usually two or three are needed."""


@dataclass(slots=True)
class SharedDevice:
    """State that the executors of one device share."""

    exclusive: threading.RLock = field(default_factory=threading.RLock)
    """Held to allocate, to capture, and to synchronise the whole device. Replays do not need it."""
    lost: str | None = None
    outside_bytes: int = 0
    """Device memory of this process outside the arena: the context, libraries' memory per lane, constants, and graphs.
    Includes other processes if the driver does not report memory per process."""

    def note_memory(self, driver: Driver) -> None:
        """Update `outside_bytes` from the driver."""
        memory = driver.memory()
        used_bytes = memory.process_bytes
        if used_bytes is None:
            used_bytes = memory.total_bytes - memory.free_bytes
        self.outside_bytes = max(0, used_bytes - driver.allocated_bytes)


class CudaExecutor:
    """Runs programs one at a time, in one thread. A device has one executor per compute lane."""

    swap_busy_s = None

    def __init__(self, streams: Streams, shared: SharedDevice) -> None:
        self._streams = streams
        self._shared = shared
        self._thread: threading.Thread | None = None
        """The thread that called this executor last."""
        self._driver = streams.driver
        self._issue_thread = IssueThread()
        self._transfers = Transfers(streams)
        self._began, self._answered = self._driver.event(timed=True), self._driver.event(timed=True)
        self._stale: set[Residence] = set()
        """Residents that may be invalid: a copy or kernel failed, or another model used their memory."""
        self._admitted: list[CudaProgram] = []

    @property
    def streams(self) -> Streams:
        return self._streams

    @property
    def device(self) -> torch.device:
        return self._driver.device

    def start(self) -> None:
        self._adopt_thread()

    def _adopt_thread(self) -> None:
        if self._thread is not threading.current_thread():
            with self._shared.exclusive:
                self._driver.adopt_thread(self._streams.compute)
                self._shared.note_memory(self._driver)
            self._thread = threading.current_thread()

    def close(self) -> None:
        """Release the admitted programs, wait for the streams, and stop the threads."""
        for program in self._admitted:
            self.release(program)
        if self._shared.lost is None:
            self.settle()
        self._transfers.close()
        self._issue_thread.shutdown()

    @property
    def lost(self) -> str | None:
        return self._shared.lost

    def load(self, program: CudaProgram, *, on_recording: OnRecording | None = None) -> float:
        """Copy a program's initial residents in and wait for them. Returns the seconds.

        Admits a program that is new to the device. Raises DeviceError, and MemoryExceeded if its kernels have too
        little memory.
        """
        start = time.perf_counter()
        is_stale = program.residence in self._stale
        self._load_residents(program)
        if program.admission.pool is None:
            with self._shared.exclusive:
                self._admit(program)  # runs it, which also loads residents in the pool
        elif program.has_pooled_weights:
            self._load_pool(program, is_stale=is_stale)
        return time.perf_counter() - start

    def begin_load(self, program: CudaProgram) -> Callable[[], float]:
        """Return `load`: nothing is copied while other programs run."""
        return partial(self.load, program)

    def foresee(self, program: CudaProgram) -> None:
        """Do nothing: residents are loaded, and plans swap in to workspace, which the running program uses."""

    def load_in_pieces(self, programs: Sequence[CudaProgram]) -> Iterator[None]:
        """Load and admit one program per step of the iterator."""
        for n, program in enumerate(programs):
            if n:
                yield
            self.load(program)

    def _load_residents(self, program: CudaProgram) -> None:
        """Load the residents that have addresses."""
        with self._faults(program):
            self._adopt_thread()
            graph = program.admission.residents
            pieces = pieces_of(program, program.schedule.residents) if graph is None else [graph.replay]
            transfer = self._transfers.issue(program.residence, pieces)
            self._transfers.take(program.residence)
            self._driver.synchronize(transfer.event)
            _raise_if_failed(program, transfer)
            self._stale.discard(program.residence)

    def _load_pool(self, program: CudaProgram, *, is_stale: bool = False) -> None:
        """Load the residents without an address into the pool, in place where they are allocated."""
        with self._faults(program), self._shared.exclusive:
            self._adopt_thread()
            residents = program.pooled_residents
            if is_stale or not all(tensor.is_ready for tensor in residents):
                self._fill(program, residents, program.offloaded)
                program.admission.moved = False
            else:
                self._fill(program, residents)

    def _return_to_places(self, program: CudaProgram) -> None:
        """Move residents back to their addresses before the last run, so that the next run finds the same layout.

        They are freed and allocated again, and copied through the host: torch's allocator cannot allocate at a given
        address.
        """
        moved = [tensor for tensor in program.pooled_residents if tensor.moves]
        with self._faults(program), self._shared.exclusive:
            self._adopt_thread()
            self._copy_out([tensor for tensor in program.state if tensor in moved])
            self._fill(program, moved, moved)
            program.admission.moved = False

    def _fill(
        self, program: CudaProgram, tensors: Sequence[OffloadedTensor], freed: Sequence[OffloadedTensor] = ()
    ) -> None:
        """Fill tensors from their host buffers, and wait. With `freed`, first frees these and allocates `tensors`."""
        driver, streams = self._driver, self._streams
        made, loaded = driver.event(), driver.event()
        with driver.allocating(program.pool), driver.on(streams.compute):
            for tensor in freed:
                driver.launch(tensor.reset)
            for tensor in tensors if freed else ():
                driver.launch(tensor.allocate)
            driver.record(made)
        with driver.on(streams.swap_in):
            driver.wait(made)
            for tensor in tensors:
                driver.copy_deferred(tensor.copy_back)
            driver.record(loaded)
        driver.synchronize(loaded)

    def _copy_out(self, tensors: Sequence[OffloadedTensor]) -> None:
        """Copy tensors to their host buffers, and wait. No work may be in progress."""
        driver, saved = self._driver, self._driver.event()
        with driver.on(self._streams.swap_out):
            for tensor in tensors:
                driver.copy_deferred(tensor.copy_out)
            driver.record(saved)
        driver.synchronize(saved)

    def settle(self) -> None:
        """Wait until the swap-in lane is idle."""
        self._issue_thread.drain()
        self._transfers.flush()
        end = self._driver.event()
        with self._driver.on(self._streams.swap_in):
            self._driver.record(end)
        self._driver.synchronize(end)

    def finish(self, program: CudaProgram) -> None:
        """Copy the state that stays in the pool between runs to the host. Other state is copied out by the runs."""
        if program.admission.pool is None:
            return
        with self._faults(program), self._shared.exclusive:
            self._adopt_thread()
            self._copy_out([tensor for tensor in program.state if tensor.spill.at_start])

    def run(
        self,
        program: CudaProgram,
        inputs: Sequence[torch.Tensor],
        *,
        traced: bool = False,
        on_recording: OnRecording | None = None,
    ) -> Result:
        """Run one inference. See `runtime.backend.ProgramRunner`.

        `on_recording` gets every step of a traced run, or of a program with weights in its pool, which is issued step
        by step. Otherwise it gets only the start and end of the inference.

        Residents that the last run failed to restore are loaded again; if that fails, too, this run fails.
        """
        program.buffers.check(inputs)
        with self._faults(program):
            self._adopt_thread()
        start = time.perf_counter()
        # Residents first: a failed epilogue leaves wrong bytes, and moved residents change the pool's layout.
        epilogue = self._transfers.take(program.residence)
        is_restored = epilogue is None or epilogue.error is None
        if program.admission.pool is None or program.residence in self._stale or not is_restored:
            self.load(program)
            epilogue = None
        elif program.admission.moved:
            self._return_to_places(program)
        with self._faults(program):
            is_timed = traced or (on_recording is not None and program.has_pooled_weights)
            watch = CudaStopwatch(self._driver, program) if is_timed else None
            with self._transfers.paused(program.copying_s):
                self._issue(program, inputs, watch, epilogue)
                self._driver.synchronize(self._answered)
            # The outputs are ready; the epilogue runs after the answer.
            device_s = self._driver.seconds(self._began, self._answered)
            outputs = program.buffers.taken()
            program.admission.moved = any(tensor.moves for tensor in program.pooled_residents)
            latency_s = time.perf_counter() - start
            self._submit_epilogue(program, watch)
        if watch is not None:
            self.settle()  # timed events are read after the epilogue's copies
            recording = watch.recording(start)
        else:
            recording = Recording(program)
            recording.note(None, start, start + latency_s)
        if on_recording is not None:
            on_recording(recording)
        stall_s = 0.0 if program.compute_s is None else max(0.0, device_s - program.compute_s)
        timeline = _timeline(program, recording.measured(start)) if traced else None
        return Result(outputs, latency_s, stall_s, program.link_bytes, timeline, device_s)

    def capture(self, program: CudaProgram) -> Capture | None:
        """Return how a program is issued; None before it is loaded. Any thread."""
        ready = program.admission
        if ready.pool is None:
            return None
        graph_bytes = ready.graph_bytes + sum(sized.nbytes for sized in ready.sized.values())
        return Capture(int(ready.graph is not None), graph_bytes, ready.refused)

    def _issue(
        self,
        program: CudaProgram,
        inputs: Sequence[torch.Tensor],
        watch: CudaStopwatch | None,
        epilogue: Transfer | None,
    ) -> None:
        """Issue everything up to the outputs, after the epilogue of the model's last run."""
        program.buffers.fill(inputs)
        graph = self._graph(program) if watch is None else None
        with self._driver.on(self._streams.compute):
            if epilogue is not None:
                self._driver.wait(epilogue.event)
            self._driver.record(self._began)
            if graph is not None:
                graph.replay()
        if graph is None:
            with self._shared.exclusive:  # held until the activations are freed
                self._issue_commands(program, watch)
        with self._driver.on(self._streams.compute):
            self._driver.record(self._answered)

    def _graph(self, program: CudaProgram) -> CapturedGraph | None:
        """Return the graph of the current inputs' shapes. Smaller shapes are captured at their second request."""
        shapes, sized = program.buffers.smaller, program.admission.sized
        if shapes is None:
            return program.admission.graph
        if shapes not in sized and is_wanted(program, shapes):
            self.settle()  # copies issued to a captured stream would become part of the graph
            with self._shared.exclusive:
                capture_sized(self._streams, program, shapes)
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
            with self._driver.on(self._streams.compute):
                watch.start()
        issue_thread = self._issue_thread if program.staged else None
        try:
            with self._driver.allocating(program.pool):
                issue_inference(self._streams, program, frame, perform, issue_thread)
        except BaseException:
            frame.clear()  # tracebacks keep the frame, and its tensors must not outlive the pool
            raise

    def _submit_epilogue(self, program: CudaProgram, watch: CudaStopwatch | None) -> None:
        commands = program.schedule.epilogue
        if watch is not None:
            perform = watch.timing(program.performing(self._driver, []))
            self._transfers.issue(program.residence, [partial(perform, command) for command in commands])
        elif commands:
            self._transfers.submit(program.residence, pieces_of(program, commands))

    def _admit(self, program: CudaProgram) -> None:
        """Run a new program once and capture it, so that requests allocate and compile nothing.

        An op with several small scratch tensors may need more segments than the dry run shows. The run then fails, and
        the next pool that the dry run accepts is tried.
        """
        refused: MemoryExceeded | None = None
        waste_bytes = min(
            (op.scratch_bytes for op in program.graph.ops), default=0
        )  # profiling adds it to every op
        plan = program.plan
        residents = [tensor.spill.tensor for tensor in program.pooled_residents]
        pools = fitting_pools(self._streams, program.graph, plan.steps, program.pool_memory, waste_bytes, residents)
        while program.admission.pool is None:
            try:
                pool = next(pools)
            except MemoryExceeded as error:
                raise refused or error from None
            program.admission.pool = pool
            try:
                self._try_out(program)
            except CohabitError as error:  # release the pool first: the next one has the same bytes
                for tensor in program.offloaded:
                    tensor.reset()
                program.admission.pool = None
                lacks_small_segment = (pool.refused_bytes or 0) == SMALL_SEGMENT_BYTES
                pool.close()
                if not isinstance(error, MemoryExceeded) or (
                    program.has_pooled_weights and not lacks_small_segment
                ):
                    raise
                refused = refused or error
        self._admitted.append(program)
        try:
            capture(self._streams, program)
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

    def _try_out(self, program: CudaProgram) -> None:
        """Run a program for the first time, to initialise libraries. All state other than theirs is restored.

        With weights in the pool, it runs until the pool's layout repeats: then no later run can run out of memory. The
        first run adds segments for small tensors.
        """
        if not program.has_pooled_weights:
            self._first_run(program)
            return
        found = set[Hashable]()
        random = self._driver.random_state()
        self._load_pool(program)
        try:
            with program.state_kept():
                while (layout := program.pool.layout) not in found:
                    if len(found) == _MOST_TRIALS:
                        raise MemoryExceeded(
                            f"{program.graph.name}: each of {_MOST_TRIALS} runs leaves another layout in its memory"
                        )
                    found.add(layout)
                    self._first_run(program)
                    self._return_to_places(program)
        finally:
            self._driver.set_random_state(random)
        if program.state:
            self._load_pool(program)

    def _first_run(self, program: CudaProgram) -> None:
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
        if program.pool.held_bytes and not program.has_pooled_weights:
            raise DeviceError(
                f"{program.graph.name}: a library keeps {format_bytes(program.pool.held_bytes)} of its workspace after"
                " an inference; memory that a library keeps must not be in the workspace"
            )

    def invalidate(self, program: CudaProgram) -> None:
        """Note that a program's residents are not in place: its next run loads them first."""
        self._stale.add(program.residence)

    def release(self, program: CudaProgram) -> None:
        """Release the graphs, the pool and the buffers of a program that will not run again, after its transfers."""
        if self._shared.lost is not None:
            return  # a lost device releases memory only when the process ends
        self.settle()
        self._admitted = [p for p in self._admitted if p is not program]
        if all(p.residence != program.residence for p in self._admitted):
            self._transfers.take(program.residence)
            self._stale.discard(program.residence)
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
            self._stale.add(program.residence)
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


def _timeline(program: CudaProgram, spans: tuple[Span, ...]) -> Timeline:
    latency_s = max((s.end_s for s in spans if s.lane == "compute"), default=0.0)
    return Timeline(spans, latency_s, None, program.link_bytes)


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


def _raise_if_failed(program: CudaProgram, transfer: Transfer) -> None:
    """Raise DeviceError if the transfer failed."""
    if transfer.error is not None:
        raise DeviceError(f"{program.graph.name}: a copy failed: {transfer.error}") from transfer.error
