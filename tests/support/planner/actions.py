"""Actions as tests write them down, and the plans of actions in memory in which everything is counted."""

from collections.abc import Collection, Sequence

from cohabit.planner.plan import Plan
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.schedule.no_wait import ActionSequence, schedule_of_choices
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action, columns, counted
from cohabit.planner.schedule.write import write


def compute(op: int) -> Action:
    return COMPUTE, op


def swap_in(tensor: int) -> Action:
    return SWAP_IN, tensor


def swap_out(tensor: int) -> Action:
    return SWAP_OUT, tensor


def drop(tensor: int) -> Action:
    return DROP, tensor


def listed(found: ActionSequence | None) -> tuple[list[Action], frozenset[int]]:
    """The actions and the residents of a sequence that was found."""
    assert found is not None
    return list(zip(found.verb.tolist(), found.what.tolist(), strict=True)), found.residents


def plan_of(problem: Problem, actions: Sequence[Action], residents: Collection[int]) -> Plan | None:
    """The plan of actions; None if they need more than the memory."""
    schedule = counted(problem.arrays, *columns(actions), residents, problem.memory.nbytes)
    return None if schedule is None else write(problem, schedule, problem.memory.nbytes)


def plan_of_choices(
    problem: Problem, gaps: Gaps, choices: Sequence[Choice], *, delayed: bool = False
) -> Plan | None:
    schedule = schedule_of_choices(problem, gaps, choices, delayed=delayed)
    return None if schedule is None else write(problem, schedule, problem.memory.nbytes)
