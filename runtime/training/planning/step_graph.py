"""A recorded step as the planner's graph and profile, and a plan of it as advice.

An op of the graph is what runs between two events of autograd, packs and unpacks. A saved storage is an activation: the
op before its first pack writes it, and ops use it while others than autograd hold it. It can leave in the gaps between.
The optimizers' state is written by ops without time at the beginning, and used by their steps at the end, in parts.
Everything else in memory during an op is its scratch: temporaries, parameters, gradients. What is there during all ops
is left out of the graph and of the memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from cohabit.planner.errors import InvalidGraph
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.plan import Compute, Drop, Lane, Plan, SwapIn, SwapOut, lane_of
from cohabit.planner.profile import Link, Profile
from cohabit.runtime.training.record import Advice, ObservedStep, RecordedStep

_FORWARD: Final = Tensor("forward", 0, "state")
"""Ops before the first unpack read it, and an op without time that is inserted there changes it. So no plan computes
again what came before: the loop runs its ops, and nothing else can."""
_BEFORE: Final = -1
"""Event of the op that runs before the first event."""


class Absence(NamedTuple):
    """A time in which a tensor is not in memory, by the ops after which its copies begin."""

    tensor: int
    leaves_after: int
    returns_after: int


class StepUpdate(NamedTuple):
    """A part of an optimizer's step."""

    optimizer: int
    """Its position."""
    state_bytes: int
    beside_bytes: int
    """In memory meanwhile, beside state."""


@dataclass(frozen=True, slots=True)
class StepProblem:
    """A recorded step to plan."""

    graph: Graph
    profile: Profile
    memory: Memory
    event_of: Sequence[int]
    """Per op, the event at which it begins."""
    number_of: Mapping[int, int]
    """The storage's number, by its tensor."""
    update_of: Mapping[int, StepUpdate]
    """By the tensor of its state."""

    def advice(self, plan: Plan) -> Advice:
        """Return when storages leave and return by a plan of this problem."""
        leaving, returning = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        moved, state_out_bytes = set[int](), defaultdict[int, int](int)
        for absence in _absences(self.graph, plan):
            if (update := self.update_of.get(absence.tensor)) is not None:
                state_out_bytes[update.optimizer] += update.state_bytes
                continue
            number = self.number_of[absence.tensor]
            # An op has ended once the next event comes.
            leaving[self.event_of[absence.leaves_after] + 1].append(number)
            returning[self.event_of[absence.returns_after] + 1].append(number)
            moved.add(number)
        searcher = "" if plan.provenance is None else plan.provenance.searcher
        return Advice(searcher, dict(leaving), dict(returning), frozenset(moved), dict(state_out_bytes))


def step_problem(
    step: RecordedStep,
    observed: ObservedStep,
    updates: Sequence[StepUpdate],
    memory_bytes: int,
    swap_in: Link,
    swap_out: Link,
) -> StepProblem:
    """Return a recorded step as a problem. Raises InvalidGraph if nothing of it can leave memory."""
    events = len(step.events)
    turn = next((i for i, event in enumerate(step.events) if event.nbytes < 0), events)
    spans = _spans(step, observed)
    if not spans and not updates:
        raise InvalidGraph("the step saves nothing that autograd alone holds for some time")
    beside = _beside(step, spans)
    always = min(*beside, *(update.beside_bytes for update in updates))
    state_bytes = sum(update.state_bytes for update in updates)
    # Ops in order, each with its event, target, seconds and scratch: those that write state, one before the first
    # event, one after each, and the steps of optimizers. Before the first unpack, one is inserted.
    rows: list[tuple[int, str, float, int]] = [(_BEFORE, "", 0.0, beside[0] - always) for _ in (*updates, None)]
    for event, (names, seconds) in enumerate(zip(step.ran, observed.seconds, strict=True)):
        if event == turn:
            rows.append((turn - 1, "", 0.0, beside[turn] - always))
        rows.append((event, "+".join(names), seconds, beside[event + 1] - always))
    for update in updates:
        seconds = observed.update_s * update.state_bytes / state_bytes
        rows.append((events - 1, "update", seconds, update.beside_bytes - always))
    turned = len(updates) + 1 + turn
    op_of = {event: k for k, (event, *_) in enumerate(rows[: len(rows) - len(updates)]) if k != turned}
    # Tensors: `_FORWARD`, one without bytes per op, which keeps the order of the ops, the storages, and the state.
    tensors = [_FORWARD, *(Tensor(f"after{k}", 0, "activation") for k in range(len(rows)))]
    reads, writes = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    number_of, update_of = dict[int, int](), dict[int, StepUpdate]()
    for number, (first, *others) in spans.items():
        number_of[len(tensors)] = number
        writes[op_of[first]].append(len(tensors))
        for event in others:
            reads[op_of[event]].append(len(tensors))
        tensors.append(Tensor(f"saved{number}", _nbytes(step, number), "activation"))
    for k, update in enumerate(updates):
        update_of[len(tensors)] = update
        writes[k].append(len(tensors))
        reads[len(rows) - len(updates) + k].append(len(tensors))
        tensors.append(Tensor(f"state{k}", update.state_bytes, "activation"))
    ops = [
        Op(
            f"op{k}",
            target,
            reads=(*([0] if k <= turned else []), *([k] if k else []), *reads[k]),
            writes=(k + 1, *writes[k]),
            scratch_bytes=scratch_bytes,
            mutates=(0,) if k == turned else (),
        )
        for k, (_, target, _, scratch_bytes) in enumerate(rows)
    ]
    graph = Graph("step", 1, "", tuple(tensors), tuple(ops), (len(ops),))
    graph.validate()
    profile = Profile(graph.fingerprint, "cpu", tuple(seconds for _, _, seconds, _ in rows), swap_in, swap_out)
    memory = single_budget(max(memory_bytes - always, 1))
    return StepProblem(graph, profile, memory, [event for event, *_ in rows], number_of, update_of)


def _beside(step: RecordedStep, spans: Mapping[int, Sequence[int]]) -> list[int]:
    """Return what is in memory during each event beside the storages of the graph; first, before the first event."""
    changes = [0] * (len(step.events) + 2)
    for number, span in spans.items():
        changes[span[0] + 1] += _nbytes(step, number)
        changes[span[-1] + 2] -= _nbytes(step, number)
    # Where no op ran, nothing was noted: what was there before still is.
    noted = list[int]()
    for beside in step.beside:
        noted.append(beside or (noted[-1] if noted else 0))
    all_bytes = [event.saved_bytes + beside for event, beside in zip(step.events, noted, strict=True)]
    counted = accumulate(changes)
    return [max(whole - mine, 0) for whole, mine in zip([all_bytes[0], *all_bytes], counted, strict=False)]


def _spans(step: RecordedStep, observed: ObservedStep) -> dict[int, list[int]]:
    """Return the events after which a storage is in use, from the one before its first pack to its death.

    Only of storages that nobody needs for some time.
    """
    found = {}
    for number, uses in observed.uses.items():
        last = observed.last.get(number, len(step.events) - 1)
        span = sorted({uses[0] - 1, *uses, max(last, uses[-1])})
        if number >= 0 and any(b > a + 1 for a, b in pairwise(span)):
            found[number] = span
    return found


def _nbytes(step: RecordedStep, number: int) -> int:
    return next(abs(event.nbytes) for event in step.events if event.number == number)


def _absences(graph: Graph, plan: Plan) -> Iterator[Absence]:
    """Yield the times in which activations are out, in the order of their returns.

    A copy begins after the last op that is known to have ended by then: by its own waits, and by those of steps that it
    waits for. How long it waits for memory is found again when it is made.
    """
    known: list[int] = []
    latest: dict[Lane, int] = {}
    used, saved_after, leaves_after = dict[int, int](), dict[int, int](), dict[int, int]()
    for step in plan.steps:
        lane = lane_of(step)
        after = -1 if isinstance(step, Drop) else max((known[i] for i in step.after), default=-1)
        at = max(after, latest.get(lane, -1)) if lane is not None else -1
        match step:
            case Compute():
                at = max(at, step.op)
                used |= dict.fromkeys(graph.ops[step.op].touched, step.op)
            case SwapOut():
                saved_after[step.tensor] = at
            case Drop():
                if step.tensor in saved_after:
                    leaves_after[step.tensor] = max(saved_after[step.tensor], used.get(step.tensor, 0))
            case SwapIn():
                if step.tensor in leaves_after and graph.tensors[step.tensor].nbytes:
                    leaves = leaves_after.pop(step.tensor)
                    yield Absence(step.tensor, leaves, max(at, leaves))
        known.append(at)
        if lane is not None:
            latest[lane] = at
