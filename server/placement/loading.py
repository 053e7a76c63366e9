"""Brings a model's initial residents into its partition, a few MiB between every two inferences of the others."""

from collections.abc import Callable, Sequence

from runtime.backend import Executor
from runtime.binding.program import Program

_DONE = object()


class ResidentLoad:
    """A background for the engine. `then` is called on its thread when everything is there."""

    def __init__(
        self, executor: Executor, programs: Sequence[Program], then: Callable[[], None] = lambda: None
    ) -> None:
        """Programs of one model, at different batch sizes, have the same residents."""
        self._pieces = executor.load_in_pieces(programs)
        self._then = then

    def advance(self) -> bool:
        """Bring the next piece. Raises DeviceError."""
        is_done = next(self._pieces, _DONE) is _DONE
        if is_done:
            self._then()
        return is_done
