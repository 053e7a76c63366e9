"""Plans in which activations leave memory: budgets below their peak, and refusals that name what is enough."""

import random
import re
from collections.abc import Iterator
from itertools import islice

import pytest
from msgspec.structs import replace

from cohabit.planner.check import check
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.graph import Graph
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.offloading.pool import RANKS, ActivationPools, Rank
from cohabit.planner.offloading.searcher import Offloading, OffloadingCandidate
from cohabit.planner.plan import Plan, SwapIn, SwapOut
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.table import SWAP_OUT
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.demand import MemoryDemand
from cohabit.planner.sizing.division import divide
from cohabit.planner.sizing.fitting import fit, plan_model, split_budget
from cohabit.planner.sizing.problem import ModelDemand
from tests.support.planner.graphs import PAGE, chain, profile_of, random_graph, random_profile, unet
from tests.support.planner.reference import peak_bytes, sequence_peak_bytes

NON_PARAMETERS = ("input", "activation")


def demand(graph: Graph, profile: Profile | None = None, name: str = "model") -> ModelDemand:
    return ModelDemand(
        name, {Bucket(1): graph}, {Bucket(1): profile or profile_of(graph, 1.0, bandwidth=40 * PAGE)}
    )


def least_bytes(model: ModelDemand) -> int:
    """Least memory in which a model can run in all its buckets."""
    return MemoryDemand.of(model).with_offloading().least_bytes


def plain_least(graph: Graph) -> int:
    """Least memory with activations that stay."""
    return Footprint.of(graph).least_bytes


def swapped_out(plan: Plan) -> set[int]:
    return {step.tensor for step in plan.steps if isinstance(step, SwapOut)}


def planned(graph: Graph, budget_bytes: int) -> Plan:
    model = demand(graph)
    memory = split_budget(model.graphs, model.profiles, budget_bytes)
    assert memory.nbytes <= budget_bytes
    (plan,) = plan_model(model, memory, None, quick=True).values()
    return plan


@pytest.mark.parametrize("seed", range(60))
def test_the_least_memory_is_planned_and_a_page_less_is_refused_naming_both_ops(seed: int) -> None:
    """At least what some op needs by itself; at most the largest parameters of an op above the peak of activations."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    model = demand(graph, random_profile(rng, graph))
    least = least_bytes(model)
    pages = {i: -(-t.nbytes // PAGE) * PAGE for i, t in enumerate(graph.tensors)}
    parameters = {
        op.name: sum(pages[i] for i in op.reads if graph.tensors[i].kind == "parameter") for op in graph.ops
    }
    activations = {
        op.name: op.scratch_bytes
        + sum(graph.tensors[i].nbytes for i in op.touched if graph.tensors[i].kind in NON_PARAMETERS)
        for op in graph.ops
    }
    assert least >= max(parameters[name] + activations[name] for name in parameters)
    assert least <= max(parameters.values()) + Footprint.of(graph).activation_bytes
    check(graph, None, planned(graph, least))
    with pytest.raises(InfeasibleBudget) as refusal:
        split_budget(model.graphs, model.profiles, least - 1)
    assert refusal.value.least_bytes == least
    said = re.match(r"(\w+)( \(.*\), above the activations of (\w+) \(|$)", str(refusal.value.op))
    assert said is not None, refusal.value.op
    assert parameters[said[1]] == max(parameters.values())
    if least < plain_least(graph):
        assert -(-activations[said[3] or said[1]] // PAGE) == -(-max(activations.values()) // PAGE)


def test_a_budget_below_the_activations_peak_is_planned() -> None:
    graph = unet()
    activations = Footprint.of(graph).activation_bytes
    plan = planned(graph, activations - PAGE)
    check(graph, None, plan)
    assert swapped_out(plan)
    assert peak_bytes(graph, plan, NON_PARAMETERS) < activations


def test_every_budget_between_the_least_and_all_that_it_takes_has_a_plan_that_may_run() -> None:
    graph = unet(3)
    profile = profile_of(graph, 1.0, bandwidth=40 * PAGE)
    latencies = []
    for budget in range(least_bytes(demand(graph)), plain_least(graph) + 2 * PAGE, 3 * PAGE):
        plan = planned(graph, budget)
        check(graph, profile, plan)
        assert plan.provenance is not None
        assert plan.provenance.latency_s >= plan.provenance.bound_s
        latencies.append(plan.provenance.latency_s)
    assert min(latencies[-2:]) <= min(latencies)


def test_where_activations_fit_they_stay() -> None:
    graph = unet()
    plan = planned(graph, plain_least(graph) + graph.parameter_bytes)
    assert not swapped_out(plan)


def test_a_narrow_window_is_widened_where_that_is_faster() -> None:
    """Activations fit, but beside them an op's parameters cannot come while another's are in use."""
    graph = unet()
    profile = profile_of(graph, 1.0, bandwidth=20 * PAGE)
    footprint = Footprint.of(graph)
    workspace = footprint.least_workspace_bytes(0)
    problem = Problem(graph, profile, Memory(workspace))
    streaming, best = search(problem, "genetic").provenance, search(problem).provenance
    assert streaming is not None
    assert best is not None
    assert best.latency_s < streaming.latency_s


def with_changes_in_place(rng: random.Random, graph: Graph) -> Graph:
    """The same graph, some of whose ops change an activation that they read."""
    ops = []
    for op in graph.ops:
        own = [i for i in op.reads if graph.tensors[i].kind == "activation"]
        ops.append(replace(op, mutates=tuple(own[:1])) if own and rng.random() < 0.3 else op)
    return replace(graph, ops=tuple(ops))


def candidates(searcher: Offloading, most: int) -> Iterator[OffloadingCandidate]:
    while asked := searcher.ask():
        for candidate in islice(asked, most):
            cost = searcher.evaluate(candidate, 0.0)
            searcher.tell([candidate], [cost])
            if cost.latency_s < float("inf"):
                yield candidate


@pytest.mark.parametrize("seed", range(12))
def test_every_plan_of_a_random_graph_may_run(seed: int) -> None:
    rng = random.Random(seed)
    graph = with_changes_in_place(rng, random_graph(rng, 30))
    profile = random_profile(rng, graph)
    leanest = -(-ActivationPools(graph, profile).least_bytes() // PAGE) * PAGE
    partition = PAGE * rng.choice((0, 3, 9))
    window = Footprint.of_pool(graph, leanest).least_workspace_bytes(partition)
    problem = Problem(graph, profile, Memory(window + PAGE * rng.choice((0, 2)), partition))
    searcher = Offloading(problem, seed)
    found = list(candidates(searcher, 8))
    assert found
    for candidate in found:
        plan = searcher.write(candidate)
        check(graph, profile, plan)
        assert all(graph.tensors[t].kind == "activation" for t in swapped_out(plan))
        cost = searcher.evaluate(candidate, 0.0)
        assert cost.latency_s >= problem.bound_s * (1 - 1e-9)


@pytest.mark.parametrize("rank", RANKS)
def test_a_pool_of_any_size_holds_what_is_in_it(rank: Rank) -> None:
    graph = unet()
    pools = ActivationPools(graph, profile_of(graph))
    least, most = pools.least_bytes(), Footprint.of(graph).activation_bytes
    offloads = []
    for nbytes in range(least, most + 1, 8 * PAGE):
        actions = pools.within(nbytes, rank)
        assert actions is not None
        assert sequence_peak_bytes(pools.graph, actions, ()) <= nbytes
        offloads.append(sum(verb == SWAP_OUT for verb, _ in actions))
    assert offloads[0] > offloads[-1]
    assert pools.within(least - 1, rank) is None


def test_without_offloading_a_pool_takes_the_most_bytes_alive_at_once() -> None:
    graph = unet()
    pools = ActivationPools(graph, profile_of(graph))
    actions = pools.within(Footprint.of(graph).activation_bytes, RANKS[0])
    assert actions is not None
    assert not any(verb == SWAP_OUT for verb, _ in actions)
    assert sequence_peak_bytes(pools.graph, actions, ()) == peak_activation_bytes(graph)


def test_batch_sizes_share_their_residents() -> None:
    small, large = unet(3), replace(unet(3, 32 * PAGE), batch=2)
    model = ModelDemand(
        "model", {Bucket(1): small, Bucket(2): large}, {Bucket(1): profile_of(small), Bucket(2): profile_of(large)}
    )
    memory = split_budget(model.graphs, model.profiles, least_bytes(model) + 4 * PAGE)
    plans = plan_model(model, memory, None, quick=True)
    assert plans[Bucket(1)].residents == plans[Bucket(2)].residents
    assert swapped_out(plans[Bucket(2)])
    for batch, graph in model.graphs.items():
        check(graph, model.profiles[batch], plans[batch])


def test_models_share_memory_in_which_their_activations_do_not_stay() -> None:
    graph, other = unet(), chain([PAGE] * 4)
    models = [demand(graph, name="unet"), demand(other, name="chain")]
    memory = least_bytes(models[0]) + 6 * PAGE
    assert memory < plain_least(graph)
    division = divide(models, memory)
    plans = [plan_model(model, own)[Bucket(1)] for model, own in zip(models, division.memories, strict=True)]
    assert swapped_out(plans[0])
    assert not swapped_out(plans[1])
    assert division.workspace_bytes + sum(division.partition_bytes) <= memory


def test_one_more_model_finds_room_in_which_its_activations_must_be_offloaded() -> None:
    graph = unet()
    model = demand(graph)
    least = least_bytes(model)
    memory = fit(model, [Memory(least, 2 * PAGE)])
    assert memory is not None
    plan = plan_model(model, memory, None, quick=True)[Bucket(1)]
    assert swapped_out(plan)
    assert any(isinstance(step, SwapIn) and step.tensor in swapped_out(plan) for step in plan.steps)
    assert fit(model, [Memory(least - 4 * PAGE, 0)]) is None
