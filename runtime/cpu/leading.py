"""Which copies of the next program may begin in the run of this one, and when."""

from collections.abc import Iterator
from dataclasses import replace

from runtime.binding.program import Program, SwapInStep
from runtime.cpu.vacancy import free_after

_PAIRS = 4096


class Leading:
    """Looked up in every run, so found once for each two programs that follow one another."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Program, Program, tuple[SwapInStep, ...]]] = {}

    def copies(self, current: Program, expected: Program) -> tuple[SwapInStep, ...]:
        """The prefix of `expected`, each copy to wait for the steps of `current` that use the bytes it goes to."""
        key = id(current), id(expected)
        known = self._known.get(key)
        if known is not None and known[0] is current and known[1] is expected:
            return known[2]
        if len(self._known) >= _PAIRS:
            self._known.clear()
        found = tuple(_leading(current, expected))
        self._known[key] = current, expected, found
        return found

    def forget(self, program: Program) -> None:
        """Let go of a program that will not be run any more."""
        self._known = {key: known for key, known in self._known.items() if id(program) not in key}


def _leading(current: Program, expected: Program) -> Iterator[SwapInStep]:
    for step in expected.swap_ins[: expected.prefix]:
        start = step.offset - current.workspace
        if expected.name == current.name and not 0 <= start < current.plan.workspace_bytes:
            break  # its own partition is in use
        yield replace(step, computes_before=free_after(current.stays, start, start + step.nbytes))
