"""Stretches: runs of compute steps of which only the first may wait, and none of which is waited for but the last."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from runtime.binding.blueprint import Blueprint


def stretches(blueprint: Blueprint) -> Iterator[range]:
    """Every compute step is in one of them, in order. There are none where activations travel, between any two ops."""
    computes = blueprint.computes
    if blueprint.journeys:
        return
    initial = {p.tensor for p in blueprint.plan.residents}
    restored = {s.tensor for s in blueprint.swap_ins if s.tensor in initial}
    told = {s.computes_before for s in blueprint.swap_ins}
    first = swap_ins = 0
    for n, step in enumerate(computes):
        waits = (
            step.swap_ins_before > swap_ins or step.swap_outs_before or not restored.isdisjoint(step.first_reads)
        )
        if n > first and (waits or n in told):
            yield range(first, n)
            first = n
        swap_ins = max(swap_ins, step.swap_ins_before)
    if computes:
        yield range(first, len(computes))


def between(waiting: Iterable[int], computes: int) -> Iterator[range]:
    """So many compute steps, cut before each that may wait."""
    return (range(*ends) for ends in pairwise(sorted({0, *waiting, computes})))
