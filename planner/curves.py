"""Latency as a function of the partition's size, from quick plans. Models that are alike share one curve."""

from dataclasses import dataclass

from planner.feasible import PAGE_BYTES
from planner.graph import Graph
from planner.profile import Profile
from planner.search import Problem, search

SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


@dataclass(frozen=True, slots=True)
class Point:
    partition_bytes: int
    latency_s: float


Curve = tuple[Point, ...]


class LatencyCurves:
    """Remembers what it has planned."""

    def __init__(self) -> None:
        self._latency_s: dict[tuple[str, str, int, int], float] = {}

    def latency_s(self, graph: Graph, profile: Profile, partition_bytes: int, workspace_bytes: int) -> float:
        """Predicted latency of a plan made without refinement. Raises InfeasibleBudget."""
        key = (graph.fingerprint, profile.fingerprint, partition_bytes, workspace_bytes)
        if key not in self._latency_s:
            plan = search(Problem(graph, profile, partition_bytes, workspace_bytes), rounds=0)
            assert plan.provenance is not None
            self._latency_s[key] = plan.provenance.latency_s
        return self._latency_s[key]

    def curve(self, graph: Graph, profile: Profile, least: int, most: int, workspace_bytes: int) -> Curve:
        """Points from `least` to `most` bytes of partition, until more memory no longer helps."""
        points: list[Point] = []
        for share in SHARES:
            size = least + int(max(most - least, 0) * share) // PAGE_BYTES * PAGE_BYTES
            latency_s = self.latency_s(graph, profile, size, workspace_bytes)
            if points:
                latency_s = min(latency_s, points[-1].latency_s)
            points.append(Point(size, latency_s))
            if latency_s <= profile.compute_s * (1 + 1e-9):
                break
        return tuple(points)
