"""Tiled programs, executed by 4 processes over gloo, and their bytes; one start of processes for all."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.tiling_programs import SUBJECTS, Subject, random_program
from cohabit.planner.tiling.arrays import join_update, newarray
from cohabit.planner.tiling.costs import Moved
from cohabit.planner.tiling.graph import TilingGraph
from cohabit.planner.tiling.search import TilingPlan, plan_tiling
from cohabit.runtime.tiling import worker
from cohabit.runtime.tiling.execute import TiledRun, measured
from cohabit.runtime.tiling.worker import Worker, start
from tests.planner.test_tiling import BUILTINS, V, X

pytestmark = pytest.mark.process

PROCESSES = 4


def builtins(x: Any, v: Any) -> Any:
    return tuple(builtin(x, v) for builtin in BUILTINS)


def uneven(a: Any, b: Any) -> Any:
    """Random operators on arrays whose 37 rows and columns no number of workers divides."""
    return tuple(random_program(np.random.default_rng(7), [a / 37, b / 37], 14))


def gram(x: Any) -> Any:
    return join_update(lambda tile: tile.T @ tile, [x], [0], (x.shape[1], x.shape[1]))


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape)


CHECKED = (
    *SUBJECTS,
    Subject("all builtins", builtins, lambda _: (X, V), 16.0),
    Subject("uneven sizes", uneven, lambda _: (noise(37, 37), noise(37, 37))),
    Subject("a join of the user's", gram, lambda _: (noise(50, 6),)),
)
BADLY = ("linear regression", "k-means", "PCA")
CASES = [
    *((subject, search) for subject in CHECKED for search in ("exact", "random")),
    *((subject, "worst") for subject in CHECKED if subject.name in BADLY),
]


def graph_of(subject: Subject, workers: int) -> TilingGraph:
    inputs = subject.inputs(1)
    extra = int(subject.copies * sum(i.nbytes for i in inputs) / workers)
    return TilingGraph.of(subject.program(*map(newarray, inputs)), workers, extra)


@dataclass(frozen=True)
class Done:
    outputs: list[np.ndarray]
    moved: Moved
    predicted: Moved


def execute_all(picks: dict[tuple[str, str], tuple[int, ...]], own: Worker) -> dict[tuple[str, str], Any]:
    done = {}
    for subject, search in CASES:
        plan = TilingPlan(graph_of(subject, own.count), picks[subject.name, search])
        outputs, moved, _ = measured(plan, own)
        done[subject.name, search] = ([output.full_tensor().numpy() for output in outputs], moved)
    return done


def plan_of(subject: Subject, search: str, workers: int) -> TilingPlan:
    """Plan by a search, or choose at random: that executes moves that no search makes."""
    graph = graph_of(subject, workers)
    if search != "random":
        return plan_tiling(graph, search)
    rng = np.random.default_rng(1)
    return TilingPlan(graph, tuple(int(rng.integers(len(group.choices))) for group in graph.groups))


@pytest.fixture(scope="module")
def done() -> dict[tuple[str, str], Done]:
    """All programs in two tilings or three, planned here and executed in one start of processes."""
    plans = {(subject.name, search): plan_of(subject, search, PROCESSES) for subject, search in CASES}
    picks = {case: plan.picks for case, plan in plans.items()}
    with (
        pytest.MonkeyPatch.context() as patched
    ):  # forks need not import torch; test_tiling_command.py starts others
        patched.setattr(worker, "spawn", partial(start_processes, start_method="fork"))
        results = start(partial(execute_all, picks), PROCESSES)
    return {case: Done(*results[case], plan.moved) for case, plan in plans.items()}


@pytest.mark.parametrize(("subject", "search"), CASES, ids=lambda case: getattr(case, "name", case))
def test_tiled_programs_return_what_numpy_returns_and_move_the_bytes_predicted(
    done: dict[tuple[str, str], Done], subject: Subject, search: str
) -> None:
    expected, run = subject.program(*subject.inputs(1)), done[subject.name, search]
    assert run.moved == run.predicted
    for computed, value in zip(run.outputs, expected if isinstance(expected, tuple) else (expected,), strict=True):
        value = np.asarray(value)
        assert (computed.shape, computed.dtype) == (value.shape, value.dtype)
        assert np.abs(computed - value.astype(np.float64)).max() <= 1e-5 * np.abs(value).max()


def test_the_worst_tiling_moves_bytes_that_the_best_does_not(done: dict[tuple[str, str], Done]) -> None:
    for name in BADLY:
        assert 0 < 100 * done[name, "exact"].moved.wire < done[name, "worst"].moved.wire


def test_an_array_without_data_cannot_be_run() -> None:
    plan = plan_tiling(TilingGraph.of(newarray((8, 8), name="ratings") * 2, 1))
    with pytest.raises(ValueError, match="array ratings has no data; pass an array to newarray"):
        TiledRun(plan, Worker(0, 1)).load()


def joined(expected: int, own: Worker) -> int:
    assert dist.get_world_size() == expected
    return own.rank


def test_a_worker_of_torchrun_joins_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    assert start(partial(joined, 1), 1) == 0
    with pytest.raises(ValueError, match="torchrun started 1 processes for 2 workers; make the numbers equal"):
        start(partial(joined, 2), 2)
