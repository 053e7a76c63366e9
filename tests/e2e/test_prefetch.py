"""The first swap-ins of a queued model are issued while another model computes, with plans as served."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.host.store import StoreKind
from tests.e2e.serving import READY_S, Running, eventually, metric, serving
from tests.e2e.stacks import Stacks, answer, is_answer_of

SEEDS = {"a": 0, "b": 1}
TIMES = 4


def hits(server: Running) -> float:
    return sum(metric(server.metrics_address, "cohabit_prefetch_hits", name) for name in SEEDS)


def answer_all_at_once(server: Running) -> float:
    """Let requests of both models queue up before the first is executed; returns the prefetches that hit."""
    before, lane = hits(server), server.engine._lanes[0]
    busy, go_on = threading.Event(), threading.Event()

    def occupy() -> bool:
        busy.set()
        return go_on.wait(READY_S)

    held = asyncio.run_coroutine_threadsafe(lane.between(occupy), server.loop)
    assert busy.wait(READY_S)
    with ThreadPoolExecutor(TIMES * len(SEEDS)) as clients:
        asked = []
        for count in range(1, TIMES + 1):
            for name, seed in SEEDS.items():  # in turns, as they are executed then
                asked.append((seed, clients.submit(answer, server, name)))
                eventually(lambda name=name, count=count: lane.pending(name) == count)
        go_on.set()
    assert held.result()
    assert all(is_answer_of(seed, output.result()) for seed, output in asked)
    return hits(server) - before


@pytest.mark.parametrize("store", ["ram", "file"])
def test_queued_models_are_prefetched(stacks: Stacks, fixed_plans: Path, tmp_path: Path, store: StoreKind) -> None:
    for name, seed in SEEDS.items():
        stacks.put(tmp_path, name, seed)
    with serving(tmp_path, "5MiB", fixed_plans, store=store, batch_sizes=(1,)) as server:
        assert answer_all_at_once(server) > 0
        server.engine.prefetch(False)
        assert answer_all_at_once(server) == 0
