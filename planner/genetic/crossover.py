"""Crossover of streaming decisions, and the repair of residents that do not fit or leave memory unused."""

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.streaming.stream import RELEASED, STREAMED, Decisions
from cohabit.planner.streaming.workload import Arrays


@compiled
def crossed(
    work: Arrays, first: Decisions, second: Decisions, low: int, high: int, fixed: bool, seed: int
) -> Decisions:
    """Take the decisions of ops `low` to `high` from the second parent and the rest from the first, then repair.

    With a negative `low`, each parameter's decisions come from either parent at random. With `fixed` residents, their
    set stays.
    """
    np.random.seed(seed)
    count = len(first.choice)
    choice, hold, fit, lead = first.choice.copy(), first.hold.copy(), first.fit.copy(), first.lead.copy()
    from_second = np.zeros(count, np.bool_)
    for p in range(count):
        from_second[p] = np.random.random() < 0.5 if low < 0 else low <= work.first_use[p] < high
        if from_second[p] and (not fixed or choice[p] != STREAMED):
            choice[p] = second.choice[p]
    for j in range(len(hold)):
        if from_second[work.use_parameter[j]] if low < 0 else low <= work.use_op[j] < high:
            hold[j], fit[j], lead[j] = second.hold[j], second.fit[j], second.lead[j]
    if not fixed:
        _repair(work, choice, first.choice, second.choice)
    return Decisions(choice, hold, fit, lead)


@compiled
def refitted(work: Arrays, found: Decisions, seed: int) -> Decisions:
    """Return decisions for another size of the partition: residents leave until they fit, or others fill it."""
    np.random.seed(seed)
    choice = found.choice.copy()
    _repair(work, choice, found.choice, found.choice)
    return Decisions(choice, found.hold, found.fit, found.lead)


@compiled
def _repair(work: Arrays, choice: Ints, first: Ints, second: Ints) -> None:
    """Evict random residents until the rest fit, then fill the memory.

    Residents that the parents disagree about leave first. Residents of either parent fill the memory first.
    """
    drawn = np.random.permutation(len(choice))
    left = work.partition_pages - work.size[choice != STREAMED].sum()
    for disagreed in (True, False):
        for p in drawn:
            is_disputed = first[p] == STREAMED or second[p] == STREAMED
            if left < 0 and choice[p] != STREAMED and is_disputed == disagreed:
                choice[p] = STREAMED
                left += work.size[p]
    for had in (True, False):
        for p in drawn:
            is_theirs = first[p] != STREAMED or second[p] != STREAMED
            if choice[p] == STREAMED and is_theirs == had and 0 < work.size[p] <= left:
                choice[p] = max(first[p], second[p]) if is_theirs else RELEASED
                left -= work.size[p]
