"""Measures the link between pinned memory and the device: latency and bandwidth in each direction."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from msgspec import UNSET, UnsetType

from cohabit.planner.profile import Link
from cohabit.runtime.cuda.issue import Streams
from cohabit.runtime.cuda.stores import Ring
from cohabit.runtime.lowering.weights import Manifest
from cohabit.runtime.measure.link import leading
from cohabit.runtime.memory import Copy, HostStore
from cohabit.runtime.stores.pinned import PinnedMemory

_COPY_BYTES = 4 << 20
"""Typical size of a program's copy."""
_BLOCK_BYTES = 4 << 10
_COPIES = 24
_BLOCKS = 64
_MOST_COPIES = 4096
_ROUNDS = 5
_STAGED_BYTES = 64 << 20
"""Leading bytes of a model copied to measure the staging ring; also the bytes per codec."""
_QUEUE_S = 0.004
"""Seconds that a stream is held while copies are issued, so that they run without gaps."""
_LONG_QUEUE_S = 0.03
"""The same for copies followed by kernels."""
_LEAST_S = 1e-9


class LinkBench:
    """A host and a device buffer, and copies between them. `close` releases both."""

    def __init__(self, streams: Streams, pinned: PinnedMemory) -> None:
        self._streams = streams
        self._pinned = pinned
        self._device = streams.driver.allocate(_COPY_BYTES)
        try:
            self._host = pinned.take(_COPY_BYTES, "measuring the link")
        except BaseException:
            streams.driver.free(self._device)
            raise
        self._buffer = torch.from_numpy(self._host)

    def close(self) -> None:
        self._streams.driver.drain()
        self._streams.driver.free(self._device)
        self._pinned.release(self._host)

    def links(self) -> tuple[Link, Link]:
        """Return the links to the device and back, measured one after the other."""
        return self._link(self._streams.swap_in, self.copy_in), self._link(self._streams.swap_out, self._copy_out)

    def staged(self, store: HostStore[torch.Tensor], manifest: Manifest) -> Link:
        """Return the link to the device through the staging ring: from a staged store, else from pageable memory."""
        sample = leading(manifest, _STAGED_BYTES)
        nbytes = sum(s.nbytes for s in sample.segments)
        if not nbytes:
            return self.links()[0]
        driver, largest = self._streams.driver, max(s.nbytes for s in sample.segments)
        device, ring, pageable = driver.allocate(largest), Ring(driver, self._pinned), np.ones(largest, np.uint8)
        if not store.staged:
            ring.fit(largest)
        start_s = time.perf_counter()
        with driver.on(self._streams.swap_in):
            for index, segment in enumerate(sample.segments):
                destination = device[: segment.nbytes]
                if store.staged:
                    store.copy(index, destination)()
                else:
                    ring.pass_through(lambda host: np.copyto(host, pageable[: host.nbytes]), destination)
        driver.drain()
        seconds = max(time.perf_counter() - start_s, _LEAST_S)
        ring.close()
        driver.free(device)
        return Link(0.0, nbytes / seconds)

    def encoded(
        self, store: HostStore[torch.Tensor], manifest: Manifest, plain: Link
    ) -> tuple[tuple[str, Link], ...] | UnsetType:
        """Return the link of encoded segments by codec, in decoded bytes; UNSET if there are none.

        Stored bytes take the plain link's bandwidth. The remaining time, including decoding, is the latency.
        """
        groups: dict[str, list[int]] = defaultdict(list)
        for n, segment in enumerate(manifest.segments):
            others = sum(manifest.segments[k].nbytes for k in groups[segment.codec])
            if segment.is_encoded and (not others or others + segment.nbytes <= _STAGED_BYTES):
                groups[segment.codec].append(n)
        links: dict[str, Link] = {}
        for codec, members in groups.items():
            segments = [manifest.segments[n] for n in members]
            if store.staged or not segments:
                continue
            device = self._streams.driver.allocate(max(s.nbytes for s in segments))
            copies = [store.copy(n, device[: s.nbytes]) for n, s in zip(members, segments, strict=True)]
            self._all_seconds(copies)  # the first calls prepare kernels
            seconds = statistics.median(self._all_seconds(copies) for _ in range(_ROUNDS))
            self._streams.driver.free(device)
            stored_s = sum(s.file_bytes for s in segments) / plain.bandwidth_bytes_per_s
            latency_s = max(plain.latency_s, (seconds - stored_s) / len(segments))
            links[codec] = Link(latency_s, sum(s.nbytes for s in segments) / stored_s)
        return tuple(links.items()) or UNSET

    def _all_seconds(self, copies: Sequence[Copy]) -> float:
        driver = self._streams.driver
        start, end = driver.event(timed=True), driver.event(timed=True)
        with driver.on(self._streams.swap_in):
            driver.hold(_LONG_QUEUE_S)
            driver.record(start)
            for copy in copies:
                copy()
            driver.record(end)
        driver.synchronize(end)
        return driver.seconds(start, end)

    def copy_in(self, nbytes: int) -> None:
        """Issue one copy to the device on the current stream."""
        self._streams.driver.copy(self._device[:nbytes], self._buffer[:nbytes])

    def busy(self, seconds: float, link: Link) -> Callable[[], float]:
        """Keep the link to the device busy for about `seconds`.

        Returns a function that waits for the end and returns the ratio of the time taken to the time by `link`.
        """
        driver = self._streams.driver
        start, end = driver.event(timed=True), driver.event(timed=True)
        count = min(max(1, round(seconds / link.seconds(_COPY_BYTES))), _MOST_COPIES)
        with driver.on(self._streams.swap_out):  # a program's own copies must not queue behind these
            driver.record(start)
            for _ in range(count):
                self.copy_in(_COPY_BYTES)
            driver.record(end)

        def wait() -> float:
            driver.synchronize(end)
            return driver.seconds(start, end) / (count * link.seconds(_COPY_BYTES))

        return wait

    def _copy_out(self, nbytes: int) -> None:
        self._streams.driver.copy(self._buffer[:nbytes], self._device[:nbytes])

    def _link(self, stream: torch.cuda.Stream, copy: Callable[[int], None]) -> Link:
        """Derive the latency from small blocks, the bandwidth from large copies."""
        latency_s = statistics.median(self._seconds(stream, copy, _BLOCK_BYTES, _BLOCKS) for _ in range(_ROUNDS))
        whole_s = statistics.median(self._seconds(stream, copy, _COPY_BYTES, _COPIES) for _ in range(_ROUNDS))
        return Link(latency_s, _COPY_BYTES / max(whole_s - latency_s, whole_s * 0.05, _LEAST_S))

    def _seconds(self, stream: torch.cuda.Stream, copy: Callable[[int], None], nbytes: int, count: int) -> float:
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
