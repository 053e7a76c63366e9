"""The executor for CUDA: one launch per inference where the program could be captured, streams and events elsewhere.

    compute   | inputs, kernels, outputs of A          | ... of B                    one graph each, copies inside
    swap_in   |    (A's copies) | prefix of B          | epilogue of A ...           what lies between inferences

The thread that calls `run` waits for the outputs, so an inference begins when the kernels of the one before have
ended. What it must still wait for on the device are copies to its own partition: the epilogue of its model's last
run, and its prefix. Copies needed soonest go first: B's prefix before A's epilogue, and, while the next request is
known, A's epilogue behind B's own copies.
"""

import logging
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import torch

from planner.errors import CohabitError, format_bytes
from runtime.backend import Result
from runtime.binding.program import Program
from runtime.binding.slots import Frame
from runtime.captures import Capture
from runtime.cuda.capture import capture
from runtime.cuda.inference import issue_inference
from runtime.cuda.issue import Lanes
from runtime.cuda.lower import Commands
from runtime.cuda.profiling.rehearsal import fitting_pool
from runtime.cuda.profiling.stopwatch import Stopwatch
from runtime.cuda.program import CudaProgram
from runtime.cuda.surface import Event, Graph
from runtime.cuda.transfers import Feeder, Transfer, Transfers
from runtime.errors import DeviceError, DeviceLost, MemoryExceeded
from runtime.recording import Follow, whole_inference

_log = logging.getLogger("cohabit.cuda")


@dataclass(slots=True)
class Shared:
    """What the executors of one device have in common."""

    alone: threading.RLock = field(default_factory=threading.RLock)
    """Held by who allocates, captures, or synchronises the whole device. Replays need none of it."""
    lost: str | None = None


class CudaExecutor:
    """Runs programs one at a time. Every method is called by one thread; a device has an executor per compute lane."""

    changes_threads = False

    def __init__(self, lanes: Lanes, shared: Shared) -> None:
        self._lanes = lanes
        self._shared = shared
        self._thread: int | None = None
        """The one that this executor was last called by."""
        self._driver = lanes.driver
        self._feeder = Feeder()
        self._transfers = Transfers(lanes, self._feeder)
        self._answered = self._driver.event()
        self._stale: set[str] = set()
        """Models whose residents may be wrong, because a copy or a kernel failed."""
        self._expected: CudaProgram | None = None
        self._ahead: CudaProgram | None = None
        """The program whose prefix was submitted before its turn."""
        self._epilogue: CudaProgram | None = None
        """The program whose epilogue is put off until the next inference has been issued."""
        self._admitted: list[CudaProgram] = []

    def __enter__(self) -> "CudaExecutor":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        self._adopt()

    def _adopt(self) -> None:
        if self._thread != threading.get_ident():
            with self._shared.alone:
                self._driver.adopt_thread(self._lanes.compute)
            self._thread = threading.get_ident()

    def close(self) -> None:
        """Let the lanes finish and end; programs that were admitted are dismissed."""
        for program in self._admitted:
            self.dismiss(program)
        if self._shared.lost is None:
            self.settle()
        self._feeder.close()

    @property
    def lost(self) -> str | None:
        return self._shared.lost

    def load(self, program: Program, *, follow: Follow | None = None) -> float:
        """Put a program's initial residents in place and wait for them. Returns the seconds.

        A program that is new to the device is admitted. Raises DeviceError, and MemoryExceeded if its kernels find
        too little room.
        """
        assert isinstance(program, CudaProgram)
        start = time.perf_counter()
        self._bring(program)
        if program.ready.pool is None:
            with self._shared.alone:
                self._admit(program)
        return time.perf_counter() - start

    def _bring(self, program: CudaProgram) -> None:
        with self._faults(program):
            self._adopt()
            self._ahead = None
            self._flush_epilogue()
            self._transfers.take(program.name)
            transfer = self._transfers.submit(program, program.schedule.residents)
            self._transfers.take(program.name)
            self._driver.synchronize(transfer.event)
            _refuse_failed(program, [transfer])
            self._stale.discard(program.name)

    def settle(self) -> None:
        """Wait until the swap-in lane has nothing left to do."""
        self._flush_epilogue()
        self._feeder.drain()
        end = self._driver.event()
        with self._driver.on(self._lanes.swap_in):
            self._driver.record(end)
        self._driver.synchronize(end)

    def expect(self, program: Program | None, *, followed: bool = False) -> None:
        """Say what runs behind the next run: its prefix is copied behind that run's own copies.

        The prefix goes to free bytes of that model's own partition, so a wrong guess costs the copies and no more.
        """
        assert program is None or isinstance(program, CudaProgram)
        self._expected = program

    def expect_behind(self, program: Program, *, followed: bool = False) -> None:
        """Nothing comes of it: what runs has been issued as a whole, and its thread has the driver's lanes."""

    def run(
        self,
        program: Program,
        inputs: Sequence[torch.Tensor],
        *,
        traced: bool = False,
        follow: Follow | None = None,
        serial: bool = False,
    ) -> Result:
        """Run one inference. See `runtime.backend.Executor`. `follow` hears when it began and ended, and no more."""
        assert isinstance(program, CudaProgram)
        with self._faults(program):
            self._adopt()
        start = time.perf_counter()
        if program.ready.pool is None or program.name in self._stale:
            self.load(program)
        prefetched = self._ahead is program
        with self._faults(program):
            watch = Stopwatch(self._driver, program) if traced else None
            self._issue(program, inputs, watch, serial)
            self._driver.synchronize(self._answered)
            outputs = program.buffers.taken()
            latency_s = time.perf_counter() - start
            self._bring_back(program, watch)
        if follow is not None:
            follow(whole_inference(program, start, start + latency_s))
        stall_s = 0.0 if program.compute_s is None else max(0.0, latency_s - program.compute_s)
        timeline = None
        if watch is not None:
            self.settle()
            timeline = watch.timeline()
        return Result(outputs, latency_s, stall_s, program.link_bytes, timeline, prefetched)

    def capture(self, program: Program) -> Capture | None:
        """How a program is issued; None before it is loaded. Any thread."""
        assert isinstance(program, CudaProgram)
        ready = program.ready
        if ready.pool is None:
            return None
        graphs = len({id(graph) for graph in (ready.whole, ready.rest) if graph is not None})
        return Capture(graphs, ready.graph_bytes, ready.refused)

    def _issue(
        self, program: CudaProgram, inputs: Sequence[torch.Tensor], watch: Stopwatch | None, serial: bool
    ) -> None:
        """Give the device everything up to the outputs, and what may run beside it."""
        expected, self._expected = self._expected, None
        ahead, self._ahead = self._ahead, None
        if self._epilogue is not None and self._epilogue.name == program.name:
            self._flush_epilogue()
        earlier = self._transfers.take(program.name)
        _refuse_failed(program, earlier)
        program.buffers.fill(inputs)
        with self._driver.on(self._lanes.compute):
            for transfer in earlier:
                self._driver.wait(transfer.event)
        commands = program.schedule.rest if ahead is program else program.schedule.whole
        graph = program.ready.rest if ahead is program else program.ready.whole
        if watch is None and not serial and graph is not None:
            behind = self._replay(program, graph)
        else:
            with self._shared.alone:  # until its activations are gone, too
                behind = self._stream(program, commands, watch, serial)
        with self._driver.on(self._lanes.compute):
            self._driver.record(self._answered)
        if expected is not None and expected.name not in (program.name, *self._stale):
            self._transfers.submit(expected, expected.schedule.prefix, behind)
            self._ahead = expected
        self._flush_epilogue(behind)

    def _replay(self, program: CudaProgram, graph: Graph) -> Event:
        with self._driver.on(self._lanes.compute):
            graph.replay()
        return program.link_free

    def _stream(
        self, program: CudaProgram, commands: Commands, watch: Stopwatch | None, serial: bool
    ) -> Event | None:
        """Issue command by command. What comes to the swap-in stream next is behind the copies by itself."""
        frame: Frame = [None] * program.frame_slots
        events = [self._driver.event() for _ in range(commands.events)]
        perform = program.performing(self._driver, frame)
        if watch is not None:
            perform = watch.timing(perform)
            with self._driver.on(self._lanes.compute):
                watch.start()
        feeder = self._feeder if program.staged else None
        with self._driver.allocating(program.pool):
            issue_inference(self._lanes, program, commands, events, frame, perform, feeder, serial=serial)
        return None

    def _bring_back(self, program: CudaProgram, watch: Stopwatch | None) -> None:
        """Submit the epilogue, or put it off if another inference is about to come."""
        copies = program.schedule.epilogue
        if watch is not None:
            perform = watch.timing(program.performing(self._driver, []))
            self._transfers.submit(program, copies, perform=perform)
        elif self._ahead is not None and copies:
            self._epilogue = program
        elif copies:
            self._transfers.submit(program, copies)

    def _flush_epilogue(self, behind: Event | None = None) -> None:
        program, self._epilogue = self._epilogue, None
        if program is not None:
            self._transfers.submit(program, program.schedule.epilogue, behind)

    def _admit(self, program: CudaProgram) -> None:
        """Run a new program once and capture it, so that nothing is allocated or compiled when requests come."""
        program.ready.pool = pool = fitting_pool(self._lanes, program.graph, program.plan.steps, program.zone)
        try:
            self._try_out(program)
        except CohabitError:
            program.ready.pool = None
            pool.close()
            raise
        self._admitted.append(program)
        capture(self._lanes, program)
        if program.ready.whole is not None:
            self.run(program, program.examples())
            self.settle()
        else:
            fields = {"model": program.name, "batch": program.batch, "reason": program.ready.refused}
            _log.warning("program is issued op by op, not as one graph", extra={"fields": fields})

    def _try_out(self, program: CudaProgram) -> None:
        try:
            self.run(program, program.examples())
        except DeviceError:
            _refuse_narrow(program)
            raise
        _refuse_narrow(program)
        self.settle()
        if program.pool.held_bytes:
            raise DeviceError(
                f"{program.name}: {format_bytes(program.pool.held_bytes)} of its workspace stay taken by a library"
                " after an inference; what a library keeps must not lie there"
            )

    def dismiss(self, program: Program) -> None:
        """Give back the graphs, the pool and the buffers of a program that will not be run any more."""
        assert isinstance(program, CudaProgram)
        if self._shared.lost is not None:
            return  # nothing can be given back to a device that does not answer: it ends with the process
        self.settle()
        self._ahead = self._expected = None
        self._admitted = [p for p in self._admitted if p is not program]
        with self._shared.alone:
            program.close()

    @contextmanager
    def _faults(self, program: CudaProgram) -> Iterator[None]:
        """Turn whatever goes wrong into DeviceError, or DeviceLost where the device is gone."""
        if self._shared.lost is not None:
            raise DeviceLost(f"{program.name}: the device is lost ({self._shared.lost}); start the server anew")
        try:
            yield
        except Exception as error:
            self._stale.add(program.name)
            with self._shared.alone:
                traceback.clear_frames(error.__traceback__)  # activations of the run that failed
                well = self._driver.well()
            if not well:
                self._shared.lost = str(error)
                raise DeviceLost(f"{program.name}: the device is lost: {error}") from error
            program.forget()
            if isinstance(error, DeviceError):
                raise
            raise DeviceError(f"{program.name}: {error}") from error


def _refuse_narrow(program: CudaProgram) -> None:
    """Raise MemoryExceeded if kernels have found no room, even if they made do with less: that may change bits."""
    if (wanted := program.pool.refused_bytes) is not None:
        raise MemoryExceeded(
            f"{program.name}, batch {program.batch}: torch's allocator wanted {format_bytes(wanted)} more than the"
            f" {format_bytes(program.zone.nbytes)} that the plan has for activations and scratch; measure the model"
            " again on this device, or give it a larger workspace"
        )


def _refuse_failed(program: CudaProgram, transfers: Sequence[Transfer]) -> None:
    """Raise DeviceError if one of the transfers failed."""
    for transfer in transfers:
        if transfer.error is not None:
            raise DeviceError(f"{program.name}: a copy failed: {transfer.error}") from transfer.error
