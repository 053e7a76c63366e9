"""The trace file: Chrome's JSON array, written incrementally; Perfetto also reads a truncated one."""

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, NamedTuple

import msgspec

from cohabit.server.errors import ConfigError
from cohabit.server.observe.spans import Event, header_events

_log = logging.getLogger("cohabit.trace")

_MOST_BYTES = 1 << 30
_MOST_BUFFERED = 256
"""Maximum number of buffered traces."""
_MOST_BUFFERED_BYTES = 1 << 20
_LONGEST_BUFFERED_S = 1.0
"""Seconds after which a trace is in the file, even if the buffer is not full."""


class _Written(NamedTuple):
    """The events of a `TraceFile.write`."""

    events: Iterable[Event]
    late: bool


class TraceFile:
    """Any thread may write; the file's own thread encodes and flushes."""

    def __init__(
        self, path: Path, most_bytes: int = _MOST_BYTES, lanes: int = 1, flush_every: int = _MOST_BUFFERED
    ) -> None:
        """Create or truncate the file, which is flushed every `flush_every` traces or earlier. Raises ConfigError."""
        try:
            self._file: IO[bytes] = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--trace-config: {path} cannot be written: {error.strerror}") from error
        self.path = path
        self._flush_every = flush_every
        self._free_bytes = most_bytes
        self._buffer: list[bytes] = [b"[\n" + b",\n".join(map(msgspec.json.encode, header_events(lanes)))]
        self._buffered_bytes = 0
        self._traces = 0
        self._flush_s = time.monotonic() + _LONGEST_BUFFERED_S
        """Time at which the buffer is flushed, if it is not empty."""
        self._closed = False
        self._queue: SimpleQueue[_Written | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._run, name="trace-file", daemon=True)
        self._writer.start()

    def write(self, events: Iterable[Event], *, late: bool = False) -> None:
        """Add a trace to the buffer, which is flushed when full, or after a second.

        `late` events belong to an earlier trace, and do not count as one. Events after `close` are dropped.
        """
        if self._closed:
            _log.debug("a trace came after the file was closed")
            return
        self._queue.put(_Written(events, late))

    def close(self) -> None:
        """Flush the buffer, and end the array."""
        self._closed = True
        self._queue.put(None)
        self._writer.join()
        self._file.close()

    def _run(self) -> None:
        while True:
            wait_s = max(self._flush_s - time.monotonic(), 0.0) if self._buffer else None
            try:
                written = self._queue.get(timeout=wait_s)
            except Empty:
                self._flush()
                continue
            if written is None:
                self._end()
                return
            self._add(*written)
            if self._buffer and time.monotonic() >= self._flush_s:
                self._flush()

    def _add(self, events: Iterable[Event], late: bool) -> None:
        try:
            lines = b"".join(b",\n" + msgspec.json.encode(event) for event in events)
        except Exception:  # a bug of the server; only the log shows it
            _log.exception("a trace could not be encoded", extra={"fields": {"file": str(self.path)}})
            return
        if len(lines) > self._free_bytes:
            if self._free_bytes > 0:
                _log.warning("the trace file is full", extra={"fields": {"file": str(self.path)}})
            self._free_bytes = 0
            return
        self._free_bytes -= len(lines)
        if not self._buffer:
            self._flush_s = time.monotonic() + _LONGEST_BUFFERED_S
        self._buffer.append(lines)
        self._buffered_bytes += len(lines)
        self._traces += not late
        if self._traces == 0 or self._traces >= self._flush_every or self._buffered_bytes >= _MOST_BUFFERED_BYTES:
            self._flush()

    def _end(self) -> None:
        self._buffer.append(b"\n]\n")
        self._flush()

    def _flush(self) -> None:
        written, self._buffer = b"".join(self._buffer), []
        self._buffered_bytes = self._traces = 0
        try:
            self._file.write(written)
            self._file.flush()
        except OSError as error:
            fields = {"file": str(self.path), "reason": str(error)}
            _log.warning("traces could not be written", extra={"fields": fields})
