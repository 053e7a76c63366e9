"""docs/plan-format.md is enough to write a checker from, and says what the code does."""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import cohabit.planner.graph
import cohabit.planner.plan
import cohabit.planner.profile
from cohabit.planner.check import check
from cohabit.planner.errors import CohabitError, FormatError, InvalidPlan
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn, SwapOut
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.serial import least_bytes, serial_schedule
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.schedule.table import columns, counted, peak_bytes
from cohabit.planner.schedule.write import write
from cohabit.planner.search.driver import search
from tests.support.planner.format_checker import Broken, Json, check_plan, graph_fingerprint
from tests.support.planner.graphs import (
    PAGE,
    chain,
    profile_of,
    random_actions,
    random_graph,
    random_profile,
    random_training_graph,
)

PAGE_OF_THE_FORMAT = Path(__file__).parents[2] / "docs" / "plan-format.md"
seeds = st.integers(0, 10**6)


def made(rng: random.Random) -> tuple[Graph, Profile, Plan]:
    """A plan by a serving search, by the serial rule, by one with recomputation, or of random actions."""
    kind = rng.choice(("genetic", "offloading", "serial", "random", "random", "on_demand"))
    is_training = kind not in ("genetic", "offloading") and rng.random() < 0.5
    graph = random_training_graph(rng, 4) if is_training else random_graph(rng, 8)
    profile = random_profile(rng, graph)
    if kind in ("genetic", "offloading"):
        partition = PAGE * rng.randint(0, 12)
        workspace = Footprint.of(graph).least_workspace_bytes(partition) + PAGE * rng.randint(0, 5)
        problem = Problem(graph, profile, Memory(workspace, partition))
        return graph, profile, search(problem, kind, limit=Limit(evaluations=12))
    memory = single_budget(least_bytes(graph) + PAGE * rng.randint(0, 20))
    problem = Problem(graph, profile, memory)
    if kind == "on_demand":
        return graph, profile, search(problem, "on_demand")
    if kind == "serial":
        return graph, profile, write(problem, serial_schedule(problem), memory.nbytes)
    actions, residents = random_actions(rng, graph)
    pool_bytes = peak_bytes(problem.arrays, *columns(actions), residents)
    problem = Problem(graph, profile, replace(memory, workspace_bytes=pool_bytes))
    schedule = counted(problem.arrays, *columns(actions), residents, pool_bytes)
    assert schedule is not None
    return graph, profile, write(problem, schedule, pool_bytes)


def as_json(graph: Graph, plan: Plan) -> tuple[Json, Json]:
    return json.loads(cohabit.planner.graph.encode(graph)), json.loads(cohabit.planner.plan.encode(plan))


def verdict(graph: Graph, plan: Json) -> str | None:
    """Why the real checker refuses a plan, or None."""
    try:
        check(graph, None, cohabit.planner.plan.decode(json.dumps(plan).encode()))
    except InvalidPlan as error:
        return str(error)
    return None


def other_verdict(graph: Json, plan: Json) -> str | None:
    try:
        check_plan(graph, plan)
    except Broken as error:
        return str(error)
    return None


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seeds)
def test_plans_that_are_made_satisfy_the_written_rules(seed: int) -> None:
    graph, _, plan = made(random.Random(seed))
    assert other_verdict(*as_json(graph, plan)) is None


def renumbered(plan: Json, where: Callable[[int], int | None]) -> Json:
    """Waits after steps have moved; `where` says which index a step has now, None for one that is gone."""
    for step in plan["steps"]:
        if "after" in step:
            step["after"] = [new for j in step["after"] if (new := where(j)) is not None]
    return plan


def remove_step(plan: Json, rng: random.Random) -> None:
    k = rng.randrange(len(plan["steps"]))
    del plan["steps"][k]
    renumbered(plan, lambda j: None if j == k else j - (j > k))


def repeat_step(plan: Json, rng: random.Random) -> None:
    k, at = rng.randrange(len(plan["steps"])), rng.randrange(len(plan["steps"]) + 1)
    renumbered(plan, lambda j: j + (j >= at))
    plan["steps"].insert(at, json.loads(json.dumps(plan["steps"][k])))


def swap_neighbours(plan: Json, rng: random.Random) -> None:
    if len(plan["steps"]) > 1:
        k = rng.randrange(len(plan["steps"]) - 1)
        plan["steps"][k : k + 2] = plan["steps"][k : k + 2][::-1]
        renumbered(plan, lambda j: {k: k + 1, k + 1: k}.get(j, j))


def forget_a_wait(plan: Json, rng: random.Random) -> None:
    if waiting := [s for s in plan["steps"] if s.get("after")]:
        step = rng.choice(waiting)
        step["after"].remove(rng.choice(step["after"]))


def wait_for_another(plan: Json, rng: random.Random) -> None:
    if waiting := [s for s in plan["steps"] if "after" in s]:
        rng.choice(waiting)["after"].append(rng.randint(-1, len(plan["steps"])))


def forget_a_save(plan: Json, rng: random.Random) -> None:
    if saves := [k for k, s in enumerate(plan["steps"]) if s["type"] == "swap_out"]:
        k = rng.choice(saves)
        del plan["steps"][k]
        renumbered(plan, lambda j: None if j == k else j - (j > k))


def addresses(plan: Json) -> list[Json]:
    placed = (*plan["residents"], *(s for s in plan["steps"] if s["type"] == "swap_in"))
    return [p["address"] for p in placed if p["address"] is not None]


def move(plan: Json, rng: random.Random) -> None:
    if where := addresses(plan):
        address = rng.choice(where)
        address["offset"] += rng.choice((-PAGE, PAGE, 64, -256, 1))


def other_region(plan: Json, rng: random.Random) -> None:
    if where := addresses(plan):
        address = rng.choice(where)
        address["region"] = "workspace" if address["region"] == "partition" else "partition"


def rename(plan: Json, rng: random.Random) -> None:
    step = rng.choice(plan["steps"])
    field = "op" if step["type"] == "compute" else "tensor"
    step[field] += rng.choice((-1, 1))


def shrink(plan: Json, rng: random.Random) -> None:
    plan["memory"][rng.choice(("partition_bytes", "workspace_bytes"))] += rng.choice((-PAGE, PAGE, -64))


def shrink_pool(plan: Json, rng: random.Random) -> None:
    plan["pool_bytes"] += rng.choice((-PAGE, PAGE, -64, -1))


def count_otherwise(plan: Json, _: random.Random) -> None:
    plan["memory"]["counted"] = not plan["memory"]["counted"]


def forget_an_address(plan: Json, rng: random.Random) -> None:
    """Or give one to what has none."""
    if placed := [*plan["residents"], *(s for s in plan["steps"] if s["type"] == "swap_in")]:
        chosen = rng.choice(placed)
        has_none = chosen["address"] is None
        chosen["address"] = {"region": "workspace", "offset": plan["pool_bytes"]} if has_none else None


def forget_a_resident(plan: Json, rng: random.Random) -> None:
    if plan["residents"]:
        plan["residents"].pop(rng.randrange(len(plan["residents"])))


def drop_early(plan: Json, rng: random.Random) -> None:
    """A drop of whatever some step uses, and a swap-in later."""
    at = rng.randrange(len(plan["steps"]) + 1)
    tensors = [p["tensor"] for p in plan["residents"]] or [s["tensor"] for s in plan["steps"] if "tensor" in s]
    renumbered(plan, lambda j: j + (j >= at))
    plan["steps"].insert(at, {"type": "drop", "tensor": rng.choice(tensors or [0])})


def save_early(plan: Json, rng: random.Random) -> None:
    """A swap-out of whatever some step uses, without any wait."""
    at = rng.randrange(len(plan["steps"]) + 1)
    tensor = rng.choice([s["tensor"] for s in plan["steps"] if "tensor" in s] or [0])
    renumbered(plan, lambda j: j + (j >= at))
    after = [rng.randrange(at)] if at and rng.random() < 0.5 else []
    plan["steps"].insert(at, {"type": "swap_out", "tensor": tensor, "after": after})


BREAKS: tuple[Callable[[Any, random.Random], None], ...] = (
    remove_step,
    repeat_step,
    swap_neighbours,
    forget_a_wait,
    wait_for_another,
    move,
    other_region,
    rename,
    shrink,
    shrink_pool,
    count_otherwise,
    forget_an_address,
    forget_a_resident,
    drop_early,
    forget_a_save,
    save_early,
)


@pytest.mark.long
def test_broken_plans_are_told_by_the_written_rules() -> None:
    """Both checkers say the same of plans with one or two things changed, some of which still may run."""
    rules = compare(random.Random(7), 70)
    assert rules["may run"] > 100
    assert len(rules) >= 17, rules  # the few rules that are left are about rare changes in place


def compare(rng: random.Random, plans: int) -> Counter[str]:
    """Break plans, and count what the written rules say, which must be what the checker says."""
    rules: Counter[str] = Counter()
    for _ in range(plans):
        graph, _, plan = made(rng)
        if not plan.steps:
            continue
        data, original = as_json(graph, plan)
        for _ in range(24):
            changed = json.loads(json.dumps(original))
            for _ in range(rng.choice((1, 1, 2))):
                if changed["steps"]:
                    rng.choice(BREAKS)(changed, rng)
            ours, theirs = verdict(graph, changed), other_verdict(data, changed)
            assert (ours is None) == (theirs is None), f"{ours}; {theirs}"
            rules[theirs.partition(":")[0] if theirs else "may run"] += 1
    return rules


def training_step(*steps: Step, counted: bool = False) -> tuple[Graph, Plan]:
    """`forward` reads the weights, `update` changes them; the weights start in memory."""
    tensors = (Tensor("w", 64, "state"), Tensor("x", 64, "input"), Tensor("y", 64, "activation"))
    ops = (Op("forward", "mm", (0, 1), (2,)), Op("update", "add_", (0, 2), (), 0, (0,)))
    graph = Graph("step", 1, "", tensors, ops, (2,))
    resident = Placement(0, None if counted else HOME)
    memory = single_budget(192) if counted else Memory(192, 64)
    return graph, Plan(graph.fingerprint, "", memory, 192, (resident,), steps)


HOME = Address("partition", 0)
FORWARD, UPDATE = Compute(0), Compute(1)


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        (None, (FORWARD, UPDATE)),
        (None, (SwapOut(0), FORWARD, replace(UPDATE, after=(0,)))),
        (None, (FORWARD, UPDATE, SwapOut(0, (1,)), Drop(0), SwapIn(0, HOME, (2,)))),
        (14, (FORWARD, UPDATE, SwapOut(0, (0,)))),
        (17, (SwapOut(0), FORWARD, UPDATE)),
        (19, (FORWARD, UPDATE, UPDATE)),
        (13, (FORWARD, UPDATE, Drop(0), SwapIn(0, HOME, (1,)))),
        (21, (FORWARD, UPDATE, SwapOut(0, (1,)), Drop(0), SwapIn(0, None, (2,)))),
    ],
)
def test_changes_in_place_follow_the_written_rules(rule: int | None, steps: tuple[Step, ...]) -> None:
    assert broken_rule(*training_step(*steps)) == rule


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        (None, (FORWARD, UPDATE)),
        (None, (FORWARD, UPDATE, SwapOut(0, (1,)), Drop(0), SwapIn(0, None, (2,)))),
        (9, (SwapOut(0), Drop(0), SwapIn(0, None, (0,)), replace(FORWARD, after=(2,)), UPDATE)),
        (None, (FORWARD, SwapOut(0), Drop(0), SwapIn(0, None, (0, 1)), replace(UPDATE, after=(3,)))),
        (16, (FORWARD, SwapOut(0), Drop(0), SwapIn(0, None, (1,)), replace(UPDATE, after=(3,)))),
        (5, (FORWARD, UPDATE, SwapOut(0, (1,)), Drop(0), SwapIn(0, HOME, (2,)))),
    ],
)
def test_state_that_is_counted_follows_the_written_rules(rule: int | None, steps: tuple[Step, ...]) -> None:
    assert broken_rule(*training_step(*steps, counted=True)) == rule


def broken_rule(graph: Graph, plan: Plan) -> int | None:
    """The number of the written rule that a plan breaks, if any; the checker says as well whether it may run."""
    data, plain = as_json(graph, plan)
    ours, theirs = verdict(graph, plain), other_verdict(data, plain)
    assert (ours is None) == (theirs is None), f"{ours}; {theirs}"
    return None if theirs is None else int(theirs.partition(":")[0])


def test_numbers_are_read_before_later_ops_as_the_written_rules_say() -> None:
    tensors = (Tensor("x", 64, "input"), Tensor("y", 64, "activation"))
    ops = (Op("item", "item", (0,), ()), Op("scale", "mul", (0,), (1,)))
    graph = Graph("scaled", 1, "", tensors, ops, (1,))
    for order, rule in (((0, 1), None), ((0, 1, 0), None), ((1, 0), 18)):
        steps = tuple(Compute(k) for k in order)
        assert broken_rule(graph, Plan(graph.fingerprint, "", Memory(256, 0, True), 256, (), steps)) == rule


def test_bytes_that_may_still_be_in_use_are_counted() -> None:
    """x comes back next to w, and to y, which may be on its way out, once `forward` and x's swap-out have ended."""
    tensors = (Tensor("w", 60, "parameter"), Tensor("x", 60, "input"), Tensor("y", 60, "activation"))
    ops = (Op("forward", "mm", (0, 1), (2,)), Op("use", "sum", (1,), ()))
    graph = Graph("saved", 1, "", tensors, ops, ())
    for pool_bytes, after, rule in ((192, (0,), 16), (192, (0, 1), None), (192, (3,), None), (191, (3,), 8)):
        steps = (SwapOut(1), FORWARD, Drop(1), SwapOut(2, (1,)), Drop(2), SwapIn(1, None, after), Compute(1, (5,)))
        plan = Plan(graph.fingerprint, "", Memory(192, 0, True), pool_bytes, (Placement(0),), steps)
        assert broken_rule(graph, plan) == rule


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        (None, (SwapIn(1), Drop(1), replace(FORWARD, after=(0,)))),
        (23, (SwapIn(1), Drop(1), FORWARD)),
        (23, (FORWARD, SwapIn(1))),
        (None, (FORWARD, Drop(0), SwapIn(0, None, (0,)))),
    ],
)
def test_only_residents_may_arrive_while_the_next_inference_runs(rule: int | None, steps: tuple[Step, ...]) -> None:
    """It takes the bytes of everything else as free: of V, which nothing reads, too."""
    tensors = (Tensor("w", 64, "parameter"), Tensor("v", 64, "parameter"), Tensor("y", 64, "activation"))
    graph = Graph("unread", 1, "", tensors, (Op("forward", "mm", (0,), (2,)),), ())
    assert (
        broken_rule(graph, Plan(graph.fingerprint, "", Memory(256, 0, True), 256, (Placement(0),), steps)) == rule
    )


def test_state_that_is_no_resident_is_saved_by_the_end() -> None:
    graph, plan = training_step(SwapIn(0, HOME), replace(FORWARD, after=(0,)), UPDATE)
    for steps, rule in ((plan.steps, 22), ((*plan.steps, SwapOut(0, (2,))), None)):
        assert broken_rule(graph, replace(plan, residents=(), steps=steps)) == rule


def test_example_of_the_page_is_right() -> None:
    """Its files are what they say they are, the plan may run, and takes the time that the page gives."""
    graph, profile, plan = (
        decode(text.encode())
        for decode, text in zip(
            (cohabit.planner.graph.decode, cohabit.planner.profile.decode, cohabit.planner.plan.decode),
            re.findall(r"```json\n(.*?)```", PAGE_OF_THE_FORMAT.read_text(), re.DOTALL),
            strict=True,
        )
    )
    assert isinstance(graph, Graph)
    assert isinstance(profile, Profile)
    assert isinstance(plan, Plan)
    assert profile.graph == graph.fingerprint
    check(graph, profile, plan)
    assert other_verdict(*as_json(graph, plan)) is None
    timeline = simulate(graph, plan, profile)
    assert timeline.latency_s == pytest.approx(0.0036)
    computed_s = sum(s.end_s - s.start_s for s in timeline.spans if s.lane == "compute")
    assert timeline.latency_s - computed_s == pytest.approx(0.0006)
    assert timeline.period_s == pytest.approx(0.0042)


def test_page_names_every_field_and_no_other() -> None:
    text = PAGE_OF_THE_FORMAT.read_text()
    tables = set(re.findall(r"`(\w+)`", text))
    structs = (
        cohabit.planner.graph.Graph,
        cohabit.planner.graph.Tensor,
        cohabit.planner.graph.Op,
        cohabit.planner.profile.Profile,
        cohabit.planner.profile.Link,
        cohabit.planner.plan.Plan,
        Memory,
        cohabit.planner.plan.Placement,
        cohabit.planner.plan.Address,
        cohabit.planner.plan.Compute,
        cohabit.planner.plan.SwapIn,
        cohabit.planner.plan.SwapOut,
        cohabit.planner.plan.Drop,
        cohabit.planner.plan.Provenance,
    )
    for struct in structs:
        assert set(struct.__struct_encode_fields__) <= tables, struct
    listed = set(re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", text, re.MULTILINE))
    fields = {name for struct in structs for name in struct.__struct_encode_fields__}
    types = {"type", "compute", "swap_in", "swap_out", "drop"}
    assert {name for pair in listed for name in pair if name} <= fields | types


def test_fingerprints_are_those_of_the_files() -> None:
    for seed in range(20):
        graph, profile, plan = made(random.Random(seed))
        graph = replace(graph, name='a "näme" \\ \n')
        data, _ = as_json(graph, plan)
        assert graph_fingerprint(data) == graph.fingerprint
        assert hashlib.sha256(cohabit.planner.profile.encode(profile)).hexdigest() == profile.fingerprint
        assert hashlib.sha256(cohabit.planner.plan.encode(plan)).hexdigest() == plan.fingerprint


GRAPH = chain([PAGE] * 3)
PROFILE = profile_of(GRAPH, op_s=0.25)
PLAN = search(Problem(GRAPH, PROFILE, Memory(4 * PAGE, PAGE)), limit=Limit(evaluations=4))


def read_all(graph: bytes, profile: bytes, plan: bytes) -> None:
    read = cohabit.planner.graph.decode(graph)
    check(read, cohabit.planner.profile.decode(profile), cohabit.planner.plan.decode(plan))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (',"format_version":99}', "has format version 99, this version of Cohabit reads {own}; upgrade Cohabit"),
        (',"format_version":0}', "has format version 0, this version of Cohabit reads {own}; make the"),
        (',"format_version":"1"}', "truncated"),
        (',"format_version":{own},"more":1}', "unknown field `more`"),
        ("}", "missing required field `format_version`"),
        (',"format_version":{own}', "truncated"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_the_reason(which: int, fields: str, says: str) -> None:
    files = [
        cohabit.planner.graph.encode(GRAPH),
        cohabit.planner.profile.encode(PROFILE),
        cohabit.planner.plan.encode(PLAN),
    ]
    own = str((GRAPH, PROFILE, PLAN)[which].format_version)
    end = f',"format_version":{own}}}'.encode()
    assert files[which].endswith(end)
    files[which] = files[which].removesuffix(end) + fields.replace("{own}", own).encode()
    with pytest.raises(FormatError, match=re.escape(says.replace("{own}", own))):
        read_all(*files)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_truncated_files_are_refused(share: float) -> None:
    for raw, decode in (
        (cohabit.planner.graph.encode(GRAPH), cohabit.planner.graph.decode),
        (cohabit.planner.profile.encode(PROFILE), cohabit.planner.profile.decode),
        (cohabit.planner.plan.encode(PLAN), cohabit.planner.plan.decode),
    ):
        assert callable(decode)
        with pytest.raises(FormatError, match="truncated"):
            decode(raw[: int(len(raw) * share)])


@pytest.mark.parametrize(
    ("which", "old", "new", "says"),
    [
        (0, b'"nbytes":4096', b'"nbytes":64', "made for"),
        (0, b'"scratch_bytes":0', b'"scratch_bytes":64', "made for"),
        (1, b"0.25", b"0.5", "made for"),
        (2, b'"offset":0', b'"offset":4096', "plan refused"),
        (2, b'"offset":0', b'"offset":0.5', "Expected `int`, got `float`"),
        (2, b'"region":"partition"', b'"region":"elsewhere"', "Invalid enum value"),
        (2, b'"type":"swap_in"', b'"type":"swap"', "Invalid value 'swap'"),
        (2, b'"after":[', b'"after":[99,', "plan refused"),
    ],
)
def test_edited_files_are_refused_with_the_reason(which: int, old: bytes, new: bytes, says: str) -> None:
    files = [
        cohabit.planner.graph.encode(GRAPH),
        cohabit.planner.profile.encode(PROFILE),
        cohabit.planner.plan.encode(PLAN),
    ]
    files[which] = files[which].replace(old, new, 1).replace(b'"after":[99,]', b'"after":[99]')
    with pytest.raises(CohabitError, match=re.escape(says)):
        read_all(*files)
