"""Tells when a loop's step ends: when every optimizer has made one. Measures the first."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import torch

from cohabit.runtime.training.seen.residency import Residency

_log = logging.getLogger("cohabit.training")

_PATIENCE: Final = 16
"""Steps of other optimizers for which an optimizer without a step is waited for."""


class Stepping(Protocol):
    """Is told of steps."""

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None: ...

    def update_ends(self, optimizer: torch.optim.Optimizer) -> None: ...

    def step_ends(self, whole_bytes: int | None) -> None:
        """All optimizers have made a step, or wait; `whole_bytes` is the peak of the first."""
        ...


class FirstStep:
    """Measures a loop's first step, and tells when steps end.

    The first step's peak includes optimizer state: an optimizer's first step creates it, and it stays during later
    steps. A later step ends with that of the optimizer that was the last in the first step.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        residency: Residency,
        lock: AbstractContextManager[Any],
        told: Stepping,
    ) -> None:
        self._optimizers, self._residency, self._lock, self._told = optimizers, residency, lock, told
        self._left = set(map(id, optimizers))
        self._repeated = 0
        """Steps of optimizers that have made one already, while others wait."""
        self._last: int | None = None
        """Id of the optimizer whose step ends the loop's."""
        self._before: dict[int, int] = {}
        """Bytes of tensors before each optimizer's step."""
        self._peak_bytes = 0
        """Outside of optimizers' steps."""
        self._updating_bytes = 0
        """Peak during optimizers' steps."""
        self._state_bytes = 0
        """Bytes that they left."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside the block, wait for the ends of steps."""
        handles = [optimizer.register_step_pre_hook(self._begins) for optimizer in self._optimizers]
        handles += [optimizer.register_step_post_hook(self._ends) for optimizer in self._optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        residency = self._residency
        with self._lock:
            self._told.update_begins(optimizer)
            if self._left:
                residency.collect_dead()
                self._before[id(optimizer)] = residency.used_bytes
                self._peak_bytes = max(self._peak_bytes, residency.peak_bytes)
                residency.peak_bytes = residency.used_bytes

    def _ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        residency = self._residency
        with self._lock:
            self._told.update_ends(optimizer)
            if not self._left:
                if id(optimizer) == self._last:
                    self._told.step_ends(None)
                return
            residency.collect_dead()
            self._updating_bytes = max(self._updating_bytes, residency.peak_bytes)
            if id(optimizer) in self._left:
                self._left.discard(id(optimizer))
                self._state_bytes += max(residency.used_bytes - self._before[id(optimizer)], 0)
            else:
                self._repeated += 1
            if self._left and self._repeated >= _PATIENCE:
                waiting = [type(o).__name__ for o in self._optimizers if id(o) in self._left]
                _log.warning(
                    "the budget begins without a step of %s, which has made none in %d steps of the others",
                    ", ".join(waiting),
                    self._repeated,
                )
                self._left.clear()
            if not self._left:
                self._last = id(optimizer)
                whole_bytes = max(self._peak_bytes + self._state_bytes, self._updating_bytes)
                residency.peak_bytes = max(self._peak_bytes, self._updating_bytes)
                self._told.step_ends(whole_bytes)
