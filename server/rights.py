"""Rights and limits that processes set at startup: parent's death, privileges, memory, open files."""

import ctypes
import resource
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Let the operating system kill this process when its parent dies, even if a kernel on the device hangs."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def no_new_privileges() -> None:
    """Drop the rights of set-user-ID programs and file capabilities, for this process and its children."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def raise_open_file_limit() -> None:
    """Raise the limit of open files to its maximum: the default may be below --max-connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def raise_oom_score() -> None:
    """Let the operating system kill this process before others if memory runs out."""
    with suppress(OSError):  # no /proc
        Path("/proc/self/oom_score_adj").write_text("1000")
