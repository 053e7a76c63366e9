"""Latency that a search would at least reach, from a plan made at once."""

from planner.layout.feasible import Footprint
from planner.offloading import searcher as offloading
from planner.problem import Problem
from planner.profile import Profile
from planner.streaming import searcher as streaming


def estimate_latency_s(footprint: Footprint, profile: Profile, partition_bytes: int, workspace_bytes: int) -> float:
    """What can be planned at once. Raises InfeasibleBudget."""
    if footprint.offloads:
        return offloading.first_latency_s(Problem(footprint.graph, profile, partition_bytes, workspace_bytes))
    return streaming.first_latency_s(footprint, profile, partition_bytes, workspace_bytes)
