"""Loads a model's initial residents into its partition, in pieces of a few MiB."""

from collections.abc import Callable, Sequence

from runtime.backend import Executor
from runtime.binding.program import Program

_DONE = object()


class ResidentLoad:
    """Background work of a lane. `on_done` is called on the lane's thread after the last piece."""

    def __init__(
        self, executor: Executor, programs: Sequence[Program], on_done: Callable[[], None] = lambda: None
    ) -> None:
        """`programs` are those of one model in different buckets, which share their residents."""
        self._pieces = executor.load_in_pieces(programs)
        self._on_done = on_done

    def advance(self) -> bool:
        """Load the next piece; True after the last one. Raises DeviceError."""
        is_done = next(self._pieces, _DONE) is _DONE
        if is_done:
            self._on_done()
        return is_done
