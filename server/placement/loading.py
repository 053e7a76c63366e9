"""Brings a model's initial residents into its partition, a few MiB between every two inferences of the others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from runtime.backend import Executor
from runtime.binding.program import Program, SwapInStep

PIECE_BYTES = 4 << 20
"""Where a link saturates; at 5 GB/s a piece holds the others up for less than a millisecond."""


class ResidentLoad:
    """A chore for the engine. `then` is called on its thread when everything is there."""

    def __init__(
        self, executor: Executor, programs: Sequence[Program], then: Callable[[], None] = lambda: None
    ) -> None:
        """Programs of one model, at different batch sizes, have the same residents."""
        self._executor = executor
        self._pieces = list(pieces(programs))
        self._then = then

    def advance(self) -> bool:
        """Bring the next piece. Raises DeviceError."""
        if self._pieces:
            self._executor.load(self._pieces.pop(0))
        if not self._pieces:
            self._then()
        return not self._pieces


def pieces(programs: Sequence[Program]) -> Iterator[Program]:
    """The first program with a part of its residents each, under a name that no running model has.

    Other devices schedule their residents as a whole, and are faster; each of their programs is admitted by loading it.
    """
    program = programs[0]
    if type(program) is not Program:
        yield from programs
        return
    name, nbytes = f"{program.name} (arriving)", 0
    part: list[SwapInStep] = []
    for step in program.residents:
        if part and nbytes + step.nbytes > PIECE_BYTES:
            yield replace(program, name=name, residents=tuple(part))
            part, nbytes = [], 0
        part.append(step)
        nbytes += step.nbytes
    if part:
        yield replace(program, name=name, residents=tuple(part))
