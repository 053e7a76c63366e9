"""The first start: models are served on quick plans, which are replaced; and what an engine's process imports."""

import multiprocessing
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner.plan import Plan
from planner.shapes import Bucket
from server.models import preparer
from server.models.prepared import Prepared
from server.models.preparer import ModelPreparer
from tests.e2e.archives import Archives
from tests.e2e.serving import Running, infer, serving

MODEL, BATCHES = "bert_small", (1, 2)


def plans_of(server: Running) -> dict[Bucket, Plan]:
    return dict(server.loaded.placed_models[MODEL, 1].plans)


def evaluations(plans: dict[Bucket, Plan]) -> set[int]:
    return {plan.provenance.evaluations for plan in plans.values() if plan.provenance is not None}


@pytest.fixture
def may_measure(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Models are measured in the background once it is set."""
    allowed, measured = threading.Event(), ModelPreparer.measured

    def measured_later(self: ModelPreparer, prepared: Prepared) -> Prepared:
        assert allowed.wait(60)
        return measured(self, prepared)

    monkeypatch.setattr(ModelPreparer, "measured", measured_later)
    return allowed


def test_a_model_is_served_on_quick_plans_until_it_is_measured_and_better_ones_are_found(
    archives: Archives, tmp_path: Path, may_measure: threading.Event
) -> None:
    repository, inputs = archives.repository(MODEL), archives.inputs(MODEL, 1)
    with serving(repository, "50%", tmp_path, engine="process", batch_sizes=BATCHES) as server:
        placed, quick = server.loaded.placed_models[MODEL, 1], plans_of(server)
        assert placed.prepared.known.is_provisional
        assert evaluations(quick) == {1}
        first = infer(server.address, MODEL, inputs)
        may_measure.set()
        server.until_planned()
        best = plans_of(server)
        assert not placed.prepared.known.is_provisional
        assert all(best[batch] is not quick[batch] for batch in map(Bucket, BATCHES))
        assert all(program.plan is best[batch] for batch, program in placed.servable.programs.items())
        for batch in map(Bucket, BATCHES):
            profile, provenance = placed.prepared.profiles[batch], best[batch].provenance
            assert provenance is not None
            assert best[batch].profile == profile.fingerprint
            assert provenance.latency_s <= provenance.baseline_s, "no worse than a quick plan by the same profile"
        again = infer(server.address, MODEL, inputs)
        assert {name: array.tobytes() for name, array in again.items()} == {
            n: a.tobytes() for n, a in first.items()
        }
        partition = placed.footprint.partition_bytes
    with serving(repository, "50%", tmp_path, engine="process", batch_sizes=BATCHES) as server:
        assert server.loaded.placement is not None
        assert not server.loaded.placement._tasks, "a warm start has nothing to improve"
        assert not server.loaded.placed_models[MODEL, 1].prepared.known.is_provisional
        if server.loaded.placed_models[MODEL, 1].footprint.partition_bytes == partition:
            assert plans_of(server) == best


def test_a_model_that_cannot_be_measured_is_still_served(
    archives: Archives, tmp_path: Path, may_measure: threading.Event
) -> None:
    """Its archive changes while the server runs, so that what a worker measures is another model."""
    repository, inputs = archives.repository(MODEL), archives.inputs(MODEL, 1)
    with serving(repository, "50%", tmp_path, engine="process", batch_sizes=BATCHES) as server:
        quick = plans_of(server)
        archive = repository / MODEL / "1" / "model.pt2"
        archive.unlink()
        archive.symlink_to(archives.archive("ranker"))
        may_measure.set()
        server.until_planned()
        assert plans_of(server) == quick
        assert infer(server.address, MODEL, inputs)


def test_a_model_that_is_loaded_later_begins_with_quick_plans_too(archives: Archives, tmp_path: Path) -> None:
    repository, inputs = archives.repository("ranker"), archives.inputs("ranker", 1)
    with serving(repository, "8MiB", tmp_path, engine="process", model_control="explicit") as server:
        server.on_loop(server.engine.load("ranker", None))
        (placed,) = server.loaded.memory.placed_models.values()
        answer = infer(server.address, "ranker", inputs)["score"]
        server.until_planned()
        assert not placed.prepared.known.is_provisional
        assert all(
            plan.profile == placed.prepared.profiles[batch].fingerprint for batch, plan in placed.plans.items()
        )
        assert infer(server.address, "ranker", inputs)["score"].tobytes() == answer.tobytes()


def test_without_a_quick_start_models_are_measured_one_by_one_and_planned_before_they_are_served(
    archives: Archives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that are prepared or measured meanwhile would be in the times."""
    models, steps = ("ranker", "lstm"), []

    def noted(step: str, function: Any, *arguments: Any, **options: Any) -> Any:
        steps.append(f"{step} begins")
        try:
            return function(*arguments, **options)
        finally:
            steps.append(f"{step} ends")

    for step in ("prepare_in_worker", "measure_in_worker"):
        monkeypatch.setattr(preparer, step, partial(noted, step, getattr(preparer, step)))
    repository = archives.repository(*models)
    with serving(repository, "50%", tmp_path, engine="process", batch_sizes=BATCHES, quick_start=False) as server:
        assert server.loaded.placement is not None
        assert not server.loaded.placement._tasks
        assert all(not server.loaded.placed_models[m, 1].prepared.known.is_provisional for m in models)
        assert not multiprocessing.active_children(), "nothing is left to prepare or to plan"
    assert steps[-4:] == ["measure_in_worker begins", "measure_in_worker ends"] * 2
    assert sorted(steps[:-4]) == ["prepare_in_worker begins"] * 2 + ["prepare_in_worker ends"] * 2


def test_an_engine_imports_neither_compilers_nor_transports(archives: Archives, tmp_path: Path) -> None:
    """Models are prepared and planned in other processes, and a config.pbtxt needs protocol buffers only."""
    repository = archives.repository(MODEL)
    (repository / MODEL / "config.pbtxt").write_text(f'name: "{MODEL}" max_batch_size: 2')
    script = f"""
import asyncio, sys
from pathlib import Path
import server.engine_process
from server.config.config import ServeConfig
from server.config.sizes import parse_memory
from server.engine_host import Engine

async def start():
    memory, cache = parse_memory("50%"), Path({str(tmp_path)!r})
    engine = Engine(ServeConfig(Path({str(repository)!r}), memory, cache=cache), lambda entry: None)
    print(await engine.start())
    await engine.stop()

if __name__ == "__main__":
    asyncio.run(start())
    tops = {{name.partition(".")[0] for name in sys.modules}}
    heavy = tops & {{"grpc", "rich", "numba", "llvmlite", "scipy", "aiohttp", "transformers"}}
    heavy |= sys.modules.keys() & {{"torch._dynamo", "torch._export.serde.serialize", "torch._inductor"}}
    assert not heavy, heavy
"""
    path = tmp_path / "start.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert MODEL in done.stdout
