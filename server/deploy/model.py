"""A model in the engine: one record, filled by the stages of its deployment; and families of models.

The models of a family differ in few weights, and share a partition. They have equal graphs, so a family is planned as
one model with all members' request rates, and each has the same plans. Its residents are copied once; before a member
runs, the executor replaces those that differ.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
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
LEAST_COMMON = 0.9
"""Share of the weights that two members have in common: the rest is copied again when the other one runs."""


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
    """Unique per load."""
    partition_id: str = field(init=False)
    """Key of its partition in `Partitions`. The models of a family have one in common."""
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
    def planned_as(self) -> tuple[object, ...]:
        """What its plans and batch sizes depend on: models in which this is equal can be planned as one."""
        graphs = sorted((bucket, graph.fingerprint) for bucket, graph in self.lowered.graphs.items())
        return *graphs, self.splits_batches

    @property
    def sources(self) -> tuple[Hashable, ...]:
        """Where its segments, then its tables are stored. What two models have in common is stored once."""
        manifest = self.lowered.manifest
        return tuple(map(self.store.source, range(len(manifest.segments) + len(manifest.tables))))

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
        return ModelDemand(
            self.lowered.name, self.lowered.graphs, self.profiles, self.rate_per_s, self.splits_batches
        )

    @property
    def splits_batches(self) -> bool:
        """Whether an unplanned batch may run as several smaller ones."""
        return self.lowered.batched and self.lowered.interaction is None and not self.plans_all_batches

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


def families_of(models: Sequence[Model], lanes: int) -> list[list[Model]]:
    """Group models that are loaded together, in order. With several lanes, a family has a part for each."""
    families: list[list[Model]] = []
    having: dict[Hashable, list[int]] = defaultdict(list)
    """By plans and source of a segment: the families whose first member has these."""
    for model in models:
        plans, segments = model.planned_as, model.lowered.manifest.segments
        sources = [(plans, source) for source in model.sources]
        common_bytes: Counter[int] = Counter()
        for segment, source in zip(segments, sources, strict=False):
            for n in having[source]:
                common_bytes[n] += segment.nbytes
        nearest = common_bytes.most_common(1)
        if nearest and are_siblings(families[nearest[0][0]][0], model):
            families[nearest[0][0]].append(model)
            continue
        for source in set(sources):
            having[source].append(len(families))
        families.append([model])
    return [family[lane::lanes] for family in families for lane in range(min(lanes, len(family)))]


def are_siblings(one: Model, other: Model) -> bool:
    """Whether two models can share a partition. Quick if they cannot, since a load compares all loaded models."""
    if one.planned_as != other.planned_as:
        return False
    segments = one.lowered.manifest.segments
    spare_bytes = (1 - LEAST_COMMON) * sum(segment.nbytes for segment in segments)
    for n, segment in enumerate(segments):
        spare_bytes -= segment.nbytes if one.store.source(n) != other.store.source(n) else 0
        if spare_bytes < 0:
            return False
    return True


def demand_of(family: Sequence[Model], *, whole: bool = False) -> ModelDemand:
    """Return a family's demand: with `whole`, one from which a division chooses batch sizes."""
    demand = family[0].whole_demand if whole else family[0].demand
    return replace(demand, rate_per_s=sum(model.rate_per_s for model in family))


def weight_bytes(models: Sequence[Model]) -> int:
    """Return the size of all parameters. What several models have in common counts once."""
    total, seen = 0, set[Hashable]()
    for model in models:
        manifest = model.lowered.manifest
        sizes = [*(segment.nbytes for segment in manifest.segments), *(table.nbytes for table in manifest.tables)]
        sources = model.sources
        new_bytes = sum(nbytes for nbytes, source in zip(sizes, sources, strict=True) if source not in seen)
        total += model.weight_bytes * new_bytes // max(sum(sizes), 1)
        seen.update(sources)
    return total


def partitions_of(models: Iterable[Model]) -> dict[str, list[Model]]:
    """Return the models in each partition, by partition id."""
    found: dict[str, list[Model]] = defaultdict(list)
    for model in models:
        found[model.partition_id].append(model)
    return dict(found)
