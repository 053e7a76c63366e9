"""Layout of the control records in the memory that a front end shares with the engine."""

import mmap

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
ALIGNMENT = 64

HEARTBEAT = np.dtype([("beat_s", "<f8"), ("started_s", "<f8"), ("predicted_s", "<f8")])
"""At offset 0: when the engine's event loop last ran, by `time.monotonic`; when the oldest execution under way began
(0 if there is none), and its predicted duration. Blocks begin after the first page."""
MARK = np.dtype([("started_s", "<f8"), ("predicted_s", "<f8")])
"""One per request: when its execution began (0 while it is queued), and its predicted duration."""


def round_up(nbytes: int) -> int:
    """Return the size of the block that holds `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
