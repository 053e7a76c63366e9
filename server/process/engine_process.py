"""The engine's process, which executes the front end's requests.

Started by the supervisor as `python -m cohabit.server.process.engine_process CONNECTION`. CONNECTION is an inherited
socket to the front end; the process ends when it is closed.
"""

import asyncio
import faulthandler
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import uvloop

from cohabit.planner.errors import CohabitError
from cohabit.server import log
from cohabit.server.background import Background
from cohabit.server.config.config import decode_config
from cohabit.server.errors import ExecutionFailed, LoadFailed, StartFailed, to_wire
from cohabit.server.ipc import messages
from cohabit.server.ipc.catalog import ModelEntry
from cohabit.server.ipc.channel import MessageChannel
from cohabit.server.ipc.request import Request
from cohabit.server.ipc.shared_memory import HEARTBEAT, SharedMemory
from cohabit.server.ipc.spans import DeviceSpan, OnSpans
from cohabit.server.ipc.statistics import EngineReport
from cohabit.server.observe.settings import LogSettings
from cohabit.server.process.engine import Engine, LoadCancelled
from cohabit.server.rights import end_with_parent, no_new_privileges

EXIT_DEVICE_LOST = 70
_HEARTBEAT_S = 0.25
_HANDSHAKE_S = 10.0
_LAST_MESSAGES_S = 0.2

_log = logging.getLogger("cohabit.engine")


class FrontendConnection:
    """The front end's messages, and its shared memory. Event loop's thread only."""

    def __init__(self, service: "EngineService", shared: SharedMemory) -> None:
        self._service = service
        self._heartbeat = shared.array(0, HEARTBEAT, (1,))
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._unsettled: dict[int, Request] = {}
        """Answered requests of sequences, until the front end has written the answer or failed to."""
        self._operations: set[asyncio.Task[None]] = set()
        self.channel: MessageChannel[messages.ToEngine] = MessageChannel(
            messages.encoder(shared), messages.decoder_to_engine(shared), self._received, self._closed
        )

    def beat(self) -> None:
        """Update the heartbeat, as a sign that the event loop runs."""
        self._heartbeat[0] = time.monotonic()

    def _closed(self) -> None:
        for task in self._requests.values():
            task.cancel()
        self._service.disconnected()

    def _received(self, message: messages.ToEngine) -> None:
        match message:
            case Request():
                task = asyncio.create_task(self._infer(message))
                self._requests[message.number] = task
                task.add_done_callback(partial(self._ended, message))
            case messages.Cancel():
                if (request := self._requests.get(message.number)) is not None:
                    request.cancel()
            case messages.Settle():
                if (answered := self._unsettled.pop(message.number, None)) is not None:
                    self._service.engine.settle(answered, kept=message.kept)
            case messages.LoadModel() | messages.UnloadModel() | messages.AskReport():
                operation = asyncio.create_task(self._run_operation(message))
                self._operations.add(operation)
                operation.add_done_callback(self._operations.discard)
            case _:
                self._service.received(message)

    async def _infer(self, request: Request) -> None:
        on_spans = self._spans_of(request.number) if request.traced else None
        try:
            answer = await self._service.engine.infer(request, on_spans)
            if request.sequence is not None:
                self._unsettled[request.number] = request
            self.channel.send(answer)
        except asyncio.CancelledError:
            await self._service.engine.ended(request)
            raise
        except CohabitError as error:
            self.channel.send(messages.Failed(request.number, to_wire(error)))

    def _ended(self, request: Request, task: asyncio.Task[None]) -> None:
        """Report the end of a cancelled or crashed request: until then, the front end keeps the request's memory."""
        del self._requests[request.number]
        reason = "it was cancelled"
        if not task.cancelled():
            if (error := task.exception()) is None:
                return
            _log.error("a request has failed", exc_info=error)
            reason = str(error)
        self.channel.send(messages.Failed(request.number, to_wire(ExecutionFailed(request.model.name, reason))))

    def _spans_of(self, number: int) -> OnSpans:
        loop = asyncio.get_running_loop()

        def send(spans: Sequence[DeviceSpan]) -> None:
            loop.call_soon_threadsafe(self.channel.send, messages.Traced(number, list(spans)))

        return send

    async def _run_operation(
        self, operation: messages.LoadModel | messages.UnloadModel | messages.AskReport
    ) -> None:
        engine = self._service.engine
        report: EngineReport | None = None
        try:
            match operation:
                case messages.LoadModel():
                    await engine.lifecycle.load(operation.model, operation.config)
                case messages.UnloadModel():
                    await engine.lifecycle.unload(operation.model)
                case messages.AskReport():
                    report = engine.report(operation.model)
            self.channel.send(messages.Done(operation.id, report))
        except CohabitError as error:
            self.channel.send(messages.Failed(operation.id, to_wire(error)))
        except Exception:
            failed = LoadFailed(getattr(operation, "model", ""), log.log_internal_error(_log))
            self.channel.send(messages.Failed(operation.id, to_wire(failed)))


class EngineService:
    """Runs an engine for the front end that supervises it. Event loop's thread only."""

    def __init__(self, connection: socket.socket, make_engine: Callable[..., Engine] = Engine) -> None:
        self._connection = connection
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._frontend: FrontendConnection
        self._starting: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None  # the front end sends requests only after EntryChanged
        return self._engine

    async def run(self) -> None:
        """Serve until the front end sends Stop or disconnects."""
        self._frontend = FrontendConnection(self, await asyncio.to_thread(_receive_memory, self._connection))
        self._frontend.beat()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: self._frontend.channel, self._connection)
        background = Background()
        background.keep("the heartbeat", self._write_heartbeats)
        await self._ended.wait()
        await background.close()
        if self._engine is not None:
            await self._engine.stop()
        await asyncio.sleep(_LAST_MESSAGES_S)

    def disconnected(self) -> None:
        self._ended.set()

    def received(self, message: messages.ToEngine) -> None:
        """Handle a message to the engine as a whole."""
        match message:
            case messages.Start():
                self._starting = asyncio.create_task(self._start(message))
            case messages.Stop():
                self._ended.set()
            case messages.CountRejection():
                self.engine.registry.count_rejection(message.model, message.reason, message.count)
            case messages.EndSequence():
                self.engine.end_sequence(message.model, message.sequence, spare=message.spare)
            case messages.ChangeLog():
                log.apply(msgspec.convert(message.settings, LogSettings))

    async def _write_heartbeats(self) -> None:
        while True:
            self._frontend.beat()
            await asyncio.sleep(_HEARTBEAT_S)

    async def _start(self, message: messages.Start) -> None:
        config = decode_config(message.config)
        log.configure_logging(config.log_format)
        loop = asyncio.get_running_loop()

        def publish(entry: ModelEntry) -> None:
            self._frontend.channel.send(messages.EntryChanged(entry))

        def progress(model: str, stage: str) -> None:
            loop.call_soon_threadsafe(self._frontend.channel.send, messages.Progress(model, stage))

        try:
            self._engine = self._make_engine(config, publish=publish, on_lost=_exit_device_lost)
            memory_map = await self._engine.start(progress, message.before)
        except LoadCancelled:
            return
        except CohabitError as error:
            self._frontend.channel.send(messages.StartRefused(to_wire(error)))
        except Exception:
            reason = f"starting the engine failed unexpectedly: {log.log_internal_error(_log)}"
            self._frontend.channel.send(messages.StartRefused(to_wire(StartFailed(reason))))
        else:
            self._frontend.channel.send(messages.Started(memory_map))


def _receive_memory(connection: socket.socket) -> SharedMemory:
    """Receive the front end's shared memory; its descriptor is the first message. Raises OSError."""
    connection.settimeout(_HANDSHAKE_S)
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 1)
    connection.setblocking(False)
    if not descriptors:
        raise ConnectionError("the front end sent no shared memory")
    try:
        return SharedMemory(mmap.mmap(descriptors[0], int.from_bytes(size, "little")))
    finally:
        os.close(descriptors[0])


def _exit_device_lost(reason: str) -> None:
    """Exit at once. Only a new process can use the device; it retries the requests in flight."""
    _log.error("the device is lost", extra={"fields": {"reason": reason}})
    os._exit(EXIT_DEVICE_LOST)


def main(make_engine: Callable[..., Engine] = Engine) -> None:
    """Run the engine until the supervisor ends it. `make_engine` has the signature of `Engine`."""
    faulthandler.enable()
    end_with_parent()
    no_new_privileges()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end decides when the engine ends
    connection = socket.socket(fileno=int(sys.argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(EngineService(connection, make_engine).run())
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of an aborted load or a hung kernel cannot be stopped


if __name__ == "__main__":
    main()
