"""How a program is issued on a device that can capture one into a graph."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capture:
    """How one program or several are issued: as graphs, or why not."""

    graphs: int
    graph_bytes: int
    """Device memory that the graphs take outside of the arena, as the driver reports it."""
    refused: str | None
    """Why kernels and copies are issued one by one."""


def together(captures: Iterable[Capture | None]) -> Capture | None:
    """Return the captures of one model's programs at several addresses as one."""
    found = [capture for capture in captures if capture is not None]
    if not found:
        return None
    refused = next((capture.refused for capture in found if capture.refused is not None), None)
    return Capture(sum(c.graphs for c in found), sum(c.graph_bytes for c in found), refused)
