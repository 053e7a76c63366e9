"""Copies between a GPU's memory and the host's, ordered with the ops of all streams.

The host issues ops and copies without waiting for them to end. Three rules order them, whichever streams the loop
uses. A copy begins after everything issued before it on the streams of ops. A copy's result is used only once the copy
has ended, or once all of these streams wait for its end. A stream that is new waits for all copies so far.
"""

from collections.abc import Iterable
from typing import Any

import torch

from cohabit.runtime.training.copies.copying import CopyThread
from cohabit.runtime.training.copies.spill import bytes_of
from cohabit.runtime.training.tracked import StorageCopy


class OpStreams:
    """The streams on which counted ops have run, by their number. `cuda` has the interface of `torch.cuda`."""

    def __init__(self, device: torch.device, cuda: Any, copy_streams: Iterable[Any]) -> None:
        self._device, self._cuda, self._copy_streams = device, cuda, list(copy_streams)
        self._streams: dict[int, Any] = {}

    def current(self) -> int:
        stream = self._cuda.current_stream(self._device)
        number: int = stream.cuda_stream
        if number not in self._streams:
            for copies in self._copy_streams:
                stream.wait_stream(copies)
            self._streams[number] = stream
        return number

    def precede(self, later: Any) -> None:
        """Make a stream's later work wait for everything that ops have issued."""
        for stream in self._streams.values():
            later.wait_stream(stream)

    def follow(self, event: Any) -> None:
        """Make all later ops wait for an event."""
        for stream in self._streams.values():
            stream.wait_event(event)

    def share(self, storage: Any) -> None:
        with torch._C._DisableTorchDispatch():
            bytes_of(storage).record_stream(self._cuda.current_stream(self._device))

    def close(self) -> None:
        """Wait until autograd's thread for the device has released the last backward pass and our dispatch mode.

        A thread that releases a Python object while the interpreter ends aborts the process. The thread runs one pass
        after the other: when one more pass has ended, all earlier ones are released.
        """
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), device=self._device, requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]


class _Reached:
    """The end of a copy on a stream."""

    def __init__(self, event: Any, ops: OpStreams) -> None:
        self._event, self._ops = event, ops
        self._is_followed = False

    def is_set(self) -> bool:
        return self._is_followed or bool(self._event.query())

    def wait(self) -> None:
        self._is_followed = True
        self._ops.follow(self._event)


class CopyStreams:
    """Copies to pinned memory on one stream, and back on another. The host waits for none of them."""

    takes_memory_at_once = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._saves, self._loads = cuda.Stream(device), cuda.Stream(device)
        self.streams = OpStreams(device, cuda, (self._saves, self._loads))

    def start(self) -> None: ...

    def bytes_per_s(self, is_load: bool) -> float | None:
        return None  # the host does not see copies end

    def begin(self, copy: StorageCopy) -> None:
        stream = self._loads if copy.is_load else self._saves
        self.streams.precede(stream)
        with self._cuda.stream(stream):
            copy.make()
        copy.end = _Reached(stream.record_event(), self.streams)

    def make(self, copy: StorageCopy) -> None:
        self.begin(copy)
        copy.end.wait()

    def settle(self) -> None:
        self._saves.synchronize()
        self._loads.synchronize()

    def close(self) -> None:
        self.settle()
        self.streams.close()


class DeviceCopyThread(CopyThread):
    """Copies to a file and back. A thread waits for the device; ops that need a copy wait for the thread."""

    takes_memory_at_once = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._copies = cuda.Stream(device)
        self.streams: OpStreams = OpStreams(device, cuda, (self._copies,))

    def begin(self, copy: StorageCopy) -> None:
        self.streams.precede(self._copies)
        super().begin(copy)

    def make(self, copy: StorageCopy) -> None:
        self.streams.precede(self._copies)
        super().make(copy)

    def close(self) -> None:
        super().close()
        self.streams.close()

    def _make_here(self, copy: StorageCopy) -> None:
        with self._cuda.stream(self._copies):
            super()._make_here(copy)  # returns when the device has made it
