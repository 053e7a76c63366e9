"""Turns a share of the first step's peak into a size."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from cohabit.runtime.training.residency import Residency


class FirstStep:
    """Measures a loop's first step, which ends when every optimizer has made a step.

    Its peak includes optimizer state: an optimizer's first step creates it, and it stays during later steps.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        residency: Residency,
        lock: AbstractContextManager[Any],
        share: float,
    ) -> None:
        self._optimizers, self._residency, self._lock, self._share = optimizers, residency, lock, share
        self._left = set(map(id, optimizers))
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
        """Inside the block, wait for the end of the first step, and set the limit then."""
        # The hooks stay until the block ends: others may be running when the last step has been measured.
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
            if not self._left:
                return
            residency.collect_dead()
            self._before[id(optimizer)] = residency.used_bytes
            self._peak_bytes = max(self._peak_bytes, residency.peak_bytes)
            residency.peak_bytes = residency.used_bytes

    def _ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        residency = self._residency
        with self._lock:
            if id(optimizer) not in self._left:
                return
            self._left.discard(id(optimizer))
            residency.collect_dead()
            self._updating_bytes = max(self._updating_bytes, residency.peak_bytes)
            self._state_bytes += max(residency.used_bytes - self._before[id(optimizer)], 0)
            if not self._left:
                whole_bytes = max(self._peak_bytes + self._state_bytes, self._updating_bytes)
                residency.limit_bytes = int(self._share * whole_bytes)
                residency.peak_bytes = 0
