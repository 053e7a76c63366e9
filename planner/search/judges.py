"""Candidates judged on several cores: in threads where that is compiled code, in processes where it is Python."""

import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from planner.problem import Cost, Problem
from planner.search.registry import maker
from planner.search.searcher import AnySearcher

POLL_S = 0.05
"""How often a search that waits for other processes looks whether it is over."""


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
            self._file.close()

    def judge(self, candidates: Sequence[Any], good_s: float, is_over: Callable[[], bool]) -> list[Cost]:
        """The candidates' costs, and of no more once it is late."""
        costs: list[Cost] = []
        for cost in self._judged(candidates, good_s, is_over):
            costs.append(cost)
            if is_over():
                break
        return costs

    def _judged(self, candidates: Sequence[Any], good_s: float, is_over: Callable[[], bool]) -> Iterator[Cost]:
        if self._threads is not None and len(candidates) > 1:
            if self._state.is_compiled:
                return self._threads.map(self._state.judge, candidates, [good_s] * len(candidates))
            if self.has_processes():
                assert self._processes is not None
                return _until([self._processes.submit(_judge_there, c, good_s) for c in candidates], is_over)
        return (self._state.judge(c, good_s) for c in candidates)

    def has_processes(self) -> bool:
        """Whether others are ready to judge. They take seconds to start, in which there is enough to do here."""
        if self._processes is None:
            # As an argument, a large problem would have to be waited for.
            self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115
            pickle.dump(self._of_processes, self._file)
            self._file.flush()
            self._processes = ProcessPoolExecutor(self._workers, self._context, _start_judge, (self._file.name,))
            self._started = self._processes.submit(_nothing)
        assert self._started is not None
        return self._started.done()


def _until(futures: Sequence[Future[Cost]], is_over: Callable[[], bool]) -> Iterator[Cost]:
    """Results in order, while there is time to wait for them."""
    for future in futures:
        while not wait([future], POLL_S).done:
            if is_over():
                return
        yield future.result()


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


def _start_judge(file: str) -> None:
    global _judge
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the search decides
    searcher, problem, seed = pickle.loads(Path(file).read_bytes())
    _judge = maker(searcher)(problem, seed)


def _nothing() -> None:
    pass


def _judge_there(candidate: Any, good_s: float) -> Cost:
    assert _judge is not None
    return _judge.judge(candidate, good_s)
