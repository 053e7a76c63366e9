"""Several training loops in threads under one budget: their ops overlap, and together they keep within it."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import cohabit
from cohabit.runtime.training.seen.process_limit import ProcessLimit

PATIENCE_S = 60.0
KIB = 1 << 10
LOOP = "loop"
"""Name of threads with a loop."""


class Gate:
    """An op that waits in the middle, and knows how many of its kind run at once."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Semaphore(0), threading.Event()
        self._lock = threading.Lock()
        self._running = self.most_running = 0

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._running += 1
            self.most_running = max(self.most_running, self._running)
        self.entered.release()
        assert self.open.wait(PATIENCE_S)
        with self._lock:
            self._running -= 1
        return x + 1


@pytest.fixture
def gated() -> Iterator[tuple[Gate, Callable[[torch.Tensor], torch.Tensor]]]:
    gate = Gate()
    with torch.library._scoped_library("budget_threads", "DEF") as library:
        library.define("wait(Tensor x) -> Tensor")
        library.impl("wait", gate.wait, "CPU")
        library.impl("wait", torch.empty_like, "Meta")
        try:
            yield gate, torch.ops.budget_threads.wait
        finally:
            gate.open.set()
            for thread in threading.enumerate():
                if thread.name == LOOP:
                    joined(thread)  # before the op is unregistered


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()), name=LOOP, daemon=True)
    thread.start()
    return thread, results


def joined(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_an_op_of_one_loop_does_not_hold_up_another(
    gated: tuple[Gate, Callable[[torch.Tensor], torch.Tensor]],
) -> None:
    gate, wait = gated
    weights = [torch.zeros(64 * KIB) for _ in range(2)]
    with cohabit.budget("4MiB", *weights):
        blocked, _ = in_thread(lambda: wait(weights[0]))
        assert gate.entered.acquire(timeout=PATIENCE_S)
        free, results = in_thread(lambda: (weights[1] + 1).sum().item())
        joined(free)
        gate.open.set()
        joined(blocked)
    assert results == [64 * KIB]


def test_ops_that_do_not_fit_together_run_one_after_the_other(
    gated: tuple[Gate, Callable[[torch.Tensor], torch.Tensor]],
) -> None:
    """Each needs its weights of 256 KiB and as much for its result; 800 KiB have room for one of them."""
    gate, wait = gated
    weights = [torch.full((64 * KIB,), float(number)) for number in range(3)]
    with cohabit.budget("800KiB", *weights) as limits:
        threads = [in_thread(lambda weight=weight: wait(weight).sum().item()) for weight in weights]  # type: ignore[misc]
        assert gate.entered.acquire(timeout=PATIENCE_S)
        gate.open.set()
        for thread, _ in threads:
            joined(thread)
        assert limits.peak_bytes <= 800 * KIB
    assert gate.most_running == 1
    assert [results for _, results in threads] == [[64.0 * KIB * (number + 1)] for number in range(3)]


def test_leaving_the_context_does_not_wait_for_a_blocked_op_which_ends_right(
    gated: tuple[Gate, Callable[[torch.Tensor], torch.Tensor]],
) -> None:
    gate, wait = gated
    weight = torch.ones(64 * KIB)
    with cohabit.budget("1MiB", weight):
        blocked, results = in_thread(lambda: wait(weight).sum().item())
        assert gate.entered.acquire(timeout=PATIENCE_S)
    gate.open.set()
    joined(blocked)
    assert results == [2 * 64 * KIB]


def test_the_storages_of_a_loop_that_has_ended_make_way() -> None:
    """Its last op predicted a use by its next one, which is nearer than all uses of the running loop."""
    ended = [torch.ones(64 * KIB)]
    running = [torch.ones(64 * KIB - 64 * number) for number in range(3)]

    def sums(weights: list[torch.Tensor], rounds: int) -> float:
        return sum(weight.sum().item() for _ in range(rounds) for weight in weights)

    with cohabit.budget("800KiB", *ended, *running) as limits:
        joined(in_thread(lambda: sums(ended, 100))[0])
        sums(running, 50)
        before = limits.moved_bytes
        sums(running, 50)
        assert limits.moved_bytes == before


def test_what_running_ops_may_still_allocate_counts_towards_a_total(
    gated: tuple[Gate, Callable[[torch.Tensor], torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 KiB are free of the total: enough for one op's result of 256 KiB, and not for that of a second beside it."""
    gate, wait = gated
    weights = [torch.zeros(64 * KIB) for _ in range(2)]
    divisions: list[int] = []
    tensor_bytes = ProcessLimit.tensor_bytes

    def counted(limit: ProcessLimit, arrived_bytes: int) -> int:
        divisions.append(arrived_bytes)
        return tensor_bytes(limit, arrived_bytes)

    monkeypatch.setattr(ProcessLimit, "headroom_bytes", lambda limit, arriving_bytes: 400 * KIB)
    monkeypatch.setattr(ProcessLimit, "tensor_bytes", counted)
    with cohabit.budget("64GiB total", *weights, store="file"):
        blocked, _ = in_thread(lambda: wait(weights[0]))
        assert gate.entered.acquire(timeout=PATIENCE_S)
        assert len(divisions) == 1, "on entering"
        joined(in_thread(lambda: weights[1] + 1)[0])
        assert len(divisions) == 2
        gate.open.set()
        joined(blocked)


def test_a_process_has_one_budget_at_a_time() -> None:
    model = nn.Linear(4, 4)
    with (
        cohabit.budget("1MiB", model),
        pytest.raises(RuntimeError, match="a process has one at a time"),
        cohabit.budget("1MiB", nn.Linear(4, 4)),
    ):
        pass
    with cohabit.budget("1MiB", model):
        pass
