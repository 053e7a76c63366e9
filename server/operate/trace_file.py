"""The file of spans: Chrome's JSON array, written piece by piece, sound to Perfetto even if it is cut short."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from server.errors import ConfigError
from server.operate.spans import Event, header_events

_log = logging.getLogger("cohabit.trace")

_MOST_BYTES = 1 << 30
_MOST_BUFFERED = 256
"""Traces that are kept back at most, however seldom the settings want them written."""


class TraceFile:
    """Belongs to the event loop's thread; a thread of its own does the writing."""

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES) -> None:
        """Open the file anew. Raises ConfigError."""
        try:
            self._file: IO[bytes] = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--trace-file: {path} cannot be written: {error.strerror}") from error
        self.path = path
        self._left_bytes = most_bytes
        self._buffer: list[bytes] = [b"[\n" + b",\n".join(map(msgspec.json.encode, header_events()))]
        self._traces = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trace-file")

    def write(self, events: Sequence[Event], flush_every: int = 0) -> None:
        """Add a trace; after `flush_every` of them, or a good many, they are written."""
        lines = b"".join(b",\n" + msgspec.json.encode(event) for event in events)
        if len(lines) > self._left_bytes:
            if self._left_bytes > 0:
                _log.warning("the trace file is full", extra={"fields": {"file": str(self.path)}})
            self._left_bytes = 0
            return
        self._left_bytes -= len(lines)
        self._buffer.append(lines)
        self._traces += 1
        if self._traces >= min(flush_every or _MOST_BUFFERED, _MOST_BUFFERED):
            self._flush()

    def close(self) -> None:
        """Write the rest, and end the array."""
        self._buffer.append(b"\n]\n")
        self._flush()
        self._writer.shutdown()
        self._file.close()

    def _flush(self) -> None:
        written, self._buffer, self._traces = b"".join(self._buffer), [], 0
        self._writer.submit(self._append, written)

    def _append(self, written: bytes) -> None:
        try:
            self._file.write(written)
            self._file.flush()
        except OSError as error:
            fields = {"file": str(self.path), "reason": str(error)}
            _log.warning("traces could not be written", extra={"fields": fields})
