"""The analysis of a plan and its drawings: bytes never shared, stalls that add up, a self-contained page."""

import base64
import hashlib
import io
import json
import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from cohabit.page.html import report_page
from cohabit.planner.check import check
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.serial import least_bytes, serial_schedule
from cohabit.planner.schedule.table import (
    COMPUTE,
    DROP,
    NOTHING,
    SWAP_IN,
    SWAP_OUT,
    WORKSPACE,
    Row,
    scheduled,
)
from cohabit.planner.schedule.write import write
from cohabit.planner.search.driver import search
from cohabit.server.view.analysis import LANES, PlanAnalysis, analyze, bytes_in_use
from cohabit.server.view.plan_document import plan_document
from cohabit.server.view.terminal import draw
from tests.support.planner.graphs import (
    PAGE,
    chain,
    hand_written_plan,
    profile_of,
    random_graph,
    random_profile,
    random_training_graph,
)

seeds = st.integers(0, 10**6)


def serial_plan(graph: Graph, profile: Profile) -> Plan:
    problem = Problem(graph, profile, single_budget(least_bytes(graph)))
    return write(problem, serial_schedule(problem), problem.memory.nbytes)


def random_analysis(seed: int) -> PlanAnalysis:
    rng = random.Random(seed)
    graph = random_training_graph(rng) if rng.random() < 0.5 else random_graph(rng)
    profile = random_profile(rng, graph)
    if rng.random() < 0.5:
        return analyze(graph, profile, serial_plan(graph, profile))
    memory = single_budget(least_bytes(graph) + PAGE * rng.randint(0, 20))
    return analyze(graph, profile, search(Problem(graph, profile, memory), "on_demand"))


def hand_written_analysis() -> PlanAnalysis:
    graph = chain([PAGE] * 3)
    profile = profile_of(graph)
    return analyze(graph, profile, hand_written_plan(graph, profile))


def drawn(shown: PlanAnalysis, width: int = 100) -> str:
    text = io.StringIO()
    draw(shown, Console(file=text, width=width, highlight=False))
    return text.getvalue()


def page(shown: PlanAnalysis) -> str:
    return report_page(plan_document(shown))


def test_picture_of_the_hand_written_plan() -> None:
    """op2 waits a second for W2, which takes the bytes that W1 has left."""
    shown = hand_written_analysis()
    assert [(s.start_s, s.end_s, s.step, s.waits_for) for s in shown.stalls] == [(2, 3, 7, 6)]
    occupied = {(s.kind, shown.graph.tensors[s.what].name): (s.start_s, s.end_s) for s in shown.occupancies}
    assert occupied == {
        ("resident", "W0"): (0, 4),
        ("parameter", "W1"): (0, 2),
        ("parameter", "W2"): (2, 4),
        ("input", "A0"): (0, 1),
        ("activation", "A1"): (0, 2),
        ("activation", "A2"): (1, 4),
        ("activation", "A3"): (3, 4),
    }
    assert [(t.tensor, t.swapped_in, t.swapped_out, t.nbytes) for t in shown.traffic] == [
        (1, 1, 0, PAGE),
        (2, 1, 0, PAGE),
    ]
    assert shown.slowed_s == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_no_byte_is_drawn_twice_at_a_time(seed: int) -> None:
    shown = random_analysis(seed)
    for i, one in enumerate(shown.occupancies):
        assert 0 <= one.start_s <= one.end_s <= shown.end_s
        start, end = one.drawn_at, one.drawn_at + one.drawn_bytes
        assert 0 <= start <= end <= shown.memory_bytes
        assert one.drawn_bytes == one.nbytes or not one.has_address
        for other in shown.occupancies[i + 1 :]:
            together_s = min(one.end_s, other.end_s) - max(one.start_s, other.start_s)
            shared = min(end, other.drawn_at + other.drawn_bytes) - max(start, other.drawn_at)
            assert together_s <= 1e-9 or shared <= 0
    assert shown.peak_bytes <= shown.memory_bytes


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seeds)
def test_stalls_and_copies_add_up(seed: int) -> None:
    shown = random_analysis(seed)
    busy_s = sum(s.end_s - s.start_s for s in shown.timeline.spans if s.lane == "compute")
    assert shown.stall_s == pytest.approx(shown.timeline.latency_s - busy_s, abs=1e-6)
    assert sum(t.nbytes for t in shown.traffic) == shown.timeline.link_bytes
    ends = {s.step: s.end_s for s in shown.timeline.spans}
    for stall in shown.stalls:
        assert stall.waits_for is not None
        assert ends[stall.waits_for] == pytest.approx(stall.end_s)
    assert all(sum(now.values()) >= 0 for _, now in bytes_in_use(shown.occupancies))


def test_terminal_shows_lanes_stalls_and_memory() -> None:
    lines = drawn(hand_written_analysis()).splitlines()

    def row(label: str) -> str:
        (line,) = (line for line in lines if line.startswith(f"{label} ") and len(line) > 40)
        return line[11:82]

    compute, stalled, swap_in = row("compute"), row("  stalled"), row("swap in")
    assert len(compute) == len(stalled) == len(swap_in)
    for busy, waiting in zip(compute, stalled, strict=True):
        assert (busy == "█") != (waiting == "█") or "█" not in (busy, waiting)
    assert compute.count("█") == pytest.approx(71 * 3 / 4, abs=2)
    assert swap_in[:17] == "█" * 17
    assert "not used" in next(line for line in lines if line.startswith("swap out"))
    assert lines[-1] == "longest stall: 1000 ms at 2000 ms, op op2 waits for the swap-in of W2"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_terminal_drawing_keeps_to_the_width(width: int) -> None:
    for seed in range(6):
        assert max(map(len, drawn(random_analysis(seed), width).splitlines())) <= max(width, 60)


class Tags(HTMLParser):
    """Which tags are open, which attributes there are."""

    VOID = frozenset(("meta", "link", "br"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_page_is_well_formed_and_needs_nothing_from_outside() -> None:
    text = page(random_analysis(3))
    tags = Tags(text)
    assert tags.open == []
    assert not {name for name, _ in tags.attributes} & {"src", "srcset", "action"}
    assert [value for name, value in tags.attributes if name == "href"] == ["data:,"], "no icon is asked for"
    assert "url(" not in text
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}, (
        "a namespace, not an address"
    )
    assert "$" not in text.partition("<script")[0]


def test_the_policy_of_a_page_permits_its_own_script_and_style_alone() -> None:
    text = page(random_analysis(3))
    (policy,) = (
        value for name, value in Tags(text).attributes if name == "content" and "default-src" in str(value)
    )
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (script, style)]
    assert policy is not None
    assert policy.startswith(
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; connect-src 'none';"
    )
    assert "unsafe" not in policy


def test_page_has_every_step_stall_and_occupancy() -> None:
    for seed in range(8):
        shown = random_analysis(seed)
        chart = data_of(page(shown))["sections"][0]["chart"]
        words = chart["words"]

        def told(box: Any, words: list[Any] = words) -> list[Any]:
            return [words[at] for at in box[3]]

        for (lane, name), row in zip(LANES, chart["lanes"], strict=True):
            assert row["name"] == name
            spans = [span for span in shown.timeline.spans if span.lane == lane]
            steps = [box for box in row["boxes"] if box[2] == lane]
            assert [box[:2] for box in steps] == [times_of(span) for span in spans]
            assert [f"step {span.step}" in told(box) for span, box in zip(spans, steps, strict=True)] == [
                True
            ] * len(spans)
        stalls = [box for box in chart["lanes"][0]["boxes"] if box[2] == "stall"]
        assert [box[:2] for box in stalls] == [times_of(stall) for stall in shown.stalls]
        drawn = [o for o in shown.occupancies if o.nbytes]
        assert [[box[2], *box[5:], *box[:2]] for box in chart["memory"]["boxes"]] == [
            [o.kind, o.drawn_at, o.drawn_at + o.drawn_bytes, *times_of(o)] for o in drawn
        ]


def times_of(one: Any) -> list[Any]:
    return [pytest.approx(one.start_s, abs=1e-9), pytest.approx(one.end_s, abs=1e-9)]


def test_a_stall_says_what_it_waits_for() -> None:
    lanes, columns = data_of(page(hand_written_analysis()))["sections"]
    chart = lanes["chart"]
    (stall,) = (box for box in chart["lanes"][0]["boxes"] if box[2] == "stall")
    assert [chart["words"][at] for at in stall[3]] == ["stall", "op op2 waits for the swap-in of W2"]
    (table,) = (one for column in columns["columns"] for one in column if one["title"] == "Stalls")
    assert table["rows"] == [[[1.0, "s"], [2.0, "s"], "op2", "swap-in of W2"]]


def test_names_from_a_model_are_no_markup() -> None:
    evil = "</script><script>alert(1)</script><b>&"
    shown = hand_written_analysis()
    tensors = tuple(replace(t, name=evil) for t in shown.graph.tensors)
    graph = replace(
        shown.graph, name=evil, tensors=tensors, ops=tuple(replace(o, name=evil) for o in shown.graph.ops)
    )
    text = page(analyze(graph, shown.profile, shown.plan))
    assert Tags(text).open == []
    assert "<script>alert" not in text
    assert evil in data_of(text)["sections"][0]["chart"]["words"]
    assert data_of(text)["title"] == f"{evil}, batch 1"
    assert evil in drawn(analyze(graph, shown.profile, shown.plan), 200)


def long_plan(count: int) -> tuple[Graph, Profile, Plan]:
    """A chain whose weights all pass through two places, activations through three."""
    tensors = [Tensor(f"encoder.layers.{i}.attention.weight", PAGE, "parameter", PAGE) for i in range(count)]
    tensors += [Tensor(f"activation_{i}", 1000, "activation" if i else "input") for i in range(count + 1)]
    ops = [Op(f"linear_{i}", "aten.linear", (i, count + i), (count + i + 1,), 64) for i in range(count)]
    graph = Graph("long", 1, "", tuple(tensors), tuple(ops), (2 * count,))
    pool, rows = 2 * PAGE, list[Row]()
    for i in range(count):
        rows.append((SWAP_IN, i, WORKSPACE + pool + i % 2 * PAGE, max(i - 2, NOTHING)))
        rows.append((COMPUTE, i, NOTHING, NOTHING))
        rows += [(DROP, i, NOTHING, NOTHING), (DROP, count + i, NOTHING, NOTHING)]
        if i % 2:
            rows.append((SWAP_OUT, count + i + 1, NOTHING, NOTHING))
    problem = Problem(graph, profile_of(graph), Memory(4 * PAGE))
    schedule = scheduled(problem.arrays, rows, {}, pool)
    return graph, problem.profile, write(problem, schedule, pool)


def test_page_of_five_thousand_steps_stays_small() -> None:
    graph, profile, plan = long_plan(1150)
    check(graph, profile, plan)
    assert len(plan.steps) > 5000
    assert len(page(analyze(graph, profile, plan)).encode()) < 2 << 20


def test_a_graph_without_ops_can_be_shown() -> None:
    graph = Graph("empty", 1, "", (Tensor("x", 64, "input"),), (), (0,))
    profile = profile_of(graph)
    shown = analyze(graph, profile, serial_plan(graph, profile))
    assert "empty, batch 1" in drawn(shown)
    assert Tags(page(shown)).open == []
