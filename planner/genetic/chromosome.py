"""Chromosomes of served models: an order of the ops, and the decisions that `planner.streaming.stream` plays."""

from dataclasses import dataclass

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.plan import Compute, Plan, SwapIn
from cohabit.planner.streaming.op_orders import OpOrder
from cohabit.planner.streaming.page_map import NO_MORE
from cohabit.planner.streaming.stream import KEPT, RELEASED, STREAMED, Decisions
from cohabit.planner.streaming.workload import Workload


@dataclass(frozen=True, slots=True)
class ServedChromosome:
    """An order, by its number in `OpOrders`, and decisions as bytes.

    With `steps`, the decisions are the best of a walk from them.
    """

    order: int
    choice: bytes
    hold: bytes
    lead: bytes
    fit: bytes
    steps: int = 0
    heat: float = 0.0
    seed: int = 0

    @staticmethod
    def of(order: int, found: Decisions, steps: int = 0, heat: float = 0.0, seed: int = 0) -> "ServedChromosome":
        choice, hold = found.choice.astype(np.int8).tobytes(), found.hold.tobytes()
        lead, fit = found.lead.astype(np.int32).tobytes(), found.fit.astype(np.int8).tobytes()
        return ServedChromosome(order, choice, hold, lead, fit, steps, heat, seed)

    def decisions(self) -> Decisions:
        """Return the decisions before the walk."""
        choice = np.frombuffer(self.choice, np.int8).astype(np.int64)
        lead = np.frombuffer(self.lead, np.int32).astype(np.int64)
        hold = np.frombuffer(self.hold, np.bool_).copy()
        return Decisions(choice, hold, np.frombuffer(self.fit, np.int8).astype(np.int64), lead)

    def residents(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(np.frombuffer(self.choice, np.int8) != STREAMED).tolist())


def renumbered(found: Decisions, old: OpOrder, new: OpOrder) -> Decisions:
    """Return the same decisions with parameters and uses numbered as in another order."""
    if old is new:
        return found
    parameter = {t: i for i, t in enumerate(old.work.parameters)}
    use = {key: i for i, key in enumerate(_uses(old))}
    last = {t: i for (_, t), i in use.items()}  # an output counts as read by whichever op is last
    parameters = np.array([parameter[t] for t in new.work.parameters], np.int64)
    uses = np.array([use.get(key, last[key[1]]) for key in _uses(new)], np.int64)
    return Decisions(found.choice[parameters], found.hold[uses], found.fit[uses], found.lead[uses])


def _uses(view: OpOrder) -> list[tuple[int | None, int]]:
    """Return the graph's op and parameter of each use, in order."""
    ops = view.order or (None,)  # without ops, there is one no-op
    return [(op, t) for op, use in zip(ops, view.work.footprint.uses, strict=True) for t in use]


def order_of(plan: Plan) -> tuple[int, ...]:
    """Return the order in which a plan runs the ops."""
    return tuple(step.op for step in plan.steps if isinstance(step, Compute))


def decisions_of(plan: Plan, work: Workload) -> Decisions:
    """Return the decisions that lead to a plan's residents and copies, in the plan's order; rules for holes are lost.

    The plan may be for another memory, so its residents may not fit.
    """
    arrays, number = work.arrays, {t: i for i, t in enumerate(work.parameters)}
    choice = np.full(len(arrays.size), STREAMED)
    choice[[number[r.tensor] for r in plan.residents if r.tensor in number]] = KEPT
    copies = _copies(plan, number)
    for parameter, _ in copies[_copies_before_end(plan) :]:
        choice[parameter] = RELEASED
    # A parameter stays until its next use if no copy of it comes between. A copy that comes before one for an earlier
    # op goes ahead by the ops between.
    copied_for = [_next_use(arrays.use_start, arrays.use_parameter, *copy) for copy in copies]
    hold = arrays.use_next < NO_MORE
    lead = np.zeros(len(hold), np.int64)
    earliest = len(arrays.op_s)
    for (parameter, _), use in zip(reversed(copies), reversed(copied_for), strict=True):
        if use is None:
            continue
        op = int(arrays.use_op[use])
        lead[use] = max(op - earliest, 0)
        earliest = min(earliest, op)
        before = np.flatnonzero((arrays.use_parameter == parameter) & (arrays.use_next == op))
        hold[before] = False
    return Decisions(choice, hold, np.zeros(len(hold), np.int64), lead)


def _copies(plan: Plan, number: dict[int, int]) -> list[tuple[int, int]]:
    """Return the parameter of each swap-in, in order, and the number of ops that come before it in the plan."""
    copies, done = [], 0
    for step in plan.steps:
        if isinstance(step, Compute):
            done += 1
        elif isinstance(step, SwapIn) and step.tensor in number:
            copies.append((number[step.tensor], done))
    return copies


def _copies_before_end(plan: Plan) -> int:
    return sum(isinstance(step, SwapIn) for step in plan.steps[: plan.epilogue_start])


def _next_use(use_start: Ints, use_parameter: Ints, parameter: int, op: int) -> int | None:
    """Return the first use of a parameter by this op or a later one."""
    found = np.flatnonzero(use_parameter[use_start[op] :] == parameter)
    return int(use_start[op] + found[0]) if len(found) else None
