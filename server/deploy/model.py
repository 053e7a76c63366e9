"""A model in the engine: one record, filled by the stages of its deployment."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.problem import ModelDemand
from cohabit.runtime.binding.program import Program
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.memory import HostStore
from cohabit.server.engine.servable import ProgramServable
from cohabit.server.ipc.model import ModelFootprint, ModelKey
from cohabit.server.repository.sources import ModelSource
from cohabit.server.scheduling.sequences import SequenceRules

Plans = Mapping[Bucket, Plan]
Programs = Mapping[Bucket, Program]


@dataclass(frozen=True, slots=True)
class PlansFound:
    """A model's plans, and whether a full search found them for measured profiles."""

    plans: Plans
    searched: bool

    @property
    def memory(self) -> Memory:
        """The memory that all of them are for."""
        return self.plans[min(self.plans)].memory


@dataclass(slots=True, eq=False)
class Model:
    """One load of a version of a model. While a served version is loaded again, it has two.

    A field that is not filled yet raises AttributeError. From `found` on, fields belong to the event loop's thread.
    """

    source: ModelSource
    rate_per_s: float = 1.0
    """Expected requests per second."""

    # Prepare.
    lowered: Lowered = field(init=False)
    profiles: dict[Bucket, Profile] = field(init=False)
    store: HostStore[Any] = field(init=False)
    """Host store of its parameters."""
    largest_batch: int = field(init=False)
    """Largest batch that clients may send; batches larger than the planned ones are split."""
    plans_all_batches: bool = False
    """Whether a division may leave out no batch size, because --batch-sizes names them."""
    sequences: SequenceRules | None = None
    """How requests form sequences; None if they do not."""

    # Divide.
    most_batch: int | None = None
    """Largest planned batch; larger ones are split into several. None if all are planned."""
    found: PlansFound = field(init=False)

    # Place.
    load_id: str = field(init=False)
    """Load id: the key in `Partitions`, unique per load."""
    lane: int = 0
    """The compute lane whose executor and workspace it uses."""
    shares: bool = False
    """Whether all models share one region instead of having partitions."""

    # Load.
    servable: ProgramServable = field(init=False)

    @property
    def key(self) -> ModelKey:
        return self.source.key

    @property
    def plans(self) -> Plans:
        return self.found.plans

    @property
    def searched(self) -> bool:
        return self.found.searched

    @property
    def weight_bytes(self) -> int:
        """The size of all parameters, including tables in host memory."""
        return self.lowered.weight_bytes

    @property
    def parameter_bytes(self) -> int:
        return self.lowered.graphs[min(self.lowered.graphs)].parameter_bytes

    @property
    def whole_demand(self) -> ModelDemand:
        """Demand from which a division chooses batch sizes. Rows that influence one another cannot be split."""
        splits = self.lowered.batched and self.lowered.interaction is None and not self.plans_all_batches
        return ModelDemand(self.lowered.name, self.lowered.graphs, self.profiles, self.rate_per_s, splits)

    @property
    def demand(self) -> ModelDemand:
        """Demand with the planned batch sizes."""
        whole = replace(self.whole_demand, splits_batches=False)
        return whole if self.most_batch is None else whole.up_to(self.most_batch)

    @property
    def is_provisional(self) -> bool:
        """Whether the model must still be measured."""
        return any(profile.provisional for profile in self.profiles.values())

    @property
    def noise(self) -> float:
        """Disturbance of its profiles by other work."""
        return max(profile.noise for profile in self.profiles.values())

    def plan_batches_to(self, most: int) -> None:
        """Split batches that are larger than `most`."""
        self.most_batch = most if most < max(self.lowered.graphs).batch else None

    def latency_s(self, plans: Plans) -> float:
        """Return the predicted latency of the smallest bucket."""
        provenance = plans[min(plans)].provenance
        return self.profiles[min(plans)].compute_s if provenance is None else provenance.latency_s

    @property
    def expected_load(self) -> float:
        """Expected share of a lane's time: requests per second times seconds per request."""
        return self.rate_per_s * self.latency_s(self.plans)

    @property
    def footprint(self) -> ModelFootprint:
        plan = self.plans[min(self.plans)]
        tensors = self.lowered.graphs[min(self.plans)].tensors
        return ModelFootprint(
            partition_bytes=0 if self.shares else plan.memory.partition_bytes,
            parameter_bytes=self.parameter_bytes,
            resident_bytes=0 if self.shares else sum(tensors[p.tensor].nbytes for p in plan.residents),
            predicted_s={
                b: p.provenance.latency_s + self.profiles[b].host_s
                for b, p in self.plans.items()
                if p.provenance is not None
            },
            bound_s={b: p.provenance.bound_s for b, p in self.plans.items() if p.provenance is not None},
            searches={
                b: (p.provenance.searcher, p.provenance.evaluations)
                for b, p in self.plans.items()
                if p.provenance is not None
            },
            noise=None if self.is_provisional else self.noise,
            lane=self.lane,
            activation_bytes={bucket: plan.pool_bytes or 0 for bucket, plan in self.plans.items()},
        )
