"""Fits one model into free memory: its latency by partition size, the split of a budget, and the plans."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.genetic import searcher as genetic
from cohabit.planner.graph import Graph
from cohabit.planner.layout.feasible import PAGE_BYTES, Footprint
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.offloading import searcher as offloading
from cohabit.planner.plan import Placement, Plan
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.demand import MemoryDemand, workspaces
from cohabit.planner.sizing.problem import ModelDemand
from cohabit.planner.sizing.shares import Curve, Point

SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0)
"""Fractions of the range of partition sizes at which a curve has points."""

Estimate = Callable[[Footprint, Profile, Memory], float]
"""Function that returns the latency of a graph in a given memory."""
Ladders = Mapping[int, Curve]
"""Curves of searched plans by workspace size."""
Estimates = dict[tuple[str, bool, str, int, int], float]
"""Latencies by graph, whether activations are offloaded, profile, partition and workspace."""


def estimate_latency_s(footprint: Footprint, profile: Profile, memory: Memory) -> float:
    """Return the latency of a quick plan in the better of two op orders; a search finds a plan at least as good.

    Raises InfeasibleBudget.
    """
    if footprint.offloads:
        return offloading.first_latency_s(Problem(footprint.graph, profile, memory))
    latency_s = genetic.first_latency_s(footprint, profile, memory)
    if footprint.by_parameters is not None:
        other, order = footprint.by_parameters
        profile = replace(profile, op_seconds=tuple(profile.op_seconds[k] for k in order))
        with suppress(InfeasibleBudget):
            latency_s = min(latency_s, genetic.first_latency_s(other, profile, memory))
    return latency_s


def rough_latency_s(footprint: Footprint, profile: Profile, memory: Memory) -> float:
    """Estimate the latency by a rule of thumb, without a plan: non-resident parameters are copied while ops compute.

    The less memory there is for the parameters of two ops at a time, the smaller the overlap.
    """
    tensors = footprint.graph.tensors
    parameters = [tensors[i] for i in footprint.graph.parameters]
    parameter_bytes = sum(t.nbytes for t in parameters)
    streamed = max(0, parameter_bytes - memory.partition_bytes)
    all_s = sum(profile.swap_in_seconds(t) for t in parameters)
    compute_s, copy_s = profile.compute_s, all_s * streamed / parameter_bytes if streamed else 0.0
    largest = max(footprint.op_pages, default=0) * PAGE_BYTES
    room = memory.nbytes - footprint.activation_bytes
    overlap = min(max(room / largest - 1, 0.0), 1.0) if largest else 1.0
    slower_s = (profile.compute_slowdown - 1) * min(copy_s, compute_s)
    together_s = max(compute_s + slower_s, copy_s * profile.swap_slowdown)
    return overlap * together_s + (1 - overlap) * (compute_s + copy_s)


def partition_sizes(least: int, most: int) -> list[int]:
    """Return the partition sizes to try: the least, plus whole pages."""
    return [least + int(max(most - least, 0) * share) // PAGE_BYTES * PAGE_BYTES for share in SHARES]


def latency_curve(
    footprint: Footprint,
    profile: Profile,
    least: int,
    most: int,
    workspace_bytes: int,
    known: Estimates,
    estimate: Estimate = estimate_latency_s,
) -> Curve:
    """Return points from `least` to `most` bytes of partition, until more memory no longer helps.

    `known` caches estimates, which models with the same graph and profile share.
    """
    points: list[Point] = []
    for size in partition_sizes(least, most):
        key = (footprint.graph.fingerprint, footprint.offloads, profile.fingerprint, size, workspace_bytes)
        if key not in known:
            known[key] = estimate(footprint, profile, Memory(workspace_bytes, size))
        latency_s = min(known[key], points[-1].latency_s) if points else known[key]
        points.append(Point(size, latency_s))
        if latency_s <= profile.compute_s * (1 + 1e-6):
            break
    return tuple(points)


def split_budget(graphs: Mapping[Bucket, Graph], profiles: Mapping[Bucket, Profile], budget_bytes: int) -> Memory:
    """Split one model's memory into partition and workspace for the least latency in the smallest bucket.

    All buckets are feasible with the result. Raises InfeasibleBudget.
    """
    budget = budget_bytes // PAGE_BYTES * PAGE_BYTES
    demand = MemoryDemand.of(ModelDemand(next(iter(graphs.values())).name, graphs, profiles))
    if budget < demand.least_bytes:
        demand = demand.with_offloading()
    footprints, largest = demand.footprints, demand.largest_demand
    if budget < largest.least_bytes:
        raise InfeasibleBudget(
            largest.graph.name,
            largest.largest_op,
            budget_bytes,
            largest.least_bytes,
            bucket=largest.graph.bucket,
        )
    smallest = min(graphs)
    best: tuple[float, int] | None = None
    for workspace in workspaces([demand], budget):
        partition = budget - workspace
        if any(f.least_workspace_bytes(partition) > workspace for f in footprints.values()):
            continue
        latency_s = estimate_latency_s(footprints[smallest], profiles[smallest], Memory(workspace, partition))
        if best is None or latency_s < best[0]:
            best = (latency_s, workspace)
    assert best is not None  # the whole budget as workspace is always feasible
    return Memory(best[1], budget - best[1])


def fit(model: ModelDemand, choices: Sequence[Memory], ladders: Ladders | None = None) -> Memory | None:
    """Choose the free memory with the least latency for one more model, trimming the partition; None if none fits.

    Latencies are read from the model's ladders where there are any, and estimated elsewhere.
    """
    demand = MemoryDemand.of(model)
    chosen = _fit(demand, choices, ladders or {})
    return chosen if chosen is not None else _fit(demand.with_offloading(), choices, {})


def _fit(demand: MemoryDemand, choices: Sequence[Memory], ladders: Ladders) -> Memory | None:
    model = demand.model
    smallest = demand.smallest
    best: tuple[float, Memory] | None = None
    for free in choices:
        least = demand.least_partition_bytes(free.workspace_bytes)
        if least is None or least > free.partition_bytes:
            continue
        partition = max(least, min(free.partition_bytes // PAGE_BYTES * PAGE_BYTES, demand.parameter_bytes))
        footprint, profile = demand.footprints[smallest], model.profiles[smallest]
        fitting = Memory(free.workspace_bytes, partition)
        below = [p.latency_s for p in ladders.get(free.workspace_bytes, ()) if p.partition_bytes <= partition]
        latency_s = below[-1] if below else estimate_latency_s(footprint, profile, fitting)
        if best is None or latency_s < best[0] * (1 - 1e-6):
            best = (latency_s, fitting)
    return None if best is None else best[1]


def workspaces_for(model: ModelDemand, memory_bytes: int) -> list[int]:
    """Return workspace sizes to try for a model."""
    demand = MemoryDemand.of(model)
    return sorted({*workspaces([demand], memory_bytes), *workspaces([demand.with_offloading()], memory_bytes)})


def plan_model(
    model: ModelDemand,
    memory: Memory,
    library: Library | None = None,
    searcher: str = "best",
    *,
    quick: bool = False,
    neighbours: Sequence[Mapping[Bucket, Plan]] = (),
    pause: Callable[[], None] = lambda: None,
) -> dict[Bucket, Plan]:
    """Plan every bucket; the smallest chooses the residents of all. Raises InfeasibleBudget.

    Plans are read from the library, or stored there. With `quick`, each is the first feasible plan and is not stored.
    Searches start from `neighbours`, plans for other sizes, too. They call `pause` between candidates.
    """
    plans: dict[Bucket, Plan] = {}
    residents: tuple[Placement, ...] | None = None
    for bucket in sorted(model.graphs):
        graph, profile = model.graphs[bucket], model.profiles[bucket]
        near = tuple(plans_of[bucket] for plans_of in neighbours if bucket in plans_of)
        problem = Problem(graph, profile, memory, residents, neighbours=near)
        if quick:
            plans[bucket] = search(problem, searcher, limit=Limit(evaluations=1))
        else:
            plans[bucket] = known_or_searched(problem, library, searcher, pause)
        residents = plans[bucket].residents
    return plans


def known_or_searched(
    problem: Problem,
    library: Library | None,
    searcher: str = "best",
    pause: Callable[[], None] = lambda: None,
) -> Plan:
    """Return the library's plan by this searcher, or search for one and store it. Raises InfeasibleBudget."""
    known = None if library is None else library.plan(problem, searcher)
    if known is not None:
        return known
    plan = search(problem, searcher, pause=pause)
    if library is not None:
        library.store(problem, searcher, plan)
    return plan
