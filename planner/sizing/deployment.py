"""How much memory each model gets, and its plans: what the planner decides and the engine carries out.

A deployment's arena begins with the workspaces, one per compute lane and all of one size. The partitions end where the
arena ends, the first model's last, so that workspaces and partitions can grow into the bytes between them.
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
"""Layouts with one region, in which a model is there as a whole while it runs."""
ONE_REGION: tuple[LayoutName, ...] = (*WHOLE_MODELS, "pipelined", "on_demand")
"""In the last two, each op's parameters must be there, and the model may be larger."""


@dataclass(frozen=True)
class ModelDemand:
    """A model's graphs and profiles by bucket, and its request rate."""

    name: str
    graphs: Mapping[Bucket, Graph]
    profiles: Mapping[Bucket, Profile]
    rate_per_s: float = 1.0
    splits_batches: bool = False
    """Whether a batch that is not planned may run as several smaller ones."""

    @property
    def batches(self) -> list[int]:
        return sorted({bucket.batch for bucket in self.graphs})

    def up_to(self, most_batch: int) -> "ModelDemand":
        """Return the demand without the buckets of larger batches."""
        graphs = {bucket: graph for bucket, graph in self.graphs.items() if bucket.batch <= most_batch}
        return replace(self, graphs=graphs, profiles={bucket: self.profiles[bucket] for bucket in graphs})


class Division(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How memory is divided: the size of each lane's workspace, and of the partition that each model is planned for."""

    memory_bytes: int
    """In whole pages."""
    workspace_bytes: int
    partition_bytes: tuple[int, ...]
    most_batches: tuple[int, ...] = ()
    """The largest batch that each model is planned for, and larger ones run as several of; empty if all are planned."""


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
    """Of each lane; the arena begins with them."""
    entries: tuple[DeploymentEntry, ...]
    lanes: int = 1

    @property
    def taken_bytes(self) -> int:
        """Bytes of workspaces and partitions."""
        lowest = min((entry.partition_offset for entry in self.entries), default=self.memory_bytes)
        return self.lanes * self.workspace_bytes + self.memory_bytes - lowest


def laid_out(
    layout: LayoutName,
    models: Sequence[ModelDemand],
    division: Division,
    plans: Sequence[Mapping[Bucket, Plan]],
    lanes: int = 1,
) -> Deployment:
    """Place partitions from the top of memory down. Models of a layout with one region all get that region."""
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
