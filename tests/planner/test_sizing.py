"""Sizing: every layout fits, models that gain more get more, and a refusal names the least that would do."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from msgspec import structs

from cohabit.planner.check import check
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan, SwapIn
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing import division as division_module
from cohabit.planner.sizing.assignment import ModelTraffic, assign, load_bytes_per_s
from cohabit.planner.sizing.demand import MemoryDemand
from cohabit.planner.sizing.division import divide
from cohabit.planner.sizing.fitting import fit, plan_model, split_budget
from cohabit.planner.sizing.ladder import between, climb, first_plans_by_size, rungs
from cohabit.planner.sizing.problem import ONE_REGION, WHOLE_MODELS, Division, LayoutName, ModelDemand
from tests.support.planner.graphs import PAGE, chain, profile_of, unrolled


def model(name: str, pages: list[int], rate_per_s: float = 1.0, batches: tuple[int, ...] = (1, 4)) -> ModelDemand:
    """A chain; larger batches have larger activations and slower ops. A page takes two seconds on the link."""
    graphs = {Bucket(b): chain([PAGE * n for n in pages], PAGE * b, b) for b in batches}
    profiles = {b: profile_of(g, 1.0 + b.batch / 4, bandwidth=PAGE / 2) for b, g in graphs.items()}
    return ModelDemand(name, graphs, profiles, rate_per_s)


MODELS = [model("small", [1, 1, 2]), model("large", [2, 3, 1, 2, 4, 2], 5.0), model("other", [1, 3, 2, 2])]


def planned(models: list[ModelDemand], division: Division) -> list[dict[Bucket, Plan]]:
    """Plans of every model for its memory of a division."""
    return [
        plan_model(model.up_to(most), memory)
        for model, memory, most in zip(models, division.memories, division.most_batches, strict=True)
    ]


def verify(
    models: list[ModelDemand], memory_bytes: int, layout: LayoutName = "partitioned", lanes: int = 1
) -> None:
    """Workspaces and partitions fit into memory, and every plan may run."""
    division = divide(models, memory_bytes, layout, lanes=lanes)
    assert division.memory_bytes == memory_bytes // PAGE * PAGE
    largest = max(division.partition_bytes) if layout in WHOLE_MODELS else 0
    partitions = largest if layout in ONE_REGION else sum(division.partition_bytes)
    assert lanes * division.workspace_bytes + partitions <= division.memory_bytes
    for demand, plans, memory in zip(models, planned(models, division), division.memories, strict=True):
        assert memory.partition_bytes % PAGE == memory.workspace_bytes % PAGE == 0
        assert set(plans) == set(demand.graphs)
        assert len({plan.residents for plan in plans.values()}) == 1
        for bucket, plan in plans.items():
            assert plan.memory == memory
            check(demand.graphs[bucket], demand.profiles[bucket], plan)


@pytest.mark.parametrize("pages", [12, 13, 16, 20, 25, 30, 60])
def test_partitions_fit_any_memory_that_is_enough(pages: int) -> None:
    verify(MODELS, pages * PAGE + 100)


def test_a_refusal_names_the_op_with_the_largest_parameters_and_the_one_with_the_largest_activations() -> None:
    """op2's parameters and op0's activations: eight pages, A0 beside A1, are kept free for the whole inference."""
    even = chain([PAGE, PAGE, 3 * PAGE])
    tensors = [structs.replace(t, nbytes=7 * PAGE) if t.name == "A0" else t for t in even.tensors]
    graph = structs.replace(even, tensors=tuple(tensors))
    demand = ModelDemand("uneven", {Bucket(1): graph}, {Bucket(1): profile_of(graph)}, 1.0)
    with pytest.raises(
        InfeasibleBudget,
        match=r"op op2 \(12\.0 KiB of parameters\), above the activations of op0 \(32\.0 KiB\), needs a budget of 44",
    ) as refusal:
        divide([demand], 10 * PAGE)
    assert refusal.value.least_bytes == 11 * PAGE


def test_a_refusal_names_the_op_whose_scratch_makes_the_peak() -> None:
    """op1 has two pages of scratch. Its output lies above them, so that op2 uses the highest page, too, with half as
    many bytes alive."""
    even = chain([PAGE, PAGE, 3 * PAGE])
    first, second, third = even.ops
    graph = structs.replace(even, ops=(first, structs.replace(second, scratch_bytes=2 * PAGE), third))
    demand = ModelDemand("scratch", {Bucket(1): graph}, {Bucket(1): profile_of(graph)}, 1.0)
    with pytest.raises(InfeasibleBudget) as refusal:
        divide([demand], 5 * PAGE)
    assert refusal.value.op == "op2 (12.0 KiB of parameters), above the activations of op1 (16.0 KiB),"
    with pytest.raises(InfeasibleBudget) as refusal:  # all parameters are in the partition
        Footprint.of(graph).require(5 * PAGE, 3 * PAGE)
    assert refusal.value.op == "op1"


@pytest.mark.parametrize("layout", ["partitioned", "resident", "lru"])
def test_a_refusal_has_the_memory_that_was_given(layout: LayoutName) -> None:
    """Plans take whole pages; a smaller budget is not said to be 0 bytes."""
    with pytest.raises(InfeasibleBudget, match=r"the budget is 1\.0 KiB \(1024 bytes\)"):
        divide(MODELS, 1024, layout)


@pytest.mark.long
def test_more_memory_is_no_slower() -> None:
    def cost(pages: int) -> float:
        return sum(
            demand.rate_per_s * plan.provenance.latency_s
            for demand, plans in zip(MODELS, planned(MODELS, divide(MODELS, pages * PAGE)), strict=True)
            if (plan := plans[Bucket(1)]).provenance
        )

    costs = [cost(pages) for pages in (12, 16, 20, 26, 34)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


def test_the_busier_of_two_equal_models_gets_more() -> None:
    pair = [model("idle", [2, 2, 2, 2], 0.1), model("busy", [2, 2, 2, 2], 10.0)]
    idle_bytes, busy_bytes = divide(pair, 17 * PAGE).partition_bytes
    assert busy_bytes > idle_bytes


def test_of_two_models_with_the_same_copies_the_one_that_others_wait_for_longest_gets_more() -> None:
    graph = chain([2 * PAGE] * 4 + [0])
    pair = [
        ModelDemand(name, {Bucket(1): graph}, {Bucket(1): profile_of(graph, [1.0] * 4 + [last_s], PAGE / 2)})
        for name, last_s in (("short", 1.0), ("long", 100.0))
    ]
    short_bytes, long_bytes = divide(pair, 15 * PAGE).partition_bytes
    assert long_bytes > short_bytes


@pytest.mark.parametrize(
    ("layout", "pages", "says"),
    [
        ("partitioned", 4 + 8, "large: op op4 .* which is enough for all 3 models, the budget is"),
        ("resident", 26 + 8, "3 models"),
        ("time_shared", 14 + 8, "large.* which is enough for all 3 models"),
        ("lru", 14 + 8, "large.* which is enough for all 3 models"),
        ("pipelined", 4 + 8, "large: op op4"),
        ("on_demand", 4 + 8, "large: op op4"),
    ],
)
def test_the_least_memory_of_a_layout_is_exact(layout: LayoutName, pages: int, says: str) -> None:
    """Activations take two times four pages; all parameters 26, those of a model 14 at most, and of an op four."""
    verify(MODELS, pages * PAGE, layout)
    if layout in ("resident", "time_shared", "lru"):
        division = divide(MODELS, pages * PAGE, layout)
        for demand, plans in zip(MODELS, planned(MODELS, division), strict=True):
            graph = demand.graphs[Bucket(1)]
            residents = sum(graph.tensors[resident.tensor].nbytes for resident in plans[Bucket(1)].residents)
            assert residents == graph.parameter_bytes
    with pytest.raises(InfeasibleBudget, match=says) as refusal:
        divide(MODELS, (pages - 1) * PAGE, layout)
    assert refusal.value.least_bytes == pages * PAGE


@pytest.mark.parametrize("layout", get_args(LayoutName))
def test_no_models_need_no_memory(layout: LayoutName) -> None:
    assert divide([], 0, layout) == Division(0, 0, ())


def test_budget_is_split_where_latency_is_least() -> None:
    """No split that is tried by hand is faster."""
    demand = MODELS[1]
    memory = split_budget(demand.graphs, demand.profiles, 16 * PAGE)
    assert memory.nbytes == 16 * PAGE

    def latency_s(pages: int) -> float:
        problem = Problem(
            demand.graphs[Bucket(1)], demand.profiles[Bucket(1)], Memory(pages * PAGE, (16 - pages) * PAGE)
        )
        plan = search(problem, limit=Limit(evaluations=60))
        assert plan.provenance is not None
        return plan.provenance.latency_s

    assert latency_s(memory.workspace_bytes // PAGE) <= min(latency_s(pages) for pages in (8, 10, 12, 14, 16)) * 1.1


@pytest.mark.parametrize("pages", [24, 32, 40])
def test_a_recurrent_network_gets_the_workspace_in_which_it_needs_each_weight_once(pages: int) -> None:
    """Of 32 pages of weights; time steps then run layer by layer, with the states of all steps of a layer in memory."""
    graph = unrolled(4, 12, 8 * PAGE)
    profile = profile_of(graph, 1.0, bandwidth=PAGE / 1.0)
    demand = ModelDemand("recurrent", {Bucket(1): graph}, {Bucket(1): profile})
    division = divide([demand], pages * PAGE)
    for memory in (
        split_budget(demand.graphs, demand.profiles, pages * PAGE),
        Memory(division.workspace_bytes, division.partition_bytes[0]),
    ):
        for evaluations in (1, 200):
            plan = search(Problem(graph, profile, memory), limit=Limit(evaluations=evaluations))
            copied = [step.tensor for step in plan.steps if isinstance(step, SwapIn)]
            assert len(copied) <= 4


def test_one_more_model_takes_the_room_in_which_it_is_fastest() -> None:
    """`large` has 14 pages of parameters, two of activations at batch 4, and an op that needs four at once."""
    demand = MODELS[1]
    assert MemoryDemand.of(demand).with_offloading().least_bytes == 12 * PAGE
    assert fit(demand, []) is None
    assert fit(demand, [Memory(8 * PAGE, 3 * PAGE)]) is None, "an op's four pages lie neither here nor there"
    roomy, tight = Memory(8 * PAGE, 40 * PAGE), Memory(8 * PAGE, 4 * PAGE)
    assert fit(demand, [tight]) == tight
    assert fit(demand, [tight, roomy]) == Memory(8 * PAGE, 14 * PAGE), "no more than it can use"


def test_plans_of_one_model_are_found_again_and_a_quick_one_is_not_remembered(tmp_path: Path) -> None:
    demand, memory, library = MODELS[1], Memory(10 * PAGE, 6 * PAGE), Library(tmp_path)
    quick = plan_model(demand, memory, library, quick=True)
    assert library.plans(demand, memory, "best") is None
    plans = plan_model(demand, memory, library)
    assert library.plans(demand, memory, "best") == plans
    for batch in demand.graphs:
        check(demand.graphs[batch], demand.profiles[batch], quick[batch])
        best, first = plans[batch].provenance, quick[batch].provenance
        assert best is not None
        assert first is not None
        assert best.latency_s <= first.latency_s


def test_workspace_is_never_smaller_than_plans_that_stay_need() -> None:
    sizes = divide(MODELS, 30 * PAGE, least_workspace_bytes=15 * PAGE)
    assert sizes.workspace_bytes >= 15 * PAGE
    assert sizes.workspace_bytes + sum(sizes.partition_bytes) <= 30 * PAGE
    with pytest.raises(InfeasibleBudget):
        divide(MODELS, 30 * PAGE, least_workspace_bytes=31 * PAGE)


def measured_slower(model: ModelDemand) -> ModelDemand:
    slower = {b: structs.replace(p, compute_slowdown=1.5) for b, p in model.profiles.items()}
    return replace(model, profiles=slower)


def test_a_division_of_memory_is_found_again_for_the_same_models_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = Library(tmp_path)
    sizes = divide(MODELS, 30 * PAGE)
    library.store_division(MODELS, 30 * PAGE, "partitioned", 1, sizes)
    assert library.division(MODELS, 30 * PAGE, "partitioned", 1) == sizes
    busier = [replace(MODELS[0], rate_per_s=9.0), *MODELS[1:]]
    assert library.division(busier, 30 * PAGE, "partitioned", 1) is None
    assert library.division(MODELS, 31 * PAGE, "partitioned", 1) is None
    assert library.division(MODELS, 30 * PAGE, "resident", 1) is None
    assert library.division(MODELS, 30 * PAGE, "partitioned", 2) is None
    remeasured = [measured_slower(model) for model in MODELS]
    assert library.division(remeasured, 30 * PAGE, "partitioned", 1) is None
    assert library.division(remeasured, 30 * PAGE, "partitioned", 1, any_profiles=True) == sizes
    library.store_division(MODELS, 30 * PAGE, "partitioned", 1, sizes, rough=True)
    assert library.division(MODELS, 30 * PAGE, "partitioned", 1) is None
    assert library.division(MODELS, 30 * PAGE, "partitioned", 1, any_profiles=True) == sizes
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(path.read_bytes()[:-5])
    assert library.division(MODELS, 30 * PAGE, "partitioned", 1) is None
    assert "checksum does not fit" in vars(caplog.records[0])["fields"]["reason"]


WORKSPACE = 9 * PAGE


@pytest.fixture
def climbed(tmp_path: Path) -> Library:
    """A library with the ladder of every model for one workspace."""
    library = Library(tmp_path)
    for demand in MODELS:
        climb(demand, WORKSPACE, library)
    return library


@pytest.mark.long
def test_a_ladder_goes_from_the_least_size_to_all_resident_and_never_gets_slower(climbed: Library) -> None:
    for demand in MODELS:
        ladder = climbed.ladders(demand, "best")[WORKSPACE]
        sizes, latencies_s = [p.partition_bytes for p in ladder], [p.latency_s for p in ladder]
        every = [memory.partition_bytes for memory in rungs(demand, WORKSPACE)]
        assert sizes == [*every[: len(sizes) - 1], every[-1]]
        assert sizes == sorted(set(sizes))
        assert latencies_s == sorted(latencies_s, reverse=True)
        assert latencies_s[-1] == pytest.approx(demand.profiles[Bucket(1)].compute_s)
        for size in sizes:
            plans = climbed.plans(demand, Memory(WORKSPACE, size), "best")
            assert plans is not None
            assert plans.keys() == demand.graphs.keys()


@pytest.mark.long
def test_memory_for_all_parameters_has_plans_that_copy_nothing(climbed: Library) -> None:
    """Layouts with one region need such plans; smaller rungs may be as fast, but copy while they compute."""
    links = {b: profile_of(g, 1.0, bandwidth=100 * PAGE) for b, g in MODELS[1].graphs.items()}
    hidden = replace(MODELS[1], name="hidden", profiles=links)
    climb(hidden, WORKSPACE, climbed)
    assert len(climbed.ladders(hidden, "best")[WORKSPACE]) < len(rungs(hidden, WORKSPACE))
    for demand in (*MODELS, hidden):
        partition_bytes = MemoryDemand.of(demand).parameter_bytes
        for memory in (Memory(WORKSPACE, partition_bytes), Memory(WORKSPACE, partition_bytes + PAGE)):
            plans = climbed.plans_of_rung(demand, memory, "best")
            assert plans is not None
            assert not [step for plan in plans.values() for step in plan.steps if isinstance(step, SwapIn)]


@pytest.mark.long
def test_every_memory_that_holds_the_first_rungs_finds_safe_plans_without_a_search(
    climbed: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladders = [climbed.ladders(demand, "best") for demand in MODELS]
    least = WORKSPACE + sum(ladder[WORKSPACE][0].partition_bytes for ladder in ladders)

    def never(*arguments: object, **options: object) -> float:
        raise AssertionError("latencies were estimated")

    monkeypatch.setattr(division_module, "estimate_latency_s", never)
    for memory_bytes in range(least, 60 * PAGE, PAGE):
        found = divide(MODELS, memory_bytes, ladders=ladders)
        assert found.workspace_bytes == WORKSPACE
        assert WORKSPACE + sum(found.partition_bytes) <= memory_bytes
        for demand, memory in zip(MODELS, found.memories, strict=True):
            plans = climbed.plans_of_rung(demand, memory, "best")
            assert plans is not None
            for bucket, plan in plans.items():
                assert plan.memory == memory
                check(demand.graphs[bucket], demand.profiles[bucket], plan)
                assert plan.provenance is not None
                assert plan.provenance.latency_s >= plan.provenance.bound_s


@pytest.mark.long
def test_a_ladder_of_another_workspace_or_too_little_memory_is_not_used(climbed: Library) -> None:
    ladders = [climbed.ladders(demand, "best") for demand in MODELS]
    for memory_bytes, least_workspace in ((30 * PAGE, 15 * PAGE), (12 * PAGE, 0)):
        own = divide(MODELS, memory_bytes, least_workspace_bytes=least_workspace)
        assert own == divide(MODELS, memory_bytes, least_workspace_bytes=least_workspace, ladders=ladders)


@pytest.mark.long
def test_a_size_between_two_rungs_is_searched_from_both(climbed: Library) -> None:
    demand = MODELS[1]
    sizes = [p.partition_bytes for p in climbed.ladders(demand, "best")[WORKSPACE]]
    rung = next(i for i, (low, high) in enumerate(itertools.pairwise(sizes)) if high > low + PAGE)
    memory = Memory(WORKSPACE, sizes[rung] + PAGE)
    near = between(demand, memory, climbed)
    assert [plans[Bucket(1)].memory.partition_bytes for plans in near] == sizes[rung : rung + 2]
    plans = plan_model(demand, memory, climbed, neighbours=near)
    below, found = near[0][Bucket(1)].provenance, plans[Bucket(1)].provenance
    assert below is not None
    assert found is not None
    assert found.latency_s <= below.latency_s * (1 + 1e-9)


@pytest.mark.long
def test_rungs_that_are_not_planned_yet_have_quick_plans(tmp_path: Path) -> None:
    library, demand = Library(tmp_path), MODELS[1]
    quick = first_plans_by_size(demand, WORKSPACE, library)
    assert not any(searched for _, searched in quick)
    climb(demand, WORKSPACE, library)
    found = first_plans_by_size(demand, WORKSPACE, library)
    assert all(searched for _, searched in found)


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_every_lane_has_a_workspace_that_the_memory_has_to_hold(lanes: int) -> None:
    with pytest.raises(InfeasibleBudget) as refusal:
        divide(MODELS, PAGE, lanes=lanes)
    least = refusal.value.least_bytes
    with pytest.raises(InfeasibleBudget):
        divide(MODELS, least - PAGE, lanes=lanes)
    verify(MODELS, least, lanes=lanes)


def loads(models: list[ModelTraffic], engines: int, memory_bytes: int) -> list[float]:
    return [load_bytes_per_s(held, memory_bytes) for held in assign(models, engines, memory_bytes)]


def test_an_engine_that_holds_all_weights_only_reads_them_and_another_copies_the_rest_too() -> None:
    models = [ModelTraffic("a", 100, 2.0), ModelTraffic("b", 50, 4.0)]
    assert load_bytes_per_s(models, 150) == 100 * 2 + 50 * 4
    assert load_bytes_per_s(models, 50) == 100 * 2 + 50 * 4 + 100 * 2  # the higher rate is resident
    assert load_bytes_per_s(models, 0) == 2 * (100 * 2 + 50 * 4)


@pytest.mark.parametrize("memory_bytes", [0, 5, 10, 100])
def test_the_largest_load_is_at_most_a_third_above_the_best_assignment_of_single_copies(memory_bytes: int) -> None:
    draws = random.Random(0)
    for _ in range(60):
        engines = draws.choice((2, 3))
        models = [
            ModelTraffic(f"m{i}", draws.randint(1, 9), draws.choice((0.5, 1.0, 2.0, 8.0)))
            for i in range(draws.randint(1, 6))
        ]
        best = min(
            max(
                load_bytes_per_s([m for m, e in zip(models, choice, strict=True) if e == engine], memory_bytes)
                for engine in range(engines)
            )
            for choice in itertools.product(range(engines), repeat=len(models))
        )
        assert max(loads(models, engines, memory_bytes)) <= best * 4 / 3 + 1e-9


def test_every_model_has_an_engine_and_no_engine_has_it_twice_and_the_rates_add_up() -> None:
    models = [ModelTraffic(f"m{i}", 10 + i, 1.0 + (i == 3) * 20) for i in range(9)]
    held = assign(models, 4, 40, copies=2)
    assert all(len({m.name for m in engine}) == len(engine) for engine in held)
    for asked in models:
        assert sum(m.rate_per_s for engine in held for m in engine if m.name == asked.name) == pytest.approx(
            asked.rate_per_s
        )


def test_models_with_a_rate_above_the_mean_have_as_many_copies_as_asked_and_others_one() -> None:
    models = [ModelTraffic("busy", 1, 9.0), *(ModelTraffic(f"m{i}", 100, 1.0) for i in range(6))]
    held = assign(models, 3, 100, copies=2)
    counts = Counter(model.name for engine in held for model in engine)
    assert counts == {"busy": 2} | {f"m{i}": 1 for i in range(6)}


def test_a_model_with_more_than_an_even_part_of_the_load_is_copied_unasked() -> None:
    models = [ModelTraffic("huge", 100, 8.0), ModelTraffic("small", 100, 1.0)]
    held = assign(models, 3, 1000)
    assert sum(model.name == "huge" for engine in held for model in engine) == 3
    assert assign([models[0]], 2, 0) == ((replace(models[0], rate_per_s=4.0),),) * 2


def test_more_engines_than_models_leave_no_engine_idle_where_a_model_has_load() -> None:
    assert all(assign([ModelTraffic("a", 10, 1.0)], 4, 10))


def test_models_without_requests_are_assigned_too() -> None:
    held = assign([ModelTraffic("a", 10, 0.0), ModelTraffic("b", 10, 0.0)], 2, 10)
    assert [len(engine) for engine in held] == [1, 1]


def hungry(batches: tuple[int, ...] = (1, 2, 4, 8), splits: bool = True) -> ModelDemand:
    """A model whose activations grow with the batch, far beyond its parameters, and whose batches gain no time."""
    graphs = {Bucket(b): chain([PAGE] * 3, 8 * PAGE * b, b) for b in batches}
    profiles = {b: profile_of(g, 1.0 * b.batch, bandwidth=PAGE / 2) for b, g in graphs.items()}
    return ModelDemand("hungry", graphs, profiles, splits_batches=splits)


def latencies(models: list[ModelDemand], memory_bytes: int) -> float:
    """The sum over models of the smallest bucket's latency, by full searches."""
    made = [plans[Bucket(1)].provenance for plans in planned(models, divide(models, memory_bytes))]
    return sum(provenance.latency_s for provenance in made if provenance is not None)


@pytest.mark.long
def test_largest_batches_are_left_out_where_their_activations_cost_more_than_batching_gains() -> None:
    others = [replace(m, splits_batches=True) for m in MODELS]
    memory = 140 * PAGE
    division = divide([hungry(), *others], memory)
    assert division.most_batches[0] < 8
    assert division.most_batches[1:] == (4, 4, 4), "whose activations are small"
    assert division.workspace_bytes < 8 * 8 * PAGE * 2
    assert latencies([hungry(), *others], memory) < 0.7 * latencies([hungry(splits=False), *MODELS], memory)
    assert divide([hungry(splits=False), *MODELS], memory).most_batches == (8, 4, 4, 4)


def test_all_batches_stay_where_memory_is_enough_or_batching_gains_more() -> None:
    others = [replace(m, splits_batches=True) for m in MODELS]
    assert divide([hungry(), *others], 400 * PAGE).most_batches == (8, 4, 4, 4)
    graphs = hungry().graphs
    flat = {
        b: profile_of(g, 1000.0, bandwidth=PAGE / 2) for b, g in graphs.items()
    }  # a batch takes what a row takes
    gaining = replace(hungry(), profiles=flat, rate_per_s=1e6)
    assert divide([gaining, *others], 140 * PAGE).most_batches[0] == 8


def test_a_memory_that_is_too_small_for_all_batches_may_be_enough_for_fewer() -> None:
    models, memory = [hungry(), MODELS[0]], 60 * PAGE
    with pytest.raises(InfeasibleBudget):
        divide([hungry(splits=False), MODELS[0]], memory)
    division = divide(models, memory)
    assert division.most_batches[0] < 8
    own, _ = planned(models, division)
    assert set(own) == {Bucket(b) for b in (1, 2, 4, 8) if b <= division.most_batches[0]}
    with pytest.raises(InfeasibleBudget) as refused:
        divide(models, PAGE)
    assert divide(models, refused.value.least_bytes).most_batches[0] == 1


def test_a_model_by_itself_loses_batches_that_do_not_fit_and_keeps_them_in_more_memory() -> None:
    with pytest.raises(InfeasibleBudget):
        divide([hungry(splits=False)], 60 * PAGE)
    (most,) = divide([hungry()], 60 * PAGE).most_batches
    assert most < 8
    whole = sum(footprint.least_bytes for footprint in MemoryDemand.of(hungry()).footprints.values())
    assert divide([hungry()], whole).most_batches == (8,)


@pytest.mark.parametrize("pages", [15, 20, 30, 40])
def test_a_rough_division_fits_and_is_not_much_worse(pages: int) -> None:
    """Nothing is planned for it. Its plans are compared with those of a division by quick plans."""
    rough, exact = (divide(MODELS, pages * PAGE, rough=rough) for rough in (True, False))
    total = {}
    for name, division in (("rough", rough), ("exact", exact)):
        assert division.workspace_bytes + sum(division.partition_bytes) <= pages * PAGE
        total[name] = 0.0
        for demand, nbytes in zip(MODELS, division.partition_bytes, strict=True):
            plan = plan_model(demand, Memory(division.workspace_bytes, nbytes))[Bucket(1)]
            check(demand.graphs[Bucket(1)], demand.profiles[Bucket(1)], plan)
            assert plan.provenance is not None
            total[name] += demand.rate_per_s * plan.provenance.latency_s
    assert total["rough"] <= 1.3 * total["exact"]


def test_a_rough_division_refuses_what_the_other_refuses() -> None:
    with pytest.raises(InfeasibleBudget) as exact:
        divide(MODELS, PAGE)
    with pytest.raises(InfeasibleBudget) as rough:
        divide(MODELS, PAGE, rough=True)
    assert rough.value.least_bytes == exact.value.least_bytes
