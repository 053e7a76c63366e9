"""Live feed: one document a second for all who watch the server, and no work while no one does."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

import msgspec

from cohabit.page.document import LiveDocument
from cohabit.server.config.config import ServeConfig
from cohabit.server.errors import Overloaded
from cohabit.server.frontend.ensembles import Ensembles
from cohabit.server.ipc.model import ModelKey
from cohabit.server.observe.tracing import Tracer
from cohabit.server.view.live_document import WINDOW_S, Reading, Token, latencies_of, live_document
from cohabit.server.view.live_lanes import LiveLanes

_PERIOD_S = 1.0
_MOST_WATCHERS = 16
"""Each keeps a connection with a request under way."""
_MOST_LATENCIES = 2048
"""Latencies kept per model, the newest, for its p50 and p99."""
_MOST_TOKENS = 1 << 16
"""Tokens kept of all texts within the window."""


class LiveFeed:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        config: ServeConfig,
        ensembles: Ensembles,
        tracer: Tracer,
        is_draining: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        period_s: float = _PERIOD_S,
    ) -> None:
        """`clock` is the clock of spans, common to all processes."""
        self._config = config
        self._ensembles = ensembles
        self._tracer = tracer
        self._is_draining = is_draining
        self._clock = clock
        self._began_s = clock()
        self._period_s = period_s
        self._watchers = 0
        self._making: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None
        self._readings: deque[Reading] = deque()
        self._latencies: dict[ModelKey, deque[tuple[float, float]]] = {}
        """Times of answers, and their latencies in seconds."""
        self._tokens: deque[Token] = deque(maxlen=_MOST_TOKENS)
        self._lanes = LiveLanes(config.compute_lanes)

    def answered(self, model: ModelKey, latency_s: float) -> None:
        """Record an answered request, if anyone watches."""
        if self._watchers:
            latest = self._latencies.setdefault(model, deque(maxlen=_MOST_LATENCIES))
            latest.append((self._clock(), latency_s))

    def generated(self, waited_s: float, first: bool) -> None:
        """Record a generated token, if anyone watches."""
        if self._watchers:
            self._tokens.append(Token(self._clock(), waited_s, first))

    async def documents(self) -> AsyncGenerator[bytes, None]:
        """Yield a `LiveDocument` in JSON each second, until the server drains; a slow reader misses some.

        Raises Overloaded if too many watch.
        """
        if self._watchers >= _MOST_WATCHERS:
            raise Overloaded(f"{_MOST_WATCHERS} pages watch this server already")
        self._watchers += 1
        if self._making is None:
            self._next = asyncio.get_running_loop().create_future()
            self._tracer.watch(self._lanes.add)
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._made)
        try:
            while (following := self._next) is not None:
                yield await asyncio.shield(following)
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._stop()

    async def _make(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        draining = False
        while not draining:
            draining = self._is_draining()
            document = msgspec.json.encode(await self._document())
            made, self._next = self._next, None if draining else loop.create_future()
            assert made is not None
            made.set_result(document)
            due_s = max(due_s + self._period_s, loop.time())
            await asyncio.sleep(0 if draining else due_s - loop.time())

    def _made(self, making: asyncio.Task[None]) -> None:
        """Pass an error on to those who wait for the next document."""
        if not making.cancelled() and (error := making.exception()) is not None and self._next is not None:
            self._next.set_exception(error)

    def _stop(self) -> None:
        """Clear the records: the next viewer starts empty."""
        if self._making is not None:
            self._making.cancel()
        self._making = self._next = None
        self._tracer.watch(None)
        self._readings.clear()
        self._latencies.clear()
        self._tokens.clear()
        self._lanes.clear()

    async def _document(self) -> LiveDocument:
        report = self._ensembles.added_to(await self._ensembles.client.report())
        now_s = self._clock()
        self._readings.append(Reading.of(now_s, report))
        while len(self._readings) > 1 and self._readings[1].at_s <= now_s - WINDOW_S:
            self._readings.popleft()
        latencies = {key: latencies_of(latest, now_s) for key, latest in self._latencies.items()}
        while self._tokens and self._tokens[0].at_s < now_s - WINDOW_S:
            self._tokens.popleft()
        chart = self._lanes.chart(now_s) if self._tracer.samples else None
        return live_document(
            self._config,
            self._ensembles,
            self._tracer,
            report,
            self._readings,
            latencies,
            self._tokens,
            chart,
            now_s - self._began_s,
        )
