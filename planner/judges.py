"""Candidates judged on several cores: in threads where that is compiled code, in processes where it is Python."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.context import SpawnContext, SpawnProcess
from types import TracebackType
from typing import Any

from planner.problem import Cost, Problem
from planner.registry import maker
from planner.searcher import AnySearcher


class Judges:
    """What judges, as the search decides, and whatever it starts for that ends with it."""

    def __init__(self, searcher: str, problem: Problem, seed: int, workers: int, state: AnySearcher) -> None:
        self._state = state
        self._workers = workers
        self._of_processes = (searcher, problem, seed)
        self._threads = ThreadPoolExecutor(workers) if workers > 1 else None
        self._context = _Spawning()
        self._processes: ProcessPoolExecutor | None = None
        self._started: Future[None] | None = None

    def __enter__(self) -> "Judges":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._processes is not None:
            self._processes.shutdown(wait=False, cancel_futures=True)
            self._context.terminate()

    def judge(self, candidates: Sequence[Any], good_s: float, is_over: Callable[[], bool]) -> list[Cost]:
        """The candidates' costs, of one at least, and of no more once it is late."""
        costs: list[Cost] = []
        for cost in self._judged(candidates, [good_s] * len(candidates)):
            costs.append(cost)
            if is_over():
                break
        return costs

    def _judged(self, candidates: Sequence[Any], goods: Sequence[float]) -> Iterator[Cost]:
        if self._threads is not None and len(candidates) > 1:
            if self._state.is_compiled:
                return self._threads.map(self._state.judge, candidates, goods)
            if self.has_processes():
                assert self._processes is not None
                return self._processes.map(_judge_there, candidates, goods)
        return map(self._state.judge, candidates, goods)

    def has_processes(self) -> bool:
        """Whether others are ready to judge. They take seconds to start, in which there is enough to do here."""
        if self._processes is None:
            self._processes = ProcessPoolExecutor(self._workers, self._context, _start_judge, self._of_processes)
            self._started = self._processes.submit(_nothing)
        assert self._started is not None
        return self._started.done()


class _Spawning(SpawnContext):
    """Remembers the processes that it starts, so that a search which is over need not wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self._started: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        process = SpawnProcess(*args, **kwargs)
        self._started.append(process)
        return process

    def terminate(self) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            process.join()


_judge: AnySearcher | None = None
"""In a process that judges for another: its own copy of the search."""


def _start_judge(searcher: str, problem: Problem, seed: int) -> None:
    global _judge
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the search decides
    _judge = maker(searcher)(problem, seed)


def _nothing() -> None:
    pass


def _judge_there(candidate: Any, good_s: float) -> Cost:
    assert _judge is not None
    return _judge.judge(candidate, good_s)
