"""Training in too little memory: eager's bits at every budget, within it, and never half a step."""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.captured.trainer import Trainer, TrainingLost, memory_bytes
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.memory import single_budget
from cohabit.planner.plan import Compute, Drop, Plan, Provenance, SwapIn, SwapOut
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.schedule.no_wait import schedule_of_choices
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.schedule.write import write
from cohabit.runtime.binding.program import Program
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.memory import Copy
from tests.support.planner.searchers import SINGLE
from tests.support.runtime.captured_steps import (
    Net,
    adamw,
    assert_same,
    batches,
    eager,
    loss_of,
    net,
    sgd,
    trained,
    trainer_of,
)
from tests.support.runtime.observing import observed

pytestmark = pytest.mark.slow  # benchmarks alone capture steps


@pytest.mark.parametrize("memory", ["100%", "80%", "60%", "40%"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_steps_have_eager_s_bits_at_every_budget(
    make: Callable[[nn.Module], torch.optim.Optimizer], memory: str
) -> None:
    model = net()
    optimizer = make(model)
    trainer = trainer_of(model, optimizer, memory)
    assert (trainer.swapped_bytes > 0) == (memory != "100%")
    assert_same(trained(trainer, model, optimizer), eager(make))


@pytest.mark.parametrize("searcher", SINGLE)
def test_every_searcher_s_plan_of_a_step_is_executed(searcher: str, tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    trainer = trainer_of(model, optimizer, "50%", searcher, store="file", folder=tmp_path)
    moves = {type(step) for step in trainer.plan.steps}
    assert {SwapIn, SwapOut} <= moves
    assert_same(trained(trainer, model, optimizer), eager(sgd))


def promised(trainer: Trainer, plan: Plan) -> Plan:
    """The plan with what a search says of its own."""
    timeline = simulate(trainer.graph, plan, trainer.profile)
    compute_s = trainer.profile.compute_s
    promise = Provenance(
        "by hand", 0, 1, timeline.latency_s, timeline.period_s or 0.0, 0.0, compute_s, 0.0, "period"
    )
    return structs.replace(plan, provenance=promise)


def test_recomputation_repeats_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout's mask is made once, by an op that changes the generator's state: only what follows it is repeated."""

    def recomputing(trainer: Trainer) -> Plan:
        graph, gaps = trainer.graph, Gaps(trainer.graph)
        choices = [Choice.RECOMPUTE if Choice.RECOMPUTE in gap.choices else Choice.KEEP for gap in gaps.all]
        problem = Problem(graph, trainer.profile, single_budget(2 * trainer.peak_bytes))
        schedule = schedule_of_choices(problem, gaps, choices)
        assert schedule is not None
        return promised(trainer, write(problem, schedule, problem.memory.nbytes))

    monkeypatch.setattr(Trainer, "_search", recomputing)
    model = net()
    optimizer = sgd(model)
    trainer = trainer_of(model, optimizer)
    computes = [trainer.graph.ops[s.op].target for s in trainer.plan.steps if isinstance(s, Compute)]
    assert len(computes) > len(trainer.graph.ops)
    assert sum("bernoulli" in target for target in computes) == 1
    assert_same(trained(trainer, model, optimizer), eager(sgd))


@pytest.mark.parametrize(
    ("memory", "searcher"),
    [("100%", "on_demand"), ("60%", "on_demand"), ("40%", "on_demand"), ("50%", "swapadvisor")],
)
def test_live_bytes_never_exceed_the_plan_s_memory(memory: str, searcher: str) -> None:
    """Counted before every op: all tensors of the frame, views once, and all state that is in memory."""
    model = net()
    trainer = trainer_of(model, sgd(model), memory, searcher)
    program, held = trainer._program, []

    def observe(step: int, frame: Frame) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(frame) if isinstance(leaf, torch.Tensor)]
        storages = [t.untyped_storage() for t in tensors]
        storages += [t._storage for t in program.offloaded if t._storage is not None]
        held.append(sum({s._cdata: s.nbytes() for s in storages}.values()))

    trainer._program = observed(program, observe)
    with trainer:
        for batch in batches(3):
            trainer.step(*batch)
    assert 0 < max(held) <= trainer.memory_bytes


def test_gradients_are_clipped_added_up_and_of_lower_precision_as_eager_s_are() -> None:
    def clipped(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        return loss

    def in_parts(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        losses = [loss_of(model, *part) / 2 for part in zip(*(t.chunk(2) for t in batch), strict=True)]
        for loss in losses:
            loss.backward()
        return losses[0] + losses[1]

    def in_bfloat16(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, *batch)
        loss.backward()
        return loss

    for step, option in (
        (clipped, {"clip_norm": 0.1}),
        (in_parts, {"micro_batches": 2}),
        (in_bfloat16, {"autocast": torch.bfloat16}),
    ):
        model = net()
        optimizer = sgd(model)
        trainer = trainer_of(model, optimizer, "70%", **option)
        assert_same(trained(trainer, model, optimizer), eager(sgd, step))


def test_schedulers_change_the_learning_rate() -> None:
    def losses_of(
        model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[..., torch.Tensor]
    ) -> list[float]:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)
        torch.manual_seed(2)
        losses = []
        for batch in batches(6):
            losses.append(step(*batch).item())
            scheduler.step()
        return losses

    first, second = net(), net()
    optimizer, other = adamw(first), adamw(second)

    def eager_step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(first, *batch)
        loss.backward()
        optimizer.step()
        return loss

    assert losses_of(second, other, trainer_of(second, other).step) == losses_of(first, optimizer, eager_step)


def test_an_update_runs_as_soon_as_its_gradient_is_there() -> None:
    model = net()
    graph = trainer_of(model, sgd(model)).graph
    last_backward = max(k for k, op in enumerate(graph.ops) if "backward" in op.name)
    updates = {graph.tensors[t].name: k for k, op in enumerate(graph.ops) for t in op.mutates}
    assert updates["classes.weight"] < updates["hidden.weight"] < last_backward < updates["first.weight"]


def test_the_user_s_tensors_are_empty_between_steps_and_current_after_a_sync() -> None:
    model = net()
    optimizer = sgd(model)
    trainer = trainer_of(model, optimizer)
    trainer.step(*batches(1)[0])
    assert {p.numel() for p in model.parameters()} == {0}
    trainer.sync()
    assert model.classes.weight.shape == (10, 32)
    with torch.no_grad():
        model.classes.weight.zero_()
        model.classes.bias.zero_()
    assert trainer.step(*batches(1)[0]).item() == pytest.approx(torch.log(torch.tensor(10.0)).item())


def test_a_step_that_fails_loses_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    trainer = trainer_of(model, sgd(model))
    buffer = next(iter(trainer._buffers.values()))
    monkeypatch.setattr(type(buffer), "load", lambda self, destination: 1 / 0)
    with pytest.raises(TrainingLost, match=r"step 1 failed: .*division by zero.* resume from a checkpoint"):
        trainer.step(*batches(1)[0])
    monkeypatch.undo()
    for call in (lambda: trainer.step(*batches(1)[0]), trainer.sync, lambda: trainer.save_checkpoint(Path("x"))):
        with pytest.raises(TrainingLost, match="step 1 failed"):
            call()


def trainer_that_restores_at_the_end(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Trainer:
    """Everything stays, but for one weight: the plan's end copies it out and back."""

    def search(trainer: Trainer) -> Plan:
        plan = kept(trainer)
        weight = next(i for i, t in enumerate(trainer.graph.tensors) if t.name == "classes.weight")
        end = len(plan.steps)
        moves = (SwapOut(weight, after=(end - 1,)), Drop(weight), SwapIn(weight, after=(end,)))
        return promised(trainer, structs.replace(plan, steps=(*plan.steps, *moves)))

    kept = Trainer._search
    monkeypatch.setattr(Trainer, "_search", search)
    trainer = trainer_of(model, optimizer, "100%")
    assert len(trainer._program.swap_ins) == 1
    return trainer


def with_copy(program: Program, copy: Callable[[Copy], None]) -> Program:
    (swap_in,) = program.swap_ins
    return replace(program, swap_ins=(replace(swap_in, copy=partial(copy, swap_in.copy)),))


def test_the_next_step_begins_while_the_last_one_s_residents_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the plan's end is held until the next step has computed its first op."""
    began = threading.Event()

    def hold(copy: Copy) -> None:
        assert began.wait(20), "the next step waits for this copy"
        copy()

    model = net()
    optimizer = sgd(model)
    trainer = trainer_that_restores_at_the_end(monkeypatch, model, optimizer)
    program = observed(trainer._program, lambda step, frame: began.set() if trainer.steps else None)
    trainer._program = with_copy(program, hold)
    assert_same(trained(trainer, model, optimizer), eager(sgd))


def test_a_copy_that_fails_after_its_step_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(copy: Copy) -> None:
        raise OSError(5, "Input/output error")

    model = net()
    trainer = trainer_that_restores_at_the_end(monkeypatch, model, sgd(model))
    trainer._program = with_copy(trainer._program, fail)
    trainer.step(*batches(1)[0])
    with pytest.raises(TrainingLost, match=r"step 1 failed: .*Input/output error.* resume from a checkpoint"):
        trainer.save_checkpoint(tmp_path / "last.safetensors")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TrainingLost, match="step 1 failed"):
        trainer.sync()


def test_an_interrupted_step_loses_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parameters are updated by then, and others not: the user must not take them for a whole step's."""

    def interrupt(step: int, frame: Frame) -> None:
        raise KeyboardInterrupt

    model = net()
    trainer = trainer_of(model, sgd(model))
    trainer._program = observed(trainer._program, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(*batches(1)[0])
    for call in (trainer.sync, lambda: trainer.resume(Path("x"))):
        with pytest.raises(TrainingLost, match="step 1 failed: KeyboardInterrupt"):
            call()


def test_a_batch_of_another_form_is_refused() -> None:
    model = net()
    trainer = trainer_of(model, sgd(model))
    x, labels = batches(1)[0]
    with pytest.raises(
        ValueError, match=r"float32\[4, 3, 8, 8\].* captured for float32\[16, 3, 8, 8\], int64\[16\]"
    ):
        trainer.step(x[:4], labels[:4])


def test_too_little_memory_is_refused_with_the_least_that_would_do() -> None:
    model = net()
    optimizer = sgd(model)
    with pytest.raises(InfeasibleBudget, match="conv") as refusal:
        trainer_of(model, optimizer, 10_000)
    trainer = trainer_of(model, optimizer, refusal.value.least_bytes)
    assert_same(trained(trainer, model, optimizer), eager(sgd))


def test_a_step_that_depends_on_values_is_refused() -> None:
    def branching(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x, labels)
        return loss * 2 if loss.item() > 1 else loss

    model = net()
    with pytest.raises(UnsupportedModel, match=r"depends on the values of tensors: .*no branches on \.item"):
        Trainer(model, sgd(model), branching, batches(1)[0])


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        ("half", "'half' is not a size"),
        ("0%", "a share of the step's peak lies above 0% and up to 100%"),
        ("120%", "a share of the step's peak lies above 0%"),
    ],
)
def test_memory_is_a_size_or_a_share_of_the_step_s_peak(memory: str, reason: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=reason):
        trainer_of(model, sgd(model), memory)
    assert memory_bytes("60%", 1000) == 600
    assert memory_bytes("2GiB", 1000) == 2 << 30
    assert memory_bytes(77, 1000) == 77


def test_what_cannot_be_trained_is_named() -> None:
    model = net()
    model.classes.bias.data = model.hidden.bias.data[:10]
    with pytest.raises(UnsupportedModel, match=r"classes\.bias and hidden\.bias share their memory"):
        trainer_of(model, sgd(model))
    model = net()
    with pytest.raises(UnsupportedModel, match="take one step with it before"):
        trainer_of(model, torch.optim.ASGD(model.parameters()))
    with pytest.raises(UnsupportedModel, match="is not the model's"):
        trainer_of(model, sgd(net()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.classes = nn.LSTM(24, 8, batch_first=True), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.layers(x.flatten(2).transpose(1, 2).reshape(16, 8, 24))[0][:, -1])


def test_an_lstm_is_trained() -> None:
    losses = []
    for is_eager in (True, False):
        torch.manual_seed(0)
        model = Recurrent()
        optimizer = sgd(model)
        if is_eager:
            for batch in batches(3):
                optimizer.zero_grad()
                loss = loss_of(model, *batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        else:
            with trainer_of(model, optimizer) as trainer:
                assert [trainer.step(*batch).item() for batch in batches(3)] == pytest.approx(losses, rel=1e-5)


def test_what_a_step_would_silently_lose_is_refused() -> None:
    class Reassigning(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm.running_mean = self.norm.running_mean * 0.9
            return super().forward(x)

    class Looking(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    model = Reassigning()
    with pytest.raises(UnsupportedModel, match=r"gives buffer norm.running_mean another tensor.*copy_"):
        trainer_of(model, sgd(model))
    looking = Looking()
    looking.scale = torch.ones(3, 1, 1)
    with pytest.raises(UnsupportedModel, match=r"float32 \[3, 1, 1\] that is neither a parameter, nor a buffer"):
        trainer_of(looking, sgd(looking))
    for loss, reason in (
        (lambda model, x, y: model(x).sum(1), r"0-d tensor, .* is shape \[16\]"),
        (lambda model, x, y: loss_of(model, x, y).detach(), "depends on no parameter"),
    ):
        model = net()
        with pytest.raises(UnsupportedModel, match=reason):
            Trainer(model, sgd(model), loss, batches(1)[0])
    table = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(UnsupportedModel, match=r"gradient of weight is sparse"):
        Trainer(table, sgd(table), lambda model, x, y: model(y).sum(), batches(1)[0])


def test_only_the_learning_rate_may_change() -> None:
    model = net()
    optimizer = sgd(model)
    with trainer_of(model, optimizer) as trainer:
        trainer.step(*batches(1)[0])
        optimizer.param_groups[0]["momentum"] = 0.8
        with pytest.raises(UnsupportedModel, match=r"momentum of parameter group 0 is now 0\.8, .* with 0\.9"):
            trainer.step(*batches(1)[0])
        optimizer.param_groups[0]["momentum"] = 0.9
        trainer.step(*batches(1)[0])
    model = net()
    with pytest.raises(UnsupportedModel, match="lr of parameter group 0 is a tensor"):
        trainer_of(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1)))


_PEAK = """
from pathlib import Path
import torch
from torch import nn
from cohabit.runtime.heap import release_free_memory
from benchmarks.captured.trainer import Trainer
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(2 * 192, 4 * 192)
    def forward(self, x):
        hidden = cell = torch.zeros(x.shape[1], 192)
        for t in range(x.shape[0]):
            i, f, g, o = self.gates(torch.cat([x[t], hidden], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return hidden
def status(name):
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) << 10
torch.set_num_threads(1)
model, x = Cell(), torch.randn(12, 1000, 192)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda m, x: m(x).square().mean(), [x], "60%",
                  searcher="on_demand", search_seconds=0.2, store="file")
trainer.step(x)
release_free_memory()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS") - x.nbytes
for _ in range(2):
    trainer.step(x)
print((status("VmHWM") - before) / trainer.memory_bytes)
"""


def test_tensors_below_a_mebibyte_leave_no_holes_in_memory() -> None:
    ran = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    # What the process takes besides is a third of so small a budget; with holes it took twice the budget.
    assert float(ran.stdout) < 1.6
