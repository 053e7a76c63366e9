"""Deployments: each model's memory and plans, which the planner chooses and the engine carries out.

A deployment's arena begins with the workspaces, one per compute lane and all of one size. Partitions are placed from
the arena's end downwards, in the order of the models, so that workspaces and partitions can grow into the bytes
between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket

LayoutName = Literal["partitioned", "resident", "time_shared", "pipelined", "lru", "on_demand"]
WHOLE_MODELS: tuple[LayoutName, ...] = ("time_shared", "lru")
"""Layouts with one region that hold a whole model while it runs."""
ONE_REGION: tuple[LayoutName, ...] = (*WHOLE_MODELS, "pipelined", "on_demand")
"""Layouts with one region. The last two hold only each op's parameters, so models may be larger."""


@dataclass(frozen=True)
class ModelDemand:
    """A model's graphs and profiles by bucket, and its request rate."""

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


class DeploymentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model's part of a deployment."""

    name: str
    partition_offset: int
    partition_bytes: int
    plans: dict[Bucket, Plan]
    """All have the same residents."""
    parameter_bytes: int
    resident_bytes: int


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workspaces and every model's partition in the arena."""

    layout: LayoutName
    memory_bytes: int
    workspace_bytes: int
    """Size of each lane's workspace; the arena begins with these."""
    entries: tuple[DeploymentEntry, ...]
    lanes: int = 1

    @property
    def taken_bytes(self) -> int:
        """Bytes of all workspaces and partitions."""
        lowest = min((entry.partition_offset for entry in self.entries), default=self.memory_bytes)
        return self.lanes * self.workspace_bytes + self.memory_bytes - lowest


def laid_out(
    layout: LayoutName,
    models: Sequence[ModelDemand],
    division: Division,
    plans: Sequence[Mapping[Bucket, Plan]],
    lanes: int = 1,
) -> Deployment:
    """Place partitions from the top of memory down. In a layout with one region, every model gets that region."""
    memory, workspace = division.memory_bytes, division.workspace_bytes
    top = memory
    entries = []
    for model, partition, planned in zip(models, division.partition_bytes, plans, strict=True):
        offset = workspace if layout in ONE_REGION else top - partition
        nbytes = memory - workspace if layout in ONE_REGION else partition
        smallest = min(planned)
        graph, residents = model.graphs[smallest], planned[smallest].residents
        resident_bytes = sum(graph.tensors[p.tensor].nbytes for p in residents)
        entries.append(
            DeploymentEntry(model.name, offset, nbytes, dict(planned), graph.parameter_bytes, resident_bytes)
        )
        top -= partition
    return Deployment(layout, memory, workspace, tuple(entries), lanes)
