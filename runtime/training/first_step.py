"""Tells when a loop's step ends: when every optimizer has made one. Measures the first."""

import logging
from collections.abc import Sequence
from typing import Final

import torch

from cohabit.runtime.training.residency import Residency

_log = logging.getLogger("cohabit.training")

_PATIENCE: Final = 16
"""Steps of other optimizers for which an optimizer without a step is waited for."""


class FirstStep:
    """Measures a loop's first step, and tells when steps end. The caller holds a lock.

    The first step's peak includes optimizer state: an optimizer's first step creates it, and it stays during later
    steps. A later step ends with that of the optimizer that was the last in the first step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], residency: Residency) -> None:
        self._optimizers, self._residency = optimizers, residency
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

    @property
    def whole_bytes(self) -> int:
        """Peak of the first step, once it has ended."""
        return max(self._peak_bytes + self._state_bytes, self._updating_bytes)

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step begins."""
        residency = self._residency
        if self._left:
            residency.collect_dead()
            self._before[id(optimizer)] = residency.used_bytes
            self._peak_bytes = max(self._peak_bytes, residency.peak_bytes)
            residency.peak_bytes = residency.used_bytes

    def update_ends(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer's step has ended. Returns whether the loop's has: all have made a step, or wait."""
        residency = self._residency
        if not self._left:
            return id(optimizer) == self._last
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
        if self._left:
            return False
        self._last = id(optimizer)
        residency.peak_bytes = max(self._peak_bytes, self._updating_bytes)
        return True
