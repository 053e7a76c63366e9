"""Trains on a CUDA device: tensors lie in a pool of the plan's size, and leave it for pinned memory.

The user's tensors stay on whatever device they are. Their bytes are in pinned memory while a plan has them.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from benchmarks.captured.capture import OpCall
from benchmarks.captured.measure import longest, stand_ins
from benchmarks.captured.store import StateStore
from cohabit.planner.profile import Link
from cohabit.runtime.binding.build import bind
from cohabit.runtime.binding.draft import Draft
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.arena import CudaArena
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.executor import CudaExecutor
from cohabit.runtime.cuda.profiling.link import LinkBench
from cohabit.runtime.cuda.program import ALIGNMENT_BYTES, CudaProgram, prepare
from cohabit.runtime.cuda.stores import pinned_spill_buffers
from cohabit.runtime.devices import open_device
from cohabit.runtime.lowering.lower import Lowered

ALLOCATOR_SHARE: Final = 0.05
"""Of the memory: what torch's allocator is left for rounding sizes up, and for gaps between tensors."""
_QUEUE_S: Final = 2e-4
"""How long the stream is kept busy while an op is issued, so that its launch is not timed."""
_CONTENDED_S: Final = 2e-3
"""The longest ops are timed with copies at the same time: each is repeated for so long, ..."""
_CONTENDED_RUNS: Final = 5
"""... and that so often."""


class CudaTraining:
    """See `TrainingDevice`."""

    shares_memory = False

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._driver, self._streams = backend.driver, backend.streams
        self._arena: CudaArena | None = None
        self._peaks: dict[str, int] = {}
        self.name = backend.name
        self.device = self._driver.device
        self.store = StateStore("ram", partial(pinned_spill_buffers, backend.pinned_memory))

    @staticmethod
    def open(name: str) -> "CudaTraining":
        """Open a device by its name. Raises DeviceError."""
        backend = open_device(name)
        assert isinstance(backend, CudaBackend)
        return CudaTraining(backend)

    @property
    def executor(self) -> CudaExecutor:
        return self._backend.executor

    def start(self) -> None:
        """Do nothing: the streams are there."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Arguments are made in the order of the stream that reads them."""
        random = self._driver.random_state()
        with torch.inference_mode(), self._driver.on(self._streams.compute):
            yield
        self._driver.drain()
        self._driver.set_random_state(random)

    @contextmanager
    def peaks(self) -> Iterator[dict[str, int]]:
        self._peaks = {}
        yield self._peaks

    def allocating(self, name: str, call: Callable[[], Any]) -> Any:
        results: list[Any] = []
        self._peaks[name] = self._driver.peak_bytes(lambda: results.append(call()))
        return results[0]

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the time between two events around the call's kernels."""
        driver = self._driver

        def run() -> None:
            call()

        start, end = driver.event(timed=True), driver.event(timed=True)
        driver.hold(_QUEUE_S)
        driver.record(start)
        driver.launch(run)
        driver.record(end)
        driver.synchronize(end)
        return driver.seconds(start, end)

    def links(self) -> tuple[Link, Link]:
        with closing(LinkBench(self._streams, self._backend.pinned_memory)) as bench:
            return bench.links()

    def slowdowns(self, calls: Sequence[OpCall], seconds: Sequence[float]) -> tuple[float, float]:
        """Run the longest ops by themselves, and while the swap-in stream copies."""
        alone_s, contended_s = 0.0, 0.0
        slower: list[float] = []
        with closing(LinkBench(self._streams, self._backend.pinned_memory)) as bench, self.measuring():
            link, _ = bench.links()
            for call, count, op_s in longest(calls, seconds):
                run = _repeated(call, self.device, math.ceil(_CONTENDED_S / max(op_s, 1e-6)))
                try:
                    run_s = statistics.median(self.seconds(run) for _ in range(_CONTENDED_RUNS))
                except RuntimeError:
                    continue  # stand-ins do not do
                contended = []
                for _ in range(_CONTENDED_RUNS):
                    wait = bench.busy(2 * run_s, link)
                    contended.append(self.seconds(run))
                    wait()
                    wait = bench.busy(run_s / 2, link)
                    self.seconds(run)
                    slower.append(wait())
                # Those that take most of a step count most, however often each was repeated here.
                alone_s += count * op_s
                contended_s += count * op_s * statistics.median(contended) / run_s
        if not alone_s or not slower:
            return 1.0, 1.0
        return max(1.0, contended_s / alone_s), max(1.0, statistics.median(slower))

    def budget_of(self, tensor_bytes: int) -> int:
        return int(tensor_bytes / (1 - ALLOCATOR_SHARE)) + 1

    def tensor_bytes_in(self, budget_bytes: int) -> int:
        return int(budget_bytes * (1 - ALLOCATOR_SHARE))

    def bind(
        self, lowered: Lowered, drafted: Draft, of_tensor: Mapping[int, OffloadedTensor], budget_bytes: int
    ) -> CudaProgram:
        """The plan's pool is all of the memory, which is taken when the first program is bound."""
        if self._arena is None:
            self._arena = self._backend.arena(budget_bytes)
        pinned, bases = self._backend.pinned_memory, Bases(0, 0)
        program = bind(drafted, of_tensor, self._arena, bases, self.store)
        prepared = prepare(pinned, lowered, program, drafted.profile, self._arena, bases, self.store)
        pool_bytes = self._arena.nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return replace(prepared, pool_memory=self._arena.bytes(0, pool_bytes))

    def random_state(self) -> torch.Tensor:
        return self._driver.random_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        self._driver.set_random_state(state)

    def close(self) -> None:
        self._backend.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _repeated(call: OpCall, device: torch.device, times: int) -> Callable[[], None]:
    args, kwargs = stand_ins(call, device)

    def run() -> None:
        for _ in range(times):
            call.target(*args, **kwargs)

    return run
