"""Serve many models from one device whose memory cannot hold them all."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cohabit.runtime.training.trainer import Trainer as Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    """Import `Trainer` when it is asked for: servers' front ends import nothing of torch."""
    if name == "Trainer":
        from cohabit.runtime.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
