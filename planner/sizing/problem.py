"""The problem of dividing memory among models, and its solution.

The arena begins with the workspaces, one per compute lane and all of one size. Every model gets a partition, or all
share one region.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec

from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket

LayoutName = Literal["partitioned", "resident", "time_shared", "pipelined", "lru", "on_demand"]
WHOLE_MODELS: tuple[LayoutName, ...] = ("time_shared", "lru")
"""Layouts with one region that hold a whole model while it runs."""
ONE_REGION: tuple[LayoutName, ...] = (*WHOLE_MODELS, "pipelined", "on_demand")
"""Layouts with one region. The last two hold only each op's parameters, so models may be larger."""


def layout_name(layout: str) -> LayoutName:
    """Return the layout by whose rules memory is divided. Other packages' layouts hold whole models in one region."""
    if layout == "elastic":
        return "partitioned"
    known: tuple[LayoutName, ...] = get_args(LayoutName)
    return next((name for name in known if name == layout), "lru")


@dataclass(frozen=True)
class ModelDemand:
    """A model for the planner: its graphs and profiles by bucket, and its request rate."""

    name: str
    graphs: Mapping[Bucket, Graph]
    profiles: Mapping[Bucket, Profile]
    rate_per_s: float = 1.0
    splits_batches: bool = False
    """Whether an unplanned batch may run as several smaller ones."""

    @property
    def batches(self) -> list[int]:
        return sorted({bucket.batch for bucket in self.graphs})

    def up_to(self, most_batch: int) -> "ModelDemand":
        """Return the demand without the buckets of larger batches."""
        graphs = {bucket: graph for bucket, graph in self.graphs.items() if bucket.batch <= most_batch}
        return replace(self, graphs=graphs, profiles={bucket: self.profiles[bucket] for bucket in graphs})


class Division(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A division of memory: sizes of each lane's workspace and of the partition that each model is planned for."""

    memory_bytes: int
    """A multiple of the page size."""
    workspace_bytes: int
    partition_bytes: tuple[int, ...]
    most_batches: tuple[int, ...] = ()
    """Largest planned batch of each model; larger ones run in parts. Empty if all are planned."""

    @property
    def memories(self) -> list[Memory]:
        """The memory that each model is planned for."""
        return [Memory(self.workspace_bytes, nbytes) for nbytes in self.partition_bytes]
