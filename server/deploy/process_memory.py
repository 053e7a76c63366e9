"""Divides --process-memory: models get the memory that the server's processes leave, measured at the start."""

from collections.abc import Sequence
from dataclasses import dataclass

from cohabit.planner.errors import format_bytes
from cohabit.planner.graph import aligned
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.host.pages import release_code_pages
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.machine import resident_bytes
from cohabit.server.config.sources import QUEUE_SHARE
from cohabit.server.deploy.model import Model
from cohabit.server.errors import ConfigError

SERVING_BYTES = 44 << 20
"""Memory that the first requests add to a process: library code pages, oneDNN's kernels, thread stacks, heap.

The maximum is that of a convolutional network: 20 MiB of code, 18 MiB of the others, and 6 MiB of page tables.
"""
_STEP_BYTES = 4 << 20
"""The models' memory is a multiple of this, so that the next start finds the same plans."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The parts of a server's memory, in bytes."""

    limit_bytes: int
    base_bytes: int
    """Python, torch and the other libraries, graphs and profiles, in all processes."""
    store_bytes: int
    """Parameters in the host store; with --store file, buffers."""
    queue_bytes: int
    state_bytes: int = 0
    """States of sequences; 0 if no model has any."""

    @property
    def models_bytes(self) -> int:
        """Memory left for the models, at least 0."""
        left = self.limit_bytes - self._fixed_bytes - self.queue_bytes - self.state_bytes
        return max(0, left // _STEP_BYTES * _STEP_BYTES)

    @property
    def _fixed_bytes(self) -> int:
        return self.base_bytes + self.store_bytes + SERVING_BYTES

    def require(self, models_bytes: int) -> None:
        """Raise ConfigError, with the size of each part, if the models get less than `models_bytes`."""
        if models_bytes <= self.models_bytes:
            return
        needed = aligned(models_bytes, _STEP_BYTES)
        queue_bytes, source = self.queue_bytes, "--queue-memory"
        if queue_bytes == self.limit_bytes // QUEUE_SHARE:  # the default, which grows with the limit
            shares = 2 if self.state_bytes else 1
            queue_bytes = (self._fixed_bytes + needed) // (QUEUE_SHARE - shares)
            source = "--queue-memory, by default a sixteenth"
        parts = (
            ("Python, torch and the server", self.base_bytes),
            ("host store (less with --store file)", self.store_bytes),
            (f"requests ({source})", queue_bytes),
            *([("states of sequences (as much)", queue_bytes)] if self.state_bytes else []),
            ("code, kernels and heap of the first requests", SERVING_BYTES),
            ("models, at least", needed),
        )
        table = "".join(f"\n  {what:<50}{format_bytes(nbytes):>12}" for what, nbytes in parts)
        least = -(-sum(nbytes for _, nbytes in parts) >> 20) + 1
        raise ConfigError(
            f"--process-memory {format_bytes(self.limit_bytes)} is not enough:{table}\n  give at least {least}MiB, or"
            " less to one of these parts"
        )


def measure_process_memory(limit_bytes: int, models: Sequence[Model], config: ServeConfig) -> ProcessMemory:
    """Measure this process, once the models' host stores are open and before anything is loaded."""
    release_free_memory()
    release_code_pages()
    store_bytes = sum(m.lowered.manifest.file_bytes for m in models) if config.store == "ram" else 0
    base_bytes = resident_bytes() + config.frontend_bytes - store_bytes
    state_bytes = config.queue_bytes if any(model.sequences is not None for model in models) else 0
    return ProcessMemory(limit_bytes, base_bytes, store_bytes, config.queue_bytes, state_bytes)
