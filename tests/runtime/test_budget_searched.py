"""`cohabit.budget` with a searcher: its plan of the recorded step says what leaves, and when copies begin."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cohabit
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Link
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.search.driver import search as search_here
from cohabit.runtime.training import budget
from cohabit.runtime.training.budget import Budget
from cohabit.runtime.training.planning import planned
from cohabit.runtime.training.planning.background import SearchRequest
from cohabit.runtime.training.planning.step_graph import StepUpdate, step_problem
from cohabit.runtime.training.record import Event, ObservedStep, RecordedStep
from cohabit.runtime.training.saved import SavedTensors
from cohabit.runtime.training.tracked import Tracked
from tests.support.runtime.loops import ROWS, WIDTH, Block

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 7


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled something, after which no step runs under the mode."""
    monkeypatch.setattr(budget, "has_compiled", lambda: False)


class SearchHere:
    """Stands for `BackgroundSearch`: searches in this process, which has the searchers compiled."""

    def __init__(self, request: SearchRequest) -> None:
        self._problem = Problem(request.graph, request.profile, request.memory, objective="period")
        self._searcher = request.searcher

    def poll(self) -> Plan:
        return search_here(self._problem, self._searcher)

    def close(self) -> None: ...


@pytest.fixture
def searched_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "BackgroundSearch", SearchHere)


class Skipping(nn.Module):
    """What the first layers make is used again by the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.into:
            x = layer(x).tanh()
            kept.append(x)
        for layer in self.out:
            x = layer(torch.cat([x, kept.pop()], 1)).sin()
        return x


class Unrolled(nn.Module):
    """A cell per row of the batch: other lengths are other steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x
        for _ in range(x.shape[0] // 32):
            state = self.cell(x, state)
        assert isinstance(state, torch.Tensor)
        return state


NETS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: nn.Sequential(*(Block() for _ in range(4))),
    "skipping": Skipping,
    "unrolled": Unrolled,
}


def ignore(number: int, limits: Budget) -> None: ...


def trained(
    net: str,
    memory: str | None,
    search: str | None = None,
    rows: Callable[[int], int] = lambda number: ROWS,
    during: Callable[[int, Budget], None] = ignore,
) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = NETS[net]()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []

    def train(number: int) -> None:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, rows(number) * WIDTH).view(-1, WIDTH) * (number + 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    if memory is None:
        for number in range(STEPS):
            train(number)
    else:
        with cohabit.budget(memory, model, optimizer, search=search) as limits:
            for number in range(STEPS):
                train(number)
                during(number, limits)
    return losses, [p.detach().clone() for p in model.parameters()]


def assert_eager_s(found: tuple[list[float], list[torch.Tensor]], net: str, **loop: Any) -> None:
    expected = trained(net, None, **loop)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("search", ["interval", "capuchin", "dynprog", "tflms", "on_demand"])
def test_a_planned_loop_has_eager_s_bits_within_the_budget(net: str, search: str, searched_here: None) -> None:
    followed = []

    def noted(number: int, limits: Budget) -> None:
        followed.append(limits.planned_by)
        assert limits.exceeded_bytes == 0
        if limits.limit_bytes is not None:
            assert limits.peak_bytes <= limits.limit_bytes

    assert_eager_s(trained(net, "60%", search, during=noted), net)
    assert followed == [None] * 3 + [search] * (STEPS - 3), "the third step is observed"


@pytest.mark.parametrize("search", ["interval", "autoswap"])
@pytest.mark.parametrize("net", ["gated", "skipping"])
def test_what_the_plan_chose_leaves_and_returns_no_earlier_than_planned(
    net: str, search: str, searched_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, returned = list[tuple[int, int]](), list[tuple[int, int]]()
    save, stay = SavedTensors._save, SavedTensors._stay

    def saved(self: SavedTensors, entry: Any, *rest: Any) -> None:
        left.append((self.record.number_of(entry.first_pack), self.record.at))
        save(self, entry, *rest)

    def loaded(self: SavedTensors, entry: Any, tracked: Tracked) -> None:
        if tracked.is_out and tracked.copy is None:
            returned.append((self.record.number_of(entry.first_pack), self.record.at))
        stay(self, entry, tracked)

    monkeypatch.setattr(SavedTensors, "_save", saved)
    monkeypatch.setattr(SavedTensors, "_stay", loaded)
    checked = 0

    def compared(number: int, limits: Budget) -> None:
        nonlocal checked
        advice = limits._saved.advice
        if advice is not None and number > 3:
            checked += 1
            assert {number for number, _ in left} == advice.moved
            planned_at = {n: event for event, numbers in advice.returning.items() for n in numbers}
            unpacked = [e for e in limits._record.step.events if e.nbytes < 0]  # type: ignore[union-attr]
            assert unpacked
            assert all(at >= planned_at[n] for n, at in returned)
            leaving_at = {n: event for event, numbers in advice.leaving.items() for n in numbers}
            assert all(at >= leaving_at[n] for n, at in left)
            state = limits._states[0]
            assert state.out_bytes >= advice.state_out_bytes.get(0, 0) > state.out_bytes - state.total_bytes / 2
        left.clear()
        returned.clear()

    trained(net, "60%", search, during=compared)
    assert checked == STEPS - 4


def test_steps_that_depart_from_the_plan_go_on_with_first_saved_first_out(searched_here: None) -> None:
    lengths = [ROWS, ROWS, ROWS, ROWS - 64, ROWS, ROWS - 128, ROWS]
    followed = []

    def noted(number: int, limits: Budget) -> None:
        followed.append(limits.planned_by)

    rows = lengths.__getitem__
    assert_eager_s(trained("unrolled", "60%", "interval", rows, noted), "unrolled", rows=rows)
    assert followed[-1] == "interval"


@pytest.mark.parametrize(
    ("search", "reason"),
    [("genetic", "minimises the latency in a partition"), ("vdnn_conv", "needs more memory")],
)
def test_without_a_plan_a_warning_says_why_and_the_loop_goes_on(
    search: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def awaited(number: int, limits: Budget) -> None:
        assert limits._planner is not None
        if limits._planner._search is not None:
            limits._planner._search._process.wait()
        assert limits.planned_by is None

    with caplog.at_level(logging.WARNING, "cohabit.training"):
        assert_eager_s(trained("gated", "60%", search, during=awaited), "gated")
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith(f"search='{search}' has no plan of this loop's steps, so what was saved first leaves")
    assert reason in message


def test_a_plan_is_found_by_a_process_of_its_own_which_ends_with_the_context() -> None:
    followed, processes = list[str | None](), []

    def awaited(number: int, limits: Budget) -> None:
        assert limits._planner is not None
        if limits._planner._search is not None:
            processes.append(limits._planner._search._process)
            processes[0].wait()
        followed.append(limits.planned_by)
        assert "planned by interval" in str(limits) or limits.planned_by is None

    assert_eager_s(trained("skipping", "60%", "interval", during=awaited), "skipping")
    assert followed[-1] == "interval"
    assert len(set(processes)) == 1
    trained("skipping", "60%", "interval", during=lambda number, limits: processes.extend(under_way(limits)))
    assert processes[-1] is not processes[0]
    assert processes[-1].returncode is not None, "it was ended"


def under_way(limits: Budget) -> list[Any]:
    assert limits._planner is not None
    return [] if limits._planner._search is None else [limits._planner._search._process]


def test_what_cannot_be_planned_is_refused() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(ValueError, match=r"no searcher is called intervals; there are best, .*interval.*capuchin"):
        cohabit.budget("1MiB", net, optimizer, search="intervals")
    with pytest.raises(ValueError, match=r"search='interval' plans what autograd saves .* without an optimizer"):
        cohabit.budget("1MiB", net, search="interval")
    with pytest.raises(ValueError, match=r"search='interval' plans what autograd saves .* with a total"):
        cohabit.budget("1GiB total", net, optimizer, store="file", search="interval")


def test_a_search_is_not_used_where_parameters_have_to_leave(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cohabit.training"):
        assert_eager_s(trained("gated", "30%", "interval"), "gated")
    messages = [r.getMessage() for r in caplog.records if "search=" in r.getMessage()]
    assert messages == [
        "search='interval' is not used: more has to leave memory than what autograd and the optimizers own"
    ]


def recorded(*events: tuple[int, int, int, int]) -> RecordedStep:
    """A step of events: bytes, number, bytes saved, bytes beside until the next."""
    step = RecordedStep([Event(*event[:3]) for event in events], [event[3] for event in events])
    step.ran = [["aten::op"] for _ in events]
    return step


def test_the_graph_of_a_step_has_its_bytes_at_every_event() -> None:
    """Two storages of 4 and 8 KiB are saved, and unpacked in the opposite order; others hold the first for a while."""
    kib = 1 << 10
    step = recorded(
        (4 * kib, 0, 4 * kib, 20 * kib),
        (8 * kib, 1, 12 * kib, 24 * kib),
        (4 * kib, 0, 12 * kib, 0),  # no op runs until the next event
        (2 * kib, 2, 14 * kib, 22 * kib),  # is never alone
        (-8 * kib, 1, 14 * kib, 30 * kib),
        (-4 * kib, 0, 6 * kib, 25 * kib),
    )
    observed = ObservedStep(
        [0.0, 1.0, 2.0, 4.0, 5.0, 7.0, 8.0], {0: [0, 1, 2, 5], 1: [1, 4], 2: [3, 4, 5]}, {0: 5, 1: 4}, 0.5
    )
    updates = [StepUpdate(0, 3 * kib, 20 * kib), StepUpdate(0, 1 * kib, 21 * kib)]
    link = Link(0.0, 1e9)
    found = step_problem(step, observed, updates, 64 * kib, link, link)
    graph, always = found.graph, 64 * kib - found.memory.nbytes
    uses = {name: uses_of(graph, name) for name in ("saved0", "saved1", "state0", "state1")}
    in_events = {name: [found.event_of[k] for k in ops] for name, ops in uses.items()}
    assert in_events["saved0"] == [-1, 0, 1, 2, 5], "written before its first pack, used while others hold it"
    assert in_events["saved1"] == [0, 1, 4]
    assert uses["state0"] == [0, len(graph.ops) - 2]
    assert uses["state1"] == [1, len(graph.ops) - 1]
    nbytes = {tensor.name: tensor.nbytes for tensor in graph.tensors}
    saved = [event.saved_bytes for event in step.events]
    beside = [20 * kib, 24 * kib, 24 * kib, 22 * kib, 30 * kib, 25 * kib]
    for k in range(len(updates), len(graph.ops) - len(updates)):
        event = found.event_of[k]
        alive = sum(nbytes[n] for n in ("saved0", "saved1") if uses[n][0] <= k <= uses[n][-1])
        expected = saved[max(event, 0)] + beside[max(event, 0)]
        assert graph.ops[k].scratch_bytes + always + alive == expected
    assert found.profile.compute_s == pytest.approx(8.5)
    assert [op.target for op in graph.ops[-3:]] == ["aten::op", "update", "update"]


def uses_of(graph: Graph, name: str) -> list[int]:
    (tensor,) = (i for i, found in enumerate(graph.tensors) if found.name == name)
    return [k for k, op in enumerate(graph.ops) if tensor in op.touched]


def test_no_plan_of_a_step_computes_anything_again() -> None:
    """Not what came before the first unpack: the loop runs its ops, and nothing else can."""
    step = recorded((400, 0, 400, 0), (400, 1, 800, 0), (-400, 1, 800, 0), (-400, 0, 400, 0))
    observed = ObservedStep([0.0, 1.0, 2.0, 3.0, 4.0], {0: [0, 3], 1: [1, 2]}, {0: 3, 1: 2})
    link = Link(0.0, 1.0)
    found = step_problem(step, observed, [], 400 + 400, link, link)
    gaps = [gap for gap in Gaps(found.graph).all if found.graph.tensors[gap.tensor].nbytes]
    assert gaps
    assert all(Choice.RECOMPUTE not in gap.choices for gap in gaps)
