"""How a program is issued on a device that can capture one into a graph."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capture:
    """Programs that are launched as one graph, or why one is not."""

    graphs: int
    graph_bytes: int
    """Device memory that the graphs take beside the arena, as the driver has it."""
    refused: str | None
    """Why kernels and copies are issued one by one."""


def together(captures: Iterable[Capture | None]) -> Capture | None:
    """The same model's programs for several places as one."""
    found = [capture for capture in captures if capture is not None]
    if not found:
        return None
    refused = next((capture.refused for capture in found if capture.refused is not None), None)
    return Capture(sum(c.graphs for c in found), sum(c.graph_bytes for c in found), refused)
