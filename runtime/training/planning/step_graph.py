"""A recorded step as the planner's graph and profile, and a plan of it as advice.

An op of the graph is what runs between two events of autograd, packs and unpacks. A saved storage is an activation: the
op before its first pack writes it, and ops use it while others than autograd hold it. It can leave in the gaps between.
Everything else in memory during an op is the op's scratch: temporaries, parameters, gradients. What is there during all
ops is left out of the graph and of the memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
        searcher = "" if plan.provenance is None else plan.provenance.searcher
        return Advice(searcher, dict(leaving), dict(returning), moved)


def step_problem(
    step: RecordedStep, observed: ObservedStep, memory_bytes: int, swap_in: Link, swap_out: Link
) -> StepProblem:
    """Return a recorded step as a problem. `memory_bytes` are for all but the optimizers' state.

    Raises InvalidGraph if no saved storage can leave.
    """
    events = len(step.events)
    turn = next((i for i, event in enumerate(step.events) if event.nbytes < 0), events)
    spans = _spans(step, observed)
    # What is in memory during each event beside the storages of the graph.
    alive = [0] * (events + 1)
    for number, uses in spans.items():
        nbytes = _nbytes(step, number)
        alive[uses[0] + 1] += nbytes
        alive[min(uses[-1] + 2, events)] -= nbytes
    beside, now = list[int](), 0
    for index in range(events + 1):
        now += alive[index]
        event = max(index - 1, 0)
        beside.append(max(step.events[event].saved_bytes + step.beside[event] - now, 0))
    always = min(beside)
    # Tensors: `_FORWARD`, one without bytes per op, which keeps the order of the ops, and the storages.
    event_of = [*range(_BEFORE, turn), turn - 1, *range(turn, events)]
    inserted = turn + 1
    tensors = [_FORWARD, *(Tensor(f"after{k}", 0, "activation") for k in range(len(event_of)))]
    number_of = {len(tensors) + i: number for i, number in enumerate(spans)}
    tensors += [Tensor(f"saved{n}", _nbytes(step, n), "activation") for n in spans]
    op_at = {event: k for k, event in enumerate(event_of) if k != inserted}
    reads, writes = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for tensor, number in number_of.items():
        first, *others = spans[number]
        writes[op_at[first]].append(tensor)
        for event in others:
            reads[op_at[event]].append(tensor)
    ops = []
    for k, event in enumerate(event_of):
        before = [k] if k else []
        forward = [0] if k <= inserted else []
        ops.append(
            Op(
                f"op{k}",
                "+".join(step.ran[event]) if event >= 0 and k != inserted else "",
                reads=(*forward, *before, *reads[k]),
                writes=(k + 1, *writes[k]),
                scratch_bytes=beside[event + 1] - always,
                mutates=(0,) if k == inserted else (),
            )
        )
    graph = Graph("step", 1, "", tuple(tensors), tuple(ops), (len(ops),))
    graph.validate()
    seconds = observed.seconds
    op_seconds = [seconds[event] if event >= 0 and k != inserted else 0.0 for k, event in enumerate(event_of)]
    profile = Profile(graph.fingerprint, "cpu", tuple(op_seconds), swap_in, swap_out)
    return StepProblem(graph, profile, single_budget(max(memory_bytes - always, 1)), event_of, number_of)


def _spans(step: RecordedStep, observed: ObservedStep) -> dict[int, list[int]]:
    """Return the events after which each storage is in use, from the one before its first pack to its death.

    Only of storages that nobody needs for some time. Raises InvalidGraph if there are none.
    """
    found = {}
    for number, uses in observed.uses.items():
        last = observed.last.get(number, len(step.events) - 1)
        span = sorted({uses[0] - 1, *uses, max(last, uses[-1])})
        if number >= 0 and any(b > a + 1 for a, b in pairwise(span)):
            found[number] = span
    if not found:
        raise InvalidGraph("the step saves nothing that autograd alone holds for some time")
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
