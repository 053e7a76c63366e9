"""Functions that tests call in the processes that prepare models; importing them imports no torch."""

import os
import sys
from types import SimpleNamespace
from typing import Any

from cohabit.server.deploy.worker import stage


def is_imported(module: str) -> bool:
    return module in sys.modules


def open_device() -> int:
    """Let this process seem to have a CUDA context."""
    torch: Any = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    sys.modules["torch"] = torch
    return os.getpid()


def fail_unexpectedly() -> None:
    with stage("lowering model 'x'"):
        raise KeyError("p_weight")
