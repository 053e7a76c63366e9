"""Evaluates candidates on several cores: compiled code in threads, Python code in processes."""

import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from planner.problem import Cost, Problem
from planner.search.registry import make
from planner.search.searcher import AnySearcher

POLL_S = 0.05
"""How often a search that waits for worker processes checks whether it is over."""


class EvaluationPool:
    """The workers of one search. They end with the context."""

    def __init__(self, searcher: str, problem: Problem, seed: int, workers: int, state: AnySearcher) -> None:
        self._state = state
        self._workers = workers
        self._arguments = (searcher, problem, seed)
        self._threads = ThreadPoolExecutor(workers) if workers > 1 else None
        self._context = _Spawning()
        self._processes: ProcessPoolExecutor | None = None
        self._started: Future[int] | None = None

    def __enter__(self) -> "EvaluationPool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._processes is not None:
            self._processes.shutdown(wait=False, cancel_futures=True)
            self._context.terminate()
            self._file.close()

    def evaluate(self, candidates: Sequence[Any], good_s: float, is_over: Callable[[], bool]) -> list[Cost]:
        """Return the candidates' costs in order, cut short once `is_over`."""
        costs: list[Cost] = []
        for cost in self._costs(candidates, good_s, is_over):
            costs.append(cost)
            if is_over():
                break
        return costs

    def _costs(self, candidates: Sequence[Any], good_s: float, is_over: Callable[[], bool]) -> Iterator[Cost]:
        if self._threads is not None and len(candidates) > 1:
            if self._state.is_compiled:
                return self._threads.map(self._state.evaluate, candidates, [good_s] * len(candidates))
            if self.has_processes():
                assert self._processes is not None
                return _until([self._processes.submit(_evaluate_in_worker, c, good_s) for c in candidates], is_over)
        return (self._state.evaluate(c, good_s) for c in candidates)

    def has_processes(self) -> bool:
        """Whether worker processes are ready. They take seconds to start; this process evaluates until then."""
        if self._processes is None:
            # Passed as an argument, a large problem would block the start of each process.
            self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115
            pickle.dump(self._arguments, self._file)
            self._file.flush()
            self._processes = ProcessPoolExecutor(self._workers, self._context, _start_worker, (self._file.name,))
            self._started = self._processes.submit(int)
        assert self._started is not None
        return self._started.done()


def _until(futures: Sequence[Future[Cost]], is_over: Callable[[], bool]) -> Iterator[Cost]:
    """Results in order, until `is_over`."""
    for future in futures:
        while not wait([future], POLL_S).done:
            if is_over():
                return
        yield future.result()


class _Spawning(SpawnContext):
    """A spawn context that can terminate the processes that it started."""

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


_searcher: AnySearcher | None = None
"""In a worker process: its own copy of the searcher."""


def _start_worker(file: str) -> None:
    global _searcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the driver decides
    searcher, problem, seed = pickle.loads(Path(file).read_bytes())
    _searcher = make(searcher, problem, seed)


def _evaluate_in_worker(candidate: Any, good_s: float) -> Cost:
    assert _searcher is not None
    return _searcher.evaluate(candidate, good_s)
