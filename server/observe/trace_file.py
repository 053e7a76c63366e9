"""The trace file: Chrome's JSON array, written incrementally; Perfetto also reads a truncated one."""

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from cohabit.server.errors import ConfigError
from cohabit.server.observe.spans import Event, header_events

_log = logging.getLogger("cohabit.trace")

_MOST_BYTES = 1 << 30
_BUFFER_BYTES = 1 << 20
_LONGEST_BUFFERED_S = 1.0
"""Seconds after which a trace is in the file, even if the buffer is not full."""


class TraceFile:
    """Any thread may write; the file's own thread encodes and flushes."""

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES, lanes: int = 1) -> None:
        """Create or truncate the file. Raises ConfigError."""
        try:
            self._file = path.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise ConfigError(f"--trace-config: {path} cannot be written: {error.strerror}") from error
        self.path = path
        self._free_bytes = most_bytes
        self._closed = False
        self._queue: SimpleQueue[Iterable[Event] | None] = SimpleQueue()
        self._file.write(b"[\n" + b",\n".join(map(msgspec.json.encode, header_events(lanes))))
        self._writer = threading.Thread(target=self._run, name="trace-file", daemon=True)
        self._writer.start()

    def write(self, events: Iterable[Event]) -> None:
        """Add events to the buffer, which is flushed when full, or after a second. Drops events after `close`."""
        if self._closed:
            _log.debug("a trace came after the file was closed")
            return
        self._queue.put(events)

    def close(self) -> None:
        """Flush the buffer, and end the array."""
        self._closed = True
        self._queue.put(None)
        self._writer.join()
        with suppress(OSError):  # it was logged
            self._file.close()

    def _run(self) -> None:
        flush_s: float | None = None
        """Time at which the buffer is flushed; None while it is empty."""
        ended = False
        while not ended:
            try:
                with suppress(Empty):
                    wait_s = None if flush_s is None else max(flush_s - time.monotonic(), 0.0)
                    events = self._queue.get(timeout=wait_s)
                    ended = events is None
                    self._file.write(b"\n]\n" if events is None else self._encoded(events))
                    flush_s = flush_s or time.monotonic() + _LONGEST_BUFFERED_S
                if ended or (flush_s is not None and time.monotonic() >= flush_s):
                    flush_s = None
                    self._file.flush()
            except OSError as error:
                fields = {"file": str(self.path), "reason": str(error)}
                _log.warning("traces could not be written", extra={"fields": fields})

    def _encoded(self, events: Iterable[Event]) -> bytes:
        """Return events as lines of the file; nothing if they cannot be encoded, or do not fit."""
        try:
            lines = b"".join(b",\n" + msgspec.json.encode(event) for event in events)
        except Exception:  # a bug of the server; only the log shows it
            _log.exception("a trace could not be encoded", extra={"fields": {"file": str(self.path)}})
            return b""
        if len(lines) > self._free_bytes:
            if self._free_bytes > 0:
                _log.warning("the trace file is full", extra={"fields": {"file": str(self.path)}})
            self._free_bytes = 0
            return b""
        self._free_bytes -= len(lines)
        return lines
