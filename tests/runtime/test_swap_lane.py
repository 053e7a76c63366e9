"""The counters by which lanes wait for each other, and which lane makes the copies."""

import threading
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import nn

from cohabit.planner.memory import Memory
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Link, Profile
from cohabit.planner.search.driver import search
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cpu.swap_lane import Counter
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from tests.support.runtime import models
from tests.support.runtime.backends import ROOM_BYTES, cpu, opened
from tests.support.runtime.plans import streaming_plan, with_room
from tests.support.server.server_fakes import eventually


def test_a_thread_is_woken_when_its_value_is_reached_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, woken = Counter(), 0
    notify_all = counter._reached.notify_all

    def counted() -> None:
        nonlocal woken
        woken += 1
        notify_all()

    monkeypatch.setattr(counter._reached, "notify_all", counted)
    ended: list[int] = []

    def wait_for(value: int) -> None:
        counter.wait(value)
        ended.append(value)

    threads = [threading.Thread(target=wait_for, args=(value,)) for value in (7, 3)]
    for thread in threads:
        thread.start()
    eventually(lambda: sorted(counter._awaited) == [3, 7])
    counter.advance(1)
    counter.advance(2)
    assert (woken, ended) == (0, [])
    counter.advance(4)
    threads[1].join(60)
    assert (woken, ended) == (1, [3])
    eventually(lambda: counter._awaited == [7])
    for value in (5, 6):
        counter.advance(value)
    assert (woken, ended) == (1, [3])
    counter.advance(7)
    threads[0].join(60)
    assert (woken, ended) == (2, [3, 7])
    counter.wait(7)


class Kept(nn.Module):
    """No op reads its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.arange(2048.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value


def test_parameters_that_no_op_reads_are_copied_before_they_are_answered(tmp_path: Path) -> None:
    lowered = models.lowered(Kept(), {"x": torch.zeros(2, 3)}, tmp_path, "kept", [2], dynamic=False)
    (graph,) = lowered.graphs.values()
    link = Link(0.0, 1e12)
    profile = Profile(graph.fingerprint, "", (), link, link)
    plan = search(Problem(graph, profile, Memory(16 * 4096)))
    with opened(cpu, lowered) as bench:
        program = bench.backend.build(lowered, plan, profile, bench.arena, Bases(0, 0), bench.store)
        assert program.swap_ins
        bench.executor.load(program)
        (answer,) = bench.executor.run(program, lowered.examples(graph.bucket)).outputs
    assert torch.equal(answer, torch.arange(2048.0))


@pytest.mark.parametrize(
    ("gigabytes_per_s", "op_s", "inline"), [(1000.0, 1e-5, True), (0.001, 1e-5, False), (1000.0, 1e-2, False)]
)
def test_short_copies_between_short_ops_are_made_by_the_compute_lane(
    wide: Lowered, gigabytes_per_s: float, op_s: float, inline: bool
) -> None:
    with opened(cpu, wide) as bench:
        link = Link(0.0, gigabytes_per_s * 1e9)
        profile = Profile(bench.graph.fingerprint, "", (op_s,) * len(bench.graph.ops), link, link)
        for plan in (streaming_plan(bench.graph), resident_plan(bench.graph)):
            known = structs.replace(with_room(plan, ROOM_BYTES), profile=profile.fingerprint)
            bases = Bases(0, plan.memory.partition_bytes)
            program = bench.backend.build(wide, known, profile, bench.arena, bases, bench.store)
            assert program.copies_inline is (inline and bool(program.swap_ins or program.swap_outs))
