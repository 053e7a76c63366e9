"""Which copies of the next program may start during the run of the current one, and after which of its ops."""

from collections.abc import Iterator
from dataclasses import replace

from runtime.binding.draft import SwapStep
from runtime.binding.prefetch import free_after
from runtime.binding.program import Program

_MOST_PAIRS = 4096


class PrefetchCopies:
    """Looked up in every run, so computed once per pair of programs that follow one another."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Program, Program, tuple[SwapStep, ...]]] = {}

    def of(self, current: Program, following: Program) -> tuple[SwapStep, ...]:
        """Return the prefix of `following`; each copy waits for the steps of `current` that use its destination."""
        key = id(current), id(following)
        known = self._known.get(key)
        if known is not None and known[0] is current and known[1] is following:
            return known[2]
        if len(self._known) >= _MOST_PAIRS:
            self._known.clear()
        found = tuple(_copies(current, following))
        self._known[key] = current, following, found
        return found

    def forget(self, program: Program) -> None:
        """Drop references to a program that will not run any more."""
        self._known = {key: known for key, known in self._known.items() if id(program) not in key}


def _copies(current: Program, following: Program) -> Iterator[SwapStep]:
    for step in following.swap_ins[: following.prefix]:
        start = step.offset - current.workspace
        if following.name == current.name and not 0 <= start < current.plan.workspace_bytes:
            break  # its own partition is in use
        yield replace(step, computes_before=free_after(current.draft.workspace_uses, start, start + step.nbytes))
