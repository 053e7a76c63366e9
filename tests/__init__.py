"""Tests of everything: the seams of each room, real processes end to end, and hostile clients."""

import os

# Before torch is imported, here and in the processes that tests start: these share the cores, and waiting threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
