"""On-disk library of plans and divisions of memory: one JSON file each, named by the fingerprint of its problem.

Unusable files (truncated, damaged, of another version) are logged and replaced. On a full disk, plans are made but
not stored.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
from msgspec import structs

import cohabit.planner.plan
from cohabit.planner import cache_file
from cohabit.planner.check import check
from cohabit.planner.errors import FormatError, InvalidPlan
from cohabit.planner.graph import fingerprint
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Placement, Plan
from cohabit.planner.problem import Problem
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.problem import Division, LayoutName, ModelDemand
from cohabit.planner.sizing.shares import Curve

T = TypeVar("T")
_DIVISION_VERSION = 6
"""Incremented when memory is divided by other rules."""
_LADDERS_VERSION = 2
"""Incremented when ladders have other rungs."""


class _DivisionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A division of memory, and the fingerprint of the memory and the models' graphs."""

    problem: str
    profiles: str | None
    """Fingerprint of the profiles that it was chosen for; None if it was made by a rule of thumb."""
    division: Division


class _LaddersRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ladders of a model by workspace size, and the fingerprint of the model and the searcher."""

    problem: str
    graph: str
    """Fingerprint of the smallest bucket's graph: by it, the cache's inventory finds the archive."""
    ladders: dict[int, Curve]


_ladders_decoder = msgspec.json.Decoder(_LaddersRecord)
_division_decoder = msgspec.json.Decoder(_DivisionRecord)

logger = logging.getLogger(__name__)


class Library:
    """A folder of plans. Several processes may use it concurrently."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def plan(self, problem: Problem, searcher: str) -> Plan | None:
        """Return a searcher's stored plan for a problem; None if there is no usable one."""
        return self._read(self.plan_path(problem, searcher), lambda raw: _usable_plan(raw, problem))

    def store(self, problem: Problem, searcher: str, plan: Plan) -> None:
        self._store(self.plan_path(problem, searcher), cohabit.planner.plan.encode(plan))

    def plans(self, model: ModelDemand, memory: Memory, searcher: str) -> dict[Bucket, Plan] | None:
        """Return a searcher's stored plans for all buckets of a model; None if any is missing."""
        plans: dict[Bucket, Plan] = {}
        residents: tuple[Placement, ...] | None = None
        for bucket in sorted(model.graphs):
            graph, profile = model.graphs[bucket], model.profiles[bucket]
            problem = Problem(graph, profile, memory, residents)
            plan = self.plan(problem, searcher)
            if plan is None:
                return None
            plans[bucket], residents = plan, plan.residents
        return plans

    def store_plans(self, model: ModelDemand, memory: Memory, searcher: str, plans: Mapping[Bucket, Plan]) -> None:
        residents: tuple[Placement, ...] | None = None
        for bucket in sorted(plans):
            graph, profile = model.graphs[bucket], model.profiles[bucket]
            problem = Problem(graph, profile, memory, residents)
            self.store(problem, searcher, plans[bucket])
            residents = plans[bucket].residents

    def ladders(self, model: ModelDemand, searcher: str) -> dict[int, Curve]:
        """Return the model's complete ladders by workspace size: latency of the smallest bucket by partition size."""
        key = _ladders_key(model, searcher)
        return self._read(self._ladders_path(key), lambda raw: _usable_ladders(raw, key)) or {}

    def store_ladder(self, model: ModelDemand, searcher: str, workspace_bytes: int, ladder: Curve) -> None:
        """Add a ladder. Its plans must be stored."""
        key, ladders = _ladders_key(model, searcher), self.ladders(model, searcher)
        graph = model.graphs[min(model.graphs)].fingerprint
        record = _LaddersRecord(key, graph, ladders | {workspace_bytes: ladder})
        self._store(self._ladders_path(key), msgspec.json.encode(record))

    def plans_of_rung(self, model: ModelDemand, memory: Memory, searcher: str) -> dict[Bucket, Plan] | None:
        """Return plans for the largest rung within this memory, as plans for this memory; None without a ladder.

        A plan for less memory is a plan for more. Its bound is then the resident latency.
        """
        ladder = self.ladders(model, searcher).get(memory.workspace_bytes, ())
        for point in reversed(ladder):
            if point.partition_bytes <= memory.partition_bytes:
                found = self.plans(model, structs.replace(memory, partition_bytes=point.partition_bytes), searcher)
                return None if found is None else {b: _enlarged(plan, memory) for b, plan in found.items()}
        return None

    def division(
        self,
        models: Sequence[ModelDemand],
        memory_bytes: int,
        layout: LayoutName,
        lanes: int,
        *,
        any_profiles: bool = False,
    ) -> Division | None:
        """Return the stored division of this memory among these models; None if there is no usable one.

        With `any_profiles`, also one made for other profiles or by a rule of thumb: the one that was last in use.
        """
        key = _division_key(models, memory_bytes, layout, lanes)
        record = self._read(self._division_path(key), lambda raw: _usable_division(raw, key))
        if record is None or not (any_profiles or record.profiles == _profiles_key(models)):
            return None
        return record.division

    def store_division(
        self,
        models: Sequence[ModelDemand],
        memory_bytes: int,
        layout: LayoutName,
        lanes: int,
        division: Division,
        *,
        rough: bool = False,
    ) -> None:
        """Store the division for the next start of these models. `rough`: it was made by a rule of thumb."""
        key = _division_key(models, memory_bytes, layout, lanes)
        record = _DivisionRecord(key, None if rough else _profiles_key(models), division)
        self._store(self._division_path(key), msgspec.json.encode(record))

    def plan_path(self, problem: Problem, searcher: str) -> Path:
        key = (cohabit.planner.plan.FORMAT_VERSION, searcher, *problem.key)
        return self.root / "plans" / f"{fingerprint(key)}.json"

    def _division_path(self, key: str) -> Path:
        return self.root / "plans" / f"{key}.division.json"

    def _ladders_path(self, key: str) -> Path:
        return self.root / "plans" / f"{key}.ladders.json"

    def _read(self, path: Path, decode: Callable[[bytes], T]) -> T | None:
        try:
            return decode(cache_file.read(path))
        except FileNotFoundError:
            return None
        except (FormatError, InvalidPlan, msgspec.DecodeError) as error:
            fields = {"path": str(path), "reason": str(error)}
            logger.warning("library file not usable, making it again", extra={"fields": fields})
            return None

    def _store(self, path: Path, content: bytes) -> None:
        try:
            cache_file.write(path, content)
        except OSError as error:
            fields = {"path": str(path), "reason": str(error)}
            logger.warning("library file not stored", extra={"fields": fields})


def _division_key(models: Sequence[ModelDemand], memory_bytes: int, layout: LayoutName, lanes: int) -> str:
    graphs = [[graph.fingerprint for _, graph in sorted(model.graphs.items())] for model in models]
    rates = [(model.rate_per_s, model.splits_batches) for model in models]
    return fingerprint((_DIVISION_VERSION, graphs, rates, memory_bytes, layout, lanes))


def _profiles_key(models: Sequence[ModelDemand]) -> str:
    profiles = [[profile.fingerprint for _, profile in sorted(model.profiles.items())] for model in models]
    return fingerprint(profiles)


def _ladders_key(model: ModelDemand, searcher: str) -> str:
    bucket = min(model.graphs)
    graph, profile = model.graphs[bucket], model.profiles[bucket]
    versions = (_LADDERS_VERSION, cohabit.planner.plan.FORMAT_VERSION)
    return fingerprint((*versions, searcher, graph.fingerprint, profile.fingerprint))


def _usable_ladders(raw: bytes, key: str) -> dict[int, Curve]:
    record = _ladders_decoder.decode(raw)
    if record.problem != key:
        raise FormatError(f"ladders are of {record.problem[:12]}, not of {key[:12]}")
    return record.ladders


def _enlarged(plan: Plan, memory: Memory) -> Plan:
    assert plan.provenance is not None
    provenance = structs.replace(plan.provenance, bound_s=plan.provenance.resident_s)
    return structs.replace(plan, memory=memory, provenance=provenance)


def _usable_division(raw: bytes, key: str) -> _DivisionRecord:
    record = _division_decoder.decode(raw)
    if record.problem != key:
        raise FormatError(f"division is of {record.problem[:12]}, not of {key[:12]}")
    return record


_checked: WeakValueDictionary[tuple[bytes, str, str], Plan] = WeakValueDictionary()
"""Plans in use, by a digest of their files and the graph and profile that they were checked with."""


def _usable_plan(raw: bytes, problem: Problem) -> Plan:
    key = hashlib.blake2b(raw).digest(), problem.graph.fingerprint, problem.profile.fingerprint
    if (plan := _checked.get(key)) is None:
        plan = cohabit.planner.plan.decode(raw)
        check(problem.graph, problem.profile, plan)
        _checked[key] = plan
    if plan.memory != problem.memory:
        raise FormatError(f"plan is for {plan.memory}, not {problem.memory}")
    if problem.residents is not None and plan.residents != problem.residents:
        raise FormatError("plan has other residents than the model's other buckets")
    return plan
