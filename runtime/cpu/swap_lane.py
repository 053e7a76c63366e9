"""Swap lanes of the CPU: threads that copy in order, and the counters by which lanes wait for each other."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cohabit.runtime.binding.draft import SwapStep
from cohabit.runtime.recording import Recording

_log = logging.getLogger("cohabit.runtime")


class Counter:
    """Monotonic counter that threads can wait for. Reading takes no lock; advancing takes one only to wake a waiter.

    A waiter is woken only when its value is reached: woken after every op, it would take the GIL from the computing
    thread each time.
    """

    def __init__(self) -> None:
        self.value = 0
        self._awaited: list[int] = []
        self._least_awaited = math.inf
        self._reached = threading.Condition()

    def advance(self, value: int) -> None:
        """Set a larger value. Called only by the thread that owns the counter."""
        self.value = value
        if value >= self._least_awaited:
            with self._reached:
                self._reached.notify_all()

    def wait(self, value: int) -> None:
        """Wait until the counter has reached `value`."""
        if self.value >= value:
            return
        with self._reached:
            self._awaited.append(value)
            self._least_awaited = min(self._awaited)
            while self.value < value:
                self._reached.wait()
            self._awaited.remove(value)
            self._least_awaited = min(self._awaited, default=math.inf)


@dataclass(slots=True)
class LaneRun:
    """One inference in progress: its steps' positions on the lanes' counters, and its error.

    A *ticket* is the value that a swap lane's counter reaches after a given number of the run's steps on that lane.
    """

    start_s: float
    compute_base: int
    """The compute lane's counter before this run."""
    swap_in_base: int
    """The swap-in lane's counter before this run's swap-ins."""
    swap_out_base: int
    """The swap-out lane's counter before this run's swap-outs."""
    error: BaseException | None = None
    """Error of the first failed copy."""
    failed: dict[int, BaseException] = field(default_factory=dict)
    """Error of each tensor whose copy failed and has not been repeated."""
    restores: Mapping[int, int] = field(default_factory=dict)
    """Ticket of each initial resident that this run restores."""
    recording: Recording | None = None
    """Times of the steps; None if the run is not recorded."""
    hand_over: Callable[[], None] | None = None
    """Called with the recording complete, after the last copy."""

    def fail(self, tensor: int, error: BaseException) -> None:
        """Record a failed copy."""
        self.error = self.error or error
        self.failed[tensor] = error

    @property
    def unrestored(self) -> BaseException | None:
        """Error of a failed restore that has not been repeated."""
        return next((error for tensor, error in list(self.failed.items()) if tensor in self.restores), None)

    def swap_in_ticket(self, count: int) -> int:
        """Return the ticket of the first `count` swap-ins; 0 for none, so that no earlier run is awaited."""
        return self.swap_in_base + count if count else 0

    def swap_out_ticket(self, count: int) -> int:
        """Return the ticket of the first `count` swap-outs."""
        return self.swap_out_base + count


class SwapLane:
    """A thread that makes prepared copies in the order of their submission."""

    def __init__(self, name: str, computes: Counter, wait_for_others: Callable[[LaneRun, int], None]) -> None:
        """`wait_for_others` waits for a number of a run's steps on the other swap lane."""
        self.done = Counter()
        self.submitted = 0
        self.busy_s = 0.0
        self._computes = computes
        self._wait_for_others = wait_for_others
        self._queue: deque[tuple[LaneRun, Sequence[SwapStep]]] = deque()
        self._wake = threading.Semaphore(0)
        self._closing = False
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it is running."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread, if started, after it has finished its queue."""
        self._closing = True
        self._wake.release()
        if self._thread is not None:
            self._thread.join()

    def submit(self, run: LaneRun, steps: Sequence[SwapStep]) -> None:
        """Queue copies. `done` counts them, starting at the previous value of `submitted`."""
        if steps:
            self.submitted += len(steps)
            self._queue.append((run, steps))
            self._wake.release()

    def copy_here(self, run: LaneRun, steps: Sequence[SwapStep]) -> float:
        """Make copies in the calling thread. The lane must be idle. Returns the seconds."""
        before_s = self.busy_s
        self.submitted += len(steps)
        for step in steps:
            self._copy(run, step)
        self.done.advance(self.submitted)
        return self.busy_s - before_s

    def finish(self, run: LaneRun) -> None:
        """Call a run's `hand_over` after all copies submitted before."""
        self._queue.append((run, ()))
        self._wake.release()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            if self._closing and not self._queue:
                return
            run, steps = self._queue.popleft()
            if not steps:
                _hand_over(run)
            for step in steps:
                self._copy(run, step)
                self.done.advance(self.done.value + 1)

    def _copy(self, run: LaneRun, step: SwapStep) -> None:
        self._computes.wait(run.compute_base + step.computes_before)
        if step.others_before:
            self._wait_for_others(run, step.others_before)
        start = time.perf_counter()
        try:
            step.copy()
        except Exception as error:  # the lane continues, and the run receives the error
            run.fail(step.tensor, error)
        end = time.perf_counter()
        self.busy_s += end - start
        if run.recording is not None:
            run.recording.note(step, start, end)


def _hand_over(run: LaneRun) -> None:
    assert run.hand_over is not None
    try:
        run.hand_over()
    except Exception:  # the lane goes on
        _log.exception("what the lanes did could not be handed over")
