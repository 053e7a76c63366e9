"""Serve many models from one device whose memory cannot hold them all."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cohabit.module import LoadedModule as LoadedModule
    from cohabit.module import ModulePlan as ModulePlan
    from cohabit.module import load as load
    from cohabit.module import plan as plan
    from cohabit.runtime.training.budget import budget as budget
    from cohabit.serving import Server as Server

_LAZY = {
    "LoadedModule": "cohabit.module",
    "ModulePlan": "cohabit.module",
    "Server": "cohabit.serving",
    "budget": "cohabit.runtime.training.budget",
    "load": "cohabit.module",
    "plan": "cohabit.module",
}
"""Modules imported on first use: the front end runs without torch."""

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'cohabit' has no attribute '{name}'")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
