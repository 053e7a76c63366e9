"""Measures the link between pinned memory and the device: latency and bandwidth, each way and both ways at once."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from planner.profile import Link
from runtime.cuda.api import Stream
from runtime.cuda.issue import Streams
from runtime.cuda.stores import PinnedMemory

_COPY_BYTES = 4 << 20
"""Size of a copy as programs have them."""
_BLOCK_BYTES = 4 << 10
_COPIES = 24
_BLOCKS = 64
_MOST_COPIES = 4096
_ROUNDS = 5
_QUEUE_S = 0.004
"""How long a stream is kept busy while copies are issued, so that they run without gaps."""
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Each direction by itself, and the bandwidths of both when they are busy at the same time."""

    swap_in: Link
    swap_out: Link
    both_in_bytes_per_s: float
    both_out_bytes_per_s: float


class LinkBench:
    """A buffer on either side and copies between them. `close` releases the pinned one."""

    def __init__(self, streams: Streams, pinned: PinnedMemory) -> None:
        self._streams = streams
        self._pinned = pinned
        self._host = pinned.take(2 * _COPY_BYTES, "measuring the link")
        self._device = streams.driver.allocate(2 * _COPY_BYTES)

    def close(self) -> None:
        self._streams.driver.drain()
        self._streams.driver.free(self._device)
        self._pinned.release(self._host)

    def figures(self) -> LinkFigures:
        swap_in = self._link(self._streams.swap_in, self.copy_in)
        swap_out = self._link(self._streams.swap_out, self._copy_out)
        both = [self._both() for _ in range(_ROUNDS)]
        nbytes = _COPIES * _COPY_BYTES
        return LinkFigures(
            swap_in,
            swap_out,
            nbytes / statistics.median(inward_s for inward_s, _ in both),
            nbytes / statistics.median(outward_s for _, outward_s in both),
        )

    def copy_in(self, nbytes: int) -> None:
        """Issue one copy to the device, to the current stream."""
        self._streams.driver.copy(self._device[:nbytes], self._half(0)[:nbytes])

    def busy(self, seconds: float, link: Link) -> Callable[[], float]:
        """Keep the swap-in lane copying for about so long.

        The call that is returned waits for the end, and says how many times as long as by the link's figures it took.
        """
        driver = self._streams.driver
        start, end = driver.event(timed=True), driver.event(timed=True)
        count = min(max(1, round(seconds / link.seconds(_COPY_BYTES))), _MOST_COPIES)
        with driver.on(self._streams.swap_in):
            driver.record(start)
            for _ in range(count):
                self.copy_in(_COPY_BYTES)
            driver.record(end)

        def wait() -> float:
            driver.synchronize(end)
            return driver.seconds(start, end) / (count * link.seconds(_COPY_BYTES))

        return wait

    def _copy_out(self, nbytes: int) -> None:
        self._streams.driver.copy(self._half(1)[:nbytes], self._device[_COPY_BYTES : _COPY_BYTES + nbytes])

    def _half(self, which: int) -> torch.Tensor:
        return torch.from_numpy(self._host[which * _COPY_BYTES : (which + 1) * _COPY_BYTES])

    def _link(self, stream: Stream, copy: Callable[[int], None]) -> Link:
        """Blocks give the latency, large copies the rest."""
        latency_s = statistics.median(self._seconds(stream, copy, _BLOCK_BYTES, _BLOCKS) for _ in range(_ROUNDS))
        whole_s = statistics.median(self._seconds(stream, copy, _COPY_BYTES, _COPIES) for _ in range(_ROUNDS))
        return Link(latency_s, _COPY_BYTES / max(whole_s - latency_s, whole_s * 0.05, _LEAST_S))

    def _seconds(self, stream: Stream, copy: Callable[[int], None], nbytes: int, count: int) -> float:
        driver = self._streams.driver
        start, end = driver.event(timed=True), driver.event(timed=True)
        with driver.on(stream):
            driver.hold(_QUEUE_S)
            driver.record(start)
            for _ in range(count):
                copy(nbytes)
            driver.record(end)
        driver.synchronize(end)
        return driver.seconds(start, end) / count

    def _both(self) -> tuple[float, float]:
        driver = self._streams.driver
        events = [driver.event(timed=True) for _ in range(4)]
        streams = (
            (self._streams.swap_in, self.copy_in, events[:2]),
            (self._streams.swap_out, self._copy_out, events[2:]),
        )
        for stream, copy, (start, end) in streams:
            with driver.on(stream):
                driver.hold(_QUEUE_S)
                driver.record(start)
                for _ in range(_COPIES):
                    copy(_COPY_BYTES)
                driver.record(end)
        for end in (events[1], events[3]):
            driver.synchronize(end)
        return driver.seconds(*events[:2]), driver.seconds(*events[2:])
