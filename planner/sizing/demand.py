"""Memory demands of models, and sizes of workspaces to try."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cohabit.planner.layout.feasible import Footprint, page_aligned
from cohabit.planner.offloading.pool import ActivationPools
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.problem import ModelDemand

WINDOWS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Window sizes to try, in units of the largest op's parameters."""


@dataclass(frozen=True)
class MemoryDemand:
    """A model, and the memory that its graphs need in every plan."""

    model: ModelDemand
    footprints: Mapping[Bucket, Footprint]

    @staticmethod
    def of(model: ModelDemand) -> "MemoryDemand":
        return MemoryDemand(model, {bucket: Footprint.of(g) for bucket, g in model.graphs.items()})

    def with_offloading(self) -> "MemoryDemand":
        """Return the demand with offloaded activations: less memory, more time."""
        smallest = {
            bucket: _in_smallest_pool(footprint, self.model.profiles[bucket])
            for bucket, footprint in self.footprints.items()
        }
        return MemoryDemand(self.model, smallest)

    @property
    def smallest(self) -> Bucket:
        return min(self.model.graphs)

    @property
    def parameter_bytes(self) -> int:
        """Size of a partition that holds every parameter."""
        graph = self.model.graphs[self.smallest]
        return sum(page_aligned(graph.tensors[i].nbytes) for i in graph.parameters)

    @property
    def activation_bytes(self) -> int:
        return max(f.activation_bytes for f in self.footprints.values())

    @property
    def least_bytes(self) -> int:
        return max(f.least_bytes for f in self.footprints.values())

    @property
    def largest_demand(self) -> Footprint:
        return max(self.footprints.values(), key=lambda f: f.least_bytes)

    def least_partition_bytes(self, workspace: int) -> int | None:
        """Return the least partition with which all buckets are feasible; None if the workspace is too small."""
        least = [f.least_partition_bytes(workspace) for f in self.footprints.values()]
        return max((b for b in least if b is not None), default=0) if None not in least else None


def _in_smallest_pool(footprint: Footprint, profile: Profile) -> Footprint:
    pool_bytes = page_aligned(ActivationPools(footprint.graph, profile).least_bytes())
    return Footprint.of_pool(footprint.graph, pool_bytes) if pool_bytes < footprint.activation_bytes else footprint


def workspaces(demands: Sequence[MemoryDemand], memory: int) -> list[int]:
    """Return workspace sizes to try: from the activations alone to the least that needs no partition, and larger.

    Ops that share parameters may need them only once if they run together, which takes more activations.
    """
    own = [f for d in demands for f in d.footprints.values()]
    cached = max((p.window_bytes for d in demands for p in d.model.profiles.values()), default=0)
    sizes: set[int] = set()
    for footprints in (own, [f if f.by_parameters is None else f.by_parameters[0] for f in own]):
        activations = max(f.activation_bytes for f in footprints)
        largest = max(f.least_bytes for f in footprints)
        sizes.update(activations + page_aligned(int((largest - activations) * f)) for f in WINDOWS)
        sizes.update((largest, activations + cached))
    return sorted(s for s in sizes if s <= memory)
