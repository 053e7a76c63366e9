"""Latency as a function of the partition's size, from quick plans."""

from dataclasses import dataclass

from planner.layout.feasible import PAGE_BYTES, Footprint
from planner.offloading import searcher as offloading
from planner.problem import Problem
from planner.profile import Profile
from planner.streaming import searcher as streaming

SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class Point:
    partition_bytes: int
    latency_s: float


Curve = tuple[Point, ...]


def estimate_latency_s(footprint: Footprint, profile: Profile, partition_bytes: int, workspace_bytes: int) -> float:
    """Latency of a quick plan; a search finds at least as good a one. Raises InfeasibleBudget."""
    if footprint.offloads:
        return offloading.first_latency_s(Problem(footprint.graph, profile, partition_bytes, workspace_bytes))
    return streaming.first_latency_s(footprint, profile, partition_bytes, workspace_bytes)


class LatencyCurves:
    """A cache of quick latencies; models with the same graph and profile share them."""

    def __init__(self) -> None:
        self._latency_s: dict[tuple[str, bool, str, int, int], float] = {}

    def latency_s(
        self, footprint: Footprint, profile: Profile, partition_bytes: int, workspace_bytes: int
    ) -> float:
        """Latency of a quick plan. Raises InfeasibleBudget."""
        graph = footprint.graph.fingerprint
        key = (graph, footprint.offloads, profile.fingerprint, partition_bytes, workspace_bytes)
        if key not in self._latency_s:
            self._latency_s[key] = estimate_latency_s(footprint, profile, partition_bytes, workspace_bytes)
        return self._latency_s[key]

    def curve(self, footprint: Footprint, profile: Profile, least: int, most: int, workspace_bytes: int) -> Curve:
        """Points from `least` to `most` bytes of partition, until more memory no longer helps."""
        points: list[Point] = []
        for share in SHARES:
            size = least + int(max(most - least, 0) * share) // PAGE_BYTES * PAGE_BYTES
            latency_s = self.latency_s(footprint, profile, size, workspace_bytes)
            if points:
                latency_s = min(latency_s, points[-1].latency_s)
            points.append(Point(size, latency_s))
            if latency_s <= profile.compute_s * (1 + 1e-6):
                break
        return tuple(points)
