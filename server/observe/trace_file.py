"""The file of spans: Chrome's JSON array, written piece by piece, sound to Perfetto even if it is cut short."""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from server.errors import ConfigError
from server.observe.spans import Event, header_events

_log = logging.getLogger("cohabit.trace")

_MOST_BYTES = 1 << 30
_MOST_BUFFERED = 256
"""Traces that are kept back at most, however seldom the settings want them written."""
_MOST_BUFFERED_BYTES = 1 << 20


class TraceFile:
    """For any thread; one of its own encodes and writes."""

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES, lanes: int = 1) -> None:
        """Open the file anew, for so many compute lanes. Raises ConfigError."""
        try:
            self._file: IO[bytes] = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--trace-file: {path} cannot be written: {error.strerror}") from error
        self.path = path
        self._left_bytes = most_bytes
        self._buffer: list[bytes] = [b"[\n" + b",\n".join(map(msgspec.json.encode, header_events(lanes)))]
        self._buffered_bytes = 0
        self._traces = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trace-file")

    def write(self, events: Iterable[Event], flush_every: int = 0, *, late: bool = False) -> None:
        """Add a trace; after `flush_every` of them, or a good many, they are written.

        With `late`, add to a trace what may come when that has been written: it is kept back no longer than others.
        What comes after the end is left out.
        """
        try:
            self._writer.submit(self._add, events, min(flush_every or _MOST_BUFFERED, _MOST_BUFFERED), late)
        except RuntimeError:
            _log.debug("a trace came after the file was closed")

    def close(self) -> None:
        """Write the rest, and end the array."""
        self._writer.submit(self._end)
        self._writer.shutdown()
        self._file.close()

    def _add(self, events: Iterable[Event], flush_after: int, late: bool) -> None:
        try:
            lines = b"".join(b",\n" + msgspec.json.encode(event) for event in events)
        except Exception:  # a fault of ours, of which nobody else would hear
            _log.exception("a trace could not be encoded", extra={"fields": {"file": str(self.path)}})
            return
        if len(lines) > self._left_bytes:
            if self._left_bytes > 0:
                _log.warning("the trace file is full", extra={"fields": {"file": str(self.path)}})
            self._left_bytes = 0
            return
        self._left_bytes -= len(lines)
        self._buffer.append(lines)
        self._buffered_bytes += len(lines)
        self._traces += not late
        if self._traces == 0 or self._traces >= flush_after or self._buffered_bytes >= _MOST_BUFFERED_BYTES:
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
