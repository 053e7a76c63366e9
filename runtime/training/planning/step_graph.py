"""A recorded step as the planner's graph and profile, and a plan of it as advice.

An op of the graph is what runs between two events of autograd, packs and unpacks. A saved storage is an activation: the
op before its first pack writes it, and ops use it while others than autograd hold it. It can leave in the gaps between.
The optimizers' steps follow, in parts: each changes the state of some parameters. Everything else in memory during an
op is the op's scratch: temporaries, parameters, gradients. What is there during all ops is left out of the graph and
of the memory.
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
        absences = list(_absences(self.graph, plan))
        for absence in absences:
            number = self.number_of[absence.tensor]
            # An op has ended once the next event comes.
            leaving[self.event_of[absence.leaves_after] + 1].append(number)
            returning[self.event_of[absence.returns_after] + 1].append(number)
        moved = frozenset(self.number_of[absence.tensor] for absence in absences)
        residents = {placement.tensor for placement in plan.residents}
        state_out_bytes = defaultdict[int, int](int)
        for tensor, update in self.update_of.items():
            if tensor not in residents:
                state_out_bytes[update.optimizer] += update.state_bytes
        searcher = "" if plan.provenance is None else plan.provenance.searcher
        return Advice(searcher, dict(leaving), dict(returning), moved, dict(state_out_bytes))


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
    # Ops in order: before the first event, after each, and the inserted one; `event_of` says which.
    event_of = [*range(_BEFORE, turn), turn - 1, *range(turn, events)]
    inserted = turn + 1
    op_at = {event: k for k, event in enumerate(event_of) if k != inserted}
    # Tensors: `_FORWARD`, one without bytes per op, which keeps the order of the ops, the storages, and the state.
    count = len(event_of) + len(updates)
    tensors = [_FORWARD, *(Tensor(f"after{k}", 0, "activation") for k in range(count))]
    number_of = {len(tensors) + i: number for i, number in enumerate(spans)}
    tensors += [Tensor(f"saved{n}", _nbytes(step, n), "activation") for n in spans]
    update_of = {len(tensors) + i: update for i, update in enumerate(updates)}
    tensors += [Tensor(f"state{i}", update.state_bytes, "state") for i, update in enumerate(updates)]
    reads, writes = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for tensor, number in number_of.items():
        first, *others = spans[number]
        writes[op_at[first]].append(tensor)
        for event in others:
            reads[op_at[event]].append(tensor)
    ops, op_seconds, seconds = list[Op](), list[float](), observed.seconds
    for k, event in enumerate(event_of):
        is_run = event != _BEFORE and k != inserted
        ops.append(
            Op(
                f"op{k}",
                "+".join(step.ran[event]) if is_run else "",
                reads=(*([0] if k <= inserted else []), *([k] if k else []), *reads[k]),
                writes=(k + 1, *writes[k]),
                scratch_bytes=beside[event + 1] - always,
                mutates=(0,) if k == inserted else (),
            )
        )
        op_seconds.append(seconds[event] if is_run else 0.0)
    state_bytes = sum(update.state_bytes for update in updates)
    for tensor, update in update_of.items():
        k = len(ops)
        scratch_bytes = update.beside_bytes - always
        ops.append(Op(f"update{k}", "update", (k, tensor), (k + 1,), scratch_bytes, mutates=(tensor,)))
        op_seconds.append(observed.update_s * update.state_bytes / state_bytes)
    graph = Graph("step", 1, "", tuple(tensors), tuple(ops), (len(ops),))
    graph.validate()
    profile = Profile(graph.fingerprint, "cpu", tuple(op_seconds), swap_in, swap_out)
    memory = single_budget(max(memory_bytes - always, 1))
    return StepProblem(graph, profile, memory, event_of, number_of, update_of)


def _beside(step: RecordedStep, spans: Mapping[int, Sequence[int]]) -> list[int]:
    """Return what is in memory during each event beside the storages of the graph; first, before the first event."""
    events = len(step.events)
    changes = [0] * (events + 2)
    for number, span in spans.items():
        changes[span[0] + 1] += _nbytes(step, number)
        changes[span[-1] + 2] -= _nbytes(step, number)
    all_bytes = [e.saved_bytes + beside for e, beside in zip(step.events, step.beside, strict=True)]
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
                if graph.tensors[step.tensor].kind == "activation" and step.tensor in leaves_after:
                    leaves = leaves_after.pop(step.tensor)
                    yield Absence(step.tensor, leaves, max(at, leaves))
        known.append(at)
        if lane is not None:
            latest[lane] = at
