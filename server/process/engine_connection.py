"""The client of an engine in its own process. It keeps requests until they are answered, and retries after a crash."""

import asyncio
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from cohabit.server.errors import (
    EngineUnavailable,
    ModelNotFound,
    Refused,
    RequestError,
    RequestTimedOut,
    from_wire,
    shutting_down,
)
from cohabit.server.frontend.memory import Lease, RequestMemory, output_buffer_for
from cohabit.server.ipc import messages
from cohabit.server.ipc.catalog import Catalog, ModelEntry, ModelState
from cohabit.server.ipc.channel import MessageChannel
from cohabit.server.ipc.model import ModelInfo, ModelKey
from cohabit.server.ipc.request import Answer, Request, SequenceId
from cohabit.server.ipc.spans import OnSpans
from cohabit.server.ipc.statistics import EngineReport
from cohabit.server.observe.settings import LogSettings

_log = logging.getLogger("cohabit.frontend")

DEATHS_PER_REQUEST = 2
"""A request that was executing in this many crashes of the engine is not retried."""
PREDICTIONS_PER_EXECUTION = 20.0
"""An execution may take this multiple of its predicted time, or the watchdog's limit if that is longer."""
_MOST_TRACED = 1024
"""Maximum number of requests whose spans are still expected."""
_REPORT_S = 1.0
_COUNT_S = 0.1
"""Interval for reporting rejections to the engine."""


@dataclass(slots=True)
class PendingRequest:
    """A request that the engine has not answered."""

    request: Request
    future: asyncio.Future[Answer]
    lease: Lease
    sent: bool = False
    deaths: int = 0
    """Deaths of an engine while it executed this request."""
    hangs: int = 0
    """Those among them in which the watchdog killed the engine because this request hung."""
    is_hung: bool = False
    """Whether the current process is being killed because this request hangs."""

    @property
    def deadline_s(self) -> float:
        timeout_s, arrived_s = self.request.timeout_s, self.request.arrived_s
        return math.inf if timeout_s is None or arrived_s is None else arrived_s + timeout_s


class EngineConnection:
    """An `EngineClient` for an engine process, which may die and be restarted. Event loop's thread only.

    Every request is kept in `memory` until the engine has answered it. After a crash, unanswered requests are resent
    once the next process has loaded its models.
    """

    def __init__(
        self, memory: RequestMemory, strict_readiness: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.catalog = Catalog(strict_readiness)
        self.restarts = 0
        self._memory = memory
        self._encode = messages.encoder(memory)
        self._decode = messages.decoder_to_frontend(memory)
        self._clock = clock
        self._channel: MessageChannel[messages.ToFrontend] | None = None
        self._started = False
        """Whether the connected process has finished loading."""
        self._was_started = False
        """Whether any process has finished loading."""
        self._gave_up: str | None = None
        """Why requests are refused instead of waiting for the next process."""
        self._closing = False
        self._next_id = 0
        self._pending: dict[int, PendingRequest] = {}
        self._operations: dict[int, asyncio.Future[EngineReport | None]] = {}
        self._traced: dict[int, OnSpans] = {}
        self._rejections: Counter[tuple[ModelKey, str]] = Counter()
        """Unsent counts by model and reason. They are sent in batches, to spare the engine under overload."""
        self._last_report = EngineReport()
        self._reporting = asyncio.Lock()
        self._next_report: asyncio.Task[EngineReport] | None = None
        self._start: asyncio.Future[str] | None = None
        self._on_progress: Callable[[str, str], None] = lambda model, stage: None
        self._lost = asyncio.Event()

    @property
    def unavailable(self) -> str | None:
        if self._gave_up is not None:
            return self._gave_up
        if self._started:
            return None
        return "the engine is being restarted" if self._was_started else "the engine is starting"

    async def connect(self, connection: socket.socket) -> None:
        """Connect to an engine over a Unix socket, and share the request memory. The engine may not run yet."""
        loop = asyncio.get_running_loop()
        self._lost.clear()
        self._memory.clear_heartbeat()
        socket.send_fds(connection, [self._memory.nbytes.to_bytes(8, "little")], [self._memory.descriptor])
        connection.setblocking(False)
        _, self._channel = await loop.create_unix_connection(
            lambda: MessageChannel(self._encode, self._decode, self._received, self._lost.set), sock=connection
        )

    async def start(
        self, config: bytes, on_progress: Callable[[str, str], None] = lambda model, stage: None
    ) -> str:
        """Let the connected engine load its models; returns the memory map. Raises the loading error.

        After a restart, the models that were ready are loaded, and unanswered requests are resent. An interrupted load
        is not resumed.
        """
        self._on_progress = on_progress
        self._start = asyncio.get_running_loop().create_future()
        self._send(messages.Start(config, list(self.catalog) if self._was_started else None))
        return await self._start

    async def wait_closed(self) -> None:
        """Wait until the connection has ended."""
        await self._lost.wait()

    def died(self, reason: str) -> None:
        """Called when the engine's process has ended. Executing requests are retried once; others stay queued."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self._started = None, False
        for operation in self._operations.values():
            if not operation.done():  # its caller still waits
                operation.set_exception(EngineUnavailable(f"the engine's process ended: {reason}"))
        self._operations.clear()
        self._rejections.clear()
        for id_, pending in list(self._pending.items()):
            if id_ not in self._pending:
                continue  # failed in this loop, with its model
            if pending.future.done():  # the client has disconnected
                self._forget(id_)
                continue
            pending.deaths += pending.request.marked[0] > 0
            pending.hangs += pending.is_hung
            pending.is_hung = False
            pending.sent = False
            pending.request.mark(0.0, 0.0)
            if pending.deaths >= DEATHS_PER_REQUEST:
                text = (
                    f"model '{pending.request.model.name}': the engine's process died twice while it executed this"
                    f" request ({reason}); it is not tried again"
                )
                self._fail(id_, Refused("EngineFailed", text))
            if pending.hangs >= DEATHS_PER_REQUEST:
                self._fail_model(pending.request.model, reason)
        self._traced = {number: on_spans for number, on_spans in self._traced.items() if number in self._pending}

    def give_up(self, reason: str) -> None:
        """Refuse waiting requests, and new ones until the next process has started."""
        self._gave_up = reason
        for id_ in list(self._pending):
            self._fail(id_, EngineUnavailable(reason))

    def shed(self) -> None:
        """Refuse requests that wait for an engine and whose deadline has passed."""
        now_s = self._clock()
        for id_, pending in list(self._pending.items()):
            if not pending.sent and now_s > pending.deadline_s:
                self._fail(id_, RequestTimedOut(pending.request.model.name, pending.request.timeout_s or 0.0))

    def hang_reason(self, watchdog_s: float) -> str | None:
        """Return why the engine counts as hung, or None.

        It hangs if an execution exceeds both `watchdog_s` and PREDICTIONS_PER_EXECUTION times its prediction, or if its
        event loop has not run for `watchdog_s`.
        """
        now_s = self._clock()
        beat_s = self._memory.beat_s
        stalled = beat_s > 0 and now_s - beat_s > watchdog_s
        for pending in self._pending.values():
            started_s, expected_s = pending.request.marked
            limit_s = max(watchdog_s, PREDICTIONS_PER_EXECUTION * expected_s)
            if started_s > 0 and now_s - started_s > limit_s:
                pending.is_hung = not stalled  # without a heartbeat, the whole process may have been stopped
                return f"an execution of model '{pending.request.model.name}' takes longer than {limit_s:.3g} s"
        return f"its event loop has not run for {watchdog_s:.3g} s" if stalled else None

    @property
    def waiting(self) -> int:
        return len(self._pending)

    async def infer(
        self, request: Request, info: ModelInfo, lease: Lease, on_spans: OnSpans | None = None
    ) -> Answer:
        if self._gave_up is not None:
            raise EngineUnavailable(self._gave_up)
        if self._closing:
            raise shutting_down()
        self._next_id += 1
        number = self._next_id
        output_buffer = output_buffer_for(request, info, lease)
        request = replace(request, output_buffer=output_buffer, number=number, traced=on_spans is not None)
        request.mark(0.0, 0.0)
        pending = PendingRequest(request, asyncio.get_running_loop().create_future(), lease)
        lease.retain()
        if request.sequence is not None:
            lease.on_end(lambda kept: self._send(messages.Settle(number, kept)))
        self._pending[number] = pending
        if on_spans is not None:
            self._traced[number] = on_spans
            if len(self._traced) > _MOST_TRACED:
                del self._traced[next(iter(self._traced))]
        if self._started:
            self._dispatch(pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            if pending.sent:
                self._send(messages.Cancel(number))
            else:
                self._forget(number)
            raise

    async def load(self, model: str, config: str | None) -> None:
        await self._call(lambda id_: messages.LoadModel(id_, model, config))

    async def unload(self, model: str) -> None:
        await self._call(lambda id_: messages.UnloadModel(id_, model))

    async def report(self, model: ModelKey | None = None) -> EngineReport:
        """Return the engine's counters, or those of one model. Callers during a fetch share the next report of all."""
        if model is not None:
            self._send_rejections()
            return await self._asked(model) or self._last_report
        if self._next_report is None:
            self._next_report = asyncio.create_task(self._fetch_report())
        return await asyncio.shield(self._next_report)

    async def _fetch_report(self) -> EngineReport:
        async with self._reporting:
            self._next_report = None  # later callers start a new report
            if self._started:
                self._send_rejections()
                self._last_report = await self._asked(None) or self._last_report
            return self._last_report

    async def _asked(self, model: ModelKey | None) -> EngineReport | None:
        """Return the counters of one model, or of all; None if the engine does not report them in time."""
        try:
            async with asyncio.timeout(_REPORT_S):
                return await self._call(lambda id_: messages.AskReport(id_, model))
        except (TimeoutError, RequestError):
            _log.debug("the engine did not report")
            return None

    def count_rejection(self, model: ModelKey, reason: str) -> None:
        if not self._started:
            return  # the next process starts its counters at zero
        if not self._rejections:
            asyncio.get_running_loop().call_later(_COUNT_S, self._send_rejections)
        self._rejections[model, reason] += 1

    def _send_rejections(self) -> None:
        for (model, reason), count in self._rejections.items():
            self._send(messages.CountRejection(model, reason, count))
        self._rejections.clear()

    def end_sequence(self, model: ModelKey, sequence: SequenceId, *, spare: bool = False) -> None:
        if self._started:  # a process that is still loading has no sequences
            self._send(messages.EndSequence(model, sequence, spare))

    def change_log(self, settings: LogSettings) -> None:
        self._send(messages.ChangeLog(msgspec.structs.asdict(settings)))

    async def close(self) -> bool:
        """Ask the process to end, and refuse pending requests."""
        self._closing = True
        self._send(messages.Stop())
        for id_ in list(self._pending):
            self._fail(id_, shutting_down())
        return True

    def _dispatch(self, pending: PendingRequest) -> None:
        pending.sent = True
        self._send(pending.request)

    async def _call(self, make: Callable[[int], messages.ToEngine]) -> EngineReport | None:
        if not self._started:
            raise EngineUnavailable(self.unavailable or "the engine is still loading")
        self._next_id += 1
        future: asyncio.Future[EngineReport | None] = asyncio.get_running_loop().create_future()
        self._operations[self._next_id] = future
        self._send(make(self._next_id))
        return await future

    def _send(self, message: messages.ToEngine) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _received(self, message: messages.ToFrontend) -> None:
        match message:
            case Answer():
                self._answer(message)
            case messages.Failed():
                error = from_wire(message.error)
                if message.id in self._pending:
                    self._fail(message.id, error)
                elif (operation := self._operations.pop(message.id, None)) is not None and not operation.done():
                    operation.set_exception(error)
            case messages.Traced():
                if (on_spans := self._traced.get(message.number)) is not None:
                    on_spans(message.spans)
            case messages.EntryChanged(entry):
                self._update(entry)
            case messages.Done():
                operation = self._operations.pop(message.id, None)
                if operation is not None and not operation.done():
                    operation.set_result(message.report)
            case messages.Progress():
                self._on_progress(message.model, message.stage)
            case messages.Started():
                self._has_started(message.memory_map)
            case messages.StartRefused():
                if self._start is not None and not self._start.done():
                    self._start.set_exception(from_wire(message.error))

    def _update(self, entry: ModelEntry) -> None:
        """Update a model's state. While a new process loads, models served before stay READY for clients."""
        old = self.catalog.get(entry.name, entry.version)
        reloading = self._was_started and not self._started
        if not (reloading and old is not None and old.is_ready and entry.state is ModelState.LOADING):
            self.catalog.update(entry)

    def _fail_model(self, model: ModelKey, reason: str) -> None:
        """Stop serving a version of a model until a client loads it again."""
        why = f"one of its requests hung twice: {reason}; load the model again"
        entry = self.catalog.get(*model)
        if entry is not None:
            self.catalog.update(msgspec.structs.replace(entry, state=ModelState.UNAVAILABLE, reason=why, info=None))
        for id_, pending in list(self._pending.items()):
            if pending.request.model == model:
                self._fail(id_, ModelNotFound(*model, reason=why))

    def _has_started(self, memory_map: str) -> None:
        self._started = self._was_started = True
        self._gave_up = None
        if self._start is not None and not self._start.done():
            self._start.set_result(memory_map)
        for pending in [p for p in self._pending.values() if not p.sent]:
            self._dispatch(pending)

    def _answer(self, answer: Answer) -> None:
        pending = self._pending.get(answer.number)
        if pending is None:
            return
        if not pending.future.done():
            pending.future.set_result(answer)
        self._forget(answer.number)

    def _fail(self, id_: int, error: Exception) -> None:
        pending = self._pending[id_]
        if not pending.future.done():
            pending.future.set_exception(error)
        self._forget(id_)

    def _forget(self, id_: int) -> None:
        """Release a request's memory. Does nothing if it has ended, such as one that was shed and then cancelled."""
        if (pending := self._pending.pop(id_, None)) is not None:
            pending.lease.release()
