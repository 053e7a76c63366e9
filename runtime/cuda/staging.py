"""Staging memory: device buffers, in slots, in which encoded bytes arrive before kernels decode them."""

import threading
from dataclasses import dataclass

import torch

STAGING_SLOTS, SLOT_BYTES = 4, 2 << 20
"""Slots of a stream's buffer for encoded bytes. A copy as large as a slot has nearly the link's full speed."""
_USERS = ("directly", "by graphs of this stream", "by graphs of another stream")
"""Users of a lane's staging memory, one part each: uses of one part are ordered by one stream."""
LANE_BYTES = len(_USERS) * STAGING_SLOTS * SLOT_BYTES


@dataclass(slots=True)
class StagingSlot:
    """A part of a staging buffer."""

    memory: torch.Tensor
    free: torch.cuda.Event | None = None
    """Reached when the slot's last contents are decoded; None before the buffer is used."""


class Staging:
    """A stream's buffer for encoded bytes, in slots used in turn, and the stream whose copies fill them.

    Copies run ahead of decoding. Only decoding waits for its destinations to be free.
    """

    def __init__(self, memory: torch.Tensor, link: torch.cuda.Stream, *, captured: bool) -> None:
        self.link = link
        self.captured = captured
        """Whether the buffer is used once, for a capture."""
        self.turn = threading.Lock()
        """Held while a copy through a slot is issued."""
        self.slots = [StagingSlot(part) for part in memory.chunk(STAGING_SLOTS)]


class LaneStaging:
    """The staging memory of a decoding stream: `LANE_BYTES`."""

    def __init__(self, memory: torch.Tensor, link: torch.cuda.Stream) -> None:
        self.link = link
        self.address = memory.data_ptr()
        self.parts = dict(zip(_USERS, memory.chunk(len(_USERS)), strict=True))
        self.direct = Staging(self.parts["directly"], link, captured=False)


class CaptureStaging:
    """The staging buffer of a capture in progress, on the stream `origin`."""

    def __init__(self, origin: torch.cuda.Stream) -> None:
        self._origin = origin
        self._staging: Staging | None = None

    def of(self, stream: torch.cuda.Stream, lane: LaneStaging) -> Staging:
        """Return the slots of the decoding stream. A capture has only one."""
        if self._staging is None:
            own = "by graphs of this stream" if stream is self._origin else "by graphs of another stream"
            self._staging = Staging(lane.parts[own], lane.link, captured=True)
        return self._staging
